package decorate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/objstore"
)

// RetryOptions bounds the retries of one call. The call's context bounds them too.
type RetryOptions struct {
	// Policy gives the waits; the zero Policy means backoff.Default.
	Policy backoff.Policy
	// MaxAttempts bounds the attempts of one call, the first included; 0 means
	// DefaultMaxAttempts. For a stream it bounds the attempts without progress.
	MaxAttempts int
	// MaxElapsed bounds the time from a call to the start of its last attempt;
	// 0 means no bound but the context's.
	MaxElapsed time.Duration
	// Budget is shared with other calls to the same store; nil means none.
	Budget *backoff.Budget
	// Rand returns numbers in [0, 1) for the jitter; nil means math/rand/v2.
	Rand func() float64
	// OnRetry is told of every failure that will be retried, before the wait.
	// It must not block. nil means nobody is told.
	OnRetry func(op objstore.Op, name string, attempt int, delay time.Duration, err error)
}

// DefaultMaxAttempts is the number of attempts where the options name none.
const DefaultMaxAttempts = 5

// Retry repeats calls that fail with ErrUnavailable.
//
// Create. A repeated create may find its own earlier success: the object was
// stored and the answer was lost. So when an attempt says ErrExists after an
// earlier one whose outcome is unknown, Retry reads the attributes back: the
// same size and CRC32C are this call's success; anything else is ErrExists that
// also matches ErrCorrupt, because the caller's name is fresh and nobody else
// should have used it. Two creators of one name with equal content and lost
// answers can both succeed; names that are unique per attempt exclude that. An
// ErrExists of the first attempt is returned as it is. An upload that arrived
// damaged (ErrCorrupt) is tried again; if the store kept the damaged object,
// Retry first deletes exactly that generation.
//
// Delete. A repeated delete that finds nothing has succeeded, as any delete. One
// that meets another generation returns ErrPrecondition: the generation it names
// is not there, whichever attempt or caller removed it.
//
// ReadRange continues behind the bytes that earlier attempts delivered, and a
// stream of OpenRange is reopened there.
//
// When retries end without success, the error wraps the last one, matches its
// kind, and matches ErrAmbiguous if any attempt's outcome is unknown.
func Retry(opts RetryOptions) Decorator {
	if opts.MaxAttempts <= 0 {
		opts.MaxAttempts = DefaultMaxAttempts
	}
	return func(s objstore.Store) objstore.Store { return &retrying{s: s, opts: opts} }
}

type retrying struct {
	s    objstore.Store
	opts RetryOptions
}

// again marks a failure that is retried although it is not ErrUnavailable.
type again struct{ error }

func (a again) Unwrap() error { return a.error }

// do runs fn until it succeeds or may not be repeated.
func (r *retrying) do(ctx context.Context, op objstore.Op, name string, fn func(ctx context.Context) error) error {
	ambiguous := false
	opts := backoff.Options{
		Policy:      r.opts.Policy,
		MaxAttempts: r.opts.MaxAttempts,
		MaxElapsed:  r.opts.MaxElapsed,
		Budget:      r.opts.Budget,
		Rand:        r.opts.Rand,
		Classify: func(err error) backoff.Verdict {
			return backoff.Verdict{Retry: objstore.Retryable(err) || errors.As(err, new(again))}
		},
	}
	if r.opts.OnRetry != nil {
		opts.OnRetry = func(attempt int, delay time.Duration, err error) {
			r.opts.OnRetry(op, name, attempt, delay, err)
		}
	}
	err := backoff.Retry(ctx, opts, func(ctx context.Context, _ int) error {
		err := fn(ctx)
		ambiguous = ambiguous || errors.Is(err, objstore.ErrAmbiguous)
		return err
	})
	return finish(ctx, op, name, ambiguous, err)
}

