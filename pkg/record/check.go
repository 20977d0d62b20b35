package record

import (
	"errors"
	"fmt"
)

// Epochs answers, for an offset, which leader epoch wrote it, and up to where
// (exclusive; math.MaxInt64 for the newest). ok is false where no leadership
// covers the offset. The lineage of a partition is one; see package lineage.
// It must be a pure look-up.
type Epochs interface {
	EpochAt(offset int64) (epoch int32, end int64, ok bool)
}

// Check names one of the conditions that make a batch valid at its place.
type Check uint8

// The conditions, in the order in which they are tried.
const (
	CheckLength     Check = iota + 1 // the length ends where the next header begins
	CheckHeader                      // the header makes sense by itself
	CheckBaseOffset                  // base offset = previous end
	CheckEpoch                       // leader epoch = the lineage's at that offset, for all of the batch
	CheckCRC                         // the CRC fits the content
)

// String is the condition in words.
func (c Check) String() string {
	switch c {
	case CheckLength:
		return "length"
	case CheckHeader:
		return "header"
	case CheckBaseOffset:
		return "base offset"
	case CheckEpoch:
		return "leader epoch"
	case CheckCRC:
		return "crc"
	}
	return fmt.Sprintf("check(%d)", uint8(c))
}

// CheckError says which condition a run of batches broke, and where.
type CheckError struct {
	Check     Check
	Pos       int64 // byte at which the batch begins, counted over all of the run
	Offset    int64 // offset that the batch should begin at
	Got, Want int64
	Err       error // an *Error, or a sentinel
}

// Error implements error.
func (e *CheckError) Error() string {
	return fmt.Sprintf("record: %s check failed at byte %d, offset %d: got %d, want %d: %v",
		e.Check, e.Pos, e.Offset, e.Got, e.Want, e.Err)
}

// Unwrap returns the cause; it always leads to one of the sentinels.
func (e *CheckError) Unwrap() error { return e.Err }

// Checker verifies a run of consecutive batches wherever bytes leave or enter
// a process (design review F14; invariants I3 and I14): the CRC fits, the base
// offset is the previous end, the leader epoch is the lineage's at that offset
// and for the whole batch, and each length ends where the next header begins.
// It allocates only for an error. The run may be given in pieces, cut at batch
// borders. After an error the checker keeps standing before the bad batch.
type Checker struct {
	next   int64 // offset at which the next batch must begin
	pos    int64 // bytes checked so far
	epochs Epochs
	epoch  int32 // epoch for offsets in [next, until)
	until  int64
}

// NewChecker begins a run at the offset base. A nil epochs leaves the leader
// epoch unchecked, for bytes that no leader has taken yet.
func NewChecker(base int64, epochs Epochs) Checker {
	return Checker{next: base, until: base, epochs: epochs}
}

// Next checks one batch, given as exactly its bytes.
func (c *Checker) Next(b Batch) error {
	if err := b.ValidateHeader(); err != nil {
		return c.headerError(err)
	}
	if size := b.Length(); size != len(b) {
		kind := ErrCorrupt
		if size > len(b) {
			kind = ErrShort
		}
		return c.fail(CheckLength, int64(len(b)), int64(size), kind)
	}
	if base := b.BaseOffset(); base != c.next {
		return c.fail(CheckBaseOffset, base, c.next, ErrCorrupt)
	}
	if err := c.checkEpoch(b); err != nil {
		return err
	}
	if got, want := b.ComputeCRC(), b.CRC(); got != want {
		return c.fail(CheckCRC, int64(got), int64(want), ErrCorrupt)
	}
	c.next = b.EndOffset()
	c.pos += int64(len(b))
	return nil
}

// Check verifies that buf is whole batches that continue the run. On an error
// End and Size tell how far it was good.
func (c *Checker) Check(buf []byte) error {
	for pos := 0; pos < len(buf); {
		size, err := Peek(buf[pos:])
		if err != nil {
			if errors.Is(err, ErrShort) {
				return c.fail(CheckLength, int64(len(buf)-pos), int64(max(size, peekSize)), ErrShort)
			}
			return c.headerError(err)
		}
		if err := c.Next(Batch(buf[pos : pos+size])); err != nil {
			return err
		}
		pos += size
	}
	return nil
}

// End is the offset (exclusive) up to which the run is good.
func (c *Checker) End() int64 { return c.next }

// Size is the number of bytes that are good.
func (c *Checker) Size() int64 { return c.pos }

func (c *Checker) checkEpoch(b Batch) error {
	if c.epochs == nil {
		return nil
	}
	if c.next >= c.until {
		epoch, end, ok := c.epochs.EpochAt(c.next)
		if !ok || end <= c.next {
			return c.fail(CheckEpoch, int64(b.LeaderEpoch()), -1, ErrCorrupt)
		}
		c.epoch, c.until = epoch, end
	}
	if e := b.LeaderEpoch(); e != c.epoch {
		return c.fail(CheckEpoch, int64(e), int64(c.epoch), ErrCorrupt)
	}
	if end := b.EndOffset(); end > c.until {
		// One leadership writes a whole batch: none reaches over a border.
		return c.fail(CheckEpoch, end, c.until, ErrCorrupt)
	}
	return nil
}

func (c *Checker) fail(check Check, got, want int64, kind error) error {
	return &CheckError{Check: check, Pos: c.pos, Offset: c.next, Got: got, Want: want, Err: kind}
}

// headerError turns a header's error into one of the run; a length that can't
// be one counts as CheckLength.
func (c *Checker) headerError(err error) error {
	out := &CheckError{Check: CheckHeader, Pos: c.pos, Offset: c.next, Err: err}
	var e *Error
	if errors.As(err, &e) {
		out.Got, out.Want = e.Got, e.Want
		if e.Field == FieldLength {
			out.Check = CheckLength
		}
	}
	return out
}
