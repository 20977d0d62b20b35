package remote

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/rlmpool"
)

var (
	// ErrUnavailable says that no remote-log manager could answer; nothing is
	// said about the bytes.
	ErrUnavailable = errors.New("remote: not reachable now")
	// ErrNoManager is the ErrUnavailable of a cluster without an open
	// remote-log manager.
	ErrNoManager = fmt.Errorf("%w: no remote-log manager is open", ErrUnavailable)
	// ErrNotFound says that the object is not in the bucket.
	ErrNotFound = errors.New("remote: object not found")
)

// DamageError says that the bytes of a range are not what was committed.
type DamageError struct {
	Range  Range
	Object string // its name in the bucket, empty when not known
	Reason error
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("remote: range [%d, %d) in object %s is damaged: %v", e.Range.Base, e.Range.End, e.Object, e.Reason)
}

func (e *DamageError) Unwrap() error { return e.Reason }

// MaxRangeBytes bounds what is believed of a range's length.
const MaxRangeBytes = 64 << 20

// attemptTimeout bounds one call to one remote-log manager.
const attemptTimeout = 15 * time.Second

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Reader fetches ranges and footers.
type Reader struct {
	zone  string
	pool  *rlmpool.Pool
	view  func() *cluster.View
	cache *cache
}

// NewReader makes a reader that prefers remote-log managers of its zone and
// keeps up to cacheBytes of verified ranges.
func NewReader(zone string, pool *rlmpool.Pool, view func() *cluster.View, cacheBytes int64) *Reader {
	return &Reader{zone: zone, pool: pool, view: view, cache: newCache(cacheBytes)}
}

// Fetch returns the record batches of a range, checked. They may be shared and
// must not be changed. epochs is the partition's lineage.
func (r *Reader) Fetch(ctx context.Context, rg Located, epochs record.Epochs) ([]byte, error) {
	if data, ok := r.cache.get(rg.key()); ok {
		return data, nil
	}
	data, err := r.Copy(ctx, rg, epochs, nil)
	if err != nil {
		return nil, err
	}
	r.cache.put(rg.key(), data)
	return data, nil
}

// Copy is Fetch for who keeps the bytes elsewhere: it neither uses the cache nor
// fills it, and the bytes, for which buf's capacity is used, are the caller's.
func (r *Reader) Copy(ctx context.Context, rg Located, epochs record.Epochs, buf []byte) ([]byte, error) {
	var data []byte
	err := r.each(ctx, rg.rankKey(), func(ctx context.Context, c remotelogv1.RemoteLogServiceClient, clusterID string) error {
		got, err := readWal(ctx, c, clusterID, &rg.Range, buf)
		if err != nil {
			return err
		}
		if err := verify(got, &rg, epochs); err != nil {
			return &DamageError{Range: rg.Range, Reason: err}
		}
		data = got
		return nil
	})
	if err != nil {
		if damage := (*DamageError)(nil); errors.As(err, &damage) && damage.Range.Length == 0 {
			damage.Range = rg.Range // a manager's own finding
		}
		if damage := (*DamageError)(nil); errors.As(err, &damage) {
			damage.Object = r.ObjectName(&rg.Range)
		}
		return nil, err
	}
	return data, nil
}

func readWal(ctx context.Context, c remotelogv1.RemoteLogServiceClient, clusterID string, rg *Range, buf []byte) ([]byte, error) {
	if rg.Length > MaxRangeBytes {
		return nil, &DamageError{Range: *rg, Reason: fmt.Errorf("%d bytes are more than a range may have", rg.Length)}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.ReadWal(ctx, &remotelogv1.ReadWalRequest{ClusterId: clusterID, Object: rg.Object(), Position: rg.Position, LengthBytes: rg.Length})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", rg.ObjectName(clusterID), err)
	}
	if int64(cap(buf)) < rg.Length {
		buf = make([]byte, 0, rg.Length)
	}
	buf = buf[:0]
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", rg.ObjectName(clusterID), err)
		}
		if int64(len(buf)+len(m.GetData())) > rg.Length {
			return nil, &DamageError{Range: *rg, Reason: errors.New("more bytes came than were asked for")}
		}
		buf = append(buf, m.GetData()...)
	}
	if int64(len(buf)) != rg.Length {
		return nil, &DamageError{Range: *rg, Reason: fmt.Errorf("%d of %d bytes came", len(buf), rg.Length)}
	}
	return buf, nil
}

// verify checks a range before a byte of it is used.
func verify(data []byte, rg *Located, epochs record.Epochs) error {
	if got := crc32.Checksum(data, castagnoli); got != rg.CRC {
		return fmt.Errorf("crc32c is %08x, committed was %08x", got, rg.CRC)
	}
	checker := record.NewChecker(rg.Base, epochs)
	hash := rg.BaseHash
	for pos := 0; pos < len(data); {
		size, err := record.Peek(data[pos:])
		if err != nil {
			return fmt.Errorf("at byte %d: %w", pos, err)
		}
		b := record.Batch(data[pos : pos+size])
		if err := checker.Next(b); err != nil {
			return err
		}
		hash = chainhash.Next(hash, b)
		pos += size
	}
	if checker.End() != rg.End {
		return fmt.Errorf("batches end at %d: %w", checker.End(), record.ErrCorrupt)
	}
	if rg.BaseKnown && hash != rg.EndHash {
		return fmt.Errorf("chain hash at %d is %v, committed was %v", rg.End, hash, rg.EndHash)
	}
	return nil
}

// Footers are asked for in calls of this many, so many at once. A manager reads
// the objects of a call at the same time; several calls spread the work over the
// managers of the zone.
const (
	footersPerCall = 64
	footerCalls    = 4
)

