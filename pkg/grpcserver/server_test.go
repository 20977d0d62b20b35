package grpcserver_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	testv1 "google.golang.org/grpc/interop/grpc_testing"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/invariant"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

func TestPanicsAreCountedLoggedAndAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, &service{
			unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
				panic(&invariant.Violation{Message: "hole at 7"})
			},
			duplex: func(s testv1.TestService_FullDuplexCallServer) error { return s.(error) },
		}, nil)
		conn := f.dial(nil)
		client := testv1.NewTestServiceClient(conn)
		for range 2 {
			_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
			assert.Equal(t, codes.Internal, status.Code(err))
			assert.NotContains(t, err.Error(), "hole")
		}
		stream, err := client.FullDuplexCall(t.Context())
		require.NoError(t, err)
		_, err = stream.Recv()
		assert.Equal(t, codes.Internal, status.Code(err))
		e, _ := rpcerr.From(err)
		assert.Equal(t, errorsv1.ErrorReason_ERROR_REASON_INTERNAL, e.Reason)

		page := f.metrics()
		assert.Contains(t, page, `rpc_server_panics_total{rpc_method="/grpc.testing.TestService/UnaryCall"} 2`)
		assert.Contains(t, page, `rpc_server_panics_total{rpc_method="/grpc.testing.TestService/FullDuplexCall"} 1`)
		assert.Equal(t, 3, strings.Count(f.log.String(), "panic in a handler"))
		assert.Contains(t, f.log.String(), "hole at 7")
		assert.Contains(t, f.log.String(), "server_test.go")
		assert.NotContains(t, f.log.String(), "unmapped")
		f.close(conn)
	})
}

func TestUnmappedErrorsAreHiddenAndLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := map[string]error{
			"/data/p0: permission denied": errors.New("/data/p0: permission denied"),
			"mapped":                      fmt.Errorf("append: %w", rpcerr.InvalidField("topic", "must not be empty")),
		}
		impl := &service{unary: func(_ context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
			return &testv1.SimpleResponse{}, answers[string(req.GetPayload().GetBody())]
		}}
		f := newFixture(t, impl, nil)
		conn := f.dial(nil)
		call := func(which string) error {
			_, err := testv1.NewTestServiceClient(conn).UnaryCall(t.Context(), &testv1.SimpleRequest{Payload: &testv1.Payload{Body: []byte(which)}})
			return err
		}
		err := call("/data/p0: permission denied")
		assert.Equal(t, codes.Internal, status.Code(err))
		assert.NotContains(t, err.Error(), "permission")
		assert.Equal(t, 1, strings.Count(f.log.String(), "permission denied"))
		e, _ := rpcerr.From(call("mapped"))
		assert.Equal(t, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, e.Reason)
		assert.Equal(t, "topic", e.Violations[0].Field)
		assert.Equal(t, 1, strings.Count(f.log.String(), "unmapped"))
		f.close(conn)
	})
}

// Field reports B201 and B205: past a limit the answer comes at once.
func TestLimitsAnswerInsteadOfLettingWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		impl := &service{
			unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
				<-hold
				return &testv1.SimpleResponse{}, nil
			},
			duplex: func(testv1.TestService_FullDuplexCallServer) error { <-hold; return nil },
		}
		f := newFixture(t, impl, func(c *grpcserver.Config) { c.MaxCalls, c.MaxStreams = 2, 3 })
		conn := f.dial(nil)
		client := testv1.NewTestServiceClient(conn)
		var open []testv1.TestService_FullDuplexCallClient
		for range 3 {
			stream, err := client.FullDuplexCall(t.Context())
			require.NoError(t, err)
			open = append(open, stream)
		}
		calls := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
				calls <- err
			}()
		}
		synctest.Wait()
		start := time.Now()
		excess, err := client.FullDuplexCall(t.Context())
		require.NoError(t, err)
		_, err = excess.Recv()
		for what, err := range map[string]error{"streams": err, "calls": func() error {
			_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
			return err
		}()} {
			e, ok := rpcerr.From(err)
			require.True(t, ok)
			assert.Equal(t, codes.ResourceExhausted, e.Code)
			assert.Equal(t, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, e.Reason)
			assert.Contains(t, e.Message, what)
			assert.Equal(t, rpcerr.Retry, rpcerr.React(e))
		}
		assert.Zero(t, time.Since(start))
		close(hold)
		for range 2 {
			require.NoError(t, <-calls)
		}
		for _, stream := range open {
			_, err := stream.Recv()
			require.Error(t, err) // io.EOF: the handler returned nil
		}
		synctest.Wait()
		_, err = client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		require.NoError(t, err, "the places are free again")
		f.close(conn)
	})
}

// Field report B199: what is too large is refused with a clear code, and the
// connection lives on.
func TestOversizedMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		impl := &service{unary: func(_ context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
			return &testv1.SimpleResponse{Payload: req.GetPayload()}, nil
		}}
		f := newFixture(t, impl, func(c *grpcserver.Config) { c.MaxRecvMessage = 8 * config.MiB })
		conn := f.dial(nil)
		for size, want := range map[int]codes.Code{5 << 20: codes.OK, 8<<20 - 1024: codes.OK, 8<<20 + 1: codes.ResourceExhausted} {
			_, err := testv1.NewTestServiceClient(conn).UnaryCall(t.Context(), &testv1.SimpleRequest{Payload: &testv1.Payload{Body: make([]byte, size)}})
			assert.Equal(t, want, status.Code(err), "%d bytes", size)
			if err != nil {
				assert.Equal(t, rpcerr.Fail, rpcerr.React(err), "repeating it can't help")
			}
		}
		assert.Equal(t, int64(1), f.dials.Load())
		f.close(conn)
	})
}

