package metadata_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/metadata/metadatatest"
)

// clients are the generated clients of one replica.
type clients struct {
	metadatav1.TopicServiceClient
	metadatav1.ClusterServiceClient
	metadatav1.SegmentServiceClient
	metadatav1.SnapshotServiceClient
}

func of(r *metadatatest.Replica) clients {
	c := r.Conn()
	return clients{
		metadatav1.NewTopicServiceClient(c), metadatav1.NewClusterServiceClient(c),
		metadatav1.NewSegmentServiceClient(c), metadatav1.NewSnapshotServiceClient(c),
	}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func registerBroker(t *testing.T, ctx context.Context, c clients, id int32) *metadatav1.RegisterBrokerResponse { //nolint:revive // t first in tests
	t.Helper()
	resp, err := c.RegisterBroker(ctx, &metadatav1.RegisterBrokerRequest{
		BrokerId: id, Address: fmt.Sprintf("127.0.0.1:%d", 9000+id), DirectoryId: directory(id),
	})
	require.NoError(t, err)
	return resp
}

func directory(id int32) string { return fmt.Sprintf("%08d-0000-4000-8000-000000000000", id) }

func registerRLM(t *testing.T, ctx context.Context, c clients, id int32) *metadatav1.RegisterRemoteLogManagerResponse { //nolint:revive // t first in tests
	t.Helper()
	resp, err := c.RegisterRemoteLogManager(ctx, &metadatav1.RegisterRemoteLogManagerRequest{RlmId: id, Address: "127.0.0.1:9500"})
	require.NoError(t, err)
	return resp
}

// beat keeps a broker's session alive until the returned function is called.
func beat(t *testing.T, c clients, id int32, epoch int64) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(300 * time.Millisecond)
		defer ticker.Stop()
		for ctx.Err() == nil {
			stream, err := c.BrokerSession(ctx)
			for n := int64(1); err == nil; n++ {
				if err = stream.Send(&metadatav1.BrokerSessionRequest{BrokerId: id, BrokerEpoch: epoch, Heartbeat: n}); err == nil {
					_, err = stream.Recv()
				}
				select {
				case <-ticker.C:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return func() { cancel(); <-done }
}

// leader plays the leader of one partition: it opens and feeds it.
type leader struct {
	t     *testing.T
	ctx   context.Context
	c     clients
	topic *metadatav1.Topic
	fence *logv1.Fence
	start int64
	end   int64
	hash  chainhash.Hash
	seq   int64
}

func open(t *testing.T, ctx context.Context, c clients, topic *metadatav1.Topic, partition int32) *leader { //nolint:revive // t first in tests
	t.Helper()
	p := topic.GetPartitions()[partition]
	l := &leader{t: t, ctx: ctx, c: c, topic: topic, fence: p.GetFence(), start: p.GetObjectEndOffset(), end: p.GetObjectEndOffset()}
	l.hash, _ = chainhash.FromBytes(p.GetObjectEndChainHash())
	_, err := c.OpenEpoch(ctx, &metadatav1.OpenEpochRequest{
		Partition: l.id(partition), Fence: l.fence, StartOffset: l.start, Lineage: p.GetLineage(),
		ObjectEndChainHash: l.hash.Bytes(), ObjectEndOffset: l.end,
	})
	require.NoError(t, err)
	return l
}

func (l *leader) id(partition int32) *logv1.TopicIdPartition {
	return &logv1.TopicIdPartition{TopicId: l.topic.GetTopicId(), TopicCreationOffset: l.topic.GetCreationOffset(), Partition: partition}
}

// request is the commit of the next ten offsets.
func (l *leader) request(rlm *metadatav1.RegisterRemoteLogManagerResponse, rlmID, partition int32) *metadatav1.CommitCombinedSegmentRequest {
	l.seq++
	next := chainhash.Next(l.hash, fmt.Appendf(nil, "batch at %d", l.end))
	var predecessor *logv1.Leadership
	leadership := &logv1.Leadership{Incarnation: l.fence.GetIncarnation(), LeaderEpoch: l.fence.GetLeaderEpoch()}
	if l.end > l.start {
		predecessor = leadership
	}
	r := &metadatav1.CommitCombinedSegmentRequest{
		ClusterId: rlm.GetClusterId(), RlmId: rlmID,
		Object:    &logv1.ObjectRef{Incarnation: rlm.GetIncarnation(), RlmEpoch: rlm.GetRlmEpoch(), Sequence: l.seq, Attempt: 1},
		SizeBytes: 1000, Crc32C: uint32(l.seq),
		Ranges: []*logv1.RangeDescriptor{{
			Partition: l.id(partition), Fence: l.fence, EpochStart: l.start, BaseOffset: l.end, EndOffset: l.end + 10,
			Predecessor: predecessor, Lineage: []*logv1.LineageEntry{{Leadership: leadership, StartOffset: l.start}},
			BaseChainHash: l.hash.Bytes(), EndChainHash: next.Bytes(), Position: 0, LengthBytes: 900, BatchCount: 1,
		}},
	}
	l.end, l.hash = l.end+10, next
	return r
}

func (l *leader) commit(rlm *metadatav1.RegisterRemoteLogManagerResponse, rlmID, partition int32) {
	l.t.Helper()
	resp, err := l.c.CommitCombinedSegment(l.ctx, l.request(rlm, rlmID, partition))
	require.NoError(l.t, err)
	require.Equal(l.t, metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED, resp.GetVerdicts()[0].GetOutcome())
	require.Equal(l.t, l.end, resp.GetVerdicts()[0].GetObjectEndOffset())
}

func createTopic(t *testing.T, ctx context.Context, c clients, name string, partitions int32) *metadatav1.Topic { //nolint:revive // t first in tests
	t.Helper()
	resp, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: name, PartitionCount: partitions})
	require.NoError(t, err)
	return resp.GetTopic()
}

func getPartition(t *testing.T, ctx context.Context, c clients, topic string) *metadatav1.Partition { //nolint:revive // t first in tests
	t.Helper()
	resp, err := c.GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: topic}})
	require.NoError(t, err)
	return resp.GetTopic().GetPartitions()[0]
}

