package integration_test

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/test/cluster"
)

// tampered flips a bit of a copy of a batch's last byte: the CRC is wrong then.
func tampered(b []byte) []byte {
	out := append([]byte(nil), b...)
	out[len(out)-1] ^= 1
	return out
}

func special(t *testing.T, set func(*record.Builder)) []byte {
	t.Helper()
	b := record.NewBuilder(record.CodecNone)
	b.SetProducer(1<<32|7, 0, 0)
	set(b)
	return build(t, b, "x")
}

func TestBadInputIsRefusedWithATypedErrorAndNothingIsStored(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("bad", 1, "max.batch.bytes", "4096")
	c.CreateTopic("strict", 1, "min.ack.level", "OBJECT")
	leader, _ := c.Leader("bad", 0)
	epoch := c.Elect("bad", 0, leader) // so that there is an older one
	strict, _ := c.Leader("strict", 0)
	other := c.Broker(3 - leader.ID())
	mustAppend(t, c, leader, "bad", 0, levelObject, plain(t, "a", "b", "c"))
	p := newProducer(t, c, leader)
	first := mustAppend(t, c, leader, "bad", 0, levelObject, p.batch(t, "p0", "p1"))
	incarnation := first.GetLeadership().GetIncarnation()
	const end = 5

	const (
		invalid  = codes.InvalidArgument
		failed   = codes.FailedPrecondition
		outRange = codes.OutOfRange
	)
	withProducer := func(id int64, epoch int16, sequence int32) []byte {
		b := record.NewBuilder(record.CodecNone)
		b.SetProducer(id, epoch, sequence)
		return build(t, b, "x")
	}
	appends := []struct {
		name   string
		at     *cluster.Member
		direct bool
		req    *brokerv1.AppendRequest
		code   codes.Code
		reason errorsv1.ErrorReason
		facts  map[string]string // metadata that the error must carry; "*" is anything
		field  string            // named by the first violation
		says   string            // somewhere in the message
	}{
		{
			name: "an unknown topic", req: &brokerv1.AppendRequest{Topic: "nosuch", Batches: plain(t, "x")},
			code: codes.NotFound, reason: errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION, says: "nosuch",
		},
		{
			name: "an unknown partition", req: &brokerv1.AppendRequest{Partition: 1, Batches: plain(t, "x")},
			code: codes.NotFound, reason: errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION, says: "bad/1",
		},
		{
			name: "a negative partition", req: &brokerv1.AppendRequest{Partition: -1, Batches: plain(t, "x")},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, field: "partition",
		},
		{
			name: "a broker that does not lead and may not forward", at: other, direct: true, req: &brokerv1.AppendRequest{Batches: plain(t, "x")},
			code: codes.Aborted, reason: errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER,
			facts: map[string]string{"leader_id": strconv.Itoa(leader.ID()), "leader_address": leader.Address(), "leader_epoch": strconv.Itoa(int(epoch))},
		},
		{
			name: "an older leader epoch than the current", req: &brokerv1.AppendRequest{Batches: plain(t, "x"), ExpectedLeaderEpoch: epoch - 1},
			code: failed, reason: errorsv1.ErrorReason_ERROR_REASON_FENCED_LEADER_EPOCH, facts: map[string]string{"leader_epoch": strconv.Itoa(int(epoch))},
		},
		{
			name: "a newer leader epoch than the current", req: &brokerv1.AppendRequest{Batches: plain(t, "x"), ExpectedLeaderEpoch: epoch + 1},
			code: codes.Unavailable, reason: errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_LEADER_EPOCH,
		},
		{
			name: "nothing to append", req: &brokerv1.AppendRequest{},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, field: "records",
		},
		{
			name: "records and batches at once", req: &brokerv1.AppendRequest{Batches: plain(t, "x"), Records: []*brokerv1.Record{{}}},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, field: "batches",
		},
		{
			name: "a batch with a wrong CRC", req: &brokerv1.AppendRequest{Batches: tampered(plain(t, "x"))},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_CORRUPT_BATCH, field: "batches[0]",
		},
		{
			name: "a wrong CRC in the second batch", req: &brokerv1.AppendRequest{Batches: append(plain(t, "x"), tampered(plain(t, "y"))...)},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_CORRUPT_BATCH, field: "batches[1]",
		},
		{
			name: "a torn batch", req: &brokerv1.AppendRequest{Batches: plain(t, "x", "y")[:70]},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_CORRUPT_BATCH,
		},
		{
			name: "an oversized batch", req: &brokerv1.AppendRequest{Batches: plain(t, strings.Repeat("x", 5000))},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, facts: map[string]string{"limit": "4096", "size": "*"}, field: "batches[0]",
		},
		{
			name: "an oversized record", req: &brokerv1.AppendRequest{Records: []*brokerv1.Record{{Value: make([]byte, 5000)}}},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, facts: map[string]string{"limit": "4096", "size": "*"}, field: "records[0]",
		},
		{
			name: "records that are too large together", req: &brokerv1.AppendRequest{Records: []*brokerv1.Record{{Value: make([]byte, 3000)}, {Value: make([]byte, 3000)}}},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, facts: map[string]string{"limit": "4096"}, says: "records[1]",
		},
		{
			name: "a transactional batch", req: &brokerv1.AppendRequest{Batches: special(t, func(b *record.Builder) { b.SetTransactional(true) })},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_UNSUPPORTED, facts: map[string]string{"feature": "*"}, field: "batches[0]",
		},
		{
			name: "a control batch", req: &brokerv1.AppendRequest{Batches: special(t, func(b *record.Builder) { b.SetControl(true) })},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_UNSUPPORTED, facts: map[string]string{"feature": "*"}, field: "batches[0]",
		},
		{
			name: "a sequence behind a gap", req: &brokerv1.AppendRequest{Batches: withProducer(p.id, p.epoch, 4)},
			code: failed, reason: errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP,
			facts: map[string]string{"last_sequence": "1", "last_offset": "4", "epoch_start": "0"},
		},
		{
			name: "records with a sequence behind a gap", req: &brokerv1.AppendRequest{
				Records: []*brokerv1.Record{{Value: []byte("x")}}, Producer: &brokerv1.Producer{ProducerId: p.id, BaseSequence: 7},
			},
			code: failed, reason: errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP, facts: map[string]string{"last_sequence": "1", "last_offset": "4"},
		},
		{
			name: "a producer id of another incarnation", req: &brokerv1.AppendRequest{Batches: withProducer(int64(incarnation^1)<<32|5, 0, 0)},
			code: failed, reason: errorsv1.ErrorReason_ERROR_REASON_PRODUCER_FENCED, facts: map[string]string{"last_sequence": "-1", "last_offset": "-1"},
		},
		{
			name: "a level that is none", req: &brokerv1.AppendRequest{Batches: plain(t, "x"), Level: 99},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, field: "level",
		},
		{
			name: "REPLICAS on a topic that can't reach it", req: &brokerv1.AppendRequest{Batches: plain(t, "x"), Level: logv1.Level_LEVEL_REPLICAS},
			code: failed, reason: errorsv1.ErrorReason_ERROR_REASON_LEVEL_UNREACHABLE, facts: map[string]string{"level": "REPLICAS", "levels": "LEADER,OBJECT"},
		},
		{
			name: "MIRRORED on a topic that can't reach it", req: &brokerv1.AppendRequest{Batches: plain(t, "x"), Level: logv1.Level_LEVEL_MIRRORED},
			code: failed, reason: errorsv1.ErrorReason_ERROR_REASON_LEVEL_UNREACHABLE, facts: map[string]string{"level": "MIRRORED"},
		},
		{
			name: "less than the topic's least level", at: strict, req: &brokerv1.AppendRequest{Topic: "strict", Batches: plain(t, "x"), Level: levelLeader},
			code: failed, reason: errorsv1.ErrorReason_ERROR_REASON_LEVEL_UNREACHABLE, facts: map[string]string{"level": "LEADER", "levels": "OBJECT"},
		},
	}
	for _, tc := range appends {
		t.Run("append: "+tc.name, func(t *testing.T) {
			at, ctx := tc.at, bounded(t, 20*time.Second)
			if at == nil {
				at = leader
			}
			if tc.direct {
				ctx = direct(ctx)
			}
			if tc.req.Topic == "" {
				tc.req.Topic = "bad"
			}
			_, err := c.Log(at).Append(ctx, tc.req)
			e := refused(t, err, tc.code, tc.reason)
			for k, v := range tc.facts {
				if v == "*" {
					assert.NotEmpty(t, e.Metadata[k], k)
				} else {
					assert.Equal(t, v, e.Metadata[k], "%s of %v", k, e.Metadata)
				}
			}
			if tc.field != "" && assert.NotEmpty(t, e.Violations) {
				assert.Equal(t, tc.field, e.Violations[0].Field)
				assert.NotEmpty(t, e.Violations[0].Description)
			}
			if tc.says != "" {
				assert.Contains(t, e.Message, tc.says)
			}
			o := offsets(t, c, leader, "bad", 0)
			assert.EqualValues(t, end, o.GetLogEndOffset(), "something was stored")
			assert.EqualValues(t, 0, offsets(t, c, strict, "strict", 0).GetLogEndOffset(), "something was stored")
		})
	}

	t.Run("append: a producer epoch that was left behind", func(t *testing.T) {
		next, err := c.Log(leader).InitProducer(bounded(t, 20*time.Second), &brokerv1.InitProducerRequest{ProducerId: p.id, ProducerEpoch: int32(p.epoch)})
		require.NoError(t, err)
		require.Equal(t, p.id, next.GetProducerId())
		resp := mustAppend(t, c, leader, "bad", 0, levelObject, withProducer(p.id, int16(next.GetProducerEpoch()), 0))
		require.EqualValues(t, end, resp.GetBaseOffset())
		_, err = appendBatches(t, c, leader, "bad", 0, levelObject, withProducer(p.id, p.epoch, 2))
		e := refused(t, err, failed, errorsv1.ErrorReason_ERROR_REASON_PRODUCER_FENCED)
		assert.Equal(t, "0", e.Metadata["last_sequence"])
		assert.Equal(t, strconv.Itoa(end), e.Metadata["last_offset"])
		assert.EqualValues(t, end+1, offsets(t, c, leader, "bad", 0).GetLogEndOffset())
	})

	reads := []struct {
		name   string
		req    *brokerv1.ReadRequest
		code   codes.Code
		reason errorsv1.ErrorReason
		facts  map[string]string
		field  string
	}{
		{
			name: "an unknown topic", req: &brokerv1.ReadRequest{Topic: "nosuch"},
			code: codes.NotFound, reason: errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION,
		},
		{
			name: "an offset above the end", req: &brokerv1.ReadRequest{Start: &brokerv1.ReadRequest_Offset{Offset: 100}},
			code: outRange, reason: errorsv1.ErrorReason_ERROR_REASON_OFFSET_OUT_OF_RANGE,
			facts: map[string]string{"log_start": "0", "high_watermark": strconv.Itoa(end + 1), "log_end": strconv.Itoa(end + 1)},
		},
		{
			name: "a negative offset", req: &brokerv1.ReadRequest{Start: &brokerv1.ReadRequest_Offset{Offset: -1}},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, field: "offset",
		},
		{
			name: "a format that is none", req: &brokerv1.ReadRequest{Format: 9},
			code: invalid, reason: errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, field: "format",
		},
		{
			name: "a position on a branch that is not the log's", req: &brokerv1.ReadRequest{
				Start: &brokerv1.ReadRequest_Offset{Offset: 3}, LastLeadership: &logv1.Leadership{Incarnation: incarnation ^ 1, LeaderEpoch: 1},
			},
			code: outRange, reason: errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED, facts: map[string]string{"fork_point": "*"},
		},
	}
	for _, tc := range reads {
		t.Run("read: "+tc.name, func(t *testing.T) {
			if tc.req.Topic == "" {
				tc.req.Topic = "bad"
			}
			for _, m := range []*cluster.Member{leader, other} {
				got, err := tryRead(c, m, tc.req)
				assert.Empty(t, got)
				e := refused(t, err, tc.code, tc.reason)
				for k, v := range tc.facts {
					if v == "*" {
						assert.NotEmpty(t, e.Metadata[k], k)
					} else {
						assert.Equal(t, v, e.Metadata[k], "%s of %v", k, e.Metadata)
					}
				}
				if tc.field != "" && assert.NotEmpty(t, e.Violations) {
					assert.Equal(t, tc.field, e.Violations[0].Field)
				}
			}
		})
	}

	t.Run("read: a leader that does not lead and may not forward", func(t *testing.T) {
		stream, err := c.Log(other).Read(direct(bounded(t, 20*time.Second)), &brokerv1.ReadRequest{Topic: "bad"})
		require.NoError(t, err)
		_, err = stream.Recv()
		e := refused(t, err, codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER)
		assert.Equal(t, leader.Address(), e.Metadata["leader_address"])
	})

	t.Run("await: a cut leadership, an end above the log, a level out of reach", func(t *testing.T) {
		ask := func(end int64, l *logv1.Leadership, level logv1.Level) error {
			_, err := c.Log(leader).AwaitDurability(bounded(t, 3*time.Second), &brokerv1.AwaitDurabilityRequest{Topic: "bad", EndOffset: end, Leadership: l, Level: level})
			return err
		}
		_ = refused(t, ask(3, &logv1.Leadership{Incarnation: incarnation ^ 1, LeaderEpoch: 1}, levelObject), outRange, errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED)
		_ = refused(t, ask(3, first.GetLeadership(), logv1.Level_LEVEL_REPLICAS), failed, errorsv1.ErrorReason_ERROR_REASON_LEVEL_UNREACHABLE)
		_ = refused(t, ask(3, nil, levelObject), invalid, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD)
		_ = refused(t, ask(0, first.GetLeadership(), levelObject), invalid, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD)
		assert.Error(t, ask(1000, first.GetLeadership(), levelObject), "nobody wrote up to there")
	})

	t.Run("produce: the first refusal ends the stream and nothing behind it is stored", func(t *testing.T) {
		stream, err := c.Log(leader).Produce(bounded(t, 20*time.Second))
		require.NoError(t, err)
		q := newProducer(t, c, leader)
		send := func(n int64, batches []byte) {
			err := stream.Send(&brokerv1.ProduceRequest{Request: n, Topic: "bad", Batches: batches, Level: levelObject})
			if !errors.Is(err, io.EOF) {
				require.NoError(t, err)
			}
		}
		send(1, q.batch(t, "q0"))
		send(2, tampered(q.batch(t, "q1")))
		send(3, q.batch(t, "q2"))
		resp, err := stream.Recv()
		require.NoError(t, err)
		assert.EqualValues(t, 1, resp.GetRequest())
		_, err = stream.Recv()
		_ = refused(t, err, invalid, errorsv1.ErrorReason_ERROR_REASON_CORRUPT_BATCH)
		o := offsets(t, c, leader, "bad", 0)
		assert.Equal(t, resp.GetResult().GetEndOffset(), o.GetLogEndOffset())
	})
}

