package api

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/braidlog/braid/pkg/rpcerr"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/state"
)

// catchUp is how long a caller that has seen more of the log than this replica
// is waited for, before the log is taken for rolled back: it may have read an
// entry elsewhere that is just being applied here.
const catchUp = time.Second

// seen waits until this replica has applied what the caller has.
func (s *Server) seen(ctx context.Context, applied int64) {
	ctx, cancel := context.WithTimeout(ctx, catchUp)
	defer cancel()
	_ = s.deps.Hub.Wait(ctx, applied) // whoever judges compares again
}

// identity is what a registration answers with.
func (s *Server) identity() (clusterID string, incarnation uint32, end int64) {
	s.deps.Hub.Read(func(st *state.State) {
		clusterID, incarnation, end = st.ClusterID(), st.Incarnation(), st.EndOffset()
	})
	return clusterID, incarnation, end
}

// RegisterBroker implements the contract.
func (s *Server) RegisterBroker(ctx context.Context, r *metadatav1.RegisterBrokerRequest) (*metadatav1.RegisterBrokerResponse, error) {
	if r.GetAppliedMetadataOffset() < 0 {
		return nil, rpcerr.InvalidField("applied_metadata_offset", "is negative")
	}
	if _, incarnation, end := s.identity(); r.GetIncarnation() == incarnation && r.GetAppliedMetadataOffset() > end {
		if _, leading := s.deps.Controller.Leading(); leading {
			s.seen(ctx, r.GetAppliedMetadataOffset())
		}
	}
	var controllerEpoch int64
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) ([]*metadatav1.Event, error) {
		controllerEpoch, _, _ = st.Controller()
		return st.DecideRegisterBroker(r)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	clusterID, incarnation, _ := s.identity()
	return &metadatav1.RegisterBrokerResponse{
		BrokerEpoch: offset, ClusterId: clusterID, Incarnation: incarnation,
		SessionTimeout: durationpb.New(s.cfg.SessionTimeout), ControllerEpoch: controllerEpoch,
	}, nil
}

// RegisterRemoteLogManager implements the contract.
func (s *Server) RegisterRemoteLogManager(ctx context.Context, r *metadatav1.RegisterRemoteLogManagerRequest) (
	*metadatav1.RegisterRemoteLogManagerResponse, error,
) {
	var controllerEpoch int64
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) ([]*metadatav1.Event, error) {
		controllerEpoch, _, _ = st.Controller()
		return st.DecideRegisterRemoteLogManager(r)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	clusterID, incarnation, end := s.identity()
	return &metadatav1.RegisterRemoteLogManagerResponse{
		RlmEpoch: offset, ClusterId: clusterID, Incarnation: incarnation,
		SessionTimeout: durationpb.New(s.cfg.SessionTimeout), ControllerEpoch: controllerEpoch, MetadataEndOffset: end,
	}, nil
}

// heartbeat is what both kinds of session say.
type heartbeat struct {
	member   controller.Member
	applied  int64
	stopping bool
}

// session answers heartbeats until the client goes, the session is over or the
// server drains.
func session[T any](s *Server, ctx context.Context, recv func() (*T, error), //nolint:revive // the receiver of a generic method
	parse func(*T) (heartbeat, error), answer func(request *T, controllerEpoch, end int64) error,
) error {
	incoming := receive(ctx, recv)
	var of controller.Member
	for {
		var r received[T]
		select {
		case r = <-incoming:
		case <-s.deps.Draining:
			return rpcerr.Draining()
		case <-ctx.Done():
			return ended(ctx)
		}
		switch {
		case errors.Is(r.err, io.EOF):
			return nil // the session itself goes on until its timeout
		case r.err != nil:
			return r.err
		}
		h, err := parse(r.message)
		switch {
		case err != nil:
			return err
		case of == (controller.Member{}):
			of = h.member
		case of != h.member:
			return rpcerr.InvalidField("epoch", "a stream is one session's: id or epoch differ from the first message")
		}
		epoch, err := s.deps.Controller.Heartbeat(h.member)
		if errors.Is(err, controller.ErrStaleMember) {
			err = memberGone(h.member)
		}
		if err != nil {
			return s.mapError(err)
		}
		if end := s.deps.Hub.End(); h.applied > end {
			s.seen(ctx, h.applied)
			if end = s.deps.Hub.End(); h.applied > end {
				return s.mapError(&state.RolledBackError{Seen: h.applied, LogEnd: end})
			}
		}
		if h.stopping {
			if err := s.endSession(ctx, h.member); err != nil {
				return s.mapError(err)
			}
		}
		if err := answer(r.message, epoch, s.deps.Hub.End()); err != nil {
			return err
		}
		if h.stopping {
			return nil
		}
	}
}

func (s *Server) endSession(ctx context.Context, m controller.Member) error {
	_, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) ([]*metadatav1.Event, error) {
		if m.Role == controller.Broker {
			return st.DecideBrokerOffline(m.ID, m.Epoch, state.ReasonStopped), nil
		}
		return st.DecideCloseRemoteLogManager(m.ID, m.Epoch, state.ReasonStopped)
	})
	return err
}

