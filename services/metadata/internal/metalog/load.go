package metalog

import (
	"context"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Pages of a load hold about this many bytes, whatever the entries' size.
const (
	pageBytes    = 4 << 20
	firstPage    = 64
	largestPage  = 4096
	loadAttempts = 10 // restarts after a compaction
)

// Load reads the log from the given offset to its end, page by page, as it was
// at one revision, and calls fn for every entry in order. The returned tail is
// where [Log.Follow] goes on. A log that ends below from is ErrRolledBack, one
// that begins above it a [*TrimmedError]; fn may have got entries by then, if the
// log is trimmed while it is read.
// An error of fn ends the load and is returned as it is.
func (l *Log) Load(ctx context.Context, from int64, fn func(*metadatav1.Entry) error) (Tail, error) {
	return l.load(ctx, from, func(es []*metadatav1.Entry) error {
		for _, e := range es {
			if err := fn(e); err != nil {
				return err
			}
		}
		return nil
	})
}

func (l *Log) load(ctx context.Context, from int64, fn func([]*metadatav1.Entry) error) (Tail, error) {
	next := from
	for range loadAttempts {
		tail, err := l.Tail(ctx)
		if err != nil {
			return Tail{}, err
		}
		if tail.End < next {
			return Tail{}, fmt.Errorf("load from %d: %w: it ends at %d", next, ErrRolledBack, tail.End)
		}
		if next < tail.Start.Offset {
			return Tail{}, fmt.Errorf("load: %w", &TrimmedError{Offset: next, Start: tail.Start})
		}
		next, err = l.loadAt(ctx, next, tail, fn)
		switch {
		case err == nil:
			return tail, nil
		case !isCompacted(err):
			return Tail{}, err
		}
		// Entries don't change, so what was read stays good: go on at a later
		// revision.
		l.log.WarnContext(ctx, "compacted while loading the metadata log, going on at a later revision", "offset", next)
	}
	return Tail{}, fmt.Errorf("load from %d: %w: compacted again and again", from, ErrUnreachable)
}

// loadAt reads [from, tail.End) at the tail's revision and returns how far it
// came.
func (l *Log) loadAt(ctx context.Context, from int64, tail Tail, fn func([]*metadatav1.Entry) error) (int64, error) {
	limit := int64(firstPage)
	for from < tail.End {
		resp, err := l.get(ctx, "load", l.entryKey(from),
			clientv3.WithRange(l.entryKey(tail.End)), clientv3.WithRev(tail.Revision), clientv3.WithLimit(limit))
		if err != nil {
			return from, err
		}
		if len(resp.Kvs) == 0 {
			return from, fmt.Errorf("%w: entry %d is missing, the end is %d", ErrDamaged, from, tail.End)
		}
		page := make([]*metadatav1.Entry, len(resp.Kvs))
		size := int64(0)
		for i, kv := range resp.Kvs {
			e, err := l.decode(kv)
			if err != nil {
				return from, err
			}
			if want := from + int64(i); e.GetOffset() != want {
				return from, fmt.Errorf("%w: entry %d is missing, %d follows", ErrDamaged, want, e.GetOffset())
			}
			page[i] = e
			size += int64(len(kv.Value))
		}
		if err := fn(page); err != nil {
			return from, err
		}
		n := int64(len(page))
		from += n
		limit = min(max(pageBytes/(size/n+1), 1), largestPage)
	}
	return from, nil
}

// Entries is [Log.Load] for those who need no tail.
func (l *Log) Entries(ctx context.Context, from int64, fn func(*metadatav1.Entry) error) error {
	_, err := l.Load(ctx, from, fn)
	return err
}
