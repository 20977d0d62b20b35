package fetcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/walobject"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

// footerGuess is how much of an object's end is read first: enough for the
// footer of a few hundred ranges.
const footerGuess = 64 << 10

// smallObject is the size up to which an object is fetched whole for its footer:
// that takes hardly longer, and who reads its records next needs no GET.
const smallObject = 256 << 10

// footerCost is what fetching and decoding a footer takes in memory for a
// moment, as a multiple of its bytes. Measured on footers of 2,000 ranges: the
// decoded messages take 7 to 8 times the bytes.
const footerCost = 9

// Footer is the checked footer of an object: the bytes of its ranges' parts, of
// which one is decoded when it is asked for. A footer decoded as a whole would
// take several times the memory, and is looked into by thousands of partitions
// after a broker was lost, each for one range. It is immutable and safe for
// concurrent use.
type Footer struct {
	raw     []byte
	entries []footerEntry // by [footerEntry.compare]
}

// footerEntry says where a range's part of a footer is.
type footerEntry struct {
	creation, base int64
	partition      int32
	start, end     int32 // bytes of Footer.raw
}

func (e *footerEntry) compare(o *footerEntry) int {
	return cmp.Or(cmp.Compare(e.creation, o.creation), cmp.Compare(e.partition, o.partition), cmp.Compare(e.base, o.base))
}

const footerEntryBytes = 32

// bytes is what the footer takes in memory, about.
func (f *Footer) bytes() int64 {
	return int64(len(f.raw)) + footerEntryBytes*int64(len(f.entries)) + 128
}

// Len is the number of ranges.
func (f *Footer) Len() int { return len(f.entries) }

// Range decodes the part about one range; nil when there is none. The message is
// the caller's.
func (f *Footer) Range(partition *logv1.TopicIdPartition, base int64) (*storagev1.RangeFooter, error) {
	want := footerEntry{creation: partition.GetTopicCreationOffset(), partition: partition.GetPartition(), base: base}
	i := sort.Search(len(f.entries), func(i int) bool { return f.entries[i].compare(&want) >= 0 })
	for ; i < len(f.entries) && f.entries[i].compare(&want) == 0; i++ {
		part := new(storagev1.RangeFooter)
		if err := proto.Unmarshal(f.raw[f.entries[i].start:f.entries[i].end], part); err != nil {
			return nil, fmt.Errorf("fetcher: part of a footer: %w", err)
		}
		if proto.Equal(part.GetRange().GetPartition(), partition) {
			return part, nil
		}
	}
	return nil, nil
}

// rangesField is CombinedObjectFooter.ranges.
const rangesField = 6

// newFooter checks the footer at the end of an object and keeps what lookups
// need, a copy.
func newFooter(tail []byte, size int64) (*Footer, error) {
	whole, err := walobject.ReadFooter(tail, size)
	if err != nil {
		return nil, err
	}
	trailer, err := walobject.ParseTrailer(tail[len(tail)-walobject.TrailerSize:], size)
	if err != nil {
		return nil, err
	}
	end := len(tail) - walobject.TrailerSize
	f := &Footer{raw: slices.Clone(tail[end-int(trailer.FooterSize) : end]), entries: make([]footerEntry, 0, len(whole.GetRanges()))}
	for pos := 0; pos < len(f.raw); {
		num, typ, n := protowire.ConsumeTag(f.raw[pos:])
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		body := pos + n
		if n = protowire.ConsumeFieldValue(num, typ, f.raw[body:]); n < 0 {
			return nil, protowire.ParseError(n)
		}
		pos = body + n
		if num != rangesField || typ != protowire.BytesType {
			continue
		}
		if len(f.entries) == len(whole.GetRanges()) {
			return nil, errors.New("a footer with more ranges than it decodes to")
		}
		_, prefix := protowire.ConsumeVarint(f.raw[body:])
		d := whole.GetRanges()[len(f.entries)].GetRange()
		f.entries = append(f.entries, footerEntry{
			creation: d.GetPartition().GetTopicCreationOffset(), partition: d.GetPartition().GetPartition(), base: d.GetBaseOffset(),
			start: int32(body + prefix), end: int32(pos),
		})
	}
	slices.SortFunc(f.entries, func(a, b footerEntry) int { return a.compare(&b) })
	return f, nil
}

