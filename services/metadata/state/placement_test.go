package state_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// place reassigns a partition, or replaces the replicas of those that have lost
// all, and tells the plain model.
func (w *random) place() {
	if len(w.plain) == 0 {
		return
	}
	before := w.s.Digest()
	var orphans []state.PartitionID
	for _, p := range w.plain {
		if w.s.Orphaned(p.id) {
			orphans = append(orphans, p.id)
		}
	}
	if replacements := w.s.ChooseReplacements(orphans...); len(replacements) > 0 && w.r.IntN(2) == 0 {
		require.Len(w.t, replacements, len(orphans))
		events := must(w.s.DecideReplacements(replacements...))
		require.Equal(w.t, before, w.s.Digest(), "a decider changed the state")
		w.write(events)
		w.fence(events)
		w.stats["replaced"]++
		return
	}
	p := w.plain[w.r.IntN(len(w.plain))]
	ids := []int32{1, 2, 3}
	w.r.Shuffle(3, func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	r := &metadatav1.ReassignPartitionRequest{Topic: p.topicID, Partition: p.id.Partition, BrokerIds: ids[:1+w.r.IntN(3)]}
	events, err := w.s.DecideReassign(r)
	require.Equal(w.t, before, w.s.Digest(), "a decider changed the state")
	if err != nil {
		require.ErrorAs(w.t, err, new(*state.NoCandidateError))
		return
	}
	if len(events) > 0 {
		w.write(events)
		w.fence(events)
		w.stats["reassigned"]++
	}
	again, err := w.s.DecideReassign(r)
	require.NoError(w.t, err)
	require.Empty(w.t, again, "a repeat changes nothing")
	part, _ := w.s.Partition(p.id)
	require.Equal(w.t, r.GetBrokerIds(), part.GetReplicaIds())
	require.True(w.t, part.GetLeaderId() == 0 || slices.Contains(part.GetReplicaIds(), part.GetLeaderId()))
}

// fourBrokers has one partition with the replicas 1, 2, 3, led by 1 and open,
// and a broker 4.
func fourBrokers(t *testing.T) (*machine, state.PartitionID) {
	t.Helper()
	m, id := led(t, nil)
	m.registerBroker(4)
	m.openAt(id, 0)
	return m, id
}

func TestReassign(t *testing.T) {
	tests := map[string]struct {
		before func(m *machine, id state.PartitionID)
		to     []int32
		leader int32
		fenced bool
	}{
		"the leader stays and is not disturbed":       {nil, []int32{4, 1}, 1, false},
		"another order alone fences nobody":           {nil, []int32{3, 2, 1}, 1, false},
		"a leader that goes gives way to a copy":      {nil, []int32{4, 3, 2}, 3, true},
		"to a live one":                               {func(m *machine, _ state.PartitionID) { m.offline(3) }, []int32{4, 3, 2}, 2, true},
		"to a new one if no copy is live":             {func(m *machine, _ state.PartitionID) { m.offline(3) }, []int32{3, 4}, 4, true},
		"a leader that is gone is not waited for":     {func(m *machine, _ state.PartitionID) { m.offline(1) }, []int32{4, 2}, 2, true},
		"one that stays is the elections' matter":     {func(m *machine, _ state.PartitionID) { m.offline(1) }, []int32{4, 1}, 1, false},
		"one that has not opened goes like any other": {func(m *machine, id state.PartitionID) { m.elect(id, 2) }, []int32{3, 1}, 3, true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m, id := fourBrokers(t)
			if tc.before != nil {
				tc.before(m, id)
			}
			before := m.partition(id)
			m.do(m.s.DecideReassign(&metadatav1.ReassignPartitionRequest{
				Topic: "quakes", BrokerIds: tc.to, ExpectedLeaderEpoch: before.GetFence().GetLeaderEpoch(),
			}))
			p := m.partition(id)
			assert.Equal(t, tc.to, p.GetReplicaIds())
			assert.Equal(t, tc.leader, p.GetLeaderId())
			if tc.fenced {
				assert.Equal(t, before.GetFence().GetLeaderEpoch()+1, p.GetFence().GetLeaderEpoch())
				assert.Equal(t, state.ReasonReplicasChanged, p.GetFenceReason())
				assert.False(t, p.GetOpened())
				b, _ := m.s.Broker(tc.leader)
				assert.Equal(t, b.GetBrokerEpoch(), p.GetFence().GetBrokerEpoch())
				m.openAt(id, 0)
			} else {
				assert.Equal(t, before.GetFence().GetLeaderEpoch(), p.GetFence().GetLeaderEpoch())
				assert.Equal(t, before.GetOpened(), p.GetOpened())
			}
			assert.Equal(t, m.s.Digest(), m.replay().Digest())
			assert.Equal(t, m.s.Digest(), decode(t, encode(t, m.s)).Digest(), "a snapshot holds it")
			// The leader epoch has moved, perhaps, but what was asked for is true.
			events, err := m.s.DecideReassign(&metadatav1.ReassignPartitionRequest{
				Topic: "quakes", BrokerIds: tc.to, ExpectedLeaderEpoch: before.GetFence().GetLeaderEpoch(),
			})
			require.NoError(t, err)
			assert.Empty(t, events)
		})
	}
}

