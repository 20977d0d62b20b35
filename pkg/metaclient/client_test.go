package metaclient_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// replica is a hand-played metadata replica.
type replica struct {
	metadatav1.UnimplementedClusterServiceServer
	metadatav1.UnimplementedSegmentServiceServer
	address string
	server  *grpc.Server
	calls   atomic.Int64

	mu         sync.Mutex
	controller string // where the controller is; own address = here; "" = unknown
	fail       func(method string) error
	epoch      int64
	closed     map[int64]bool
	beats      int64
	stopped    []int64
	mute       bool // sessions are not answered any more
}

func start(t *testing.T) *replica {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &replica{address: l.Addr().String(), server: grpc.NewServer(), closed: map[int64]bool{}}
	r.controller = r.address
	metadatav1.RegisterClusterServiceServer(r.server, r)
	metadatav1.RegisterSegmentServiceServer(r.server, r)
	done := make(chan struct{})
	go func() { defer close(done); _ = r.server.Serve(l) }()
	t.Cleanup(func() { r.server.Stop(); <-done })
	return r
}

func (r *replica) leads(address string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.controller = address
}

func (r *replica) check(method string) error {
	r.calls.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		if err := r.fail(method); err != nil {
			return err
		}
	}
	if r.controller != r.address {
		return rpcerr.New(codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER, "not the controller").
			With("controller_address", r.controller)
	}
	return nil
}

func (r *replica) GetCluster(context.Context, *metadatav1.GetClusterRequest) (*metadatav1.GetClusterResponse, error) {
	r.calls.Add(1)
	return &metadatav1.GetClusterResponse{ControllerAddress: r.address}, nil
}

func (r *replica) CommitCombinedSegment(context.Context, *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	if err := r.check("commit"); err != nil {
		return nil, err
	}
	return &metadatav1.CommitCombinedSegmentResponse{MetadataOffset: 7}, nil
}

func (r *replica) ElectLeader(context.Context, *metadatav1.ElectLeaderRequest) (*metadatav1.ElectLeaderResponse, error) {
	if err := r.check("elect"); err != nil {
		return nil, err
	}
	return &metadatav1.ElectLeaderResponse{MetadataOffset: 8}, nil
}

func (r *replica) RegisterRemoteLogManager(context.Context, *metadatav1.RegisterRemoteLogManagerRequest) (*metadatav1.RegisterRemoteLogManagerResponse, error) {
	if err := r.check("register"); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.epoch++
	return &metadatav1.RegisterRemoteLogManagerResponse{
		RlmEpoch: r.epoch, ClusterId: "c", Incarnation: 5, SessionTimeout: durationpb.New(200 * time.Millisecond),
	}, nil
}