// ObjectName is the name in the bucket of the object that holds a range.
func (r *Reader) ObjectName(rg *Range) string { return rg.ObjectName(r.view().ClusterID) }

// Loss says that what the bucket should hold of a range is not there, for
// certain: its object is absent (Err is [ErrNotFound]) or damaged (a
// [*DamageError]). A bucket that can't be asked loses nothing.
type Loss struct {
	Index int // of the range asked for
	Err   error
}

// Footers returns what the objects say of ranges of one partition, in their
// order; nil for those that are lost, which are listed by index. One lost
// object costs only its own ranges. An error says that the answer is not known,
// [ErrUnavailable] or the end of ctx.
func (r *Reader) Footers(ctx context.Context, id *logv1.TopicIdPartition, ranges []Range) ([]*storagev1.RangeFooter, []Loss, error) {
	out, losses := make([]*storagev1.RangeFooter, len(ranges)), make([]error, len(ranges))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(footerCalls)
	for first := 0; first < len(ranges); first += footersPerCall {
		end := min(first+footersPerCall, len(ranges))
		g.Go(func() error { return r.found(ctx, id, ranges[first:end], out[first:end], losses[first:end]) })
	}
	if err := g.Wait(); err != nil {
		return nil, nil, err
	}
	var lost []Loss
	for i, err := range losses {
		if err != nil {
			lost = append(lost, Loss{Index: i, Err: err})
		}
	}
	return out, lost, nil
}

// found fills out, or losses, for each of the ranges. A call fails as a whole, so
// what is lost is found by halving.
func (r *Reader) found(ctx context.Context, id *logv1.TopicIdPartition, ranges []Range, out []*storagev1.RangeFooter, losses []error) error {
	err := r.footers(ctx, id, ranges, out)
	var damage *DamageError
	if err == nil || !errors.Is(err, ErrNotFound) && !errors.As(err, &damage) {
		return err
	}
	if len(ranges) == 1 {
		if damage != nil {
			damage.Range, damage.Object = ranges[0], r.ObjectName(&ranges[0])
		}
		losses[0] = err
		return nil
	}
	half := len(ranges) / 2
	if err := r.found(ctx, id, ranges[:half], out[:half], losses[:half]); err != nil {
		return err
	}
	return r.found(ctx, id, ranges[half:], out[half:], losses[half:])
}

// footers fills out with the footers of ranges.
func (r *Reader) footers(ctx context.Context, id *logv1.TopicIdPartition, ranges []Range, out []*storagev1.RangeFooter) error {
	req := &remotelogv1.ReadRangeFootersRequest{Partition: id}
	for i := range ranges {
		req.Ranges = append(req.Ranges, &remotelogv1.RangeLocation{Object: ranges[i].Object(), ObjectSizeBytes: ranges[i].ObjectSize, BaseOffset: ranges[i].Base})
	}
	return r.each(ctx, ranges[0].rankKey(), func(ctx context.Context, c remotelogv1.RemoteLogServiceClient, clusterID string) error {
		req.ClusterId = clusterID
		resp, err := c.ReadRangeFooters(ctx, req)
		if err != nil {
			return fmt.Errorf("read range footers: %w", err)
		}
		if len(resp.GetFooters()) != len(ranges) {
			return &DamageError{Range: ranges[0], Reason: fmt.Errorf("%d of %d footers came", len(resp.GetFooters()), len(ranges))}
		}
		for i, f := range resp.GetFooters() {
			if d := f.GetRange(); d.GetBaseOffset() != ranges[i].Base || d.GetEndOffset() != ranges[i].End {
				return &DamageError{Range: ranges[i], Reason: fmt.Errorf("its footer is of [%d, %d)", d.GetBaseOffset(), d.GetEndOffset())}
			}
		}
		copy(out, resp.GetFooters())
		return nil
	})
}

// each tries remote-log managers, best first, until one answers. What one says
// of damage is tried at one other before it is believed: its cache may be bad.
func (r *Reader) each(ctx context.Context, key string, fn func(context.Context, remotelogv1.RemoteLogServiceClient, string) error) error {
	v := r.view()
	ranked := rlmpool.Rank(v.RemoteLogManagers(), r.zone, key)
	if len(ranked) == 0 {
		return ErrNoManager
	}
	var last error
	damaged := 0
	for _, m := range ranked {
		conn, err := r.pool.Conn(m.Address)
		if err != nil {
			last = fmt.Errorf("%w: %w", ErrUnavailable, err)
			continue
		}
		err = r.attempt(ctx, conn, v.ClusterID, fn)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w: %w", ErrUnavailable, context.Cause(ctx))
		}
		err = classify(err)
		if errors.Is(err, ErrUnavailable) {
			// Whoever asks again shall not wait for the end of a long pause between
			// connection attempts.
			conn.ResetConnectBackoff()
		}
		var damage *DamageError
		switch {
		case errors.Is(err, ErrNotFound):
			return err
		case errors.As(err, &damage):
			if damaged++; damaged == 2 {
				return err
			}
		}
		if damage != nil || last == nil || !errors.As(last, &damage) {
			last = err // damage is worse news than a manager that can't be reached
		}
	}
	return last
}

func (r *Reader) attempt(ctx context.Context, conn grpc.ClientConnInterface, clusterID string, fn func(context.Context, remotelogv1.RemoteLogServiceClient, string) error) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return fn(ctx, remotelogv1.NewRemoteLogServiceClient(conn), clusterID)
}

func classify(err error) error {
	var damage *DamageError
	if errors.As(err, &damage) {
		return err
	}
	switch status.Code(err) {
	case codes.NotFound:
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	case codes.DataLoss:
		return &DamageError{Reason: err}
	default:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
}
