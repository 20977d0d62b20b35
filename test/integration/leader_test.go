package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/test/cluster"
)

// Design review F3: LEADER means that a record outlives a restart of the leader's
// process when the same broker is elected next.
func TestALeaderKilledWhileTheBucketIsDownComesBackWithItsTail(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("kept", 1)
	leader, epoch := c.Leader("kept", 0)
	p := newProducer(t, c, leader)
	mustAppend(t, c, leader, "kept", 0, levelObject, p.batch(t, "object-0", "object-1"))

	c.BucketDown(true)
	acked := map[int64]string{}
	var batches [][]byte
	var firsts []*brokerv1.AppendResponse
	for _, v := range numbered("leader", 20) {
		batch := p.batch(t, v)
		resp := mustAppend(t, c, leader, "kept", 0, levelLeader, batch)
		assert.NotContains(t, resp.GetLevels(), levelObject)
		acked[resp.GetBaseOffset()] = v
		batches, firsts = append(batches, batch), append(firsts, resp)
	}
	for life := range 2 {
		leader.Restart()
		c.WaitReady(leader)
		var next *cluster.Member
		next, epoch = c.LeaderAbove("kept", 0, epoch)
		require.Equal(t, leader.ID(), next.ID(), "another broker was elected within the grace")
		o := offsets(t, c, leader, "kept", 0)
		require.EqualValues(t, 2+len(acked), o.GetLogEndOffset(), "the tail is gone after death %d", life+1)
		assert.EqualValues(t, 2, o.GetHighWatermark())
		// Readers do not see what is not committed, and do see what is.
		require.Equal(t, []string{"object-0", "object-1"}, values(readAll(t, c, leader, "kept", 0, 0)))
		// It goes on giving LEADER acks, with the bucket still down.
		resp := mustAppend(t, c, leader, "kept", 0, levelLeader, plain(t, "between"))
		acked[resp.GetBaseOffset()] = "between"
	}
	ex := explain(t, c, leader, "kept", 0)
	assert.NotContains(t, codesOf(ex), "HEALTHY")
	assert.Positive(t, ex.GetUnuploadedBytes())

	c.BucketDown(false)
	end := int64(2 + len(acked))
	_, err := c.Log(leader).AwaitDurability(bounded(t, 30*time.Second), &brokerv1.AwaitDurabilityRequest{
		Topic: "kept", EndOffset: firsts[0].GetEndOffset(), Leadership: firsts[0].GetLeadership(), Level: levelObject,
	})
	require.NoError(t, err, "the leadership that acked is in the lineage still")
	c.Eventually("everything is uploaded", func() bool { return offsets(t, c, leader, "kept", 0).GetHighWatermark() == end })
	referenced(t, c, "kept", 0, end)
	// Through the leader and through a broker that has nothing of its own.
	for _, m := range []*cluster.Member{leader, c.Broker(3 - leader.ID())} {
		if m != leader {
			c.Elect("kept", 0, m)
		}
		all := readAll(t, c, m, "kept", 0, 0)
		dense(t, 0, all)
		require.Len(t, all, int(end))
		for offset, v := range acked {
			assert.Equal(t, v, all[offset].value)
		}
		// The producer's window too.
		for i := len(batches) - 5; i < len(batches); i++ {
			repeat(t, c, m, "kept", firsts[i], batches[i])
		}
	}
}

func TestAKilledLeaderIsReplacedByAnEmptyBrokerAndItsTailIsNeverServed(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("taken", 2, "leader.return.grace", "0s")
	leader, epoch := c.Leader("taken", 0)
	next := c.Broker(3 - leader.ID())
	var want []string
	for _, v := range numbered("safe", 10) {
		mustAppend(t, c, leader, "taken", 0, levelObject, plain(t, v))
		want = append(want, v)
	}
	c.RLM(1).Kill()
	var tail *brokerv1.AppendResponse
	for _, v := range numbered("tail", 5) {
		tail = mustAppend(t, c, leader, "taken", 0, levelLeader, plain(t, v))
	}
	require.EqualValues(t, 15, tail.GetEndOffset())
	leader.Kill()
	c.RLM(1).Start()
	got, e := c.LeaderAbove("taken", 0, epoch)
	require.Equal(t, next, got)
	require.Equal(t, want, values(readAll(t, c, next, "taken", 0, 0)), "read from the bucket alone")

	// The offsets of the tail are given again; whoever waits for the old ones is told.
	resp := mustAppend(t, c, next, "taken", 0, levelObject, plain(t, "new-0", "new-1"))
	require.EqualValues(t, 10, resp.GetBaseOffset())
	want = append(want, "new-0", "new-1")
	_, err := c.Log(next).AwaitDurability(bounded(t, 20*time.Second), &brokerv1.AwaitDurabilityRequest{
		Topic: "taken", EndOffset: tail.GetEndOffset(), Leadership: tail.GetLeadership(), Level: levelObject,
	})
	cut := refused(t, err, codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED)
	assert.Equal(t, "10", cut.Metadata["fork_point"])
	_, err = tryRead(c, next, &brokerv1.ReadRequest{
		Topic: "taken", Start: &brokerv1.ReadRequest_Offset{Offset: 11}, LastLeadership: tail.GetLeadership(),
	})
	cut = refused(t, err, codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED)
	assert.Equal(t, "10", cut.Metadata["fork_point"])

	leader.Start()
	c.WaitReady(leader)
	require.Equal(t, want, values(readAll(t, c, leader, "taken", 0, 0)), "forwarded")
	require.Greater(t, c.Elect("taken", 0, leader), e)
	all := readAll(t, c, leader, "taken", 0, 0)
	require.Equal(t, want, values(all), "the tail came back")
	dense(t, 0, all)
	resp = mustAppend(t, c, leader, "taken", 0, levelObject, plain(t, "last"))
	require.EqualValues(t, 12, resp.GetBaseOffset())
	referenced(t, c, "taken", 0, 13)
	require.Equal(t, append(want, "last"), values(readAll(t, c, leader, "taken", 0, 0)))
}

// A leader that is cut off without knowing it stops giving LEADER acks when its
// session has run out, and what it acked before may only be lost in that window.
func TestAnIsolatedLeaderGivesNoAcksAfterItsSessionAndYieldsWhenItIsBack(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("cut", 1, "leader.return.grace", "0s")
	leader, epoch := c.Leader("cut", 0)
	mustAppend(t, c, leader, "cut", 0, levelObject, plain(t, "before"))
	waiting := goAppend(c, leader, "cut", 0, levelObject, 30*time.Second, plain(t, "on its way"))
	_, err := waiting.wait(t)
	require.NoError(t, err)
	leader.Isolate()
	next, e := c.LeaderAbove("cut", 0, epoch)
	require.NotEqual(t, leader.ID(), next.ID())
	mustAppend(t, c, next, "cut", 0, levelObject, plain(t, "after"))
	leader.Reconnect()
	c.WaitReady(leader)
	c.Eventually("the old leader knows its successor", func() bool {
		_, err := c.Log(leader).Append(direct(bounded(t, 5*time.Second)), &brokerv1.AppendRequest{Topic: "cut", Batches: plain(t, "x")})
		return refusedWith(err, errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER)
	})
	require.Equal(t, []string{"before", "on its way", "after"}, values(readAll(t, c, leader, "cut", 0, 0)))
	require.Greater(t, c.Elect("cut", 0, leader), e)
	require.Equal(t, []string{"before", "on its way", "after"}, values(readAll(t, c, leader, "cut", 0, 0)))
}
