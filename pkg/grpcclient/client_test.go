package grpcclient_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	testv1 "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/telemetry"
)

type dialer = func(context.Context, string) (net.Conn, error)

type backend struct {
	testv1.UnimplementedTestServiceServer
	calls  atomic.Int64
	handle func(context.Context) error
}

func (b *backend) UnaryCall(ctx context.Context, _ *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
	b.calls.Add(1)
	if b.handle != nil {
		if err := b.handle(ctx); err != nil {
			return nil, err
		}
	}
	return &testv1.SimpleResponse{}, nil
}

func (b *backend) FullDuplexCall(stream testv1.TestService_FullDuplexCallServer) error {
	<-stream.Context().Done()
	return stream.Context().Err()
}

func newTelemetry(t *testing.T, spans ...trace.SpanProcessor) *telemetry.Telemetry {
	t.Helper()
	cfg := telemetry.DefaultConfig()
	cfg.TraceRatio = 1
	tel, err := telemetry.New(t.Context(), cfg, telemetry.Identity{}, telemetry.Options{LogOutput: t.Output(), SpanProcessors: spans})
	require.NoError(t, err)
	return tel
}

// serve starts a server; the returned function ends it.
func serve(t *testing.T, tel *telemetry.Telemetry, b *backend) (*bufconn.Listener, func()) {
	t.Helper()
	server, err := grpcserver.New(grpcserver.DefaultConfig(), grpcserver.Deps{Logger: tel.Logger, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider})
	require.NoError(t, err)
	testv1.RegisterTestServiceServer(server, b)
	listener := bufconn.Listen(1 << 20)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	return listener, func() {
		_ = server.Stop(context.WithoutCancel(t.Context()))
		assert.NoError(t, <-served)
	}
}

func dial(t *testing.T, tel *telemetry.Telemetry, target string, d dialer, change func(*grpcclient.Config), opts ...grpc.DialOption) (*grpc.ClientConn, testv1.TestServiceClient) {
	t.Helper()
	cfg := grpcclient.DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	conn, err := grpcclient.Dial(target, cfg, grpcclient.Deps{
		Logger: tel.Logger, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider, Dialer: d,
	}, opts...)
	require.NoError(t, err)
	return conn, testv1.NewTestServiceClient(conn)
}

func to(l *bufconn.Listener) dialer {
	return func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }
}

// Field report B197: the first of several addresses is dead, and dead in the
// worst way: it doesn't answer at all.
func TestSeveralAddressesFirstOneDead(t *testing.T) {
	for _, balancer := range []string{grpcclient.PickFirst, grpcclient.RoundRobin} {
		for _, target := range []string{"dead:1,live:1", "live:1, dead:1", "dead:1,dead:2,live:1"} {
			t.Run(balancer+" "+target, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					tel, b := newTelemetry(t), new(backend)
					listener, stop := serve(t, tel, b)
					defer stop()
					conn, client := dial(t, tel, target, func(ctx context.Context, address string) (net.Conn, error) {
						if address == "live:1" {
							return listener.DialContext(ctx)
						}
						<-ctx.Done() // packets vanish
						return nil, context.Cause(ctx)
					}, func(c *grpcclient.Config) { c.Balancer = balancer })
					defer func() { assert.NoError(t, conn.Close()) }()
					start := time.Now()
					ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
					defer cancel()
					require.NoError(t, grpcclient.WaitReady(ctx, conn))
					_, err := client.UnaryCall(ctx, &testv1.SimpleRequest{})
					require.NoError(t, err)
					assert.Less(t, time.Since(start), 3*time.Second)
				})
			})
		}
	}
}

func TestRoundRobinUsesEveryAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tel, b1, b2 := newTelemetry(t), new(backend), new(backend)
		l1, stop1 := serve(t, tel, b1)
		defer stop1()
		l2, stop2 := serve(t, tel, b2)
		defer stop2()
		conn, client := dial(t, tel, "one:1,two:1", func(ctx context.Context, address string) (net.Conn, error) {
			if address == "one:1" {
				return l1.DialContext(ctx)
			}
			return l2.DialContext(ctx)
		}, func(c *grpcclient.Config) { c.Balancer = grpcclient.RoundRobin })
		defer func() { assert.NoError(t, conn.Close()) }()
		require.NoError(t, grpcclient.WaitReady(t.Context(), conn))
		synctest.Wait()
		for range 10 {
			_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
			require.NoError(t, err)
		}
		assert.Equal(t, int64(5), b1.calls.Load())
		assert.Equal(t, int64(5), b2.calls.Load())
	})
}

// Field report B064: an UNAVAILABLE must reach the caller, because the server
// may have executed the call.
func TestNoHiddenRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var conns []net.Conn
		tel, b := newTelemetry(t), new(backend)
		listener, stop := serve(t, tel, b)
		defer stop()
		conn, client := dial(t, tel, "server:1", func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := listener.DialContext(ctx)
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			return c, err
		}, nil, grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {
			"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`))
		defer func() { assert.NoError(t, conn.Close()) }()

		// Not even a service config that asks for retries gets them.
		b.handle = func(context.Context) error { return status.Error(codes.Unavailable, "try again") }
		_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		assert.Equal(t, codes.Unavailable, status.Code(err))
		assert.Equal(t, int64(1), b.calls.Load())

		// The connection dies after the server executed the call.
		b.handle = func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			return conns[0].Close()
		}
		_, err = client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		assert.Equal(t, codes.Unavailable, status.Code(err))
		assert.Equal(t, int64(2), b.calls.Load(), "executed once")
		e, _ := rpcerr.From(err)
		assert.True(t, rpcerr.Executed(e), "the outcome is unknown")
	})
}

func TestCallsWithoutADeadlineGetOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tel, b := newTelemetry(t), new(backend)
		listener, stop := serve(t, tel, b)
		defer stop()
		b.handle = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		conn, client := dial(t, tel, "server:1", to(listener), nil)
		defer func() { assert.NoError(t, conn.Close()) }()
		start := time.Now()
		_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		assert.Equal(t, codes.DeadlineExceeded, status.Code(err))
		assert.Equal(t, 30*time.Second, time.Since(start))

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start = time.Now()
		_, err = client.UnaryCall(ctx, &testv1.SimpleRequest{})
		assert.Equal(t, codes.DeadlineExceeded, status.Code(err))
		assert.Equal(t, time.Minute, time.Since(start), "the caller's own deadline counts")
	})
}

// blackhole is a connection that can be cut without a word.
type blackhole struct {
	net.Conn
	cut    chan struct{}
	closed chan struct{}
	once   sync.Once
}

func (b *blackhole) Write(p []byte) (int, error) {
	select {
	case <-b.cut:
		return len(p), nil // on its way, never to arrive
	default:
		return b.Conn.Write(p)
	}
}

func (b *blackhole) Read(p []byte) (int, error) {
	n, err := b.Conn.Read(p)
	select {
	case <-b.cut:
		<-b.closed // nothing arrives any more
		return 0, net.ErrClosed
	default:
		return n, err
	}
}

func (b *blackhole) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.Conn.Close()
}

// Field report B198: a node disappears without a reset.
func TestAVanishedPeerIsNoticed(t *testing.T) {
	t.Run("open stream", func(t *testing.T) { vanish(t, true) })
	t.Run("idle", func(t *testing.T) { vanish(t, false) })
}

