package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/state"
)

// errOwnEntry marks an entry that our own decider made and the state refuses: a
// defect, which ends the term but says nothing against the log.
var errOwnEntry = errors.New("the state refuses an entry decided on it")

// command waits in the queue.
type command struct {
	ctx     context.Context //nolint:containedctx // the caller's, to skip commands that nobody waits for
	class   Class
	decide  Decide
	verdict chan verdict // capacity 1: the appender never waits for a caller
}

type verdict struct {
	offset int64
	err    error
}

// term is one leadership, from the election to its end. The appender goroutine
// alone touches head, elector and wakeAt.
type term struct {
	c     *Controller
	lease *lease
	guard metalog.Guard
	epoch int64

	head    *state.State // the committed state plus the group being built
	elector *elector
	// electAt is when to ask the elector again, 0 for not before an event.
	electAt time.Duration
	elect   bool // an event may have changed the elector's answer
	held    *command

	wishes *wishes // has its own lock

	space *space
	// full is true while etcd is too full for elections: the term then waits
	// instead of trying.
	full bool

	queue chan *command // QueueLength: what may wait for the appender

	aborted   chan struct{} // closed by abort
	abortOnce sync.Once
	reason    error // why aborted; written before it is closed

	mu       sync.Mutex // guards all below
	ended    bool       // no command is taken any more
	sessions *sessions
	// unconfirmed is true while the lease is not fresh; when it is again
	// everybody gets a full timeout.
	unconfirmed bool
}

// begin catches up with the log, starts it if it is empty, and writes the entry
// that makes this replica the controller.
func (c *Controller) begin(ctx context.Context, l *lease, guard metalog.Guard) (*term, error) {
	publish := func(e *metadatav1.Entry) error { return c.deps.Hub.Publish([]*metadatav1.Entry{e}) }
	if _, err := c.deps.Log.Load(ctx, c.deps.Hub.End(), publish); err != nil {
		return nil, fmt.Errorf("catch up with the metadata log: %w", err)
	}
	head := c.deps.Hub.Clone()
	t := &term{
		c: c, lease: l, guard: guard, epoch: head.EndOffset(), head: head,
		elector: newElector(c.cfg.SessionTimeout, c.cfg.OpenTimeout, c.cfg.ReplaceTimeout), elect: true,
		wishes: newWishes(c.cfg.RebalanceDelay),
		queue:  make(chan *command, QueueLength), aborted: make(chan struct{}),
		sessions: newSessions(c.cfg.SessionTimeout), space: newSpace(c.cfg.Space, c.deps.Metrics),
	}
	var events []*metadatav1.Event
	if head.EndOffset() == 0 {
		id, err := c.claim(ctx, guard)
		if err != nil {
			return nil, fmt.Errorf("bootstrap: %w", err)
		}
		if events, err = head.DecideBootstrap(id.ClusterID, id.Incarnation); err != nil {
			return nil, fmt.Errorf("bootstrap: %w", err)
		}
		c.log.InfoContext(ctx, "beginning a new cluster", "cluster_id", id.ClusterID, "incarnation", id.Incarnation)
	} else if err := c.checkBucket(ctx, head.ClusterID(), l.ttl/3); err != nil {
		return nil, err
	}
	elected, err := head.DecideControllerElected(c.cfg.MetadataID, c.cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("begin a term: %w", err)
	}
	g := &group{}
	if err := t.stage(g, append(events, elected...), nil); err != nil {
		return nil, fmt.Errorf("begin a term: %w", err)
	}
	if err := t.commit(ctx, g); err != nil {
		return nil, fmt.Errorf("begin a term: %w", err)
	}
	// Nothing is known of earlier heartbeats: everybody has one full timeout.
	now := c.now()
	for _, b := range t.head.Brokers() {
		if b.GetOnline() {
			t.sessions.grant(Member{Broker, b.GetBrokerId(), b.GetBrokerEpoch()}, now)
		}
	}
	for _, r := range t.head.RemoteLogManagers() {
		if r.GetOpen() {
			t.sessions.grant(Member{RemoteLogManager, r.GetRlmId(), r.GetRlmEpoch()}, now)
		}
	}
	return t, nil
}

// checkBucket compares the bucket with the log before a term begins. Only what
// the bucket says is an error: one that does not answer in time must not stop
// elections (design review X2).
func (c *Controller) checkBucket(ctx context.Context, clusterID string, limit time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := CheckMarker(bounded, c.deps.Store, clusterID); errors.Is(err, ErrForeignPrefix) {
		return err
	}
	if c.deps.CheckLog == nil {
		return nil
	}
	if err := c.deps.CheckLog(bounded); fatal(err) {
		return err
	}
	return nil
}

