package grpcserver_test

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	testv1 "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/telemetry"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

func assertDraining(t *testing.T, err error) {
	t.Helper()
	e, ok := rpcerr.From(err)
	if assert.True(t, ok, "%v", err) {
		assert.Equal(t, codes.Unavailable, e.Code)
		assert.Equal(t, errorsv1.ErrorReason_ERROR_REASON_DRAINING, e.Reason, "%v", err)
		assert.Positive(t, e.RetryDelay)
	}
}

// Field report B193: a graceful stop waits for ever for streaming clients.
// Half of the handlers here never look at Draining and sit in Recv.
func TestDrainWithHundredOpenStreamsEndsWithinItsBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const position = 41
		impl := &service{}
		f := newFixture(t, impl, nil)
		impl.duplex = func(stream testv1.TestService_FullDuplexCallServer) error {
			first, err := stream.Recv()
			if err != nil {
				return err
			}
			if first.GetResponseType() == testv1.PayloadType_COMPRESSABLE && len(first.GetResponseParameters()) == 0 {
				_, err = stream.Recv() // the rude half
				return err
			}
			<-f.server.Draining()
			if err := stream.Send(&testv1.StreamingOutputCallResponse{Payload: &testv1.Payload{Body: []byte{position}}}); err != nil {
				return err
			}
			return rpcerr.Draining()
		}
		conn := f.dial(nil)
		client := testv1.NewTestServiceClient(conn)
		var polite, rude []testv1.TestService_FullDuplexCallClient
		for i := range 100 {
			stream, err := client.FullDuplexCall(t.Context())
			require.NoError(t, err)
			req := &testv1.StreamingOutputCallRequest{}
			if i%2 == 0 {
				req.ResponseParameters = []*testv1.ResponseParameters{{}}
				polite = append(polite, stream)
			} else {
				rude = append(rude, stream)
			}
			require.NoError(t, stream.Send(req))
		}
		var watches []healthv1.Health_WatchClient
		for range 10 {
			watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
			require.NoError(t, err)
			first, err := watch.Recv()
			require.NoError(t, err)
			assert.Equal(t, healthv1.HealthCheckResponse_SERVING, first.GetStatus())
			watches = append(watches, watch)
		}
		synctest.Wait()

		start := time.Now()
		drained := make(chan error, 1)
		go func() { drained <- f.server.Drain(t.Context()) }()

		for _, watch := range watches {
			told, err := watch.Recv()
			require.NoError(t, err)
			assert.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, told.GetStatus())
		}
		assert.Zero(t, time.Since(start), "watchers are told at once")
		for _, watch := range watches {
			_, err := watch.Recv()
			assertDraining(t, err)
		}
		assert.Equal(t, 5*time.Second, time.Since(start), "health watches end after the drain delay")
		for _, stream := range polite {
			last, err := stream.Recv()
			require.NoError(t, err)
			assert.Equal(t, []byte{position}, last.GetPayload().GetBody(), "the last position comes before the end (B192)")
			_, err = stream.Recv()
			assertDraining(t, err)
		}
		assert.Equal(t, 5*time.Second, time.Since(start))
		for _, stream := range rude {
			_, err := stream.Recv()
			assertDraining(t, err)
		}
		assert.Equal(t, 7*time.Second, time.Since(start), "rude streams end after the stream grace")
		require.NoError(t, <-drained)
		assert.Equal(t, 7*time.Second, time.Since(start))
		cfg := grpcserver.DefaultConfig()
		assert.Less(t, time.Since(start), cfg.StopBound())
		f.close(conn)
	})
}

func TestCallsAreServedDuringTheDrainDelayAndFinishAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		impl := &service{unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
			time.Sleep(3 * time.Second) //nolint:forbidigo // inside a bubble
			return &testv1.SimpleResponse{}, nil
		}}
		f := newFixture(t, impl, nil)
		conn := f.dial(nil)
		client := testv1.NewTestServiceClient(conn)
		drained := make(chan error, 1)
		go func() { drained <- f.server.Drain(t.Context()) }()
		time.Sleep(4 * time.Second) //nolint:forbidigo // inside a bubble: of the 5 s delay: the call outlives it
		_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		require.NoError(t, err)
		require.NoError(t, <-drained)
		f.close(conn)
	})
}

func TestStopIsBoundedByItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		impl := &service{unary: func(ctx context.Context, _ *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
		f := newFixture(t, impl, nil)
		conn := f.dial(nil)
		failed := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			_, err := testv1.NewTestServiceClient(conn).UnaryCall(ctx, &testv1.SimpleRequest{})
			failed <- err
		}()
		synctest.Wait()
		start := time.Now()
		err := f.server.Stop(t.Context())
		require.ErrorContains(t, err, "1 calls and 0 streams were cut")
		assert.Equal(t, 17*time.Second, time.Since(start))
		assert.Equal(t, codes.Unavailable, status.Code(<-failed))
		f.close(conn)
	})
}

func TestStopReportsHandlersThatIgnoreTheirContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		impl := &service{duplex: func(testv1.TestService_FullDuplexCallServer) error { <-release; return nil }}
		f := newFixture(t, impl, nil)
		conn := f.dial(nil)
		stream, err := testv1.NewTestServiceClient(conn).FullDuplexCall(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.ErrorContains(t, f.server.Stop(ctx), "1 handlers ignore their cancelled contexts")
		_, err = stream.Recv()
		assertDraining(t, err)
		close(release)
		f.close(conn)
	})
}

