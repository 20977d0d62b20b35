package sim

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/partition"
	"github.com/braidlog/braid/services/metadata/state"
)

const (
	clusterID   = "0e64ff2b-31f1-4f5b-8c43-5f0f2a4b9f10"
	topicID     = "5b0b9a52-8a7c-4dc5-a3a6-6d1f1b0c2a01"
	incarnation = 77
	brokers     = 3
	recordBytes = 10
)

// rec is one record, and one batch.
type rec struct {
	who lineage.Leadership
	uid int64
}

// diskLog is what a broker has on disk: it outlives the process.
type diskLog struct {
	start   int64
	recs    []rec
	hashes  []chainhash.Hash // hashes[i] at start+i
	lineage lineage.Lineage
}

func newDiskLog(at int64, h chainhash.Hash, l lineage.Lineage) *diskLog {
	return &diskLog{start: at, hashes: []chainhash.Hash{h}, lineage: append(lineage.Lineage(nil), l...)}
}

func (d *diskLog) end() int64 { return d.start + int64(len(d.recs)) }

func recordImage(offset int64, r rec) []byte {
	b := make([]byte, 0, 28)
	b = binary.BigEndian.AppendUint64(b, uint64(offset))
	b = binary.BigEndian.AppendUint32(b, r.who.Incarnation)
	b = binary.BigEndian.AppendUint32(b, uint32(r.who.LeaderEpoch))
	return binary.BigEndian.AppendUint64(b, uint64(r.uid))
}

func (d *diskLog) append(r rec) {
	d.hashes = append(d.hashes, chainhash.Next(d.hashes[len(d.hashes)-1], recordImage(d.end(), r)))
	d.recs = append(d.recs, r)
}

func (d *diskLog) truncate(to int64) {
	if to >= d.end() {
		return
	}
	d.recs = d.recs[:to-d.start]
	d.hashes = d.hashes[:to-d.start+1]
	d.lineage = d.lineage.DropAt(to)
}

func (d *diskLog) hash(at int64) chainhash.Hash { return d.hashes[at-d.start] }

func (d *diskLog) facts() partition.LogFacts {
	return partition.LogFacts{Start: d.start, End: d.end(), Lineage: append(lineage.Lineage(nil), d.lineage...)}
}

type host struct {
	id    int32
	up    bool
	epoch int64
	disk  *diskLog
	m     *partition.Machine
	watch []partition.Event // in order, delivered with a lag
	cut   *partition.Truncate
}

// upload is a combined object with ranges of the one partition.
type upload struct {
	request *metadatav1.CommitCombinedSegmentRequest
	senders []sender
	recs    [][]rec
}

type sender struct {
	broker int32
	epoch  int64
	run    int64
}

type queued struct {
	d    *logv1.RangeDescriptor
	recs []rec
	from sender
}

type rlm struct {
	id      int32
	epoch   int64
	seq     int64
	queue   []queued
	objects []*upload // uploaded, in order of sequence
}

type message struct {
	to sender
	v  partition.Verdict
}

type openCall struct {
	broker  int32
	epoch   int64
	request *metadatav1.OpenEpochRequest
	fence   partition.Fence
}

type ack struct {
	offset int64
	uid    int64
	broker int32
	fences int64 // elections so far when it was given
}

// world is one partition with everything that touches it.
type world struct {
	r       *rand.Rand
	st      *state.State
	id      state.PartitionID
	hosts   [brokers + 1]*host
	rlms    [3]*rlm
	bucket  map[string][]rec // range key -> records, put before the commit
	net     []message
	opens   []openCall
	uid     int64
	object  []ack
	leader  []ack
	waiting map[int32][]ack
	elected []int32 // who, in order
	bad     []string

	// rules that are taken away to show that they are needed
	ackAtPut bool // OBJECT acked when the object is uploaded
	byLength bool // the leader compares lengths, not lineage and hash
	// readAlways: replicas answer reads before they are reconciled at the present fence.
	readAlways bool

	losePages bool // a restart may lose un-synced bytes
	exact     bool // some elections demand an exact start
}

