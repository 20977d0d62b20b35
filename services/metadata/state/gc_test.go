package state_test

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/invariant"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// The world of the deletion rule (design review S1, invariant I8): leaders
// append, rlms upload combined objects, hedged and slowly, commit commands are
// delayed and duplicated, sessions expire, ranges are retired, and a scrub
// deletes what some state, however stale, says can't be committed any more. A
// run is bad if a committed range has no bytes.
//
// The commit rule is exchangeable: the real state machine, or the literal rules
// of earlier drafts, which this test has to find wrong.

const (
	gcPartitions = 3
	gcRLMs       = 2
)

// gcObject is one upload attempt.
type gcObject struct {
	rlm      int
	epoch    int64 // of the rlm
	sequence int64
	attempt  int32
	ranges   []gcRange
	born     int
}

type gcRange struct {
	partition  int
	leadership int // number of the leader's term
	base, end  int64
	descriptor *logv1.RangeDescriptor // for the real rule
}

// gcRule judges commits and tells what can't be committed any more.
type gcRule interface {
	commit(o *gcObject) (accepted []int)    // indexes of the ranges that extend their partitions now
	closed(rlm int, epoch int64) bool       // whether an rlm has to register again
	expire(rlm int)                         // its session ends
	register(rlm int) int64                 // a new epoch
	elect(partition, leadership int)        // a new leader opens at the object end
	describe(o *gcObject, i int, a *gcArea) // fills in what the rule needs of a range
	settled() func(o *gcObject) bool        // frozen as of now
}

// gcArea is a partition as its leader sees it.
type gcArea struct {
	leadership       int
	alive            bool
	log, sent, tier  int64
	objectEnd        int64
	hashes           map[int64]uint64 // at the borders of the leader's log
	committed        []gcCommitted
	openedLeadership *metadatav1.Partition
}

type gcCommitted struct {
	base, end int64
	object    *gcObject
}

type gcStats struct{ accepted, refused, scrubbed, bad int }

