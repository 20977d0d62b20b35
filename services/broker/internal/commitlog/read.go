package commitlog

import (
	"errors"
	"fmt"
	"sort"
	"sync/atomic"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
)

// ReadRequest says what to read.
type ReadRequest struct {
	// Offset is the first offset wanted.
	Offset int64
	// Limit is the offset (exclusive) that no returned batch reaches over, a
	// batch border such as a high watermark. 0 means the log end.
	Limit int64
	// MaxBytes bounds the bytes returned, but for the first batch, which is
	// returned whatever its size.
	MaxBytes int
}

// Chunk is a run of whole batches, checked.
type Chunk struct {
	// Base is the base offset of the first batch, at or below the offset asked
	// for; End the end of the last one (exclusive). They are equal, and Bytes
	// is empty, where there is nothing to read yet.
	Base, End int64
	// Bytes are the batches as stored. They alias the buffer given to Read if
	// it was large enough, otherwise a new one, which may be reused.
	Bytes []byte
}

// readAttempts bounds how often a read is repeated because the log was cut
// under it before it waits for the writer.
const readAttempts = 4

// Read returns whole batches from one segment, beginning with the one that
// holds the offset. It uses buf's capacity for them. Every batch was checked
// (CRC, base offset, leader epoch, length); a batch that is not valid ends the
// chunk, and is a CorruptionError when it is the first. An offset outside of
// [Start, End] is an OutOfRangeError; at the end, or at the limit, the chunk is
// empty. A read costs one read call, and one allocation for the position to go
// on from.
func (l *Log) Read(buf []byte, req ReadRequest) (Chunk, error) {
	var out Chunk
	err := l.stable(func(v *view, generation uint64, end int64) error {
		var err error
		out, err = l.readView(v, generation, end, buf, req)
		return err
	})
	return out, err
}

// errGone makes stable look at a newer view.
var errGone = errors.New("commitlog: segment is gone")

