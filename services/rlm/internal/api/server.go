package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/rlm/internal/combiner"
	"github.com/braidlog/braid/services/rlm/internal/fetcher"
)

// Config are the limits of the handlers.
type Config struct {
	// RLMID is this remote-log manager.
	RLMID int32
	// ClusterID is the cluster whose bucket this is.
	ClusterID string
	// PartitionCreditBytes and StreamCreditBytes are what senders are told.
	PartitionCreditBytes, StreamCreditBytes int64
	// InitTimeout bounds the wait for a stream's first message.
	InitTimeout time.Duration
	// SendTimeout bounds the wait for a reader that does not read.
	SendTimeout time.Duration
	// MaxResponseBytes bounds a unary response.
	MaxResponseBytes int
}

// Deps are what the handlers call.
type Deps struct {
	Combiner *combiner.Combiner
	Fetcher  *fetcher.Fetcher
	// Draining is closed when streams are to end.
	Draining <-chan struct{}
	Logger   *slog.Logger
}

// Server implements the service.
type Server struct {
	remotelogv1.UnimplementedRemoteLogServiceServer
	cfg  Config
	deps Deps
	log  *slog.Logger
}

// New makes the service's handlers.
func New(cfg Config, deps Deps) *Server {
	return &Server{cfg: cfg, deps: deps, log: deps.Logger.With("component", "api")}
}

// Register adds the service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	remotelogv1.RegisterRemoteLogServiceServer(r, s)
}

// retryAfter is the pause that callers are asked for when nothing can be said.
const retryAfter = 200 * time.Millisecond

// mapError gives domain errors their place in the contract. Errors that it does
// not know are left to the server's edge, which answers INTERNAL.
func mapError(err error) error {
	var (
		credit *combiner.CreditError
		limit  *fetcher.LimitError
		damage *fetcher.DamageError
	)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, combiner.ErrDraining), errors.Is(err, combiner.ErrStopped), errors.Is(err, fetcher.ErrClosed):
		return rpcerr.Draining().WithCause(err)
	case errors.As(err, &credit):
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "AppendWal",
			fmt.Sprintf("%s: %d outstanding", credit.Scope, credit.Actual), credit.Limit, retryAfter).WithCause(err)
	case errors.As(err, &limit):
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, limit.Scope,
			fmt.Sprintf("%d bytes held by slow readers; resume where the stream ended", limit.Actual), limit.Limit, retryAfter).WithCause(err)
	case errors.As(err, &damage):
		if damage.Length == 0 { // how much is not known
			return rpcerr.New(codes.DataLoss, errorsv1.ErrorReason_ERROR_REASON_DATA_DAMAGED, "object %s is damaged", damage.Object).
				With("where", damage.Object).With("offset", damage.Offset).WithCause(err)
		}
		return rpcerr.DataDamaged("object "+damage.Object, damage.Offset, damage.Position, damage.Length).WithCause(err)
	case errors.Is(err, fetcher.ErrUnavailable):
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_OBJECT_STORE_UNREACHABLE, retryAfter, "the object store can't be read now").WithCause(err)
	}
	return err
}

// notFound is the error about an object or a range that is not there. The
// contract has no reason of its own for it: the code says it.
func notFound(kind, name string, cause error) error {
	return rpcerr.NotFound(errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED, kind, name).WithCause(cause)
}

// checkCluster refuses callers of another cluster.
func (s *Server) checkCluster(clusterID string) error {
	if clusterID != s.cfg.ClusterID {
		return rpcerr.Mismatch(errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, "cluster", s.cfg.ClusterID, clusterID)
	}
	return nil
}

// invalid is an INVALID_ARGUMENT about one field.
func invalid(field, format string, args ...any) error {
	return rpcerr.InvalidField(field, fmt.Sprintf(format, args...))
}

// notReady says that there is no registration yet.
func notReady() error {
	return rpcerr.New(codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_NOT_READY,
		"this remote-log manager is not registered with the metadata service yet").WithRetry(retryAfter)
}