func TestReassignIsRefused(t *testing.T) {
	m, id := fourBrokers(t)
	m.registerBroker(5)
	m.offline(4)
	m.offline(5)
	before := m.s.Digest()
	tests := map[string]struct {
		r    *metadatav1.ReassignPartitionRequest
		want any
	}{
		"no brokers":       {&metadatav1.ReassignPartitionRequest{Topic: "quakes"}, new(*state.FieldError)},
		"an unknown one":   {&metadatav1.ReassignPartitionRequest{Topic: "quakes", BrokerIds: []int32{1, 9}}, new(*state.FieldError)},
		"id 0":             {&metadatav1.ReassignPartitionRequest{Topic: "quakes", BrokerIds: []int32{0}}, new(*state.FieldError)},
		"one twice":        {&metadatav1.ReassignPartitionRequest{Topic: "quakes", BrokerIds: []int32{2, 1, 2}}, new(*state.FieldError)},
		"an unknown topic": {&metadatav1.ReassignPartitionRequest{Topic: "no", BrokerIds: []int32{1}}, new(*state.UnknownTopicError)},
		"a partition beyond": {&metadatav1.ReassignPartitionRequest{Topic: "quakes", Partition: 1, BrokerIds: []int32{1}},
			new(*state.UnknownPartitionError)},
		"another leader epoch": {&metadatav1.ReassignPartitionRequest{Topic: "quakes", BrokerIds: []int32{2}, ExpectedLeaderEpoch: 2},
			new(*state.ConflictError)},
		"no live leader to be": {&metadatav1.ReassignPartitionRequest{Topic: "quakes", BrokerIds: []int32{4, 5}}, new(*state.NoCandidateError)},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			events, err := m.s.DecideReassign(tc.r)
			assert.ErrorAs(t, err, tc.want)
			assert.Empty(t, events)
			assert.Equal(t, before, m.s.Digest())
		})
	}
	b, _ := m.s.Broker(1)
	m.apply([]*metadatav1.Event{{Kind: &metadatav1.Event_PartitionFenced{PartitionFenced: &metadatav1.PartitionFenced{
		TopicCreationOffset: id.TopicCreationOffset, LeaderEpoch: math.MaxInt32, LeaderId: 1, BrokerEpoch: b.GetBrokerEpoch(),
		StartRule: metadatav1.StartRule_START_RULE_FREE,
	}}}})
	_, err := m.s.DecideReassign(&metadatav1.ReassignPartitionRequest{Topic: "quakes", BrokerIds: []int32{2}})
	assert.ErrorAs(t, err, new(*state.ExhaustedError))
}

