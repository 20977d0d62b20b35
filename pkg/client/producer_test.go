package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// produce runs fn with a producer of a cluster of three brokers.
func produce(t *testing.T, partitions int, opts client.ProducerOptions, fn func(*testing.T, *cluster, *client.Producer)) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, partitions, "a:1", "b:1", "c:1")
		defer c.close()
		cl := c.client()
		defer cl.Close()
		opts.Topic = topic
		p, err := cl.NewProducer(t.Context(), opts)
		require.NoError(t, err)
		fn(t, c, p)
		require.NoError(t, p.Close(t.Context()))
	})
}

// send sends values v0, v1, … to partition 0, each in a batch of its own.
func send(t *testing.T, p *client.Producer, from, n int) []client.Pending {
	t.Helper()
	var out []client.Pending
	for i := range n {
		pending, err := p.SendTo(t.Context(), 0, client.Record{Key: []byte("k"), Value: fmt.Appendf(nil, "v%d", from+i)})
		require.NoError(t, err)
		out = append(out, pending)
	}
	return out
}

func wait(t *testing.T, all []client.Pending) []client.Ack {
	t.Helper()
	var out []client.Ack
	for _, p := range all {
		ack, err := p.Wait(t.Context())
		require.NoError(t, err)
		out = append(out, ack)
	}
	return out
}

func expected(n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("v%d", i))
	}
	return out
}

// small closes a batch with every record.
var small = client.ProducerOptions{BatchBytes: 1}

func TestRecordsAreAckedInOrderWithTheirFacts(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		acks := wait(t, send(t, p, 0, 20))
		for i, ack := range acks {
			require.EqualValues(t, i, ack.Offset)
			require.Equal(t, client.Leadership{Incarnation: incarnation, LeaderEpoch: 1}, ack.Leadership)
			require.True(t, ack.Levels.Has(client.LevelObject))
			require.Equal(t, "a:1", ack.Broker)
		}
		require.Equal(t, expected(20), c.values(0))
	})
}

func TestLingerGathersABatch(t *testing.T) {
	produce(t, 1, client.ProducerOptions{Linger: time.Second}, func(t *testing.T, c *cluster, p *client.Producer) {
		acks := wait(t, send(t, p, 0, 50))
		require.Equal(t, time.Second, acks[0].Latency)
		require.EqualValues(t, 49, acks[49].Offset)
		require.Len(t, c.logs[0].batches, 1)
	})
}

func TestFlushDoesNotLinger(t *testing.T) {
	produce(t, 1, client.ProducerOptions{Linger: time.Hour}, func(t *testing.T, _ *cluster, p *client.Producer) {
		pending := send(t, p, 0, 3)
		start := time.Now()
		require.NoError(t, p.Flush(t.Context()))
		require.Less(t, time.Since(start), time.Second)
		wait(t, pending)
	})
}

func TestKeysChooseThePartitionAndNoKeyRotates(t *testing.T) {
	produce(t, 5, client.ProducerOptions{Linger: -1}, func(t *testing.T, c *cluster, p *client.Producer) {
		for i := range 40 {
			key := fmt.Appendf(nil, "key %d", i)
			pending, err := p.Send(t.Context(), client.Record{Key: key})
			require.NoError(t, err)
			ack, err := pending.Wait(t.Context())
			require.NoError(t, err)
			require.Equal(t, client.PartitionForKey(key, 5), ack.Partition)
		}
		used := map[int32]int{}
		for range 50 {
			pending, err := p.Send(t.Context(), client.Record{Value: []byte("x")})
			require.NoError(t, err)
			ack, err := pending.Wait(t.Context())
			require.NoError(t, err)
			used[ack.Partition]++
		}
		require.Len(t, used, 5, "slow senders without keys must not pile up in one partition")
	})
}

func TestAKilledLeaderLosesAndRepeatsNothing(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		first := wait(t, send(t, p, 0, 5))
		require.Equal(t, "a:1", first[4].Broker)
		c.kill("a:1")
		pending := send(t, p, 5, 30)
		time.Sleep(3 * time.Second) //nolint:forbidigo // inside a synctest bubble: the session has to expire
		c.elect("b:1", -1)
		acks := wait(t, pending)
		require.Equal(t, "b:1", acks[29].Broker)
		require.EqualValues(t, 2, acks[29].Leadership.LeaderEpoch)
		require.Equal(t, expected(35), c.values(0))
	})
}

func TestAStoredBatchWhoseAnswerIsLostIsNotStoredTwice(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		c.after = func(n int, _ record.Batch) error {
			if n == 3 || n == 4 {
				return unavailable(0) // the connection's end looks so
			}
			return nil
		}
		acks := wait(t, send(t, p, 0, 10))
		require.True(t, acks[2].Duplicate)
		require.Equal(t, expected(10), c.values(0))
	})
}