func (r *replica) RemoteLogManagerSession(s grpc.BidiStreamingServer[metadatav1.RemoteLogManagerSessionRequest, metadatav1.RemoteLogManagerSessionResponse]) error {
	for {
		m, err := s.Recv()
		if err != nil {
			return nil // the client went away
		}
		if err := r.check("session"); err != nil {
			return err
		}
		r.mu.Lock()
		if r.mute {
			r.mu.Unlock()
			continue
		}
		closed := r.closed[m.GetRlmEpoch()]
		r.beats++
		if m.GetStopping() {
			r.stopped = append(r.stopped, m.GetRlmEpoch())
		}
		r.mu.Unlock()
		if closed {
			return rpcerr.New(codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_RLM_EPOCH_CLOSED, "closed")
		}
		if err := s.Send(&metadatav1.RemoteLogManagerSessionResponse{Heartbeat: m.GetHeartbeat(), MetadataEndOffset: 9}); err != nil {
			return err
		}
	}
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

func client(t *testing.T, change func(*metaclient.Options), addresses ...string) *metaclient.Client {
	t.Helper()
	o := metaclient.Options{Addresses: addresses, Dial: dial}
	if change != nil {
		change(&o)
	}
	c, err := metaclient.New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// deadAddress is one where nobody listens.
func deadAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

func TestHintsAreFollowedToTheController(t *testing.T) {
	a, b := start(t), start(t)
	a.leads(b.address)
	c := client(t, nil, a.address) // b is known from the hint alone
	segments := metadatav1.NewSegmentServiceClient(c.Controller())
	for range 3 {
		resp, err := segments.CommitCombinedSegment(t.Context(), &metadatav1.CommitCombinedSegmentRequest{})
		require.NoError(t, err)
		require.EqualValues(t, 7, resp.GetMetadataOffset())
	}
	require.Equal(t, b.address, c.ControllerAddress())
	require.EqualValues(t, 1, a.calls.Load(), "asked once, then remembered")

	// The controller moves.
	a.leads(a.address)
	b.leads(a.address)
	_, err := segments.CommitCombinedSegment(t.Context(), &metadatav1.CommitCombinedSegmentRequest{})
	require.NoError(t, err)
	require.Equal(t, a.address, c.ControllerAddress())
}

func TestNonIdempotentCallSkipsAReplicaThatIsDown(t *testing.T) {
	a := start(t)
	c := client(t, nil, deadAddress(t), a.address)
	_, err := metadatav1.NewClusterServiceClient(c.Controller()).ElectLeader(t.Context(), &metadatav1.ElectLeaderRequest{})
	require.NoError(t, err)
	require.EqualValues(t, 1, a.calls.Load())
}

func TestUnknownOutcomeIsRepeatedForIdempotentCallsOnly(t *testing.T) {
	a := start(t)
	failures := 2
	a.fail = func(string) error {
		if failures > 0 {
			failures--
			return status.Error(codes.Unavailable, "connection lost")
		}
		return nil
	}
	c := client(t, nil, a.address)
	_, err := metadatav1.NewSegmentServiceClient(c.Controller()).CommitCombinedSegment(t.Context(), &metadatav1.CommitCombinedSegmentRequest{})
	require.NoError(t, err)
	require.EqualValues(t, 3, a.calls.Load())

	a.mu.Lock()
	failures = 1
	a.mu.Unlock()
	_, err = metadatav1.NewClusterServiceClient(c.Controller()).ElectLeader(t.Context(), &metadatav1.ElectLeaderRequest{})
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.EqualValues(t, 4, a.calls.Load(), "an election of unknown outcome is the caller's to settle")
}

func TestAnswersOfTheServerAreHandedOn(t *testing.T) {
	a := start(t)
	a.fail = func(string) error {
		return rpcerr.New(codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, "other cluster").With("expected", "x")
	}
	c := client(t, nil, a.address)
	_, err := metadatav1.NewSegmentServiceClient(c.Controller()).CommitCombinedSegment(t.Context(), &metadatav1.CommitCombinedSegmentRequest{})
	require.Equal(t, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, rpcerr.Reason(err))
	require.EqualValues(t, 1, a.calls.Load())
}

func TestNoControllerEndsWithTheCallersDeadline(t *testing.T) {
	a := start(t)
	a.leads("")
	c := client(t, nil, a.address)
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	_, err := metadatav1.NewClusterServiceClient(c.Controller()).ElectLeader(ctx, &metadatav1.ElectLeaderRequest{})
	require.ErrorIs(t, err, metaclient.ErrNoController)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	require.Greater(t, a.calls.Load(), int64(1), "it kept asking")
	require.Less(t, a.calls.Load(), int64(20), "with pauses")
}

func TestAnyReplicaAnswersReads(t *testing.T) {
	a := start(t)
	a.leads("")
	c := client(t, nil, deadAddress(t), a.address)
	resp, err := metadatav1.NewClusterServiceClient(c.Any()).GetCluster(t.Context(), &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	require.Equal(t, a.address, resp.GetControllerAddress())
}

func TestBadOptionsAreRefused(t *testing.T) {
	for _, o := range []metaclient.Options{{}, {Addresses: []string{"a:1"}}, {Addresses: []string{"nonsense"}, Dial: dial}} {
		_, err := metaclient.New(o)
		require.Error(t, err)
	}
}

func TestClosedClientRefusesCalls(t *testing.T) {
	a := start(t)
	c, err := metaclient.New(metaclient.Options{Addresses: []string{a.address}, Dial: dial})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	_, err = metadatav1.NewClusterServiceClient(c.Any()).GetCluster(t.Context(), &metadatav1.GetClusterRequest{})
	require.ErrorIs(t, err, metaclient.ErrClosed)
}
