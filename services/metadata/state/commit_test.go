package state_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

type outcome = metadatav1.RangeOutcome

// opened is a machine with one topic of n partitions, all opened at 0.
func opened(t testing.TB, n int32) (*machine, []state.PartitionID) {
	t.Helper()
	m := newMachine(t, 3, 2)
	topic := m.createTopic("quakes", topicID, n)
	ids := make([]state.PartitionID, n)
	for i := range ids {
		ids[i] = state.PartitionID{TopicCreationOffset: topic.TopicCreationOffset, Partition: int32(i)}
		m.openAt(ids[i], 0)
	}
	return m, ids
}

// Field report B105: verdicts are per range, and a replay of the log sees what
// the first reader saw.
func TestCommitJudgesEveryRangeForItself(t *testing.T) {
	m, ids := opened(t, 3)
	m.commit(m.command(1, 1, m.descriptor(ids[0], 100, 0), m.descriptor(ids[1], 200, 100), m.descriptor(ids[2], 40, 200)))
	third := m.descriptor(ids[2], 60, 0)
	m.commit(m.command(1, 2, third))

	p1 := m.descriptor(ids[0], 200, 0)
	p2 := m.descriptor(ids[1], 300, 100)
	p2.BaseOffset = 210 // expected 200
	p3 := proto.Clone(third).(*logv1.RangeDescriptor)
	p3.Position = 200 // [40, 60), expected 60
	r := m.commit(m.command(1, 3, p1, p2, p3))

	assert.Equal(t, []outcome{accepted, gap, already}, outcomes(r))
	ends := []int64{200, 200, 60}
	for i, id := range ids {
		assert.Equal(t, ends[i], m.partition(id).GetObjectEndOffset())
		assert.Equal(t, ends[i], r.GetVerdicts()[i].GetObjectEndOffset())
		assert.Equal(t, m.partition(id).GetObjectEndChainHash(), r.GetVerdicts()[i].GetObjectEndChainHash())
		assert.True(t, r.GetVerdicts()[i].GetOpened())
		assert.Nil(t, r.GetVerdicts()[i].NextEpochStart)
	}
	ranges, more := m.s.Ranges(ids[0], 100, 10)
	require.False(t, more)
	require.Len(t, ranges, 1)
	assert.Equal(t, int64(100), ranges[0].GetBaseOffset())
	assert.Equal(t, int64(3), ranges[0].GetObject().GetSequence())
	assert.Equal(t, m.s.Digest(), m.replay().Digest())
}