func TestNotLeaderGoesToTheHintedLeader(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		wait(t, send(t, p, 0, 2))
		c.elect("c:1", -1)
		c.mu.Lock()
		c.told = "a:1" // brokers that are behind
		c.mu.Unlock()
		start := time.Now()
		acks := wait(t, send(t, p, 2, 5))
		require.Equal(t, "c:1", acks[0].Broker)
		require.Less(t, time.Since(start), 100*time.Millisecond)
		require.Equal(t, expected(7), c.values(0))
	})
}

func TestRefusalsThatPassAreRepeated(t *testing.T) {
	for _, err := range []error{
		unavailable(errorsv1.ErrorReason_ERROR_REASON_RECOVERING),
		unavailable(errorsv1.ErrorReason_ERROR_REASON_NO_REMOTE_LOG_MANAGER),
		rpcerr.Draining(),
		rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_BACKLOG_FULL, topic, "bytes", 1, 0),
	} {
		t.Run(rpcerr.ReasonName(rpcerr.Reason(err)), func(t *testing.T) {
			produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
				c.before = func(n int, _ record.Batch) error {
					if n < 10 {
						return err
					}
					return nil
				}
				wait(t, send(t, p, 0, 10))
				require.Equal(t, expected(10), c.values(0))
			})
		})
	}
}

func unknownOutcome(b record.Batch) error {
	return rpcerr.OutcomeUnknown(topic, b.BaseOffset(), b.EndOffset(), incarnation, b.LeaderEpoch(), "LEADER")
}

func TestAnUnknownOutcomeIsSettled(t *testing.T) {
	produce(t, 1, client.ProducerOptions{BatchBytes: 1, Level: client.LevelObject}, func(t *testing.T, c *cluster, p *client.Producer) {
		c.after = func(n int, b record.Batch) error {
			if n == 2 {
				return unknownOutcome(b)
			}
			return nil
		}
		asked := 0
		c.await = func(req *brokerv1.AwaitDurabilityRequest) error {
			asked++
			assert.EqualValues(t, 2, req.GetEndOffset())
			assert.EqualValues(t, client.LevelObject, req.GetLevel())
			if asked == 1 {
				return unavailable(errorsv1.ErrorReason_ERROR_REASON_RECOVERING)
			}
			return nil
		}
		acks := wait(t, send(t, p, 0, 6))
		require.True(t, acks[1].Settled)
		require.EqualValues(t, 1, acks[1].Offset)
		require.Equal(t, 2, asked)
		require.Equal(t, expected(6), c.values(0))
	})
}

func TestRecordsCutAfterAnUnknownOutcomeAreSentAgain(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		c.after = func(n int, b record.Batch) error {
			if n == 3 {
				return unknownOutcome(b)
			}
			return nil
		}
		c.await = func(req *brokerv1.AwaitDurabilityRequest) error {
			if req.GetEndOffset() == 3 {
				return rpcerr.LogTruncated(topic, 2)
			}
			return nil
		}
		pending := send(t, p, 0, 3)
		synctest.Wait()
		c.elect("b:1", 2) // takes the third batch away
		acks := wait(t, pending)
		require.False(t, acks[2].Settled)
		require.EqualValues(t, 2, acks[2].Leadership.LeaderEpoch)
		require.Equal(t, expected(3), c.values(0))
	})
}

func TestALostAckedTailIsToldAndNeverPapered(t *testing.T) {
	produce(t, 2, small, func(t *testing.T, c *cluster, p *client.Producer) {
		wait(t, send(t, p, 0, 5))
		c.elect("b:1", 3) // two acked records are gone
		pending := send(t, p, 5, 2)
		for _, one := range pending {
			_, err := one.Wait(t.Context())
			var delivery *client.DeliveryError
			require.ErrorAs(t, err, &delivery)
			require.False(t, delivery.MaybeStored)
			require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP))
			e, _ := rpcerr.From(err)
			last, _ := e.Int("last_sequence")
			require.EqualValues(t, 2, last)
		}
		_, err := p.SendTo(t.Context(), 0, client.Record{Value: []byte("v")})
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP), "the partition takes nothing until the caller has seen it: %v", err)
		other, err := p.SendTo(t.Context(), 1, client.Record{Value: []byte("w")})
		require.NoError(t, err, "other partitions go on")
		wait(t, []client.Pending{other})

		require.NoError(t, p.Resume(t.Context(), 0))
		wait(t, send(t, p, 3, 2))
		require.Equal(t, expected(5), c.values(0))
		require.Equal(t, []string{"w"}, c.values(1))
	})
}

