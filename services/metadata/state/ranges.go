package state

import (
	"sort"

	"github.com/braidlog/braid/pkg/chainhash"
)

// rangeRecord is one committed range. A log may hold millions, so it is small
// and has no pointers: the base offset is the end of the range before, the
// object is a slot of the object table.
type rangeRecord struct {
	end          int64
	maxTimestamp int64 // ms
	position     int64
	hash         chainhash.Hash // at end
	length       uint32
	crc32c       uint32
	leaderEpoch  int32
	object       uint32 // slot<<1, the lowest bit says that producers are complete
}

// chunkLength is how many records a chunk of a rangeList holds: of 56 bytes each
// they fill an allocation of 2 KiB but for 32 bytes. A full chunk is never
// written again and may be shared by clones.
const chunkLength = 36

// rangeList holds a partition's ranges in order of offset.
type rangeList struct {
	chunks    [][]rangeRecord // all full but the last
	count     int
	start     int64          // base of the first range
	startHash chainhash.Hash // at start
}

func (l *rangeList) at(i int) *rangeRecord { return &l.chunks[i/chunkLength][i%chunkLength] }

// base is the first offset of range i.
func (l *rangeList) base(i int) int64 {
	if i == 0 {
		return l.start
	}
	return l.at(i - 1).end
}

// search is the index of the first range that ends above offset, count if none
// does.
func (l *rangeList) search(offset int64) int {
	return sort.Search(l.count, func(i int) bool { return l.at(i).end > offset })
}

// hashAt is the chain hash at offset, if that is a border of a range.
func (l *rangeList) hashAt(offset int64) (chainhash.Hash, bool) {
	if offset == l.start {
		return l.startHash, true
	}
	if i := l.search(offset - 1); i < l.count && l.at(i).end == offset {
		return l.at(i).hash, true
	}
	return chainhash.Hash{}, false
}

func (l *rangeList) append(r rangeRecord) {
	last := len(l.chunks) - 1
	switch {
	case last < 0:
		l.chunks = append(l.chunks, make([]rangeRecord, 0, 2)) // grows: most partitions of most tests stay small
		last = 0
	case len(l.chunks[last]) == chunkLength:
		l.chunks = append(l.chunks, make([]rangeRecord, 0, chunkLength))
		last++
	}
	c := l.chunks[last]
	if len(c) == cap(c) {
		c = append(make([]rangeRecord, 0, min(2*len(c), chunkLength)), c...)
	}
	l.chunks[last] = append(c, r)
	l.count++
}

// clone shares full chunks and copies the last.
func (l *rangeList) clone() rangeList {
	out := *l
	if n := len(l.chunks); n > 0 {
		out.chunks = append(make([][]rangeRecord, 0, n+1), l.chunks...)
		if last := l.chunks[n-1]; len(last) < chunkLength {
			out.chunks[n-1] = append(make([]rangeRecord, 0, cap(last)), last...)
		}
	}
	return out
}

// objectRecord is a combined object that some range is in.
type objectRecord struct {
	rlmEpoch    int64
	sequence    int64
	size        int64
	committedAt int64 // offset of the entry
	incarnation uint32
	attempt     int32
	rlmID       int32
	crc32c      uint32
	refs        int32 // ranges in it that are live; 0 = the slot is free
}

// objectTable holds the objects with live ranges. An object without any is
// forgotten at once: sequence and epoch keep it from coming back (design review
// S1), and a scrub asks for nothing else.
type objectTable struct {
	slots []objectRecord
	free  []uint32
}

func (t *objectTable) add(o objectRecord) uint32 {
	if n := len(t.free); n > 0 {
		slot := t.free[n-1]
		t.free = t.free[:n-1]
		t.slots[slot] = o
		return slot
	}
	t.slots = append(t.slots, o)
	return uint32(len(t.slots) - 1)
}

func (t *objectTable) of(r *rangeRecord) *objectRecord { return &t.slots[r.object>>1] }

func (t *objectTable) release(r *rangeRecord) {
	slot := r.object >> 1
	o := &t.slots[slot]
	if o.refs--; o.refs == 0 {
		*o = objectRecord{}
		t.free = append(t.free, slot)
	}
}

// live is how many objects have ranges.
func (t *objectTable) live() int { return len(t.slots) - len(t.free) }
