package gcs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"cloud.google.com/go/storage"

	"github.com/braidlog/braid/pkg/objstore"
)

// ReadRange implements [objstore.Reader].
func (s *Store) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (int, error) {
	if offset < 0 || len(dst) == 0 {
		return 0, invalid(objstore.OpRead, name, "range at %d of %d bytes", offset, len(dst))
	}
	r, err := s.open(ctx, name, offset, int64(len(dst)), int64(len(dst)))
	if err != nil {
		return 0, err
	}
	defer r.Close() //nolint:errcheck // always nil
	n, err := r.fill(dst)
	if err == nil && n < len(dst) {
		err = &objstore.Error{
			Op: objstore.OpRead, Name: name, Kind: objstore.ErrRange,
			Err: fmt.Errorf("range [%d, %d), size %d", offset, offset+int64(len(dst)), r.r.Attrs.Size),
		}
	}
	return n, err
}

// ReadSuffix implements [objstore.Reader].
func (s *Store) ReadSuffix(ctx context.Context, name string, dst []byte) (int, int64, error) {
	if len(dst) == 0 {
		return 0, 0, invalid(objstore.OpRead, name, "suffix of 0 bytes")
	}
	r, err := s.open(ctx, name, -int64(len(dst)), objstore.ToEnd, int64(len(dst)))
	if err != nil {
		if errors.Is(errorKind(err), objstore.ErrRange) {
			return 0, 0, nil // only an empty object has no suffix
		}
		return 0, 0, err
	}
	defer r.Close() //nolint:errcheck // always nil
	size := r.r.Attrs.Size
	want := min(int64(len(dst)), size)
	n, err := r.fill(dst[:want])
	if err == nil && int64(n) < want {
		err = &objstore.Error{
			Op: objstore.OpRead, Name: name, Kind: objstore.ErrUnavailable,
			Err: fmt.Errorf("%d of the last %d bytes: %w", n, want, io.ErrUnexpectedEOF),
		}
	}
	return n, size, err
}

// OpenRange implements [objstore.Reader]. The stream as a whole has no bound
// but ctx; the opening and every wait for bytes have.
func (s *Store) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	if offset < 0 || length == 0 || length < objstore.ToEnd {
		return nil, invalid(objstore.OpRead, name, "range at %d of %d bytes", offset, length)
	}
	r, err := s.open(ctx, name, offset, length, -1)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// stream is a read in progress. Its attempt's context is cancelled by the
// first of: the caller's context, the stall timer, the bound on the whole
// attempt if there is one, Close.
type stream struct {
	name    string
	caller  context.Context // the stream ends with it
	attempt context.Context // its cause says why a read failed
	cancel  context.CancelCauseFunc
	stall   *time.Timer
	timeout time.Duration
	r       *storage.Reader
	err     error // what the next Read returns
}

// open starts a read. bound is the number of bytes that the whole attempt's
// deadline allows for, or -1 for none.
func (s *Store) open(ctx context.Context, name string, offset, length, bound int64) (*stream, error) {
	if ctx.Err() != nil {
		return nil, objstore.ContextError(ctx, objstore.OpRead, name)
	}
	if err := objstore.CheckName(name); err != nil {
		return nil, &objstore.Error{Op: objstore.OpRead, Name: name, Kind: objstore.ErrInvalid, Err: err}
	}
	attempt, cancel := context.WithCancelCause(ctx)
	if bound >= 0 {
		limited, stop := context.WithTimeoutCause(attempt, s.cfg.attemptTimeout(bound), errAttempt)
		parent := cancel
		attempt, cancel = limited, func(cause error) { parent(cause); stop() }
	}
	st := &stream{name: name, caller: ctx, attempt: attempt, cancel: cancel, timeout: s.cfg.StallTimeout}
	st.stall = time.AfterFunc(s.cfg.AttemptTimeout, func() { cancel(errStalled) })
	r, err := s.bucket.Object(name).NewRangeReader(attempt, offset, length)
	st.stall.Stop()
	if err != nil {
		defer cancel(nil)
		return nil, fail(ctx, attempt, objstore.OpRead, name, err)
	}
	st.r = r
	return st, nil
}

// Read implements io.Reader.
func (s *stream) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if s.err != nil {
		return 0, s.err
	}
	s.stall.Reset(s.timeout)
	n, err := s.r.Read(p)
	s.stall.Stop()
	switch {
	case err == nil:
	case errors.Is(err, io.EOF) && s.r.Remain() <= 0:
		s.err = io.EOF
	default:
		s.err = fail(s.caller, s.attempt, objstore.OpRead, s.name, err)
	}
	if n > 0 {
		return n, nil // the error comes with the next call
	}
	return 0, s.err
}

// fill reads to the end of dst or of the stream, whichever comes first; the
// stream's end is no error.
func (s *stream) fill(dst []byte) (int, error) {
	n := 0
	for n < len(dst) {
		k, err := s.Read(dst[n:])
		n += k
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// Close implements io.Closer. It breaks off what is still under way.
func (s *stream) Close() error {
	s.stall.Stop()
	s.cancel(nil)
	// What it says was said by Read, or is of no use to who stops reading.
	_ = s.r.Close()
	return nil
}

func errorKind(err error) error {
	if e, ok := err.(*objstore.Error); ok { //nolint:errorlint // made by this package, never wrapped
		return e.Kind
	}
	return nil
}