// claim settles the identity of a cluster that is to begin, first in etcd, so
// that a bootstrap cut short anywhere is taken up again, then in the bucket.
func (c *Controller) claim(ctx context.Context, guard metalog.Guard) (Identity, error) {
	now := time.Now()
	fresh, err := encodeIdentity(c.deps.NewIdentity(), now)
	if err != nil {
		return Identity{}, err
	}
	content, err := c.deps.Log.Claim(ctx, guard, fresh)
	if err != nil {
		return Identity{}, err
	}
	id, err := decodeIdentity(content)
	if err != nil {
		return Identity{}, err
	}
	return id, Claim(ctx, c.deps.Store, id, now)
}

// group is what is committed together.
type group struct {
	entries []*metadatav1.Entry
	size    int
	// waiting are the commands whose verdicts depend on the group: those with an
	// entry in it, and those that were judged behind one.
	waiting []pending
}

type pending struct {
	cmd *command
	verdict
}

// stage makes an entry of the events, applies it to the head and adds it to the
// group. errGroupFull leaves everything as it was; so does ErrTooLarge.
func (t *term) stage(g *group, events []*metadatav1.Event, cmd *command) error {
	e := &metadatav1.Entry{
		Offset: t.head.EndOffset(), Incarnation: t.head.Incarnation(), ControllerEpoch: t.epoch, FeatureLevel: state.FeatureLevel,
		AppendTime: timestamppb.Now(), WriteId: t.c.deps.WriteID(), Events: events,
	}
	if created := events[0].GetClusterCreated(); created != nil {
		e.Incarnation = created.GetIncarnation()
	}
	size := proto.Size(e)
	switch {
	case size > metalog.MaxGroupBytes:
		return fmt.Errorf("%w: an entry of %d bytes, at most %d", ErrTooLarge, size, metalog.MaxGroupBytes)
	case g.size+size > metalog.MaxGroupBytes || len(g.entries) == metalog.MaxGroupEntries:
		return errGroupFull
	}
	if err := t.head.Apply(e); err != nil {
		return fmt.Errorf("%w: %w", errOwnEntry, err)
	}
	g.entries = append(g.entries, e)
	g.size += size
	if cmd != nil {
		g.waiting = append(g.waiting, pending{cmd, verdict{offset: e.GetOffset()}})
	}
	return nil
}

var errGroupFull = errors.New("group full")

// run decides and commits until the term ends.
func (t *term) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if err := t.round(ctx); err != nil {
			return err
		}
		if t.held != nil || t.elect && !t.full || len(t.queue) > 0 {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-t.aborted:
				return t.reason
			case <-t.lease.lost:
				return t.lease.err()
			default:
				continue
			}
		}
		timer.Reset(t.nap())
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.aborted:
			return t.reason
		case <-t.lease.lost:
			return t.lease.err()
		case t.held = <-t.queue:
		case <-timer.C:
		}
	}
}

// nap is how long the appender may sleep while no command comes.
func (t *term) nap() time.Duration {
	now := t.c.now()
	// The lease's freshness is looked at this often, which is when sessions are
	// suspended and granted again.
	wait := t.lease.freshFor() / 4
	if t.full {
		return wait
	}
	if t.lease.fresh() { // only then does the end of a session matter
		t.mu.Lock()
		if next, ok := t.sessions.next(); ok {
			wait = min(wait, next-now)
		}
		t.mu.Unlock()
	}
	if t.electAt > 0 {
		wait = min(wait, t.electAt-now)
	}
	return max(wait, time.Millisecond)
}

// round builds one group, commits it and answers.
func (t *term) round(ctx context.Context) error {
	g := &group{}
	full, err := t.housekeeping(g)
	if err != nil {
		return err
	}
	for !full && len(g.waiting) < QueueLength {
		cmd := t.held
		if t.held = nil; cmd == nil {
			select {
			case cmd = <-t.queue:
			default:
			}
		}
		if cmd == nil {
			break
		}
		if full, err = t.decide(g, cmd); err != nil {
			t.answer(g, ErrNotController)
			return err
		}
	}
	if len(g.entries) == 0 {
		t.confirm(g)
		return nil
	}
	began := t.c.now()
	if err := t.commit(ctx, g); err != nil {
		switch {
		case errors.Is(err, metalog.ErrDeposed), errors.Is(err, metalog.ErrConflict):
			t.answer(g, ErrNotController) // certain: nothing of it is in the log
		case errors.Is(err, metalog.ErrRefused):
			t.answer(g, err) // as certain
		default:
			t.answer(g, fmt.Errorf("%w: %w", ErrOutcomeUnknown, err))
		}
		return err
	}
	t.c.deps.Metrics.committed(ctx, len(g.entries), g.size, t.c.now()-began)
	t.answer(g, nil)
	return nil
}