func vanish(t *testing.T, open bool) {
	synctest.Test(t, func(t *testing.T) {
		tel, b := newTelemetry(t), new(backend)
		listener, stop := serve(t, tel, b)
		defer stop()
		cut := make(chan struct{})
		conn, client := dial(t, tel, "server:1", func(ctx context.Context, _ string) (net.Conn, error) {
			select {
			case <-cut:
				<-ctx.Done()
				return nil, context.Cause(ctx)
			default:
			}
			c, err := listener.DialContext(ctx)
			return &blackhole{Conn: c, cut: cut, closed: make(chan struct{})}, err
		}, nil)
		defer func() { assert.NoError(t, conn.Close()) }()
		require.NoError(t, grpcclient.WaitReady(t.Context(), conn))
		ended := make(chan error, 1)
		if open {
			stream, err := client.FullDuplexCall(t.Context())
			require.NoError(t, err)
			go func() { _, err := stream.Recv(); ended <- err }()
		}
		time.Sleep(time.Minute) //nolint:forbidigo // inside a bubble
		require.Equal(t, connectivity.Ready, conn.GetState())
		close(cut)
		start := time.Now()
		assert.True(t, conn.WaitForStateChange(t.Context(), connectivity.Ready))
		if open {
			assert.Equal(t, codes.Unavailable, status.Code(<-ended))
		}
		assert.Less(t, time.Since(start), 20*time.Second)
	})
}

func TestUnreachableServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("connection refused")
		down := true
		tel, b := newTelemetry(t), new(backend)
		listener, stop := serve(t, tel, b)
		defer stop()
		var mu sync.Mutex
		d := func(ctx context.Context, _ string) (net.Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			if down {
				return nil, refused
			}
			return listener.DialContext(ctx)
		}
		conn, client := dial(t, tel, "server:1", d, nil)
		defer func() { assert.NoError(t, conn.Close()) }()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		require.ErrorIs(t, grpcclient.WaitReady(ctx, conn), context.DeadlineExceeded)
		_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		assert.Equal(t, codes.Unavailable, status.Code(err), "fails fast")

		patient, waiting := dial(t, tel, "server:1", d, func(c *grpcclient.Config) { c.WaitForReady = true })
		defer func() { assert.NoError(t, patient.Close()) }()
		time.AfterFunc(10*time.Second, func() { mu.Lock(); down = false; mu.Unlock() })
		start := time.Now()
		_, err = waiting.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		require.NoError(t, err)
		assert.Less(t, time.Since(start), 15*time.Second, "reconnect delays are bounded")
	})
}

func TestTracesCrossTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := tracetest.NewSpanRecorder()
		tel, b := newTelemetry(t, spans), new(backend)
		listener, stop := serve(t, tel, b)
		conn, client := dial(t, tel, "server:1", to(listener), nil)
		_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		stop()
		ended := spans.Ended()
		require.Len(t, ended, 2)
		assert.Equal(t, ended[0].SpanContext().TraceID(), ended[1].SpanContext().TraceID())
		require.NoError(t, tel.Shutdown(context.WithoutCancel(t.Context())))
	})
}

func TestBadInput(t *testing.T) {
	tel := newTelemetry(t)
	deps := grpcclient.Deps{Logger: tel.Logger, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider}
	_, err := grpcclient.Dial("a:1,,b:1", grpcclient.DefaultConfig(), deps)
	require.ErrorContains(t, err, "empty address")
	_, err = grpcclient.Dial("a:1", grpcclient.DefaultConfig(), grpcclient.Deps{})
	require.ErrorContains(t, err, "required")
	bad := grpcclient.Config{Balancer: "random", KeepaliveTime: config.Duration(time.Second)}
	_, err = grpcclient.Dial("a:1", bad, deps)
	require.ErrorIs(t, err, config.ErrInvalid)
	for _, field := range []string{"balancer", "keepalive.time", "keepalive.timeout", "connect-timeout", "max-backoff", "call-timeout", "max-recv-message", "conn-window"} {
		require.ErrorContains(t, err, field+":")
	}

	conn, err := grpcclient.Dial("a:1", grpcclient.DefaultConfig(), deps)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.ErrorContains(t, grpcclient.WaitReady(t.Context(), conn), "closed")
}
