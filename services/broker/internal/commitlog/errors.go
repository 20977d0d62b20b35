package commitlog

import (
	"errors"
	"fmt"
)

var (
	// ErrClosed is returned by every call on a closed log or data directory.
	ErrClosed = errors.New("commitlog: closed")
	// ErrNotAppendable marks input of an append that does not fit this log: a
	// base offset other than the log end, an epoch other than the lineage's, a
	// cut batch. Nothing was written.
	ErrNotAppendable = errors.New("commitlog: batch does not continue the log")
	// ErrLineage marks a lineage that contradicts the batches held.
	ErrLineage = errors.New("commitlog: lineage does not fit the log")
	// ErrCorrupt is matched by every error about damaged bytes: CorruptionError,
	// DamagedError and FormatError.
	ErrCorrupt = errors.New("commitlog: corrupt")
)

// CorruptionError says which bytes of which file failed a check. They were not
// served. Only the partition the file belongs to is affected.
type CorruptionError struct {
	// Path is the segment file.
	Path string
	// Position and EndPosition are the byte range [Position, EndPosition) in
	// the file that can't be trusted.
	Position, EndPosition int64
	// Offset is the offset expected at Position.
	Offset int64
	// Reason says what was wrong.
	Reason error
}

func (e *CorruptionError) Error() string {
	return fmt.Sprintf("commitlog: corrupt batch at offset %d in %s, bytes [%d, %d): %v",
		e.Offset, e.Path, e.Position, e.EndPosition, e.Reason)
}

// Unwrap gives the reason and ErrCorrupt.
func (e *CorruptionError) Unwrap() []error { return []error{ErrCorrupt, e.Reason} }

// FormatError says that a metadata, checkpoint or index file can't be decoded.
type FormatError struct {
	// Path is the file, empty when bytes were decoded without one.
	Path string
	// Reason says what was wrong.
	Reason string
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("commitlog: %s: %s", e.Path, e.Reason)
}

// Unwrap gives ErrCorrupt.
func (e *FormatError) Unwrap() error { return ErrCorrupt }

// DamagedError refuses a write to a log in which recovery found damage below
// its recovery point; TruncateTo or Reset at or below Damage.From clears it.
type DamagedError struct {
	Damage Damage
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("commitlog: offsets [%d, %d) are damaged, truncate or reset first: %v",
		e.Damage.From, e.Damage.To, e.Damage.Cause)
}

// Unwrap gives ErrCorrupt and the cause.
func (e *DamagedError) Unwrap() []error { return []error{ErrCorrupt, e.Damage.Cause} }

// FailedError is returned by every write after the first failed one. What the
// failed call wrote may or may not be found after the log is opened again.
type FailedError struct {
	// Op names the operation that failed first.
	Op string
	// Err is its error.
	Err error
}

func (e *FailedError) Error() string {
	return fmt.Sprintf("commitlog: log failed at %s and takes no more writes: %v", e.Op, e.Err)
}

func (e *FailedError) Unwrap() error { return e.Err }

// MismatchError refuses a directory that belongs to something else.
type MismatchError struct {
	// Path is the file that says so.
	Path string
	// Field is the first fact that differs: "cluster id", "topic id",
	// "creation offset", "partition" or "broker id".
	Field string
	// Want is what the caller expects, Got what the directory holds.
	Want, Got string
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("commitlog: %s belongs to another owner: %s is %s, expected %s", e.Path, e.Field, e.Got, e.Want)
}

// LockedError says that another process, or another part of this one, holds the
// data directory.
type LockedError struct {
	Dir string
	Err error
}

func (e *LockedError) Error() string {
	return fmt.Sprintf("commitlog: data directory %s is in use by another process: %v", e.Dir, e.Err)
}

func (e *LockedError) Unwrap() error { return e.Err }

// OutOfRangeError says that an offset is not in the local log; it says nothing
// about other copies of the partition.
type OutOfRangeError struct {
	Offset int64
	// Start and End are the local bounds [Start, End).
	Start, End int64
}

func (e *OutOfRangeError) Error() string {
	return fmt.Sprintf("commitlog: offset %d is outside of the local log [%d, %d)", e.Offset, e.Start, e.End)
}

// NotBorderError says that an offset lies inside of a batch.
type NotBorderError struct {
	Offset int64
	// Below and Above are the borders of the batch that holds the offset.
	Below, Above int64
}

func (e *NotBorderError) Error() string {
	return fmt.Sprintf("commitlog: offset %d is inside of batch [%d, %d)", e.Offset, e.Below, e.Above)
}