// BrokerSession implements the contract.
func (s *Server) BrokerSession(stream grpc.BidiStreamingServer[metadatav1.BrokerSessionRequest, metadatav1.BrokerSessionResponse]) error {
	return session(s, stream.Context(), stream.Recv,
		func(r *metadatav1.BrokerSessionRequest) (heartbeat, error) {
			if r.GetBrokerId() < 1 {
				return heartbeat{}, rpcerr.InvalidField("broker_id", "is not 1 or more")
			}
			return heartbeat{
				member:  controller.Member{Role: controller.Broker, ID: r.GetBrokerId(), Epoch: r.GetBrokerEpoch()},
				applied: r.GetAppliedMetadataOffset(), stopping: r.GetStopping(),
			}, nil
		},
		func(r *metadatav1.BrokerSessionRequest, epoch, end int64) error {
			resp := &metadatav1.BrokerSessionResponse{Heartbeat: r.GetHeartbeat(), ControllerEpoch: epoch, MetadataEndOffset: end}
			if !r.GetStopping() {
				resp.Handovers = s.deps.Controller.Handovers(r.GetBrokerId())
			}
			return stream.Send(resp)
		})
}

// RemoteLogManagerSession implements the contract.
func (s *Server) RemoteLogManagerSession(
	stream grpc.BidiStreamingServer[metadatav1.RemoteLogManagerSessionRequest, metadatav1.RemoteLogManagerSessionResponse],
) error {
	return session(s, stream.Context(), stream.Recv,
		func(r *metadatav1.RemoteLogManagerSessionRequest) (heartbeat, error) {
			if r.GetRlmId() < 1 {
				return heartbeat{}, rpcerr.InvalidField("rlm_id", "is not 1 or more")
			}
			return heartbeat{
				member:   controller.Member{Role: controller.RemoteLogManager, ID: r.GetRlmId(), Epoch: r.GetRlmEpoch()},
				stopping: r.GetStopping(),
			}, nil
		},
		func(r *metadatav1.RemoteLogManagerSessionRequest, epoch, end int64) error {
			return stream.Send(&metadatav1.RemoteLogManagerSessionResponse{
				Heartbeat: r.GetHeartbeat(), ControllerEpoch: epoch, MetadataEndOffset: end,
			})
		})
}

// CloseRemoteLogManager implements the contract.
func (s *Server) CloseRemoteLogManager(ctx context.Context, r *metadatav1.CloseRemoteLogManagerRequest) (
	*metadatav1.CloseRemoteLogManagerResponse, error,
) {
	if r.GetRlmId() < 1 {
		return nil, rpcerr.InvalidField("rlm_id", "is not 1 or more")
	}
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) ([]*metadatav1.Event, error) {
		return st.DecideCloseRemoteLogManager(r.GetRlmId(), r.GetRlmEpoch(), state.ReasonOperator)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	return &metadatav1.CloseRemoteLogManagerResponse{MetadataOffset: s.decided(offset)}, nil
}

// GetCluster implements the contract.
func (s *Server) GetCluster(context.Context, *metadatav1.GetClusterRequest) (resp *metadatav1.GetClusterResponse, err error) {
	err = s.read(func(st *state.State) { resp = st.Cluster() })
	return resp, err
}

// partition describes a partition right behind a change of it.
func (s *Server) partition(id state.PartitionID) (p *metadatav1.Partition, err error) {
	found := false
	if err := s.read(func(st *state.State) { p, found = st.Partition(id) }); err != nil {
		return nil, err
	}
	if !found {
		return nil, s.mapError(&state.UnknownPartitionError{Partition: id.Partition})
	}
	return p, nil
}

// ElectLeader implements the contract.
func (s *Server) ElectLeader(ctx context.Context, r *metadatav1.ElectLeaderRequest) (*metadatav1.ElectLeaderResponse, error) {
	switch {
	case r.GetTopic() == "":
		return nil, rpcerr.InvalidField("topic", "is empty")
	case r.GetBrokerId() < 0:
		return nil, rpcerr.InvalidField("broker_id", "is negative")
	case r.GetExpectedLeaderEpoch() < 0:
		return nil, rpcerr.InvalidField("expected_leader_epoch", "is negative")
	}
	var id state.PartitionID
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) (_ []*metadatav1.Event, err error) {
		if id, err = st.FindPartition(r.GetTopic(), r.GetPartition()); err != nil {
			return nil, err
		}
		return st.DecideElectLeader(r)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	p, err := s.partition(id)
	if err != nil {
		return nil, err
	}
	return &metadatav1.ElectLeaderResponse{Partition: p, MetadataOffset: offset}, nil
}

// OpenEpoch implements the contract.
func (s *Server) OpenEpoch(ctx context.Context, r *metadatav1.OpenEpochRequest) (*metadatav1.OpenEpochResponse, error) {
	switch {
	case r.GetPartition() == nil:
		return nil, rpcerr.InvalidField("partition", "is missing")
	case r.GetFence() == nil:
		return nil, rpcerr.InvalidField("fence", "is missing")
	}
	var openedAt int64
	_, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) (events []*metadatav1.Event, err error) {
		events, openedAt, err = st.DecideOpenEpoch(r)
		return events, err
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	p, err := s.partition(state.PartitionID{
		TopicCreationOffset: r.GetPartition().GetTopicCreationOffset(), Partition: r.GetPartition().GetPartition(),
	})
	if err != nil {
		return nil, err
	}
	return &metadatav1.OpenEpochResponse{Partition: p, MetadataOffset: openedAt}, nil
}

// AllocateProducerIds implements the contract.
func (s *Server) AllocateProducerIds(ctx context.Context, r *metadatav1.AllocateProducerIdsRequest) ( //nolint:revive // the generated name
	*metadatav1.AllocateProducerIdsResponse, error,
) {
	var resp *metadatav1.AllocateProducerIdsResponse
	_, err := s.deps.Controller.Submit(ctx, controller.ClassTopic, func(st *state.State) (events []*metadatav1.Event, err error) {
		events, resp, err = st.DecideAllocateProducerIDs(r)
		return events, err
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	return resp, nil
}
