package api

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

func TestAnyBrokerTakesAnyCall(t *testing.T) {
	run(t, 3, 2, nil, func(t *testing.T, w *world) {
		ctx := t.Context()
		client := w.client(1)
		resp, err := client.Append(ctx, &brokerv1.AppendRequest{Topic: "orders", Records: values(3), Level: logv1.Level_LEVEL_OBJECT})
		require.NoError(t, err)
		require.EqualValues(t, 3, resp.GetEndOffset())
		require.Empty(t, w.brokers[1].orders.batches)
		require.Len(t, w.brokers[2].orders.batches, 1)

		stream, err := client.Read(ctx, &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		all, err := drain(stream)
		require.ErrorIs(t, err, io.EOF)
		require.EqualValues(t, 2, all[0].GetStart().GetBrokerId(), "the leader answers")
		require.Equal(t, []int64{0, 1, 2}, offsets(all))

		list, err := client.ListOffsets(ctx, &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: &brokerv1.ListOffsetsRequest_At{At: brokerv1.OffsetSpec_OFFSET_SPEC_LATEST}})
		require.NoError(t, err)
		require.EqualValues(t, 3, list.GetOffset())

		w.brokers[1].orders.awaitErr = w.brokers[1].orders.notLeader()
		levels, err := client.AwaitDurability(ctx, &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 3, Leadership: resp.GetLeadership(), Level: logv1.Level_LEVEL_OBJECT})
		require.NoError(t, err)
		require.Contains(t, levels.GetLevels(), logv1.Level_LEVEL_OBJECT)

		explained, err := client.ExplainPartition(ctx, &brokerv1.ExplainPartitionRequest{Topic: "orders"})
		require.NoError(t, err)
		require.EqualValues(t, 2, explained.GetBrokerId())

		produce, err := client.Produce(ctx)
		require.NoError(t, err)
		for i := range int64(5) {
			require.NoError(t, produce.Send(&brokerv1.ProduceRequest{Request: i + 1, Topic: "orders", Batches: batch(t, record.CodecNone, 2, 10)}))
		}
		require.NoError(t, produce.CloseSend())
		for i := range int64(5) {
			m, err := produce.Recv()
			require.NoError(t, err)
			require.Equal(t, i+1, m.GetRequest())
			require.Equal(t, int64(3+2*i), m.GetResult().GetBaseOffset())
		}
		_, err = produce.Recv()
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestNoForwardIsAnsweredWithTheLeader(t *testing.T) {
	run(t, 3, 2, nil, func(t *testing.T, w *world) {
		ctx := noForward(t.Context())
		client := w.client(1)
		calls := map[string]func() error{
			"Append": func() error {
				_, err := client.Append(ctx, &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
				return err
			},
			"Produce": func() error {
				s, err := client.Produce(ctx)
				require.NoError(t, err)
				require.NoError(t, s.Send(&brokerv1.ProduceRequest{Request: 1, Topic: "orders", Batches: batch(t, record.CodecNone, 1, 1)}))
				_, err = s.Recv()
				return err
			},
			"Read": func() error {
				s, err := client.Read(ctx, &brokerv1.ReadRequest{Topic: "orders"})
				require.NoError(t, err)
				_, err = s.Recv()
				return err
			},
			"ListOffsets": func() error {
				_, err := client.ListOffsets(ctx, &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: &brokerv1.ListOffsetsRequest_At{At: 1}})
				return err
			},
			"AwaitDurability": func() error {
				w.brokers[1].orders.awaitErr = w.brokers[1].orders.notLeader()
				_, err := client.AwaitDurability(ctx, &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 3, Leadership: &logv1.Leadership{Incarnation: 1}, Level: 3})
				return err
			},
		}
		for name, call := range calls {
			e := refusal(t, call(), "NOT_LEADER")
			require.Equal(t, codes.Aborted, e.Code, name)
			require.Equal(t, "2", e.Metadata["leader_id"], name)
			require.Equal(t, brokerAddress(2), e.Metadata["leader_address"], name)
			require.NotEmpty(t, e.Metadata["leader_epoch"], name)
		}
		// What it knows itself it says.
		x, err := client.ExplainPartition(ctx, &brokerv1.ExplainPartitionRequest{Topic: "orders"})
		require.NoError(t, err)
		require.EqualValues(t, 1, x.GetBrokerId())
	})
}

// Broker 1 believes that 2 leads, 2 that 3 does, 3 that 1 does (design review F25).
func TestForwardingNeverLoops(t *testing.T) {
	run(t, 3, 2, nil, func(t *testing.T, w *world) {
		for id, b := range w.brokers {
			b.orders.leader = id%3 + 1
		}
		client := w.client(1)
		_, err := client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		e := refusal(t, err, "NOT_LEADER")
		require.Equal(t, "3", e.Metadata["leader_id"], "the answer is that of the broker it was forwarded to")
		_, err = client.ListOffsets(t.Context(), &brokerv1.ListOffsetsRequest{Topic: "orders", Spec: &brokerv1.ListOffsetsRequest_At{At: 1}})
		refused(t, err, "NOT_LEADER")
		read, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		_, err = read.Recv()
		refused(t, err, "NOT_LEADER")
		produce, err := client.Produce(t.Context())
		require.NoError(t, err)
		require.NoError(t, produce.Send(&brokerv1.ProduceRequest{Request: 1, Topic: "orders", Batches: batch(t, record.CodecNone, 1, 1)}))
		_, err = produce.Recv()
		refused(t, err, "NOT_LEADER")
		for id, want := range map[int32]int{1: 2, 2: 2, 3: 0} {
			require.Equal(t, want, w.brokers[id].orders.attempted, "appends tried at broker %d", id)
		}
	})
}

func TestABrokerDoesNotForwardToItself(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].replicas.lookup = &replica.NotLeaderError{LeaderID: 1, Address: brokerAddress(1), Epoch: 9}
		_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		refused(t, err, "NOT_LEADER")
	})
}

