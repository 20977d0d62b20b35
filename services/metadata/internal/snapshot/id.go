package snapshot

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/braidlog/braid/services/metadata/state"
)

// ID names a snapshot. Two snapshots of one ID hold the same state.
type ID struct {
	Incarnation uint32
	// End is exclusive: the state holds the effect of every entry below.
	End int64
	// ControllerEpoch of the entry before End.
	ControllerEpoch int64
}

// String is the ID as it begins names of files and objects.
func (id ID) String() string {
	return fmt.Sprintf("%08x-%020d-%020d", id.Incarnation, id.End, id.ControllerEpoch)
}

func idOf(s *state.State) ID {
	p := s.Position()
	return ID{Incarnation: p.GetIncarnation(), End: p.GetOffset(), ControllerEpoch: p.GetControllerEpoch()}
}

// Info describes a stored snapshot.
type Info struct {
	ID
	// Size in bytes.
	Size int64
	// Sum is the SHA-256 over all bytes but the last 32, which are the sum.
	Sum [state.SnapshotSumSize]byte
}

// sumDigits is how much of the sum, in hexadecimal digits, is in a name.
const sumDigits = 16

// Name is what the snapshot is called on a disk and, below a prefix, in the
// bucket. Names of one incarnation sort as their ends do.
func (i Info) Name() string { return i.String() + "-" + hex.EncodeToString(i.Sum[:sumDigits/2]) }

// parseName reads a name back; of the sum only its first bytes are known then.
func parseName(name string) (Info, bool) {
	parts := strings.Split(name, "-")
	if len(parts) != 4 || len(parts[0]) != 8 || len(parts[1]) != 20 || len(parts[2]) != 20 || len(parts[3]) != sumDigits {
		return Info{}, false
	}
	incarnation, err := strconv.ParseUint(parts[0], 16, 32)
	if err != nil {
		return Info{}, false
	}
	i := Info{ID: ID{Incarnation: uint32(incarnation)}}
	if i.End, err = strconv.ParseInt(parts[1], 10, 64); err != nil {
		return Info{}, false
	}
	if i.ControllerEpoch, err = strconv.ParseInt(parts[2], 10, 64); err != nil {
		return Info{}, false
	}
	if _, err = hex.Decode(i.Sum[:], []byte(parts[3])); err != nil {
		return Info{}, false
	}
	return i, i.Name() == name && i.End > 0 && i.ControllerEpoch < i.End
}