func TestCommitRefusesARangeThatDoesNotFit(t *testing.T) {
	tests := map[string]struct {
		change func(d *logv1.RangeDescriptor)
		want   outcome
	}{
		"as it should be":           {func(*logv1.RangeDescriptor) {}, accepted},
		"other topic id":            {func(d *logv1.RangeDescriptor) { d.Partition.TopicId = clusterID }, unknown},
		"other life of the topic":   {func(d *logv1.RangeDescriptor) { d.Partition.TopicCreationOffset-- }, unknown},
		"no such index":             {func(d *logv1.RangeDescriptor) { d.Partition.Partition = 7 }, unknown},
		"negative index":            {func(d *logv1.RangeDescriptor) { d.Partition.Partition = -1 }, unknown},
		"no partition":              {func(d *logv1.RangeDescriptor) { d.Partition = nil }, unknown},
		"no fence":                  {func(d *logv1.RangeDescriptor) { d.Fence = nil }, malformed},
		"empty":                     {func(d *logv1.RangeDescriptor) { d.EndOffset = d.BaseOffset }, malformed},
		"backwards":                 {func(d *logv1.RangeDescriptor) { d.EndOffset = d.BaseOffset - 1 }, malformed},
		"negative base":             {func(d *logv1.RangeDescriptor) { d.BaseOffset = math.MinInt64 }, malformed},
		"short base hash":           {func(d *logv1.RangeDescriptor) { d.BaseChainHash = d.BaseChainHash[:15] }, malformed},
		"no end hash":               {func(d *logv1.RangeDescriptor) { d.EndChainHash = nil }, malformed},
		"long end hash":             {func(d *logv1.RangeDescriptor) { d.EndChainHash = make([]byte, 17) }, malformed},
		"negative position":         {func(d *logv1.RangeDescriptor) { d.Position = -1 }, malformed},
		"no bytes":                  {func(d *logv1.RangeDescriptor) { d.LengthBytes = 0 }, malformed},
		"past the object":           {func(d *logv1.RangeDescriptor) { d.Position = 1<<20 - 99 }, malformed},
		"position overflows":        {func(d *logv1.RangeDescriptor) { d.Position = math.MaxInt64 }, malformed},
		"length overflows":          {func(d *logv1.RangeDescriptor) { d.LengthBytes = math.MaxInt64 }, malformed},
		"no batches":                {func(d *logv1.RangeDescriptor) { d.BatchCount = 0 }, malformed},
		"more batches than offsets": {func(d *logv1.RangeDescriptor) { d.BatchCount = 41 }, malformed},
		"no lineage":                {func(d *logv1.RangeDescriptor) { d.Lineage = nil }, malformed},
		"lineage begins above":      {func(d *logv1.RangeDescriptor) { d.Lineage = []*logv1.LineageEntry{entry(1, 61)} }, malformed},
		"lineage entry of nobody":   {func(d *logv1.RangeDescriptor) { d.Lineage = []*logv1.LineageEntry{{}} }, malformed},
		"lineage above the end":     {func(d *logv1.RangeDescriptor) { d.Lineage = append(d.Lineage, entry(2, 100)) }, malformed},
		"negative epoch start":      {func(d *logv1.RangeDescriptor) { d.EpochStart = -1 }, malformed},
		"other epoch start":         {func(d *logv1.RangeDescriptor) { d.EpochStart = 1 }, malformed},
		"older leader epoch":        {func(d *logv1.RangeDescriptor) { d.Fence.LeaderEpoch-- }, fenced},
		"newer leader epoch":        {func(d *logv1.RangeDescriptor) { d.Fence.LeaderEpoch++ }, fenced},
		"other broker epoch":        {func(d *logv1.RangeDescriptor) { d.Fence.BrokerEpoch-- }, fenced},
		"other incarnation":         {func(d *logv1.RangeDescriptor) { d.Fence.Incarnation++ }, fenced},
		"mirrored":                  {func(d *logv1.RangeDescriptor) { d.Fence.LinkGeneration = 1 }, fenced},
		"above the object end":      {func(d *logv1.RangeDescriptor) { d.BaseOffset = 61 }, gap},
		"inside a committed range":  {func(d *logv1.RangeDescriptor) { d.BaseOffset, d.EndOffset = 45, 55 }, already},
		"over the object end":       {func(d *logv1.RangeDescriptor) { d.BaseOffset = 45 }, already},
		"other bytes to the object end": {func(d *logv1.RangeDescriptor) {
			d.BaseOffset, d.EndOffset, d.BatchCount = 45, 60, 1
		}, mismatch},
		"other bytes to a border": {func(d *logv1.RangeDescriptor) { d.BaseOffset, d.EndOffset = 10, 40 }, mismatch},
		"other bytes below a border": {func(d *logv1.RangeDescriptor) {
			d.BaseOffset, d.BaseChainHash = 40, make([]byte, 16)
		}, mismatch},
		"other bytes from the start": {func(d *logv1.RangeDescriptor) { d.BaseOffset, d.EndOffset = 0, 30 }, mismatch},
		"other bytes at the base":    {func(d *logv1.RangeDescriptor) { d.BaseChainHash = make([]byte, 16) }, mismatch},
		"no predecessor":             {func(d *logv1.RangeDescriptor) { d.Predecessor = nil }, mismatch},
		"other predecessor":          {func(d *logv1.RangeDescriptor) { d.Predecessor = &logv1.Leadership{Incarnation: 5, LeaderEpoch: 1} }, mismatch},
		"other writer":               {func(d *logv1.RangeDescriptor) { d.Lineage = []*logv1.LineageEntry{entry(2, 0)} }, mismatch},
		"one writer too many":        {func(d *logv1.RangeDescriptor) { d.Lineage = append(d.Lineage, entry(2, 80)) }, mismatch},
		"the writer began elsewhere": {func(d *logv1.RangeDescriptor) { d.Lineage = []*logv1.LineageEntry{entry(1, 1)} }, mismatch},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m, ids := opened(t, 2)
			m.commit(m.command(1, 1, m.descriptor(ids[0], 40, 0)))
			m.commit(m.command(1, 2, m.descriptor(ids[0], 60, 0)))
			before := m.s.Digest()
			d := m.descriptor(ids[0], 100, 0)
			tc.change(d)
			other := m.descriptor(ids[1], 5, 0)
			other.Position = 500
			events, r, err := m.s.DecideCommit(m.command(2, 1, d, other))
			require.NoError(t, err)
			assert.Equal(t, before, m.s.Digest(), "a decider changes nothing")
			assert.Equal(t, []outcome{tc.want, accepted}, outcomes(r), "the neighbour is judged for itself")
			m.apply(events)
			assert.Equal(t, m.partition(ids[0]).GetObjectEndOffset() == 100, tc.want == accepted)
			assert.Equal(t, int64(5), m.partition(ids[1]).GetObjectEndOffset())
			assert.Equal(t, m.s.Digest(), m.replay().Digest())
		})
	}
}

