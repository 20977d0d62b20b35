package replica

import (
	"context"
	"time"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/partition"
)

// Ticket is an append under way.
type Ticket struct {
	p  *Partition
	in AppendInput

	// Set by survey, before anybody else sees the ticket.
	batches      int
	records      int64
	maxBatch     int64
	idempotent   bool
	batch        record.ProducerBatch // the first one
	lastSequence int32
	deadline     time.Time

	// All below is guarded by the partition's mutex.
	parkedUntil time.Time
	withdrawn   error // the caller's context ended before the judgement
	refusal     error
	settled     bool          // refused, or in the log
	admitted    chan struct{} // made by who waits for settled
	counted     bool          // in Partition.waiting

	base       int64
	leadership lineage.Leadership
	duplicate  bool
	appendTime time.Time
	waiter
}

// settle says that the append is decided; mu is held.
func (t *Ticket) settle() {
	t.settled = true
	if t.admitted != nil {
		close(t.admitted)
		t.admitted = nil
	}
}

// Admitted waits until the batches are in the leader's log, or returns the
// refusal. When ctx ends first the append is withdrawn if it was not judged yet
// (its error is returned), otherwise Admitted waits for the local write.
func (t *Ticket) Admitted(ctx context.Context) error {
	p := t.p
	p.mu.Lock()
	if !t.settled {
		if t.admitted == nil {
			t.admitted = make(chan struct{})
		}
		ch := t.admitted
		p.mu.Unlock()
		select {
		case <-ch:
			p.mu.Lock()
		case <-ctx.Done():
			p.mu.Lock()
			if !t.settled {
				t.withdrawn = context.Cause(ctx)
				p.unparkOne(t)
				p.mu.Unlock()
				// The writer meets it soon: nothing in its role waits for another
				// process.
				<-ch
				p.mu.Lock()
			}
		}
	}
	defer p.mu.Unlock()
	if t.refusal != nil {
		return t.refusal
	}
	if t.finished && t.err != nil && t.appendTime.IsZero() && !t.duplicate {
		return t.unknown(t.err) // the local write failed
	}
	return nil
}

// Wait waits until the level asked for is reached. Errors are the refusal, if
// there was one (nothing stored), or an OutcomeUnknownError.
func (t *Ticket) Wait(ctx context.Context) (AppendResult, error) {
	if err := t.Admitted(ctx); err != nil {
		return AppendResult{}, err
	}
	p := t.p
	p.mu.Lock()
	if !t.finished {
		if t.done == nil {
			t.done = make(chan struct{})
		}
		ch := t.done
		p.mu.Unlock()
		select {
		case <-ch:
			p.mu.Lock()
		case <-ctx.Done():
			p.mu.Lock()
			if !t.finished {
				p.abandon(&t.waiter, context.Cause(ctx))
			}
		}
	}
	defer p.mu.Unlock()
	if t.err != nil {
		return AppendResult{}, t.unknown(t.err)
	}
	return AppendResult{
		Base: t.base, End: t.end, Leadership: t.leadership, Levels: t.levels,
		Duplicate: t.duplicate, AppendTime: t.appendTime,
	}, nil
}

// unknown is the error of an append that is in the log; mu is held.
func (t *Ticket) unknown(err error) error {
	return &OutcomeUnknownError{Base: t.base, End: t.end, Leadership: t.leadership, Levels: t.levels, Err: err}
}

// waiter waits until everything below end has reached a level. It is guarded by
// the partition's mutex.
type waiter struct {
	end      int64
	level    partition.Level
	done     chan struct{} // made by who waits; closed when finished
	finished bool
	err      error
	levels   []partition.Level // reached when it finished; shared, not to be changed
	ticket   *Ticket           // whose it is, nil for other waits
	queued   bool              // in one of the partition's queues
}

