package api

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"google.golang.org/grpc"

	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// ExplainPartition implements LogService. The leader answers; when it can't be
// asked, this broker says what it knows, and that the leader did not answer: the
// call is for the very moments in which things fail.
func (s *Service) ExplainPartition(ctx context.Context, req *brokerv1.ExplainPartitionRequest) (resp *brokerv1.ExplainPartitionResponse, err error) {
	defer func() { s.metrics.failed(ctx, "ExplainPartition", err) }()
	var v violations
	v.target(req.GetTopic(), req.GetPartition())
	if err := v.err(); err != nil {
		return nil, err
	}
	t := target{req.GetTopic(), req.GetPartition()}
	p, err := s.replicas.Lookup(t.topic, t.partition)
	var elsewhere *replica.NotLeaderError
	switch {
	case err == nil:
		resp = s.explainHere(p)
		if e := s.leads(p.Offsets()); errors.As(e, &elsewhere) {
			err = e
		}
	case errors.As(err, &elsewhere):
		resp = s.explainElsewhere(t, elsewhere)
	default:
		return nil, rpcError(t, p, err)
	}
	leader, ok := s.leaderFor(ctx, err)
	if !ok {
		return resp, nil
	}
	far, err := forwardUnary(ctx, s, "ExplainPartition", leader, reads, queryBound, func(ctx context.Context, c brokerv1.LogServiceClient, opts ...grpc.CallOption) (*brokerv1.ExplainPartitionResponse, error) {
		return c.ExplainPartition(ctx, req, opts...)
	})
	if err == nil {
		return far, nil
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	resp.Findings = append([]*brokerv1.Finding{{
		Code:    "LEADER_UNREACHABLE",
		Summary: fmt.Sprintf("Broker %d leads the partition but could not be asked; this is what broker %d knows.", leader.LeaderID, s.self),
		Evidence: map[string]string{
			"leader_id": strconv.Itoa(int(leader.LeaderID)), "leader_address": leader.Address, "error": err.Error(),
		},
		Blocking: true,
	}}, resp.Findings...)
	return resp, nil
}

func (s *Service) explainHere(p Partition) *brokerv1.ExplainPartitionResponse {
	x := p.Explain()
	o := x.Offsets
	resp := &brokerv1.ExplainPartitionResponse{
		TopicId: x.TopicID, BrokerId: x.BrokerID, LeaderId: o.LeaderID, State: replica.StateToProto(x.State),
		Fence: fenceToProto(o.Fence), Lineage: lineageToProto(o.Lineage),
		LogStartOffset: o.LogStart, LocalLogStartOffset: o.LocalLogStart, ObjectEndOffset: o.ObjectEnd,
		HighWatermark: o.HighWatermark, LogEndOffset: o.LogEnd,
		UnuploadedBytes: x.UnuploadedBytes, RlmId: x.RLMID, ProducerCount: int32(x.ProducerCount),
	}
	for _, f := range x.Findings {
		resp.Findings = append(resp.Findings, &brokerv1.Finding{Code: f.Code, Summary: f.Summary, Evidence: f.Evidence, Blocking: f.Blocking})
	}
	for _, r := range x.Replicas {
		resp.Replicas = append(resp.Replicas, &brokerv1.ReplicaStatus{
			BrokerId: r.BrokerID, Online: r.Online, State: replica.StateToProto(r.State), LogEndOffset: r.LogEnd,
			Lag: r.Lag, AgeMs: r.Age.Milliseconds(), Reason: r.Reason,
		})
	}
	return resp
}

// explainElsewhere is what a broker knows that holds nothing of the partition.
func (s *Service) explainElsewhere(t target, e *replica.NotLeaderError) *brokerv1.ExplainPartitionResponse {
	resp := &brokerv1.ExplainPartitionResponse{
		BrokerId: s.self, LeaderId: e.LeaderID, State: brokerv1.ReplicaState_REPLICA_STATE_IDLE, LocalLogStartOffset: -1,
	}
	evidence := map[string]string{"leader_epoch": strconv.Itoa(int(e.Epoch))}
	view := s.replicas.Cluster()
	if topic, ok := view.Topic(t.topic); ok {
		resp.TopicId = topic.ID
		if int(t.partition) < len(topic.Partitions) {
			evidence["replicas"] = fmt.Sprint(topic.Partitions[t.partition].Replicas)
		}
	}
	if e.LeaderID == 0 {
		resp.Findings = []*brokerv1.Finding{{Code: "NO_LEADER", Summary: "No broker leads the partition.", Evidence: evidence, Blocking: true}}
		return resp
	}
	evidence["leader_id"], evidence["leader_address"] = strconv.Itoa(int(e.LeaderID)), e.Address
	f := &brokerv1.Finding{Code: "LEADER_ELSEWHERE", Summary: fmt.Sprintf("Broker %d leads the partition; this broker holds nothing of it.", e.LeaderID), Evidence: evidence}
	if b, ok := view.Broker(e.LeaderID); ok && !b.Online {
		f.Code, f.Blocking = "LEADER_OFFLINE", true
		f.Summary = fmt.Sprintf("Broker %d leads the partition, but its session has ended.", e.LeaderID)
	}
	resp.Findings = []*brokerv1.Finding{f}
	return resp
}
