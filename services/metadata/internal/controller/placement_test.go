package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// replaces decides at a moment given in seconds, as the term does, and applies
// the replacements.
func (s *script) replaces(seconds float64) (brokers []int32, wait time.Duration) {
	s.t.Helper()
	now := time.Duration(seconds * float64(time.Second))
	elections, _ := s.e.decide(s.st, now)
	require.Empty(s.t, elections)
	replacements, wait := s.e.replace(s.st, now)
	for _, r := range replacements {
		brokers = append(brokers, r.BrokerID)
	}
	if len(replacements) > 0 {
		s.apply(s.st.DecideReplacements(replacements...))
	}
	return brokers, wait
}

func TestReplacementOfLostReplicas(t *testing.T) {
	t.Run("when the last replica has been gone for the timeout", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.register(2)
		id := s.topic(nil)
		s.open(id)
		s.register(3)
		s.offline(2)
		s.replaces(0)
		s.offline(1)
		brokers, wait := s.replaces(100) // first seen now; within the leader's grace
		assert.Empty(t, brokers)
		assert.Zero(t, wait, "the election says when to look again")
		brokers, wait = s.replaces(106)
		assert.Empty(t, brokers)
		assert.Equal(t, 594*time.Second, wait)
		brokers, wait = s.replaces(699)
		assert.Empty(t, brokers)
		assert.Equal(t, time.Second, wait)
		brokers, _ = s.replaces(700)
		assert.Equal(t, []int32{3}, brokers)
		view, _ := s.st.View(id)
		assert.Equal(t, []int32{1, 2, 3}, view.Replicas)
		assert.Equal(t, int32(3), view.LeaderID)
		brokers, wait = s.replaces(700)
		assert.Empty(t, brokers)
		assert.Zero(t, wait)
	})
	t.Run("not if one comes back in time", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		id := s.topic(nil)
		s.open(id)
		s.register(3)
		s.offline(1)
		s.replaces(0)
		s.replaces(599)
		s.register(1)
		s.elects(599, 1, state.ReasonLeaderRegistered)
		s.offline(1)
		brokers, _ := s.replaces(600)
		assert.Empty(t, brokers)
		brokers, _ = s.replaces(1199)
		assert.Empty(t, brokers, "the timeout began anew")
		brokers, _ = s.replaces(1200)
		assert.Equal(t, []int32{3}, brokers)
	})
	t.Run("not within a grace that is longer", func(t *testing.T) {
		s := newScript(t)
		s.e = newElector(6*time.Second, 10*time.Second, time.Second)
		s.register(1)
		id := s.topic(map[string]string{"leader.return.grace": "5m"})
		s.open(id)
		s.register(3)
		s.offline(1)
		s.replaces(0)
		brokers, _ := s.replaces(299)
		assert.Empty(t, brokers)
		brokers, _ = s.replaces(300)
		assert.Equal(t, []int32{3}, brokers)
	})
	t.Run("without a live broker it waits for one, not for the clock", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.open(s.topic(nil))
		s.offline(1)
		s.replaces(0)
		brokers, wait := s.replaces(5000)
		assert.Empty(t, brokers)
		assert.Zero(t, wait)
		s.register(2)
		brokers, _ = s.replaces(5001)
		assert.Equal(t, []int32{2}, brokers)
	})
	t.Run("a new controller counts from its own start", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.open(s.topic(nil))
		s.register(2)
		s.offline(1)
		s.replaces(0)
		s.e = newElector(6*time.Second, 10*time.Second, 10*time.Minute)
		s.replaces(500)
		brokers, _ := s.replaces(600)
		assert.Empty(t, brokers)
		brokers, _ = s.replaces(1100)
		assert.Equal(t, []int32{2}, brokers)
	})
	t.Run("in portions", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.apply(s.st.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "t", PartitionCount: 3 * maxReplacements / 2},
			"00000000-0000-4000-8000-000000000000"))
		s.register(2)
		s.register(3)
		s.offline(1)
		s.replaces(0)
		brokers, wait := s.replaces(600)
		assert.Len(t, brokers, maxReplacements)
		assert.Equal(t, replacePause, wait)
		brokers, wait = s.replaces(600)
		assert.Empty(t, brokers)
		assert.Equal(t, replacePause, wait)
		brokers, wait = s.replaces(601)
		assert.Len(t, brokers, maxReplacements/2)
		assert.Zero(t, wait)
	})
}

// wishing is a topic of some partitions with the replicas 1 and 2, or 2 and 1,
// all led by 2 and open.
func wishing(t *testing.T, partitions int32) *script {
	t.Helper()
	s := newScript(t)
	s.register(1)
	s.register(2)
	at := s.apply(s.st.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "t", PartitionCount: partitions},
		"00000000-0000-4000-8000-000000000000"))
	for i := range partitions {
		id := state.PartitionID{TopicCreationOffset: at, Partition: i}
		if view, _ := s.st.View(id); view.LeaderID == 1 {
			s.apply(s.st.DecideElections(state.Election{Partition: id, LeaderID: 2}))
		}
		s.openPartition(i)
	}
	return s
}

