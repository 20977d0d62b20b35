package api

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
)

func TestDescribeTopicNamesLeadersAndLimits(t *testing.T) {
	run(t, 3, 2, nil, func(t *testing.T, w *world) {
		resp, err := w.client(1).DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: "orders"})
		require.NoError(t, err)
		require.Equal(t, topicID, resp.GetTopicId())
		require.EqualValues(t, maxBatch, resp.GetMaxBatchBytes())
		require.Equal(t, logv1.Level_LEVEL_LEADER, resp.GetMinAckLevel())
		require.EqualValues(t, 9, resp.GetMetadataOffset())
		require.Len(t, resp.GetPartitions(), 2)
		led, none := resp.GetPartitions()[0], resp.GetPartitions()[1]
		require.EqualValues(t, 2, led.GetLeaderId())
		require.Equal(t, brokerAddress(2), led.GetLeaderAddress())
		require.EqualValues(t, 4, led.GetLeaderEpoch())
		require.EqualValues(t, 1, none.GetPartition())
		require.Zero(t, none.GetLeaderId())
		require.Empty(t, none.GetLeaderAddress())
	})
}

func TestDescribeClusterListsBrokersInOrder(t *testing.T) {
	run(t, 3, 1, nil, func(t *testing.T, w *world) {
		resp, err := w.client(2).DescribeCluster(t.Context(), &brokerv1.DescribeClusterRequest{})
		require.NoError(t, err)
		require.Equal(t, "c1", resp.GetClusterId())
		require.Len(t, resp.GetBrokers(), 3)
		for i, b := range resp.GetBrokers() {
			require.EqualValues(t, i+1, b.GetBrokerId())
			require.Equal(t, brokerAddress(b.GetBrokerId()), b.GetAddress())
			require.True(t, b.GetOnline())
		}
	})
}

func TestDescribeRefusals(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		_, err := client.DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: "absent"})
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION), "%v", err)
		_, err = client.DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{})
		require.Equal(t, codes.InvalidArgument, status.Code(err))

		w.brokers[1].replicas.view = &cluster.View{} // no image has come yet
		_, err = client.DescribeTopic(t.Context(), &brokerv1.DescribeTopicRequest{Topic: "orders"})
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_NOT_READY), "%v", err)
		_, err = client.DescribeCluster(t.Context(), &brokerv1.DescribeClusterRequest{})
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_NOT_READY), "%v", err)
	})
}
