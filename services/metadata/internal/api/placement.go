package api

import (
	"context"

	"github.com/braidlog/braid/pkg/rpcerr"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/state"
)

// ReassignPartition implements the contract.
func (s *Server) ReassignPartition(ctx context.Context, r *metadatav1.ReassignPartitionRequest) (*metadatav1.ReassignPartitionResponse, error) {
	switch {
	case r.GetTopic() == "":
		return nil, rpcerr.InvalidField("topic", "is empty")
	case r.GetExpectedLeaderEpoch() < 0:
		return nil, rpcerr.InvalidField("expected_leader_epoch", "is negative")
	}
	var id state.PartitionID
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) (_ []*metadatav1.Event, err error) {
		if id, err = st.FindPartition(r.GetTopic(), r.GetPartition()); err != nil {
			return nil, err
		}
		return st.DecideReassign(r)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	p, err := s.partition(id)
	if err != nil {
		return nil, err
	}
	return &metadatav1.ReassignPartitionResponse{Partition: p, MetadataOffset: s.decided(offset)}, nil
}