func TestInvalidTopicsAreRefusedByFieldAndAllowedValues(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{RLMs: -1})
	create := func(name string, partitions, replicas int32, settings map[string]string) error {
		_, err := c.Admin().Topics().CreateTopic(bounded(t, 20*time.Second), &metadatav1.CreateTopicRequest{
			Name: name, PartitionCount: partitions, ReplicationFactor: replicas, Configs: settings,
		})
		return err
	}
	require.NoError(t, create("taken", 1, 1, nil))
	for _, tc := range []struct {
		name  string
		err   error
		field string
		says  []string
	}{
		{name: "no name", err: create("", 1, 1, nil), field: "name"},
		{name: "a dot", err: create("..", 1, 1, nil), field: "name"},
		{name: "a slash", err: create("a/b", 1, 1, nil), field: "name", says: []string{"a-z"}},
		{name: "too long a name", err: create(strings.Repeat("x", 250), 1, 1, nil), field: "name", says: []string{"249"}},
		{name: "no partitions", err: create("t", 0, 1, nil), field: "partition_count", says: []string{"10,000", "10000"}},
		{name: "too many partitions", err: create("t", 10_001, 1, nil), field: "partition_count"},
		{name: "more replicas than brokers", err: create("t", 1, 2, nil), field: "replication_factor"},
		{name: "an unknown setting", err: create("t", 1, 1, map[string]string{"no.such": "1"}), field: "configs", says: []string{"no.such"}},
		{name: "compaction", err: create("t", 1, 1, map[string]string{"cleanup.policy": "compact"}), field: "configs", says: []string{"delete"}},
		{name: "another commit rule", err: create("t", 1, 1, map[string]string{"commit.rule": "replicas"}), field: "configs", says: []string{"object"}},
		{name: "too small a batch limit", err: create("t", 1, 1, map[string]string{"max.batch.bytes": "10"}), field: "configs", says: []string{"1KiB to 8MiB"}},
		{name: "a level that is none", err: create("t", 1, 1, map[string]string{"min.ack.level": "ALL"}), field: "configs", says: []string{"LEADER"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.Error(t, tc.err)
			e := refusedAny(t, tc.err, codes.InvalidArgument)
			require.NotEmpty(t, e.Violations, "%v", e)
			assert.Contains(t, e.Violations[0].Field, tc.field)
			found := len(tc.says) == 0
			for _, s := range tc.says {
				found = found || strings.Contains(e.Message+e.Violations[0].Field+e.Violations[0].Description, s)
			}
			assert.True(t, found, "%v says none of %q", e, tc.says)
		})
	}
	t.Run("a name that is taken", func(t *testing.T) {
		e := refused(t, create("taken", 1, 1, nil), codes.AlreadyExists, errorsv1.ErrorReason_ERROR_REASON_TOPIC_EXISTS)
		assert.Equal(t, c.Topic("taken").GetTopicId(), e.Metadata["topic_id"])
	})
	t.Run("an election of nobody, and of a stale epoch", func(t *testing.T) {
		_, err := c.Admin().Cluster().ElectLeader(bounded(t, 20*time.Second), &metadatav1.ElectLeaderRequest{Topic: "taken", BrokerId: 77})
		require.Error(t, err)
		_, err = c.Admin().Cluster().ElectLeader(bounded(t, 20*time.Second), &metadatav1.ElectLeaderRequest{Topic: "taken", ExpectedLeaderEpoch: 99})
		require.Error(t, err)
	})
	t.Run("an opening with a fence that is not the partition's", func(t *testing.T) {
		c.WaitLed("taken")
		p := c.Topic("taken").GetPartitions()[0]
		fence := &logv1.Fence{Incarnation: p.GetFence().GetIncarnation(), LeaderEpoch: p.GetFence().GetLeaderEpoch() - 1, BrokerEpoch: p.GetFence().GetBrokerEpoch()}
		_, err := c.Admin().Cluster().OpenEpoch(bounded(t, 20*time.Second), &metadatav1.OpenEpochRequest{
			Partition: &logv1.TopicIdPartition{TopicId: c.Topic("taken").GetTopicId(), TopicCreationOffset: c.Topic("taken").GetCreationOffset()},
			Fence:     fence, ObjectEndChainHash: make([]byte, 16),
		})
		_ = refused(t, err, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_FENCED_LEADER_EPOCH)
	})
	list, err := c.Admin().ListTopics(bounded(t, 20*time.Second))
	require.NoError(t, err)
	require.Len(t, list, 1, "something was created")
}