// gcRun is one random history; it says whether a committed range lost its bytes.
func gcRun(seed uint64, rule gcRule, byAge bool, steps int, stats *gcStats) bool {
	r := rand.New(rand.NewPCG(seed, 2))
	areas := make([]*gcArea, gcPartitions)
	for i := range areas {
		areas[i] = &gcArea{alive: true, hashes: map[int64]uint64{0: 0}}
		rule.elect(i, 0)
	}
	var epochs [gcRLMs]int64
	var sequences [gcRLMs]int64
	for i := range epochs {
		epochs[i] = rule.register(i)
	}
	const (
		putting = iota
		uploaded
	)
	var objects []*gcObject
	stage := map[*gcObject]int{}
	bucket := map[*gcObject]bool{}
	live := map[*gcObject]bool{}
	var net []*gcObject
	hash := uint64(0)
	type past struct {
		live    map[*gcObject]bool
		settled func(*gcObject) bool
	}
	var history []past
	remember := func() {
		held := make(map[*gcObject]bool, len(live))
		for o := range live {
			held[o] = true
		}
		history = append(history, past{held, rule.settled()})
		if len(history) > 8 {
			history = history[1:]
		}
	}
	remember()
	in := func(s int) (found []*gcObject) {
		for _, o := range objects {
			if at, ok := stage[o]; ok && at == s {
				found = append(found, o)
			}
		}
		return found
	}
	for now := range steps {
		p := areas[r.IntN(gcPartitions)]
		rlm := r.IntN(gcRLMs)
		switch a := r.Float64(); {
		case a < .16: // append
			if p.alive {
				p.log += 1 + r.Int64N(3)
				hash++
				p.hashes[p.log] = hash
			}
		case a < .34: // an rlm begins an object, sometimes with a hedge
			var ranges []gcRange
			for i, q := range areas {
				if q.alive && q.log > q.sent && r.Float64() < .8 {
					ranges = append(ranges, gcRange{partition: i, leadership: q.leadership, base: q.sent, end: q.log})
					q.sent = q.log
				}
			}
			if len(ranges) == 0 {
				break
			}
			sequences[rlm]++
			for attempt := range 1 + btoi(r.Float64() < .2) {
				o := &gcObject{
					rlm: rlm, epoch: epochs[rlm], sequence: sequences[rlm], attempt: int32(attempt) + 1, ranges: ranges, born: now,
				}
				for i := range ranges {
					rule.describe(o, i, areas[ranges[i].partition])
				}
				objects = append(objects, o)
				stage[o] = putting
			}
		case a < .46: // a PUT ends
			if c := in(putting); len(c) > 0 {
				o := c[r.IntN(len(c))]
				bucket[o] = true
				stage[o] = uploaded
			}
		case a < .60: // a commit is sent
			if c := in(uploaded); len(c) > 0 {
				net = append(net, c[r.IntN(len(c))])
			}
		case a < .74: // and arrives, now and then again
			if len(net) == 0 {
				break
			}
			i := r.IntN(len(net))
			o := net[i]
			if r.Float64() < .85 {
				net = slices.Delete(net, i, i+1)
			}
			accepted := rule.commit(o)
			if len(accepted) == 0 {
				stats.refused++
				break
			}
			stats.accepted += len(accepted)
			for _, i := range accepted {
				g := o.ranges[i]
				q := areas[g.partition]
				q.committed = append(q.committed, gcCommitted{g.base, g.end, o})
				q.objectEnd = g.end
			}
			live[o] = true
			remember()
		case a < .80: // the leader sends again from the object end
			if p.alive {
				p.sent = p.objectEnd
			}
		case a < .83: // the leader dies, or another one takes over
			if r.Float64() < .5 {
				p.alive = false
				break
			}
			p.leadership++
			p.log, p.sent, p.alive = p.objectEnd, p.objectEnd, true
			rule.elect(slices.Index(areas, p), p.leadership)
		case a < .89: // the tier takes over some
			if p.objectEnd > p.tier {
				p.tier += 1 + r.Int64N(p.objectEnd-p.tier)
			}
		case a < .93: // objects that nobody needs are forgotten and deleted
			for _, o := range objects {
				needed := func(c gcCommitted) bool { return c.object == o }
				if !live[o] || r.Float64() >= .6 || slices.ContainsFunc(areas, func(q *gcArea) bool {
					return slices.ContainsFunc(q.committed, func(c gcCommitted) bool { return needed(c) && c.end > q.tier })
				}) {
					continue
				}
				delete(live, o)
				delete(bucket, o)
				for _, q := range areas {
					q.committed = slices.DeleteFunc(q.committed, needed)
				}
				remember()
			}
		case a < .95: // a session expires; the rlm learns of it later
			rule.expire(rlm)
			remember()
		case a < .97:
			if rule.closed(rlm, epochs[rlm]) {
				epochs[rlm], sequences[rlm] = rule.register(rlm), 0
			}
		default: // scrub
			then := history[r.IntN(len(history))]
			if byAge {
				then = past{live, func(o *gcObject) bool { return now-o.born > 25 }}
			}
			for _, o := range objects {
				if bucket[o] && !then.live[o] && then.settled(o) {
					delete(bucket, o)
					stats.scrubbed++
				}
			}
		}
		for _, q := range areas {
			for _, c := range q.committed {
				if c.end > q.tier && !bucket[c.object] {
					stats.bad++
					return true
				}
			}
		}
	}
	return false
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// realRule is the state machine.
type realRule struct {
	t     testing.TB
	s     *state.State
	topic int64
}

// gcBase is what all runs of the real rule begin with.
func gcBase(t testing.TB) *realRule {
	m := newMachine(t, 1, 0)
	return &realRule{t: t, s: m.s, topic: m.createTopic("quakes", topicID, gcPartitions).TopicCreationOffset}
}

func (r *realRule) fork() *realRule { return &realRule{t: r.t, s: r.s.Clone(), topic: r.topic} }

func (r *realRule) write(events []*metadatav1.Event, err error) int64 {
	require.NoError(r.t, err)
	at := r.s.EndOffset()
	require.NoError(r.t, r.s.Apply(&metadatav1.Entry{
		Offset: at, Incarnation: incarnation, FeatureLevel: state.FeatureLevel, Events: events,
	}))
	return at
}

func (r *realRule) id(partition int) state.PartitionID {
	return state.PartitionID{TopicCreationOffset: r.topic, Partition: int32(partition)}
}

func (r *realRule) elect(partition, leadership int) {
	if leadership > 0 { // the first leader was elected with the topic
		r.write(r.s.DecideElections(state.Election{Partition: r.id(partition), LeaderID: 1}))
	}
	p, _ := r.s.Partition(r.id(partition))
	events, _, err := r.s.DecideOpenEpoch(&metadatav1.OpenEpochRequest{
		Partition: &logv1.TopicIdPartition{TopicId: topicID, TopicCreationOffset: r.topic, Partition: int32(partition)},
		Fence:     p.GetFence(), StartOffset: p.GetObjectEndOffset(), Lineage: p.GetLineage(),
		ObjectEndChainHash: p.GetObjectEndChainHash(), ObjectEndOffset: p.GetObjectEndOffset(),
	})
	r.write(events, err)
}

func (r *realRule) register(rlm int) int64 {
	return r.write(r.s.DecideRegisterRemoteLogManager(&metadatav1.RegisterRemoteLogManagerRequest{RlmId: int32(rlm) + 1, Address: "r:1"}))
}

func (r *realRule) expire(rlm int) {
	info, _ := r.s.RemoteLogManager(int32(rlm) + 1)
	events, err := r.s.DecideCloseRemoteLogManager(info.GetRlmId(), info.GetRlmEpoch(), state.ReasonSessionExpired)
	if len(events) > 0 {
		r.write(events, err)
	}
}

func (r *realRule) closed(rlm int, epoch int64) bool {
	return r.s.CheckRemoteLogManagerEpoch(int32(rlm)+1, epoch) != nil
}

func (r *realRule) describe(o *gcObject, i int, a *gcArea) {
	g := &o.ranges[i]
	if g.descriptor != nil { // a hedge holds the same ranges
		return
	}
	if a.openedLeadership == nil || a.openedLeadership.GetFence().GetLeaderEpoch() != int32(a.leadership)+1 {
		a.openedLeadership, _ = r.s.Partition(r.id(g.partition))
	}
	p := a.openedLeadership
	hash := func(offset int64) []byte { return binary.BigEndian.AppendUint64(make([]byte, 8, 16), a.hashes[offset]) }
	g.descriptor = &logv1.RangeDescriptor{
		Partition: &logv1.TopicIdPartition{TopicId: topicID, TopicCreationOffset: r.topic, Partition: int32(g.partition)},
		Fence:     p.GetFence(), EpochStart: p.GetEpochStart(), BaseOffset: g.base, EndOffset: g.end,
		BaseChainHash: hash(g.base), EndChainHash: hash(g.end), Position: int64(i) * 10, LengthBytes: 10, BatchCount: 1,
	}
	fill(g.descriptor, p.GetLineage())
}

func (r *realRule) ref(o *gcObject) *logv1.ObjectRef {
	return &logv1.ObjectRef{Incarnation: incarnation, RlmEpoch: o.epoch, Sequence: o.sequence, Attempt: o.attempt}
}

func (r *realRule) commit(o *gcObject) (accepted []int) {
	cmd := &metadatav1.CommitCombinedSegmentRequest{ClusterId: clusterID, RlmId: int32(o.rlm) + 1, Object: r.ref(o), SizeBytes: 100}
	for _, g := range o.ranges {
		cmd.Ranges = append(cmd.Ranges, g.descriptor)
	}
	events, response, err := r.s.DecideCommit(cmd)
	require.NoError(r.t, err)
	if len(events) == 0 {
		return nil
	}
	r.write(events, nil)
	for i, v := range response.GetVerdicts() {
		if v.GetOutcome() == metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED {
			accepted = append(accepted, i)
		}
	}
	return accepted
}

func (r *realRule) settled() func(*gcObject) bool {
	then := r.s.Clone()
	return func(o *gcObject) bool { return then.Settled(r.ref(o)) }
}

// literalRule is the rule in its plainest form, whole or as earlier drafts had
// it.
type literalRule struct {
	noSequence, noEpoch bool
	next                int64
	epochs              [gcRLMs]int64 // 0 = closed
	judged              [gcRLMs]int64
	leadership          [gcPartitions]int
	end                 [gcPartitions]int64
}

func (l *literalRule) elect(partition, leadership int)       { l.leadership[partition] = leadership }
func (l *literalRule) describe(*gcObject, int, *gcArea)      {}
func (l *literalRule) closed(rlm int, epoch int64) bool      { return l.epochs[rlm] != epoch }
func (l *literalRule) expire(rlm int)                        { l.epochs[rlm] = 0 }
func (l *literalRule) passed(o *gcObject, judged int64) bool { return o.sequence <= judged }

func (l *literalRule) register(rlm int) int64 {
	l.next++
	l.epochs[rlm], l.judged[rlm] = l.next, 0
	return l.next
}

func (l *literalRule) commit(o *gcObject) (accepted []int) {
	open := l.epochs[o.rlm] == o.epoch
	if !l.noEpoch && !open || !l.noSequence && open && l.passed(o, l.judged[o.rlm]) {
		return nil
	}
	for i, g := range o.ranges {
		if g.leadership == l.leadership[g.partition] && g.base == l.end[g.partition] {
			l.end[g.partition] = g.end
			accepted = append(accepted, i)
		}
	}
	if len(accepted) > 0 {
		l.judged[o.rlm] = o.sequence
	}
	return accepted
}

func (l *literalRule) settled() func(*gcObject) bool {
	epochs, judged, next := l.epochs, l.judged, l.next
	return func(o *gcObject) bool {
		if o.epoch > next {
			return false
		}
		return epochs[o.rlm] != o.epoch || l.passed(o, judged[o.rlm])
	}
}

func gcRuns() int {
	if testing.Short() || invariant.Enabled {
		return 1_500
	}
	return 10_000
}

func TestNoCommittedRangeLosesItsBytes(t *testing.T) {
	base := gcBase(t)
	var machine, plain gcStats
	for seed := range uint64(gcRuns()) {
		if gcRun(seed, base.fork(), false, 200, &machine) {
			t.Fatalf("seed %d: a committed range has no bytes", seed)
		}
		if seed%4 == 0 { // the rule in words agrees with the machine, history by history
			before := machine
			machine = gcStats{}
			gcRun(seed, base.fork(), false, 200, &machine)
			plain = gcStats{}
			gcRun(seed, &literalRule{}, false, 200, &plain)
			require.Equal(t, machine, plain, "seed %d", seed)
			machine = before
		}
	}
	t.Logf("%d runs: %+v", gcRuns(), machine)
	require.Positive(t, machine.accepted)
	require.Positive(t, machine.refused)
	require.Positive(t, machine.scrubbed)
}

func TestWeakerCommitRulesLoseBytes(t *testing.T) {
	for name, tc := range map[string]struct {
		rule  func() gcRule
		byAge bool
	}{
		"without the sequence": {func() gcRule { return &literalRule{noSequence: true} }, false},
		"without the epoch":    {func() gcRule { return &literalRule{noEpoch: true} }, false},
		"by age":               {func() gcRule { return &literalRule{noSequence: true, noEpoch: true} }, true},
	} {
		t.Run(name, func(t *testing.T) {
			var stats gcStats
			for seed := range uint64(gcRuns()) {
				gcRun(seed, tc.rule(), tc.byAge, 200, &stats)
			}
			t.Logf("%d runs: %+v", gcRuns(), stats)
			require.Positive(t, stats.bad, "the world does not find a rule wrong that is")
		})
	}
}
