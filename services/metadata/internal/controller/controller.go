package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/internal/watch"
	"github.com/braidlog/braid/services/metadata/state"
)

var (
	// ErrNotController: this replica does not lead; nothing was changed.
	ErrNotController = errors.New("not the controller")
	// ErrNotConfirmed: this replica leads, but etcd has not confirmed it lately
	// enough to be believed; nothing was changed.
	ErrNotConfirmed = errors.New("leadership not confirmed by etcd")
	// ErrOutcomeUnknown: the command may be in the log, or may still come into
	// it. An idempotent command is to be repeated to whoever is controller.
	ErrOutcomeUnknown = errors.New("outcome of the command unknown")
	// ErrQueueFull: too many commands wait; nothing was changed.
	ErrQueueFull = errors.New("too many commands waiting")
	// ErrTooLarge: the command's entry would exceed the limit; nothing was
	// changed.
	ErrTooLarge = errors.New("command too large")
	// ErrStaleMember: the session has ended or belongs to another epoch.
	ErrStaleMember = errors.New("session over")
)

// QueueLength is how many commands may wait to be decided.
const QueueLength = 4096

// Config is the controller's data. All fields but RebalanceDelay are required.
type Config struct {
	// MetadataID of this replica, from 1.
	MetadataID int32
	// Address at which this replica is reached, host:port.
	Address string
	// LeaseTTL is the time to live of the leadership in etcd; whole seconds.
	LeaseTTL time.Duration
	// SessionTimeout of brokers and remote-log managers.
	SessionTimeout time.Duration
	// OpenTimeout is how long an elected leader may take to open its epoch.
	OpenTimeout time.Duration
	// ReplaceTimeout is how long a partition is left without a live replica
	// before a live broker is made one.
	ReplaceTimeout time.Duration
	// RebalanceDelay is how long a live replica stands before the leader in the
	// order of preference before the leader is asked to hand over; 0 never asks.
	RebalanceDelay time.Duration
	// Space says which commands stop as etcd fills.
	Space SpaceConfig
}

// Deps are the live things a controller needs. All but Logger are required.
type Deps struct {
	Client *clientv3.Client
	Log    *metalog.Log
	Hub    *watch.Hub
	Store  MarkerStore
	// CheckLog is asked before a term begins whether the log, as applied, can be
	// the whole one: an error that is [metalog.Fatal] ends the replica, others,
	// of a store that can't be reached, count for nothing. May be nil.
	CheckLog func(context.Context) error
	// NewIdentity makes the identity of a cluster that is to begin.
	NewIdentity func() Identity
	// WriteID returns 16 random bytes.
	WriteID func() []byte
	Logger  *slog.Logger
	Metrics *Metrics
}

// Controller leads, when elected. See the package comment.
type Controller struct {
	cfg   Config
	deps  Deps
	log   *slog.Logger
	began time.Time // origin of now

	mu      sync.Mutex // guards all below
	term    *term      // nil while this replica does not lead
	trouble error      // why the last attempt to lead failed; nil once one succeeds
}

// New returns a controller that does nothing yet.
func New(cfg Config, deps Deps) *Controller {
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	return &Controller{cfg: cfg, deps: deps, log: deps.Logger.With("component", "controller"), began: time.Now()}
}

// now is the monotonic clock of sessions and leases.
func (c *Controller) now() time.Duration { return time.Since(c.began) }

// Run campaigns and leads, term after term, until ctx ends: then it resigns,
// with the group under way committed, and returns nil. It returns an error only
// when this replica must not go on ([metalog.Fatal], [ErrForeignPrefix], an
// entry that the state can't apply).
func (c *Controller) Run(ctx context.Context) error {
	wait := 50 * time.Millisecond
	for {
		led, err := c.runTerm(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case fatal(err):
			return err
		}
		c.log.WarnContext(ctx, "term ended", "err", err)
		c.mu.Lock()
		c.trouble = err
		c.mu.Unlock()
		if led {
			wait = 50 * time.Millisecond
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		wait = min(2*wait, 2*time.Second)
	}
}

// fatal says whether no later term could do better.
func fatal(err error) bool {
	var unknown *state.UnknownEventError
	var bad *state.BadEntryError
	return metalog.Fatal(err) || errors.Is(err, ErrForeignPrefix) || errors.As(err, &unknown) ||
		errors.As(err, &bad) && !errors.Is(err, errOwnEntry)
}

// runTerm campaigns once and leads until something ends the term; led tells
// whether it came to lead.
func (c *Controller) runTerm(ctx context.Context) (led bool, err error) {
	l, err := grantLease(ctx, c.deps.Client, c.cfg.LeaseTTL, c.now, c.log, c.deps.Metrics.EtcdError)
	if err != nil {
		return false, err
	}
	defer func() {
		// On a stop everything here has little time; an unreachable etcd lets the
		// lease expire.
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		l.close(bounded)
	}()
	guard, err := campaign(ctx, c.deps.Client, c.deps.Log.LeaderPrefix(), l, fmt.Sprintf("%d %s", c.cfg.MetadataID, c.cfg.Address))
	if err != nil {
		return false, err
	}
	defer func() {
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if rerr := resign(bounded, c.deps.Client, guard); rerr != nil {
			c.log.WarnContext(ctx, "could not resign, the lease will expire", "err", rerr)
		}
	}()
	t, err := c.begin(ctx, l, guard)
	if err != nil {
		return false, err
	}
	watching := make(chan struct{})
	watch, stopWatching := context.WithCancel(ctx)
	go func() {
		defer close(watching)
		t.space.watch(watch, c.deps.Client, c.log, func(ctx context.Context) error { return c.deps.Log.Touch(ctx, guard) })
	}()
	defer func() { stopWatching(); <-watching }()
	c.log.InfoContext(ctx, "elected controller", "controller_epoch", t.epoch, "offset", t.head.EndOffset())
	c.mu.Lock()
	c.term, c.trouble = t, nil
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		c.term = nil
		c.mu.Unlock()
		t.end()
	}()
	return true, t.run(ctx)
}

