package grpcserver_test

import (
	"bytes"
	"context"
	"net"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	testv1 "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/test/bufconn"

	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/telemetry"
)

// lockedBuffer collects a log.
type lockedBuffer struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// fixture is one server with its own telemetry on an in-memory listener, and
// what is needed to call it. All of it lives in the test's bubble.
type fixture struct {
	t        *testing.T
	server   *grpcserver.Server
	listener *bufconn.Listener
	tel      *telemetry.Telemetry
	log      *lockedBuffer
	dials    atomic.Int64
	served   chan error
}

// service is the test service; each test sets the handlers it needs.
type service struct {
	testv1.UnimplementedTestServiceServer
	unary  func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error)
	duplex func(testv1.TestService_FullDuplexCallServer) error
}

func (s *service) UnaryCall(ctx context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
	return s.unary(ctx, req)
}

func (s *service) FullDuplexCall(stream testv1.TestService_FullDuplexCallServer) error {
	return s.duplex(stream)
}

func newFixture(t *testing.T, impl *service, change func(*grpcserver.Config)) *fixture {
	t.Helper()
	f := &fixture{t: t, listener: bufconn.Listen(1 << 20), log: new(lockedBuffer), served: make(chan error, 1)}
	var err error
	f.tel, err = telemetry.New(t.Context(), telemetry.DefaultConfig(), telemetry.Identity{Service: "test", Instance: t.Name()}, telemetry.Options{LogOutput: f.log})
	require.NoError(t, err)
	cfg := grpcserver.DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	f.server, err = grpcserver.New(cfg, grpcserver.Deps{Logger: f.tel.Logger, TracerProvider: f.tel.TracerProvider, MeterProvider: f.tel.MeterProvider})
	require.NoError(t, err)
	testv1.RegisterTestServiceServer(f.server, impl)
	go func() { f.served <- f.server.Serve(f.listener) }()
	f.server.MarkServing()
	return f
}

// dial connects with the defaults of package grpcclient.
func (f *fixture) dial(change func(*grpcclient.Config)) *grpc.ClientConn {
	f.t.Helper()
	cfg := grpcclient.DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	conn, err := grpcclient.Dial("server", cfg, grpcclient.Deps{
		Logger: f.tel.Logger, TracerProvider: f.tel.TracerProvider, MeterProvider: f.tel.MeterProvider,
		Dialer: func(ctx context.Context, _ string) (net.Conn, error) {
			f.dials.Add(1)
			return f.listener.DialContext(ctx)
		},
	})
	require.NoError(f.t, err)
	return conn
}

// close ends what is still running; a bubble must be empty at its end.
func (f *fixture) close(conns ...*grpc.ClientConn) {
	for _, c := range conns {
		assert.NoError(f.t, c.Close())
	}
	_ = f.server.Stop(context.WithoutCancel(f.t.Context()))
	assert.NoError(f.t, <-f.served)
	assert.NoError(f.t, f.tel.Shutdown(context.WithoutCancel(f.t.Context())))
}

// metrics is the Prometheus page.
func (f *fixture) metrics() string {
	w := httptest.NewRecorder()
	f.tel.Handler(nil).ServeHTTP(w, httptest.NewRequestWithContext(f.t.Context(), "GET", "/metrics", nil))
	return w.Body.String()
}