func newWorld(seed int64) *world {
	w := &world{r: rand.New(rand.NewPCG(uint64(seed), 0)), st: state.New(), bucket: map[string][]rec{}, waiting: map[int32][]ack{}}
	ev, err := w.st.DecideBootstrap(clusterID, incarnation)
	w.must(err)
	ev2, err := w.st.DecideControllerElected(1, "127.0.0.1:1")
	w.must(err)
	w.apply(append(ev, ev2...))
	for i := int32(1); i <= brokers; i++ {
		w.hosts[i] = &host{id: i, disk: newDiskLog(0, chainhash.Hash{}, nil)}
		w.start(w.hosts[i])
	}
	for i := range w.rlms {
		if i > 0 {
			w.rlms[i] = &rlm{id: int32(i)}
			w.registerRLM(w.rlms[i])
		}
	}
	ev, err = w.st.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "t", PartitionCount: 1, ReplicationFactor: brokers}, topicID)
	w.must(err)
	w.id = state.PartitionID{TopicCreationOffset: w.st.EndOffset()}
	w.apply(ev)
	for _, h := range w.hosts[1:] {
		w.resync(h)
	}
	return w
}

func (w *world) must(err error) {
	if err != nil {
		panic(err)
	}
}

func (w *world) fail(format string, args ...any) { w.bad = append(w.bad, fmt.Sprintf(format, args...)) }

// apply commits events as one entry and queues what the brokers' watches will say.
func (w *world) apply(events []*metadatav1.Event) {
	if len(events) == 0 {
		return
	}
	epoch, _, _ := w.st.Controller()
	if epoch < 0 {
		epoch = 0
	}
	e := &metadatav1.Entry{Offset: w.st.EndOffset(), Incarnation: incarnation, ControllerEpoch: epoch, FeatureLevel: 1, Events: events}
	w.must(w.st.Apply(e))
	for _, ev := range events {
		var out partition.Event
		switch k := ev.GetKind().(type) {
		case *metadatav1.Event_PartitionFenced:
			p := k.PartitionFenced
			w.elected = append(w.elected, p.GetLeaderId())
			out = partition.FenceRaised{
				Fence:  partition.Fence{Incarnation: incarnation, LeaderEpoch: p.GetLeaderEpoch(), BrokerEpoch: p.GetBrokerEpoch()},
				Leader: p.GetLeaderId(), Exact: p.GetStartRule() == metadatav1.StartRule_START_RULE_EXACT,
			}
		case *metadatav1.Event_EpochOpened:
			v := w.view()
			out = partition.EpochOpened{Fence: v.Fence, Start: k.EpochOpened.GetStartOffset(), Lineage: v.Lineage}
		case *metadatav1.Event_RangeCommitted:
			c := k.RangeCommitted
			h, err := chainhash.FromBytes(c.GetEndChainHash())
			w.must(err)
			out = partition.RangeCommitted{Base: c.GetBaseOffset(), End: c.GetEndOffset(), EndHash: h}
		}
		if out != nil {
			for _, h := range w.hosts[1:] {
				if h.up {
					h.watch = append(h.watch, out)
				}
			}
		}
	}
}

func (w *world) partition() *metadatav1.Partition {
	p, ok := w.st.Partition(w.id)
	if !ok {
		panic("no partition")
	}
	return p
}

func fenceOf(f *logv1.Fence) partition.Fence {
	return partition.Fence{Incarnation: f.GetIncarnation(), LeaderEpoch: f.GetLeaderEpoch(), BrokerEpoch: f.GetBrokerEpoch(), LinkGeneration: f.GetLinkGeneration()}
}

func fenceTo(f partition.Fence) *logv1.Fence {
	return &logv1.Fence{Incarnation: f.Incarnation, LeaderEpoch: f.LeaderEpoch, BrokerEpoch: f.BrokerEpoch, LinkGeneration: f.LinkGeneration}
}

