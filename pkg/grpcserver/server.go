package grpcserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
)

// handlerWait bounds the wait for handlers after the connections were cut.
const handlerWait = 2 * time.Second

// connectionTimeout bounds a client's HTTP/2 (and TLS) handshake.
const connectionTimeout = 10 * time.Second

// Deps are the live things a server needs.
type Deps struct {
	// Logger is required.
	Logger *slog.Logger
	// TracerProvider and MeterProvider are required.
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
	// Credentials secure the listener; nil serves plaintext, for private
	// networks and tests.
	Credentials credentials.TransportCredentials
}

// Server is a gRPC server that can be drained. Register services on it (it is
// a grpc.ServiceRegistrar) before Serve.
type Server struct {
	cfg    Config
	log    *slog.Logger
	grpc   *grpc.Server
	health *healthServer
	panics metric.Int64Counter

	draining  chan struct{} // closed by EndStreams
	cutoff    chan struct{} // closed when the stream grace is over
	endOnce   sync.Once
	graceTime *time.Timer // set under endOnce; stopped by Stop

	calls   atomic.Int64
	streams atomic.Int64

	handlers handlerGroup
	stopOnce sync.Once
	stopErr  error
}

var _ grpc.ServiceRegistrar = (*Server)(nil)

// New builds a server. It starts nothing; health answers NOT_SERVING until
// [Server.MarkServing]. opts come after the package's own options.
func New(cfg Config, deps Deps, opts ...grpc.ServerOption) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Logger == nil || deps.TracerProvider == nil || deps.MeterProvider == nil {
		return nil, errors.New("grpcserver: Logger, TracerProvider and MeterProvider are required")
	}
	panics, err := deps.MeterProvider.Meter("github.com/braidlog/braid/pkg/grpcserver").Int64Counter(
		"rpc.server.panics", metric.WithDescription("Panics of RPC handlers."), metric.WithUnit("{panic}"))
	if err != nil {
		return nil, fmt.Errorf("create the panic counter: %w", err)
	}
	s := &Server{
		cfg:      cfg,
		log:      deps.Logger.With("component", "grpcserver"),
		panics:   panics,
		draining: make(chan struct{}),
		cutoff:   make(chan struct{}),
	}
	for _, warning := range cfg.Warnings() {
		s.log.Warn("doubtful gRPC setting", "warning", warning)
	}
	all := []grpc.ServerOption{
		grpc.StatsHandler(otelgrpc.NewServerHandler(
			otelgrpc.WithTracerProvider(deps.TracerProvider),
			otelgrpc.WithMeterProvider(deps.MeterProvider),
			otelgrpc.WithPropagators(propagation.TraceContext{}),
			otelgrpc.WithFilter(filters.Not(filters.HealthCheck())),
		)),
		grpc.ChainUnaryInterceptor(s.unary),
		grpc.ChainStreamInterceptor(s.stream),
		grpc.MaxRecvMsgSize(int(cfg.MaxRecvMessage)),
		grpc.MaxSendMsgSize(int(cfg.MaxSendMessage)),
		grpc.MaxConcurrentStreams(uint32(cfg.MaxConcurrentStreams)),
		grpc.InitialWindowSize(int32(cfg.StreamWindow)),
		grpc.InitialConnWindowSize(int32(cfg.ConnWindow)),
		grpc.ConnectionTimeout(connectionTimeout),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime:             cfg.KeepaliveMinInterval.Std(),
			PermitWithoutStream: true,
		}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time:    cfg.KeepaliveTime.Std(),
			Timeout: cfg.KeepaliveTimeout.Std(),
		}),
	}
	if deps.Credentials != nil {
		all = append(all, grpc.Creds(deps.Credentials))
	}
	s.grpc = grpc.NewServer(append(all, opts...)...)
	s.health = newHealthServer(s.draining)
	healthv1.RegisterHealthServer(s.grpc, s.health)
	reflection.RegisterV1(s.grpc)
	return s, nil
}

// RegisterService implements grpc.ServiceRegistrar; call it before Serve.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	s.grpc.RegisterService(desc, impl)
}

// Serve accepts connections until Stop; it then returns nil. It owns l.
func (s *Server) Serve(l net.Listener) error {
	if err := s.grpc.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve gRPC on %s: %w", l.Addr(), err)
	}
	return nil
}

