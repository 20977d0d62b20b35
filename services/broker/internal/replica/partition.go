package replica

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/topicconfig"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/producerstate"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// Partition is one partition on this broker.
type Partition struct {
	mgr       *Manager
	topic     string
	topicID   string
	logID     commitlog.Identity
	partition int32
	key       cluster.Key
	id        *logv1.TopicIdPartition // not to be changed
	ranges    remote.Ranges

	stepped notice // told after every step of the machine

	// Guarded by the manager's mutex.
	seen   topicconfig.Config // the settings last posted
	absent bool               // the cluster's picture did not list it lately
	stale  bool               // its view is to be asked for again
	moved  bool               // its replica list does not name this broker

	mu      sync.Mutex // guards all below; not held across input or output
	machine *partition.Machine
	cfg     topicconfig.Config
	log     *commitlog.Log // nil until first elected
	loading bool
	// hydrations counts how often what the machine knows of the log was replaced.
	hydrations int
	gone       bool // removed, or not ours any more
	away       bool // gone, or about to, because others hold it now

	// busy says that somebody has the writer's role: steps the machine, writes
	// the log, carries out effects.
	busy      bool
	closed    bool          // the manager is gone: nothing is done any more
	idle      chan struct{} // closed when the role is given up, for close
	events    eventQueue
	queue     []*Ticket // appends to judge, from queueHead
	queueHead int
	group     []*Ticket // of the writer, reused
	groupBuf  []byte    // ditto

	parked    []*Ticket // wait for the producer state
	parkTimer *time.Timer

	producers   *ledger        // nil until recovered in the present leadership
	recoveryErr error          // last failure of the recovery
	missing     []missingRange // what the recovery went on without

	objectWaits waitQueue // also readers that wait for visibility
	leaderWaits waitQueue // only while the session is not confirmed
	waiting     int       // tickets and waiters held
	counted     int64     // bytes counted in Manager.unuploaded

	// fence is the one that the running tasks serve; endTasks ends them.
	fence    partition.Fence
	tasks    context.Context
	endTasks context.CancelFunc

	// own is the producer state of the local log while this broker follows, as far
	// as it is known; ownBytes were appended since its last snapshot. Both belong
	// to the writer's role.
	own      *producerstate.State
	ownBytes int64

	copying      bool        // a range is asked for
	copyTimer    *time.Timer // the pause after a failure
	copyFailures int         // in a row
	copyErr      error       // the last of them

	// followers are the other replicas as they told this leader; told is what the
	// leader told this follower.
	followers map[int32]followerReport
	told      leaderReport

	drained bool // takes no appends any more: it is being handed over
	// passing says that it takes none at the moment because another replica is to
	// lead; wish that somebody sees to that. After passFailures in a row no wish is
	// heard before passAfter.
	passing, wish bool
	passFailures  int
	passAfter     time.Time

	cursor  feedCursor
	refused int       // ranges refused in a row
	pause   time.Time // no range is cut before
	lastBad string    // the last refusal, for people
	// fruitless counts the elections asked for since this broker last led.
	fruitless int
}

// feedCursor remembers the chain hash where the next range begins.
type feedCursor struct {
	run, offset int64
	hash        chainhash.Hash
}

// eventQueue holds events for the machine, and others of this package, in order.
// Its length is bounded by what the metadata log says of one partition and by
// the ranges outstanding.
type eventQueue struct {
	list []any
	head int
}

func (q *eventQueue) empty() bool { return q.head == len(q.list) }

func (q *eventQueue) put(ev any) { q.list = append(q.list, ev) }

func (q *eventQueue) putFirst(ev any) {
	q.list = append([]any{ev}, q.list[q.head:]...)
	q.head = 0
}

func (q *eventQueue) take() any {
	ev := q.list[q.head]
	q.list[q.head] = nil
	q.head++
	if q.empty() {
		q.list, q.head = q.list[:0], 0
	}
	return ev
}