// current is the present term, nil while this replica does not lead.
func (c *Controller) current() *term {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.term
}

// Leading returns the epoch of the present term; false while this replica does
// not lead.
func (c *Controller) Leading() (epoch int64, ok bool) {
	if t := c.current(); t != nil {
		return t.epoch, true
	}
	return 0, false
}

// Trouble is why this replica failed to lead or to campaign when it last tried;
// nil if nothing went wrong since it last led, or ever.
func (c *Controller) Trouble() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.trouble
}

// Leadership is the guard of the present term, for work in etcd beside the log's
// appends; false while this replica does not lead.
func (c *Controller) Leadership() (metalog.Guard, bool) {
	if t := c.current(); t != nil {
		return t.guard, true
	}
	return metalog.Guard{}, false
}

// Status describes the controller for metrics.
type Status struct {
	Leading  bool
	Queue    int // commands waiting
	Sessions int // live ones
	// SpaceInUse and SpaceQuota are those of etcd, in bytes; 0 while unknown.
	SpaceInUse, SpaceQuota int64
}

// Status returns the present numbers.
func (c *Controller) Status() Status {
	t := c.current()
	if t == nil {
		return Status{}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	used, quota := t.space.now()
	return Status{Leading: true, Queue: len(t.queue), Sessions: len(t.sessions.live), SpaceInUse: used, SpaceQuota: quota}
}

// Observe is told every entry that came from the log, by whomever it was
// written: one by a later controller ends the present term.
func (c *Controller) Observe(entries []*metadatav1.Entry) {
	t := c.current()
	if t == nil {
		return
	}
	for _, e := range entries {
		if e.GetControllerEpoch() > t.epoch {
			t.abort(fmt.Errorf("controller %d has written entry %d", e.GetControllerEpoch(), e.GetOffset()))
			return
		}
	}
}

// Decide judges a command: it is called once, by the appender, with the state
// that holds everything before the command. It returns the events that make the
// command true, none if it is true already, or why it is refused. It must not
// block, change the state or keep it.
type Decide func(*state.State) ([]*metadatav1.Event, error)

// Submit queues a command and waits for its verdict. It returns the offset of
// the command's entry, -1 if it needed none, and an error of decide as it is. A
// command that needs an entry is refused with a [*SpaceError] when etcd is too
// full for its class. When ctx ends first, or with [ErrOutcomeUnknown], the
// command may have happened; after any other error it has not.
func (c *Controller) Submit(ctx context.Context, class Class, decide Decide) (offset int64, err error) {
	t := c.current()
	if t == nil {
		return -1, ErrNotController
	}
	cmd := &command{ctx: ctx, class: class, decide: decide, verdict: make(chan verdict, 1)}
	if err := t.enqueue(cmd); err != nil {
		return -1, err
	}
	select {
	case v := <-cmd.verdict:
		return v.offset, v.err
	case <-ctx.Done():
		return -1, context.Cause(ctx)
	}
}

// Heartbeat renews a member's session. nil means that the heartbeat may be
// confirmed, under the controller epoch returned.
func (c *Controller) Heartbeat(m Member) (epoch int64, err error) {
	t := c.current()
	if t == nil {
		return 0, ErrNotController
	}
	return t.epoch, t.heartbeat(m)
}

// Handovers are the leaderships that a broker is asked to hand over now, at most
// [MaxHandovers]; none while this replica does not lead. While there are more
// the calls go round.
func (c *Controller) Handovers(brokerID int32) (out []*metadatav1.Handover) {
	if t := c.current(); t != nil {
		c.deps.Hub.Read(func(st *state.State) { out = t.wishes.of(st, brokerID, c.now()) })
	}
	return out
}