func TestWithoutALeaderNothingIsForwarded(t *testing.T) {
	run(t, 3, 0, nil, func(t *testing.T, w *world) {
		_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		e := refusal(t, err, "NOT_LEADER")
		require.NotContains(t, e.Metadata, "leader_address")
	})
}

func TestTheLeadersRefusalIsPassedOnWhole(t *testing.T) {
	run(t, 2, 2, nil, func(t *testing.T, w *world) {
		w.brokers[2].orders.refuse = func(replica.AppendInput) error {
			return &replica.BacklogFullError{Scope: "partition", Limit: 100, Unuploaded: 99}
		}
		_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		e := refusal(t, err, "BACKLOG_FULL")
		require.Equal(t, "99", e.Metadata["unuploaded"])
		require.Equal(t, time.Second, e.RetryDelay)
		require.NotEmpty(t, e.Quotas)

		_, err = w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Batches: []byte("x")})
		require.Equal(t, "batches[0]", violated(t, err).Field)
	})
}

func TestALeaderThatCanNotBeReachedStoredNothing(t *testing.T) {
	run(t, 2, 9, nil, func(t *testing.T, w *world) { // broker 9 does not exist
		_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		refused(t, err, "NOT_READY")
		require.Equal(t, rpcerr.Retry, rpcerr.React(err))
		require.False(t, rpcerr.Executed(err))

		x, err := w.client(1).ExplainPartition(t.Context(), &brokerv1.ExplainPartitionRequest{Topic: "orders"})
		require.NoError(t, err, "explain answers when nothing else does")
		require.EqualValues(t, 1, x.GetBrokerId())
		require.Equal(t, "LEADER_UNREACHABLE", x.GetFindings()[0].GetCode())
		require.True(t, x.GetFindings()[0].GetBlocking())
		require.Equal(t, brokerAddress(9), x.GetFindings()[0].GetEvidence()["leader_address"])
	})
}

