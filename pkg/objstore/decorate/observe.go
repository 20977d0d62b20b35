package decorate

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/braidlog/braid/pkg/objstore"
)

// Call is a call that begins.
type Call struct {
	Op   objstore.Op
	Name string // empty for listings and settings
	// Size is the size of the body or of the range asked for, in bytes; -1 if
	// the call names none.
	Size int64
}

// Result is how a call ended. A stream's call ends when it is closed.
type Result struct {
	Call
	// Bytes is the content moved: the body's size after a create that
	// succeeded, the bytes delivered by a read.
	Bytes int64
	// Items is the number of objects on a listing's page.
	Items    int
	Duration time.Duration
	Err      error
}

// Observer is told of a call. The context it returns is the one the call gets,
// so an observer can start a span; end is called once, when the call has ended,
// and must not block. Both are called from many goroutines.
type Observer func(ctx context.Context, c Call) (_ context.Context, end func(Result))

// Observe tells the observer of every call. Outside Retry it sees operations,
// inside it each attempt.
func Observe(o Observer) Decorator {
	return func(s objstore.Store) objstore.Store { return &observed{s: s, observe: o} }
}

type observed struct {
	s       objstore.Store
	observe Observer
}

func (o *observed) begin(ctx context.Context, op objstore.Op, name string, size int64) (context.Context, func(bytes int64, items int, err error)) {
	c := Call{Op: op, Name: name, Size: size}
	start := time.Now()
	ctx, end := o.observe(ctx, c)
	return ctx, func(bytes int64, items int, err error) {
		end(Result{Call: c, Bytes: bytes, Items: items, Duration: time.Since(start), Err: err})
	}
}

func (o *observed) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	ctx, end := o.begin(ctx, objstore.OpCreate, name, body.Size())
	a, err := o.s.Create(ctx, name, body)
	moved := int64(0)
	if err == nil {
		moved = body.Size()
	}
	end(moved, 0, err)
	return a, err
}

func (o *observed) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (int, error) {
	ctx, end := o.begin(ctx, objstore.OpRead, name, int64(len(dst)))
	n, err := o.s.ReadRange(ctx, name, offset, dst)
	end(int64(n), 0, err)
	return n, err
}

func (o *observed) ReadSuffix(ctx context.Context, name string, dst []byte) (int, int64, error) {
	ctx, end := o.begin(ctx, objstore.OpRead, name, int64(len(dst)))
	n, size, err := o.s.ReadSuffix(ctx, name, dst)
	end(int64(n), 0, err)
	return n, size, err
}

func (o *observed) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	ctx, end := o.begin(ctx, objstore.OpRead, name, length)
	r, err := o.s.OpenRange(ctx, name, offset, length)
	if err != nil {
		end(0, 0, err)
		return nil, err
	}
	return &observedStream{r: r, end: end}, nil
}

type observedStream struct {
	r     io.ReadCloser
	bytes int64
	err   error
	end   func(bytes int64, items int, err error)
}

func (s *observedStream) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.bytes += int64(n)
	if err != nil && s.err == nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

func (s *observedStream) Close() error {
	err := s.r.Close()
	if s.end != nil {
		s.end(s.bytes, 0, s.err)
		s.end = nil
	}
	return err
}

func (o *observed) Attrs(ctx context.Context, name string) (objstore.Attrs, error) {
	ctx, end := o.begin(ctx, objstore.OpAttrs, name, -1)
	a, err := o.s.Attrs(ctx, name)
	end(0, 0, err)
	return a, err
}

func (o *observed) ListPage(ctx context.Context, prefix, startAfter string, limit int) ([]objstore.Attrs, bool, error) {
	ctx, end := o.begin(ctx, objstore.OpList, "", -1)
	page, more, err := o.s.ListPage(ctx, prefix, startAfter, limit)
	end(0, len(page), err)
	return page, more, err
}

func (o *observed) Delete(ctx context.Context, name string, generation int64) error {
	ctx, end := o.begin(ctx, objstore.OpDelete, name, -1)
	err := o.s.Delete(ctx, name, generation)
	end(0, 0, err)
	return err
}

func (o *observed) BucketSettings(ctx context.Context) (objstore.BucketSettings, error) {
	ctx, end := o.begin(ctx, objstore.OpBucketInfo, "", -1)
	b, err := o.s.BucketSettings(ctx)
	end(0, 0, err)
	return b, err
}