func leadershipTo(l lineage.Leadership) *logv1.Leadership {
	return &logv1.Leadership{Incarnation: l.Incarnation, LeaderEpoch: l.LeaderEpoch}
}

func lineageTo(l lineage.Lineage) []*logv1.LineageEntry {
	out := make([]*logv1.LineageEntry, 0, len(l))
	for _, e := range l {
		out = append(out, &logv1.LineageEntry{Leadership: leadershipTo(e.Leadership), StartOffset: e.StartOffset})
	}
	return out
}

func lineageOf(l []*logv1.LineageEntry) lineage.Lineage {
	out := make(lineage.Lineage, 0, len(l))
	for _, e := range l {
		out = append(out, lineage.Entry{
			Leadership:  lineage.Leadership{Incarnation: e.GetLeadership().GetIncarnation(), LeaderEpoch: e.GetLeadership().GetLeaderEpoch()},
			StartOffset: e.GetStartOffset(),
		})
	}
	return out
}

func hashOf(b []byte) chainhash.Hash {
	if len(b) == 0 {
		return chainhash.Hash{}
	}
	h, err := chainhash.FromBytes(b)
	if err != nil {
		panic(err)
	}
	return h
}

func (w *world) view() partition.View {
	p := w.partition()
	return partition.View{
		Fence: fenceOf(p.GetFence()), Leader: p.GetLeaderId(), Opened: p.GetOpened(),
		Exact:      p.GetStartRule() == metadatav1.StartRule_START_RULE_EXACT,
		EpochStart: p.GetEpochStart(), Lineage: lineageOf(p.GetLineage()), LogStart: p.GetLogStartOffset(),
		ObjectEnd: p.GetObjectEndOffset(), ObjectHash: hashOf(p.GetObjectEndChainHash()),
	}
}

// start registers a broker whose process has just come up.
func (w *world) start(h *host) {
	ev, err := w.st.DecideRegisterBroker(&metadatav1.RegisterBrokerRequest{
		BrokerId: h.id, Address: fmt.Sprintf("127.0.0.1:%d", 1000+h.id), DirectoryId: fmt.Sprintf("5b0b9a52-8a7c-4dc5-a3a6-00000000000%d", h.id), LogsIntact: true,
	})
	w.must(err)
	h.epoch = w.st.EndOffset()
	h.up = true
	h.watch, h.cut = nil, nil
	w.apply(ev)
	h.m = partition.New(h.id, h.epoch, w.facts(h))
	if w.id != (state.PartitionID{}) {
		w.resync(h)
	}
}

// facts is what a broker's machine is told of its log. A leader that compares lengths takes the metadata's lineage for
// its own.
func (w *world) facts(h *host) partition.LogFacts {
	f := h.disk.facts()
	if w.byLength && w.id != (state.PartitionID{}) {
		f.Lineage = w.view().Lineage
	}
	return f
}

// resync is a reset of the broker's watch.
func (w *world) resync(h *host) {
	h.watch = append(h.watch[:0], partition.ViewReset{View: w.view()})
}

func (w *world) registerRLM(r *rlm) {
	ev, err := w.st.DecideRegisterRemoteLogManager(&metadatav1.RegisterRemoteLogManagerRequest{RlmId: r.id, Address: fmt.Sprintf("127.0.0.1:%d", 2000+r.id)})
	w.must(err)
	r.epoch = w.st.EndOffset()
	w.apply(ev)
	r.seq, r.queue, r.objects = 0, nil, nil
}

// step hands an event to a broker's machine and carries out what it asks for.
func (w *world) step(h *host, ev partition.Event) {
	w.effects(h, h.m.Step(ev))
}