// Events of this package beside those of the machine.
type (
	// loaded answers the opening of the log.
	loaded struct {
		log *commitlog.Log
		err error
	}
	// recovered brings the producer state of a leadership.
	recovered struct {
		fence   partition.Fence
		ledger  *ledger
		missing []missingRange
	}
	// configured brings the topic's settings.
	configured struct{ cfg topicconfig.Config }
	// vanished says that the cluster does not list the partition any more,
	// without a deletion that was seen: it is left alone on disk.
	vanished struct{}
	// released says that the partition's replica list may not name this broker any
	// more.
	released struct{}
)

func newPartition(m *Manager, t *cluster.Topic, index int32) (*Partition, error) {
	id, err := commitlog.ParseTopicID(t.ID)
	if err != nil {
		return nil, err
	}
	p := &Partition{
		mgr: m, topic: t.Name, topicID: t.ID, partition: index, key: t.Key(index), cfg: t.Config, seen: t.Config,
		logID:   commitlog.Identity{TopicID: id, CreationOffset: t.CreationOffset, Partition: index},
		id:      &logv1.TopicIdPartition{TopicId: t.ID, TopicCreationOffset: t.CreationOffset, Partition: index},
		machine: partition.New(m.cfg.BrokerID, m.epoch(), partition.LogFacts{}),
	}
	p.tasks, p.endTasks = context.WithCancel(m.root)
	return p, nil
}

// Topic is the topic's name.
func (p *Partition) Topic() string { return p.topic }

// TopicID is the topic's id.
func (p *Partition) TopicID() string { return p.topicID }

// Index is the partition's index.
func (p *Partition) Index() int32 { return p.partition }

// Changed returns a channel that is closed when the partition's state may have
// changed since the call, or earlier.
func (p *Partition) Changed() <-chan struct{} { return p.stepped.next() }

// FeedKey implements walfeed.Source.
func (p *Partition) FeedKey() cluster.Key { return p.key }

func (p *Partition) logger() *slog.Logger {
	return p.mgr.log.With("topic_id", p.topicID, "topic", p.topic, "partition", p.partition)
}

// post hands events to the writer.
func (p *Partition) post(events ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ev := range events {
		p.events.put(ev)
	}
	if !p.busy {
		p.busy = true
		p.startWriter()
	}
}

// startWriter runs the writer in a goroutine of its own; the caller has set busy.
func (p *Partition) startWriter() {
	if !p.mgr.spawn(func() { p.work(nil) }) {
		// The manager is closing.
		p.refuseQueue()
		p.yield()
	}
}

// work holds the writer's role until nothing is left to do, or, for a caller
// that came with its own append, until that is through.
func (p *Partition) work(own *Ticket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case p.closed:
			p.refuseQueue()
			p.yield()
			return
		case !p.events.empty():
			p.handle(p.events.take())
		case p.queueHead < len(p.queue):
			p.appendGroup()
		default:
			p.yield()
			return
		}
		if own != nil && own.settled && (!p.events.empty() || p.queueHead < len(p.queue)) {
			p.startWriter()
			return
		}
	}
}

// yield gives the writer's role up; mu is held.
func (p *Partition) yield() {
	p.busy = false
	if p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
}

// refuseQueue answers appends that nobody will judge any more; mu is held.
func (p *Partition) refuseQueue() {
	for _, t := range p.queue[p.queueHead:] {
		p.refuse(t, ErrStopped)
	}
	p.queue, p.queueHead = nil, 0
}

// handle takes one event; it is called in the writer's role with mu held, and
// gives it up while effects are carried out.
func (p *Partition) handle(ev any) {
	switch e := ev.(type) {
	case loaded:
		p.hydrate(e)
	case recovered:
		p.install(e)
	case configured:
		p.configure(e.cfg)
	case copied:
		p.took(e)
	case filled:
		p.filled(e)
	case retryCopy:
		p.copyTimer = nil
		p.want()
	case drain:
		p.drained = !e.over
		if e.done != nil {
			close(e.done)
		}
	case pass:
		p.passing = e.on
		if e.done != nil {
			close(e.done)
		}
		p.stepped.tell() // appends that wait for a leader may try again
	case released:
		p.release()
	case vanished:
		p.logger().Warn("the cluster does not list the partition any more; its directory is kept")
		p.step(partition.Removed{}, false)
	case partition.Removed:
		p.step(e, true)
	case partition.Event:
		p.step(e, true)
	}
}

