package state_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// led is one partition with the replicas 1, 2, 3 in this order.
func led(t *testing.T, configs map[string]string) (*machine, state.PartitionID) {
	t.Helper()
	m := newMachine(t, 3, 1)
	offset := m.do(m.s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "quakes", PartitionCount: 1, Configs: configs}, topicID))
	id := state.PartitionID{TopicCreationOffset: offset}
	require.Equal(t, []int32{1, 2, 3}, m.partition(id).GetReplicaIds())
	require.Equal(t, int32(1), m.partition(id).GetLeaderId())
	return m, id
}

func TestChooseLeader(t *testing.T) {
	const none = int32(0)
	after := func(fenced, gone time.Duration) state.ElectionFacts {
		f := fresh
		f.SinceFenced, f.LeaderGone = fenced, gone
		return f
	}
	leaderGrace := map[string]string{"leader.return.grace": "30s"}
	object := map[string]string{"min.ack.level": "OBJECT"}
	open := func(m *machine, id state.PartitionID) { m.openAt(id, 0) }
	tests := map[string]struct {
		configs map[string]string
		before  func(m *machine, id state.PartitionID)
		facts   state.ElectionFacts
		leader  int32
		reason  string
		wait    time.Duration
	}{
		"an open leader stays": {nil, open, after(time.Hour, 0), none, "", 0},
		"an elected leader has time to open": {nil, func(*machine, state.PartitionID) {},
			after(4*time.Second, 0), none, "", 6 * time.Second},
		"one that does not open is replaced": {nil, func(*machine, state.PartitionID) {},
			after(10*time.Second, 0), 2, state.ReasonOpenTimeout, 0},
		"by the next in the circle": {nil, func(m *machine, id state.PartitionID) { m.elect(id, 3) },
			after(10*time.Second, 0), 1, state.ReasonOpenTimeout, 0},
		"passing over those that are gone": {nil, func(m *machine, id state.PartitionID) { m.elect(id, 3); m.offline(1) },
			after(10*time.Second, 0), 2, state.ReasonOpenTimeout, 0},
		"or by itself when alone": {nil, func(m *machine, _ state.PartitionID) { m.offline(2); m.offline(3) },
			after(10*time.Second, 0), 1, state.ReasonOpenTimeout, 0},
		"a leader that registered again leads again": {nil, func(m *machine, id state.PartitionID) { open(m, id); m.registerBroker(1) },
			after(0, 0), 1, state.ReasonLeaderRegistered, 0},
		"also from its grace": {nil, func(m *machine, id state.PartitionID) { open(m, id); m.offline(1); m.registerBroker(1) },
			after(0, 0), 1, state.ReasonLeaderRegistered, 0},
		"one that is gone is waited for, a session by default": {nil, func(m *machine, id state.PartitionID) { open(m, id); m.offline(1) },
			after(0, 2*time.Second), none, "", 4 * time.Second},
		"then the next one leads": {nil, func(m *machine, id state.PartitionID) { open(m, id); m.offline(1) },
			after(0, 6*time.Second), 2, state.ReasonLeaderOffline, 0},
		"as long as the topic says": {leaderGrace, func(m *machine, id state.PartitionID) { open(m, id); m.offline(1) },
			after(0, 6*time.Second), none, "", 24 * time.Second},
		"not at all where every ack is OBJECT": {object, func(m *machine, id state.PartitionID) { open(m, id); m.offline(1) },
			after(0, 0), 2, state.ReasonLeaderOffline, 0},
		"nor one that never opened: it acked nothing": {leaderGrace, func(m *machine, id state.PartitionID) { m.offline(1) },
			after(0, 0), 2, state.ReasonLeaderOffline, 0},
		"nor one whose acks another's epoch cut": {leaderGrace, func(m *machine, id state.PartitionID) {
			open(m, id)
			m.elect(id, 2)
			m.openAt(id, 0)
			m.elect(id, 1)
			m.offline(1)
		}, after(0, 0), 2, state.ReasonLeaderOffline, 0},
		"with nobody left nothing happens": {nil, func(m *machine, id state.PartitionID) { open(m, id); m.offline(1); m.offline(2); m.offline(3) },
			after(0, time.Hour), none, "", 0},
		"until somebody comes": {nil, func(m *machine, id state.PartitionID) {
			open(m, id)
			for b := range int32(3) {
				m.offline(b + 1)
			}
			m.registerBroker(3)
		}, after(0, time.Hour), 3, state.ReasonLeaderOffline, 0},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m, id := led(t, tc.configs)
			tc.before(m, id)
			undecided := false
			m.s.Undecided(func(got state.PartitionID) bool { undecided = undecided || got == id; return true })
			e, needed, wait := m.s.ChooseLeader(id, tc.facts)
			assert.Equal(t, tc.leader != none, needed)
			assert.Equal(t, tc.wait, wait)
			if needed || wait > 0 {
				assert.True(t, undecided, "a controller that looks at undecided partitions only would miss it")
			}
			if needed {
				assert.Equal(t, state.Election{Partition: id, LeaderID: tc.leader, Reason: tc.reason}, e)
				before := m.partition(id)
				m.do(m.s.DecideElections(e))
				p := m.partition(id)
				assert.Equal(t, before.GetFence().GetLeaderEpoch()+1, p.GetFence().GetLeaderEpoch())
				assert.Equal(t, tc.leader, p.GetLeaderId())
				assert.Equal(t, tc.reason, p.GetFenceReason())
				assert.False(t, p.GetOpened())
				assert.Equal(t, m.s.Digest(), m.replay().Digest())
			}
		})
	}
	_, needed, wait := newMachine(t, 1, 0).s.ChooseLeader(state.PartitionID{TopicCreationOffset: 77}, fresh)
	assert.False(t, needed)
	assert.Zero(t, wait)
}