func entry(epoch int32, start int64) *logv1.LineageEntry {
	return &logv1.LineageEntry{Leadership: &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: epoch}, StartOffset: start}
}

func TestCommitRefusesRangesOutOfTheOrderOfTheirBytes(t *testing.T) {
	m, ids := opened(t, 2)
	r := m.commit(m.command(1, 1, m.descriptor(ids[0], 10, 50), m.descriptor(ids[1], 10, 100)))
	assert.Equal(t, []outcome{accepted, malformed}, outcomes(r))
}

func TestCommitRefusesAMalformedCommandAsAWhole(t *testing.T) {
	m, ids := opened(t, 1)
	for name, change := range map[string]func(*metadatav1.CommitCombinedSegmentRequest){
		"object":          func(r *metadatav1.CommitCombinedSegmentRequest) { r.Object = nil },
		"object.sequence": func(r *metadatav1.CommitCombinedSegmentRequest) { r.Object.Sequence = 0 },
		"object.attempt":  func(r *metadatav1.CommitCombinedSegmentRequest) { r.Object.Attempt = 1 << 16 },
		"size_bytes":      func(r *metadatav1.CommitCombinedSegmentRequest) { r.SizeBytes = 0 },
		"ranges":          func(r *metadatav1.CommitCombinedSegmentRequest) { r.Ranges = nil },
	} {
		r := m.command(1, 1, m.descriptor(ids[0], 10, 0))
		change(r)
		_, _, err := m.s.DecideCommit(r)
		var field *state.FieldError
		require.ErrorAs(t, err, &field, name)
		assert.Equal(t, name, field.Field)
	}
	r := m.command(1, 1, m.descriptor(ids[0], 10, 0))
	r.ClusterId = topicID
	_, _, err := m.s.DecideCommit(r)
	assert.ErrorAs(t, err, new(*state.ClusterMismatchError))
	r = m.command(1, 1, m.descriptor(ids[0], 10, 0))
	r.Object.Incarnation++ // the rlm epoch of another log means nothing here
	_, _, err = m.s.DecideCommit(r)
	assert.ErrorAs(t, err, new(*state.IncarnationMismatchError))
	r = m.command(1, 1)
	for range state.MaxRanges + 1 {
		r.Ranges = append(r.Ranges, &logv1.RangeDescriptor{})
	}
	_, _, err = m.s.DecideCommit(r)
	assert.ErrorAs(t, err, new(*state.FieldError))
}