func TestNewStreamsAreRefusedWhileDraining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		impl := &service{
			unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
				<-hold
				return &testv1.SimpleResponse{}, nil
			},
			duplex: func(testv1.TestService_FullDuplexCallServer) error { return nil },
		}
		f := newFixture(t, impl, nil)
		conn := f.dial(nil)
		client := testv1.NewTestServiceClient(conn)
		f.server.EndStreams()
		stream, err := client.FullDuplexCall(t.Context())
		require.NoError(t, err)
		_, err = stream.Recv()
		assertDraining(t, err)
		watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
		require.NoError(t, err)
		_, err = watch.Recv()
		assertDraining(t, err)
		// Unary calls are still served: they end by themselves.
		close(hold)
		_, err = client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		require.NoError(t, err)
		f.close(conn)
	})
}

func TestHealthFollowsTheServersLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, &service{}, nil)
		conn := f.dial(nil)
		health := healthv1.NewHealthClient(conn)
		check := func(service string) healthv1.HealthCheckResponse_ServingStatus {
			resp, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
			require.NoError(t, err)
			return resp.GetStatus()
		}
		name := testv1.TestService_ServiceDesc.ServiceName
		assert.Equal(t, healthv1.HealthCheckResponse_SERVING, check(""))
		assert.Equal(t, healthv1.HealthCheckResponse_SERVING, check(name))
		f.server.SetServing(name, false)
		assert.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, check(name))
		assert.Equal(t, healthv1.HealthCheckResponse_SERVING, check(""))
		f.server.MarkNotServing()
		f.server.MarkServing() // too late: a stop isn't taken back
		assert.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, check(""))
		f.close(conn)
	})
}

func TestHealthIsNotServingUntilTheServiceSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, &service{}, nil)
		fresh, err := grpcserver.New(grpcserver.DefaultConfig(), grpcserver.Deps{
			Logger: f.tel.Logger, TracerProvider: f.tel.TracerProvider, MeterProvider: f.tel.MeterProvider,
		})
		require.NoError(t, err)
		listener := bufconn.Listen(1 << 16)
		served := make(chan error, 1)
		go func() { served <- fresh.Serve(listener) }()
		cfg := grpcclient.DefaultConfig()
		conn, err := grpcclient.Dial("fresh", cfg, grpcclient.Deps{
			Logger: f.tel.Logger, TracerProvider: f.tel.TracerProvider, MeterProvider: f.tel.MeterProvider,
			Dialer: func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) },
		})
		require.NoError(t, err)
		resp, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
		require.NoError(t, err)
		assert.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, resp.GetStatus())
		require.NoError(t, conn.Close())
		require.NoError(t, fresh.Stop(t.Context()))
		require.NoError(t, <-served)
		f.close()
	})
}

func TestAServerStoppedBeforeItServesServesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, &service{}, nil)
		fresh, err := grpcserver.New(grpcserver.DefaultConfig(), grpcserver.Deps{
			Logger: f.tel.Logger, TracerProvider: f.tel.TracerProvider, MeterProvider: f.tel.MeterProvider,
		})
		require.NoError(t, err)
		require.NoError(t, fresh.Stop(t.Context()))
		require.NoError(t, fresh.Serve(bufconn.Listen(1<<16)))
		f.close()
	})
}

// Everything once over a real socket.
func TestServesOnARealSocket(t *testing.T) {
	tel, err := telemetry.New(t.Context(), telemetry.DefaultConfig(), telemetry.Identity{}, telemetry.Options{LogOutput: t.Output()})
	require.NoError(t, err)
	cfg := grpcserver.DefaultConfig()
	cfg.DrainDelay, cfg.StreamGrace = 0, 0
	listener, err := cfg.Listen(t.Context())
	require.NoError(t, err)
	server, err := grpcserver.New(cfg, grpcserver.Deps{Logger: tel.Logger, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider})
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	server.MarkServing()
	deps := grpcclient.Deps{Logger: tel.Logger, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider}
	for _, target := range []string{listener.Addr().String(), "127.0.0.1:1," + listener.Addr().String()} {
		conn, err := grpcclient.Dial(target, grpcclient.DefaultConfig(), deps)
		require.NoError(t, err)
		defer func() { assert.NoError(t, conn.Close()) }()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		require.NoError(t, grpcclient.WaitReady(ctx, conn))
		watch, err := healthv1.NewHealthClient(conn).Watch(ctx, &healthv1.HealthCheckRequest{})
		require.NoError(t, err)
		first, err := watch.Recv()
		require.NoError(t, err)
		assert.Equal(t, healthv1.HealthCheckResponse_SERVING, first.GetStatus())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	require.NoError(t, server.Drain(ctx))
	require.NoError(t, <-served)
}

func TestAnEndedWatchIsNotALeak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, &service{}, nil)
		conn := f.dial(nil)
		ctx, cancel := context.WithCancel(t.Context())
		watch, err := healthv1.NewHealthClient(conn).Watch(ctx, &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true))
		require.NoError(t, err)
		_, err = watch.Recv()
		require.NoError(t, err)
		cancel()
		_, err = watch.Recv()
		assert.Equal(t, codes.Canceled, status.Code(err))
		f.close(conn) // the bubble fails the test if a goroutine stays
	})
}