func requireReason(t *testing.T, err error, reason errorsv1.ErrorReason) {
	t.Helper()
	_ = refusal(t, err, reason)
}

// refusal requires an answer with the reason and returns it.
func refusal(t *testing.T, err error, reason errorsv1.ErrorReason) *rpcerr.Error {
	t.Helper()
	require.Error(t, err)
	got, ok := rpcerr.From(err)
	require.True(t, ok, "%v", err)
	require.Equal(t, reason, got.Reason, "%v", err)
	return got
}

func TestATopicsLife(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{})
	c := of(cluster.Controller())
	broker := registerBroker(t, ctx, c, 1)
	defer beat(t, c, 1, broker.GetBrokerEpoch())()
	rlm := registerRLM(t, ctx, c, 1)
	topic := createTopic(t, ctx, c, "orders", 2)
	require.Len(t, topic.GetPartitions(), 2)
	p := topic.GetPartitions()[0]
	assert.EqualValues(t, 1, p.GetLeaderId())
	assert.False(t, p.GetOpened())
	assert.Equal(t, broker.GetBrokerEpoch(), p.GetFence().GetBrokerEpoch())

	l := open(t, ctx, c, topic, 0)
	for range 5 {
		l.commit(rlm, 1, 0)
	}
	list, err := c.ListSegments(ctx, &metadatav1.ListSegmentsRequest{Topic: "orders", FromOffset: 15, PageSize: 3})
	require.NoError(t, err)
	require.Len(t, list.GetRanges(), 3)
	assert.EqualValues(t, 10, list.GetRanges()[0].GetBaseOffset())
	assert.EqualValues(t, 50, list.GetObjectEndOffset())
	assert.Contains(t, list.GetRanges()[0].GetObjectName(), rlm.GetClusterId()+"/wal/")
	list, err = c.ListSegments(ctx, &metadatav1.ListSegmentsRequest{Topic: "orders", FromOffset: 15, PageSize: 3, PageToken: list.GetNextPageToken()})
	require.NoError(t, err)
	require.Len(t, list.GetRanges(), 1)
	assert.Empty(t, list.GetNextPageToken())

	// The same command again has the first verdict; the next in another order is
	// refused as a gap.
	again := l.request(rlm, 1, 0)
	first, err := c.CommitCombinedSegment(ctx, again)
	require.NoError(t, err)
	second, err := c.CommitCombinedSegment(ctx, again)
	require.NoError(t, err)
	assert.Equal(t, first.GetMetadataOffset(), second.GetMetadataOffset())
	assert.Equal(t, metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED, second.GetVerdicts()[0].GetOutcome())
	_ = l.request(rlm, 1, 0)
	gap, err := c.CommitCombinedSegment(ctx, l.request(rlm, 1, 0))
	require.NoError(t, err)
	assert.EqualValues(t, -1, gap.GetMetadataOffset())
	assert.Equal(t, metadatav1.RangeOutcome_RANGE_OUTCOME_GAP, gap.GetVerdicts()[0].GetOutcome())

	info, err := c.GetCluster(ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	assert.EqualValues(t, 6, info.GetRangeCount())
	assert.EqualValues(t, 1, info.GetTopicCount())
	assert.True(t, info.GetBrokers()[0].GetOnline())

	ids, err := c.AllocateProducerIds(ctx, &metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: broker.GetBrokerEpoch(), Count: 10})
	require.NoError(t, err)
	assert.EqualValues(t, info.GetIncarnation(), ids.GetFirstProducerId()>>32)

	_, err = c.DeleteTopic(ctx, &metadatav1.DeleteTopicRequest{Name: "orders"})
	require.NoError(t, err)
	_, err = c.GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: "orders"}})
	requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION)
}

