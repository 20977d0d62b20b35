package integration_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/test/cluster"
)

// repeat sends a batch again and requires the first answer.
func repeat(t *testing.T, c *cluster.Cluster, m *cluster.Member, topic string, first *brokerv1.AppendResponse, batch []byte) {
	t.Helper()
	again := mustAppend(t, c, m, topic, 0, levelObject, batch)
	assert.True(t, again.GetDuplicate())
	assert.Equal(t, first.GetBaseOffset(), again.GetBaseOffset())
	assert.Equal(t, first.GetEndOffset(), again.GetEndOffset())
	assert.Equal(t, first.GetLeadership().GetLeaderEpoch(), again.GetLeadership().GetLeaderEpoch())
}

// B054, B055 and B058 of what has gone wrong elsewhere: a repeat is answered with
// the first answer, which names records that can be read, by whoever leads.
func TestARepeatedBatchGetsItsFirstAnswerFromEveryLaterLeader(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 3})
	c.CreateTopic("dedup", 1, "leader.return.grace", "0s")
	leader, epoch := c.Leader("dedup", 0)
	p := newProducer(t, c, leader)

	// Five in flight, the producer's whole window; each with a neighbour that is
	// not idempotent, so that offsets and sequences differ.
	var batches [][]byte
	var firsts []*brokerv1.AppendResponse
	want := []string{}
	for i := range 5 {
		mustAppend(t, c, leader, "dedup", 0, levelLeader, plain(t, fmt.Sprintf("other-%d", i)))
		batches = append(batches, p.batch(t, fmt.Sprintf("a-%d", i), fmt.Sprintf("b-%d", i)))
		firsts = append(firsts, mustAppend(t, c, leader, "dedup", 0, levelObject, batches[i]))
		want = append(want, fmt.Sprintf("other-%d", i), fmt.Sprintf("a-%d", i), fmt.Sprintf("b-%d", i))
	}
	check := func(t *testing.T, m *cluster.Member) {
		t.Helper()
		for i := range batches {
			repeat(t, c, m, "dedup", firsts[i], batches[i])
		}
		all := readAll(t, c, m, "dedup", 0, 0)
		require.Equal(t, want, values(all))
		dense(t, 0, all)
		for i, f := range firsts {
			assert.Equal(t, fmt.Sprintf("a-%d", i), all[f.GetBaseOffset()].value, "the answer names another record")
		}
	}
	t.Run("the same leader", func(t *testing.T) { check(t, leader) })
	t.Run("records instead of a batch", func(t *testing.T) {
		resp, err := c.Log(leader).Append(bounded(t, cluster.Patience), &brokerv1.AppendRequest{
			Topic: "dedup", Level: levelObject, Records: []*brokerv1.Record{{Value: []byte("a-4")}, {Value: []byte("b-4")}},
			Producer: &brokerv1.Producer{ProducerId: p.id, ProducerEpoch: int32(p.epoch), BaseSequence: 8},
		})
		require.NoError(t, err)
		assert.True(t, resp.GetDuplicate())
		assert.Equal(t, firsts[4].GetBaseOffset(), resp.GetBaseOffset())
	})
	t.Run("the leader stopped and started again", func(t *testing.T) {
		require.NoError(t, leader.Stop())
		leader.Start()
		c.WaitReady(leader)
		epoch = c.Elect("dedup", 0, leader)
		check(t, leader)
	})
	t.Run("the leader killed and started again", func(t *testing.T) {
		leader.Restart()
		c.WaitReady(leader)
		epoch = c.Elect("dedup", 0, leader)
		check(t, leader)
	})
	t.Run("two empty brokers that take over one after the other, and the first leader again", func(t *testing.T) {
		for _, m := range c.Members(cluster.RoleBroker) {
			if m == leader {
				continue
			}
			epoch = c.Elect("dedup", 0, m)
			check(t, m)
		}
		epoch = c.Elect("dedup", 0, leader)
		check(t, leader)
	})
	t.Run("an empty broker after the leader was killed", func(t *testing.T) {
		leader.Kill()
		next, e := c.LeaderAbove("dedup", 0, epoch)
		epoch = e
		require.NotEqual(t, leader.ID(), next.ID())
		check(t, next)
		// And the sequence goes on from there.
		resp := mustAppend(t, c, next, "dedup", 0, levelObject, p.batch(t, "more"))
		want = append(want, "more")
		assert.False(t, resp.GetDuplicate())
		assert.EqualValues(t, len(want), resp.GetEndOffset())
		gap := *p
		gap.next++
		_, err := appendBatches(t, c, next, "dedup", 0, levelObject, gap.batch(t, "lost"))
		refusal := refused(t, err, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP)
		assert.Equal(t, "10", refusal.Metadata["last_sequence"])
		assert.Equal(t, fmt.Sprint(resp.GetBaseOffset()), refusal.Metadata["last_offset"])
		require.Equal(t, want, values(readAll(t, c, next, "dedup", 0, 0)))
	})
}

// The record that a leader never got into the bucket is stored once, by the next
// leader, when its producer sends it again (B058).
func TestABatchThatDiedWithItsLeaderIsStoredOnceWhenSentAgain(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("dies", 1, "leader.return.grace", "0s")
	leader, epoch := c.Leader("dies", 0)
	p := newProducer(t, c, leader)
	mustAppend(t, c, leader, "dies", 0, levelObject, p.batch(t, "safe"))
	c.RLM(1).Kill() // or it would commit what it was sent, for the dead leader
	batch := p.batch(t, "tail")
	mustAppend(t, c, leader, "dies", 0, levelLeader, batch)
	leader.Kill()
	c.RLM(1).Start()
	next, e := c.LeaderAbove("dies", 0, epoch)
	require.NotEqual(t, leader.ID(), next.ID())
	first := mustAppend(t, c, next, "dies", 0, levelObject, batch)
	assert.False(t, first.GetDuplicate(), "it named a record that nobody has")
	assert.EqualValues(t, 1, first.GetBaseOffset())
	require.Equal(t, []string{"safe", "tail"}, values(readAll(t, c, next, "dies", 0, 0)))

	// Back at the old leader, which still has its own copy of it.
	leader.Start()
	c.WaitReady(leader)
	require.Greater(t, c.Elect("dies", 0, leader), e)
	repeat(t, c, leader, "dies", first, batch)
	require.Equal(t, []string{"safe", "tail"}, values(readAll(t, c, leader, "dies", 0, 0)))
}
