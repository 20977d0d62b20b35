package integration_test

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/test/cluster"
)

const t0 = int64(1_700_000_000_000) // ms

// One cluster for everything about the life of a record without failures.
func TestARecordIsAppendedAckedCommittedReadAndExplained(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2, RLMs: 2, Zones: 2})
	topic := c.CreateTopic("quakes", 2)
	leader, epoch := c.Leader("quakes", 0)
	other := c.Broker(3 - leader.ID())
	log := c.Log(leader)

	t.Run("an append through a broker that does not lead is forwarded", func(t *testing.T) {
		resp, err := c.Log(other).Append(bounded(t, 20*time.Second), &brokerv1.AppendRequest{
			Topic: "quakes", Partition: 0, Level: levelLeader,
			Records: []*brokerv1.Record{
				{Key: []byte("ak"), Value: []byte("v0"), TimestampMs: t0, Headers: []*brokerv1.Header{{Key: "h", Value: []byte("x")}, {Key: "h"}}},
				{Value: []byte{}, TimestampMs: t0 + 10},
				{Key: []byte{}, TimestampMs: t0 + 20},
			},
		})
		require.NoError(t, err)
		assert.Equal(t, topic.GetTopicId(), resp.GetTopicId())
		assert.EqualValues(t, 0, resp.GetBaseOffset())
		assert.EqualValues(t, 3, resp.GetEndOffset())
		assert.Equal(t, epoch, resp.GetLeadership().GetLeaderEpoch())
		assert.Contains(t, resp.GetLevels(), levelLeader)
		assert.False(t, resp.GetDuplicate())
		assert.WithinDuration(t, time.Now(), resp.GetAppendTime().AsTime(), time.Minute)

		awaited, err := log.AwaitDurability(bounded(t, 20*time.Second), &brokerv1.AwaitDurabilityRequest{
			Topic: "quakes", EndOffset: 3, Leadership: resp.GetLeadership(), Level: levelObject,
		})
		require.NoError(t, err)
		assert.ElementsMatch(t, []logv1.Level{levelLeader, levelObject}, awaited.GetLevels())
	})

	t.Run("batches of every codec are stored as they came", func(t *testing.T) {
		var all []byte
		for i, codec := range []record.Codec{record.CodecNone, record.CodecGzip, record.CodecSnappy, record.CodecLZ4, record.CodecZstd} {
			b := record.NewBuilder(codec)
			require.NoError(t, b.Append(record.Record{Timestamp: t0 + 100 + int64(i), Key: []byte("c"), Value: fmt.Appendf(nil, "codec-%d", i)}))
			require.NoError(t, b.Append(record.Record{Timestamp: t0 + 50, Key: []byte("c"), Value: []byte("late")}))
			var err error
			all, _, err = b.Build(all)
			require.NoError(t, err)
		}
		resp := mustAppend(t, c, leader, "quakes", 0, levelObject, all)
		assert.EqualValues(t, 3, resp.GetBaseOffset())
		assert.EqualValues(t, 13, resp.GetEndOffset())

		stored := readBatches(t, c, leader, "quakes", 0, 3)
		require.Len(t, stored, 5)
		i := 0
		require.NoError(t, record.Walk(all, func(sent record.Batch) error {
			got := stored[i]
			i++
			require.NoError(t, got.Validate())
			assert.Equal(t, sent.CRC(), got.CRC())
			assert.Equal(t, epoch, got.LeaderEpoch())
			got.SetBaseOffset(sent.BaseOffset())
			got.SetLeaderEpoch(sent.LeaderEpoch())
			assert.Equal(t, sent, got)
			return nil
		}))
	})

	t.Run("reads begin at an offset, at a time or at the start, in both formats, through any broker", func(t *testing.T) {
		for _, m := range []*cluster.Member{leader, other} {
			all := readAll(t, c, m, "quakes", 0, 0)
			require.Len(t, all, 13)
			dense(t, 0, all)
			mid, err := tryRead(c, m, &brokerv1.ReadRequest{Topic: "quakes", Start: &brokerv1.ReadRequest_Offset{Offset: 4}, MaxRecords: 2})
			require.NoError(t, err)
			assert.Equal(t, all[4:6], mid)
			// The first record at or after the time is the one with +20.
			timed, err := tryRead(c, m, &brokerv1.ReadRequest{Topic: "quakes", Start: &brokerv1.ReadRequest_Time{Time: timestamppb.New(time.UnixMilli(t0 + 11))}})
			require.NoError(t, err)
			assert.Equal(t, all[2:], timed)
			future, err := tryRead(c, m, &brokerv1.ReadRequest{Topic: "quakes", Start: &brokerv1.ReadRequest_Time{Time: timestamppb.New(time.UnixMilli(t0 + 1_000_000))}})
			require.NoError(t, err)
			assert.Empty(t, future)
			batches := readBatches(t, c, m, "quakes", 0, 4)
			assert.EqualValues(t, 3, batches[0].BaseOffset(), "the batch that holds the offset comes whole")
		}
		stream, err := log.Read(bounded(t, 20*time.Second), &brokerv1.ReadRequest{Topic: "quakes", MaxRecords: 3})
		require.NoError(t, err)
		first, err := stream.Recv()
		require.NoError(t, err)
		assert.EqualValues(t, 0, first.GetStart().GetOffset())
		assert.EqualValues(t, 13, first.GetStart().GetHighWatermark())
		second, err := stream.Recv()
		require.NoError(t, err)
		records := second.GetRecords().GetRecords()
		require.Len(t, records, 3)
		assert.Equal(t, "h", records[0].GetRecord().GetHeaders()[0].GetKey())
		assert.NotNil(t, records[0].GetRecord().GetHeaders()[0].Value)
		assert.Nil(t, records[0].GetRecord().GetHeaders()[1].Value, "absent and empty differ")
		assert.Nil(t, records[1].GetRecord().Key)
		assert.NotNil(t, records[1].GetRecord().Value)
		assert.NotNil(t, records[2].GetRecord().Key)
		assert.Nil(t, records[2].GetRecord().Value)
		assert.Equal(t, t0+20, records[2].GetRecord().GetTimestampMs())
	})

	t.Run("a follower of the end gets what comes, and not before it is committed", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		stream, err := c.Log(other).Read(ctx, &brokerv1.ReadRequest{Topic: "quakes", Start: &brokerv1.ReadRequest_Offset{Offset: 13}, Follow: true})
		require.NoError(t, err)
		first, err := stream.Recv()
		require.NoError(t, err)
		require.NotNil(t, first.GetStart())
		require.NoError(t, c.Bucket.SetRules(gcsemu.Rule{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: gcsemu.Duration(300 * time.Millisecond)}}))
		began := time.Now()
		resp := mustAppend(t, c, leader, "quakes", 0, levelLeader, plain(t, "followed"))
		for {
			m, err := stream.Recv()
			require.NoError(t, err)
			if r := m.GetRecords().GetRecords(); len(r) > 0 {
				assert.Equal(t, resp.GetBaseOffset(), r[0].GetOffset())
				break
			}
		}
		assert.Greater(t, time.Since(began), 300*time.Millisecond, "seen before its object could be stored")
		c.Faults()
	})

	t.Run("every kind of offset is found", func(t *testing.T) {
		ask := func(req *brokerv1.ListOffsetsRequest) *brokerv1.ListOffsetsResponse {
			t.Helper()
			req.Topic, req.Confirm = "quakes", true
			resp, err := c.Log(other).ListOffsets(bounded(t, 20*time.Second), req)
			require.NoError(t, err)
			assert.EqualValues(t, 0, resp.GetLogStartOffset())
			assert.EqualValues(t, 14, resp.GetHighWatermark())
			assert.EqualValues(t, 14, resp.GetLogEndOffset())
			assert.Equal(t, epoch, resp.GetLeadership().GetLeaderEpoch())
			return resp
		}
		at := func(s brokerv1.OffsetSpec) *brokerv1.ListOffsetsResponse {
			t.Helper()
			return ask(&brokerv1.ListOffsetsRequest{Spec: &brokerv1.ListOffsetsRequest_At{At: s}})
		}
		assert.EqualValues(t, 0, at(brokerv1.OffsetSpec_OFFSET_SPEC_EARLIEST).GetOffset())
		assert.EqualValues(t, 14, at(brokerv1.OffsetSpec_OFFSET_SPEC_LATEST).GetOffset())
		assert.EqualValues(t, 14, at(brokerv1.OffsetSpec_OFFSET_SPEC_LOG_END).GetOffset())
		largest := at(brokerv1.OffsetSpec_OFFSET_SPEC_MAX_TIMESTAMP)
		assert.EqualValues(t, 11, largest.GetOffset())
		assert.Equal(t, t0+104, largest.GetTimestampMs())
		byTime := func(ms int64) *brokerv1.ListOffsetsResponse {
			t.Helper()
			return ask(&brokerv1.ListOffsetsRequest{Spec: &brokerv1.ListOffsetsRequest_Time{Time: timestamppb.New(time.UnixMilli(ms))}})
		}
		assert.EqualValues(t, 2, byTime(t0+11).GetOffset())
		assert.Equal(t, t0+20, byTime(t0+11).GetTimestampMs())
		assert.EqualValues(t, 14, byTime(t0+1_000_000).GetOffset())
		assert.Nil(t, byTime(t0+1_000_000).TimestampMs)
	})

	t.Run("its events and segments agree", func(t *testing.T) {
		segments := c.Segments("quakes", 0)
		require.NotEmpty(t, segments)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		w, err := c.Admin().Segments().WatchSegments(ctx)
		require.NoError(t, err)
		require.NoError(t, w.Send(&metadatav1.WatchSegmentsRequest{Add: []*metadatav1.WatchSegmentsPartition{{Topic: "quakes", Partition: 0}}}))
		reset, err := w.Recv()
		require.NoError(t, err)
		require.NotNil(t, reset.GetReset_(), "%v", reset)
		assert.EqualValues(t, 14, reset.GetReset_().GetObjectEndOffset())
		assert.True(t, reset.GetReset_().GetOpened())
		assert.EqualValues(t, leader.ID(), reset.GetReset_().GetLeaderId())
		require.Len(t, reset.GetReset_().GetRanges(), len(segments))
		next := int64(0)
		for i, s := range segments {
			assert.Equal(t, next, s.GetBaseOffset())
			next = s.GetEndOffset()
			assert.Equal(t, s.GetObjectName(), reset.GetReset_().GetRanges()[i].GetObjectName())
		}
		assert.EqualValues(t, 14, next)
		resp := mustAppend(t, c, leader, "quakes", 0, levelObject, plain(t, "watched"))
		for {
			m, err := w.Recv()
			require.NoError(t, err)
			if e := m.GetEvents().GetEvents(); len(e) > 0 {
				r := e[0].GetRangeCommitted()
				require.NotNil(t, r)
				assert.Equal(t, resp.GetBaseOffset(), r.GetBaseOffset())
				assert.Equal(t, resp.GetEndOffset(), r.GetEndOffset())
				assert.EqualValues(t, 1, c.Bucket.Requests(gcsemu.OpCreate, r.GetObjectName()))
				break
			}
		}
	})

	t.Run("its partition is explained as healthy, and elsewhere as led elsewhere", func(t *testing.T) {
		ex := explain(t, c, leader, "quakes", 0)
		assert.Equal(t, []string{"HEALTHY"}, codesOf(ex), "%v", ex)
		assert.Equal(t, brokerv1.ReplicaState_REPLICA_STATE_ACTIVE, ex.GetState())
		assert.EqualValues(t, 15, ex.GetObjectEndOffset())
		assert.EqualValues(t, 15, ex.GetHighWatermark())
		assert.EqualValues(t, 15, ex.GetLogEndOffset())
		assert.EqualValues(t, leader.ID(), ex.GetLeaderId())
		assert.EqualValues(t, 0, ex.GetUnuploadedBytes())
		assert.Equal(t, leader.ID(), int(ex.GetRlmId()), "the remote-log manager of its own zone")
	})
}

