package metadata_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/config"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/metadata/metadatatest"
)

func TestReassignPartition(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{})
	c := of(cluster.Controller())
	for id := int32(1); id <= 2; id++ {
		defer beat(t, c, id, registerBroker(t, ctx, c, id).GetBrokerEpoch())()
	}
	topic := createTopic(t, ctx, c, "t", 1)
	p := topic.GetPartitions()[0]
	require.Equal(t, []int32{1, 2}, p.GetReplicaIds())
	open(t, ctx, c, topic, 0)
	defer beat(t, c, 3, registerBroker(t, ctx, c, 3).GetBrokerEpoch())()
	info, err := c.GetCluster(ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)

	watch, err := c.WatchMetadata(ctx, &metadatav1.WatchMetadataRequest{From: &metadatav1.MetadataPosition{
		Incarnation: info.GetIncarnation(), ControllerEpoch: info.GetControllerEpoch(), Offset: info.GetMetadataOffset(),
	}})
	require.NoError(t, err)
	r := &metadatav1.ReassignPartitionRequest{Topic: "t", BrokerIds: []int32{3, 2}, ExpectedLeaderEpoch: p.GetFence().GetLeaderEpoch()}
	resp, err := c.ReassignPartition(ctx, r)
	require.NoError(t, err)
	assert.Equal(t, []int32{3, 2}, resp.GetPartition().GetReplicaIds())
	assert.EqualValues(t, 2, resp.GetPartition().GetLeaderId(), "it has a copy")
	assert.Equal(t, p.GetFence().GetLeaderEpoch()+1, resp.GetPartition().GetFence().GetLeaderEpoch())
	assert.False(t, resp.GetPartition().GetOpened())
	for {
		m, err := watch.Recv()
		require.NoError(t, err)
		if m.GetEntry().GetOffset() != resp.GetMetadataOffset() {
			continue
		}
		events := m.GetEntry().GetEvents()
		require.Len(t, events, 2, "one entry")
		assert.Equal(t, []int32{3, 2}, events[0].GetReplicasChanged().GetBrokerIds())
		assert.EqualValues(t, 2, events[1].GetPartitionFenced().GetLeaderId())
		break
	}
	again, err := c.ReassignPartition(ctx, r) // its answer was lost, say
	require.NoError(t, err)
	assert.Equal(t, resp.GetPartition().GetFence().GetLeaderEpoch(), again.GetPartition().GetFence().GetLeaderEpoch())
	assert.GreaterOrEqual(t, again.GetMetadataOffset(), resp.GetMetadataOffset())

	for want, bad := range map[errorsv1.ErrorReason][]*metadatav1.ReassignPartitionRequest{
		errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD: {
			{BrokerIds: []int32{1}}, {Topic: "t"}, {Topic: "t", BrokerIds: []int32{7}}, {Topic: "t", BrokerIds: []int32{1, 1}},
			{Topic: "t", BrokerIds: []int32{1}, ExpectedLeaderEpoch: -1},
		},
		errorsv1.ErrorReason_ERROR_REASON_CONFLICT:                   {{Topic: "t", BrokerIds: []int32{1}, ExpectedLeaderEpoch: 1}},
		errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION: {{Topic: "no", BrokerIds: []int32{1}}, {Topic: "t", Partition: 1, BrokerIds: []int32{1}}},
	} {
		for _, r := range bad {
			_, err := c.ReassignPartition(ctx, r)
			requireReason(t, err, want)
		}
	}
	assert.Equal(t, []int32{3, 2}, getPartition(t, ctx, c, "t").GetReplicaIds())
}