func TestARefusalAfterALostAnswerLeavesTheOutcomeOpen(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		c.after = func(n int, _ record.Batch) error {
			if n == 1 {
				return unavailable(0) // stored, and the answer is lost
			}
			return nil
		}
		c.before = func(n int, _ record.Batch) error {
			if n > 1 {
				return rpcerr.LevelUnreachable(topic, "LEADER", "OBJECT")
			}
			return nil
		}
		_, err := send(t, p, 0, 1)[0].Wait(t.Context())
		var delivery *client.DeliveryError
		require.ErrorAs(t, err, &delivery)
		require.True(t, delivery.MaybeStored)
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_LEVEL_UNREACHABLE))
		require.Equal(t, expected(1), c.values(0))
		require.NoError(t, p.Resume(t.Context(), 0))
	})
}

// What was only ever refused before the append is not in the log, whatever else
// was tried; a lost answer makes it possible.
func TestOnlyRefusedBatchesAreSurelyNotStored(t *testing.T) {
	for name, refusal := range map[string]error{
		"recovering":   unavailable(errorsv1.ErrorReason_ERROR_REASON_RECOVERING),
		"backlog full": rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_BACKLOG_FULL, topic, "bytes", 1, 0),
		"not leader":   rpcerr.NotLeader(topic, rpcerr.Leader{Epoch: 1}),
		"lost answers": unavailable(0),
	} {
		t.Run(name, func(t *testing.T) {
			produce(t, 1, client.ProducerOptions{BatchBytes: 1, DeliveryTimeout: 10 * time.Second}, func(t *testing.T, c *cluster, p *client.Producer) {
				c.before = func(int, record.Batch) error { return refusal }
				for _, pending := range send(t, p, 0, 3) {
					_, err := pending.Wait(t.Context())
					var delivery *client.DeliveryError
					require.ErrorAs(t, err, &delivery)
					require.ErrorContains(t, err, "no ack within 10s")
					require.Equal(t, name == "lost answers", delivery.MaybeStored)
				}
				require.Empty(t, c.values(0))
			})
		})
	}
	t.Run("closed without any leader", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(t, 1, "a:1")
			defer c.close()
			cl := c.client()
			defer cl.Close()
			p, err := cl.NewProducer(t.Context(), client.ProducerOptions{Topic: topic})
			require.NoError(t, err)
			c.elect("", -1)
			pending := send(t, p, 0, 1)[0]
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			require.Error(t, p.Close(ctx))
			_, err = pending.Wait(t.Context())
			var delivery *client.DeliveryError
			require.ErrorAs(t, err, &delivery)
			require.False(t, delivery.MaybeStored)
		})
	})
}

func TestWhatATopicTakesIsKnownBefore(t *testing.T) {
	plain := &client.Topic{Name: topic, Partitions: make([]client.Partition, 2), MinAckLevel: client.LevelLeader, MaxBatchBytes: 1000}
	object := &client.Topic{Name: topic, MinAckLevel: client.LevelObject}
	for _, level := range []client.Level{client.LevelDefault, client.LevelLeader, client.LevelObject} {
		require.NoError(t, plain.CheckLevel(level))
	}
	require.NoError(t, object.CheckLevel(client.LevelObject))
	require.NoError(t, object.CheckLevel(client.LevelDefault))
	for _, err := range []error{plain.CheckLevel(client.LevelMirrored), plain.CheckLevel(client.LevelReplicas), object.CheckLevel(client.LevelLeader)} {
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_LEVEL_UNREACHABLE), "%v", err)
	}
	require.NoError(t, plain.CheckPartition(1))
	require.ErrorContains(t, plain.CheckPartition(2), "only 0 to 1")
	require.Error(t, plain.CheckPartition(-1))
	require.NoError(t, plain.CheckRecord(&client.Record{Value: make([]byte, 800)}))
	var large *client.RecordTooLargeError
	require.ErrorAs(t, plain.CheckRecord(&client.Record{Key: make([]byte, 500), Value: make([]byte, 500)}), &large)
	require.EqualValues(t, 1000, large.Limit)
}

func TestNothingOutlivesTheDeliveryTimeout(t *testing.T) {
	produce(t, 1, client.ProducerOptions{BatchBytes: 1, DeliveryTimeout: 10 * time.Second}, func(t *testing.T, c *cluster, p *client.Producer) {
		c.elect("", -1)
		start := time.Now()
		pending := send(t, p, 0, 3)
		for _, one := range pending {
			_, err := one.Wait(t.Context())
			require.ErrorContains(t, err, "no ack within 10s")
		}
		require.Less(t, time.Since(start), 12*time.Second)
		require.NoError(t, p.Resume(t.Context(), 0))
	})
}

