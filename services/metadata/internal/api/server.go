package api

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/internal/snapshot"
	"github.com/braidlog/braid/services/metadata/internal/watch"
	"github.com/braidlog/braid/services/metadata/state"
)

// Config is the handlers' data. All fields are required.
type Config struct {
	// Address is this replica's own, as its ControllerElected says it.
	Address string
	// SessionTimeout is told to members that register.
	SessionTimeout time.Duration
	// Progress is how often an idle stream gets a progress mark.
	Progress time.Duration
	// Stall is how long a client may leave a message untaken.
	Stall time.Duration
}

// Controller is what the handlers need of the controller.
type Controller interface {
	Submit(ctx context.Context, class controller.Class, decide controller.Decide) (offset int64, err error)
	Heartbeat(m controller.Member) (epoch int64, err error)
	Leading() (epoch int64, ok bool)
	Trouble() error
	Handovers(brokerID int32) []*metadatav1.Handover
}

// Snapshots is what the handlers need of this replica's snapshots.
type Snapshots interface {
	// Snapshots of an incarnation, newest first.
	Snapshots(incarnation uint32) []snapshot.Info
	// ReadAt reads up to len(p) bytes at a position within [0, size]; the error is
	// [snapshot.ErrUnknown] once the snapshot is not kept any more.
	ReadAt(i snapshot.Info, p []byte, position int64) (int, error)
	// LogStart is where the log in etcd begins, as last seen.
	LogStart() int64
}

// Deps are the live things the handlers need. All are required.
type Deps struct {
	Hub        *watch.Hub
	Controller Controller
	Log        watch.Reader
	Snapshots  Snapshots
	// NewTopicID makes a UUID.
	NewTopicID func() string
	// Draining is closed when streams shall end.
	Draining <-chan struct{}
}

// Server implements the four services.
type Server struct {
	metadatav1.UnimplementedTopicServiceServer
	metadatav1.UnimplementedClusterServiceServer
	metadatav1.UnimplementedSegmentServiceServer
	metadatav1.UnimplementedSnapshotServiceServer

	cfg  Config
	deps Deps
}

// New returns the handlers.
func New(cfg Config, deps Deps) *Server { return &Server{cfg: cfg, deps: deps} }

// Register adds the services to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	metadatav1.RegisterTopicServiceServer(r, s)
	metadatav1.RegisterClusterServiceServer(r, s)
	metadatav1.RegisterSegmentServiceServer(r, s)
	metadatav1.RegisterSnapshotServiceServer(r, s)
}

// controllerHint is the controller's address as far as known; empty when it
// would only be our own while we don't lead.
func (s *Server) controllerHint() (address string) {
	s.deps.Hub.Read(func(st *state.State) { _, _, address = st.Controller() })
	if address == s.cfg.Address {
		return ""
	}
	return address
}

// read calls fn with the applied state, once the log has begun.
func (s *Server) read(fn func(*state.State)) error {
	begun := false
	s.deps.Hub.Read(func(st *state.State) {
		if begun = st.EndOffset() > 0; begun {
			fn(st)
		}
	})
	if !begun {
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soon, "the cluster has not begun yet: no controller has written to its log")
	}
	return nil
}

// decided is the offset that a write answers with: its entry's, or the last
// one's if it was true already.
func (s *Server) decided(offset int64) int64 {
	if offset >= 0 {
		return offset
	}
	return s.deps.Hub.End() - 1
}

// received is one message of a stream's client, or the end of them.
type received[T any] struct {
	message *T
	err     error
}

// receive reads the client's side of a stream into a channel, so that a handler
// can wait for other things too. It ends with the stream, which ends when the
// handler returns.
func receive[T any](ctx context.Context, recv func() (*T, error)) <-chan received[T] {
	out := make(chan received[T])
	go func() {
		defer close(out)
		for {
			m, err := recv()
			select {
			case out <- received[T]{m, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return out
}

// stream runs a sending stream until it ends, the server drains, or its client
// has not taken a message for too long. run gets a context that ends then, and
// a function to wrap around each send.
func (s *Server) stream(ctx context.Context, run func(ctx context.Context, sending func(func() error) error) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var since atomic.Int64 // when the send under way began, by began; 0 for none
	began := time.Now()
	sending := func(send func() error) error {
		since.Store(int64(max(time.Since(began), 1)))
		defer since.Store(0)
		return send()
	}
	result := make(chan error, 1)
	// The goroutine may outlive the handler by the send it is stuck in: gRPC
	// fails that once the handler has returned.
	go func() { result <- run(ctx, sending) }()
	ticker := time.NewTicker(max(s.cfg.Stall/4, time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case err := <-result:
			if ctx.Err() != nil {
				return ended(ctx)
			}
			return s.mapError(err)
		case <-s.deps.Draining:
			return rpcerr.Draining()
		case <-ticker.C:
			if at := since.Load(); at > 0 && time.Since(began)-time.Duration(at) > s.cfg.Stall {
				return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "subscriber",
					"milliseconds without taking a message", s.cfg.Stall.Milliseconds(), soon)
			}
		}
	}
}
