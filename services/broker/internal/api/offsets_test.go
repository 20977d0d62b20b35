package api

import (
	"errors"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

func TestListOffsetsFindsEachKind(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		w.brokers[1].submit(t, batch(t, record.CodecNone, 10, 1))
		p.set(func() { p.objects, p.start = false, 2 })
		w.brokers[1].submit(t, batch(t, record.CodecNone, 3, 1))
		client := w.client(1)
		cases := map[brokerv1.OffsetSpec]int64{1: 2, 2: 10, 3: 13, 4: 9}
		for spec, want := range cases {
			resp, err := client.ListOffsets(t.Context(), &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: &brokerv1.ListOffsetsRequest_At{At: spec}, Confirm: true})
			require.NoError(t, err)
			require.Equal(t, want, resp.GetOffset(), spec)
			require.EqualValues(t, 2, resp.GetLogStartOffset())
			require.EqualValues(t, 10, resp.GetHighWatermark())
			require.EqualValues(t, 13, resp.GetLogEndOffset())
			require.EqualValues(t, 4, resp.GetLeadership().GetLeaderEpoch())
			require.Equal(t, spec == brokerv1.OffsetSpec_OFFSET_SPEC_MAX_TIMESTAMP, resp.TimestampMs != nil, spec)
		}
		at := func(ms int64) *brokerv1.ListOffsetsResponse {
			resp, err := client.ListOffsets(t.Context(), &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: &brokerv1.ListOffsetsRequest_Time{Time: timestamppb.New(time.UnixMilli(ms))}})
			require.NoError(t, err)
			return resp
		}
		require.EqualValues(t, 5, at(1005).GetOffset())
		require.EqualValues(t, 1005, at(1005).GetTimestampMs())
		require.EqualValues(t, 10, at(9999).GetOffset(), "the end when there is none")
		require.Nil(t, at(9999).TimestampMs)
	})
}

func TestListOffsetsRefusals(t *testing.T) {
	latest := &brokerv1.ListOffsetsRequest_At{At: brokerv1.OffsetSpec_OFFSET_SPEC_LATEST}
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		for field, req := range map[string]*brokerv1.ListOffsetsRequest{
			"topic": {Spec: latest},
			"at":    {Topic: "orders"},
			"time":  {Topic: "orders", Spec: &brokerv1.ListOffsetsRequest_Time{Time: &timestamppb.Timestamp{Nanos: -1}}},
		} {
			_, err := client.ListOffsets(t.Context(), req)
			refused(t, err, "INVALID_FIELD")
			require.Equal(t, field, violated(t, err).Field)
		}
		for _, spec := range []brokerv1.OffsetSpec{0, 17} {
			_, err := client.ListOffsets(t.Context(), &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: &brokerv1.ListOffsetsRequest_At{At: spec}})
			refused(t, err, "INVALID_FIELD")
		}
		_, err := client.ListOffsets(t.Context(), &brokerv1.ListOffsetsRequest{Topic: "x", Spec: latest})
		refused(t, err, "UNKNOWN_TOPIC_OR_PARTITION")

		w.brokers[1].orders.confirm = &replica.UnavailableError{Reason: replica.MetadataUnreachable, Message: "nobody confirms"}
		_, err = client.ListOffsets(t.Context(), &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: latest, Confirm: true})
		refused(t, err, "METADATA_UNREACHABLE")
		_, err = client.ListOffsets(t.Context(), &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: latest})
		require.NoError(t, err, "unless it shall be confirmed")
	})
}

func TestALeaderThatHasNotOpenedKnowsNoEnd(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		s := w.brokers[1].service
		err := s.leads(replica.Offsets{LeaderID: 1})
		refused(t, rpcError(target{"orders", 0}, nil, err), "RECOVERING")
		err = s.leads(replica.Offsets{})
		refused(t, rpcError(target{"orders", 0}, nil, err), "NOT_LEADER")
		require.NoError(t, s.leads(replica.Offsets{Leading: true}))
	})
}

