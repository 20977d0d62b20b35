package api

import (
	"cmp"
	"context"
	"slices"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/topicconfig"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
)

// DescribeTopic implements LogService, from this broker's picture of the
// cluster.
func (s *Service) DescribeTopic(ctx context.Context, req *brokerv1.DescribeTopicRequest) (resp *brokerv1.DescribeTopicResponse, err error) {
	defer func() { s.metrics.failed(ctx, "DescribeTopic", err) }()
	if req.GetTopic() == "" {
		return nil, rpcerr.InvalidField("topic", "is empty; must be the name of a topic")
	}
	view, err := s.view()
	if err != nil {
		return nil, err
	}
	topic, ok := view.Topic(req.GetTopic())
	if !ok {
		return nil, rpcerr.UnknownTopicOrPartition(req.GetTopic())
	}
	resp = &brokerv1.DescribeTopicResponse{
		TopicId: topic.ID, Name: topic.Name, MaxBatchBytes: topic.Config.MaxBatchBytes,
		MinAckLevel: logv1.Level_LEVEL_LEADER, MetadataOffset: view.Position.Offset,
		Partitions: make([]*brokerv1.PartitionLeader, len(topic.Partitions)),
	}
	if topic.Config.MinAckLevel == topicconfig.LevelObject {
		resp.MinAckLevel = logv1.Level_LEVEL_OBJECT
	}
	for i, p := range topic.Partitions {
		out := &brokerv1.PartitionLeader{Partition: int32(i), LeaderId: p.LeaderID, LeaderEpoch: p.LeaderEpoch, Opened: p.Opened}
		if b, _, ok := view.Leader(topic, int32(i)); ok {
			out.LeaderAddress = b.Address
		}
		resp.Partitions[i] = out
	}
	return resp, nil
}

// DescribeCluster implements LogService, from this broker's picture of the
// cluster.
func (s *Service) DescribeCluster(ctx context.Context, _ *brokerv1.DescribeClusterRequest) (resp *brokerv1.DescribeClusterResponse, err error) {
	defer func() { s.metrics.failed(ctx, "DescribeCluster", err) }()
	view, err := s.view()
	if err != nil {
		return nil, err
	}
	resp = &brokerv1.DescribeClusterResponse{
		ClusterId: view.ClusterID, ControllerAddress: view.ControllerAddress, MetadataOffset: view.Position.Offset,
	}
	for _, b := range view.Brokers() {
		resp.Brokers = append(resp.Brokers, &brokerv1.BrokerAddress{BrokerId: b.ID, Address: b.Address, Zone: b.Zone, Online: b.Online})
	}
	slices.SortFunc(resp.Brokers, func(a, b *brokerv1.BrokerAddress) int { return cmp.Compare(a.GetBrokerId(), b.GetBrokerId()) })
	return resp, nil
}

// view is the broker's picture of the cluster, once it has one.
func (s *Service) view() (*cluster.View, error) {
	view := s.replicas.Cluster()
	if view == nil || view.ClusterID == "" {
		return nil, rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soonRetry, "the broker does not know the cluster yet")
	}
	return view, nil
}