func (w *world) effects(h *host, fx []partition.Effect) {
	for _, f := range fx {
		switch e := f.(type) {
		case partition.Reconcile:
			w.reconcile(h, e)
		case partition.CheckHash:
			w.step(h, partition.Hashed{Attempt: e.Attempt, Hash: h.disk.hash(e.At), TailBytes: recordBytes * (h.disk.end() - e.At)})
		case partition.Open:
			w.opens = append(w.opens, openCall{broker: h.id, epoch: h.epoch, fence: e.Fence, request: &metadatav1.OpenEpochRequest{
				Partition: w.pid(), Fence: fenceTo(e.Fence), StartOffset: e.Start, Lineage: lineageTo(e.Lineage),
				ObjectEndChainHash: e.Hash.Bytes(), ObjectEndOffset: e.ObjectEnd,
			}})
		case partition.Activate:
			h.disk.lineage = append(h.disk.lineage.DropAt(e.Entry.StartOffset), e.Entry)
		case partition.Advance:
			w.ackObject(h, e.ObjectEnd)
		case partition.Deposed:
			w.ackObject(h, e.Kept)
			w.waiting[h.id] = nil
		case partition.Truncate:
			h.cut = &e
		case partition.RequestElection:
			// The controller hears of it or does not; elections also happen on their own.
			if w.r.IntN(2) == 0 {
				w.elect(h.id)
			}
		}
	}
}

func (w *world) reconcile(h *host, e partition.Reconcile) {
	if e.Reset {
		h.disk = newDiskLog(e.At, e.Hash, e.Lineage)
	} else {
		h.disk.truncate(e.At)
	}
	hash := e.Hash
	if e.ObjectEnd >= h.disk.start && e.ObjectEnd <= h.disk.end() && !w.byLength {
		hash = h.disk.hash(e.ObjectEnd)
	}
	w.step(h, partition.Reconciled{Attempt: e.Attempt, Log: w.facts(h), Hash: hash, TailBytes: recordBytes * (h.disk.end() - e.ObjectEnd)})
}

func (w *world) pid() *logv1.TopicIdPartition {
	return &logv1.TopicIdPartition{TopicId: topicID, TopicCreationOffset: w.id.TopicCreationOffset}
}

func (w *world) ackObject(h *host, end int64) {
	q := w.waiting[h.id]
	n := 0
	for n < len(q) && q[n].offset < end {
		a := q[n]
		a.fences = int64(len(w.elected))
		w.object = append(w.object, a)
		n++
	}
	w.waiting[h.id] = q[n:]
}

func (w *world) elect(id int32) {
	ev, err := w.st.DecideElections(state.Election{Partition: w.id, LeaderID: id, Reason: state.ReasonOperator})
	if err != nil {
		return
	}
	if w.exact && w.r.IntN(4) == 0 {
		for _, e := range ev {
			e.GetPartitionFenced().StartRule = metadatav1.StartRule_START_RULE_EXACT
		}
	}
	w.apply(ev)
}

// produce appends one record at a broker that believes it leads.
func (w *world) produce(h *host) {
	base, who, err := h.m.Admit()
	if err != nil {
		return
	}
	if base != h.disk.end() {
		w.fail("broker %d appends at %d, its log ends at %d", h.id, base, h.disk.end())
		return
	}
	w.uid++
	h.disk.append(rec{who: who, uid: w.uid})
	h.m.Appended(h.disk.end(), recordBytes)
	a := ack{offset: base, uid: w.uid, broker: h.id, fences: int64(len(w.elected))}
	w.waiting[h.id] = append(w.waiting[h.id], a)
	p := w.partition()
	if p.GetLeaderId() == h.id && p.GetOpened() && fenceOf(p.GetFence()).BrokerEpoch == h.epoch {
		w.leader = append(w.leader, a)
	}
}

