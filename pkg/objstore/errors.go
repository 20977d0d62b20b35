package objstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// The kinds of failure. Match them with errors.Is.
var (
	// ErrNotFound: no live object has the name. It is an answer of the store,
	// never a guess: an unreachable store is ErrUnavailable.
	ErrNotFound = errors.New("object not found")
	// ErrBucketNotFound: the bucket itself is absent. It does not match
	// ErrNotFound: a wrong bucket name must not look like deleted data.
	ErrBucketNotFound = errors.New("bucket not found")
	// ErrExists: the create-only precondition failed, another object has the name.
	ErrExists = errors.New("object exists already")
	// ErrPrecondition: the object's generation is not the one named.
	ErrPrecondition = errors.New("generation precondition failed")
	// ErrRange: the object ends before the range does. The ranges Braid reads
	// come from committed metadata, so this is damage unless the range was a guess.
	ErrRange = errors.New("range outside the object")
	// ErrUnavailable: the store could not do it now; the same call may succeed
	// later. Includes throttling, a broken connection and an attempt's own
	// deadline, but not the end of the caller's context.
	ErrUnavailable = errors.New("object store unavailable")
	// ErrCorrupt: bytes, size or checksum differ from what they must be.
	ErrCorrupt = errors.New("object corrupt")
	// ErrDenied: the store refused the caller's credentials or a policy
	// (retention, hold) forbids the operation. Retrying does not help.
	ErrDenied = errors.New("object store denied the operation")
	// ErrInvalid: the arguments can't be served by any store.
	ErrInvalid = errors.New("invalid argument")
	// ErrAmbiguous comes beside another kind, on Create and Delete: the effect
	// may have happened, or may yet happen.
	ErrAmbiguous = errors.New("outcome unknown")
)

// Error is the error of every [Store] in this module.
type Error struct {
	Op   Op
	Name string // the object; empty for list and bucket operations
	// Kind is one of this package's sentinels, or nil when Err is an error of
	// the caller's context or of no known kind.
	Kind error
	// Ambiguous is true if a mutation's effect is unknown; the error then
	// matches ErrAmbiguous.
	Ambiguous bool
	// Err is the cause, may be nil.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("object store: ")
	b.WriteString(string(e.Op))
	if e.Name != "" {
		fmt.Fprintf(&b, " %q", e.Name)
	}
	if e.Kind != nil {
		b.WriteString(": ")
		b.WriteString(e.Kind.Error())
	}
	if e.Ambiguous {
		b.WriteString(" (outcome unknown)")
	}
	if e.Err != nil {
		b.WriteString(": ")
		b.WriteString(e.Err.Error())
	}
	return b.String()
}

// Unwrap gives errors.Is and errors.As the kind, the mark and the cause.
func (e *Error) Unwrap() []error {
	errs := make([]error, 0, 3)
	if e.Kind != nil {
		errs = append(errs, e.Kind)
	}
	if e.Ambiguous {
		errs = append(errs, ErrAmbiguous)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

// ContextError is the error of an operation that ended because ctx did. It
// matches ctx.Err() and the context's cause. ctx must have ended.
func ContextError(ctx context.Context, op Op, name string) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if !errors.Is(cause, err) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return &Error{Op: op, Name: name, Err: err}
}

// Retryable reports whether the same call may succeed when it is simply made
// again. The end of the caller's context is not retryable.
func Retryable(err error) bool { return errors.Is(err, ErrUnavailable) }

// maxNameLen is what GCS allows in bytes of UTF-8.
const maxNameLen = 1024

// CheckName returns an error that matches ErrInvalid unless name can be an
// object's name in every store that Braid may meet, including ones that keep
// objects as files: 1 to 1024 bytes of UTF-8 without control characters, made
// of non-empty segments between slashes, none of them "." or "..".
func CheckName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: empty object name", ErrInvalid)
	case len(name) > maxNameLen:
		return fmt.Errorf("%w: object name of %d bytes, at most %d", ErrInvalid, len(name), maxNameLen)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: object name %q is not UTF-8", ErrInvalid, name)
	}
	for i := range len(name) {
		if name[i] < 0x20 || name[i] == 0x7f {
			return fmt.Errorf("%w: control character in object name %q", ErrInvalid, name)
		}
	}
	for rest, more := name, true; more; {
		var segment string
		segment, rest, more = strings.Cut(rest, "/")
		if segment == "" || segment == "." || segment == ".." {
			return fmt.Errorf("%w: segment %q in object name %q", ErrInvalid, segment, name)
		}
	}
	return nil
}