// Field report B189: a client that pings faster than the server allows is cut
// off with too_many_pings. The last case shows that the test would see it.
func TestOwnClientsNeverPingTooOften(t *testing.T) {
	tests := map[string]struct {
		server func(*grpcserver.Config)
		busy   bool
		cut    bool
	}{
		"idle connection": {nil, false, false},
		"open stream":     {nil, true, false},
		"strict server": {func(c *grpcserver.Config) {
			c.KeepaliveMinInterval = config.Duration(time.Minute)
			c.KeepaliveTime = config.Duration(time.Hour)
		}, true, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				impl := &service{duplex: func(stream testv1.TestService_FullDuplexCallServer) error {
					<-stream.Context().Done()
					return stream.Context().Err()
				}}
				f := newFixture(t, impl, tt.server)
				conn := f.dial(nil)
				require.NoError(t, grpcclient.WaitReady(t.Context(), conn))
				ended := make(chan error, 1)
				if tt.busy {
					stream, err := testv1.NewTestServiceClient(conn).FullDuplexCall(t.Context())
					require.NoError(t, err)
					go func() { _, err := stream.Recv(); ended <- err }()
				}
				time.Sleep(15 * time.Minute) //nolint:forbidigo // inside a bubble
				synctest.Wait()
				if tt.cut {
					require.ErrorContains(t, <-ended, "ENHANCE_YOUR_CALM")
				} else {
					assert.Equal(t, int64(1), f.dials.Load(), "the first connection lives")
					assert.Equal(t, connectivity.Ready, conn.GetState())
					assert.Empty(t, ended)
				}
				f.close(conn)
			})
		})
	}
}

func TestDefaultsOfServerAndClientMatch(t *testing.T) {
	server, client := grpcserver.DefaultConfig(), grpcclient.DefaultConfig()
	require.NoError(t, server.Validate())
	require.NoError(t, client.Validate())
	assert.Empty(t, server.Warnings())
	assert.Empty(t, client.Warnings())
	assert.GreaterOrEqual(t, client.KeepaliveTime, server.KeepaliveMinInterval)
	assert.Equal(t, server.MaxRecvMessage, client.MaxSendMessage)
	assert.Equal(t, server.MaxSendMessage, client.MaxRecvMessage)

	// The constants behind the warnings are the other package's defaults.
	strict := server
	strict.KeepaliveMinInterval = client.KeepaliveTime
	assert.Empty(t, strict.Warnings())
	strict.KeepaliveMinInterval = client.KeepaliveTime + 1
	assert.Len(t, strict.Warnings(), 1)
	hasty := client
	hasty.KeepaliveTime = server.KeepaliveMinInterval
	assert.Empty(t, hasty.Warnings())
	hasty.KeepaliveTime = server.KeepaliveMinInterval - 1
	assert.Len(t, hasty.Warnings(), 1)
	narrow := server
	narrow.MaxConcurrentStreams = 100
	assert.Len(t, narrow.Warnings(), 1)
}

func TestReflectionListsTheServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, &service{}, nil)
		conn := f.dial(nil)
		stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
		resp, err := stream.Recv()
		require.NoError(t, err)
		var names []string
		for _, s := range resp.GetListServicesResponse().GetService() {
			names = append(names, s.GetName())
		}
		assert.ElementsMatch(t, []string{"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.testing.TestService"}, names)
		require.NoError(t, stream.CloseSend())
		f.close(conn)
	})
}

func TestTwoInstancesInOneProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := func(name string) *service {
			return &service{unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
				return &testv1.SimpleResponse{Hostname: name}, nil
			}}
		}
		a, b := newFixture(t, answer("a"), nil), newFixture(t, answer("b"), nil)
		connA, connB := a.dial(nil), b.dial(nil)
		call := func(conn grpc.ClientConnInterface) string {
			resp, err := testv1.NewTestServiceClient(conn).UnaryCall(t.Context(), &testv1.SimpleRequest{})
			require.NoError(t, err)
			return resp.GetHostname()
		}
		assert.Equal(t, "a", call(connA))
		assert.Equal(t, "a", call(connA))
		assert.Equal(t, "b", call(connB))
		const count = `rpc_server_call_duration_seconds_count{rpc_method="grpc.testing.TestService/UnaryCall",rpc_response_status_code="OK",rpc_system_name="grpc"} `
		synctest.Wait()
		assert.Contains(t, a.metrics(), count+"2")
		assert.Contains(t, b.metrics(), count+"1")
		a.close(connA)
		assert.Equal(t, "b", call(connB), "one stops, the other serves")
		b.close(connB)
	})
}

func TestBadConfigNamesItsFields(t *testing.T) {
	c := grpcserver.Config{ListenAddress: "nope", MaxRecvMessage: 3 * config.TiB}
	err := c.Validate()
	require.ErrorIs(t, err, config.ErrInvalid)
	for _, field := range []string{"listen-address", "max-recv-message", "max-calls", "max-streams", "stream-window", "keepalive.min-interval", "keepalive.time", "stop-timeout"} {
		require.ErrorContains(t, err, field+":")
	}
	_, err = grpcserver.New(c, grpcserver.Deps{})
	require.ErrorIs(t, err, config.ErrInvalid)
	_, err = grpcserver.New(grpcserver.DefaultConfig(), grpcserver.Deps{})
	require.ErrorContains(t, err, "required")
}