func TestCommitJudgesTheSecondRangeOfAPartitionBehindTheFirst(t *testing.T) {
	m, ids := opened(t, 2)
	first := m.descriptor(ids[0], 10, 0)
	second := behind(first, 25)
	other := m.descriptor(ids[1], 3, 200)
	third := behind(second, 30)
	third.Position = 300
	again := proto.Clone(second).(*logv1.RangeDescriptor)
	again.Position = 400
	r := m.commit(m.command(1, 1, first, second, other, third, again))
	assert.Equal(t, []outcome{accepted, accepted, accepted, accepted, already}, outcomes(r))
	for _, i := range []int{0, 1, 3, 4} {
		assert.Equal(t, int64(30), r.GetVerdicts()[i].GetObjectEndOffset(), "as it is after the command")
	}
	assert.Equal(t, int64(4), m.s.RangeCount())
	assert.Equal(t, 1, m.s.ObjectCount())

	lost := m.descriptor(ids[0], 40, 0)
	lost.BaseChainHash = make([]byte, 16)
	r = m.commit(m.command(1, 2, lost, behind(lost, 50)))
	assert.Equal(t, []outcome{mismatch, gap}, outcomes(r), "behind a refused range nothing fits")
	assert.Equal(t, int64(-1), r.GetMetadataOffset())
}

func TestCommitRepeatedGetsTheFirstVerdict(t *testing.T) {
	m, ids := opened(t, 2)
	late := m.descriptor(ids[1], 10, 100)
	late.BaseOffset, late.EndOffset = 5, 15 // a gap now, not any more later
	cmd := m.command(1, 7, m.descriptor(ids[0], 10, 0), late)
	first := m.commit(cmd)
	require.Equal(t, []outcome{accepted, gap}, outcomes(first))

	m.commit(m.command(2, 1, m.descriptor(ids[1], 5, 0))) // closes the gap
	end := m.s.EndOffset()
	for range 3 {
		repeat := m.commit(cmd)
		assert.Equal(t, outcomes(first), outcomes(repeat), "what was refused once is not accepted by a repeat (F1)")
		assert.Equal(t, first.GetMetadataOffset(), repeat.GetMetadataOffset())
		assert.Equal(t, int64(5), repeat.GetVerdicts()[1].GetObjectEndOffset(), "the facts are of today")
	}
	assert.Equal(t, end, m.s.EndOffset(), "and nothing is written")

	// Whoever is controller next knows it too, and so does the rlm after its session ran out.
	replica := m.replay()
	_, repeat, err := replica.DecideCommit(cmd)
	require.NoError(t, err)
	assert.Equal(t, outcomes(first), outcomes(repeat))
	m.registerRLM(1)
	afterwards := m.commit(cmd)
	assert.Equal(t, outcomes(first), outcomes(afterwards))
	assert.True(t, afterwards.GetRlmEpochClosed())
	m.registerRLM(1)
	assert.Equal(t, outcomes(first), outcomes(m.commit(cmd)), "no newer command, so it is remembered")
	m.commit(m.command(1, 1, m.descriptor(ids[0], 20, 0)))
	m.registerRLM(1)
	r := m.commit(cmd)
	assert.Equal(t, []outcome{notJudged, notJudged}, outcomes(r), "forgotten, so not judged")
	assert.True(t, r.GetRlmEpochClosed())

	other := m.command(2, 1, m.descriptor(ids[1], 20, 0))
	other.Crc32C++
	_, _, err = m.s.DecideCommit(other)
	assert.ErrorAs(t, err, new(*state.ConflictError), "another command under the same identity")
}

