package state_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/invariant"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// plain is a slow, plain model of one partition: what the rules say, with
// everything remembered.
type plain struct {
	id       state.PartitionID
	topicID  string
	epoch    int32
	leader   int32
	broker   int64
	opened   bool
	start    int64
	lineage  []*logv1.LineageEntry
	borders  []border // committed, from offset 0
	openings map[int32]bool
}

type border struct {
	offset int64
	hash   [16]byte
	object string
}

func (p *plain) end() border { return p.borders[len(p.borders)-1] }

func (p *plain) at(offset int64) ([16]byte, bool) {
	for _, b := range p.borders {
		if b.offset == offset {
			return b.hash, true
		}
	}
	return [16]byte{}, false
}

// random drives a machine with random commands, and the plain model beside it.
type random struct {
	*machine
	r       *rand.Rand
	plain   []*plain
	replica *state.State
	sent    []*metadatav1.CommitCombinedSegmentRequest // earlier commands, to be repeated
	seq     map[int32]int64
	topics  int
	hashes  uint64
	stats   map[string]int
	watched map[state.PartitionID]*metadatav1.SegmentsReset
}

func TestRandomCommands(t *testing.T) {
	runs := 150
	if testing.Short() || invariant.Enabled {
		runs = 25
	}
	stats := map[string]int{}
	for seed := range uint64(runs) {
		w := &random{machine: newMachine(t, 3, 2), r: rand.New(rand.NewPCG(seed, 5)), seq: map[int32]int64{}, stats: stats,
			watched: map[state.PartitionID]*metadatav1.SegmentsReset{}}
		w.replica = w.replay()
		for step := range 160 {
			w.step()
			if t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
			w.check()
		}
		require.Equal(t, w.s.Digest(), w.replay().Digest(), "seed %d: a replay of the log differs", seed)
	}
	t.Log(stats)
	for _, outcome := range []outcome{accepted, fenced, gap, already, mismatch, unknown, notJudged} {
		require.Positive(t, stats[outcome.String()], "%v never happened", outcome)
	}
	for _, kind := range []string{"repeat", "opened", "open refused", "elected", "deleted", "expired", "reassigned", "replaced"} {
		require.Positive(t, stats[kind], "%s never happened", kind)
	}
}

// write applies events to both; the replica reads the bytes.
func (w *random) write(events []*metadatav1.Event) int64 {
	at := w.apply(events)
	e := &metadatav1.Entry{}
	require.NoError(w.t, proto.Unmarshal(w.log[len(w.log)-1], e))
	require.NoError(w.t, w.replica.Apply(e))
	for _, event := range w.replica.SegmentEvents(e) {
		w.watch(event)
	}
	return at
}

// watch folds events into what a subscriber knows of a partition.
func (w *random) watch(e *metadatav1.SegmentEvent) {
	id := state.PartitionID{TopicCreationOffset: e.GetPartition().GetTopicCreationOffset(), Partition: e.GetPartition().GetPartition()}
	known := w.watched[id]
	if known == nil {
		known = &metadatav1.SegmentsReset{Partition: e.GetPartition(), ObjectEndChainHash: make([]byte, 16)}
		w.watched[id] = known
	}
	switch kind := e.GetKind().(type) {
	case *metadatav1.SegmentEvent_RangeCommitted:
		r := kind.RangeCommitted
		known.Ranges = append(known.Ranges, r)
		known.ObjectEndOffset, known.ObjectEndChainHash = r.GetEndOffset(), r.GetEndChainHash()
	case *metadatav1.SegmentEvent_FenceRaised:
		f := kind.FenceRaised
		known.Fence, known.LeaderId, known.StartRule, known.Opened = f.GetFence(), f.GetLeaderId(), f.GetStartRule(), false
	case *metadatav1.SegmentEvent_OpenedEpoch:
		known.EpochStart, known.Lineage, known.Opened = kind.OpenedEpoch.GetStartOffset(), kind.OpenedEpoch.GetLineage(), true
	case *metadatav1.SegmentEvent_Removed:
		delete(w.watched, id)
	}
}

