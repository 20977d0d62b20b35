package walobject

import (
	"errors"
	"fmt"
)

var (
	// ErrCorrupt says that bytes can't be (part of) a combined object of this
	// format, or not the one they should be.
	ErrCorrupt = errors.New("walobject: corrupt object")
	// ErrUnsupported says that the object has a newer format.
	ErrUnsupported = errors.New("walobject: unsupported format version")
	// ErrShort says that the tail given holds the trailer but not the whole
	// footer; [Error.Need] tells how many bytes would do.
	ErrShort = errors.New("walobject: the tail does not hold the whole footer")
	// ErrInvalid says that a writer was given something that makes no valid
	// object. It is the caller's mistake, not damage.
	ErrInvalid = errors.New("walobject: invalid content")
	// ErrMalformed says that a range contradicts itself: bytes, checksum, batch
	// borders, offsets or epochs are not what its descriptor says.
	ErrMalformed = errors.New("walobject: malformed range")
	// ErrChain says that a well-formed range does not lead from its base chain
	// hash to its end chain hash.
	ErrChain = errors.New("walobject: chain hash mismatch")
)

// Error says what is wrong, and where. It matches one of the sentinels.
type Error struct {
	// Kind is one of this package's sentinels.
	Kind error
	// Part is "trailer", "footer", "name", "object" or "range".
	Part string
	// Reason is for people.
	Reason string
	// Need is, for [ErrShort], the length in bytes of the tail that holds the
	// footer and the trailer.
	Need int64
	// Err is the cause, may be nil.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	s := fmt.Sprintf("%v: %s: %s", e.Kind, e.Part, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

func fail(kind error, part, format string, args ...any) error {
	return &Error{Kind: kind, Part: part, Reason: fmt.Sprintf(format, args...)}
}

func wrap(kind error, part string, err error, format string, args ...any) error {
	return &Error{Kind: kind, Part: part, Reason: fmt.Sprintf(format, args...), Err: err}
}
