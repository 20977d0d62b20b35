package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/braidlog/braid/pkg/objstore"
)

// ErrDiffers: the bucket holds other bytes under the snapshot's name.
var ErrDiffers = errors.New("the bucket holds another snapshot of this name")

// Store is what a [Bucket] needs of the object store, whose names are relative
// to the configured bucket prefix.
type Store interface {
	objstore.Creator
	objstore.Reader
	objstore.Lister
	objstore.Deleter
}

// Bucket keeps the snapshots of one cluster as objects, create-only.
type Bucket struct {
	store  Store
	prefix string // with a slash at its end
}

// NewBucket makes a bucket of a store.
func NewBucket(store Store, clusterID string) *Bucket {
	return &Bucket{store: store, prefix: clusterID + "/meta/"}
}

// Stored is a snapshot in the bucket. Of its sum only the first bytes, those in
// its name, are known.
type Stored struct {
	Info
	Generation int64
}

// List returns the snapshots of an incarnation, newest first.
func (b *Bucket) List(ctx context.Context, incarnation uint32) ([]Stored, error) {
	var out []Stored
	for a, err := range objstore.List(ctx, b.store, fmt.Sprintf("%s%08x-", b.prefix, incarnation), "") {
		if err != nil {
			return nil, fmt.Errorf("list snapshots in the bucket: %w", err)
		}
		if i, ok := parseName(strings.TrimPrefix(a.Name, b.prefix)); ok && i.Incarnation == incarnation {
			i.Size = a.Size
			out = append(out, Stored{Info: i, Generation: a.Generation})
		}
	}
	slices.Reverse(out)
	return out, nil
}

// Create stores a snapshot that the disk keeps. If an object has its name
// already, that is read back and compared: the same bytes are a success, others
// are ErrDiffers. The file's bytes are compared with its sum first: what has
// rotted is not spread, the error is then a [*state.SnapshotError].
func (b *Bucket) Create(ctx context.Context, d *Disk, i Info) (err error) {
	f, err := d.open(i)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := verify(io.NewSectionReader(f, 0, i.Size)); err != nil {
		return fmt.Errorf("upload snapshot %v: %w", i.ID, err)
	}
	body, err := objstore.SumSection(f, 0, i.Size)
	if err != nil {
		return fmt.Errorf("upload snapshot %v: %w", i.ID, err)
	}
	name := b.prefix + i.Name()
	_, err = b.store.Create(ctx, name, body)
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, objstore.ErrExists):
		return fmt.Errorf("upload snapshot %v: %w", i.ID, err)
	}
	attrs, err := b.store.Attrs(ctx, name)
	if err != nil {
		return fmt.Errorf("upload snapshot %v, read back: %w", i.ID, err)
	}
	if !objstore.Same(attrs, body) {
		return fmt.Errorf("upload snapshot %v: %w: %d bytes with CRC32C %08x, ours has %d with %08x", i.ID, ErrDiffers,
			attrs.Size, attrs.CRC32C, body.Size(), body.CRC32C())
	}
	return nil
}

// fetch writes a snapshot's bytes to w.
func (b *Bucket) fetch(ctx context.Context, i Info, w io.Writer) (err error) {
	r, err := b.store.OpenRange(ctx, b.prefix+i.Name(), 0, objstore.ToEnd)
	if err != nil {
		return fmt.Errorf("fetch snapshot %v from the bucket: %w", i.ID, err)
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if _, err := io.Copy(w, r); err != nil {
		return fmt.Errorf("fetch snapshot %v from the bucket: %w", i.ID, err)
	}
	return nil
}

// Prune deletes the listed snapshots that end below an offset. They must be of
// our own incarnation: nothing of another is ever deleted (design review H4).
func (b *Bucket) Prune(ctx context.Context, listed []Stored, below int64) error {
	for _, s := range listed {
		if s.End >= below {
			continue
		}
		if err := b.store.Delete(ctx, b.prefix+s.Name(), s.Generation); err != nil && !errors.Is(err, objstore.ErrPrecondition) {
			return fmt.Errorf("delete snapshot %v from the bucket: %w", s.ID, err)
		}
	}
	return nil
}