// MarkServing makes health answer SERVING for the server and every registered
// service. It does nothing once the server drains.
func (s *Server) MarkServing() {
	for name := range s.grpc.GetServiceInfo() {
		s.health.SetServingStatus(name, healthv1.HealthCheckResponse_SERVING)
	}
	s.health.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
}

// SetServing sets the health of one service; "" is the server as a whole. It
// does nothing once the server drains.
func (s *Server) SetServing(service string, serving bool) {
	state := healthv1.HealthCheckResponse_NOT_SERVING
	if serving {
		state = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(service, state)
}

// MarkNotServing makes health answer NOT_SERVING for good: step 1 of a stop.
func (s *Server) MarkNotServing() { s.health.Shutdown() }

// Draining is closed when streams and long calls should end: handlers select
// on it and return rpcerr.Draining().
func (s *Server) Draining() <-chan struct{} { return s.draining }

// EndStreams closes [Server.Draining] and starts the stream grace: step 3 of a
// stop. It doesn't wait.
func (s *Server) EndStreams() {
	s.endOnce.Do(func() {
		s.health.Shutdown()
		s.graceTime = time.AfterFunc(s.cfg.StreamGrace.Std(), func() { close(s.cutoff) })
		close(s.draining)
	})
}

// Stop ends the streams if that wasn't done, lets running calls finish within
// the stop timeout or until ctx ends, then cuts the connections: step 4 of a
// stop. It returns an error if calls had to be cut, or if handlers are still
// running after that.
func (s *Server) Stop(ctx context.Context) error {
	s.EndStreams()
	s.stopOnce.Do(func() { s.stopErr = s.stop(ctx) })
	return s.stopErr
}

func (s *Server) stop(ctx context.Context) error {
	graceful := make(chan struct{})
	go func() {
		defer close(graceful)
		s.grpc.GracefulStop()
	}()
	// The grace of the streams runs first: it may have only just begun.
	timeout := time.NewTimer(s.cfg.StreamGrace.Std() + s.cfg.StopTimeout.Std())
	defer timeout.Stop()
	var err error
	select {
	case <-graceful:
	case <-timeout.C:
		err = fmt.Errorf("%d calls and %d streams were cut after %s", s.calls.Load(), s.streams.Load(), s.cfg.StopTimeout)
	case <-ctx.Done():
		err = fmt.Errorf("%d calls and %d streams were cut: %w", s.calls.Load(), s.streams.Load(), context.Cause(ctx))
	}
	if err != nil {
		s.grpc.Stop() // also ends GracefulStop
		<-graceful
	}
	if s.graceTime.Stop() {
		close(s.cutoff)
	}
	if left := s.handlers.wait(handlerWait); left > 0 {
		err = errors.Join(err, fmt.Errorf("%d handlers ignore their cancelled contexts", left))
	}
	return err
}

// Drain does all steps of a stop, the delay included; the end of ctx shortens
// every wait.
func (s *Server) Drain(ctx context.Context) error {
	s.MarkNotServing()
	delay := time.NewTimer(s.cfg.DrainDelay.Std())
	defer delay.Stop()
	select {
	case <-delay.C:
	case <-ctx.Done():
	}
	return s.Stop(ctx)
}

// handlerGroup counts running handlers and can be waited for with a bound.
type handlerGroup struct {
	mu    sync.Mutex // guards n and idle
	n     int
	empty chan struct{} // closed when n falls to 0; nil while nobody waits
}

func (g *handlerGroup) enter() {
	g.mu.Lock()
	g.n++
	g.mu.Unlock()
}

func (g *handlerGroup) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n--; g.n == 0 && g.empty != nil {
		close(g.empty)
		g.empty = nil
	}
}

func (g *handlerGroup) wait(bound time.Duration) (left int) {
	g.mu.Lock()
	if g.n == 0 {
		g.mu.Unlock()
		return 0
	}
	empty := make(chan struct{})
	g.empty = empty
	g.mu.Unlock()
	timer := time.NewTimer(bound)
	defer timer.Stop()
	select {
	case <-empty:
	case <-timer.C:
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.n
}