func TestAPartitionThatLostItsReplicasGetsANewOne(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Replicas: 2, Disks: true, Change: func(c *metadata.Config) {
		c.ReplaceTimeout = config.Duration(300 * time.Millisecond)
		c.SessionTimeout = config.Duration(2 * time.Second) // and so the leader's grace
	}})
	c := of(cluster.Controller())
	one := registerBroker(t, ctx, c, 1)
	topic := createTopic(t, ctx, c, "t", 1)
	rlm := registerRLM(t, ctx, c, 1)
	open(t, ctx, c, topic, 0).commit(rlm, 1, 0)
	two := registerBroker(t, ctx, c, 2)
	defer beat(t, c, 2, two.GetBrokerEpoch())()
	stream, err := c.BrokerSession(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(&metadatav1.BrokerSessionRequest{BrokerId: 1, BrokerEpoch: one.GetBrokerEpoch(), Heartbeat: 1, Stopping: true}))
	_, err = stream.Recv()
	require.NoError(t, err)
	var p *metadatav1.Partition
	require.Eventually(t, func() bool {
		p = getPartition(t, ctx, c, "t")
		return p.GetFenceReason() == "replicas_replaced"
	}, 30*time.Second, 10*time.Millisecond)
	assert.Equal(t, []int32{1, 2}, p.GetReplicaIds())
	assert.EqualValues(t, 2, p.GetLeaderId())
	assert.Equal(t, two.GetBrokerEpoch(), p.GetFence().GetBrokerEpoch())
	assert.EqualValues(t, 10, p.GetObjectEndOffset())
	topic.Partitions[0] = p
	open(t, ctx, c, topic, 0)

	// Whoever leads next knows it from the log.
	require.NoError(t, cluster.Controller().Stop())
	p = getPartition(t, ctx, of(cluster.Controller()), "t")
	assert.Equal(t, []int32{1, 2}, p.GetReplicaIds())
	assert.True(t, p.GetOpened())
}

func TestLeadersAreAskedToHandOverToPreferredBrokers(t *testing.T) {
	for name, delay := range map[string]time.Duration{"asked": 200 * time.Millisecond, "off": 0} {
		t.Run(name, func(t *testing.T) {
			ctx := bounded(t)
			cluster := metadatatest.Start(t, metadatatest.Options{Change: func(c *metadata.Config) { c.RebalanceDelay = config.Duration(delay) }})
			c := of(cluster.Controller())
			defer beat(t, c, 1, registerBroker(t, ctx, c, 1).GetBrokerEpoch())()
			two := registerBroker(t, ctx, c, 2)
			topic := createTopic(t, ctx, c, "t", 1)
			began := time.Now()
			elected, err := c.ElectLeader(ctx, &metadatav1.ElectLeaderRequest{Topic: "t", BrokerId: 2})
			require.NoError(t, err)
			topic.Partitions[0] = elected.GetPartition()
			open(t, ctx, c, topic, 0)

			stream, err := c.BrokerSession(ctx)
			require.NoError(t, err)
			heartbeats := int64(0)
			heartbeat := func() []*metadatav1.Handover {
				heartbeats++
				require.NoError(t, stream.Send(&metadatav1.BrokerSessionRequest{BrokerId: 2, BrokerEpoch: two.GetBrokerEpoch(), Heartbeat: heartbeats}))
				m, err := stream.Recv()
				require.NoError(t, err)
				return m.GetHandovers()
			}
			if delay == 0 {
				for range 100 {
					require.Empty(t, heartbeat())
				}
				return
			}
			var handovers []*metadatav1.Handover
			require.Eventually(t, func() bool { handovers = heartbeat(); return len(handovers) > 0 }, 30*time.Second, time.Millisecond)
			assert.GreaterOrEqual(t, time.Since(began), delay)
			require.Len(t, handovers, 1)
			assert.Equal(t, topic.GetTopicId(), handovers[0].GetPartition().GetTopicId())
			assert.EqualValues(t, 1, handovers[0].GetBrokerId())
			assert.Equal(t, elected.GetPartition().GetFence().GetLeaderEpoch(), handovers[0].GetLeaderEpoch())
			assert.Len(t, heartbeat(), 1, "repeated")
			assert.EqualValues(t, 2, getPartition(t, ctx, c, "t").GetLeaderId(), "nothing is forced")
			_, err = c.ElectLeader(ctx, &metadatav1.ElectLeaderRequest{
				Topic: "t", BrokerId: handovers[0].GetBrokerId(), ExpectedLeaderEpoch: handovers[0].GetLeaderEpoch(),
			})
			require.NoError(t, err)
			assert.Empty(t, heartbeat())
		})
	}
}
