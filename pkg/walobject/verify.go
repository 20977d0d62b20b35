package walobject

import (
	"fmt"
	"hash/crc32"
	"math"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

// VerifyRange proves that data is what the descriptor says: length and
// CRC32C; whole batches that are valid each, contiguous from base to end, each
// under the leader epoch that the lineage has at its offset; their count and
// largest timestamp; and, walked from the base chain hash, the end chain hash.
// It also checks that lineage, predecessor, fence and epoch start agree with
// one another.
//
// The error matches [ErrMalformed], or [ErrChain] where only the chain hash
// differs. data is read twice and not kept.
func VerifyRange(d *logv1.RangeDescriptor, data []byte) error {
	bad := func(format string, args ...any) error { return fail(ErrMalformed, "range", format, args...) }
	if err := checkDescriptor(d); err != nil {
		return wrap(ErrMalformed, "range", err, "descriptor")
	}
	if err := checkLineage(d); err != nil {
		return wrap(ErrMalformed, "range", err, "lineage")
	}
	if int64(len(data)) != d.GetLengthBytes() {
		return bad("%d bytes, says %d", len(data), d.GetLengthBytes())
	}
	if got := crc32.Checksum(data, castagnoli); got != d.GetCrc32C() {
		return bad("checksum %08x, says %08x", got, d.GetCrc32C())
	}
	var (
		checker = record.NewChecker(d.GetBaseOffset(), epochs(d.GetLineage()))
		hash    = chainhash.Hash(d.GetBaseChainHash())
		latest  = int64(math.MinInt64)
		count   int32
	)
	err := record.Walk(data, func(b record.Batch) error {
		if err := checker.Next(b); err != nil {
			return err
		}
		hash = chainhash.Next(hash, b)
		latest = max(latest, b.MaxTimestamp())
		count++
		return nil
	})
	switch {
	case err != nil:
		return wrap(ErrMalformed, "range", err, "batch %d", count)
	case checker.End() != d.GetEndOffset():
		return bad("its batches end at offset %d, says %d", checker.End(), d.GetEndOffset())
	case count != d.GetBatchCount():
		return bad("%d batches, says %d", count, d.GetBatchCount())
	case latest != d.GetMaxTimestampMs():
		return bad("largest timestamp %d, says %d", latest, d.GetMaxTimestampMs())
	case hash != chainhash.Hash(d.GetEndChainHash()):
		return fail(ErrChain, "range", "at offset %d: %v, says %x", d.GetEndOffset(), hash, d.GetEndChainHash())
	}
	return nil
}

// VerifyBytes checks a range's bytes, as read from an object, against the
// length and CRC32C that metadata or a footer has for them. It fails with
// [ErrCorrupt].
func VerifyBytes(d *logv1.RangeDescriptor, data []byte) error {
	if int64(len(data)) != d.GetLengthBytes() {
		return fail(ErrCorrupt, "range", "%d bytes, must be %d", len(data), d.GetLengthBytes())
	}
	if got := crc32.Checksum(data, castagnoli); got != d.GetCrc32C() {
		return fail(ErrCorrupt, "range", "checksum %08x, must be %08x", got, d.GetCrc32C())
	}
	return nil
}

// epochs makes a range's lineage what [record.Checker] looks epochs up in.
type epochs []*logv1.LineageEntry

// EpochAt implements [record.Epochs].
func (l epochs) EpochAt(offset int64) (epoch int32, end int64, ok bool) {
	for i := len(l) - 1; i >= 0; i-- {
		if l[i].GetStartOffset() > offset {
			continue
		}
		end = math.MaxInt64
		if i+1 < len(l) {
			end = l[i+1].GetStartOffset()
		}
		return l[i].GetLeadership().GetLeaderEpoch(), end, true
	}
	return 0, 0, false
}

// checkLineage checks that the lineage is that of the range and agrees with
// predecessor, fence and epoch start.
func checkLineage(d *logv1.RangeDescriptor) error {
	l := d.GetLineage()
	for i, e := range l {
		who := e.GetLeadership()
		switch {
		case who.GetIncarnation() == 0 || who.GetIncarnation() > math.MaxInt32 || who.GetLeaderEpoch() < 0:
			return fmt.Errorf("entry %d names leadership %d:%d", i, who.GetIncarnation(), who.GetLeaderEpoch())
		case e.GetStartOffset() < 0 || e.GetStartOffset() >= d.GetEndOffset():
			return fmt.Errorf("entry %d starts at %d, outside of the range", i, e.GetStartOffset())
		case i == 0 && e.GetStartOffset() > d.GetBaseOffset():
			return fmt.Errorf("begins at %d, above the range's base %d", e.GetStartOffset(), d.GetBaseOffset())
		case i > 0 && e.GetStartOffset() <= d.GetBaseOffset():
			return fmt.Errorf("entry %d begins at or below the base: the ones before it wrote nothing of the range", i)
		case i > 0 && e.GetStartOffset() <= l[i-1].GetStartOffset():
			return fmt.Errorf("entry %d does not start above the one before it", i)
		case i > 0 && who.GetLeaderEpoch() <= l[i-1].GetLeadership().GetLeaderEpoch():
			return fmt.Errorf("entry %d has no higher epoch than the one before it", i)
		}
	}
	first, last, fence := l[0], l[len(l)-1].GetLeadership(), d.GetFence()
	if last.GetLeaderEpoch() > fence.GetLeaderEpoch() {
		return fmt.Errorf("epoch %d is above the fence's %d", last.GetLeaderEpoch(), fence.GetLeaderEpoch())
	}
	// On a writable partition the fence's own leadership is in the lineage once
	// it wrote; where it is, it starts where the epoch was opened.
	for _, e := range l {
		who := e.GetLeadership()
		if who.GetIncarnation() == fence.GetIncarnation() && who.GetLeaderEpoch() == fence.GetLeaderEpoch() && e.GetStartOffset() != d.GetEpochStart() {
			return fmt.Errorf("epoch %d starts at %d, the range says %d", who.GetLeaderEpoch(), e.GetStartOffset(), d.GetEpochStart())
		}
	}
	pred := d.GetPredecessor()
	switch {
	case first.GetStartOffset() < d.GetBaseOffset():
		who := first.GetLeadership()
		if pred.GetIncarnation() != who.GetIncarnation() || pred.GetLeaderEpoch() != who.GetLeaderEpoch() {
			return fmt.Errorf("the predecessor is not who wrote below the base")
		}
	case pred != nil && pred.GetLeaderEpoch() >= first.GetLeadership().GetLeaderEpoch():
		return fmt.Errorf("the predecessor's epoch %d is not below the range's first", pred.GetLeaderEpoch())
	case pred != nil && (pred.GetIncarnation() == 0 || pred.GetLeaderEpoch() < 0):
		return fmt.Errorf("the predecessor names leadership %d:%d", pred.GetIncarnation(), pred.GetLeaderEpoch())
	}
	return nil
}
