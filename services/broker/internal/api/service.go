package api

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// Replicas are the partitions of this broker: a *replica.Manager through
// [Local].
type Replicas interface {
	// Lookup is replica.Manager.Lookup.
	Lookup(topic string, partition int32) (Partition, error)
	// Cluster is replica.Manager.Cluster.
	Cluster() *cluster.View
	// Changed is replica.Manager.Changed.
	Changed() <-chan struct{}
	// Registration is replica.Manager.Registration.
	Registration() (brokerEpoch int64, incarnation uint32, ok bool)
}

// Source is what is read: a *replica.Partition, by its leader, or a
// *replica.Nearest, whose documentation holds.
type Source interface {
	TopicID() string
	Read(ctx context.Context, from int64, maxBytes int, dst []byte) (replica.Fetched, error)
	WaitVisible(ctx context.Context, offset int64) error
	CheckPosition(offset int64, last lineage.Leadership) error
	Offsets() replica.Offsets
	OffsetForTime(ctx context.Context, ms int64) (offset, timestamp int64, found bool, err error)
}

// Partition is a *replica.Partition, whose documentation holds.
type Partition interface {
	Source
	Submit(ctx context.Context, in replica.AppendInput) (Ticket, error)
	Enqueue(ctx context.Context, in replica.AppendInput) Ticket
	Nearest() (Source, bool)
	Changed() <-chan struct{}
	MaxTimestamp(ctx context.Context) (offset, timestamp int64, found bool, err error)
	Await(ctx context.Context, end int64, l lineage.Leadership, level partition.Level) ([]partition.Level, error)
	ConfirmLeadership(ctx context.Context) error
	Explain() replica.Explanation
}

// Ticket is a *replica.Ticket, whose documentation holds.
type Ticket interface {
	Admitted(ctx context.Context) error
	Wait(ctx context.Context) (replica.AppendResult, error)
}

// ProducerIDs hands out blocks of producer ids; a metadatav1.ClusterServiceClient
// on the controller is one.
type ProducerIDs interface {
	AllocateProducerIds(ctx context.Context, in *metadatav1.AllocateProducerIdsRequest, opts ...grpc.CallOption) (*metadatav1.AllocateProducerIdsResponse, error)
}

// Deps are the live things a [Service] needs. All are required.
type Deps struct {
	// BrokerID is this broker's.
	BrokerID int32
	Replicas Replicas
	IDs      ProducerIDs
	// Dial makes a connection to another broker without waiting for it. The
	// service closes what it returns.
	Dial func(address string) (*grpc.ClientConn, error)
	// Draining is closed when streams and long calls shall end.
	Draining <-chan struct{}
	Logger   *slog.Logger
	Meter    metric.Meter
	// Now is the wall clock.
	Now func() time.Time
}

// Service implements LogService. Close it when the server has stopped.
type Service struct {
	brokerv1.UnimplementedLogServiceServer

	cfg      Config
	self     int32
	replicas Replicas
	draining <-chan struct{}
	log      *slog.Logger
	now      func() time.Time

	metrics  *metrics
	peers    *peers
	ids      *idBlocks
	buffered *semaphore.Weighted // bytes of batches not written yet
	produces limiter
	reads    limiter
	waits    limiter
	forwards limiter
	// leaderless are the calls that wait for a leader.
	leaderless limiter
	readers    sync.Pool // *record.Reader
	builders   sync.Pool // *record.Builder
}

var _ brokerv1.LogServiceServer = (*Service)(nil)

// New makes a service; it starts nothing.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Replicas == nil || deps.IDs == nil || deps.Dial == nil || deps.Draining == nil || deps.Logger == nil || deps.Meter == nil || deps.Now == nil {
		return nil, errors.New("api: every dependency is required")
	}
	m, err := newMetrics(deps.Meter)
	if err != nil {
		return nil, err
	}
	s := &Service{
		cfg: cfg, self: deps.BrokerID, replicas: deps.Replicas, draining: deps.Draining,
		log: deps.Logger.With("component", "api"), now: deps.Now,
		metrics:  m,
		peers:    newPeers(deps.Dial, cfg.ForwardConnectTimeout.Std()),
		ids:      newIDBlocks(deps.IDs, deps.Replicas, deps.BrokerID, int32(cfg.ProducerIDBlock)),
		buffered: semaphore.NewWeighted(cfg.AppendBufferBytes.Bytes()),
		produces: limiter{what: "concurrent Produce streams", limit: int64(cfg.ProduceMaxStreams)},
		reads:    limiter{what: "concurrent Read streams", limit: int64(cfg.ReadMaxStreams)},
		waits:    limiter{what: "waiting AwaitDurability calls", limit: int64(cfg.AwaitMaxWaiters)},
		forwards: limiter{what: "concurrent forwarded calls", limit: int64(cfg.ForwardMaxCalls)},

		leaderless: limiter{what: "calls waiting for a leader", limit: int64(cfg.LeaderMaxWaiters)},
	}
	s.readers.New = func() any { return record.NewReader(cfg.decodeLimit()) }
	s.builders.New = func() any { return record.NewBuilder(record.CodecNone) }
	return s, nil
}

// Close closes the connections to other brokers.
func (s *Service) Close() error { return s.peers.close() }

// queryBound is the longest that a call may take which waits for nothing but its
// own work.
const queryBound = 30 * time.Second

// limiter bounds how many run at once.
type limiter struct {
	what  string
	limit int64
	n     atomic.Int64
}

// limitRetry is what a caller past a limit is asked to wait.
const limitRetry = 250 * time.Millisecond

// enter takes a place; the caller gives it back with leave.
func (l *limiter) enter() error {
	if l.n.Add(1) > l.limit {
		l.n.Add(-1)
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "broker", l.what, l.limit, limitRetry)
	}
	return nil
}

func (l *limiter) leave() { l.n.Add(-1) }

// longestMargin and the tenth of what is left are how much before its deadline a
// caller gets an answer: enough for the way back.
const longestMargin = 200 * time.Millisecond

// answerWithin bounds a wait by limit and by the caller's deadline, less the
// time an answer needs to reach the caller.
func answerWithin(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, left-min(left/10, longestMargin))
	}
	return context.WithTimeout(ctx, limit)
}
