package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/topicconfig"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/producerstate"
	"github.com/braidlog/braid/services/broker/partition"
)

// AppendInput is one append.
type AppendInput struct {
	// Batches are one or more whole record batches back to back, each validated
	// (record.Batch.Validate, its records decodable, neither transactional nor
	// control). Ownership passes: base offsets and leader epochs are written in
	// place.
	Batches []byte
	// Level to wait for; 0 is the topic's min.ack.level.
	Level partition.Level
	// ExpectedLeaderEpoch, when above 0, refuses the append under any other.
	ExpectedLeaderEpoch int32
	// Pipeline, when given, keeps the append in order with the others of the
	// pipeline and refuses it once one of them was refused.
	Pipeline *Pipeline
}

// Pipeline is a sequence of appends to one partition under one leadership. The
// first refusal ends it. The zero Pipeline is ready for use; its appends must be
// handed to Submit or Enqueue one after the other.
type Pipeline struct {
	// All fields are guarded by the partition's mutex.
	bound      bool
	leadership lineage.Leadership
	broken     error
	parked     int
}

// AppendResult says where records are and how safe.
type AppendResult struct {
	// Base and End are the offsets [Base, End).
	Base, End int64
	// Leadership wrote them.
	Leadership lineage.Leadership
	// Levels is the set of levels reached when the answer was given.
	Levels []partition.Level
	// Duplicate says that the batches were stored before; the answer is the
	// first one with the levels reached since.
	Duplicate bool
	// AppendTime is the leader's wall clock at the append; zero for a duplicate.
	AppendTime time.Time
}

// groupBytes bounds one write to the log.
const groupBytes = 4 << 20

// Submit appends and returns once the batches are in the leader's log; or it
// returns a typed error and nothing was stored. The one exception is a failed
// local write: then the error is an OutcomeUnknownError.
func (p *Partition) Submit(ctx context.Context, in AppendInput) (*Ticket, error) {
	t := p.newTicket(ctx, in)
	if !t.settled {
		p.mu.Lock()
		inline := p.enqueue(t)
		p.mu.Unlock()
		if inline {
			// Nobody writes at the moment: this goroutine does, at least until its
			// own append is through.
			p.work(t)
		}
	}
	if err := t.Admitted(ctx); err != nil {
		return nil, err
	}
	return t, nil
}

