package api

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

func request(t *testing.T, n int64) *brokerv1.ProduceRequest {
	return &brokerv1.ProduceRequest{Request: n, Topic: "orders", Batches: batch(t, record.CodecNone, 1, 10)}
}

func TestAPipelineKeepsOrderAndDoesNotWaitForEachAck(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		stream, err := w.client(1).Produce(t.Context())
		require.NoError(t, err)
		for n := int64(1); n <= 20; n++ {
			req := request(t, n)
			req.Level = logv1.Level_LEVEL_OBJECT
			if n > 1 {
				req.Topic = "" // may be left out afterwards
			}
			require.NoError(t, stream.Send(req))
		}
		synctest.Wait()
		require.Equal(t, 20, p.attempted, "all are under way although none is acked")
		p.commit(20)
		for n := int64(1); n <= 20; n++ {
			m, err := stream.Recv()
			require.NoError(t, err)
			require.Equal(t, n, m.GetRequest())
			require.Equal(t, n-1, m.GetResult().GetBaseOffset())
			require.Contains(t, m.GetResult().GetLevels(), logv1.Level_LEVEL_OBJECT)
		}
		require.NoError(t, stream.CloseSend())
		_, err = stream.Recv()
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestTheFirstRefusalEndsThePipeline(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		count := 0
		p.refuse = func(replica.AppendInput) error {
			if count++; count == 3 {
				return &replica.SequenceGapError{LastSequence: 4, LastOffset: 1, EpochStart: 0}
			}
			return nil
		}
		stream, err := w.client(1).Produce(t.Context())
		require.NoError(t, err)
		for n := int64(1); n <= 6; n++ {
			req := request(t, n)
			req.Level = logv1.Level_LEVEL_OBJECT
			require.NoError(t, stream.Send(req))
		}
		synctest.Wait()
		p.commit(2)
		for n := int64(1); n <= 2; n++ {
			m, err := stream.Recv()
			require.NoError(t, err, "what came before the refused one is answered")
			require.Equal(t, n, m.GetRequest())
		}
		_, err = stream.Recv()
		e := refusal(t, err, "SEQUENCE_GAP")
		require.Equal(t, "3", e.Metadata["request"])
		require.Equal(t, "4", e.Metadata["last_sequence"])
		require.EqualValues(t, 2, p.end, "nothing behind the refused one was stored")
	})
}

func TestAMalformedRequestEndsThePipelineBehindTheAnswersBeforeIt(t *testing.T) {
	cases := map[string]struct {
		change func(*brokerv1.ProduceRequest)
		reason string
		field  string
	}{
		"gap in the numbers": {func(r *brokerv1.ProduceRequest) { r.Request = 9 }, "INVALID_FIELD", "request"},
		"another topic":      {func(r *brokerv1.ProduceRequest) { r.Topic = "other" }, "INVALID_FIELD", "topic"},
		"another partition":  {func(r *brokerv1.ProduceRequest) { r.Partition = 1 }, "INVALID_FIELD", "partition"},
		"no batches":         {func(r *brokerv1.ProduceRequest) { r.Batches = nil }, "INVALID_FIELD", "batches"},
		"no level":           {func(r *brokerv1.ProduceRequest) { r.Level = 44 }, "INVALID_FIELD", "level"},
		"wrong CRC":          {func(r *brokerv1.ProduceRequest) { r.Batches[80] ^= 1 }, "CORRUPT_BATCH", "batches[0]"},
	}
	for name, c := range cases {
		run(t, 1, 1, nil, func(t *testing.T, w *world) {
			stream, err := w.client(1).Produce(t.Context())
			require.NoError(t, err)
			require.NoError(t, stream.Send(request(t, 1)))
			bad := request(t, 2)
			c.change(bad)
			require.NoError(t, stream.Send(bad))
			_ = stream.Send(request(t, 3)) // may meet the end of the stream
			_, err = stream.Recv()
			require.NoError(t, err, name)
			_, err = stream.Recv()
			refused(t, err, c.reason)
			require.Equal(t, c.field, violated(t, err).Field, name)
			require.Equal(t, 1, w.brokers[1].orders.attempted, name)
		})
	}
}