// step steps the machine and carries out what it asks for. forget says that a
// removal may take the directory with it.
func (p *Partition) step(ev partition.Event, forget bool) {
	fx := p.machine.Step(ev)
	p.settleTasks()
	p.account()
	p.stepped.tell()
	if len(fx) == 0 {
		return
	}
	p.mu.Unlock()
	for _, e := range fx {
		p.execute(e, forget)
	}
	p.mu.Lock()
}

// settleTasks ends the tasks of an older fence, or of a leadership that is over.
func (p *Partition) settleTasks() {
	v, _ := p.machine.View()
	if v.Fence == p.fence {
		return
	}
	p.fence = v.Fence
	p.endTasks()
	p.tasks, p.endTasks = context.WithCancel(p.mgr.root)
}

// account keeps the broker's sum of bytes that are not in the bucket.
func (p *Partition) account() {
	var now int64
	if s, _ := p.machine.State(); s == partition.Active {
		now = p.machine.Unuploaded()
	}
	if now != p.counted {
		p.mgr.unuploaded.Add(now - p.counted)
		p.counted = now
	}
}

// execute carries out one effect, in the writer's role without mu.
func (p *Partition) execute(fx partition.Effect, forget bool) {
	switch e := fx.(type) {
	case partition.Reconcile:
		p.reconcile(e)
	case partition.CheckHash:
		p.checkHash(e)
	case partition.Open:
		p.task("open", func(ctx context.Context) { p.open(ctx, e) })
	case partition.RecoverProducers:
		own := p.own
		p.own = nil
		p.task("recover producers", func(ctx context.Context) { p.recoverProducers(ctx, e, own) })
	case partition.Activate:
		p.activate(e)
	case partition.Advance:
		p.advance(e.ObjectEnd)
	case partition.Feed:
		p.feedFrom()
	case partition.Deposed:
		p.deposed(e)
	case partition.RequestElection:
		p.logger().Warn("asking for an election", "leader_epoch", e.Fence.LeaderEpoch, "reason", e.Reason)
		p.task("request election", func(ctx context.Context) { p.requestElection(ctx, e) })
	case partition.Truncate:
		p.truncate(e)
	case partition.Fetch:
		p.fetch(e)
	case partition.Forget:
		p.forget(forget)
	}
}

// task runs fn beside the writer; its context ends with the present fence.
func (p *Partition) task(name string, fn func(context.Context)) {
	p.mu.Lock()
	ctx := p.tasks
	p.mu.Unlock()
	if !p.mgr.spawn(func() { fn(ctx) }) {
		p.logger().Debug("not started, the broker is stopping", "task", name)
	}
}

// activate makes the new leadership part of the log.
func (p *Partition) activate(e partition.Activate) {
	p.mu.Lock()
	log := p.log
	p.producers, p.recoveryErr, p.missing = nil, nil, nil
	p.refused, p.pause, p.lastBad = 0, time.Time{}, ""
	p.fruitless, p.drained = 0, false
	p.passing, p.passFailures, p.passAfter = false, 0, time.Time{}
	p.followers, p.told = nil, leaderReport{}
	p.mu.Unlock()
	if err := log.AppendLineage(e.Entry); err != nil {
		p.mu.Lock()
		p.events.putFirst(partition.LogFailed{Err: err})
		p.mu.Unlock()
		return
	}
	p.logger().Info("leading", "leader_epoch", e.Fence.LeaderEpoch, "offset", e.Entry.StartOffset)
}

// advance answers what waited for the object end.
func (p *Partition) advance(end int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.producers != nil {
		if err := p.producers.committedTo(end); err != nil {
			p.events.putFirst(partition.LogFailed{Err: err})
			return
		}
	}
	for w := p.objectWaits.pop(end); w != nil; w = p.objectWaits.pop(end) {
		levels := p.levelsAt(w.end)
		if len(levels) == 0 {
			levels = levelsObject // deposed meanwhile; below the object end all the same
		}
		p.finish(w, levels, nil)
	}
	p.account()
}

