package grpcserver

import (
	"context"

	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/braidlog/braid/pkg/rpcerr"
)

// healthServer is the standard health service with watches that end when the
// server drains: the library's own Shutdown tells its watchers NOT_SERVING but
// leaves them open, and one open stream stalls a graceful stop.
type healthServer struct {
	*health.Server
	draining <-chan struct{}
}

func newHealthServer(draining <-chan struct{}) *healthServer {
	h := &healthServer{health.NewServer(), draining}
	h.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	return h
}

// Watch implements the health service.
func (h *healthServer) Watch(req *healthv1.HealthCheckRequest, stream healthv1.Health_WatchServer) error {
	ctx, cancel := context.WithCancel(stream.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-h.draining:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := h.Server.Watch(req, &watchStream{stream, ctx})
	cancel()
	<-ended
	select {
	case <-h.draining:
		if stream.Context().Err() == nil {
			return rpcerr.Draining()
		}
	default:
	}
	return err
}

// watchStream replaces a stream's context.
type watchStream struct {
	healthv1.Health_WatchServer
	ctx context.Context // a stream carries its context
}

func (w *watchStream) Context() context.Context { return w.ctx }