func TestASilentLeaderIsLeft(t *testing.T) {
	produce(t, 1, client.ProducerOptions{BatchBytes: 1, StallTimeout: 5 * time.Second}, func(t *testing.T, c *cluster, p *client.Producer) {
		release := make(chan struct{})
		silent := true
		c.after = func(int, record.Batch) error {
			if silent {
				silent = false
				c.mu.Unlock()
				<-release
				c.mu.Lock()
				return errors.New("too late")
			}
			return nil
		}
		acks := wait(t, send(t, p, 0, 2))
		require.True(t, acks[0].Duplicate)
		close(release)
		require.Equal(t, expected(2), c.values(0))
	})
}

func TestAPausedLeaderIsLeftWhenAnotherLeads(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		release := make(chan struct{})
		paused := true
		c.before = func(int, record.Batch) error {
			if paused {
				paused = false
				c.mu.Unlock()
				<-release
				c.mu.Lock()
				return rpcerr.NotLeader(topic, rpcerr.Leader{})
			}
			return nil
		}
		start := time.Now()
		pending := send(t, p, 0, 3)
		time.Sleep(3 * time.Second) //nolint:forbidigo // inside a synctest bubble
		c.elect("b:1", -1)
		acks := wait(t, pending)
		require.Equal(t, "b:1", acks[0].Broker)
		require.Less(t, time.Since(start), 8*time.Second, "long before the stall timeout")
		close(release)
		require.Equal(t, expected(3), c.values(0))
	})
}

func TestTheBufferIsBounded(t *testing.T) {
	produce(t, 1, client.ProducerOptions{BufferBytes: 1000, BatchBytes: 300}, func(t *testing.T, c *cluster, p *client.Producer) {
		hold := make(chan struct{})
		c.before = func(int, record.Batch) error {
			c.mu.Unlock()
			<-hold
			c.mu.Lock()
			return nil
		}
		var pending []client.Pending
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		for {
			one, err := p.SendTo(ctx, 0, client.Record{Value: fmt.Appendf(nil, "v%d", len(pending))})
			if err != nil {
				require.ErrorIs(t, err, context.DeadlineExceeded)
				break
			}
			pending = append(pending, one)
		}
		require.Less(t, len(pending), 30)
		close(hold)
		wait(t, pending)
		require.Equal(t, expected(len(pending)), c.values(0))
		_, err := p.SendTo(t.Context(), 0, client.Record{Value: make([]byte, 1000)})
		var large *client.RecordTooLargeError
		require.ErrorAs(t, err, &large)
	})
}

func TestALargeRecordIsRefusedWithTheLimitNamed(t *testing.T) {
	produce(t, 1, client.ProducerOptions{}, func(t *testing.T, c *cluster, p *client.Producer) {
		_, err := p.Send(t.Context(), client.Record{Value: make([]byte, 2<<20)})
		var large *client.RecordTooLargeError
		require.ErrorAs(t, err, &large)
		require.EqualValues(t, 1<<20, large.Limit)
		// Larger than a batch usually is, but allowed: a batch of its own.
		one, err := p.Send(t.Context(), client.Record{Value: []byte(strings.Repeat("x", 600<<10))})
		require.NoError(t, err)
		wait(t, []client.Pending{one})
	})
}

func TestCloseAnswersEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 1, "a:1")
		defer c.close()
		cl := c.client()
		defer cl.Close()
		p, err := cl.NewProducer(t.Context(), client.ProducerOptions{Topic: topic})
		require.NoError(t, err)
		c.elect("", -1)
		one, err := p.SendTo(t.Context(), 0, client.Record{Value: []byte("v")})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, p.Close(ctx), context.DeadlineExceeded)
		_, err = one.Wait(t.Context())
		require.ErrorIs(t, err, client.ErrClosed)
		_, err = p.SendTo(t.Context(), 0, client.Record{})
		require.ErrorIs(t, err, client.ErrClosed)
		require.NoError(t, p.Close(t.Context()))
	})
}

func TestAnUnknownTopicIsAskedForAWhileOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 1, "a:1")
		defer c.close()
		cl := c.client()
		defer cl.Close()
		start := time.Now()
		_, err := cl.NewProducer(t.Context(), client.ProducerOptions{Topic: "other"})
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION))
		require.ErrorContains(t, err, `topic "other" does not exist`)
		require.InDelta(t, 2, time.Since(start).Seconds(), 1)
	})
}

func TestOneLivingBrokerOfTheListIsEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 1, "a:1", "b:1")
		defer c.close()
		c.kill("a:1")
		c.elect("b:1", -1)
		cl := c.client("nowhere:1", "a:1", "b:1")
		defer cl.Close()
		got, err := cl.DescribeTopic(t.Context(), topic)
		require.NoError(t, err)
		require.Equal(t, "b:1", got.Partitions[0].LeaderAddress)
	})
}