func TestApplyRefusesReplicasThatContradict(t *testing.T) {
	changed := func(id state.PartitionID, brokers ...int32) *metadatav1.Event {
		return &metadatav1.Event{Kind: &metadatav1.Event_ReplicasChanged{ReplicasChanged: &metadatav1.ReplicasChanged{
			TopicCreationOffset: id.TopicCreationOffset, Partition: id.Partition, BrokerIds: brokers,
		}}}
	}
	for name, event := range map[string]func(state.PartitionID) *metadatav1.Event{
		"no such partition":       func(id state.PartitionID) *metadatav1.Event { id.Partition = 7; return changed(id, 1) },
		"none":                    func(id state.PartitionID) *metadatav1.Event { return changed(id) },
		"unknown":                 func(id state.PartitionID) *metadatav1.Event { return changed(id, 1, 9) },
		"twice":                   func(id state.PartitionID) *metadatav1.Event { return changed(id, 1, 1) },
		"a leader that is none":   func(id state.PartitionID) *metadatav1.Event { return changed(id, 2, 3) },
		"a topic that is deleted": nil,
	} {
		t.Run(name, func(t *testing.T) {
			m, id := fourBrokers(t)
			if event == nil {
				m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "quakes"}))
				event = func(id state.PartitionID) *metadatav1.Event { return changed(id, 1) }
			}
			assert.ErrorAs(t, m.s.Apply(m.entry([]*metadatav1.Event{event(id)})), new(*state.BadEntryError))
		})
	}
}

func TestReplacementsAreSpreadAndOldReplicasStay(t *testing.T) {
	m := newMachine(t, 2, 0)
	lost := m.createTopic("lost", topicID, 6)
	for id := int32(3); id <= 5; id++ {
		m.registerBroker(id)
	}
	m.createTopic("others", "00000000-0000-4000-8000-000000000002", 5) // each broker leads one
	ids := make([]state.PartitionID, 6)
	for i := range ids {
		ids[i] = state.PartitionID{TopicCreationOffset: lost.TopicCreationOffset, Partition: int32(i)}
	}
	assert.Empty(t, m.s.ChooseReplacements(ids...), "their replicas live")
	m.offline(1)
	assert.Empty(t, m.s.ChooseReplacements(ids...), "one lives")
	m.offline(2)
	assert.True(t, m.s.Orphaned(ids[0]))
	replacements := m.s.ChooseReplacements(ids...)
	require.Len(t, replacements, 6)
	m.do(m.s.DecideReplacements(replacements...))
	led := map[int32]int{}
	for _, id := range ids {
		p := m.partition(id)
		require.Len(t, p.GetReplicaIds(), 3)
		assert.ElementsMatch(t, []int32{1, 2}, p.GetReplicaIds()[:2], "they come back as they were")
		assert.Equal(t, p.GetReplicaIds()[2], p.GetLeaderId())
		assert.Equal(t, state.ReasonReplicasReplaced, p.GetFenceReason())
		assert.False(t, m.s.Orphaned(id))
		led[p.GetLeaderId()]++
		m.openAt(id, 0)
	}
	assert.Equal(t, map[int32]int{3: 2, 4: 2, 5: 2}, led)
	assert.Equal(t, m.s.Digest(), m.replay().Digest())

	_, err := m.s.DecideReplacements(state.Replacement{Partition: ids[0], BrokerID: 3})
	assert.ErrorAs(t, err, new(*state.TransitionError), "it has a live replica")
	for id := int32(3); id <= 5; id++ {
		m.offline(id)
	}
	assert.Empty(t, m.s.ChooseReplacements(ids...), "nobody is there")
	_, err = m.s.DecideReplacements(state.Replacement{Partition: ids[0], BrokerID: 3})
	assert.ErrorAs(t, err, new(*state.TransitionError), "the broker is not live")
	_, err = m.s.DecideReplacements(state.Replacement{Partition: state.PartitionID{TopicCreationOffset: 777}, BrokerID: 3})
	assert.ErrorAs(t, err, new(*state.UnknownPartitionError))
	m.registerBroker(6)
	r := state.Replacement{Partition: ids[0], BrokerID: 6}
	_, err = m.s.DecideReplacements(r, r)
	assert.ErrorAs(t, err, new(*state.FieldError))
	_, err = m.s.DecideReplacements(make([]state.Replacement, state.MaxElections)...)
	assert.ErrorAs(t, err, new(*state.FieldError))
}