// send hands the unsent records to an rlm.
func (w *world) send(h *host, r *rlm) {
	from, to, ok := h.m.Unsent()
	if !ok {
		return
	}
	to = from + 1 + w.r.Int64N(to-from)
	v, _ := h.m.View()
	lin := h.m.Log().Lineage
	d := &logv1.RangeDescriptor{
		Partition: w.pid(), Fence: fenceTo(v.Fence), EpochStart: v.EpochStart, BaseOffset: from, EndOffset: to,
		Lineage: lineageTo(lin.Slice(from, to)), BaseChainHash: h.disk.hash(from).Bytes(), EndChainHash: h.disk.hash(to).Bytes(),
		LengthBytes: recordBytes * (to - from), BatchCount: int32(to - from),
	}
	if who, ok := lin.Predecessor(from); ok {
		d.Predecessor = leadershipTo(who)
	}
	recs := append([]rec(nil), h.disk.recs[from-h.disk.start:to-h.disk.start]...)
	r.queue = append(r.queue, queued{d: d, recs: recs, from: sender{h.id, h.epoch, h.m.Run()}})
	h.m.Sent(to, h.disk.hash(to), recordBytes*(to-from))
}

// committed is what the bucket holds of the partition, by the metadata's ranges.
func (w *world) committed() *diskLog {
	c := newDiskLog(0, chainhash.Hash{}, nil)
	ranges, _ := w.st.Ranges(w.id, 0, 1<<30)
	for _, g := range ranges {
		if g.GetBaseOffset() != c.end() {
			w.fail("the committed ranges have a hole at %d", c.end())
			return c
		}
		for _, r := range w.bucket[rangeKey(g.GetObject(), g.GetPosition())] {
			c.append(r)
		}
		if c.end() != g.GetEndOffset() {
			w.fail("range [%d,%d) ends at %d", g.GetBaseOffset(), g.GetEndOffset(), c.end())
			return c
		}
	}
	c.lineage = lineageOf(w.partition().GetLineage())
	return c
}

// fetch copies committed records to a follower, as far as its own view goes.
func (w *world) fetch(h *host) {
	from, to, attempt, ok := h.m.Wanted()
	if !ok {
		return
	}
	c := w.committed()
	if to > c.end() {
		w.fail("broker %d wants [%d,%d), committed are %d", h.id, from, to, c.end())
		return
	}
	if h.disk.hash(from) != c.hash(from) {
		w.step(h, partition.Diverged{Attempt: attempt})
		return
	}
	to = from + 1 + w.r.Int64N(to-from)
	v, _ := h.m.View()
	l := v.Lineage.DropAt(to)
	if !h.m.Replicated(attempt, to, l) {
		return
	}
	for o := from; o < to; o++ {
		h.disk.append(c.recs[o])
	}
	h.disk.lineage = l
}

// truncate carries out what a follower was asked to do a while ago. A newer order has replaced an older one, and a
// leader's reconciliation goes by its own.
func (w *world) truncate(h *host) {
	if h.cut == nil {
		return
	}
	e := *h.cut
	h.cut = nil
	if !h.m.Current(e.Attempt) {
		return
	}
	if e.Reset {
		h.disk = newDiskLog(e.At, e.Hash, e.Lineage)
	} else {
		h.disk.truncate(e.At)
	}
	w.step(h, partition.Cut{Attempt: e.Attempt, Log: h.disk.facts()})
}

// read is a nearest read of whatever replica answers: what it serves is committed.
func (w *world) read(h *host) {
	limit, ok := h.m.Serves()
	if w.readAlways && h.m != nil {
		v, known := h.m.View()
		limit, ok = min(h.disk.end(), v.ObjectEnd), known
	}
	if !ok {
		return
	}
	c := w.committed()
	for o := h.disk.start; o < min(limit, h.disk.end()); o++ {
		if o >= c.end() || c.recs[o] != h.disk.recs[o-h.disk.start] {
			w.fail("a read at broker %d returned another record at %d", h.id, o)
			return
		}
	}
}

