package commitlog

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
)

// scanBufferSize is how much a scan reads at once, in bytes, once it is under
// way; it begins with firstScanRead, since most scans end soon. A batch larger
// than the buffer gets one of its own size.
const (
	scanBufferSize = 1 << 20
	firstScanRead  = 32 << 10
)

var scanBuffers = sync.Pool{New: func() any { b := make([]byte, scanBufferSize); return &b }}

// scanPoint is a place in a segment: a border and the position it has in the
// file.
type scanPoint struct {
	border
	position int64
}

// scanSegment checks the batches of a file from a known border up to size and
// gives each to fn, with the place where it begins. It stops at size, at the
// first error of fn or at the first batch that is not valid at its place, which
// is reported as a CorruptionError; the point it returns is the end of the last
// good batch. The batch given to fn is overwritten after fn has returned.
func scanSegment(f io.ReaderAt, path string, size int64, from scanPoint, epochs record.Epochs,
	fn func(record.Batch, scanPoint) error,
) (scanPoint, error) {
	pooled := scanBuffers.Get().(*[]byte)
	defer scanBuffers.Put(pooled)
	buf := *pooled
	checker := record.NewChecker(from.offset, epochs)
	at := from
	step := firstScanRead
	filled, used := 0, 0 // buf[used:filled] is read and not yet checked
	for at.position < size {
		batchSize, err := record.Peek(buf[used:filled])
		if errors.Is(err, record.ErrShort) {
			if left := size - at.position; int64(batchSize) > left {
				return at, corruptAt(path, at, size, fmt.Errorf("batch of %d bytes with %d left in the file: %w", batchSize, left, err))
			}
			if int64(filled-used) == size-at.position {
				return at, corruptAt(path, at, size, err)
			}
			if batchSize > len(buf) {
				grown := make([]byte, batchSize)
				copy(grown, buf[used:filled])
				buf, filled, used = grown, filled-used, 0
			} else {
				filled, used = copy(buf, buf[used:filled]), 0
			}
			want := int(min(int64(len(buf)-filled), size-at.position-int64(filled), int64(max(step, batchSize-filled))))
			step = min(2*step, scanBufferSize)
			if err := readFull(f, buf[filled:filled+want], at.position+int64(filled)); err != nil {
				return at, fmt.Errorf("read %s at %d: %w", path, at.position+int64(filled), err)
			}
			filled += want
			continue
		}
		if err != nil {
			return at, corruptAt(path, at, size, err)
		}
		b := record.Batch(buf[used : used+batchSize])
		if err := checker.Next(b); err != nil {
			return at, corruptAt(path, at, at.position+int64(batchSize), err)
		}
		if fn != nil {
			if err := fn(b, at); err != nil {
				return at, err
			}
		}
		at.chain = chainhash.Next(at.chain, b)
		at.offset = checker.End()
		at.position += int64(batchSize)
		used += batchSize
	}
	return at, nil
}

func corruptAt(path string, at scanPoint, end int64, reason error) *CorruptionError {
	return &CorruptionError{Path: path, Position: at.position, EndPosition: end, Offset: at.offset, Reason: reason}
}

// indexer collects the index entries of a segment while its batches go by.
type indexer struct {
	interval int64
	entries  []indexEntry
	last     int64 // position of the last entry
	maxTime  int64
}

func newIndexer(interval int64) *indexer { return &indexer{interval: interval, maxTime: noTimestamp} }

// add notes the batch that begins at a point.
func (x *indexer) add(b record.Batch, at scanPoint) {
	if len(x.entries) == 0 || at.position-x.last >= x.interval {
		x.entries = append(x.entries, indexEntry{
			offset: at.offset, position: uint32(at.position), maxTime: x.maxTime, chain: at.chain,
		})
		x.last = at.position
	}
	x.maxTime = max(x.maxTime, b.MaxTimestamp())
}