func TestUnpreferred(t *testing.T) {
	m, id := fourBrokers(t)
	all := func() (out []state.Preference) {
		m.s.Unpreferred(func(p state.Preference) bool { out = append(out, p); return true })
		return out
	}
	assert.Empty(t, all(), "the first leads")
	m.elect(id, 3)
	assert.Empty(t, all(), "not open yet")
	m.openAt(id, 0)
	one, _ := m.s.Broker(1)
	first := state.Preference{Partition: id, LeaderID: 3, LeaderEpoch: 2, BrokerID: 1, BrokerEpoch: one.GetBrokerEpoch()}
	require.Equal(t, []state.Preference{first}, all())
	h, ok := m.s.Handover(first)
	require.True(t, ok)
	assert.Equal(t, topicID, h.GetPartition().GetTopicId())
	assert.Equal(t, id.TopicCreationOffset, h.GetPartition().GetTopicCreationOffset())
	assert.Equal(t, int32(1), h.GetBrokerId())
	assert.Equal(t, int32(2), h.GetLeaderEpoch())

	m.offline(1)
	require.Len(t, all(), 1)
	assert.Equal(t, int32(2), all()[0].BrokerID, "the next one")
	_, ok = m.s.Handover(first)
	assert.False(t, ok)
	m.registerBroker(1)
	require.Len(t, all(), 1)
	assert.NotEqual(t, first, all()[0], "another registration")
	m.offline(3)
	assert.Empty(t, all(), "the leader is gone: that is an election's matter")
	m.registerBroker(3)
	assert.Empty(t, all(), "and so is one that registered again")
	_, ok = m.s.Handover(state.Preference{Partition: state.PartitionID{TopicCreationOffset: 777}})
	assert.False(t, ok)
	// Who leads is told how to: it elects the preferred one under its own epoch.
	m.elect(id, 3)
	m.openAt(id, 0)
	now := all()[0]
	m.do(m.s.DecideElectLeader(&metadatav1.ElectLeaderRequest{Topic: "quakes", BrokerId: now.BrokerID, ExpectedLeaderEpoch: now.LeaderEpoch}))
	assert.Equal(t, int32(1), m.partition(id).GetLeaderId())
}

// A broker that leads nothing after failovers must not get all leaders of the
// next topic for it.
func TestANewTopicIsSpreadWhateverTheOthersAre(t *testing.T) {
	m := newMachine(t, 3, 0)
	old := m.createTopic("old", topicID, 30)
	for i := range int32(30) { // 3 leads nothing
		id := state.PartitionID{TopicCreationOffset: old.TopicCreationOffset, Partition: i}
		if m.partition(id).GetLeaderId() == 3 {
			m.elect(id, 1+i%2)
		}
	}
	for n := range 4 {
		topic := m.createTopic(fmt.Sprint("new", n), fmt.Sprintf("00000000-0000-4000-8000-%012x", 16+n), 6)
		led := map[int32]int{}
		for i := range int32(6) {
			p := m.partition(state.PartitionID{TopicCreationOffset: topic.TopicCreationOffset, Partition: i})
			led[p.GetLeaderId()]++
			assert.Equal(t, p.GetLeaderId(), p.GetReplicaIds()[0])
		}
		assert.Equal(t, map[int32]int{1: 2, 2: 2, 3: 2}, led)
	}
	one := m.createTopic("one", "00000000-0000-4000-8000-000000000031", 1)
	assert.Equal(t, int32(3), m.partition(one).GetLeaderId(), "then by the total")
}