func TestCommitIsJudgedOnlyInTheOrderOfItsEpoch(t *testing.T) {
	m, ids := opened(t, 1)
	m.commit(m.command(1, 5, m.descriptor(ids[0], 10, 0)))
	next := m.descriptor(ids[0], 20, 0)

	hedge := m.command(1, 5, next)
	hedge.Object.Attempt = 2
	for name, cmd := range map[string]*metadatav1.CommitCombinedSegmentRequest{
		"hedge under the accepted sequence": hedge, "older sequence": m.command(1, 4, next),
	} {
		r := m.commit(cmd)
		assert.Equal(t, []outcome{notJudged}, outcomes(r), name)
		assert.False(t, r.GetRlmEpochClosed(), name)
		assert.Equal(t, int64(-1), r.GetMetadataOffset(), name)
		assert.Equal(t, int64(10), r.GetVerdicts()[0].GetObjectEndOffset(), name)
		assert.True(t, m.s.Settled(cmd.GetObject()), name)
	}
	foreign := m.command(1, 9, next)
	foreign.RlmId = 2
	never := m.command(1, 9, next)
	never.Object.RlmEpoch = m.s.EndOffset() + 1000
	nobody := m.command(1, 9, next)
	nobody.RlmId = 99
	for name, cmd := range map[string]*metadatav1.CommitCombinedSegmentRequest{
		"another rlm's epoch": foreign, "an epoch never given": never, "an unknown rlm": nobody,
	} {
		r := m.commit(cmd)
		assert.Equal(t, []outcome{notJudged}, outcomes(r), name)
		assert.True(t, r.GetRlmEpochClosed(), name)
	}
	assert.False(t, m.s.Settled(never.GetObject()), "what a state does not know is not settled")
	assert.False(t, m.s.Settled(m.command(1, 9, next).GetObject()))

	r := m.commit(m.command(1, 900, next))
	assert.Equal(t, []outcome{accepted}, outcomes(r), "gaps upward are fine")

	refused := m.command(1, 901, next)
	require.Equal(t, []outcome{already}, outcomes(m.commit(refused)))
	assert.False(t, m.s.Settled(refused.GetObject()), "nothing accepted, so the sequence is not used up")
	info, _ := m.s.RemoteLogManager(1)
	assert.Equal(t, int64(900), info.GetLastAcceptedSequence())
}

// Field report B111: a writer that slept is not acked for what came after it.
func TestCommitOfAClosedEpochIsNotJudged(t *testing.T) {
	m, ids := opened(t, 1)
	stalled := m.command(1, 21, m.descriptor(ids[0], 10, 0))
	info, _ := m.s.RemoteLogManager(1)
	m.do(m.s.DecideCloseRemoteLogManager(1, info.GetRlmEpoch(), state.ReasonSessionExpired))
	assert.True(t, m.s.Settled(stalled.GetObject()), "its objects may be deleted")
	events, err := m.s.DecideCloseRemoteLogManager(1, info.GetRlmEpoch(), state.ReasonOperator)
	require.NoError(t, err)
	assert.Empty(t, events, "closing again is true already")
	_, err = m.s.DecideCloseRemoteLogManager(1, m.s.EndOffset(), state.ReasonOperator)
	assert.ErrorAs(t, err, new(*state.FieldError))

	r := m.commit(stalled)
	assert.Equal(t, []outcome{notJudged}, outcomes(r))
	assert.True(t, r.GetRlmEpochClosed())

	m.registerRLM(1)
	fresh := m.command(1, 1, m.descriptor(ids[0], 10, 0))
	assert.Equal(t, []outcome{accepted}, outcomes(m.commit(fresh)))
	assert.Equal(t, []outcome{notJudged}, outcomes(m.commit(stalled)))
	assert.Equal(t, m.s.Digest(), m.replay().Digest())
}

// Field report B067: an upload of the old leader that comes late does not get
// between the new leader's ranges.
func TestCommitOfADeposedLeaderIsFenced(t *testing.T) {
	m, ids := opened(t, 1)
	first := m.descriptor(ids[0], 41, 0)
	m.commit(m.command(1, 1, first))
	held := m.command(1, 2, behind(first, 51)) // [41, 51) of broker 1's epoch 1
	m.elect(ids[0], 2)
	between := m.commit(held)
	assert.Equal(t, []outcome{fenced}, outcomes(between), "fenced, though nobody opened yet")
	assert.Nil(t, between.GetVerdicts()[0].NextEpochStart)
	assert.False(t, between.GetVerdicts()[0].GetOpened())
	assert.Equal(t, []outcome{fenced}, outcomes(m.commit(m.command(2, 1, m.descriptor(ids[0], 50, 0)))), "nor may the elected one, yet")

	m.openAt(ids[0], 41)
	m.commit(m.command(2, 1, m.descriptor(ids[0], 151, 0)))
	r := m.commit(held)
	assert.Equal(t, []outcome{fenced}, outcomes(r))
	v := r.GetVerdicts()[0]
	assert.Equal(t, int64(151), v.GetObjectEndOffset())
	assert.Equal(t, int64(41), v.GetNextEpochStart(), "it may ack what lies below 41 and nothing above (H15)")
	assert.Equal(t, int32(2), v.GetFence().GetLeaderEpoch())
	ranges, _ := m.s.Ranges(ids[0], 0, 10)
	require.Len(t, ranges, 2)
	for _, offset := range []int64{30, 40, 41, 120} {
		at, _ := m.s.Ranges(ids[0], offset, 1)
		want := int32(1)
		if offset >= 41 {
			want = 2
		}
		assert.Equal(t, want, at[0].GetLeaderEpoch())
	}

	foreign := behind(first, 60)
	foreign.Fence.Incarnation++
	r = m.commit(m.command(2, 2, foreign))
	assert.Equal(t, []outcome{fenced}, outcomes(r))
	assert.Equal(t, int64(0), r.GetVerdicts()[0].GetNextEpochStart(), "a leader of another incarnation may ack nothing")
}