// The leader takes the append and dies before it answers (field report B064).
func TestALostAnswerOfTheLeaderIsAnUnknownOutcome(t *testing.T) {
	run(t, 2, 2, nil, func(t *testing.T, w *world) {
		leader := w.brokers[2]
		leader.orders.objects = false
		done := make(chan error, 1)
		client := w.client(1)
		go func() {
			_, err := client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1), Level: logv1.Level_LEVEL_OBJECT})
			done <- err
		}()
		synctest.Wait()
		require.Equal(t, 1, leader.orders.attempted)
		stopped, cancel := context.WithCancel(t.Context())
		cancel()
		require.Error(t, leader.server.Stop(stopped), "the call is cut")
		err := <-done
		e := refusal(t, err, "OUTCOME_UNKNOWN")
		require.NotContains(t, e.Metadata, "base_offset", "nobody knows it")
		require.Equal(t, rpcerr.Settle, rpcerr.React(err))
	})
}

func TestForwardedCallsAreBounded(t *testing.T) {
	run(t, 2, 2, func(c *Config) { c.ForwardMaxCalls = 1 }, func(t *testing.T, w *world) {
		ctx, cancel := context.WithCancel(t.Context())
		client := w.client(1)
		follow, err := client.Read(ctx, &brokerv1.ReadRequest{Topic: "orders", Follow: true})
		require.NoError(t, err)
		_, err = follow.Recv()
		require.NoError(t, err)
		_, err = client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		require.Equal(t, codes.ResourceExhausted, refusal(t, err, "LIMIT_EXCEEDED").Code)
		cancel()
		_, err = follow.Recv()
		require.Equal(t, codes.Canceled, status.Code(err))
		synctest.Wait()
		_, err = client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		require.NoError(t, err, "the place was given back")
	})
}

func TestACancelledCallerCancelsTheForwardedCall(t *testing.T) {
	run(t, 2, 2, nil, func(t *testing.T, w *world) {
		w.brokers[2].orders.objects = false
		w.brokers[1].orders.awaitErr = w.brokers[1].orders.notLeader()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		client := w.client(1)
		go func() {
			_, err := client.AwaitDurability(ctx, &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 3, Leadership: leadershipToProto(leads), Level: logv1.Level_LEVEL_OBJECT})
			done <- err
		}()
		synctest.Wait()
		require.EqualValues(t, 1, w.brokers[2].service.waits.n.Load())
		cancel()
		require.Equal(t, codes.Canceled, status.Code(<-done))
		synctest.Wait()
		require.Zero(t, w.brokers[2].service.waits.n.Load())
	})
}

func TestForwardedStreamsEndWhenEitherBrokerDrains(t *testing.T) {
	for _, drained := range []int32{1, 2} {
		run(t, 2, 2, nil, func(t *testing.T, w *world) {
			client := w.client(1)
			follow, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Follow: true})
			require.NoError(t, err)
			_, err = follow.Recv()
			require.NoError(t, err)
			produce, err := client.Produce(t.Context())
			require.NoError(t, err)
			require.NoError(t, produce.Send(&brokerv1.ProduceRequest{Request: 1, Topic: "orders", Batches: batch(t, record.CodecNone, 1, 1)}))
			_, err = produce.Recv()
			require.NoError(t, err)
			w.brokers[drained].server.EndStreams()
			for err = error(nil); err == nil; {
				_, err = follow.Recv()
			}
			refused(t, err, "DRAINING")
			_, err = produce.Recv()
			refused(t, err, "DRAINING")
		})
	}
}

func TestOldConnectionsAreClosed(t *testing.T) {
	run(t, 2, 2, nil, func(t *testing.T, w *world) {
		s := w.brokers[1].service
		for id := int32(100); id < 150; id++ {
			_, err := s.peers.conn(brokerAddress(id), w.brokers[1].replicas)
			require.NoError(t, err)
		}
		require.LessOrEqual(t, len(s.peers.conns), 2+spareConns+1)
		require.NoError(t, s.Close())
		_, err := s.peers.conn(brokerAddress(2), w.brokers[1].replicas)
		require.ErrorIs(t, err, replica.ErrStopped)
	})
}

func TestHeadersSayNoToo(t *testing.T) {
	for value, want := range map[string]bool{"1": true, "true": true, "0": false, "": false} {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(NoForwardHeader, value))
		require.Equal(t, want, flagged(ctx, NoForwardHeader), "%q", value)
	}
	require.False(t, flagged(t.Context(), NoForwardHeader))
}
