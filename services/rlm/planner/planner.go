package planner

import (
	"cmp"
	"slices"
	"time"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

const (
	accepted  = metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
	notJudged = metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED
	malformed = metadatav1.RangeOutcome_RANGE_OUTCOME_MALFORMED
)

// Planner is the machine. See the package comment.
type Planner struct {
	cfg   Config
	epoch int64 // 0 while there is none
	next  int64 // sequence of the next object

	streams map[StreamID]bool // open ones
	lanes   map[laneKey]*lane
	ring    []*lane // lanes with queued ranges, in the order of their turns
	dropped bool    // the ring holds lanes without queued ranges
	queued  int
	bytes   int64         // queued
	since   time.Duration // when the queued range that waits longest came, or before

	objects []*object // of the present epoch, in sequence order
	orphans []*object // of closed epochs, their commit sent and not judged
	flush   bool      // no linger: the planner is to become idle
	puts    durations

	out Effects
}

type laneKey struct {
	stream    StreamID
	partition Key
}

// lane is one partition on one stream.
type lane struct {
	laneKey
	run     int64
	next    int64                    // base of the run's next range, -1 before its first
	failed  *metadatav1.RangeVerdict // of the run's first refused range
	pending []*entry                 // not answered yet, in the order offered
	queue   []*entry                 // those of pending that are in no object
	inRing  bool
}

// entry is a range until it is answered.
type entry struct {
	Range
	lane    *lane
	arrived time.Duration
	verdict *metadatav1.RangeVerdict // decided, waits for its turn to be answered
	attempt Attempt
	offset  int64
}

// object is a planned object until its verdict.
type object struct {
	Object
	entries   []*entry
	ranges    []Range
	running   []run // attempts whose PUT has not ended
	attempts  int32 // made so far
	failures  int   // attempts failed since the last success of any kind
	retryAt   time.Duration
	uploaded  int32 // the attempt that will be committed, 0 while none
	committed bool  // the commit was sent
}

type run struct {
	attempt int32
	started time.Duration
	hedgeAt time.Duration // when it is slow; 0 = never
}

// New makes a planner without an epoch: nothing is uploaded before Registered.
func New(cfg Config) *Planner {
	return &Planner{
		cfg: cfg.withDefaults(), next: 1,
		streams: make(map[StreamID]bool), lanes: make(map[laneKey]*lane),
	}
}

// uncommitted counts the objects without a verdict, those of closed epochs
// among them: whoever registers again and again must not pile them up.
func (p *Planner) uncommitted() int { return len(p.objects) + len(p.orphans) }

// Stats describes what is held.
func (p *Planner) Stats() Stats {
	s := Stats{QueuedRanges: p.queued, QueuedBytes: p.bytes, Uncommitted: p.uncommitted(), Lanes: len(p.lanes)}
	for _, o := range p.objects {
		if o.uploaded == 0 {
			s.Uploading++
		}
	}
	return s
}

// Idle reports whether nothing is queued, in upload or waiting for a verdict.
func (p *Planner) Idle() bool { return p.queued == 0 && len(p.objects) == 0 && len(p.orphans) == 0 }

// Epoch is the present epoch, 0 for none.
func (p *Planner) Epoch() int64 { return p.epoch }

// Registered begins a new epoch, above 0. An older one that was not reported
// closed is closed by it.
func (p *Planner) Registered(now time.Duration, epoch int64) *Effects {
	p.out.reset()
	if p.epoch != 0 && p.epoch != epoch {
		p.closeEpoch()
	}
	if p.epoch != epoch {
		p.epoch, p.next = epoch, 1
	}
	return p.settle(now)
}

// EpochClosed ends an epoch: nothing of it can be accepted any more.
func (p *Planner) EpochClosed(now time.Duration, epoch int64) *Effects {
	p.out.reset()
	if p.epoch == epoch && epoch != 0 {
		p.closeEpoch()
	}
	return p.settle(now)
}

func (p *Planner) closeEpoch() {
	p.epoch = 0
	for _, o := range p.objects {
		if o.committed {
			p.orphans = append(p.orphans, o) // its verdict is still asked for
			continue
		}
		p.abandon(o)
	}
	p.objects = nil
	for _, l := range p.ring {
		if len(l.queue) > 0 {
			p.refuse(l.queue[0], noVerdict())
		}
	}
}

// abandon answers an object's ranges without a verdict of their own.
func (p *Planner) abandon(o *object) {
	for _, r := range o.running {
		p.out.Cancels = append(p.out.Cancels, Attempt{o.Object, r.attempt})
	}
	o.running = nil
	for _, e := range o.entries {
		p.refuse(e, noVerdict())
	}
}

func noVerdict() *metadatav1.RangeVerdict { return &metadatav1.RangeVerdict{Outcome: notJudged} }

// StreamOpened admits a stream.
func (p *Planner) StreamOpened(id StreamID) { p.streams[id] = true }

// StreamClosed forgets a stream: what is queued of it is dropped, what is in an
// object is still committed, and nothing is answered any more.
func (p *Planner) StreamClosed(now time.Duration, id StreamID) *Effects {
	p.out.reset()
	delete(p.streams, id)
	for k, l := range p.lanes {
		if k.stream == id {
			p.dropQueue(l, noVerdict())
			p.answer(l)
		}
	}
	return p.settle(now)
}

// Offer queues a range. refused is the verdict on a range that must not be
// uploaded; it is treated as if the metadata service had given it. A range of
// an unknown stream is ignored.
func (p *Planner) Offer(now time.Duration, stream StreamID, r Range, refused *metadatav1.RangeVerdict) *Effects {
	p.out.reset()
	if !p.streams[stream] {
		return p.settle(now)
	}
	k := laneKey{stream, r.Partition}
	l := p.lanes[k]
	if l == nil {
		l = &lane{laneKey: k, run: r.Run, next: -1}
		p.lanes[k] = l
	}
	if r.Run > l.run {
		p.dropQueue(l, noVerdict())
		l.run, l.next, l.failed = r.Run, -1, nil
	}
	e := &entry{Range: r, lane: l, arrived: now}
	l.pending = append(l.pending, e)
	switch {
	case r.Run < l.run:
		e.verdict = noVerdict()
	case l.failed != nil:
		e.verdict = l.failed
	case refused != nil:
		p.refuse(e, refused)
	case l.next >= 0 && l.next != r.Base || r.End <= r.Base:
		// A run is contiguous; whoever sends it otherwise has lost its place.
		p.refuse(e, &metadatav1.RangeVerdict{Outcome: malformed})
	default:
		l.next = r.End
		l.queue = append(l.queue, e)
		if p.queued == 0 {
			p.since = now
		}
		p.queued++
		p.bytes += r.Bytes
		if !l.inRing {
			l.inRing = true
			p.ring = append(p.ring, l)
		}
	}
	p.answer(l)
	return p.settle(now)
}

// dropQueue decides what is queued of a lane.
func (p *Planner) dropQueue(l *lane, verdict *metadatav1.RangeVerdict) {
	for _, e := range l.queue {
		p.queued--
		p.bytes -= e.Bytes
		e.verdict = verdict
		p.dropped = true
	}
	clear(l.queue)
	l.queue = l.queue[:0]
}

// refuse decides an entry and everything behind it in its run.
func (p *Planner) refuse(e *entry, verdict *metadatav1.RangeVerdict) {
	e.verdict = verdict
	if l := e.lane; l.run == e.Run {
		if l.failed == nil {
			l.failed = verdict
		}
		p.dropQueue(l, verdict)
	}
	p.answer(e.lane)
}

// answer gives the answers of a lane that are due, and forgets the lane when
// nothing of it is left to know.
func (p *Planner) answer(l *lane) {
	n := 0
	for ; n < len(l.pending) && l.pending[n].verdict != nil; n++ {
		e := l.pending[n]
		if p.streams[l.stream] {
			p.out.Answers = append(p.out.Answers, Answer{
				Stream: l.stream, Range: e.Range, Verdict: e.verdict, Attempt: e.attempt, MetadataOffset: e.offset,
			})
		}
	}
	l.pending = slices.Delete(l.pending, 0, n)
	// A lane of an open stream stays: its run, and that it failed, count for
	// ranges that are still on their way.
	if len(l.pending) == 0 && !p.streams[l.stream] {
		delete(p.lanes, l.laneKey)
	}
}

// Tick tells the time; see [Planner.Wake].
func (p *Planner) Tick(now time.Duration) *Effects {
	p.out.reset()
	return p.settle(now)
}

// Flush makes the planner upload what it has without lingering, from now on.
func (p *Planner) Flush(now time.Duration) *Effects {
	p.out.reset()
	p.flush = true
	return p.settle(now)
}

// Uploaded reports that an attempt's object is in the bucket, whole. The first
// one of an object is the one committed.
func (p *Planner) Uploaded(now time.Duration, a Attempt) *Effects {
	p.out.reset()
	if o := p.object(a.Object); o != nil {
		if started, ok := o.end(a.Attempt); ok {
			p.puts.add(now - started)
			if o.uploaded == 0 {
				o.uploaded, o.failures = a.Attempt, 0
				for _, r := range o.running {
					p.out.Cancels = append(p.out.Cancels, Attempt{o.Object, r.attempt})
					// It would have taken at least as long: without the slow ones the
					// percentile would sink, and more and more be hedged.
					p.puts.add(now - r.started)
				}
			}
		}
	}
	return p.settle(now)
}

// UploadFailed reports that an attempt ended without an object that may be
// committed, or in a way that nobody can tell.
func (p *Planner) UploadFailed(now time.Duration, a Attempt) *Effects {
	p.out.reset()
	if o := p.object(a.Object); o != nil {
		if _, ok := o.end(a.Attempt); ok && o.uploaded == 0 {
			pause := p.cfg.RetryMin
			for i := 0; i < o.failures && pause < p.cfg.RetryMax; i++ {
				pause *= 2
			}
			o.failures++
			o.retryAt = now + min(pause, p.cfg.RetryMax)
		}
	}
	return p.settle(now)
}

// Judged reports the verdicts on an object, one per range in the order of its
// ranges, and the metadata offset of the commit. closed says that the object's
// epoch was found closed. Verdicts of another number count as none.
func (p *Planner) Judged(now time.Duration, a Attempt, verdicts []*metadatav1.RangeVerdict, offset int64, closed bool) *Effects {
	p.out.reset()
	o := p.object(a.Object)
	if o == nil || !o.committed || o.uploaded != a.Attempt {
		return p.settle(now)
	}
	p.forget(o)
	if len(verdicts) != len(o.entries) {
		p.abandon(o)
	} else {
		for i, e := range o.entries {
			if verdicts[i].GetOutcome() != accepted {
				// Not judged in an open epoch: a sequence that was used before.
				// Only a new epoch leads out of that.
				if verdicts[i].GetOutcome() == notJudged && !closed && p.epoch == a.Epoch {
					p.out.Reregister = true
				}
				p.refuse(e, verdicts[i])
				continue
			}
			e.verdict, e.attempt, e.offset = verdicts[i], a, offset
			p.answer(e.lane)
		}
	}
	if closed && p.epoch == a.Epoch {
		p.closeEpoch()
	}
	return p.settle(now)
}

// Abandoned reports that an object can't be uploaded or judged at all; its
// ranges are answered NOT_JUDGED and its sequence is not used.
func (p *Planner) Abandoned(now time.Duration, obj Object) *Effects {
	p.out.reset()
	if o := p.object(obj); o != nil {
		p.forget(o)
		p.abandon(o)
	}
	return p.settle(now)
}

// Holds reports whether an object is still to be uploaded or judged.
func (p *Planner) Holds(obj Object) bool { return p.object(obj) != nil }

func (p *Planner) object(obj Object) *object {
	for _, list := range [...][]*object{p.objects, p.orphans} {
		for _, o := range list {
			if o.Object == obj {
				return o
			}
		}
	}
	return nil
}

func (p *Planner) forget(o *object) {
	same := func(x *object) bool { return x == o }
	p.objects = slices.DeleteFunc(p.objects, same)
	p.orphans = slices.DeleteFunc(p.orphans, same)
}

// end takes an attempt off the running ones.
func (o *object) end(attempt int32) (started time.Duration, ok bool) {
	i := slices.IndexFunc(o.running, func(r run) bool { return r.attempt == attempt })
	if i < 0 {
		return 0, false
	}
	started = o.running[i].started
	o.running = slices.Delete(o.running, i, i+1)
	return started, true
}

// settle starts whatever is due.
func (p *Planner) settle(now time.Duration) *Effects {
	if p.dropped {
		p.dropped = false
		p.ring = slices.DeleteFunc(p.ring, func(l *lane) bool {
			l.inRing = len(l.queue) > 0
			return !l.inRing
		})
	}
	if len(p.objects) > 0 && p.objects[0].uploaded != 0 && !p.objects[0].committed {
		o := p.objects[0]
		o.committed = true
		p.out.Commits = append(p.out.Commits, Attempt{o.Object, o.uploaded})
	}
	for _, o := range p.objects {
		p.attend(now, o)
	}
	for p.ready(now) {
		p.cut(now)
	}
	return &p.out
}

// attend repeats or hedges an object's PUT.
func (p *Planner) attend(now time.Duration, o *object) {
	if o.uploaded != 0 || p.out.Reregister {
		return
	}
	switch {
	case len(o.running) == 0 && now >= o.retryAt,
		len(o.running) == 1 && o.running[0].hedgeAt != 0 && now >= o.running[0].hedgeAt && now >= o.retryAt:
		if o.attempts >= p.cfg.MaxAttempt {
			if len(o.running) == 0 {
				p.out.Reregister = true
				o.retryAt = now + p.cfg.RetryMax // ask again, not at once
			}
			return
		}
		p.put(now, o)
	}
}

// put starts an attempt.
func (p *Planner) put(now time.Duration, o *object) {
	o.attempts++
	r := run{attempt: o.attempts, started: now}
	if p.cfg.HedgeMin > 0 {
		r.hedgeAt = now + max(p.cfg.HedgeMin, p.puts.slow(p.cfg.HedgeCold))
	}
	o.running = append(o.running, r)
	p.out.Uploads = append(p.out.Uploads, Upload{Object: o.Object, Attempt: o.attempts, Ranges: o.ranges})
}

// uploading counts the objects whose PUT has not succeeded.
func (p *Planner) uploading() (n int) {
	for _, o := range p.objects {
		if o.uploaded == 0 {
			n++
		}
	}
	return n
}

// ready reports whether an upload is to be started now.
func (p *Planner) ready(now time.Duration) bool {
	if p.epoch == 0 || p.queued == 0 || p.out.Reregister || p.uncommitted() >= p.cfg.Uncommitted {
		return false
	}
	uploading := p.uploading()
	switch {
	case uploading >= p.cfg.InFlight:
		return false
	case uploading == 0, p.flush, p.bytes >= p.cfg.MaxBytes, p.queued >= p.cfg.MaxRanges:
		return true
	}
	return now >= p.since+p.cfg.Linger
}

// cut makes the next object: the heads of all lanes in their turn, then the
// second ranges, and so on.
func (p *Planner) cut(now time.Duration) {
	o := &object{Object: Object{Epoch: p.epoch, Sequence: p.next}}
	p.next++
	var bytes int64
	taken := make(map[Key]StreamID, len(p.ring)) // whose range of a partition is in
	served := make([]int, len(p.ring))           // ranges taken of each lane
	full := func() bool { return len(o.entries) >= p.cfg.MaxRanges || bytes >= p.cfg.MaxBytes }
	for again := true; again && !full(); {
		again = false
		crowded := false // a lane was left out: no other gets a further turn
		for i, l := range p.ring {
			if full() {
				break
			}
			if served[i] >= len(l.queue) {
				continue
			}
			e := l.queue[served[i]]
			if from, ok := taken[l.partition]; ok && from != l.stream {
				continue
			}
			if len(o.entries) > 0 && bytes+e.Bytes > p.cfg.MaxBytes {
				crowded = true
				continue
			}
			taken[l.partition] = l.stream
			o.entries = append(o.entries, e)
			bytes += e.Bytes
			served[i]++
			again = true
		}
		again = again && !crowded
	}
	// Lanes that had their turn go behind those that had none.
	var waiting, had []*lane
	for i, l := range p.ring {
		if served[i] == 0 {
			waiting = append(waiting, l)
			continue
		}
		l.queue = slices.Delete(l.queue, 0, served[i])
		if l.inRing = len(l.queue) > 0; l.inRing {
			had = append(had, l)
		}
	}
	p.ring = append(waiting, had...)
	p.since = now
	for _, l := range p.ring {
		p.since = min(p.since, l.queue[0].arrived)
	}
	p.queued -= len(o.entries)
	p.bytes -= bytes

	slices.SortFunc(o.entries, func(a, b *entry) int {
		return cmp.Or(a.Partition.Compare(b.Partition), cmp.Compare(a.Base, b.Base))
	})
	o.ranges = make([]Range, len(o.entries))
	for i, e := range o.entries {
		o.ranges[i] = e.Range
	}
	p.objects = append(p.objects, o)
	p.put(now, o)
}

// Wake is the moment at which Tick has something to do; false when only an
// event can change anything.
func (p *Planner) Wake() (time.Duration, bool) {
	at, ok := time.Duration(0), false
	due := func(t time.Duration) {
		if !ok || t < at {
			at, ok = t, true
		}
	}
	for _, o := range p.objects {
		switch {
		case o.uploaded != 0:
		case len(o.running) == 0:
			due(o.retryAt)
		case len(o.running) == 1 && o.running[0].hedgeAt != 0 && o.attempts < p.cfg.MaxAttempt:
			due(max(o.running[0].hedgeAt, o.retryAt))
		}
	}
	if p.epoch != 0 && p.queued > 0 && p.uncommitted() < p.cfg.Uncommitted {
		if n := p.uploading(); n > 0 && n < p.cfg.InFlight {
			due(p.since + p.cfg.Linger)
		}
	}
	return at, ok
}