func (w *random) step() {
	before := w.s.Digest()
	unchanged := func() { require.Equal(w.t, before, w.s.Digest(), "a decider changed the state") }
	broker := w.r.Int32N(3) + 1
	rlm := w.r.Int32N(2) + 1
	switch n := w.r.IntN(100); {
	case n < 3:
		w.topics++
		id := fmt.Sprintf("00000000-0000-4000-8000-%012x", w.topics)
		events, err := w.s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: fmt.Sprint("t", w.topics), PartitionCount: 2}, id)
		require.NoError(w.t, err)
		unchanged()
		at := w.write(events)
		for i := range int32(2) {
			p := &plain{id: state.PartitionID{TopicCreationOffset: at, Partition: i}, topicID: id, borders: []border{{}}, openings: map[int32]bool{}}
			w.plain = append(w.plain, p)
		}
		w.fence(events)
	case n < 4:
		if len(w.plain) > 2 {
			victim := w.plain[w.r.IntN(len(w.plain))].id.TopicCreationOffset
			v, _ := w.s.View(state.PartitionID{TopicCreationOffset: victim})
			w.write(must(w.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: v.Topic})))
			w.plain = slices.DeleteFunc(w.plain, func(p *plain) bool { return p.id.TopicCreationOffset == victim })
			w.stats["deleted"]++
		}
	case n < 7:
		w.write(must(w.s.DecideRegisterBroker(brokerRequest(broker))))
	case n < 9:
		b, _ := w.s.Broker(broker)
		if events := w.s.DecideBrokerOffline(broker, b.GetBrokerEpoch(), state.ReasonSessionExpired); len(events) > 0 {
			unchanged()
			w.write(events)
		}
	case n < 13:
		w.registerRandomRLM(rlm)
	case n < 15:
		info, _ := w.s.RemoteLogManager(rlm)
		events, err := w.s.DecideCloseRemoteLogManager(rlm, info.GetRlmEpoch(), state.ReasonSessionExpired)
		require.NoError(w.t, err)
		if len(events) > 0 {
			w.write(events)
			w.stats["expired"]++
		}
	case n < 16:
		w.write(must(w.s.DecideControllerElected(broker, "m:1")))
	case n < 19:
		b, _ := w.s.Broker(broker)
		events, _, err := w.s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{BrokerId: broker, BrokerEpoch: b.GetBrokerEpoch()})
		if err == nil {
			w.write(events)
		}
	case n < 26:
		w.electSome()
	case n < 29:
		w.place()
	case n < 52:
		for range min(len(w.plain), 4) {
			w.open(w.plain[w.r.IntN(len(w.plain))])
		}
	case n < 58 && len(w.sent) > 0:
		w.judge(w.sent[w.r.IntN(len(w.sent))])
	default:
		if info, _ := w.s.RemoteLogManager(rlm); !info.GetOpen() && w.r.IntN(3) > 0 {
			w.registerRandomRLM(rlm)
		}
		if cmd := w.randomCommand(rlm); cmd != nil {
			w.judge(cmd)
		}
	}
}

func must(events []*metadatav1.Event, err error) []*metadatav1.Event {
	if err != nil {
		panic(err)
	}
	return events
}

func (w *random) registerRandomRLM(id int32) {
	w.write(must(w.s.DecideRegisterRemoteLogManager(&metadatav1.RegisterRemoteLogManagerRequest{RlmId: id, Address: "r:1"})))
	w.seq[id] = 0
}

