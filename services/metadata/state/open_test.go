package state_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// elected is a partition with [0, 100) committed by epoch 1, whose lineage says
// that epoch 2 began at 120, and that broker 3 was elected for epoch 3.
func elected(t *testing.T) (*machine, state.PartitionID) {
	t.Helper()
	m, ids := opened(t, 1)
	m.commit(m.command(1, 1, m.descriptor(ids[0], 100, 0)))
	m.elect(ids[0], 2)
	m.openAt(ids[0], 120)
	m.elect(ids[0], 3)
	return m, ids[0]
}

func TestOpenEpochAccepts(t *testing.T) {
	tests := map[string]struct {
		start   int64
		lineage []*logv1.LineageEntry // of the leader
		want    []*logv1.LineageEntry // after it
	}{
		"at the object end":                       {100, ofLineage(1, 0), ofLineage(1, 0, 3, 100)},
		"at the object end, knowing more":         {100, ofLineage(1, 0, 2, 120), ofLineage(1, 0, 3, 100)},
		"a kept tail of the last writer below":    {110, ofLineage(1, 0), ofLineage(1, 0, 3, 110)},
		"a kept tail to where the next one began": {120, ofLineage(1, 0), ofLineage(1, 0, 3, 120)},
		"a kept tail of both":                     {130, ofLineage(1, 0, 2, 120), ofLineage(1, 0, 2, 120, 3, 130)},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m, id := elected(t)
			r := m.openRequest(id)
			r.StartOffset, r.Lineage = tc.start, tc.lineage
			events, at, err := m.s.DecideOpenEpoch(r)
			require.NoError(t, err)
			assert.Equal(t, m.s.EndOffset(), at)
			m.apply(events)
			p := m.partition(id)
			assert.True(t, p.GetOpened())
			assert.Equal(t, tc.start, p.GetEpochStart())
			assertLineage(t, tc.want, p.GetLineage())

			// The kept tail is uploaded under the new fence with its writers' epochs.
			d := m.descriptor(id, 140, 0)
			assert.Equal(t, []outcome{accepted}, outcomes(m.commit(m.command(1, 2, d))))
			assert.Equal(t, m.s.Digest(), m.replay().Digest())
		})
	}
}

func ofLineage(pairs ...int64) []*logv1.LineageEntry {
	var out []*logv1.LineageEntry
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, entry(int32(pairs[i]), pairs[i+1]))
	}
	return out
}

func assertLineage(t *testing.T, want, got []*logv1.LineageEntry) {
	t.Helper()
	require.Len(t, got, len(want))
	for i := range want {
		assert.True(t, proto.Equal(want[i], got[i]), "%v, want %v", got, want)
	}
}

func TestOpenEpochRefuses(t *testing.T) {
	tests := map[string]struct {
		change func(r *metadatav1.OpenEpochRequest)
		want   any
	}{
		"short hash":      {func(r *metadatav1.OpenEpochRequest) { r.ObjectEndChainHash = nil }, new(*state.FieldError)},
		"negative start":  {func(r *metadatav1.OpenEpochRequest) { r.StartOffset = -1 }, new(*state.FieldError)},
		"invalid lineage": {func(r *metadatav1.OpenEpochRequest) { r.Lineage = ofLineage(2, 0, 1, 5) }, new(*state.FieldError)},
		"other topic id":  {func(r *metadatav1.OpenEpochRequest) { r.Partition.TopicId = clusterID }, new(*state.UnknownPartitionError)},
		"no partition":    {func(r *metadatav1.OpenEpochRequest) { r.Partition.Partition = 9 }, new(*state.UnknownPartitionError)},
		"older fence":     {func(r *metadatav1.OpenEpochRequest) { r.Fence.LeaderEpoch = 2 }, new(*state.FencedError)},
		"newer fence":     {func(r *metadatav1.OpenEpochRequest) { r.Fence.LeaderEpoch = 4 }, new(*state.FencedError)},
		"other broker":    {func(r *metadatav1.OpenEpochRequest) { r.Fence.BrokerEpoch = 1 }, new(*state.FencedError)},
		"no fence":        {func(r *metadatav1.OpenEpochRequest) { r.Fence = nil }, new(*state.FencedError)},
		"below the object end": {func(r *metadatav1.OpenEpochRequest) { r.StartOffset = 99 },
			new(*state.TransitionError)},
		"reconciled with an older object end": {func(r *metadatav1.OpenEpochRequest) { r.ObjectEndOffset = 0 },
			new(*state.ObjectEndError)},
		"other bytes (H3)": {func(r *metadatav1.OpenEpochRequest) { r.ObjectEndChainHash[3]++ },
			new(*state.ChainMismatchError)},
		"a tail of the wrong writer": {func(r *metadatav1.OpenEpochRequest) { r.StartOffset, r.Lineage = 130, ofLineage(1, 0) },
			new(*state.TransitionError)},
		"a tail of an epoch that never opened": {func(r *metadatav1.OpenEpochRequest) {
			r.StartOffset, r.Lineage = 130, ofLineage(1, 0, 3, 125)
		}, new(*state.TransitionError)},
		"no lineage": {func(r *metadatav1.OpenEpochRequest) { r.Lineage = nil }, new(*state.TransitionError)},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m, id := elected(t)
			r := m.openRequest(id)
			r.StartOffset, r.Lineage = 110, ofLineage(1, 0)
			tc.change(r)
			events, _, err := m.s.DecideOpenEpoch(r)
			assert.Empty(t, events)
			require.ErrorAs(t, err, tc.want)
			m.openAt(id, 100) // and the right one is still welcome
		})
	}
}