func TestAFirstRequestIsChecked(t *testing.T) {
	cases := map[string]*brokerv1.ProduceRequest{
		"request": {Request: 2, Topic: "orders", Batches: []byte("x")},
		"topic":   {Request: 1, Batches: []byte("x")},
		"batches": {Request: 1, Topic: "orders"},
	}
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		for field, req := range cases {
			stream, err := w.client(1).Produce(t.Context())
			require.NoError(t, err)
			require.NoError(t, stream.Send(req))
			_, err = stream.Recv()
			refused(t, err, "INVALID_FIELD")
			require.Equal(t, field, violated(t, err).Field)
		}
		stream, err := w.client(1).Produce(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(&brokerv1.ProduceRequest{Request: 1, Topic: "none", Batches: []byte("x")}))
		_, err = stream.Recv()
		refused(t, err, "UNKNOWN_TOPIC_OR_PARTITION")
		stream, err = w.client(1).Produce(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.CloseSend())
		_, err = stream.Recv()
		require.ErrorIs(t, err, io.EOF, "a stream without requests ends well")
	})
}

func TestAPipelineLosesItsLeadershipInTheMiddle(t *testing.T) {
	run(t, 2, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		stream, err := w.client(1).Produce(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(request(t, 1)))
		_, err = stream.Recv()
		require.NoError(t, err)
		p.set(func() { p.leader = 2 })
		require.NoError(t, stream.Send(request(t, 2)))
		_, err = stream.Recv()
		e := refusal(t, err, "NOT_LEADER")
		require.Equal(t, "2", e.Metadata["request"])
		require.Equal(t, brokerAddress(2), e.Metadata["leader_address"])
		require.Zero(t, w.brokers[2].orders.attempted, "a pipeline is never forwarded in the middle")
	})
}

func TestAPipelineIsReadNoFurtherThanItMayBeInFlight(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.ProduceInFlight = 4 }, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		stream, err := w.client(1).Produce(t.Context())
		require.NoError(t, err)
		for n := int64(1); n <= 30; n++ {
			req := request(t, n)
			req.Level = logv1.Level_LEVEL_OBJECT
			require.NoError(t, stream.Send(req))
		}
		synctest.Wait()
		require.LessOrEqual(t, p.attempted, 4+4+4, "one in each hand, and both queues")
		p.set(func() { p.hw, p.objects = p.end, true })
		for n := int64(1); n <= 30; n++ {
			_, err := stream.Recv()
			require.NoError(t, err)
		}
		require.NoError(t, stream.CloseSend())
		_, err = stream.Recv()
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestAnUnknownOutcomeEndsThePipelineWithItsOffsets(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.AppendMaxWait = 5e9 }, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		stream, err := w.client(1).Produce(t.Context())
		require.NoError(t, err)
		start := time.Now()
		for n := int64(1); n <= 3; n++ {
			req := request(t, n)
			req.Level = logv1.Level_LEVEL_OBJECT
			require.NoError(t, stream.Send(req))
		}
		_, err = stream.Recv()
		e := refusal(t, err, "OUTCOME_UNKNOWN")
		require.Equal(t, "1", e.Metadata["request"])
		require.Equal(t, "0", e.Metadata["base_offset"])
		require.Equal(t, "LEADER", e.Metadata["levels"])
		require.Equal(t, 5*time.Second, time.Since(start).Round(time.Second))
		synctest.Wait()
		require.True(t, w.brokers[1].service.buffered.TryAcquire(256<<20), "nothing stays accounted for")
	})
}

func TestAClientThatGoesAwayLeavesNothingBehind(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := w.client(1).Produce(ctx)
		require.NoError(t, err)
		for n := int64(1); n <= 10; n++ {
			req := request(t, n)
			req.Level = logv1.Level_LEVEL_OBJECT
			require.NoError(t, stream.Send(req))
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		require.True(t, w.brokers[1].service.buffered.TryAcquire(256<<20))
	})
}

func TestProduceStreamsAreBounded(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.ProduceMaxStreams = 1 }, func(t *testing.T, w *world) {
		client := w.client(1)
		open := func() (m *brokerv1.ProduceResponse, err error) {
			stream, err := client.Produce(t.Context())
			require.NoError(t, err)
			require.NoError(t, stream.Send(request(t, 1)))
			return stream.Recv()
		}
		_, err := open()
		require.NoError(t, err)
		_, err = open()
		refused(t, err, "LIMIT_EXCEEDED")
	})
}