func (w *random) electSome() {
	var elections []state.Election
	w.s.Undecided(func(id state.PartitionID) bool {
		f := fresh
		f.SinceFenced, f.LeaderGone = f.OpenTimeout*time.Duration(w.r.IntN(2)), f.SessionTimeout*time.Duration(w.r.IntN(2))
		if e, needed, _ := w.s.ChooseLeader(id, f); needed {
			elections = append(elections, e)
		}
		return len(elections) < 5
	})
	if w.r.IntN(6) == 0 && len(w.plain) > 0 {
		p := w.plain[w.r.IntN(len(w.plain))]
		e := state.Election{Partition: p.id, LeaderID: w.r.Int32N(3) + 1, Reason: state.ReasonOperator}
		if _, err := w.s.DecideElections(e); err == nil && !slices.ContainsFunc(elections, func(o state.Election) bool { return o.Partition == p.id }) {
			elections = append(elections, e)
		}
	}
	if len(elections) > 0 {
		events := must(w.s.DecideElections(elections...))
		w.write(events)
		w.fence(events)
	}
}

// fence tells the plain model of elections.
func (w *random) fence(events []*metadatav1.Event) {
	for _, e := range events {
		f := e.GetPartitionFenced()
		if f == nil {
			continue
		}
		w.stats["elected"]++
		for _, p := range w.plain {
			if p.id.TopicCreationOffset == f.GetTopicCreationOffset() && p.id.Partition == f.GetPartition() {
				require.Greater(w.t, f.GetLeaderEpoch(), p.epoch)
				p.epoch, p.leader, p.broker, p.opened = f.GetLeaderEpoch(), f.GetLeaderId(), f.GetBrokerEpoch(), false
			}
		}
	}
}

// current says whether the leader's registration is the one it was elected
// under.
func (w *random) current(p *plain) bool {
	b, ok := w.s.Broker(p.leader)
	return ok && b.GetBrokerEpoch() == p.broker
}

func (w *random) fenceOf(p *plain) *logv1.Fence {
	return &logv1.Fence{Incarnation: incarnation, LeaderEpoch: p.epoch, BrokerEpoch: p.broker}
}

func (w *random) open(p *plain) {
	end := p.end()
	r := &metadatav1.OpenEpochRequest{
		Partition: w.name(p), Fence: w.fenceOf(p), StartOffset: end.offset + w.r.Int64N(6), Lineage: p.lineage,
		ObjectEndChainHash: end.hash[:], ObjectEndOffset: end.offset,
	}
	b, known := w.s.Broker(p.leader)
	legal := known && b.GetOnline() && w.current(p)
	switch w.r.IntN(6) {
	case 0:
		r.Fence.LeaderEpoch--
		legal = false
	case 1:
		r.ObjectEndChainHash = slices.Repeat([]byte{9}, 16)
		legal = false
	}
	if len(p.lineage) == 0 && r.StartOffset > end.offset {
		legal = false
	}
	events, _, err := w.s.DecideOpenEpoch(r)
	if p.opened || !legal {
		require.Empty(w.t, events)
		w.stats["open refused"]++
		return
	}
	require.NoError(w.t, err)
	w.write(events)
	w.stats["opened"]++
	require.False(w.t, p.openings[p.epoch], "I2: an epoch is opened once")
	p.openings[p.epoch], p.opened, p.start = true, true, r.GetStartOffset()
	kept := slices.DeleteFunc(slices.Clone(p.lineage), func(e *logv1.LineageEntry) bool { return e.GetStartOffset() >= p.start })
	p.lineage = append(kept, entry(p.epoch, p.start))
}

func (w *random) name(p *plain) *logv1.TopicIdPartition {
	return &logv1.TopicIdPartition{TopicId: p.topicID, TopicCreationOffset: p.id.TopicCreationOffset, Partition: p.id.Partition}
}

func (w *random) newHash() [16]byte {
	w.hashes++
	return [16]byte(binary.BigEndian.AppendUint64(make([]byte, 8, 16), w.hashes))
}