// Field report B118: two leaders hold the same batch of a producer in two
// objects; one of the two gets the offset.
func TestCommitOfTwoLeadersAcceptsOne(t *testing.T) {
	m, ids := opened(t, 1)
	old := m.command(1, 1, m.descriptor(ids[0], 13, 0))
	m.elect(ids[0], 3)
	m.openAt(ids[0], 0)
	young := m.command(2, 1, m.descriptor(ids[0], 13, 0))
	assert.Equal(t, []outcome{accepted}, outcomes(m.commit(young)))
	assert.Equal(t, []outcome{fenced}, outcomes(m.commit(old)))
	ranges, _ := m.s.Ranges(ids[0], 0, 10)
	require.Len(t, ranges, 1)
	assert.Equal(t, young.GetObject().GetRlmEpoch(), ranges[0].GetObject().GetRlmEpoch())
}

// Design review H2: a broker that came back fast does not resume its epoch.
func TestCommitUnderAnOlderRegistrationIsFenced(t *testing.T) {
	m, ids := opened(t, 1)
	p := m.partition(ids[0])
	inFlight := m.command(1, 1, m.descriptor(ids[0], 10, 0))
	epoch := m.registerBroker(p.GetLeaderId())
	assert.False(t, m.partition(ids[0]).GetOpened())
	assert.Equal(t, []outcome{fenced}, outcomes(m.commit(inFlight)))

	resumed := m.descriptor(ids[0], 10, 0)
	resumed.Fence.BrokerEpoch = epoch
	assert.Equal(t, []outcome{fenced}, outcomes(m.commit(m.command(1, 2, resumed))), "it was not elected under its new epoch")
	r := m.openRequest(ids[0])
	r.Fence.BrokerEpoch = epoch
	_, _, err := m.s.DecideOpenEpoch(r)
	assert.ErrorAs(t, err, new(*state.FencedError))

	m.elect(ids[0], p.GetLeaderId())
	m.openAt(ids[0], 0)
	assert.Equal(t, []outcome{fenced}, outcomes(m.commit(inFlight)))
	assert.Equal(t, []outcome{accepted}, outcomes(m.commit(m.command(1, 3, m.descriptor(ids[0], 10, 0)))))
}

func TestCommitToADeletedTopicIsUnknown(t *testing.T) {
	m, ids := opened(t, 1)
	m.commit(m.command(1, 1, m.descriptor(ids[0], 10, 0)))
	late := m.command(1, 2, m.descriptor(ids[0], 20, 0))
	m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "quakes"}))
	assert.Equal(t, 0, m.s.ObjectCount())
	assert.Equal(t, int64(0), m.s.RangeCount())
	r := m.commit(late)
	assert.Equal(t, []outcome{unknown}, outcomes(r))
	assert.Equal(t, int64(-1), r.GetMetadataOffset())

	second := m.createTopic("quakes", "00000000-0000-4000-8000-000000000002", 1)
	m.openAt(second, 0)
	assert.Equal(t, []outcome{unknown}, outcomes(m.commit(late)), "the name's second life is another topic (F7)")
	assert.Equal(t, []outcome{accepted}, outcomes(m.commit(m.command(1, 3, m.descriptor(second, 5, 0)))))
	assert.Equal(t, m.s.Digest(), m.replay().Digest())
}

