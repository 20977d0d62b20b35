package memstore

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/objstore"
)

// pageSize is how many objects a listing returns when the caller names no
// limit, as in GCS.
const pageSize = 1000

// firstGeneration makes generations look like what they are elsewhere, large
// numbers, so that nobody takes one for a version counter from 1.
const firstGeneration = 1_600_000_000_000_000

// Options configures a [Store]. The zero value is ready to use.
type Options struct {
	// Now gives objects their time of creation; nil means time.Now.
	Now func() time.Time
	// Settings is what BucketSettings returns.
	Settings objstore.BucketSettings
}

// Store is an object store in memory. Create it with [New]. It is safe for
// concurrent use.
type Store struct {
	now func() time.Time

	mu         sync.RWMutex
	settings   objstore.BucketSettings // guarded by mu
	objects    map[string]*object      // guarded by mu; the values are immutable
	names      []string                // guarded by mu; sorted keys of objects
	generation int64                   // guarded by mu; the last one given out
}

type object struct {
	attrs   objstore.Attrs
	content []byte // never changed after it is in the map
}

var _ objstore.Store = (*Store)(nil)

// New returns an empty store.
func New(opts Options) *Store {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	return &Store{
		now:        opts.Now,
		settings:   opts.Settings,
		objects:    make(map[string]*object),
		generation: firstGeneration,
	}
}

func fail(op objstore.Op, name string, kind, err error) error {
	return &objstore.Error{Op: op, Name: name, Kind: kind, Err: err}
}

// check returns the error of a call that can't begin.
func check(ctx context.Context, op objstore.Op, name string) error {
	if ctx.Err() != nil {
		return objstore.ContextError(ctx, op, name)
	}
	if err := objstore.CheckName(name); err != nil {
		return fail(op, name, objstore.ErrInvalid, err)
	}
	return nil
}

// Create implements [objstore.Creator]. It copies the content, so the body's
// memory is the caller's again on return.
func (s *Store) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	if err := check(ctx, objstore.OpCreate, name); err != nil {
		return objstore.Attrs{}, err
	}
	content, err := readBody(body)
	if err != nil {
		return objstore.Attrs{}, fail(objstore.OpCreate, name, objstore.ErrInvalid, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.objects[name]; taken {
		return objstore.Attrs{}, fail(objstore.OpCreate, name, objstore.ErrExists, nil)
	}
	i, _ := slices.BinarySearch(s.names, name)
	s.names = slices.Insert(s.names, i, name)
	return s.putLocked(name, content), nil
}

func readBody(body objstore.Body) ([]byte, error) {
	r, err := body.Open()
	if err != nil {
		return nil, fmt.Errorf("open body: %w", err)
	}
	content := make([]byte, body.Size())
	n, err := io.ReadFull(r, content)
	if err == nil {
		var one [1]byte
		if k, _ := r.Read(one[:]); k > 0 {
			err = fmt.Errorf("body is longer than its %d bytes", body.Size())
		}
	} else {
		err = fmt.Errorf("read body: %w after %d of %d bytes", err, n, body.Size())
	}
	if cerr := r.Close(); err == nil && cerr != nil {
		err = fmt.Errorf("close body: %w", cerr)
	}
	if err != nil {
		return nil, err
	}
	if sum := objstore.CRC32C(content); sum != body.CRC32C() {
		return nil, fmt.Errorf("body has CRC32C %08x, not the declared %08x", sum, body.CRC32C())
	}
	return content, nil
}

// putLocked stores content under a new generation. The name is in s.names.
func (s *Store) putLocked(name string, content []byte) objstore.Attrs {
	s.generation++
	o := &object{
		attrs: objstore.Attrs{
			Name:           name,
			Size:           int64(len(content)),
			CRC32C:         objstore.CRC32C(content),
			Generation:     s.generation,
			Metageneration: 1,
			Created:        s.now(),
		},
		content: content,
	}
	s.objects[name] = o
	return o.attrs
}

// get returns the live object of that name.
func (s *Store) get(ctx context.Context, op objstore.Op, name string) (*object, error) {
	if err := check(ctx, op, name); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	o, ok := s.objects[name]
	if !ok {
		return nil, fail(op, name, objstore.ErrNotFound, nil)
	}
	return o, nil
}

// ReadRange implements [objstore.Reader].
func (s *Store) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (int, error) {
	if offset < 0 || len(dst) == 0 {
		return 0, fail(objstore.OpRead, name, objstore.ErrInvalid, fmt.Errorf("range at %d of %d bytes", offset, len(dst)))
	}
	o, err := s.get(ctx, objstore.OpRead, name)
	if err != nil {
		return 0, err
	}
	if offset >= o.attrs.Size {
		return 0, fail(objstore.OpRead, name, objstore.ErrRange, fmt.Errorf("offset %d, size %d", offset, o.attrs.Size))
	}
	n := copy(dst, o.content[offset:])
	if n < len(dst) {
		return n, fail(objstore.OpRead, name, objstore.ErrRange,
			fmt.Errorf("range [%d, %d), size %d", offset, offset+int64(len(dst)), o.attrs.Size))
	}
	return n, nil
}

// ReadSuffix implements [objstore.Reader].
func (s *Store) ReadSuffix(ctx context.Context, name string, dst []byte) (int, int64, error) {
	if len(dst) == 0 {
		return 0, 0, fail(objstore.OpRead, name, objstore.ErrInvalid, fmt.Errorf("suffix of 0 bytes"))
	}
	o, err := s.get(ctx, objstore.OpRead, name)
	if err != nil {
		return 0, 0, err
	}
	n := copy(dst, o.content[max(0, len(o.content)-len(dst)):])
	return n, o.attrs.Size, nil
}

// OpenRange implements [objstore.Reader]. The stream shows the object as it was
// when it was opened, even if it is deleted meanwhile.
func (s *Store) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	if offset < 0 || length == 0 || length < objstore.ToEnd {
		return nil, fail(objstore.OpRead, name, objstore.ErrInvalid, fmt.Errorf("range at %d of %d bytes", offset, length))
	}
	o, err := s.get(ctx, objstore.OpRead, name)
	if err != nil {
		return nil, err
	}
	whole := offset == 0 && length == objstore.ToEnd
	if offset >= o.attrs.Size && !whole {
		return nil, fail(objstore.OpRead, name, objstore.ErrRange, fmt.Errorf("offset %d, size %d", offset, o.attrs.Size))
	}
	content := o.content[offset:]
	if length != objstore.ToEnd && length < int64(len(content)) {
		content = content[:length]
	}
	return &stream{ctx: ctx, name: name, r: bytes.NewReader(content)}, nil
}

