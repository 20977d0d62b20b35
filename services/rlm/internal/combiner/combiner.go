package combiner

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/rlm/planner"
)

// Combiner is the shell around the planner. Make it with New, run it with Run.
type Combiner struct {
	cfg     Config
	deps    Deps
	log     *slog.Logger
	metrics *metrics
	start   time.Time

	wake   chan struct{}   // holds a token when the planner's next deadline changed
	ctx    context.Context //nolint:containedctx // of the work that Run owns
	cancel context.CancelCauseFunc
	work   sync.WaitGroup // added to under mu while not stopped

	mu         sync.Mutex // guards all below; never held across I/O
	plan       *planner.Planner
	ran        bool
	identity   Identity           // of the last registration
	identities map[int64]Identity // by epoch, of epochs with objects outstanding
	streams    map[planner.StreamID]*Stream
	nextStream planner.StreamID
	objects    map[planner.Object]*object
	buffered   map[*item]struct{} // items that hold buffer
	used       int64              // buffer in use
	waiters    []*waiter          // for buffer, first come first served
	draining   bool
	stopped    bool
	idle       chan struct{} // closed when the planner becomes idle while draining
}

// waiter waits for buffer.
type waiter struct {
	it      *item
	granted chan struct{}
}

// New makes a combiner. Nothing is uploaded before Run and Registered.
func New(cfg Config, deps Deps) (*Combiner, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if deps.Store == nil || deps.Committer == nil || deps.OnUnusable == nil || deps.MetadataEnd == nil || deps.Logger == nil || deps.Meter == nil {
		return nil, errors.New("combiner: a dependency is missing")
	}
	cfg = cfg.withDefaults()
	plan := cfg.Plan
	plan.MaxBytes -= objectOverhead
	c := &Combiner{
		cfg: cfg, deps: deps, log: deps.Logger.With("component", "combiner"), start: time.Now(),
		wake: make(chan struct{}, 1), plan: planner.New(plan),
		identities: make(map[int64]Identity), streams: make(map[planner.StreamID]*Stream),
		objects: make(map[planner.Object]*object), buffered: make(map[*item]struct{}),
		idle: make(chan struct{}),
	}
	var err error
	if c.metrics, err = newMetrics(deps.Meter, c); err != nil {
		return nil, err
	}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	return c, nil
}

// now is the planner's clock.
func (c *Combiner) now() time.Duration { return time.Since(c.start) }

// Run keeps the planner's time and owns all uploads and commits. When ctx ends
// it cancels them, waits for them and returns; what had no verdict stays
// without one.
func (c *Combiner) Run(ctx context.Context) error {
	c.mu.Lock()
	if c.ran {
		c.mu.Unlock()
		return errors.New("combiner: Run was called before")
	}
	c.ran = true
	c.mu.Unlock()

	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for ctx.Err() == nil {
		c.mu.Lock()
		at, ok := c.plan.Wake()
		c.mu.Unlock()
		wait := time.Hour
		if ok {
			wait = max(at-c.now(), 0)
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
		case <-c.wake:
		case <-timer.C:
			c.mu.Lock()
			c.apply(c.plan.Tick(c.now()))
			c.mu.Unlock()
		}
	}
	c.mu.Lock()
	c.stopped = true
	for _, w := range c.waiters {
		close(w.granted)
	}
	c.waiters = nil
	c.mu.Unlock()
	c.cancel(context.Cause(ctx))
	c.work.Wait()
	return context.Cause(ctx)
}

// Registered begins an epoch.
func (c *Combiner) Registered(id Identity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.identity = id
	c.identities[id.Epoch] = id
	c.apply(c.plan.Registered(c.now(), id.Epoch))
	c.tidy()
}

// EpochClosed ends an epoch.
func (c *Combiner) EpochClosed(epoch int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.apply(c.plan.EpochClosed(c.now(), epoch))
	c.tidy()
}

// tidy forgets objects and identities that nothing needs. c.mu is held.
func (c *Combiner) tidy() {
	needed := map[int64]bool{c.identity.Epoch: true}
	for id, o := range c.objects {
		c.drop(id, o)
		needed[id.Epoch] = true
	}
	for epoch := range c.identities {
		if !needed[epoch] {
			delete(c.identities, epoch)
		}
	}
}