func TestRefusalsNameTheField(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{})
	c := of(cluster.Controller())
	broker := registerBroker(t, ctx, c, 1)
	defer beat(t, c, 1, broker.GetBrokerEpoch())()
	createTopic(t, ctx, c, "t", 1)
	for name, try := range map[string]struct {
		call   func() error
		reason errorsv1.ErrorReason
		field  string
	}{
		"name": {func() error {
			_, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "a/b", PartitionCount: 1})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, "name"},
		"partitions": {func() error {
			_, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "a"})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, "partition_count"},
		"setting out of range": {func() error {
			_, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1, Configs: map[string]string{"flush": "never"}})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, `configs["flush"]`},
		"unknown setting": {func() error {
			_, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1, Configs: map[string]string{"colour": "red"}})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, `configs["colour"]`},
		"feature": {func() error {
			_, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1, Configs: map[string]string{"cleanup.policy": "compact"}})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_UNSUPPORTED, `configs["cleanup.policy"]`},
		"page size": {func() error {
			_, err := c.ListTopics(ctx, &metadatav1.ListTopicsRequest{PageSize: 1_001})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, "page_size"},
		"page token": {func() error {
			_, err := c.ListSegments(ctx, &metadatav1.ListSegmentsRequest{Topic: "t", PageToken: "x"})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, "page_token"},
		"nothing asked for": {func() error {
			_, err := c.GetTopic(ctx, &metadatav1.GetTopicRequest{})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, "by"},
		"exists": {func() error {
			_, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "t", PartitionCount: 1})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_TOPIC_EXISTS, ""},
		"partition": {func() error {
			_, err := c.ElectLeader(ctx, &metadatav1.ElectLeaderRequest{Topic: "t", Partition: 7})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION, ""},
		"another cluster": {func() error {
			_, err := c.RegisterBroker(ctx, &metadatav1.RegisterBrokerRequest{
				BrokerId: 2, Address: "h:1", DirectoryId: directory(2), ClusterId: uuid.NewString(),
			})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, ""},
		"a broker that has seen more than there is": {func() error {
			_, err := c.RegisterBroker(ctx, &metadatav1.RegisterBrokerRequest{
				BrokerId: 2, Address: "h:1", DirectoryId: directory(2), AppliedMetadataOffset: 1 << 40, Incarnation: broker.GetIncarnation(),
			})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_METADATA_ROLLED_BACK, ""},
		"an id that is live elsewhere": {func() error {
			_, err := c.RegisterBroker(ctx, &metadatav1.RegisterBrokerRequest{BrokerId: 1, Address: "h:1", DirectoryId: directory(99)})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_BROKER_ID_IN_USE, ""},
		"a stale broker epoch": {func() error {
			_, err := c.AllocateProducerIds(ctx, &metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: broker.GetBrokerEpoch() - 1})
			return err
		}, errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := refusal(t, try.call(), try.reason)
			if try.field != "" {
				require.NotEmpty(t, got.Violations)
				assert.Equal(t, try.field, got.Violations[0].Field)
			}
		})
	}
}

func TestListTopicsInPages(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{})
	c := of(cluster.Controller())
	broker := registerBroker(t, ctx, c, 1)
	defer beat(t, c, 1, broker.GetBrokerEpoch())()
	for i := range 7 {
		createTopic(t, ctx, c, fmt.Sprintf("t%d", i), 1)
	}
	var got []string
	token := ""
	for pages := 1; ; pages++ {
		resp, err := c.ListTopics(ctx, &metadatav1.ListTopicsRequest{PageSize: 3, PageToken: token})
		require.NoError(t, err)
		for _, topic := range resp.GetTopics() {
			got = append(got, topic.GetName())
		}
		if token = resp.GetNextPageToken(); token == "" {
			assert.Equal(t, 3, pages)
			break
		}
	}
	assert.Equal(t, []string{"t0", "t1", "t2", "t3", "t4", "t5", "t6"}, got)
	updated, err := c.UpdateTopic(ctx, &metadatav1.UpdateTopicRequest{Name: "t0", Set: map[string]string{"flush": "always"}})
	require.NoError(t, err)
	assert.Equal(t, map[string]string{"flush": "always"}, updated.GetTopic().GetConfigs())
	again, err := c.UpdateTopic(ctx, &metadatav1.UpdateTopicRequest{Name: "t0", Set: map[string]string{"flush": "always"}})
	require.NoError(t, err)
	assert.True(t, proto.Equal(updated.GetTopic(), again.GetTopic()))
}

// A broker that says nothing any more loses its leaderships to another, one that
// never opens its epoch too, and one that comes back is elected under its new
// broker epoch.
func TestLeadersAreReplaced(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Change: func(c *metadata.Config) {
		c.OpenTimeout, c.SessionTimeout = config.Duration(time.Second), config.Duration(2*time.Second)
	}})
	c := of(cluster.Controller())
	one, two := registerBroker(t, ctx, c, 1), registerBroker(t, ctx, c, 2)
	stopOne, stopTwo := beat(t, c, 1, one.GetBrokerEpoch()), beat(t, c, 2, two.GetBrokerEpoch())
	defer func() { stopOne(); stopTwo() }()
	topic := createTopic(t, ctx, c, "t", 1)
	p := topic.GetPartitions()[0]
	require.EqualValues(t, 1, p.GetLeaderId())
	open(t, ctx, c, topic, 0)

	await := func(what string, ok func(*metadatav1.Partition) bool) *metadatav1.Partition {
		t.Helper()
		var last *metadatav1.Partition
		require.Eventually(t, func() bool {
			last = getPartition(t, ctx, c, "t")
			return ok(last)
		}, 30*time.Second, 10*time.Millisecond, what)
		return last
	}
	// Registering again fences what the broker led, and elects it again.
	stopOne()
	one = registerBroker(t, ctx, c, 1)
	stopOne = beat(t, c, 1, one.GetBrokerEpoch())
	p = await("elected again", func(p *metadatav1.Partition) bool { return p.GetFenceReason() == "leader_registered" })
	assert.Equal(t, one.GetBrokerEpoch(), p.GetFence().GetBrokerEpoch())
	assert.EqualValues(t, 1, p.GetLeaderId())
	// It does not open: the other is elected after the open timeout.
	p = await("replaced", func(p *metadatav1.Partition) bool { return p.GetFenceReason() == "open_timeout" })
	assert.EqualValues(t, 2, p.GetLeaderId())
	topic.Partitions[0] = p
	open(t, ctx, c, topic, 0)
	// Its session ends: after timeout and grace the first is elected.
	stopTwo()
	p = await("taken over", func(p *metadatav1.Partition) bool { return p.GetFenceReason() == "leader_offline" })
	assert.EqualValues(t, 1, p.GetLeaderId())
	// A clean stop needs no timeout.
	stopOne()
	stream, err := c.BrokerSession(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(&metadatav1.BrokerSessionRequest{BrokerId: 1, BrokerEpoch: one.GetBrokerEpoch(), Heartbeat: 1, Stopping: true}))
	_, err = stream.Recv()
	require.NoError(t, err)
	info, err := c.GetCluster(ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	assert.False(t, info.GetBrokers()[0].GetOnline())
	stream, err = c.BrokerSession(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(&metadatav1.BrokerSessionRequest{BrokerId: 1, BrokerEpoch: one.GetBrokerEpoch(), Heartbeat: 1}))
	_, err = stream.Recv()
	requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH)
}

func TestRemoteLogManagerSessionExpires(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Change: func(c *metadata.Config) {
		c.SessionTimeout = config.Duration(500 * time.Millisecond)
	}})
	c := of(cluster.Controller())
	rlm := registerRLM(t, ctx, c, 1)
	require.Eventually(t, func() bool {
		info, err := c.GetCluster(ctx, &metadatav1.GetClusterRequest{})
		return err == nil && !info.GetRemoteLogManagers()[0].GetOpen()
	}, 30*time.Second, 10*time.Millisecond)
	stream, err := c.RemoteLogManagerSession(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(&metadatav1.RemoteLogManagerSessionRequest{RlmId: 1, RlmEpoch: rlm.GetRlmEpoch(), Heartbeat: 1}))
	_, err = stream.Recv()
	requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_RLM_EPOCH_CLOSED)
	closed, err := c.CloseRemoteLogManager(ctx, &metadatav1.CloseRemoteLogManagerRequest{RlmId: 1, RlmEpoch: rlm.GetRlmEpoch()})
	require.NoError(t, err)
	assert.Positive(t, closed.GetMetadataOffset())
}