func TestCommitKeepsOffsetsPastThirtyTwoBits(t *testing.T) {
	m, ids := opened(t, 1)
	far := int64(1)<<40 + 17 // field report B099
	m.commit(m.command(1, 1, m.descriptor(ids[0], far, 0)))
	m.commit(m.command(1, 2, m.descriptor(ids[0], math.MaxInt64, 0)))
	ranges, _ := m.s.Ranges(ids[0], far-1, 10)
	require.Len(t, ranges, 2)
	assert.Equal(t, far, ranges[1].GetBaseOffset())
	assert.Equal(t, int64(math.MaxInt64), ranges[1].GetEndOffset())
	full := m.descriptor(ids[0], math.MaxInt64, 0)
	assert.Equal(t, []outcome{malformed}, outcomes(m.commit(m.command(1, 3, full))))
}

func TestRangesArePagedByOffset(t *testing.T) {
	m, ids := opened(t, 1)
	for i := range int64(300) {
		m.commit(m.command(1, i+1, m.descriptor(ids[0], (i+1)*10, 0)))
	}
	var got []*metadatav1.SegmentRange
	for from, more := int64(0), true; more; {
		var page []*metadatav1.SegmentRange
		page, more = m.s.Ranges(ids[0], from, 7)
		got = append(got, page...)
		from = got[len(got)-1].GetEndOffset()
	}
	require.Len(t, got, 300)
	for i, r := range got {
		assert.Equal(t, int64(i)*10, r.GetBaseOffset())
		assert.Equal(t, int64(i)*10+10, r.GetEndOffset())
	}
	middle, more := m.s.Ranges(ids[0], 1234, 1)
	assert.True(t, more)
	assert.Equal(t, int64(1230), middle[0].GetBaseOffset())
	none, more := m.s.Ranges(ids[0], 3000, 5)
	assert.Empty(t, none)
	assert.False(t, more)

	resets := m.s.Reset(ids[0], 1234, 100)
	require.Len(t, resets, 2)
	assert.True(t, resets[0].GetMore())
	assert.Len(t, resets[0].GetRanges(), 100)
	assert.False(t, resets[1].GetMore())
	assert.Len(t, resets[1].GetRanges(), 77)
}

// The largest command becomes one entry of at most 512 KiB (I6), in a cluster
// as old and large as any.
func TestLargestCommitFitsInOneEntry(t *testing.T) {
	combined := &metadatav1.CombinedSegmentCommitted{
		RlmId: math.MaxInt32, SizeBytes: 1 << 40, Crc32C: math.MaxUint32, SubmittedRanges: state.MaxRanges,
		Object: &logv1.ObjectRef{Incarnation: math.MaxInt32, RlmEpoch: 1 << 40, Sequence: 1 << 48, Attempt: 1 << 15},
	}
	e := &metadatav1.Entry{Offset: 1 << 40, Incarnation: math.MaxInt32, ControllerEpoch: 1 << 40, FeatureLevel: 1, WriteId: make([]byte, 16)}
	e.Events = append(e.Events, &metadatav1.Event{Kind: &metadatav1.Event_CombinedSegmentCommitted{CombinedSegmentCommitted: combined}})
	for i := range int32(state.MaxRanges) {
		e.Events = append(e.Events, &metadatav1.Event{Kind: &metadatav1.Event_RangeCommitted{RangeCommitted: &metadatav1.RangeCommitted{
			TopicCreationOffset: 1 << 40, Partition: state.MaxPartitions, BaseOffset: 1 << 55, EndOffset: 1 << 55, LeaderEpoch: 1 << 20,
			EpochStart: 1 << 55, Predecessor: &logv1.Leadership{Incarnation: math.MaxInt32, LeaderEpoch: 1 << 20},
			EndChainHash: make([]byte, 16), Position: 1 << 34, LengthBytes: 1 << 30, Crc32C: math.MaxUint32,
			MaxTimestampMs: 1 << 42, ProducersComplete: true, RangeIndex: i,
		}}})
	}
	size := proto.Size(e)
	t.Logf("%d bytes, %.1f per range", size, float64(size)/state.MaxRanges)
	assert.LessOrEqual(t, size, 512<<10)
}