func (w *random) randomCommand(rlm int32) *metadatav1.CommitCombinedSegmentRequest {
	if len(w.plain) == 0 {
		return nil
	}
	if w.r.IntN(15) > 0 {
		w.seq[rlm] += 1 + w.r.Int64N(2)
	}
	cmd := w.command(rlm, max(1, w.seq[rlm]))
	cmd.Crc32C = w.r.Uint32()
	if w.r.IntN(12) == 0 {
		cmd.Object.RlmEpoch--
	}
	ends := map[*plain]border{}
	for range 1 + w.r.IntN(5) {
		p := w.plain[w.r.IntN(len(w.plain))]
		from, ok := ends[p]
		if !ok {
			from = p.end()
		}
		switch w.r.IntN(10) {
		case 0:
			from = p.borders[w.r.IntN(len(p.borders))]
		case 1:
			from.offset = max(0, from.offset+w.r.Int64N(5)-2)
		}
		to := border{offset: from.offset + 1 + w.r.Int64N(9), hash: w.newHash()}
		if known, ok := p.at(to.offset); ok && w.r.IntN(2) == 0 {
			to.hash = known
		}
		d := &logv1.RangeDescriptor{
			Partition: w.name(p), Fence: w.fenceOf(p), EpochStart: p.start, BaseOffset: from.offset, EndOffset: to.offset,
			BaseChainHash: from.hash[:], EndChainHash: to.hash[:], Position: int64(len(cmd.Ranges)) * 100, LengthBytes: 100, BatchCount: 1,
		}
		whole := p.lineage
		if len(whole) == 0 || whole[0].GetStartOffset() > from.offset {
			whole = append([]*logv1.LineageEntry{entry(0, 0)}, whole...)
		}
		fill(d, whole)
		switch w.r.IntN(20) {
		case 0:
			d.Fence.LeaderEpoch--
		case 1:
			d.Fence.BrokerEpoch--
		case 2:
			d.Predecessor = &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: 1 << 20}
		case 3:
			d.BaseChainHash = slices.Repeat([]byte{7}, 16)
		case 4:
			d.Partition.TopicCreationOffset++
		}
		ends[p] = to
		cmd.Ranges = append(cmd.Ranges, d)
	}
	w.sent = append(w.sent, cmd)
	if len(w.sent) > 12 {
		w.sent = w.sent[1:]
	}
	return cmd
}

// judge decides and applies a command, and compares with the plain model.
func (w *random) judge(cmd *metadatav1.CommitCombinedSegmentRequest) {
	info, _ := w.s.RemoteLogManager(cmd.GetRlmId())
	open := info.GetOpen() && info.GetRlmEpoch() == cmd.GetObject().GetRlmEpoch()
	judged := open && cmd.GetObject().GetSequence() > info.GetLastAcceptedSequence()
	before := w.s.Digest()
	events, r, err := w.s.DecideCommit(cmd)
	require.Equal(w.t, before, w.s.Digest(), "a decider changed the state")
	if errors.As(err, new(*state.ConflictError)) {
		require.False(w.t, judged)
		w.stats["conflict"]++
		return
	}
	require.NoError(w.t, err)
	if !judged {
		require.Empty(w.t, events)
		if r.GetMetadataOffset() >= 0 {
			w.stats["repeat"]++
			return
		}
		for _, o := range outcomes(r) {
			require.Equal(w.t, notJudged, o)
			w.stats[o.String()]++
		}
		return
	}
	var want []outcome
	for _, d := range cmd.GetRanges() {
		i := slices.IndexFunc(w.plain, func(p *plain) bool { return proto.Equal(w.name(p), d.GetPartition()) })
		o := unknown
		if i >= 0 {
			if o = w.plain[i].judge(d, w.current(w.plain[i])); o == accepted {
				w.plain[i].borders = append(w.plain[i].borders, border{
					offset: d.GetEndOffset(), hash: [16]byte(d.GetEndChainHash()), object: fmt.Sprint(cmd.GetObject()),
				})
			}
		}
		want = append(want, o)
		w.stats[o.String()]++
	}
	require.Equal(w.t, want, outcomes(r))
	require.Equal(w.t, slices.Contains(want, accepted), len(events) > 0)
	if len(events) > 0 {
		require.Equal(w.t, r.GetMetadataOffset(), w.write(events))
	}
	for i, d := range cmd.GetRanges() { // the facts in the verdicts are those after the command
		if p, ok := w.s.Partition(state.PartitionID{
			TopicCreationOffset: d.GetPartition().GetTopicCreationOffset(), Partition: d.GetPartition().GetPartition(),
		}); ok && want[i] != unknown {
			require.Equal(w.t, p.GetObjectEndOffset(), r.GetVerdicts()[i].GetObjectEndOffset())
			require.Equal(w.t, p.GetObjectEndChainHash(), r.GetVerdicts()[i].GetObjectEndChainHash())
		}
	}
}