// decide judges one command on the head. full is true if its entry has no place
// in this group; it is then held for the next.
func (t *term) decide(g *group, cmd *command) (full bool, err error) {
	if cmd.ctx.Err() != nil {
		cmd.verdict <- verdict{-1, context.Cause(cmd.ctx)}
		return false, nil
	}
	events, err := cmd.decide(t.head)
	if err == nil && len(events) > 0 {
		err = t.space.admit(cmd.class)
	}
	if err != nil || len(events) == 0 {
		g.waiting = append(g.waiting, pending{cmd, verdict{-1, err}})
		return false, nil
	}
	switch err := t.stage(g, events, cmd); {
	case errors.Is(err, errGroupFull):
		t.held = cmd
		return true, nil
	case errors.Is(err, ErrTooLarge):
		g.waiting = append(g.waiting, pending{cmd, verdict{-1, err}})
		return false, nil
	case err != nil:
		t.c.log.Error("a decided entry can't be applied", "err", err)
		cmd.verdict <- verdict{-1, err}
		return false, err
	}
	return false, nil
}

// housekeeping stages what the clock asks for: the end of sessions, and
// elections.
func (t *term) housekeeping(g *group) (full bool, err error) {
	if t.full = t.space.stopped(ClassVital); t.full {
		return false, nil
	}
	now := t.c.now()
	t.mu.Lock()
	var expired []Member
	if t.confirmedLocked(now) {
		expired = t.sessions.expire(now)
	}
	t.mu.Unlock()
	for i, m := range expired {
		events, err := endSession(t.head, m, state.ReasonSessionExpired)
		if err == nil && len(events) > 0 {
			err = t.stage(g, events, nil)
		}
		switch {
		case errors.Is(err, errGroupFull):
			t.mu.Lock()
			for _, m := range expired[i:] { // overdue at once again
				t.sessions.live[sessionKey{m.Role, m.ID}] = &session{epoch: m.Epoch, deadline: now}
			}
			t.mu.Unlock()
			return true, nil
		case err != nil:
			return false, err
		}
		t.c.log.Warn("session expired", "role", m.Role.String(), "id", m.ID, "epoch", m.Epoch)
	}
	if len(expired) > 0 || t.elect || t.electAt > 0 && t.electAt <= now {
		elections, wait := t.elector.decide(t.head, now)
		t.elect, t.electAt = false, 0
		if wait > 0 {
			t.electAt = now + wait
		}
		if len(elections) > 0 {
			events, err := t.head.DecideElections(elections...)
			if err == nil {
				err = t.stage(g, events, nil)
			}
			if t.elect = true; errors.Is(err, errGroupFull) { // look again behind this group in any case
				return true, nil
			}
			if err != nil {
				return false, fmt.Errorf("elect leaders: %w", err)
			}
			t.c.deps.Metrics.elected(elections)
		}
		return t.replace(g, now)
	}
	return false, nil
}

// replace gives new replicas to partitions that have lost all theirs.
func (t *term) replace(g *group, now time.Duration) (full bool, err error) {
	replacements, wait := t.elector.replace(t.head, now)
	if wait > 0 && (t.electAt == 0 || now+wait < t.electAt) {
		t.electAt = now + wait
	}
	if len(replacements) == 0 {
		return false, nil
	}
	events, err := t.head.DecideReplacements(replacements...)
	if err == nil {
		err = t.stage(g, events, nil)
	}
	t.elect = true
	if errors.Is(err, errGroupFull) {
		t.elector.replaceAt = now // they are still due
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("replace replicas: %w", err)
	}
	for _, r := range replacements {
		t.c.log.Warn("all replicas of a partition are gone, another broker takes it",
			"topic_creation_offset", r.Partition.TopicCreationOffset, "partition", r.Partition.Partition, "broker", r.BrokerID)
	}
	t.c.deps.Metrics.replaced(len(replacements))
	return false, nil
}

