package decorate

import (
	"context"
	"io"
	"sync"

	"github.com/braidlog/braid/pkg/objstore"
)

// Limits are the calls that may be in flight at a time; 0 means no limit.
type Limits struct {
	// Creates bounds uploads, Reads bounds ReadRange, ReadSuffix and open
	// streams (a stream holds its place until it is closed), Others bounds
	// attributes, listings, deletes and settings together.
	Creates, Reads, Others int
}

// Limit makes calls past the limits wait, in no particular order, until a place
// is free or their context ends. Who waits holds whatever it holds: callers
// bound their own number.
func Limit(l Limits) Decorator {
	return func(s objstore.Store) objstore.Store {
		return &limited{s: s, creates: newGate(l.Creates), reads: newGate(l.Reads), others: newGate(l.Others)}
	}
}

// gate has one token per place; nil is always open.
type gate chan struct{}

func newGate(n int) gate {
	if n <= 0 {
		return nil
	}
	return make(gate, n)
}

func (g gate) enter(ctx context.Context, op objstore.Op, name string) error {
	if g == nil {
		return nil
	}
	select {
	case g <- struct{}{}:
		return nil
	default:
	}
	select {
	case g <- struct{}{}:
		return nil
	case <-ctx.Done():
		return objstore.ContextError(ctx, op, name)
	}
}

func (g gate) leave() {
	if g != nil {
		<-g
	}
}

type limited struct {
	s                      objstore.Store
	creates, reads, others gate
}

func (l *limited) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	if err := l.creates.enter(ctx, objstore.OpCreate, name); err != nil {
		return objstore.Attrs{}, err
	}
	defer l.creates.leave()
	return l.s.Create(ctx, name, body)
}

func (l *limited) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (int, error) {
	if err := l.reads.enter(ctx, objstore.OpRead, name); err != nil {
		return 0, err
	}
	defer l.reads.leave()
	return l.s.ReadRange(ctx, name, offset, dst)
}

func (l *limited) ReadSuffix(ctx context.Context, name string, dst []byte) (int, int64, error) {
	if err := l.reads.enter(ctx, objstore.OpRead, name); err != nil {
		return 0, 0, err
	}
	defer l.reads.leave()
	return l.s.ReadSuffix(ctx, name, dst)
}

func (l *limited) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	if err := l.reads.enter(ctx, objstore.OpRead, name); err != nil {
		return nil, err
	}
	r, err := l.s.OpenRange(ctx, name, offset, length)
	if err != nil {
		l.reads.leave()
		return nil, err
	}
	return &limitedStream{ReadCloser: r, leave: sync.OnceFunc(l.reads.leave)}, nil
}

type limitedStream struct {
	io.ReadCloser
	leave func()
}

func (s *limitedStream) Close() error {
	defer s.leave()
	return s.ReadCloser.Close()
}

func (l *limited) Attrs(ctx context.Context, name string) (objstore.Attrs, error) {
	if err := l.others.enter(ctx, objstore.OpAttrs, name); err != nil {
		return objstore.Attrs{}, err
	}
	defer l.others.leave()
	return l.s.Attrs(ctx, name)
}

func (l *limited) ListPage(ctx context.Context, prefix, startAfter string, limit int) ([]objstore.Attrs, bool, error) {
	if err := l.others.enter(ctx, objstore.OpList, ""); err != nil {
		return nil, false, err
	}
	defer l.others.leave()
	return l.s.ListPage(ctx, prefix, startAfter, limit)
}

func (l *limited) Delete(ctx context.Context, name string, generation int64) error {
	if err := l.others.enter(ctx, objstore.OpDelete, name); err != nil {
		return err
	}
	defer l.others.leave()
	return l.s.Delete(ctx, name, generation)
}

func (l *limited) BucketSettings(ctx context.Context) (objstore.BucketSettings, error) {
	if err := l.others.enter(ctx, objstore.OpBucketInfo, ""); err != nil {
		return objstore.BucketSettings{}, err
	}
	defer l.others.leave()
	return l.s.BucketSettings(ctx)
}