func readBatches(t *testing.T, c *cluster.Cluster, m *cluster.Member, topic string, partition int32, from int64) []record.Batch {
	t.Helper()
	stream, err := c.Log(m).Read(bounded(t, 20*time.Second), &brokerv1.ReadRequest{
		Topic: topic, Partition: partition, Start: &brokerv1.ReadRequest_Offset{Offset: from}, Format: brokerv1.ReadFormat_READ_FORMAT_BATCHES,
	})
	require.NoError(t, err)
	var out []record.Batch
	for {
		resp, err := stream.Recv()
		if err == io.EOF { //nolint:errorlint // gRPC returns it bare
			return out
		}
		require.NoError(t, err)
		require.NoError(t, record.Walk(resp.GetBatches().GetBatches(), func(b record.Batch) error {
			out = append(out, b)
			return nil
		}))
	}
}

func TestConcurrentLoadOnManyPartitionsSharesObjects(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	const partitions, each = 6, 30
	c.CreateTopic("shared", partitions)
	c.Faults(gcsemu.Rule{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: gcsemu.Duration(20 * time.Millisecond)}})
	leaders := make([]*cluster.Member, partitions)
	for p := range partitions {
		leaders[p], _ = c.Leader("shared", p)
		c.Conn(leaders[p])
	}
	var wg sync.WaitGroup
	for p := range partitions {
		wg.Go(func() {
			for i := range each {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				resp, err := c.Log(leaders[p]).Append(ctx, &brokerv1.AppendRequest{
					Topic: "shared", Partition: int32(p), Level: levelObject,
					Records: []*brokerv1.Record{{Value: fmt.Appendf(nil, "%d-%d", p, i)}},
				})
				cancel()
				if !assert.NoError(t, err) || !assert.EqualValues(t, i, resp.GetBaseOffset()) {
					return
				}
			}
		})
	}
	wg.Wait()
	c.Faults()
	objects := map[string]map[int]bool{}
	for p := range partitions {
		require.Equal(t, numbered(fmt.Sprint(p), each), values(readAll(t, c, leaders[p], "shared", int32(p), 0)))
		for _, s := range c.Segments("shared", p) {
			if objects[s.GetObjectName()] == nil {
				objects[s.GetObjectName()] = map[int]bool{}
			}
			objects[s.GetObjectName()][p] = true
		}
	}
	shared, most := 0, 0
	for _, in := range objects {
		if len(in) > 1 {
			shared++
		}
		most = max(most, len(in))
	}
	t.Logf("%d objects for %d records, %d of them with several partitions, at most %d", len(objects), partitions*each, shared, most)
	assert.Greater(t, shared, len(objects)/3)
	assert.GreaterOrEqual(t, most, 3)
}
