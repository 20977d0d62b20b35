package walobject

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

// Prefix is what the names of all combined objects of a cluster begin with.
func Prefix(clusterID string) string { return clusterID + "/wal/" }

// Name is an object's name in the bucket:
//
//	<cluster id>/wal/<8 hex: hash of the rest>-<incarnation, 8 hex>-<rlm epoch, 16 hex>-<sequence, 16 hex>-<attempt, 4 hex>
//
// The hash (the low 32 bits of XXH3-64 of what follows its dash) spreads
// neighbours in time over the store's key space. The name follows from the
// object's identity alone, so whoever knows that can read the object.
func Name(clusterID string, ref *logv1.ObjectRef) string {
	rest := fmt.Sprintf("%08x-%016x-%016x-%04x", ref.GetIncarnation(), uint64(ref.GetRlmEpoch()), uint64(ref.GetSequence()), uint32(ref.GetAttempt()))
	return fmt.Sprintf("%s%08x-%s", Prefix(clusterID), uint32(xxh3.HashString(rest)), rest)
}

// ParseName is the inverse of [Name]. It fails with [ErrCorrupt] on anything
// that Name does not make.
func ParseName(name string) (clusterID string, ref *logv1.ObjectRef, err error) {
	bad := func(reason string) (string, *logv1.ObjectRef, error) {
		return "", nil, fail(ErrCorrupt, "name", "%q: %s", name, reason)
	}
	dir, file, ok := cutLast(name, "/wal/")
	if !ok || dir == "" || strings.Contains(dir, "/") {
		return bad("not <cluster id>/wal/<object>")
	}
	parts := strings.Split(file, "-")
	if len(parts) != 5 {
		return bad("not five parts")
	}
	var n [5]uint64
	for i, bits := range [5]int{32, 32, 64, 64, 32} {
		if n[i], err = strconv.ParseUint(parts[i], 16, bits); err != nil {
			return bad("part that is no hexadecimal number")
		}
	}
	ref = &logv1.ObjectRef{Incarnation: uint32(n[1]), RlmEpoch: int64(n[2]), Sequence: int64(n[3]), Attempt: int32(n[4])}
	if err := CheckRef(ref); err != nil {
		return bad("no such object can exist")
	}
	if Name(dir, ref) != name {
		return bad("hash or spelling differ from the name of that object")
	}
	return dir, ref, nil
}

// CheckRef returns an error that matches [ErrInvalid] unless ref can name an
// object: incarnation within 31 bits and not 0, a registered rlm epoch,
// sequence and attempt from 1.
func CheckRef(ref *logv1.ObjectRef) error {
	switch {
	case ref == nil:
		return fail(ErrInvalid, "name", "no object named")
	case ref.GetIncarnation() == 0 || ref.GetIncarnation() > 1<<31-1:
		return fail(ErrInvalid, "name", "incarnation %d is not within 1..2^31-1", ref.GetIncarnation())
	case ref.GetRlmEpoch() < 0:
		return fail(ErrInvalid, "name", "rlm epoch %d is negative", ref.GetRlmEpoch())
	case ref.GetSequence() < 1:
		return fail(ErrInvalid, "name", "sequence %d is not from 1", ref.GetSequence())
	case ref.GetAttempt() < 1 || ref.GetAttempt() > MaxAttempt:
		return fail(ErrInvalid, "name", "attempt %d is not within 1..%d", ref.GetAttempt(), MaxAttempt)
	}
	return nil
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+len(sep):], true
}