// stable runs a read until it saw no truncation while it ran. Order matters:
// the end is loaded before the view, so that the view's segments and lineage
// cover all that lies below the end.
func (l *Log) stable(read func(v *view, generation uint64, end int64) error) error {
	for range readAttempts {
		generation := l.generation.Load()
		end := l.end.Load()
		err := read(l.view.Load(), generation, end)
		if !errors.Is(err, errGone) && l.generation.Load() == generation && generation%2 == 0 {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	return read(l.view.Load(), l.generation.Load(), l.end.Load())
}

// segmentFor finds the segment that holds an offset of the log.
func (v *view) segmentFor(offset int64) (*segment, int) {
	i := sort.Search(len(v.segments), func(i int) bool { return v.segments[i].base.offset > offset }) - 1
	i = max(i, 0)
	return v.segments[i], i
}

func (l *Log) readView(v *view, generation uint64, end int64, buf []byte, req ReadRequest) (Chunk, error) {
	if req.Offset < v.start || req.Offset > end || v.damage != nil && req.Offset == end {
		return Chunk{}, outOfRange(v, end, req.Offset)
	}
	limit := end
	if req.Limit > 0 && req.Limit < end {
		limit = req.Limit
	}
	if req.Offset >= limit {
		return Chunk{Base: req.Offset, End: req.Offset}, nil
	}
	s, _ := v.segmentFor(req.Offset)
	if !s.acquire() {
		return Chunk{}, errGone
	}
	size := s.size.Load()
	entries := s.idx.snapshot()
	entry, n := floorEntry(entries, req.Offset)
	at := scanPoint{border: border{offset: entry.offset}, position: int64(entry.position)}
	// The batch wanted begins before the next entry.
	lead := size - at.position
	if n+1 < len(entries) {
		lead = int64(entries[n+1].position) - at.position
	}
	if p, ok := l.hints.find(generation, s, req.Offset); ok {
		at, lead = scanPoint{border: border{offset: req.Offset}, position: p}, 0
	}
	chunk, position, err := readSegment(s, buf, at, lead, size, limit, v.epochs, req)
	err = errors.Join(err, s.release())
	if err == nil && chunk.End > chunk.Base {
		l.hints.add(&readHint{generation: generation, segment: s, offset: chunk.End, position: position})
	}
	return chunk, err
}

func outOfRange(v *view, end, offset int64) error {
	if d := v.damage; d != nil && offset >= d.From && offset < d.To {
		return &DamagedError{Damage: *d}
	}
	return &OutOfRangeError{Offset: offset, Start: v.start, End: end}
}

// readSegment reads from a known border at, with at most lead bytes before the
// batch wanted, and gives the chunk and the position behind it.
func readSegment(s *segment, buf []byte, at scanPoint, lead, size, limit int64, epochs record.Epochs, req ReadRequest) (Chunk, int64, error) {
	want := max(int64(req.MaxBytes), record.HeaderSize) + lead
	for {
		buf = sized(buf, min(want, size-at.position))
		if err := readFull(s.file, buf, at.position); err != nil {
			return Chunk{}, 0, fmt.Errorf("read %s at %d: %w", s.path, at.position, err)
		}
		first, skipped, err := skipTo(s.path, buf, at, size, req.Offset)
		if err != nil {
			var short *shortError
			if errors.As(err, &short) {
				want = max(2*int64(len(buf)), short.need)
				continue
			}
			return Chunk{}, 0, err
		}
		chunk, good, err := takeBatches(s.path, buf[skipped:], first, limit, epochs, req.MaxBytes, size)
		if err != nil {
			var short *shortError
			if errors.As(err, &short) {
				at, want = first, short.need
				continue
			}
			return Chunk{}, 0, err
		}
		return chunk, first.position + good, nil
	}
}

// shortError asks for more bytes, counted from the place the read began at.
type shortError struct{ need int64 }

func (e *shortError) Error() string { return fmt.Sprintf("commitlog: %d bytes are needed", e.need) }

// skipTo walks from a border to the batch that holds the offset, checking that
// each batch begins where the one before ended.
func skipTo(path string, buf []byte, at scanPoint, size, offset int64) (scanPoint, int, error) {
	start := at.position
	for pos := 0; ; {
		if len(buf)-pos < record.HeaderSize {
			if int64(record.HeaderSize) > size-at.position {
				return at, 0, corruptAt(path, at, size, record.ErrShort)
			}
			return at, 0, &shortError{need: at.position - start + record.HeaderSize}
		}
		b := record.Batch(buf[pos:])
		if err := b.ValidateHeader(); err != nil {
			return at, 0, corruptAt(path, at, size, err)
		}
		if b.BaseOffset() != at.offset || int64(b.Length()) > size-at.position {
			return at, 0, corruptAt(path, at, size, fmt.Errorf("batch of %d bytes at base offset %d: %w", b.Length(), b.BaseOffset(), record.ErrCorrupt))
		}
		if b.EndOffset() > offset {
			return at, pos, nil
		}
		at.offset = b.EndOffset()
		at.position += int64(b.Length())
		pos += b.Length()
		if pos > len(buf) {
			return at, 0, &shortError{need: at.position - start + record.HeaderSize}
		}
	}
}

// takeBatches checks batches from the start of buf on until the limit, the
// wanted number of bytes or the end of buf.
func takeBatches(path string, buf []byte, first scanPoint, limit int64, epochs record.Epochs, maxBytes int, size int64) (Chunk, int64, error) {
	checker := record.NewChecker(first.offset, epochs)
	good := 0
	for checker.End() < limit {
		at := scanPoint{border: border{offset: checker.End()}, position: first.position + int64(good)}
		n, err := record.Peek(buf[good:])
		if errors.Is(err, record.ErrShort) {
			if good > 0 {
				break
			}
			if int64(max(n, record.HeaderSize)) > size-first.position {
				return Chunk{}, 0, corruptAt(path, at, size, err)
			}
			return Chunk{}, 0, &shortError{need: int64(max(n, record.HeaderSize))}
		}
		if err == nil && good > 0 && good+n > maxBytes {
			break
		}
		if err == nil {
			b := record.Batch(buf[good : good+n])
			if good > 0 && b.EndOffset() > limit {
				break
			}
			err = checker.Next(b)
			if err == nil && checker.End() > limit {
				return Chunk{Base: first.offset, End: first.offset, Bytes: buf[:0]}, 0, nil
			}
		}
		if err != nil {
			if good > 0 {
				// What is good is given out; the next read meets the damage.
				break
			}
			return Chunk{}, 0, corruptAt(path, at, size, err)
		}
		good += n
	}
	return Chunk{Base: first.offset, End: checker.End(), Bytes: buf[:good:good]}, int64(good), nil
}

// sized gives a buffer of n bytes, buf's own if it is large enough.
func sized(buf []byte, n int64) []byte {
	if int64(cap(buf)) >= n {
		return buf[:n]
	}
	return make([]byte, n)
}

// ChainAt is the chain hash at a batch border of [first segment, End]; the
// batches between the index entry below and the border are checked on the way.
// An offset inside of a batch is a NotBorderError.
func (l *Log) ChainAt(offset int64) (chainhash.Hash, error) {
	if end, chain := l.Tail(); end == offset {
		return chain, nil
	}
	var out chainhash.Hash
	err := l.stable(func(v *view, _ uint64, end int64) error {
		at, err := l.pointAt(v, end, offset)
		out = at.chain
		return err
	})
	return out, err
}

// FloorBorder is the highest batch border at or below the offset, with its
// chain hash.
func (l *Log) FloorBorder(offset int64) (int64, chainhash.Hash, error) {
	chain, err := l.ChainAt(offset)
	var inside *NotBorderError
	if errors.As(err, &inside) {
		offset = inside.Below
		chain, err = l.ChainAt(offset)
	}
	return offset, chain, err
}

// pointAt finds a batch border with its position and chain hash.
func (l *Log) pointAt(v *view, end, offset int64) (scanPoint, error) {
	if offset < v.segments[0].base.offset || offset > end {
		return scanPoint{}, outOfRange(v, end, offset)
	}
	s, _ := v.segmentFor(offset)
	if !s.acquire() {
		return scanPoint{}, errGone
	}
	at, err := borderIn(s, offset, v.epochs)
	return at, errors.Join(err, s.release())
}

// borderIn finds a batch border at or above the segment's base.
func borderIn(s *segment, offset int64, epochs record.Epochs) (scanPoint, error) {
	from := scanPoint{border: s.base}
	if entries := s.idx.snapshot(); len(entries) > 0 {
		e, _ := floorEntry(entries, offset)
		from = scanPoint{border: border{offset: e.offset, chain: e.chain}, position: int64(e.position)}
	}
	if from.offset == offset {
		return from, nil
	}
	at, err := scanSegment(s.file, s.path, s.size.Load(), from, epochs, func(b record.Batch, at scanPoint) error {
		if at.offset == offset {
			return errStopScan
		}
		if b.EndOffset() > offset {
			return &NotBorderError{Offset: offset, Below: at.offset, Above: b.EndOffset()}
		}
		return nil
	})
	if err != nil && !errors.Is(err, errStopScan) {
		return at, err
	}
	if at.offset != offset {
		return at, corruptAt(s.path, at, s.size.Load(), fmt.Errorf("segment ends below offset %d: %w", offset, record.ErrCorrupt))
	}
	return at, nil
}

// TimeHit is a batch found by time.
type TimeHit struct {
	// Base and End are the batch's offsets [Base, End).
	Base, End int64
	// MaxTimestamp is its largest timestamp in milliseconds since 1970. The
	// first record at or after the time asked for is in this batch.
	MaxTimestamp int64
}

// OffsetForTime finds the first batch, at or above the log start, that holds a
// record with a timestamp at or after the given time in milliseconds since
// 1970. found is false if there is none. The record itself is found by decoding
// the batch. Timestamps need not be in order.
func (l *Log) OffsetForTime(timestamp int64) (hit TimeHit, found bool, err error) {
	err = l.stable(func(v *view, _ uint64, end int64) error {
		hit, found = TimeHit{}, false
		for _, s := range v.segments {
			// The maximum of the active segment may be ahead of end; then the
			// scan finds nothing below it.
			if s.maxTime.Load() < timestamp {
				continue
			}
			if !s.acquire() {
				return errGone
			}
			err := findTime(s, v, end, timestamp, &hit, &found)
			if err = errors.Join(err, s.release()); err != nil || found {
				return err
			}
		}
		return nil
	})
	return hit, found, err
}

func findTime(s *segment, v *view, end, timestamp int64, hit *TimeHit, found *bool) error {
	size := s.size.Load()
	entries := s.idx.snapshot()
	if len(entries) == 0 {
		return nil
	}
	// The batch lies before the first entry that knows of such a time.
	i := sort.Search(len(entries), func(i int) bool { return entries[i].maxTime >= timestamp })
	// Batches below the log start do not count: begin no lower than there.
	_, low := floorEntry(entries, v.start)
	e := entries[max(i-1, low, 0)]
	from := scanPoint{border: border{offset: e.offset, chain: e.chain}, position: int64(e.position)}
	_, err := scanSegment(s.file, s.path, size, from, v.epochs, func(b record.Batch, at scanPoint) error {
		if at.offset >= end {
			return errStopScan
		}
		if b.EndOffset() > v.start && b.MaxTimestamp() >= timestamp {
			*hit = TimeHit{Base: at.offset, End: b.EndOffset(), MaxTimestamp: b.MaxTimestamp()}
			*found = true
			return errStopScan
		}
		return nil
	})
	if errors.Is(err, errStopScan) {
		return nil
	}
	return err
}

// readHint remembers where a read ended, so that the
// reader that goes on from there needs no walk from an index entry.
type readHint struct {
	generation uint64
	segment    *segment
	offset     int64
	position   int64
}

// hintCache holds the last few hints. It only ever saves work.
type hintCache struct {
	next  atomic.Uint32
	slots [8]atomic.Pointer[readHint]
}

func (c *hintCache) find(generation uint64, s *segment, offset int64) (int64, bool) {
	for i := range c.slots {
		h := c.slots[i].Load()
		if h != nil && h.offset == offset && h.segment == s && h.generation == generation {
			return h.position, true
		}
	}
	return 0, false
}

func (c *hintCache) add(h *readHint) {
	c.slots[c.next.Add(1)%uint32(len(c.slots))].Store(h)
}
