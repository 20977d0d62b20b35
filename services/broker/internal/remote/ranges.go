package remote

import (
	"fmt"
	"sort"
	"sync"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/walobject"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Range is one committed range.
type Range struct {
	Base, End         int64 // offsets [Base, End)
	Position, Length  int64 // bytes in the object
	ObjectSize        int64
	RLMEpoch          int64
	Sequence          int64
	MaxTimestamp      int64 // milliseconds since 1970
	Incarnation       uint32
	Attempt           int32
	CRC               uint32
	ProducersComplete bool
	EndHash           chainhash.Hash
}

// Object names the object that holds the range.
func (r *Range) Object() *logv1.ObjectRef {
	return &logv1.ObjectRef{Incarnation: r.Incarnation, RlmEpoch: r.RLMEpoch, Sequence: r.Sequence, Attempt: r.Attempt}
}

// ObjectName is the name in the bucket of the object that holds the range.
func (r *Range) ObjectName(clusterID string) string { return walobject.Name(clusterID, r.Object()) }

// rankKey spreads objects over the remote-log managers.
func (r *Range) rankKey() string {
	return fmt.Sprintf("object %08x/%d/%d/%d", r.Incarnation, r.RLMEpoch, r.Sequence, r.Attempt)
}

// FromProto reads a range as the segment stream has it.
func FromProto(m *metadatav1.SegmentRange) (Range, error) {
	hash, err := chainhash.FromBytes(m.GetEndChainHash())
	if err != nil {
		return Range{}, fmt.Errorf("range [%d, %d): %w", m.GetBaseOffset(), m.GetEndOffset(), err)
	}
	o := m.GetObject()
	r := Range{
		Base: m.GetBaseOffset(), End: m.GetEndOffset(), Position: m.GetPosition(), Length: m.GetLengthBytes(),
		ObjectSize: m.GetObjectSizeBytes(), RLMEpoch: o.GetRlmEpoch(), Sequence: o.GetSequence(), Incarnation: o.GetIncarnation(),
		Attempt: o.GetAttempt(), MaxTimestamp: m.GetMaxTimestampMs(), CRC: m.GetCrc32C(),
		ProducersComplete: m.GetProducersComplete(), EndHash: hash,
	}
	if r.Base < 0 || r.End <= r.Base || r.Length <= 0 || r.Position < 0 || o == nil {
		return Range{}, fmt.Errorf("range [%d, %d) of %d bytes is impossible", r.Base, r.End, r.Length)
	}
	return r, nil
}

// Ranges are a partition's committed ranges in order of offset.
type Ranges struct {
	mu       sync.RWMutex // guards all below
	list     []Range
	replaced chan struct{} // closed by the next Replace; nil while nobody waits
}

// Replace takes a whole list.
func (l *Ranges) Replace(list []Range) {
	l.mu.Lock()
	l.list = list
	if l.replaced != nil {
		close(l.replaced)
		l.replaced = nil
	}
	l.mu.Unlock()
}

// Replaced returns a channel that is closed by the next [Ranges.Replace].
func (l *Ranges) Replaced() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.replaced == nil {
		l.replaced = make(chan struct{})
	}
	return l.replaced
}

// Append adds the range behind the last one; one that is held already changes
// nothing, and one that does not continue the list is an error.
func (l *Ranges) Append(r Range) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.list); n > 0 {
		switch last := l.list[n-1].End; {
		case r.End <= last:
			return nil
		case r.Base != last:
			return fmt.Errorf("range [%d, %d) does not continue the list, which ends at %d", r.Base, r.End, last)
		}
	}
	l.list = append(l.list, r)
	return nil
}

// Located is a range with the chain hash at its base.
type Located struct {
	Range
	BaseHash chainhash.Hash
	// BaseKnown is false for the first range of a list that does not begin at
	// offset 0: what lies below is not known.
	BaseKnown bool
}

// At finds the range that holds an offset.
func (l *Ranges) At(offset int64) (Located, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	i := sort.Search(len(l.list), func(i int) bool { return l.list[i].End > offset })
	if i == len(l.list) || l.list[i].Base > offset {
		return Located{}, false
	}
	return l.located(i), true
}

func (l *Ranges) located(i int) Located {
	out := Located{Range: l.list[i]}
	switch {
	case i > 0:
		out.BaseHash, out.BaseKnown = l.list[i-1].EndHash, true
	case l.list[0].Base == 0:
		out.BaseKnown = true
	}
	return out
}

// Border is the highest end of a range at or below an offset, with the chain
// hash there; ok is false when there is none.
func (l *Ranges) Border(offset int64) (end int64, hash chainhash.Hash, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	i := sort.Search(len(l.list), func(i int) bool { return l.list[i].End > offset })
	if i == 0 {
		return 0, chainhash.Hash{}, false
	}
	return l.list[i-1].End, l.list[i-1].EndHash, true
}

// End is the end of the last range; ok is false for an empty list.
func (l *Ranges) End() (end int64, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if len(l.list) == 0 {
		return 0, false
	}
	return l.list[len(l.list)-1].End, true
}

// Len is the number of ranges.
func (l *Ranges) Len() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return len(l.list)
}

// SinceComplete returns the ranges below end from the last one on whose footer
// holds the whole producer state; all of them when there is none.
func (l *Ranges) SinceComplete(end int64) []Range {
	l.mu.RLock()
	defer l.mu.RUnlock()
	hi := sort.Search(len(l.list), func(i int) bool { return l.list[i].End > end })
	lo := hi
	for lo > 0 {
		lo--
		if l.list[lo].ProducersComplete {
			break
		}
	}
	return append([]Range(nil), l.list[lo:hi]...)
}

// FirstSince finds the first range, ending above from, whose largest timestamp
// is at or after ms.
func (l *Ranges) FirstSince(from, ms int64) (Located, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	i := sort.Search(len(l.list), func(i int) bool { return l.list[i].End > from })
	for ; i < len(l.list); i++ {
		if l.list[i].MaxTimestamp >= ms {
			return l.located(i), true
		}
	}
	return Located{}, false
}

// Latest finds the first range with the largest timestamp of all.
func (l *Ranges) Latest() (Located, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	best := -1
	for i := range l.list {
		if best < 0 || l.list[i].MaxTimestamp > l.list[best].MaxTimestamp {
			best = i
		}
	}
	if best < 0 {
		return Located{}, false
	}
	return l.located(best), true
}