type stream struct {
	ctx  context.Context // a stream lives as long as the context it was opened with
	name string
	r    *bytes.Reader
}

func (s *stream) Read(p []byte) (int, error) {
	if s.ctx.Err() != nil {
		return 0, objstore.ContextError(s.ctx, objstore.OpRead, s.name)
	}
	return s.r.Read(p)
}

func (*stream) Close() error { return nil }

// Attrs implements [objstore.Reader].
func (s *Store) Attrs(ctx context.Context, name string) (objstore.Attrs, error) {
	o, err := s.get(ctx, objstore.OpAttrs, name)
	if err != nil {
		return objstore.Attrs{}, err
	}
	return o.attrs, nil
}

// ListPage implements [objstore.Lister].
func (s *Store) ListPage(ctx context.Context, prefix, startAfter string, limit int) ([]objstore.Attrs, bool, error) {
	if ctx.Err() != nil {
		return nil, false, objstore.ContextError(ctx, objstore.OpList, "")
	}
	if limit < 0 {
		return nil, false, fail(objstore.OpList, "", objstore.ErrInvalid, fmt.Errorf("limit %d", limit))
	}
	if limit == 0 || limit > pageSize {
		limit = pageSize
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	i, found := slices.BinarySearch(s.names, max(prefix, startAfter))
	if found && s.names[i] == startAfter {
		i++
	}
	var page []objstore.Attrs
	for ; i < len(s.names) && strings.HasPrefix(s.names[i], prefix); i++ {
		if len(page) == limit {
			return page, true, nil
		}
		page = append(page, s.objects[s.names[i]].attrs)
	}
	return page, false, nil
}

// Delete implements [objstore.Deleter].
func (s *Store) Delete(ctx context.Context, name string, generation int64) error {
	if err := check(ctx, objstore.OpDelete, name); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[name]
	if !ok {
		return nil
	}
	if generation != objstore.AnyGeneration && generation != o.attrs.Generation {
		return fail(objstore.OpDelete, name, objstore.ErrPrecondition,
			fmt.Errorf("generation is %d, not %d", o.attrs.Generation, generation))
	}
	delete(s.objects, name)
	i, _ := slices.BinarySearch(s.names, name)
	s.names = slices.Delete(s.names, i, i+1)
	return nil
}

// BucketSettings implements [objstore.Inspector].
func (s *Store) BucketSettings(ctx context.Context) (objstore.BucketSettings, error) {
	if ctx.Err() != nil {
		return objstore.BucketSettings{}, objstore.ContextError(ctx, objstore.OpBucketInfo, "")
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.settings, nil
}

// SetBucketSettings changes what BucketSettings returns. They are only
// reported: this store has no lifecycle, retention or versions.
func (s *Store) SetBucketSettings(b objstore.BucketSettings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settings = b
}

// Len returns the number of live objects and the sum of their sizes in bytes.
func (s *Store) Len() (objects int, size int64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, o := range s.objects {
		size += o.attrs.Size
	}
	return len(s.objects), size
}

// Tamper damages an object as a failing disk would: it replaces the content
// with what change returns and leaves generation and recorded checksum as they
// were; the size follows the content. For tests of the readers' own checks. It
// reports whether the object exists. change owns the slice it is given.
func (s *Store) Tamper(name string, change func(content []byte) []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[name]
	if !ok {
		return false
	}
	content := change(bytes.Clone(o.content))
	attrs := o.attrs
	attrs.Size = int64(len(content))
	s.objects[name] = &object{attrs: attrs, content: content}
	return true
}