// Footer returns the footer of an object of the given size: from the cache of
// footers; from the object's block if that is cached or the object is small;
// else with one GET of the object's end, or two if the footer is large. All who
// want it at the same time share that work. One that is damaged is read once
// more, past the caches, before that is said.
func (f *Fetcher) Footer(ctx context.Context, object string, size int64) (*Footer, error) {
	if size < walobject.TrailerSize {
		return nil, &DamageError{Object: object, Length: size, Offset: -1, Err: fmt.Errorf("an object of %d bytes has no footer", size)}
	}
	b, err := f.share(ctx, key{object: object, footer: true, size: size}, f.loadFooter)
	if err != nil {
		return nil, err
	}
	return b.footer, nil
}

// loadFooter is the work behind Footer.
func (f *Fetcher) loadFooter(ctx context.Context, k key) (*block, error) {
	footer, err := f.footerOfBlock(ctx, k.object, k.size)
	if footer == nil && err == nil {
		footer, err = f.footerOfTail(ctx, k.object, k.size)
		if errors.Is(err, ErrDamaged) {
			footer, err = f.footerOfTail(ctx, k.object, k.size)
		}
	}
	if err != nil {
		return nil, err
	}
	return &block{footer: footer}, nil
}

// footerOfBlock takes the footer out of the object's block, nil where that can't
// be done.
func (f *Fetcher) footerOfBlock(ctx context.Context, object string, size int64) (*Footer, error) {
	k := key{object: object}
	f.mu.Lock()
	b := f.cache.get(k)
	f.mu.Unlock()
	if b == nil && size > min(smallObject, f.cfg.BlockBytes) {
		return nil, nil
	}
	if err := f.takeWork(ctx, object, min(size, footerGuess)); err != nil {
		return nil, err
	}
	defer f.giveWork(min(size, footerGuess))
	if b == nil {
		var err error
		if b, err = f.block(ctx, k); err != nil {
			if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) && !errors.Is(err, ErrUnavailable) {
				err = f.mapError(ctx, object, err) // this flight ended, not that of the block
			}
			return nil, err
		}
	}
	if int64(len(b.data)) == size {
		if footer, err := newFooter(b.data, size); err == nil {
			return footer, nil
		}
	}
	// Not what it must be: who reads next shall not get it from here.
	f.mu.Lock()
	f.cache.drop(k, b)
	f.mu.Unlock()
	return nil, nil
}

// footerOfTail reads the object's end.
func (f *Fetcher) footerOfTail(ctx context.Context, object string, size int64) (*Footer, error) {
	for need := min(size, footerGuess); ; {
		footer, err := f.tail(ctx, object, size, need)
		var short *walobject.Error
		switch {
		case err == nil:
			return footer, nil
		case !errors.As(err, &short):
			return nil, err
		case errors.Is(short, walobject.ErrShort) && short.Need > need && short.Need <= size:
			need = short.Need
		default:
			return nil, &DamageError{Object: object, Position: size - need, Length: need, Offset: -1, Err: err}
		}
	}
}

// tail reads the last n bytes of an object and takes the footer out of them. A
// walobject.Error says what is wrong with them.
func (f *Fetcher) tail(ctx context.Context, object string, size, n int64) (*Footer, error) {
	if err := f.takeWork(ctx, object, n); err != nil {
		return nil, err
	}
	defer f.giveWork(n)
	buf := make([]byte, n)
	if err := f.readTail(ctx, object, size, buf); err != nil {
		return nil, err
	}
	return newFooter(buf, size)
}

func (f *Fetcher) readTail(ctx context.Context, object string, size int64, buf []byte) error {
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	case <-ctx.Done():
		return f.mapError(ctx, object, context.Cause(ctx))
	}
	if _, err := f.store.ReadRange(ctx, object, size-int64(len(buf)), buf); err != nil {
		return f.mapError(ctx, object, err)
	}
	return nil
}

// takeWork waits until the memory for a footer of n bytes may be used; giveWork
// gives it back. Nobody waits for it while holding some.
func (f *Fetcher) takeWork(ctx context.Context, object string, n int64) error {
	if err := f.work.Acquire(ctx, f.workOf(n)); err != nil {
		return f.mapError(ctx, object, context.Cause(ctx))
	}
	return nil
}

func (f *Fetcher) giveWork(n int64) { f.work.Release(f.workOf(n)) }

// workOf is at most all there is: a footer larger than that is read alone.
func (f *Fetcher) workOf(n int64) int64 { return min(footerCost*n, f.cfg.FooterWorkBytes) }

// Object names an object and says how large it is.
type Object struct {
	Name string
	Size int64
}

// Footers calls fn with the footer of each object, which are to differ; i is the
// object's index. Footers are read at the same time, as many as half of the GETs
// that may run, and fn is called from several goroutines in any order. The first
// error, also of fn, ends the rest and is returned.
func (f *Fetcher) Footers(ctx context.Context, objects []Object, fn func(i int, footer *Footer) error) error {
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