// finish gives the loop's error the form that package objstore promises.
// ambiguous is true if the outcome of any attempt is unknown.
func finish(ctx context.Context, op objstore.Op, name string, ambiguous bool, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, objstore.ErrExists) || errors.Is(err, objstore.ErrPrecondition) {
		// Whatever the attempts did: another object has the name, or the
		// generation to delete is not there.
		ambiguous = false
	}
	last := (*objstore.Error)(nil)
	errors.As(err, &last)
	if bare, ok := err.(*objstore.Error); ok && (bare.Ambiguous || !ambiguous) { //nolint:errorlint // only an unwrapped one is returned as it is
		return bare
	}
	out := &objstore.Error{Op: op, Name: name, Ambiguous: ambiguous, Err: err}
	if last != nil {
		out.Kind = last.Kind
	}
	if ctx.Err() != nil && (last == nil || errors.Is(out.Kind, objstore.ErrUnavailable)) {
		// The loop ended with the caller's context.
		out.Kind = nil
		out.Err = &callerEnded{ctx: ctx.Err(), cause: context.Cause(ctx), last: err}
	}
	return out
}

// callerEnded is an error that matches the end of the caller's context and not
// the store's last failure: giving up must not look like an outage.
type callerEnded struct{ ctx, cause, last error }

func (e *callerEnded) Error() string { return e.last.Error() }

func (e *callerEnded) Unwrap() []error { return []error{e.ctx, e.cause} }

// delay is the wait after the n-th failure.
func (r *retrying) delay(n int) time.Duration {
	policy, random := r.opts.Policy, r.opts.Rand
	if policy == (backoff.Policy{}) {
		policy = backoff.Default
	}
	if random == nil {
		random = rand.Float64
	}
	return policy.Delay(n, random())
}

func (r *retrying) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	var stored objstore.Attrs
	unsettled := false // an earlier attempt may have stored the object
	var exists error   // an attempt's ErrExists that may be its success
	readBack := func(ctx context.Context) (err error) {
		stored, err = r.readBack(ctx, name, body, exists)
		return err
	}
	err := r.do(ctx, objstore.OpCreate, name, func(ctx context.Context) error {
		if exists != nil {
			return readBack(ctx) // failed before; there is nothing to send
		}
		a, err := r.s.Create(ctx, name, body)
		switch {
		case err == nil:
			stored = a
			return nil
		case errors.Is(err, objstore.ErrExists) && unsettled:
			exists = err
			return readBack(ctx)
		case errors.Is(err, objstore.ErrCorrupt):
			if a.Generation != 0 {
				if derr := r.s.Delete(ctx, name, a.Generation); derr != nil {
					return &objstore.Error{
						Op: objstore.OpCreate, Name: name, Kind: objstore.ErrCorrupt, Ambiguous: true,
						Err: fmt.Errorf("%w; and the damaged object remains: %v", err, derr), //nolint:errorlint // the delete's kind is not the create's
					}
				}
			}
			return again{err}
		}
		unsettled = unsettled || errors.Is(err, objstore.ErrAmbiguous)
		return err
	})
	if err != nil {
		return objstore.Attrs{}, err
	}
	return stored, nil
}

// readBack settles an ErrExists that may be this call's own success.
func (r *retrying) readBack(ctx context.Context, name string, body objstore.Body, exists error) (objstore.Attrs, error) {
	a, err := r.s.Attrs(ctx, name)
	switch {
	case errors.Is(err, objstore.ErrNotFound):
		// It was there and is gone: somebody deleted it, and creating it again
		// would undo that.
		return objstore.Attrs{}, backoff.Permanent(&objstore.Error{
			Op: objstore.OpCreate, Name: name, Kind: objstore.ErrExists, Err: fmt.Errorf("%w; deleted since", exists),
		})
	case err != nil:
		return objstore.Attrs{}, err
	case objstore.Same(a, body):
		return a, nil
	}
	return objstore.Attrs{}, backoff.Permanent(&objstore.Error{
		Op: objstore.OpCreate, Name: name, Kind: objstore.ErrExists,
		Err: fmt.Errorf("%w: it has %d bytes with CRC32C %08x (generation %d), sent were %d with %08x",
			objstore.ErrCorrupt, a.Size, a.CRC32C, a.Generation, body.Size(), body.CRC32C()),
	})
}

func (r *retrying) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (int, error) {
	done := 0
	err := r.do(ctx, objstore.OpRead, name, func(ctx context.Context) error {
		if done == len(dst) && done > 0 {
			return nil // the last attempt failed behind the last byte
		}
		n, err := r.s.ReadRange(ctx, name, offset+int64(done), dst[done:])
		done += n
		return err
	})
	return done, err
}

