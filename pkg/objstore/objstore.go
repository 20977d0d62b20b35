package objstore

import (
	"context"
	"io"
	"iter"
	"time"
)

// Attrs describes one stored object.
type Attrs struct {
	// Name is the object's name, relative to the store it was asked of.
	Name string
	// Size is the content's length in bytes.
	Size int64
	// CRC32C is the Castagnoli checksum of the whole content.
	CRC32C uint32
	// Generation identifies this object among all that ever had its name; > 0.
	Generation int64
	// Metageneration counts changes of the object's metadata; 1 on an object
	// that was never touched after its creation, as all of Braid's are.
	Metageneration int64
	// Created is the store's time of creation. It is for people and reports:
	// no decision of the protocol compares it with another clock.
	Created time.Time
}

// AnyGeneration, given to [Deleter.Delete], deletes whatever is there.
const AnyGeneration int64 = 0

// ToEnd, given to [Reader.OpenRange] as the length, reads to the object's end.
const ToEnd int64 = -1

// Creator makes objects.
type Creator interface {
	// Create stores body under name, provided no live object has that name, in
	// one request, and returns what the store says it stored.
	//
	// When Create returns nil, the content is durable and the returned size and
	// CRC32C were compared with the body's.
	//
	// Errors: ErrExists, an object has the name; ErrCorrupt, the store took
	// something else than was sent: if the returned Attrs have a generation,
	// that damaged object exists and the caller may delete that generation;
	// ErrInvalid, a name that no object may have, or a body whose reader does
	// not yield what it declares (nothing was stored then); ErrBucketNotFound,
	// ErrDenied; ErrUnavailable, try again, mostly together with ErrAmbiguous.
	//
	// Create opens body at most once per call and has closed it on return. It
	// doesn't modify or keep it.
	Create(ctx context.Context, name string, body Body) (Attrs, error)
}

// Reader reads objects. Each method is one request.
type Reader interface {
	// ReadRange fills dst from the object's bytes [offset, offset+len(dst)).
	// It returns len(dst) and nil, or the number of valid bytes at the start of
	// dst and an error. Where the object ends inside or before the range, that
	// error is ErrRange. An empty dst is ErrInvalid.
	ReadRange(ctx context.Context, name string, offset int64, dst []byte) (n int, err error)

	// ReadSuffix reads the last min(len(dst), size) bytes of the object to the
	// start of dst and returns their number together with the size of the whole
	// object; so dst[0] is the object's byte size-n. An empty object gives 0, 0.
	// An empty dst is ErrInvalid.
	ReadSuffix(ctx context.Context, name string, dst []byte) (n int, size int64, err error)

	// OpenRange streams the object's bytes [offset, offset+length), or
	// [offset, size) if length is ToEnd. An offset at or behind the object's
	// end is ErrRange, from OpenRange itself; a range that begins inside the
	// object and ends behind it yields what is there and then io.EOF, except
	// that OpenRange(…, 0, ToEnd) of an empty object yields nothing.
	// A length of 0 is ErrInvalid.
	//
	// Errors of the stream's Read are those of ReadRange, and stay: after one,
	// every Read returns it. A stream that gives no byte for the
	// implementation's stall time fails with ErrUnavailable.
	// The stream ends when ctx does. It is not safe for concurrent use and the
	// caller closes it.
	OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error)

	// Attrs returns what is known about the object without reading it.
	Attrs(ctx context.Context, name string) (Attrs, error)
}

// Lister lists objects.
type Lister interface {
	// ListPage returns, in byte order of their names, the objects whose names
	// start with prefix and are greater than startAfter (which need not have
	// that prefix nor exist; "" starts at the first), at most limit of them.
	// 0 means the store's own page size, which also caps larger limits.
	// more is false only when nothing follows the page; a page may be empty
	// while more is true only if the store itself does so, and then the error
	// is not nil: callers always advance. Use [List] to walk all pages.
	ListPage(ctx context.Context, prefix, startAfter string, limit int) (page []Attrs, more bool, err error)
}

// Deleter deletes objects.
type Deleter interface {
	// Delete removes the object if its generation is the given one, or
	// whatever it is with AnyGeneration. Deleting what is absent succeeds: it is
	// what the caller wants, and the answer to a delete whose first answer was
	// lost. Another generation than the given one is ErrPrecondition and
	// nothing is removed.
	Delete(ctx context.Context, name string, generation int64) error
}

// Inspector reads the settings of the bucket behind a store.
type Inspector interface {
	// BucketSettings returns the settings that can delete, keep or price
	// Braid's objects. Read at start, not per object.
	BucketSettings(ctx context.Context) (BucketSettings, error)
}

// Store is everything Braid asks of an object store. Take the smaller
// interfaces where they are enough.
type Store interface {
	Creator
	Reader
	Lister
	Deleter
	Inspector
}

// List walks all objects whose names start with prefix and are greater than
// startAfter, in byte order of their names, one page at a time, so memory is
// bounded by a page. The first error ends the walk and comes with a zero Attrs.
// Objects created or deleted during the walk may or may not be seen.
func List(ctx context.Context, l Lister, prefix, startAfter string) iter.Seq2[Attrs, error] {
	return func(yield func(Attrs, error) bool) {
		for {
			page, more, err := l.ListPage(ctx, prefix, startAfter, 0)
			if err != nil {
				yield(Attrs{}, err)
				return
			}
			for _, a := range page {
				if !yield(a, nil) {
					return
				}
			}
			if !more || len(page) == 0 {
				return
			}
			startAfter = page[len(page)-1].Name
		}
	}
}