// endSession decides that a member's session is over.
func endSession(st *state.State, m Member, reason string) ([]*metadatav1.Event, error) {
	if m.Role == Broker {
		return st.DecideBrokerOffline(m.ID, m.Epoch, reason), nil
	}
	return st.DecideCloseRemoteLogManager(m.ID, m.Epoch, reason)
}

// commit writes the group, publishes it, and learns from it. It is not ended by
// the end of ctx: a group under way is brought to its end, which the lease
// bounds.
func (t *term) commit(ctx context.Context, g *group) error {
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.lease.ttl)
	defer cancel()
	go func() { // ends with bounded
		select {
		case <-t.lease.lost:
			cancel()
		case <-bounded.Done():
		}
	}()
	if _, err := t.c.deps.Log.Append(bounded, t.guard, g.entries); err != nil {
		return err
	}
	if err := t.c.deps.Hub.Publish(g.entries); err != nil {
		return err
	}
	now := t.c.now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range g.entries {
		for _, ev := range e.GetEvents() {
			t.elect = t.elect || moves(ev)
			switch kind := ev.GetKind().(type) {
			case *metadatav1.Event_BrokerRegistered:
				t.sessions.grant(Member{Broker, kind.BrokerRegistered.GetBrokerId(), e.GetOffset()}, now)
			case *metadatav1.Event_BrokerOffline:
				t.sessions.end(Member{Broker, kind.BrokerOffline.GetBrokerId(), kind.BrokerOffline.GetBrokerEpoch()})
			case *metadatav1.Event_RemoteLogManagerRegistered:
				t.sessions.grant(Member{RemoteLogManager, kind.RemoteLogManagerRegistered.GetRlmId(), e.GetOffset()}, now)
			case *metadatav1.Event_RemoteLogManagerClosed:
				t.sessions.end(Member{RemoteLogManager, kind.RemoteLogManagerClosed.GetRlmId(), kind.RemoteLogManagerClosed.GetRlmEpoch()})
			}
		}
	}
	return nil
}

// confirm answers commands that need no entry: their verdicts stand on the
// committed state, which is the present one only while nobody else may lead.
func (t *term) confirm(g *group) {
	if t.lease.fresh() {
		t.answer(g, nil)
	} else {
		t.answer(g, ErrNotConfirmed)
	}
}

// answer gives every command of the group its verdict, or all of them failed.
func (t *term) answer(g *group, failed error) {
	for _, p := range g.waiting {
		if failed != nil {
			p.verdict = verdict{-1, failed}
		}
		p.cmd.verdict <- p.verdict
	}
}

// enqueue adds a command unless the term is over or the queue full.
func (t *term) enqueue(cmd *command) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return ErrNotController
	}
	select {
	case t.queue <- cmd:
		return nil
	default:
		return ErrQueueFull
	}
}

// heartbeat renews a session whether or not it can be answered: it proves that
// the member is alive.
func (t *term) heartbeat(m Member) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return ErrNotController
	}
	now := t.c.now()
	confirmed := t.confirmedLocked(now)
	switch alive := t.sessions.heartbeat(m, now); {
	case !confirmed:
		return ErrNotConfirmed // and if overdue, then only because nobody was answered
	case !alive:
		return ErrStaleMember
	}
	return nil
}

// confirmedLocked says whether heartbeats may be answered and sessions ended.
// When the lease is fresh again after a while in which it was not, everybody
// gets one full timeout: nobody was answered meanwhile, so nobody is to blame.
func (t *term) confirmedLocked(now time.Duration) bool {
	switch fresh := t.lease.fresh(); {
	case !fresh:
		t.unconfirmed = true
		return false
	case t.unconfirmed:
		t.unconfirmed = false
		for key, s := range t.sessions.live {
			t.sessions.grant(Member{key.role, key.id, s.epoch}, now)
		}
	}
	return true
}

// abort ends the term from outside the appender.
func (t *term) abort(why error) {
	t.abortOnce.Do(func() {
		t.reason = why
		close(t.aborted)
	})
}

// end refuses everything that still waits.
func (t *term) end() {
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	if t.held != nil {
		t.held.verdict <- verdict{-1, ErrNotController}
		t.held = nil
	}
	for {
		select {
		case cmd := <-t.queue:
			cmd.verdict <- verdict{-1, ErrNotController}
		default:
			return
		}
	}
}