func TestALeaderlessPartitionGetsALeaderOnceOneIsLive(t *testing.T) {
	m := newMachine(t, 2, 0)
	m.offline(1)
	m.offline(2)
	id := m.createTopic("quakes", topicID, 1)
	assert.Equal(t, int32(0), m.partition(id).GetLeaderId())
	_, needed, wait := m.s.ChooseLeader(id, fresh)
	assert.False(t, needed)
	assert.Zero(t, wait)
	m.registerBroker(2)
	e, needed, _ := m.s.ChooseLeader(id, fresh)
	require.True(t, needed)
	assert.Equal(t, state.Election{Partition: id, LeaderID: 2, Reason: state.ReasonNoLeader}, e)
}

func TestElectLeaderByAnOperator(t *testing.T) {
	m, id := led(t, nil)
	elect := func(broker, expected int32) error {
		events, err := m.s.DecideElectLeader(&metadatav1.ElectLeaderRequest{
			Topic: "quakes", BrokerId: broker, ExpectedLeaderEpoch: expected,
		})
		if err == nil {
			m.apply(events)
		}
		return err
	}
	require.NoError(t, elect(3, 1))
	// Field report B164: the retry of a command that was applied does not raise the epoch again.
	assert.ErrorAs(t, elect(3, 1), new(*state.ConflictError))
	assert.Equal(t, int32(2), m.partition(id).GetFence().GetLeaderEpoch())
	require.NoError(t, elect(0, 0))
	assert.Equal(t, int32(1), m.partition(id).GetLeaderId(), "0 is the first in order of preference")

	assert.ErrorAs(t, elect(9, 0), new(*state.FieldError))
	m.offline(2)
	assert.ErrorAs(t, elect(2, 0), new(*state.TransitionError))
	m.offline(1)
	m.offline(3)
	assert.ErrorAs(t, elect(0, 0), new(*state.NoCandidateError))
	_, err := m.s.DecideElectLeader(&metadatav1.ElectLeaderRequest{Topic: "nope"})
	assert.ErrorAs(t, err, new(*state.UnknownTopicError))
	_, err = m.s.DecideElectLeader(&metadatav1.ElectLeaderRequest{Topic: "quakes", Partition: 1})
	assert.ErrorAs(t, err, new(*state.UnknownPartitionError))
}

func TestElectionsOfOneEntryAreOfDifferentPartitions(t *testing.T) {
	m, id := led(t, nil)
	e := state.Election{Partition: id, LeaderID: 2}
	_, err := m.s.DecideElections(e, e)
	assert.ErrorAs(t, err, new(*state.FieldError))
	_, err = m.s.DecideElections(make([]state.Election, state.MaxElections+1)...)
	assert.ErrorAs(t, err, new(*state.FieldError))
}

func TestElectionsEndWithTheLastLeaderEpoch(t *testing.T) {
	m, id := led(t, nil)
	b, _ := m.s.Broker(1)
	m.apply([]*metadatav1.Event{{Kind: &metadatav1.Event_PartitionFenced{PartitionFenced: &metadatav1.PartitionFenced{
		TopicCreationOffset: id.TopicCreationOffset, LeaderEpoch: math.MaxInt32, LeaderId: 1, BrokerEpoch: b.GetBrokerEpoch(),
		StartRule: metadatav1.StartRule_START_RULE_FREE,
	}}}})
	_, err := m.s.DecideElections(state.Election{Partition: id, LeaderID: 2})
	assert.ErrorAs(t, err, new(*state.ExhaustedError))
}

func TestLeadersAndReplicasAreSpread(t *testing.T) {
	m := newMachine(t, 6, 0) // zones z1 z2 z0 z1 z2 z0
	m.createTopic("odd", topicID, 7)
	topic := m.createTopic("quakes", "00000000-0000-4000-8000-000000000002", 29)
	leads, holds, seconds := map[int32]int{}, map[int32]int{}, map[string]int{}
	m.s.Partitions(func(id state.PartitionID) bool {
		p := m.partition(id)
		leads[p.GetLeaderId()]++
		zones := map[int32]bool{}
		for _, r := range p.GetReplicaIds() {
			holds[r]++
			zones[r%3] = true
		}
		assert.Len(t, zones, 3, "a zone holds one replica of %v", p)
		if id.TopicCreationOffset == topic.TopicCreationOffset {
			seconds[fmt.Sprint(p.GetReplicaIds()[:2])]++
		}
		return true
	})
	for b := range int32(6) {
		assert.Equal(t, 6, leads[b+1], "36 partitions")
		assert.InDelta(t, 18, holds[b+1], 1)
	}
	for pair, n := range seconds {
		assert.LessOrEqual(t, n, 2, "when %s's first dies its partitions go to different brokers", pair)
	}

	m.offline(1)
	later := m.createTopic("later", "00000000-0000-4000-8000-000000000003", 5)
	for i := range int32(5) {
		p := m.partition(state.PartitionID{TopicCreationOffset: later.TopicCreationOffset, Partition: i})
		assert.NotContains(t, p.GetReplicaIds(), int32(1), "live brokers first")
	}
}