func (r *retrying) ReadSuffix(ctx context.Context, name string, dst []byte) (n int, size int64, err error) {
	err = r.do(ctx, objstore.OpRead, name, func(ctx context.Context) error {
		var err error
		n, size, err = r.s.ReadSuffix(ctx, name, dst)
		return err
	})
	return n, size, err
}

func (r *retrying) Attrs(ctx context.Context, name string) (a objstore.Attrs, err error) {
	err = r.do(ctx, objstore.OpAttrs, name, func(ctx context.Context) error {
		var err error
		a, err = r.s.Attrs(ctx, name)
		return err
	})
	return a, err
}

func (r *retrying) ListPage(ctx context.Context, prefix, startAfter string, limit int) (page []objstore.Attrs, more bool, err error) {
	err = r.do(ctx, objstore.OpList, "", func(ctx context.Context) error {
		var err error
		page, more, err = r.s.ListPage(ctx, prefix, startAfter, limit)
		return err
	})
	return page, more, err
}

func (r *retrying) Delete(ctx context.Context, name string, generation int64) error {
	return r.do(ctx, objstore.OpDelete, name, func(ctx context.Context) error {
		return r.s.Delete(ctx, name, generation)
	})
}

func (r *retrying) BucketSettings(ctx context.Context) (b objstore.BucketSettings, err error) {
	err = r.do(ctx, objstore.OpBucketInfo, "", func(ctx context.Context) error {
		var err error
		b, err = r.s.BucketSettings(ctx)
		return err
	})
	return b, err
}

func (r *retrying) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	st := &resuming{r: r, ctx: ctx, name: name, begin: offset, pos: offset, length: length}
	if err := r.do(ctx, objstore.OpRead, name, st.open); err != nil {
		return nil, err
	}
	return st, nil
}

// resuming is a stream that is reopened where it broke.
type resuming struct {
	r      *retrying
	ctx    context.Context // the stream ends with it
	name   string
	begin  int64
	pos    int64 // the object's byte that comes next
	length int64 // of the whole range, or ToEnd
	cur    io.ReadCloser
	stuck  int   // failures since the last byte
	err    error // the stream's end
}

// open opens what is left of the range.
func (s *resuming) open(context.Context) error {
	left := s.length
	if left != objstore.ToEnd {
		left -= s.pos - s.begin
	}
	// Not the attempt's context: the stream outlives the attempt.
	cur, err := s.r.s.OpenRange(s.ctx, s.name, s.pos, left)
	if err != nil {
		return err
	}
	s.cur = cur
	return nil
}

func (s *resuming) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for s.err == nil {
		n, err := s.cur.Read(p)
		s.pos += int64(n)
		if n > 0 {
			s.stuck = 0
		}
		switch {
		case n > 0 && (err == nil || objstore.Retryable(err)):
			return n, nil // a failure is met again by the next call
		case err == nil:
			continue
		case !objstore.Retryable(err):
			s.err = err
			return n, err
		}
		s.resume(err)
	}
	return 0, s.err
}

// resume reopens the stream after cause, or ends it.
func (s *resuming) resume(cause error) {
	_ = s.cur.Close() // it failed already
	if s.length != objstore.ToEnd && s.pos == s.begin+s.length {
		s.err = io.EOF // all was read before it failed
		return
	}
	s.stuck++
	if s.stuck >= s.r.opts.MaxAttempts {
		s.err = finish(s.ctx, objstore.OpRead, s.name, false,
			&backoff.ExhaustedError{Attempts: s.stuck, Limit: "attempts", Err: cause})
		return
	}
	if s.stuck > 1 && backoff.Sleep(s.ctx, s.r.delay(s.stuck-1)) != nil {
		s.err = objstore.ContextError(s.ctx, objstore.OpRead, s.name)
		return
	}
	err := s.r.do(s.ctx, objstore.OpRead, s.name, s.open)
	switch {
	case err == nil:
	case errors.Is(err, objstore.ErrRange) && s.pos > s.begin:
		s.err = io.EOF // the object ends at pos
	default:
		s.err = err
	}
}

func (s *resuming) Close() error {
	if s.err == nil {
		s.err = &objstore.Error{Op: objstore.OpRead, Name: s.name, Kind: objstore.ErrInvalid, Err: errors.New("read after close")}
	}
	return s.cur.Close()
}