func (p *plain) judge(d *logv1.RangeDescriptor, current bool) outcome {
	f := d.GetFence()
	if !p.opened || !current || f.GetLeaderEpoch() != p.epoch || f.GetBrokerEpoch() != p.broker {
		return fenced
	}
	if d.GetEpochStart() != p.start {
		return malformed
	}
	base, end := d.GetBaseOffset(), d.GetEndOffset()
	if base > p.end().offset {
		return gap
	}
	if base < p.end().offset {
		for offset, hash := range map[int64][]byte{base: d.GetBaseChainHash(), end: d.GetEndChainHash()} {
			if known, ok := p.at(offset); ok && known != [16]byte(hash) {
				return mismatch
			}
		}
		return already
	}
	want := proto.Clone(d).(*logv1.RangeDescriptor)
	fill(want, p.lineage)
	last := p.end().hash
	want.BaseChainHash = last[:]
	if !proto.Equal(want, d) {
		return mismatch
	}
	return accepted
}

// check compares everything that can be asked with the plain model (I5, I6),
// and the replica with the machine.
func (w *random) check() {
	require.Equal(w.t, w.s.Digest(), w.replica.Digest(), "the replica differs")
	objects, ranges := map[string]bool{}, 0
	for _, p := range w.plain {
		got, more := w.s.Ranges(p.id, 0, 1<<20)
		require.False(w.t, more)
		require.Len(w.t, got, len(p.borders)-1)
		epoch := int32(0)
		for i, r := range got {
			require.Equal(w.t, p.borders[i].offset, r.GetBaseOffset(), "I5: contiguous")
			require.Equal(w.t, p.borders[i+1].offset, r.GetEndOffset())
			require.Equal(w.t, p.borders[i+1].hash[:], r.GetEndChainHash(), "I5: one hash chain")
			require.Equal(w.t, p.borders[i+1].object, fmt.Sprint(r.GetObject()))
			require.GreaterOrEqual(w.t, r.GetLeaderEpoch(), epoch, "I5: one lineage")
			epoch = r.GetLeaderEpoch()
			objects[fmt.Sprint(r.GetObject())] = true
		}
		ranges += len(got)
		part, ok := w.s.Partition(p.id)
		require.True(w.t, ok)
		assertLineage(w.t.(*testing.T), p.lineage, part.GetLineage())
		require.Equal(w.t, p.end().offset, part.GetObjectEndOffset())
		require.Equal(w.t, p.opened && w.current(p), part.GetOpened())
	}
	for id, known := range w.watched {
		resets := w.s.Reset(id, 0, 1<<20)
		require.Len(w.t, resets, 1)
		now := resets[0]
		now.Topic, now.Position = "", nil
		if known.GetOpened() && !now.GetOpened() { // by a registration, of which this stream says nothing
			now.Opened = true
		}
		require.True(w.t, proto.Equal(now, known), "a subscriber knows %v, but it is %v", known, now)
	}
	require.Equal(w.t, int64(ranges), w.s.RangeCount())
	require.Equal(w.t, len(objects), w.s.ObjectCount(), "objects without ranges are forgotten, others are kept once")
	if w.r.IntN(10) == 0 {
		c := w.s.Clone()
		require.Equal(w.t, w.s.Digest(), c.Digest())
		w.replica = c // and goes on as one
	}
}