// upload braids what is queued into an object.
func (w *world) upload(r *rlm) {
	if len(r.queue) == 0 {
		return
	}
	n := 1 + w.r.IntN(len(r.queue))
	r.seq++
	u := &upload{}
	req := &metadatav1.CommitCombinedSegmentRequest{
		ClusterId: clusterID, RlmId: r.id, Crc32C: uint32(r.seq),
		Object: &logv1.ObjectRef{Incarnation: incarnation, RlmEpoch: r.epoch, Sequence: r.seq, Attempt: 1},
	}
	var pos int64
	for _, q := range r.queue[:n] {
		q.d.Position = pos
		pos += q.d.GetLengthBytes()
		req.Ranges = append(req.Ranges, q.d)
		u.senders = append(u.senders, q.from)
		u.recs = append(u.recs, q.recs)
		w.bucket[rangeKey(req.GetObject(), q.d.GetPosition())] = q.recs
		if w.ackAtPut {
			if h := w.hosts[q.from.broker]; h.up && h.epoch == q.from.epoch {
				w.ackObject(h, q.d.GetEndOffset())
			}
		}
	}
	req.SizeBytes = pos + 100
	u.request = req
	r.queue = r.queue[n:]
	r.objects = append(r.objects, u)
}

func rangeKey(o *logv1.ObjectRef, position int64) string {
	return fmt.Sprintf("%d/%d/%d@%d", o.GetRlmEpoch(), o.GetSequence(), o.GetAttempt(), position)
}

// commit submits an rlm's oldest object. The message may be lost on the way, doubled, or its answer may be lost; the
// rlm goes on to the next object only once it has the verdict.
func (w *world) commit(r *rlm) {
	if len(r.objects) == 0 {
		return
	}
	u := r.objects[0]
	if w.r.IntN(10) == 0 {
		return
	}
	ev, resp, err := w.st.DecideCommit(u.request)
	w.must(err)
	w.apply(ev)
	if w.r.IntN(6) == 0 {
		return // no answer: the same command will be repeated
	}
	r.objects = r.objects[1:]
	for i, v := range resp.GetVerdicts() {
		w.net = append(w.net, message{to: u.senders[i], v: verdictOf(u.senders[i].run, u.request.GetRanges()[i], v)})
	}
	if resp.GetRlmEpochClosed() {
		for _, q := range r.queue {
			w.net = append(w.net, message{to: q.from, v: partition.Verdict{
				Run: q.from.run, Base: q.d.GetBaseOffset(), End: q.d.GetEndOffset(), Outcome: partition.NotJudged, NextEpochStart: -1}})
		}
		w.registerRLM(r)
	}
}

func verdictOf(run int64, d *logv1.RangeDescriptor, v *metadatav1.RangeVerdict) partition.Verdict {
	out := partition.Verdict{
		Run: run, Base: d.GetBaseOffset(), End: d.GetEndOffset(), Outcome: partition.Outcome(v.GetOutcome()), LogStart: v.GetLogStartOffset(),
		ObjectEnd: v.GetObjectEndOffset(), ObjectHash: hashOf(v.GetObjectEndChainHash()), Fence: fenceOf(v.GetFence()), Opened: v.GetOpened(), NextEpochStart: -1,
	}
	if v.NextEpochStart != nil {
		out.NextEpochStart = v.GetNextEpochStart()
	}
	return out
}

// deliver hands a verdict to its broker, if that process still lives.
func (w *world) deliver(i int) {
	m := w.net[i]
	w.net = append(w.net[:i], w.net[i+1:]...)
	if h := w.hosts[m.to.broker]; h.up && h.epoch == m.to.epoch {
		w.step(h, partition.VerdictGiven{Verdict: m.v})
	}
}

// open carries out a delayed opening; its answer may be lost, then the call stands to be repeated.
func (w *world) open(i int) {
	c := w.opens[i]
	h := w.hosts[c.broker]
	ev, _, err := w.st.DecideOpenEpoch(c.request)
	if err == nil {
		w.apply(ev)
	}
	alive := h.up && h.epoch == c.epoch
	if alive && w.r.IntN(6) == 0 {
		return
	}
	w.opens = append(w.opens[:i], w.opens[i+1:]...)
	if alive {
		a := partition.OpenAnswered{Fence: c.fence, Accepted: err == nil}
		if err != nil {
			a.Reason = err.Error()
		}
		w.step(h, a)
	}
}