// feedFrom begins to send again at the object end.
func (p *Partition) feedFrom() {
	p.mu.Lock()
	if p.producers != nil {
		p.producers.restart()
	}
	p.cursor = feedCursor{}
	wait := time.Until(p.pause)
	p.mu.Unlock()
	if wait <= 0 {
		p.mgr.feed.Wake(p)
		return
	}
	// Refusals in a row: a little patience saves the bucket's bandwidth.
	p.task("feed", func(ctx context.Context) {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
			p.mgr.feed.Wake(p)
		case <-ctx.Done():
		}
	})
}

// deposed answers everything that waited for this leadership.
func (p *Partition) deposed(e partition.Deposed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.logger().Info("leading no more", "reason", e.Reason, "offset", e.Kept)
	for w := p.objectWaits.pop(e.Kept); w != nil; w = p.objectWaits.pop(e.Kept) {
		p.finish(w, levelsObject, nil)
	}
	p.failWaits(&deposedError{reason: e.Reason, err: p.notLeader()})
	if p.producers != nil && p.producers.committed.Missed() == 0 {
		p.own, p.ownBytes = p.producers.committed, 0
	}
	p.producers, p.followers = nil, nil
	p.unpark()
	p.account()
	p.mgr.feed.Remove(p)
}

// deposedError is why an append's outcome is unknown.
type deposedError struct {
	reason string
	err    error
}

func (e *deposedError) Error() string { return "this broker stopped leading: " + e.reason }
func (e *deposedError) Unwrap() error { return e.err }

// failWaits ends every wait; mu is held.
func (p *Partition) failWaits(err error) {
	for _, q := range []*waitQueue{&p.objectWaits, &p.leaderWaits} {
		for w := q.pop(maxOffset); w != nil; w = q.pop(maxOffset) {
			p.finish(w, levelsNone, err)
		}
	}
}

const maxOffset = int64(math.MaxInt64)

// configure takes new settings; in the writer's role with mu held.
func (p *Partition) configure(cfg topicconfig.Config) {
	old := p.cfg
	p.cfg = cfg
	log := p.log
	if log == nil || old.Flush == cfg.Flush {
		return
	}
	p.mu.Unlock()
	err := log.SetFlushPolicy(flushPolicy(cfg))
	p.mu.Lock()
	if err != nil && !errors.Is(err, commitlog.ErrClosed) {
		p.events.putFirst(partition.LogFailed{Err: err})
	}
}

func flushPolicy(cfg topicconfig.Config) commitlog.FlushPolicy {
	if cfg.Flush == topicconfig.FlushAlways {
		return commitlog.FlushAlways
	}
	return commitlog.FlushOS
}

// close ends the partition with the manager, once nothing works on it any more:
// it keeps what a quick return needs and closes the log.
func (p *Partition) close() error {
	p.mu.Lock()
	p.closed = true
	if p.busy {
		// A caller that writes for itself; it stops behind its present step.
		idle := make(chan struct{})
		p.idle = idle
		p.mu.Unlock()
		<-idle
		p.mu.Lock()
	}
	log, state := p.log, p.own
	if p.producers != nil {
		state = p.producers.committed
	}
	p.log = nil
	p.failWaits(ErrStopped)
	p.stepped.tell()
	p.endTasks()
	if p.copyTimer != nil {
		p.copyTimer.Stop()
	}
	if p.parkTimer != nil {
		p.parkTimer.Stop()
	}
	for _, t := range p.parked {
		p.refuse(t, ErrStopped)
	}
	p.parked = nil
	p.mu.Unlock()
	if log == nil {
		return nil
	}
	var err error
	if state != nil && state.Missed() == 0 && state.End() >= log.Start() && state.End() <= log.End() && log.Failed() == nil && log.Damage() == nil {
		snap := state.Snapshot()
		err = log.SaveSnapshot(snap.End, snap.Append(nil))
	}
	return errors.Join(err, log.Close())
}