func TestAwaitDurabilityWaitsAsLongAsItMay(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		w.brokers[1].seed(t, 3)
		client := w.client(1)
		req := &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 3, Leadership: leadershipToProto(leads), Level: logv1.Level_LEVEL_OBJECT}
		time.AfterFunc(7*time.Second, func() { p.commit(3) })
		resp, err := client.AwaitDurability(t.Context(), req)
		require.NoError(t, err)
		require.Equal(t, []logv1.Level{logv1.Level_LEVEL_LEADER, logv1.Level_LEVEL_OBJECT}, resp.GetLevels())

		w.brokers[1].seed(t, 1)
		req.EndOffset = 4
		start := time.Now()
		_, err = w.brokers[1].service.AwaitDurability(t.Context(), req) // the client gives 30 s to a call without a deadline
		e := refusal(t, err, "NOT_READY")
		require.Equal(t, rpcerr.Retry, rpcerr.React(e))
		require.Equal(t, time.Minute, time.Since(start))

		// A drain tells it at once.
		start = time.Now()
		done := make(chan error, 1)
		go func() { _, err := client.AwaitDurability(t.Context(), req); done <- err }()
		synctest.Wait()
		w.brokers[1].server.EndStreams()
		refused(t, <-done, "DRAINING")
		require.Zero(t, time.Since(start))
	})
}

func TestAwaitDurabilityTellsWhatBecameOfRecords(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		req := &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 30, Leadership: leadershipToProto(leads), Level: logv1.Level_LEVEL_OBJECT}
		for _, c := range []struct {
			err    error
			reason string
			facts  map[string]string
		}{
			{&replica.TruncatedError{ForkPoint: 17}, "LOG_TRUNCATED", map[string]string{"fork_point": "17"}},
			{&replica.ExpiredError{Offset: 30, LogStart: 40}, "EXPIRED", map[string]string{"log_start": "40"}},
			{&replica.OffsetOutOfRangeError{Offset: 30, LogStart: 1, HighWatermark: 2, LogEnd: 3}, "OFFSET_OUT_OF_RANGE", map[string]string{"log_start": "1", "high_watermark": "2", "log_end": "3"}},
			{&replica.UnavailableError{Reason: replica.NotReady, Message: "recovering"}, "NOT_READY", nil},
		} {
			w.brokers[1].orders.awaitErr = c.err
			_, err := client.AwaitDurability(t.Context(), req)
			e := refusal(t, err, c.reason)
			for k, v := range c.facts {
				require.Equal(t, v, e.Metadata[k])
			}
		}
		for field, bad := range map[string]*brokerv1.AwaitDurabilityRequest{
			"topic":                   {EndOffset: 1, Leadership: leadershipToProto(leads), Level: 3},
			"end_offset":              {Topic: "orders", Leadership: leadershipToProto(leads), Level: 3},
			"leadership":              {Topic: "orders", EndOffset: 1, Level: 3},
			"leadership.leader_epoch": {Topic: "orders", EndOffset: 1, Leadership: &logv1.Leadership{Incarnation: 1, LeaderEpoch: -1}, Level: 3},
			"level":                   {Topic: "orders", EndOffset: 1, Leadership: leadershipToProto(leads)},
		} {
			_, err := client.AwaitDurability(t.Context(), bad)
			refused(t, err, "INVALID_FIELD")
			require.Equal(t, field, violated(t, err).Field)
		}
	})
}

func TestWaitersAreBounded(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.AwaitMaxWaiters = 1 }, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		w.brokers[1].seed(t, 1)
		client := w.client(1)
		req := &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 1, Leadership: leadershipToProto(leads), Level: logv1.Level_LEVEL_OBJECT}
		done := make(chan error, 1)
		go func() { _, err := client.AwaitDurability(t.Context(), req); done <- err }()
		synctest.Wait()
		_, err := client.AwaitDurability(t.Context(), req)
		e := refusal(t, err, "LIMIT_EXCEEDED")
		require.Positive(t, e.RetryDelay)
		p.commit(1)
		require.NoError(t, <-done)
	})
}