func (s *script) openPartition(i int32) {
	s.t.Helper()
	topic := s.st.Topics("", 1, true)[0]
	r := openRequest(topic, topic.GetPartitions()[i])
	r.Partition.Partition = i
	events, _, err := s.st.DecideOpenEpoch(r)
	s.apply(events, err)
}

func TestWishes(t *testing.T) {
	ask := func(s *script, w *wishes, broker int32, seconds float64) (out []string) {
		for _, h := range w.of(s.st, broker, time.Duration(seconds*float64(time.Second))) {
			out = append(out, fmt.Sprintf("%d:%d->%d", h.GetPartition().GetPartition(), h.GetLeaderEpoch(), h.GetBrokerId()))
		}
		return out
	}
	t.Run("after the delay, again and again, until it is done", func(t *testing.T) {
		s, w := wishing(t, 2), newWishes(30*time.Second)
		assert.Empty(t, ask(s, w, 2, 0))
		assert.Empty(t, ask(s, w, 2, 29))
		assert.Equal(t, []string{"0:2->1"}, ask(s, w, 2, 30))
		assert.Equal(t, []string{"0:2->1"}, ask(s, w, 2, 30.1))
		assert.Equal(t, []string{"0:2->1"}, ask(s, w, 2, 40))
		assert.Empty(t, ask(s, w, 1, 40), "only the leader is asked")
		s.apply(s.st.DecideElectLeader(&metadatav1.ElectLeaderRequest{Topic: "t", BrokerId: 1, ExpectedLeaderEpoch: 2}))
		assert.Empty(t, ask(s, w, 2, 40.1), "at once, though it is not looked for anew yet")
		assert.Empty(t, ask(s, w, 2, 50))
	})
	t.Run("never with a delay of 0", func(t *testing.T) {
		s, w := wishing(t, 1), newWishes(0)
		assert.Empty(t, ask(s, w, 2, 0))
		assert.Empty(t, ask(s, w, 2, 1000))
	})
	t.Run("a registration begins the delay anew", func(t *testing.T) {
		s, w := wishing(t, 1), newWishes(30*time.Second)
		ask(s, w, 2, 0)
		s.offline(1)
		ask(s, w, 2, 10)
		s.register(1)
		assert.Empty(t, ask(s, w, 2, 30.5))
		assert.Empty(t, ask(s, w, 2, 60))
		assert.Len(t, ask(s, w, 2, 61), 1)
		s.register(1)
		assert.Empty(t, ask(s, w, 2, 61.1))
	})
	t.Run("a leader that has just handed over is not offered the partition back", func(t *testing.T) {
		s, w := wishing(t, 1), newWishes(30*time.Second)
		s.apply(s.st.DecideElections(state.Election{LeaderID: 1, Partition: s.only()}))
		s.openPartition(0)
		assert.Empty(t, ask(s, w, 1, 100))
		s.apply(s.st.DecideElections(state.Election{LeaderID: 2, Partition: s.only()}))
		s.openPartition(0)
		assert.Empty(t, ask(s, w, 2, 101))
		assert.Empty(t, ask(s, w, 2, 130))
		assert.Len(t, ask(s, w, 2, 131), 1)
	})
	t.Run("a better one whose delay still runs is waited for", func(t *testing.T) {
		s, w := wishing(t, 1), newWishes(30*time.Second)
		s.register(3)
		s.apply(s.st.DecideReassign(&metadatav1.ReassignPartitionRequest{Topic: "t", BrokerIds: []int32{1, 3, 2}}))
		s.offline(1)
		assert.Empty(t, ask(s, w, 2, 0))
		s.register(1)
		assert.Empty(t, ask(s, w, 2, 10))
		assert.Empty(t, ask(s, w, 2, 39))
		assert.Equal(t, []string{"0:2->1"}, ask(s, w, 2, 40))
	})
	t.Run("at most 64 at once, all in turn", func(t *testing.T) {
		s, w := wishing(t, 400), newWishes(time.Second) // 200 of them prefer 1
		ask(s, w, 2, 0)
		seen := map[string]int{}
		for range 4 {
			got := ask(s, w, 2, 1)
			assert.Len(t, got, MaxHandovers)
			for _, h := range got {
				seen[h]++
			}
		}
		assert.Len(t, seen, 200)
	})
}

// only is the partition of the only topic.
func (s *script) only() state.PartitionID {
	return state.PartitionID{TopicCreationOffset: s.st.Topics("", 1, false)[0].GetCreationOffset()}
}