func TestOpenEpochRefusesATailThatNobodyWrote(t *testing.T) {
	m := newMachine(t, 3, 1)
	id := m.createTopic("quakes", topicID, 1)
	r := m.openRequest(id)
	r.StartOffset = 5
	_, _, err := m.s.DecideOpenEpoch(r)
	assert.ErrorAs(t, err, new(*state.TransitionError))
}

func TestOpenEpochNeedsALiveSession(t *testing.T) {
	m, id := elected(t)
	r := m.openRequest(id)
	m.offline(3)
	_, _, err := m.s.DecideOpenEpoch(r)
	assert.ErrorAs(t, err, new(*state.StaleBrokerEpochError))
}

func TestOpenEpochRepeated(t *testing.T) {
	m, id := elected(t)
	r := m.openRequest(id)
	r.StartOffset, r.Lineage = 130, ofLineage(1, 0, 2, 120)
	events, at, err := m.s.DecideOpenEpoch(r)
	require.NoError(t, err)
	m.apply(events)
	m.commit(m.command(1, 2, m.descriptor(id, 150, 0))) // the object end moves on

	events, again, err := m.s.DecideOpenEpoch(r)
	require.NoError(t, err, "the same content is success")
	assert.Empty(t, events)
	assert.Equal(t, at, again)
	for name, change := range map[string]func(r *metadatav1.OpenEpochRequest){
		"start":   func(r *metadatav1.OpenEpochRequest) { r.StartOffset = 131 },
		"lineage": func(r *metadatav1.OpenEpochRequest) { r.Lineage = ofLineage(1, 0) },
		"hash":    func(r *metadatav1.OpenEpochRequest) { r.ObjectEndChainHash = make([]byte, 16) },
		"border":  func(r *metadatav1.OpenEpochRequest) { r.ObjectEndOffset = 101 },
	} {
		other := proto.Clone(r).(*metadatav1.OpenEpochRequest)
		change(other)
		_, _, err := m.s.DecideOpenEpoch(other)
		assert.ErrorAs(t, err, new(*state.TransitionError), "another %s is refused", name)
	}
	m.elect(id, 1)
	_, _, err = m.s.DecideOpenEpoch(r)
	assert.ErrorAs(t, err, new(*state.FencedError), "an epoch is never resumed (I2)")
}

// Design review H1: after a cut the mark stands, across elections, until an
// opening at exactly the object end was accepted.
func TestOpenEpochUnderTheExactMark(t *testing.T) {
	m, id := elected(t)
	b, _ := m.s.Broker(1)
	m.apply([]*metadatav1.Event{{Kind: &metadatav1.Event_PartitionFenced{PartitionFenced: &metadatav1.PartitionFenced{
		TopicCreationOffset: id.TopicCreationOffset, LeaderEpoch: 4, LeaderId: 1, BrokerEpoch: b.GetBrokerEpoch(),
		StartRule: metadatav1.StartRule_START_RULE_EXACT, Reason: "cut",
	}}}})
	m.elect(id, 2)
	assert.Equal(t, metadatav1.StartRule_START_RULE_EXACT, m.partition(id).GetStartRule(), "a plain election leaves the mark")
	r := m.openRequest(id)
	r.StartOffset, r.Lineage = 110, ofLineage(1, 0)
	_, _, err := m.s.DecideOpenEpoch(r)
	require.ErrorAs(t, err, new(*state.TransitionError))
	assert.Contains(t, err.Error(), "cut the tail")
	m.openAt(id, 100)
	assert.Equal(t, metadatav1.StartRule_START_RULE_FREE, m.partition(id).GetStartRule())
	m.elect(id, 3)
	m.openAt(id, 115)
}

func TestOpenedEpochsWithoutRecordsLeaveTheLineage(t *testing.T) {
	m, ids := opened(t, 1)
	for range 5 {
		m.elect(ids[0], 2)
		m.openAt(ids[0], 0)
	}
	assertLineage(t, ofLineage(6, 0), m.partition(ids[0]).GetLineage())
	first := m.descriptor(ids[0], 10, 0)
	assert.Nil(t, first.GetPredecessor(), "nobody wrote before the first record")
	m.commit(m.command(1, 1, first))
	assert.Equal(t, int32(6), m.descriptor(ids[0], 20, 0).GetPredecessor().GetLeaderEpoch())
}