// The sets of levels.
var (
	levelsNone   []partition.Level
	levelsLeader = []partition.Level{partition.Leader}
	levelsObject = []partition.Level{partition.Object}
	levelsBoth   = []partition.Level{partition.Leader, partition.Object}
)

func levelSet(leader, object bool) []partition.Level {
	switch {
	case leader && object:
		return levelsBoth
	case leader:
		return levelsLeader
	case object:
		return levelsObject
	}
	return levelsNone
}

// waitQueue holds waiters in order of end.
type waitQueue struct {
	list      []*waiter
	head      int
	abandoned int // finished ones still in it
}

func (q *waitQueue) push(w *waiter) {
	w.queued = true
	if q.head == len(q.list) {
		q.list, q.head = q.list[:0], 0
	}
	q.list = append(q.list, w)
	// Appends come in order; only others have to find their place.
	for i := len(q.list) - 1; i > q.head && q.list[i-1].end > w.end; i-- {
		q.list[i], q.list[i-1] = q.list[i-1], q.list[i]
	}
}

// pop takes the first waiter whose end is at or below end.
func (q *waitQueue) pop(end int64) *waiter {
	for q.head < len(q.list) {
		w := q.list[q.head]
		if w.finished {
			q.abandoned--
		} else if w.end > end {
			return nil
		}
		q.list[q.head] = nil
		q.head++
		w.queued = false
		if !w.finished {
			return w
		}
	}
	return nil
}

// compact drops waiters that nobody waits for any more, once they are many.
func (q *waitQueue) compact() {
	if q.abandoned < 64 || q.abandoned < (len(q.list)-q.head)/2 {
		return
	}
	kept := q.list[:0]
	for _, w := range q.list[q.head:] {
		if w.finished {
			w.queued = false
			continue
		}
		kept = append(kept, w)
	}
	clear(q.list[len(kept):])
	q.list, q.head, q.abandoned = kept, 0, 0
}

// levelsAt is the set that everything below end has reached now; mu is held.
func (p *Partition) levelsAt(end int64) []partition.Level {
	p.confirmSession()
	var buf [4]partition.Level
	leader, object := false, false
	for _, l := range p.machine.Levels(buf[:0], end, p.mgr.now()) {
		leader, object = leader || l == partition.Leader, object || l == partition.Object
	}
	return levelSet(leader, object)
}

// await finishes a waiter if its level is reached, or puts it in line; mu is
// held.
func (p *Partition) await(w *waiter) {
	levels := p.levelsAt(w.end)
	for _, l := range levels {
		if l == w.level {
			p.finish(w, levels, nil)
			return
		}
	}
	if w.level == partition.Leader {
		p.leaderWaits.push(w)
		return
	}
	p.objectWaits.push(w)
}

// finish ends a wait; mu is held.
func (p *Partition) finish(w *waiter, levels []partition.Level, err error) {
	if w.finished {
		return
	}
	w.finished, w.levels, w.err = true, levels, err
	if w.done != nil {
		close(w.done)
	}
	if w.ticket != nil {
		p.uncount(w.ticket)
	} else {
		p.waiting--
	}
}

// abandon ends a wait whose caller has gone; mu is held.
func (p *Partition) abandon(w *waiter, err error) {
	p.finish(w, p.levelsAt(w.end), err)
	q := &p.objectWaits
	if w.level == partition.Leader {
		q = &p.leaderWaits
	}
	if w.queued {
		q.abandoned++
		q.compact()
	}
}

func (p *Partition) uncount(t *Ticket) {
	if t.counted {
		t.counted = false
		p.waiting--
	}
}

// unparkOne lets the writer see a withdrawn ticket; mu is held.
func (p *Partition) unparkOne(t *Ticket) {
	for i, other := range p.parked {
		if other != t {
			continue
		}
		p.parked = append(p.parked[:i], p.parked[i+1:]...)
		if t.in.Pipeline != nil {
			t.in.Pipeline.parked--
		}
		p.refuse(t, t.withdrawn)
		return
	}
}