func TestADataDirectoryInUseOrOfAnotherClusterIsRefusedAndLeftAlone(t *testing.T) {
	t.Parallel()
	foreign := cluster.Start(t, cluster.Options{RLMs: -1})
	foreign.CreateTopic("theirs", 1)
	leader, _ := foreign.Leader("theirs", 0)
	require.NoError(t, leader.Stop())

	dirs := map[int]string{}
	c := cluster.Start(t, cluster.Options{ChangeBroker: func(cfg *broker.Config) {
		if d, ok := dirs[cfg.ID]; ok {
			cfg.DataDir = d
		}
	}})
	c.CreateTopic("ours", 1)
	mustAppend(t, c, c.Broker(1), "ours", 0, levelLeader, plain(t, "a"))

	ends := func(id int, dir string) error {
		dirs[id] = dir
		m := c.AddDown(cluster.RoleBroker)
		require.Equal(t, id, m.ID())
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if err := m.TryStart(ctx); err != nil {
			return err
		}
		return m.Wait()
	}
	err := ends(2, c.Broker(1).Dir())
	require.ErrorContains(t, err, c.Broker(1).Dir())
	require.ErrorContains(t, err, "lock", "%v", err)

	err = ends(3, leader.Dir())
	require.ErrorContains(t, err, leader.Dir())
	require.ErrorContains(t, err, "cluster id", "%v", err)

	// Neither did any harm.
	mustAppend(t, c, c.Broker(1), "ours", 0, levelObject, plain(t, "b"))
	require.Equal(t, []string{"a", "b"}, values(readAll(t, c, c.Broker(1), "ours", 0, 0)))
	leader.Start()
	foreign.WaitLed("theirs")
}

func TestABrokerIDInUseIsRefused(t *testing.T) {
	t.Parallel()
	ids := map[int]int{2: 1}
	c := cluster.Start(t, cluster.Options{ChangeBroker: func(cfg *broker.Config) {
		if id, ok := ids[cfg.ID]; ok {
			cfg.ID = id
		}
	}})
	m := c.AddDown(cluster.RoleBroker)
	require.NoError(t, m.TryStart(t.Context()))
	err := m.Wait()
	e := refused(t, err, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_BROKER_ID_IN_USE)
	require.Equal(t, c.Broker(1).Address(), e.Metadata["address"])
	c.CreateTopic("ours", 1)
}
