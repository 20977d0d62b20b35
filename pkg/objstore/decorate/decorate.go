package decorate

import (
	"context"
	"io"
	"strings"

	"github.com/braidlog/braid/pkg/objstore"
)

// Decorator wraps a store.
type Decorator func(objstore.Store) objstore.Store

// Wrap applies the decorators to s, the first outermost: it is the first to see
// a call and the last to see its result.
func Wrap(s objstore.Store, outermostFirst ...Decorator) objstore.Store {
	for i := len(outermostFirst) - 1; i >= 0; i-- {
		s = outermostFirst[i](s)
	}
	return s
}

// Prefix keeps all names of the store below prefix and a slash: callers neither
// see it nor can leave it. An empty prefix changes nothing. A prefix that can't
// be part of a name makes every call fail with ErrInvalid. Names in errors are
// the full ones.
func Prefix(prefix string) Decorator {
	prefix = strings.TrimSuffix(prefix, "/")
	return func(s objstore.Store) objstore.Store {
		if prefix == "" {
			return s
		}
		return &prefixed{s: s, prefix: prefix + "/"}
	}
}

type prefixed struct {
	s      objstore.Store
	prefix string // ends with a slash
}

// full is the name below the prefix. It is not cleaned: a name that tries to
// climb out with ".." stays as it is and is refused below.
func (p *prefixed) full(name string) string { return p.prefix + name }

func (p *prefixed) strip(a objstore.Attrs) objstore.Attrs {
	a.Name = strings.TrimPrefix(a.Name, p.prefix)
	return a
}

func (p *prefixed) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	a, err := p.s.Create(ctx, p.full(name), body)
	return p.strip(a), err
}

func (p *prefixed) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (int, error) {
	return p.s.ReadRange(ctx, p.full(name), offset, dst)
}

func (p *prefixed) ReadSuffix(ctx context.Context, name string, dst []byte) (int, int64, error) {
	return p.s.ReadSuffix(ctx, p.full(name), dst)
}

func (p *prefixed) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	return p.s.OpenRange(ctx, p.full(name), offset, length)
}

func (p *prefixed) Attrs(ctx context.Context, name string) (objstore.Attrs, error) {
	a, err := p.s.Attrs(ctx, p.full(name))
	return p.strip(a), err
}

func (p *prefixed) ListPage(ctx context.Context, prefix, startAfter string, limit int) ([]objstore.Attrs, bool, error) {
	if startAfter != "" {
		startAfter = p.prefix + startAfter
	}
	page, more, err := p.s.ListPage(ctx, p.prefix+prefix, startAfter, limit)
	for i := range page {
		page[i] = p.strip(page[i])
	}
	return page, more, err
}

func (p *prefixed) Delete(ctx context.Context, name string, generation int64) error {
	return p.s.Delete(ctx, p.full(name), generation)
}

func (p *prefixed) BucketSettings(ctx context.Context) (objstore.BucketSettings, error) {
	return p.s.BucketSettings(ctx)
}