func TestExplainSaysWhatIsKnownWithoutALeader(t *testing.T) {
	run(t, 2, 0, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		x, err := client.ExplainPartition(t.Context(), &brokerv1.ExplainPartitionRequest{Topic: "orders"})
		require.NoError(t, err)
		require.NotEmpty(t, x.GetFindings())
		require.Equal(t, brokerv1.ReplicaState_REPLICA_STATE_ACTIVE, x.GetState())

		w.brokers[1].replicas.lookup = &replica.NotLeaderError{}
		x, err = client.ExplainPartition(t.Context(), &brokerv1.ExplainPartitionRequest{Topic: "orders"})
		require.NoError(t, err)
		require.Equal(t, "NO_LEADER", x.GetFindings()[0].GetCode())
		require.Equal(t, topicID, x.GetTopicId())
		require.Equal(t, "[1 2 3]", x.GetFindings()[0].GetEvidence()["replicas"])

		w.brokers[1].replicas.lookup = &replica.UnknownPartitionError{Topic: "orders", Partition: 0}
		_, err = client.ExplainPartition(t.Context(), &brokerv1.ExplainPartitionRequest{Topic: "orders"})
		refused(t, err, "UNKNOWN_TOPIC_OR_PARTITION")
		_, err = client.ExplainPartition(t.Context(), &brokerv1.ExplainPartitionRequest{})
		refused(t, err, "INVALID_FIELD")
	})
}

func TestProducerIDsComeFromBlocksAndAreNeverGivenTwice(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.ProducerIDBlock = 50 }, func(t *testing.T, w *world) {
		client := w.client(1)
		var mu sync.Mutex
		seen := map[int64]bool{}
		var wg sync.WaitGroup
		for range 120 {
			wg.Go(func() {
				resp, err := client.InitProducer(t.Context(), &brokerv1.InitProducerRequest{})
				mu.Lock()
				defer mu.Unlock()
				if err != nil || resp.GetProducerEpoch() != 0 || tagOf(resp.GetProducerId()) != incarnation {
					t.Errorf("%v, %v", resp, err)
				}
				if seen[resp.GetProducerId()] {
					t.Errorf("%d was given twice", resp.GetProducerId())
				}
				seen[resp.GetProducerId()] = true
			})
		}
		wg.Wait()
		require.Len(t, seen, 120)
		require.Equal(t, 3, w.brokers[1].ids.calls)
	})
}

func TestProducerEpochs(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		id := int64(incarnation)<<32 | 5
		resp, err := client.InitProducer(t.Context(), &brokerv1.InitProducerRequest{ProducerId: id, ProducerEpoch: 3})
		require.NoError(t, err)
		require.Equal(t, id, resp.GetProducerId())
		require.EqualValues(t, 4, resp.GetProducerEpoch())
		require.Zero(t, w.brokers[1].ids.calls)

		resp, err = client.InitProducer(t.Context(), &brokerv1.InitProducerRequest{ProducerId: id, ProducerEpoch: math.MaxInt16})
		require.NoError(t, err)
		require.NotEqual(t, id, resp.GetProducerId(), "its epochs are used up")
		require.Zero(t, resp.GetProducerEpoch())

		_, err = client.InitProducer(t.Context(), &brokerv1.InitProducerRequest{ProducerId: int64(incarnation+1)<<32 | 5})
		e := refusal(t, err, "PRODUCER_FENCED")
		require.Equal(t, codes.FailedPrecondition, e.Code)
		require.Contains(t, e.Message, "InitProducer for a new id")

		for field, req := range map[string]*brokerv1.InitProducerRequest{
			"producer_id":    {ProducerId: -1},
			"producer_epoch": {ProducerEpoch: 2},
		} {
			_, err = client.InitProducer(t.Context(), req)
			refused(t, err, "INVALID_FIELD")
			require.Equal(t, field, violated(t, err).Field)
		}
	})
}

func TestProducerIDsWithoutMetadata(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		b := w.brokers[1]
		client := w.client(1)
		b.ids.err = errors.New("connection refused")
		_, err := client.InitProducer(t.Context(), &brokerv1.InitProducerRequest{})
		refused(t, err, "METADATA_UNREACHABLE")
		b.ids.err = rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH, "broker", "stale")
		_, err = client.InitProducer(t.Context(), &brokerv1.InitProducerRequest{})
		refused(t, err, "NOT_READY")
		b.ids.err = nil
		b.replicas.unknown = true
		_, err = client.InitProducer(t.Context(), &brokerv1.InitProducerRequest{})
		refused(t, err, "NOT_READY")
	})
}
