package fetcher

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/braidlog/braid/pkg/walobject"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

// footerGuess is how much of an object's end is read first: enough for the
// footer of a few hundred ranges.
const footerGuess = 64 << 10

// smallObject is the size up to which an object is fetched whole for its footer:
// that takes hardly longer, and who reads its records next needs no GET.
const smallObject = 256 << 10

// Footer reads the footer of an object of the given size: from its block if
// that is cached or the object is small, else with one GET of the object's end,
// or two if the footer is large.
func (f *Fetcher) Footer(ctx context.Context, object string, size int64) (*storagev1.CombinedObjectFooter, error) {
	if size < walobject.TrailerSize {
		return nil, &DamageError{Object: object, Length: size, Offset: -1, Err: fmt.Errorf("an object of %d bytes has no footer", size)}
	}
	f.mu.Lock()
	closed, b := f.closed, f.cache.get(key{object: object})
	f.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	if b != nil && int64(len(b.data)) == size {
		f.metrics.hit(ctx)
		return f.decode(object, b.data, size)
	}
	if size <= min(smallObject, f.cfg.BlockBytes) {
		b, err := f.block(ctx, key{object: object})
		if err != nil {
			return nil, err
		}
		if int64(len(b.data)) != size {
			return nil, &DamageError{Object: object, Length: size, Offset: -1, Err: fmt.Errorf("the object has %d bytes, must have %d", len(b.data), size)}
		}
		return f.decode(object, b.data, size)
	}
	need := min(size, footerGuess)
	for {
		tail, err := f.tail(ctx, object, size, need)
		if err != nil {
			return nil, err
		}
		footer, err := f.decode(object, tail, size)
		var short *walobject.Error
		if errors.As(err, &short) && errors.Is(short, walobject.ErrShort) && short.Need > need && short.Need <= size {
			need = short.Need
			continue
		}
		return footer, err
	}
}

func (f *Fetcher) decode(object string, tail []byte, size int64) (*storagev1.CombinedObjectFooter, error) {
	footer, err := walobject.ReadFooter(tail, size)
	if err != nil {
		return nil, &DamageError{Object: object, Position: size - int64(len(tail)), Length: int64(len(tail)), Offset: -1, Err: err}
	}
	return footer, nil
}

// tail reads the last n bytes of an object, with one GET for all who want them
// at the same time.
func (f *Fetcher) tail(ctx context.Context, object string, size, n int64) ([]byte, error) {
	b, err := f.share(ctx, key{object: object, tail: n, size: size}, func(ctx context.Context, _ key) (*block, error) {
		select {
		case f.slots <- struct{}{}:
			defer func() { <-f.slots }()
		case <-ctx.Done():
			return nil, f.mapError(ctx, object, context.Cause(ctx))
		}
		buf := make([]byte, n)
		if _, err := f.store.ReadRange(ctx, object, size-n, buf); err != nil {
			return nil, f.mapError(ctx, object, err)
		}
		return &block{data: buf}, nil
	})
	if err != nil {
		return nil, err
	}
	return b.data, nil
}

// Object names an object and says how large it is.
type Object struct {
	Name string
	Size int64
}

// Footers calls fn with the footer of each object, which are to differ; i is the
// object's index. Footers are read at the same time, as many as half of the GETs
// that may run, and fn is called from several goroutines in any order. The first
// error, also of fn, ends the rest and is returned.
func (f *Fetcher) Footers(ctx context.Context, objects []Object, fn func(i int, footer *storagev1.CombinedObjectFooter) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(max(1, f.cfg.MaxFetches/2)) // leave something to the readers
	for i, o := range objects {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			footer, err := f.Footer(ctx, o.Name, o.Size)
			if err != nil {
				return err
			}
			return fn(i, footer)
		})
	}
	return g.Wait()
}