// Enqueue hands an append to the partition's writer and returns at once; appends
// of one goroutine are judged and stored in the order in which they were handed
// over. ctx bounds only the wait for the producer state before the append.
func (p *Partition) Enqueue(ctx context.Context, in AppendInput) *Ticket {
	t := p.newTicket(ctx, in)
	if t.settled {
		return t
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.enqueue(t) {
		p.startWriter()
	}
	return t
}

// enqueue puts a ticket in line and reports whether the caller got the writer's
// role with it; mu is held.
func (p *Partition) enqueue(t *Ticket) bool {
	if p.waiting >= p.mgr.cfg.MaxWaiting {
		p.refuse(t, &TooManyRequestsError{Limit: p.mgr.cfg.MaxWaiting})
		return false
	}
	p.waiting++
	t.counted = true
	p.queue = append(p.queue, t)
	if p.busy {
		return false
	}
	p.busy = true
	return true
}

// newTicket looks at the input alone; what is wrong with it settles the ticket.
func (p *Partition) newTicket(ctx context.Context, in AppendInput) *Ticket {
	t := &Ticket{p: p, in: in}
	t.level, t.ticket = in.Level, t
	if d, ok := ctx.Deadline(); ok {
		t.deadline = d
	}
	if err := t.survey(); err != nil {
		p.mu.Lock()
		p.refuse(t, err)
		p.mu.Unlock()
	}
	return t
}

// survey counts what the input holds.
func (t *Ticket) survey() error {
	if len(t.in.Batches) == 0 {
		return &InvalidBatchError{Reason: "is missing"}
	}
	i := 0
	err := record.Walk(t.in.Batches, func(b record.Batch) error {
		if err := b.ValidateHeader(); err != nil {
			return &InvalidBatchError{Index: i, Reason: "has an impossible header", Err: err}
		}
		if b.IsControl() || b.IsTransactional() {
			return &InvalidBatchError{Index: i, Reason: "is transactional or a control batch"}
		}
		t.maxBatch = max(t.maxBatch, int64(len(b)))
		t.records += int64(b.RecordCount())
		pb, ok := b.Producer()
		switch {
		case i == 0:
			t.idempotent, t.batch = ok, pb
		case ok != t.idempotent || ok && (pb.ProducerID != t.batch.ProducerID || pb.ProducerEpoch != t.batch.ProducerEpoch):
			return &InvalidBatchError{Index: i, Reason: "is of another producer than the first"}
		case ok && pb.BaseSequence != record.NextSequence(t.lastSequence, 1):
			return &InvalidBatchError{Index: i, Reason: "does not continue the sequence of the one before"}
		}
		if ok {
			t.lastSequence = pb.LastSequence
		}
		i++
		return nil
	})
	if err != nil {
		if invalid := (*InvalidBatchError)(nil); errors.As(err, &invalid) {
			return err
		}
		return &InvalidBatchError{Index: i, Reason: "is damaged", Err: err}
	}
	t.batches = i
	return nil
}

// appendGroup judges what waits and writes what was admitted in one go; it is
// called in the writer's role with mu held, and gives it up for the write.
func (p *Partition) appendGroup() {
	group, size, base := p.group[:0], 0, int64(0)
	next := int64(-1)
	for p.queueHead < len(p.queue) && size < groupBytes {
		t := p.queue[p.queueHead]
		if size > 0 && size+len(t.in.Batches) > groupBytes {
			break
		}
		p.queue[p.queueHead] = nil
		p.queueHead++
		admitted, err := p.judge(t, next, int64(size))
		switch {
		case err != nil:
			p.refuse(t, err)
		case admitted:
			if next < 0 {
				base = t.end - t.records
			}
			next = t.end
			size += len(t.in.Batches)
			group = append(group, t)
		}
	}
	if p.queueHead == len(p.queue) {
		p.queue, p.queueHead = p.queue[:0], 0
	}
	if len(group) == 0 {
		p.group = group
		return
	}
	log := p.log
	p.mu.Unlock()
	buf := group[0].in.Batches
	if len(group) > 1 {
		buf = p.groupBuf[:0]
		for _, t := range group {
			buf = append(buf, t.in.Batches...)
		}
		p.groupBuf = buf
	}
	now := time.Now()
	out, err := log.Append(buf, commitlog.Position{Offset: base}, now)
	if err == nil && out.End != next {
		err = fmt.Errorf("%w: the log ends at %d, not at %d", commitlog.ErrNotAppendable, out.End, next)
	}
	p.mu.Lock()
	if err != nil {
		// Whether the bytes are there is not known before the log is opened again:
		// the partition is of no use to anybody until then (field report B014).
		p.logger().Error("append failed, the partition goes offline", "offset", base, "err", err)
		p.events.putFirst(partition.LogFailed{Err: err})
		for _, t := range group {
			t.settle()
			p.finish(&t.waiter, nil, err)
		}
		p.clearGroup(group)
		return
	}
	p.machine.Appended(next, int64(size))
	p.account()
	for _, t := range group {
		t.appendTime = now
		t.in.Batches = nil
		t.settle()
		p.await(&t.waiter)
	}
	p.mgr.metrics.appended(len(group), size)
	p.clearGroup(group)
	p.mgr.feed.Wake(p)
}

func (p *Partition) clearGroup(group []*Ticket) {
	clear(group)
	p.group = group[:0]
	if cap(p.groupBuf) > groupBytes {
		p.groupBuf = nil
	}
}

// judge decides on one append; next is where it would go when others of the
// group come before it, -1 otherwise, and before is their size. admitted is false
// without an error when the ticket was parked, or answered as a duplicate.
func (p *Partition) judge(t *Ticket, next, before int64) (admitted bool, err error) {
	if t.withdrawn != nil {
		return false, t.withdrawn
	}
	pipe := t.in.Pipeline
	if pipe != nil && pipe.broken != nil {
		return false, &PipelineBrokenError{Err: pipe.broken}
	}
	base, leadership, err := p.machine.Admit()
	if err != nil {
		return false, p.notActive(err)
	}
	if p.drained || p.mgr.draining.Load() {
		return false, ErrStopped
	}
	if p.passing {
		return false, &RecoveringError{Reason: "the leadership is being handed to another replica", Retry: 100 * time.Millisecond}
	}
	if next >= 0 {
		base = next
	}
	if e := t.in.ExpectedLeaderEpoch; e > 0 && e != leadership.LeaderEpoch {
		return false, &FencedEpochError{Expected: e, Current: leadership.LeaderEpoch}
	}
	if pipe != nil && pipe.bound && pipe.leadership != leadership {
		// The leadership it was bound to is over, though this broker leads again: its
		// sender finds the leader anew, as after any other election.
		return false, &PipelineBrokenError{Err: p.notLeader()}
	}
	if err := p.checkLevel(t); err != nil {
		return false, err
	}
	size := int64(len(t.in.Batches))
	if t.maxBatch > p.cfg.MaxBatchBytes {
		return false, &BatchTooLargeError{Size: t.maxBatch, Limit: p.cfg.MaxBatchBytes}
	}
	if t.idempotent {
		stored, err := p.judgeProducer(t, leadership)
		if err != nil || stored {
			return false, err
		}
	} else if pipe != nil && pipe.parked > 0 {
		return false, p.park(t)
	}
	if err := p.checkBacklog(size, before); err != nil {
		return false, err
	}
	if pipe != nil {
		pipe.bound, pipe.leadership = true, leadership
	}
	p.assign(t, base, leadership)
	return true, nil
}

// assign writes base offsets and leader epoch and notes the producer's batches.
func (p *Partition) assign(t *Ticket, base int64, leadership lineage.Leadership) {
	t.base, t.leadership = base, leadership
	for rest := t.in.Batches; len(rest) > 0; {
		b := record.Batch(rest)
		b = b[:b.Length()]
		b.SetBaseOffset(base)
		b.SetLeaderEpoch(leadership.LeaderEpoch)
		base = b.EndOffset()
		if pb, ok := b.Producer(); ok {
			p.producers.appended(pb, p.mgr.now())
		}
		rest = rest[len(b):]
	}
	t.end = base
}

func (p *Partition) checkLevel(t *Ticket) error {
	least := partition.Leader
	if p.cfg.MinAckLevel == topicconfig.LevelObject {
		least = partition.Object
	}
	if t.level == 0 {
		t.level = least
	}
	switch {
	case t.level == partition.Object:
		return nil
	case t.level == partition.Leader && least == partition.Leader:
		if !p.sessionLive() {
			return &UnavailableError{Reason: MetadataUnreachable, Message: "the broker's session is not confirmed: LEADER acks are not given", Retry: time.Second}
		}
		return nil
	case least == partition.Object:
		return &LevelUnreachableError{Level: t.level, Levels: levelsObject}
	default:
		return &LevelUnreachableError{Level: t.level, Levels: levelsBoth}
	}
}

func (p *Partition) checkBacklog(size, before int64) error {
	tail := p.machine.Unuploaded() + before
	if limit := p.cfg.WALMaxUnuploadedBytes; tail > 0 && tail+size > limit {
		return &BacklogFullError{Scope: "partition", Limit: limit, Unuploaded: tail}
	}
	if limit, all := int64(p.mgr.cfg.MaxUnuploadedBytes), p.mgr.unuploaded.Load()+before; all > 0 && all+size > limit {
		return &BacklogFullError{Scope: "broker", Limit: limit, Unuploaded: all}
	}
	return nil
}

// judgeProducer says whether an idempotent append is stored already, and then
// makes the ticket wait for the original's level (I7, design review F5). It
// parks the ticket while the producer state is not known.
func (p *Partition) judgeProducer(t *Ticket, leadership lineage.Leadership) (handled bool, err error) {
	pipe := t.in.Pipeline
	if !p.machine.ProducersReady() || p.producers == nil || pipe != nil && pipe.parked > 0 {
		return true, p.park(t)
	}
	p.producers.expire(p.mgr.now(), p.cfg.ProducerExpiry)
	state := p.producers.head
	if tag := uint32(t.batch.ProducerID >> 32); tag != leadership.Incarnation {
		kept := state.Kept(t.batch.ProducerID)
		return false, &ProducerFencedError{LastSequence: kept.LastSequence, LastOffset: kept.LastOffset,
			Reason: fmt.Sprintf("its id was issued by incarnation %08x, the leadership is of %08x", tag, leadership.Incarnation)}
	}
	first, err := state.Check(t.batch)
	if err != nil {
		return false, p.producerError(err)
	}
	if first.Verdict == producerstate.Accept {
		return false, nil
	}
	// A repetition is answered as a whole: what was stored in one request is
	// repeated in one.
	base, end := first.BaseOffset, first.EndOffset
	i := 0
	for rest := t.in.Batches; len(rest) > 0; i++ {
		b := record.Batch(rest)
		b = b[:b.Length()]
		rest = rest[len(b):]
		if i == 0 {
			continue
		}
		pb, _ := b.Producer()
		d, err := state.Check(pb)
		if err != nil || d.Verdict != producerstate.Duplicate || d.BaseOffset != end {
			return false, &InvalidBatchError{Index: i, Reason: "was not stored together with the ones before: repeat requests as they were first sent", Err: err}
		}
		end = d.EndOffset
	}
	t.base, t.end, t.duplicate = base, end, true
	v, _ := p.machine.View()
	t.leadership, _ = v.Lineage.LeadershipAt(base)
	t.in.Batches = nil
	t.settle()
	p.await(&t.waiter)
	return true, nil
}

func (p *Partition) producerError(err error) error {
	var gap *producerstate.SequenceGapError
	var fenced *producerstate.FencedError
	var limit *producerstate.LimitError
	switch {
	case errors.As(err, &gap):
		v, _ := p.machine.View()
		return &SequenceGapError{LastSequence: gap.Kept.LastSequence, LastOffset: gap.Kept.LastOffset, EpochStart: v.EpochStart}
	case errors.As(err, &fenced):
		return &ProducerFencedError{LastSequence: fenced.Kept.LastSequence, LastOffset: fenced.Kept.LastOffset, Reason: err.Error()}
	case errors.As(err, &limit):
		return &TooManyProducersError{Limit: limit.Max}
	}
	return err
}

// park keeps a ticket until the producer state is known, bounded by its deadline
// and the recovery patience.
func (p *Partition) park(t *Ticket) error {
	now := time.Now()
	if t.parkedUntil.IsZero() {
		t.parkedUntil = now.Add(p.mgr.cfg.RecoveryPatience.Std())
		if !t.deadline.IsZero() && t.deadline.Before(t.parkedUntil) {
			t.parkedUntil = t.deadline
		}
	}
	if !now.Before(t.parkedUntil) {
		return p.producersUnknown()
	}
	if t.in.Pipeline != nil {
		t.in.Pipeline.parked++
	}
	p.parked = append(p.parked, t)
	p.armParking(t.parkedUntil.Sub(now))
	return nil
}

func (p *Partition) producersUnknown() error {
	reason := "the producer state is not known yet"
	if p.recoveryErr != nil {
		reason += ": " + p.recoveryErr.Error()
	}
	return &RecoveringError{Reason: reason, Retry: time.Second, Waited: true}
}

// armParking makes sure that parked tickets are looked at again; mu is held.
func (p *Partition) armParking(after time.Duration) {
	if p.parkTimer != nil {
		return
	}
	p.parkTimer = time.AfterFunc(after, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.parkTimer = nil
		p.unpark()
	})
}

// unpark puts every parked ticket back in line, in front, in order; mu is held.
func (p *Partition) unpark() {
	if len(p.parked) == 0 {
		return
	}
	for _, t := range p.parked {
		if t.in.Pipeline != nil {
			t.in.Pipeline.parked--
		}
	}
	p.queue = append(p.parked, p.queue[p.queueHead:]...)
	p.queueHead, p.parked = 0, nil
	if !p.busy {
		p.busy = true
		p.startWriter()
	}
}

// refuse settles a ticket with an error; nothing was stored. mu is held.
func (p *Partition) refuse(t *Ticket, err error) {
	t.refusal = err
	if pipe := t.in.Pipeline; pipe != nil && pipe.broken == nil {
		pipe.broken = err
	}
	t.in.Batches = nil
	t.settle()
	p.uncount(t)
	t.finished = true
	if t.done != nil {
		close(t.done)
	}
	p.mgr.metrics.refused(err)
}
