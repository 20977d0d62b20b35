package commitlog

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"sort"
	"sync/atomic"

	"github.com/braidlog/braid/pkg/chainhash"
)

const (
	indexMagic = "BRAIDIX1"
	// indexFixed is everything of an index file but the entries and the CRC.
	indexFixed    = 8 + 4 + 24 + 24 + 8 + 8 + 4
	indexEntryLen = 8 + 4 + 8 + 16
	// noTimestamp is the largest timestamp of nothing.
	noTimestamp = math.MinInt64
)

// indexEntry describes a batch border inside of a segment.
type indexEntry struct {
	offset   int64          // base offset of the batch that begins here
	position uint32         // where it begins in the file
	maxTime  int64          // largest timestamp in the segment before position
	chain    chainhash.Hash // chain hash of all before offset
}

// index is the sparse index of one segment in memory. One goroutine adds to it,
// any number look things up.
type index struct {
	// entries is replaced when it must grow; elements below n never change.
	entries atomic.Pointer[[]indexEntry]
	n       atomic.Int64
}

func newIndex(entries []indexEntry) *index {
	x := &index{}
	x.entries.Store(&entries)
	x.n.Store(int64(len(entries)))
	return x
}

// snapshot gives the entries there are; the caller must not change them.
func (x *index) snapshot() []indexEntry {
	n := x.n.Load()
	return (*x.entries.Load())[:n:n]
}

// stage puts an entry behind those published without publishing it. staged
// counts the entries staged before.
func (x *index) stage(staged int, e indexEntry) {
	at := int(x.n.Load()) + staged
	all := *x.entries.Load()
	if at == len(all) {
		grown := make([]indexEntry, max(16, 2*len(all)))
		copy(grown, all)
		all = grown
		x.entries.Store(&all)
	}
	all[at] = e
}

// publish makes staged entries visible.
func (x *index) publish(staged int) { x.n.Add(int64(staged)) }

// floor is the last entry at or below the offset. The first entry of a segment
// is its base, so there is one for every offset of the segment.
func floorEntry(entries []indexEntry, offset int64) (indexEntry, int) {
	i := sort.Search(len(entries), func(i int) bool { return entries[i].offset > offset }) - 1
	return entries[max(i, 0)], max(i, 0)
}

// indexFile is the content of an index file: the entries and what a reader
// must know of the segment to trust them.
type indexFile struct {
	base    border
	end     border
	size    int64 // bytes of the segment
	maxTime int64 // largest timestamp in the segment
	entries []indexEntry
}

func (x *indexFile) encode() []byte {
	b := make([]byte, 0, indexFixed+indexEntryLen*len(x.entries)+4)
	b = append(b, indexMagic...)
	b = binary.BigEndian.AppendUint32(b, FormatVersion)
	b = appendBorder(b, x.base)
	b = appendBorder(b, x.end)
	b = binary.BigEndian.AppendUint64(b, uint64(x.size))
	b = binary.BigEndian.AppendUint64(b, uint64(x.maxTime))
	b = binary.BigEndian.AppendUint32(b, uint32(len(x.entries)))
	for i := range x.entries {
		e := &x.entries[i]
		b = binary.BigEndian.AppendUint64(b, uint64(e.offset))
		b = binary.BigEndian.AppendUint32(b, e.position)
		b = binary.BigEndian.AppendUint64(b, uint64(e.maxTime))
		b = append(b, e.chain[:]...)
	}
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func decodeIndex(b []byte) (indexFile, error) {
	var x indexFile
	body, err := checkedBody(b, indexMagic, indexFixed)
	if err != nil {
		return x, err
	}
	x.base = readBorder(body[12:])
	x.end = readBorder(body[36:])
	x.size = int64(binary.BigEndian.Uint64(body[60:]))
	x.maxTime = int64(binary.BigEndian.Uint64(body[68:]))
	n := int64(binary.BigEndian.Uint32(body[76:]))
	rest := body[indexFixed:]
	if int64(len(rest)) != n*indexEntryLen {
		return x, &FormatError{Reason: fmt.Sprintf("%d bytes for %d entries", len(rest), n)}
	}
	x.entries = make([]indexEntry, 0, n)
	for ; len(rest) > 0; rest = rest[indexEntryLen:] {
		e := indexEntry{
			offset:   int64(binary.BigEndian.Uint64(rest)),
			position: binary.BigEndian.Uint32(rest[8:]),
			maxTime:  int64(binary.BigEndian.Uint64(rest[12:])),
		}
		copy(e.chain[:], rest[20:36])
		x.entries = append(x.entries, e)
	}
	return x, x.validate()
}

// validate refuses entries that no segment could have.
func (x *indexFile) validate() error {
	if x.base.offset < 0 || x.end.offset < x.base.offset || x.size < 0 || x.size > maxPosition {
		return &FormatError{Reason: "impossible bounds"}
	}
	if len(x.entries) == 0 {
		if x.size != 0 || x.end != x.base {
			return &FormatError{Reason: "no entries for a segment that has batches"}
		}
		return nil
	}
	first := x.entries[0]
	if first.offset != x.base.offset || first.position != 0 || first.chain != x.base.chain {
		return &FormatError{Reason: "first entry is not the segment's base"}
	}
	for i := 1; i < len(x.entries); i++ {
		before, e := x.entries[i-1], x.entries[i]
		if e.offset <= before.offset || e.position <= before.position || e.maxTime < before.maxTime {
			return &FormatError{Reason: "entries are not in order"}
		}
	}
	last := x.entries[len(x.entries)-1]
	if last.offset >= x.end.offset || int64(last.position) >= x.size || last.maxTime > x.maxTime {
		return &FormatError{Reason: "entries beyond the segment's end"}
	}
	return nil
}
