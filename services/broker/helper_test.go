package broker_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

const incarnation = 0x1f3a9c02

// metadata is a hand-played metadata replica: a controller of a cluster without
// topics.
type metadata struct {
	metadatav1.UnimplementedClusterServiceServer
	metadatav1.UnimplementedSegmentServiceServer
	metadatav1.UnimplementedSnapshotServiceServer

	address   string
	clusterID string

	mu         sync.Mutex // guards all below
	register   func(*metadatav1.RegisterBrokerRequest) error
	registered []*metadatav1.RegisterBrokerRequest
	stopping   []int32
}

func startMetadata(t *testing.T, clusterID string) *metadata {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := &metadata{clusterID: clusterID, address: l.Addr().String()}
	s := grpc.NewServer()
	metadatav1.RegisterClusterServiceServer(s, m)
	metadatav1.RegisterSegmentServiceServer(s, m)
	metadatav1.RegisterSnapshotServiceServer(s, m)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return m
}

func (m *metadata) RegisterBroker(_ context.Context, req *metadatav1.RegisterBrokerRequest) (*metadatav1.RegisterBrokerResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.register != nil {
		if err := m.register(req); err != nil {
			return nil, err
		}
	}
	m.registered = append(m.registered, req)
	return &metadatav1.RegisterBrokerResponse{
		BrokerEpoch: int64(10 + len(m.registered)), ClusterId: m.clusterID, Incarnation: incarnation, SessionTimeout: durationpb.New(2 * time.Second),
	}, nil
}

func (m *metadata) BrokerSession(s grpc.BidiStreamingServer[metadatav1.BrokerSessionRequest, metadatav1.BrokerSessionResponse]) error {
	for {
		req, err := s.Recv()
		if err != nil {
			return err
		}
		if req.GetStopping() {
			m.mu.Lock()
			m.stopping = append(m.stopping, req.GetBrokerId())
			m.mu.Unlock()
		}
		if err := s.Send(&metadatav1.BrokerSessionResponse{Heartbeat: req.GetHeartbeat(), ControllerEpoch: 1}); err != nil {
			return err
		}
	}
}

func (m *metadata) GetCluster(context.Context, *metadatav1.GetClusterRequest) (*metadatav1.GetClusterResponse, error) {
	return &metadatav1.GetClusterResponse{ClusterId: m.clusterID, Incarnation: incarnation, FeatureLevel: 1}, nil
}

func (m *metadata) WatchMetadata(_ *metadatav1.WatchMetadataRequest, s grpc.ServerStreamingServer[metadatav1.WatchMetadataResponse]) error {
	cluster, _ := m.GetCluster(s.Context(), nil)
	err := s.Send(&metadatav1.WatchMetadataResponse{Kind: &metadatav1.WatchMetadataResponse_Reset_{Reset_: &metadatav1.MetadataImage{
		Cluster: cluster, Position: &metadatav1.MetadataPosition{Incarnation: incarnation, ControllerEpoch: 1, Offset: 9},
	}}})
	if err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (m *metadata) WatchSegments(s grpc.BidiStreamingServer[metadatav1.WatchSegmentsRequest, metadatav1.WatchSegmentsResponse]) error {
	<-s.Context().Done()
	return s.Context().Err()
}

func (m *metadata) read() (registered []*metadatav1.RegisterBrokerRequest, stopping []int32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append(registered, m.registered...), append(stopping, m.stopping...)
}
