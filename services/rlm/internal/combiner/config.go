package combiner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/braidlog/braid/pkg/objstore"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/rlm/planner"
)

// Config are the combiner's limits.
type Config struct {
	// RLMID is the remote-log manager's id.
	RLMID int32
	// Plan are the planner's limits; MaxBytes is the size of a whole object.
	Plan planner.Config
	// BufferBytes bounds what is buffered over all streams.
	BufferBytes int64
	// PartitionCreditBytes and StreamCreditBytes bound what may be sent and not
	// answered yet.
	PartitionCreditBytes, StreamCreditBytes int64
	// MaxPartitions bounds the partitions of one stream. 0 = 65,536.
	MaxPartitions int
	// PutTimeout bounds one attempt to upload an object, its retries included.
	PutTimeout time.Duration
	// CommitRetryMax is the longest pause between two tries of a commit. 0 = 1 s.
	CommitRetryMax time.Duration
}

// objectOverhead is what an object has beside its ranges and their footers.
const objectOverhead = 1 << 10

// rangeOverhead is what a buffered range costs beside its bytes.
const rangeOverhead = 512

func (c Config) withDefaults() Config {
	c.MaxPartitions = cmp.Or(c.MaxPartitions, 1<<16)
	c.CommitRetryMax = cmp.Or(c.CommitRetryMax, time.Second)
	return c
}

func (c Config) validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.RLMID >= 1, "id %d is not 1 or more", c.RLMID)
	check(c.Plan.MaxBytes > objectOverhead, "object bytes: %d, must be more than %d", c.Plan.MaxBytes, objectOverhead)
	check(c.BufferBytes >= 1, "buffer: %d bytes", c.BufferBytes)
	check(c.PartitionCreditBytes >= 1 && c.StreamCreditBytes >= c.PartitionCreditBytes, "credits: %d bytes for a partition, %d for a stream", c.PartitionCreditBytes, c.StreamCreditBytes)
	check(c.PutTimeout > 0, "PUT timeout: %v", c.PutTimeout)
	return errors.Join(append(errs, c.Plan.Validate())...)
}

// Committer sends commits. [metadatav1.SegmentServiceClient] is one through an
// adapter; it must be idempotent, and its error means "no verdict".
type Committer interface {
	// Commit sends one command and returns its verdict.
	Commit(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error)
}

// Deps are the live things a combiner needs.
type Deps struct {
	// Store takes the objects. It makes its own retries.
	Store objstore.Creator
	// Committer reaches the metadata service.
	Committer Committer
	// OnUnusable is told that an epoch is closed, or can't be used any more: a
	// new registration is wanted. It must not block or call back.
	OnUnusable func(epoch int64)
	// MetadataEnd is the metadata offset (exclusive) last heard of, for footers.
	MetadataEnd func() int64
	// Logger and Meter are required.
	Logger *slog.Logger
	Meter  metric.Meter
}

// Identity is what a registration gave.
type Identity struct {
	// ClusterID and Incarnation name the metadata log.
	ClusterID   string
	Incarnation uint32
	// Epoch is the rlm epoch.
	Epoch int64
}

// ErrDraining says that the combiner takes no more ranges.
var ErrDraining = errors.New("combiner: draining")

// ErrStopped says that the combiner has ended.
var ErrStopped = errors.New("combiner: stopped")

// CreditError says that a sender exceeded a limit that it was told.
type CreditError struct {
	// Scope is "partition", "stream" or "partitions of the stream".
	Scope string
	// Limit and Actual are in bytes, or a number of partitions.
	Limit, Actual int64
}

// Error implements error.
func (e *CreditError) Error() string {
	return fmt.Sprintf("combiner: credit of the %s exceeded: %d outstanding, the limit is %d", e.Scope, e.Actual, e.Limit)
}
