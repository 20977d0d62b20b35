package rlm_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

const clusterID = "3c0f1d52-6b1e-4f0e-9a53-0f6d7d1c2b3a"

// metadataStub is a hand-played metadata service: epochs, heartbeats, and
// commits that are accepted when they continue a partition.
type metadataStub struct {
	metadatav1.UnimplementedClusterServiceServer
	metadatav1.UnimplementedSegmentServiceServer
	address string

	mu       sync.Mutex // guards all below
	next     int64      // offset of the next entry
	open     int64      // the open epoch, 0 for none
	last     int64      // last accepted sequence of it
	ends     map[string]int64
	memory   map[string]*metadatav1.CommitCombinedSegmentResponse
	accepted []*metadatav1.CommitCombinedSegmentRequest
	stopped  []int64 // epochs ended by their owner
	refuse   error   // registrations are refused with it
}

func startMetadata(t *testing.T) *metadataStub {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := &metadataStub{address: l.Addr().String(), next: 40, ends: map[string]int64{}, memory: map[string]*metadatav1.CommitCombinedSegmentResponse{}}
	server := grpc.NewServer()
	metadatav1.RegisterClusterServiceServer(server, m)
	metadatav1.RegisterSegmentServiceServer(server, m)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return m
}

func (m *metadataStub) RegisterRemoteLogManager(_ context.Context, r *metadatav1.RegisterRemoteLogManagerRequest) (*metadatav1.RegisterRemoteLogManagerResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuse != nil {
		return nil, m.refuse
	}
	if r.GetClusterId() != clusterID {
		return nil, rpcerr.Mismatch(errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, "cluster", clusterID, r.GetClusterId())
	}
	m.open, m.last = m.next, 0
	m.next++
	return &metadatav1.RegisterRemoteLogManagerResponse{
		RlmEpoch: m.open, ClusterId: clusterID, Incarnation: walobjecttest.Incarnation,
		SessionTimeout: durationpb.New(time.Second), MetadataEndOffset: m.next,
	}, nil
}

func (m *metadataStub) RemoteLogManagerSession(s grpc.BidiStreamingServer[metadatav1.RemoteLogManagerSessionRequest, metadatav1.RemoteLogManagerSessionResponse]) error {
	for {
		r, err := s.Recv()
		if err != nil {
			return nil //nolint:nilerr // the client went away
		}
		m.mu.Lock()
		closed := r.GetRlmEpoch() != m.open
		if r.GetStopping() && !closed {
			m.open = 0
			m.stopped = append(m.stopped, r.GetRlmEpoch())
		}
		end := m.next
		m.mu.Unlock()
		if closed {
			return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_RLM_EPOCH_CLOSED, "rlm", "epoch %d is closed", r.GetRlmEpoch())
		}
		if err := s.Send(&metadatav1.RemoteLogManagerSessionResponse{Heartbeat: r.GetHeartbeat(), MetadataEndOffset: end}); err != nil {
			return err
		}
	}
}

// expire closes the open epoch as a lost session does.
func (m *metadataStub) expire() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open = 0
}

func (m *metadataStub) CommitCombinedSegment(_ context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := walobject.Name(clusterID, r.GetObject())
	if first := m.memory[name]; first != nil {
		return first, nil
	}
	resp := &metadatav1.CommitCombinedSegmentResponse{MetadataOffset: -1}
	closed := r.GetObject().GetRlmEpoch() != m.open
	if closed || r.GetObject().GetSequence() <= m.last {
		resp.RlmEpochClosed = closed
		for range r.GetRanges() {
			resp.Verdicts = append(resp.Verdicts, &metadatav1.RangeVerdict{Outcome: metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED})
		}
		return resp, nil
	}
	for _, d := range r.GetRanges() {
		v := &metadatav1.RangeVerdict{}
		key := d.GetPartition().String()
		switch end := m.ends[key]; {
		case d.GetBaseOffset() == end:
			v.Outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
			m.ends[key] = d.GetEndOffset()
			resp.MetadataOffset = m.next
		case d.GetBaseOffset() > end:
			v.Outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_GAP
		default:
			v.Outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED
		}
		v.ObjectEndOffset = m.ends[key]
		resp.Verdicts = append(resp.Verdicts, v)
	}
	if resp.GetMetadataOffset() >= 0 {
		m.next++
		m.last = r.GetObject().GetSequence()
		m.memory[name] = resp
		m.accepted = append(m.accepted, proto.CloneOf(r))
	}
	return resp, nil
}

func (m *metadataStub) commits() []*metadatav1.CommitCombinedSegmentRequest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]*metadatav1.CommitCombinedSegmentRequest(nil), m.accepted...)
}
