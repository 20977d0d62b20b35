package bucket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/objstore"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

// MarkerName is the object, relative to the configured prefix, that claims the
// prefix for one cluster.
const MarkerName = "braid-cluster"

// maxMarker bounds the marker's size in bytes.
const maxMarker = 4 << 10

var (
	// ErrUnreachable: the bucket could not be reached in time.
	ErrUnreachable = errors.New("bucket unreachable")
	// ErrUnfit: the bucket's settings would delete or keep Braid's objects.
	ErrUnfit = errors.New("bucket unfit")
	// ErrNoMarker: nobody has claimed the prefix.
	ErrNoMarker = errors.New("no cluster marker")
	// ErrForeign: the marker is none, or another cluster's.
	ErrForeign = errors.New("bucket prefix is not this cluster's")
)

// Error says which bucket is wrong, and how.
type Error struct {
	// Bucket, Endpoint and Prefix are as configured; Endpoint may be empty.
	Bucket, Endpoint, Prefix string
	// Err matches one of the sentinels.
	Err error
}

// Error implements error.
func (e *Error) Error() string {
	at := ""
	if e.Endpoint != "" {
		at = " at " + e.Endpoint
	}
	return fmt.Sprintf("bucket %q%s, prefix %q: %v", e.Bucket, at, e.Prefix, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Store is what the checks need.
type Store interface {
	objstore.Reader
	objstore.Inspector
}

// Place is a bucket as configured, and how long it is waited for.
type Place struct {
	Bucket, Endpoint, Prefix string
	// Timeout bounds all checks together.
	Timeout time.Duration
}

// Marker is what a prefix says of its cluster.
type Marker struct {
	// ClusterID owns the prefix.
	ClusterID string
	// Incarnation created the marker.
	Incarnation uint32
}

// Check reaches the bucket, judges its settings and reads the marker, waiting
// for all of it up to the place's timeout: a cluster's metadata service may
// claim the prefix only a moment later. Names are relative to the prefix. The
// error is an [*Error], or ctx's.
func Check(ctx context.Context, store Store, p Place, log *slog.Logger) (Marker, error) {
	wrap := func(err error) error {
		return &Error{Bucket: p.Bucket, Endpoint: p.Endpoint, Prefix: p.Prefix, Err: err}
	}
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	var settings objstore.BucketSettings
	err := until(ctx, func(ctx context.Context) (err error) {
		settings, err = store.BucketSettings(ctx)
		return err
	}, func(err error) bool { return objstore.Retryable(err) })
	if caller.Err() != nil {
		return Marker{}, context.Cause(caller)
	}
	if err != nil {
		return Marker{}, wrap(fmt.Errorf("%w within %v: %w", ErrUnreachable, p.Timeout, err))
	}
	var unfit []error
	for _, f := range settings.Check(p.Prefix) {
		if f.Severity == objstore.Refuse {
			unfit = append(unfit, fmt.Errorf("%w: %s: %s", ErrUnfit, f.Setting, f.Message))
			continue
		}
		log.WarnContext(ctx, "bucket setting costs money or time", "component", "bucket", "setting", f.Setting, "message", f.Message)
	}
	if err := errors.Join(unfit...); err != nil {
		return Marker{}, wrap(err)
	}
	var m Marker
	err = until(ctx, func(ctx context.Context) (err error) {
		m, err = readMarker(ctx, store)
		return err
	}, func(err error) bool { return objstore.Retryable(err) || errors.Is(err, ErrNoMarker) })
	switch {
	case caller.Err() != nil:
		return Marker{}, context.Cause(caller)
	case errors.Is(err, ErrNoMarker):
		return Marker{}, wrap(fmt.Errorf("%w %q within %v: no metadata service has begun a cluster here, or bucket or prefix are wrong", ErrNoMarker, MarkerName, p.Timeout))
	case err != nil:
		return Marker{}, wrap(err)
	}
	return m, nil
}

// until repeats fn while its error may pass, until ctx ends.
func until(ctx context.Context, fn func(context.Context) error, passing func(error) bool) error {
	pause := backoff.Policy{Initial: 50 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: 0.5}
	for attempt := 1; ; attempt++ {
		err := fn(ctx)
		if err == nil || !passing(err) {
			return err
		}
		if backoff.Sleep(ctx, pause.Delay(attempt, rand.Float64())) != nil {
			return err
		}
	}
}

func readMarker(ctx context.Context, store objstore.Reader) (Marker, error) {
	buf := make([]byte, maxMarker)
	n, size, err := store.ReadSuffix(ctx, MarkerName, buf)
	switch {
	case errors.Is(err, objstore.ErrNotFound):
		return Marker{}, ErrNoMarker
	case err != nil:
		return Marker{}, fmt.Errorf("%w: read the cluster marker: %w", ErrUnreachable, err)
	case size > maxMarker:
		return Marker{}, fmt.Errorf("%w: %s has %d bytes, it is no cluster marker", ErrForeign, MarkerName, size)
	}
	m := new(storagev1.ClusterMarker)
	if err := proto.Unmarshal(buf[:n], m); err != nil || m.GetClusterId() == "" || m.GetIncarnation() == 0 {
		return Marker{}, fmt.Errorf("%w: %s can't be read as a cluster marker", ErrForeign, MarkerName)
	}
	if m.GetFormatVersion() != 1 {
		return Marker{}, fmt.Errorf("%w: the cluster marker has format version %d, this program reads 1", ErrForeign, m.GetFormatVersion())
	}
	return Marker{ClusterID: m.GetClusterId(), Incarnation: m.GetIncarnation()}, nil
}