// Identity is the present registration; false while there is none.
func (c *Combiner) Identity() (Identity, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.identity, c.plan.Epoch() != 0 && c.plan.Epoch() == c.identity.Epoch
}

// Drain takes no more ranges, uploads and commits what it has without
// lingering, and returns when everything is answered or ctx ends.
func (c *Combiner) Drain(ctx context.Context) error {
	c.mu.Lock()
	c.draining = true
	c.apply(c.plan.Flush(c.now()))
	idle := c.idle
	c.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// admits returns why no range is taken. c.mu is held.
func (c *Combiner) admits() error {
	switch {
	case c.stopped:
		return ErrStopped
	case c.draining:
		return ErrDraining
	}
	return nil
}

// reserve takes an item's cost from the buffer, waiting for it.
func (c *Combiner) reserve(ctx context.Context, it *item) error {
	c.mu.Lock()
	if len(c.waiters) == 0 && c.fits(it) {
		c.take(it)
		c.mu.Unlock()
		return nil
	}
	w := &waiter{it: it, granted: make(chan struct{})}
	c.waiters = append(c.waiters, w)
	c.mu.Unlock()
	select {
	case <-w.granted:
		c.mu.Lock()
		defer c.mu.Unlock()
		if _, ok := c.buffered[it]; !ok {
			return ErrStopped
		}
		return nil
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, x := range c.waiters {
		if x == w {
			c.waiters = append(c.waiters[:i], c.waiters[i+1:]...)
			break
		}
	}
	c.release(it) // it may have been granted at the same moment
	return context.Cause(ctx)
}

// fits reports whether an item has room. One item always fits an empty buffer.
func (c *Combiner) fits(it *item) bool { return c.used == 0 || c.used+it.cost <= c.cfg.BufferBytes }

func (c *Combiner) take(it *item) {
	c.used += it.cost
	c.buffered[it] = struct{}{}
}

// release gives an item's buffer back and lets waiters in. c.mu is held.
func (c *Combiner) release(it *item) {
	if _, ok := c.buffered[it]; !ok {
		return
	}
	delete(c.buffered, it)
	c.used -= it.cost
	n := 0
	for n < len(c.waiters) && c.fits(c.waiters[n].it) {
		c.take(c.waiters[n].it)
		close(c.waiters[n].granted)
		n++
	}
	c.waiters = c.waiters[n:]
}

// apply does what the planner asked for. c.mu is held; whatever blocks is done
// in goroutines.
func (c *Combiner) apply(e *planner.Effects) {
	for _, a := range e.Answers {
		it := a.Range.Item.(*item)
		it.answered = true
		if it.stream.closed {
			continue
		}
		c.metrics.answered(a.Verdict.GetOutcome())
		it.stream.deliver(a, it)
		if it.object == nil || it.object.running == 0 {
			c.release(it)
		}
	}
	for _, a := range e.Cancels {
		if o := c.objects[a.Object]; o != nil && o.cancels[a.Attempt] != nil {
			o.cancels[a.Attempt]()
		}
	}
	for _, u := range e.Uploads {
		c.upload(u)
	}
	for _, a := range e.Commits {
		c.commit(a)
	}
	if e.Reregister {
		c.deps.OnUnusable(c.identity.Epoch)
	}
	if c.draining && c.plan.Idle() {
		select {
		case <-c.idle:
		default:
			close(c.idle)
		}
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// ref is the identity of an attempt's object. c.mu is held.
func (c *Combiner) ref(a planner.Attempt, o *object) *logv1.ObjectRef {
	return &logv1.ObjectRef{Incarnation: o.identity.Incarnation, RlmEpoch: a.Epoch, Sequence: a.Sequence, Attempt: a.Attempt}
}

// Stats describes what is held, for metrics and tests.
func (c *Combiner) Stats() (plan planner.Stats, bufferedBytes int64, streams int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.plan.Stats(), c.used, len(c.streams)
}
