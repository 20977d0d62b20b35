package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/braidlog/braid/pkg/metaclient"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/internal/rlmpool"
	"github.com/braidlog/braid/services/broker/internal/walfeed"
	"github.com/braidlog/braid/services/broker/partition"
)

// loadingAtOnce bounds how many logs are opened and recovered at once.
const loadingAtOnce = 4

// Manager owns the partitions of one broker.
type Manager struct {
	cfg     Config
	deps    Deps
	log     *slog.Logger
	metrics *metrics
	start   time.Time // zero of the monotonic clock that machines get

	follower *cluster.Follower
	pool     *rlmpool.Pool
	peers    *rlmpool.Pool // other brokers
	copier   *copier
	remote   *remote.Reader
	feed     *walfeed.Feed
	session  *metaclient.Session
	dir      *commitlog.DataDir // set before any partition is made
	member   membership

	root     context.Context // of everything that runs; ends with Run
	endRoot  context.CancelFunc
	loading  chan struct{} // semaphore
	ready    chan struct{}
	draining atomic.Bool
	stopping atomic.Bool   // Drain was called: no wishes are taken any more
	wishes   chan struct{} // semaphore of the wishes under way
	assigned chan struct{} // capacity 1: the set of partitions may have changed
	caughtUp chan struct{} // capacity 1: a followed partition has copied everything

	changes    notice       // told after every change of the cluster's picture
	unuploaded atomic.Int64 // bytes of all partitions that are not in the bucket
	lease      atomic.Pointer[lease]

	workers sync.WaitGroup
	mu      sync.Mutex // guards all below
	closing bool       // no goroutine may be started any more
	parts   map[cluster.Key]*Partition
	// index is an unchanging copy of parts, for who looks a partition up.
	index   atomic.Pointer[map[cluster.Key]*Partition]
	current metaclient.Registration // zero while there is none
}

// lease is what is known of the broker's session.
type lease struct {
	epoch   int64
	sentAt  time.Duration // when the last confirmed heartbeat was sent
	timeout time.Duration
}

// NewManager checks its input and starts nothing.
func NewManager(cfg Config, deps Deps) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := deps.validate(); err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, deps: deps, log: deps.Logger.With("component", "replica"), start: time.Now(),
		loading: make(chan struct{}, loadingAtOnce), ready: make(chan struct{}), assigned: make(chan struct{}, 1), caughtUp: make(chan struct{}, 1),
		wishes: make(chan struct{}, wishesAtOnce),
		parts:  map[cluster.Key]*Partition{},
	}
	var err error
	if m.metrics, err = newMetrics(deps.Meter, m); err != nil {
		return nil, err
	}
	m.root, m.endRoot = context.WithCancel(context.Background())
	m.pool = rlmpool.New(deps.DialRemoteLog)
	m.peers = rlmpool.New(deps.DialBroker)
	m.copier = newCopier(m)
	m.follower = cluster.NewFollower(deps.Metadata.Any(), deps.Logger, m.changed)
	m.remote = remote.NewReader(cfg.Zone, m.pool, m.follower.View, int64(cfg.ReadCacheBytes))
	m.feed = walfeed.New(walfeed.Options{
		Zone: cfg.Zone, ZonePatience: cfg.ZonePatience.Std(), VerdictTimeout: cfg.VerdictTimeout.Std(),
		Pool: m.pool, View: m.follower.View, Identity: m.identity, Logger: deps.Logger,
	})
	m.session, err = deps.Metadata.NewSession(metaclient.SessionOptions{
		Role:         metaclient.BrokerRole(m.registerRequest, m.applied),
		Logger:       deps.Logger,
		OnRegistered: m.registered,
		OnConfirmed:  m.confirmed,
		OnLost:       m.lost,
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// now is the monotonic time that machines get.
func (m *Manager) now() time.Duration { return time.Since(m.start) }

// spawn starts a goroutine that Run waits for; false once it does so.
func (m *Manager) spawn(fn func()) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return false
	}
	m.workers.Go(fn)
	return true
}

// Run keeps the broker a member of the cluster and its partitions going. It
// returns when ctx ends, after [Manager.Drain] was called or not, with every
// goroutine ended and every log closed; or with an error that makes going on
// pointless: a data directory of another cluster, an id in use. Call it once.
func (m *Manager) Run(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(gctx, m.endRoot)
	defer stop()
	g.Go(func() error { return m.follower.Run(gctx) })
	g.Go(func() error { return m.join(gctx) })
	err := g.Wait()
	m.endRoot()
	if ctx.Err() != nil && (errors.Is(err, context.Cause(ctx)) || errors.Is(err, ctx.Err())) {
		err = nil
	}
	return errors.Join(err, m.close())
}

// join opens the data directory once the cluster is known, registers, and
// follows what concerns this broker's partitions.
func (m *Manager) join(ctx context.Context) error {
	select {
	case <-m.follower.Ready():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	v := m.follower.View()
	bootID, err := commitlog.KernelBootID(m.deps.FS)
	if err != nil {
		m.log.WarnContext(ctx, "the kernel's boot id can't be read", "err", err)
	}
	dir, err := commitlog.OpenDataDir(m.deps.FS, m.cfg.DataDir, commitlog.Owner{ClusterID: v.ClusterID, BrokerID: m.cfg.BrokerID}, bootID)
	if err != nil {
		return fmt.Errorf("open the data directory: %w", err)
	}
	m.dir = dir
	if err := m.member.load(m.deps.FS, m.cfg.DataDir); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := m.session.Run(gctx)
		if err == nil { // stopped by Drain
			<-gctx.Done()
			return context.Cause(gctx)
		}
		return err
	})
	g.Go(func() error { return m.feed.Run(gctx) })
	g.Go(func() error { return m.watchSegments(gctx) })
	g.Go(func() error { return m.keepSynced(gctx) })
	g.Go(func() error { return m.reports(gctx) })
	g.Go(func() error { return m.member.keep(gctx, m.position, m.log) })
	return g.Wait()
}

// close ends what Run left.
func (m *Manager) close() error {
	m.draining.Store(true)
	m.mu.Lock()
	m.closing = true
	m.mu.Unlock()
	m.workers.Wait()
	var err error
	for _, p := range m.all() {
		err = errors.Join(err, p.close())
	}
	if err != nil {
		m.log.Error("a log was not closed cleanly", "err", err)
	}
	out := errors.Join(m.pool.Close(), m.peers.Close())
	if m.dir != nil {
		out = errors.Join(out, m.member.store(m.position()), m.dir.Close(err == nil))
	}
	return errors.Join(err, out)
}

// all lists the partitions.
func (m *Manager) all() []*Partition {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*Partition, 0, len(m.parts))
	for _, p := range m.parts {
		out = append(out, p)
	}
	return out
}

// Ready is closed once the broker is registered and knows the cluster.
func (m *Manager) Ready() <-chan struct{} { return m.ready }

// Registration is the broker's current epoch and the incarnation it is of; ok
// is false while it has none.
func (m *Manager) Registration() (brokerEpoch int64, incarnation uint32, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.current.Epoch, m.current.Incarnation, m.current.ClusterID != ""
}

// epoch is the latest broker epoch, also one that was lost.
func (m *Manager) epoch() int64 {
	if l := m.lease.Load(); l != nil {
		return l.epoch
	}
	return 0
}

// Cluster is the newest picture of the cluster, never nil.
func (m *Manager) Cluster() *cluster.View { return m.follower.View() }

// Changed returns a channel that is closed when [Manager.Lookup] may answer
// otherwise than at the time of the call.
func (m *Manager) Changed() <-chan struct{} { return m.changes.next() }

// Feed says how the stream to the remote-log manager is.
func (m *Manager) Feed() walfeed.Status { return m.feed.Status() }

// Unuploaded is the number of bytes of all partitions that are not in the bucket
// yet.
func (m *Manager) Unuploaded() int64 { return m.unuploaded.Load() }

// Lookup finds a partition that this broker may hold. An unknown topic or
// partition is an UnknownPartitionError; one that is held elsewhere a
// NotLeaderError that names its leader; before [Manager.Ready] it is an
// UnavailableError.
func (m *Manager) Lookup(topic string, index int32) (*Partition, error) {
	v := m.follower.View()
	t, ok := v.Topic(topic)
	if !ok {
		select {
		case <-m.ready:
			return nil, &UnknownPartitionError{Topic: topic, Partition: -1}
		default:
			return nil, &UnavailableError{Reason: NotReady, Message: "the broker does not know the cluster yet", Retry: 200 * time.Millisecond}
		}
	}
	if index < 0 || int(index) >= len(t.Partitions) {
		return nil, &UnknownPartitionError{Topic: topic, Partition: index}
	}
	if parts := m.index.Load(); parts != nil {
		if p := (*parts)[t.Key(index)]; p != nil {
			return p, nil
		}
	}
	b, epoch, ok := v.Leader(t, index)
	if !ok {
		return nil, &NotLeaderError{Epoch: epoch}
	}
	if b.ID == m.cfg.BrokerID {
		return nil, &RecoveringError{Reason: "the partition was just assigned", Retry: 100 * time.Millisecond}
	}
	return nil, &NotLeaderError{LeaderID: b.ID, Address: b.Address, Epoch: epoch}
}

// changed follows the cluster's picture: new partitions, settings, and topics
// that are gone.
func (m *Manager) changed(v *cluster.View) {
	if m.root.Err() != nil {
		return
	}
	defer m.changes.tell()
	// Closing connections that nobody uses any more.
	_ = m.pool.Keep(v.RemoteLogManagers())
	_ = m.peers.KeepIf(func(address string) bool {
		return slices.ContainsFunc(v.Brokers(), func(b cluster.Broker) bool { return b.Address == address })
	})
	m.assign()
}

// assign follows the newest assignment of partitions.
func (m *Manager) assign() {
	var fresh bool
	m.mu.Lock()
	v := m.follower.View()
	var update []func()
	v.Topics(func(t *cluster.Topic) bool {
		for i := range t.Partitions {
			key := t.Key(int32(i))
			p := m.parts[key]
			if !holds(t.Partitions[i].Replicas, m.cfg.BrokerID) {
				if p != nil && !p.moved && movedFrom(t.Partitions[i], m.cfg.BrokerID) {
					p.moved = true
					update = append(update, func() { p.post(released{}) })
				}
				continue
			}
			if p != nil {
				p.moved = false
				if cfg := t.Config; p.seen != cfg {
					p.seen = cfg
					update = append(update, func() { p.post(configured{cfg}) })
				}
				continue
			}
			p, err := newPartition(m, t, int32(i))
			if err != nil {
				m.log.Error("a partition can't be held", "topic", t.Name, "partition", i, "err", err)
				continue
			}
			m.parts[key], fresh = p, true
		}
		return true
	})
	for key, p := range m.parts {
		if _, ok := v.TopicByCreation(key.CreationOffset); !ok && !p.absent {
			fresh = true
		}
	}
	if fresh {
		m.publish()
	}
	m.mu.Unlock()
	for _, fn := range update {
		fn()
	}
	if fresh {
		m.reassign()
	}
}

// publish renews the index; mu is held.
func (m *Manager) publish() {
	parts := maps.Clone(m.parts)
	m.index.Store(&parts)
}

func (m *Manager) reassign() {
	select {
	case m.assigned <- struct{}{}:
	default:
	}
}

func holds(replicas []int32, id int32) bool {
	for _, r := range replicas {
		if r == id {
			return true
		}
	}
	return false
}

// removed forgets a partition. One that was held by others, and is this broker's
// again meanwhile, gets a successor; after a deletion the cluster's picture may
// list it for a moment still, and it gets none.
func (m *Manager) removed(p *Partition, away bool) {
	m.mu.Lock()
	if m.parts[p.key] == p {
		delete(m.parts, p.key)
		m.publish()
	}
	m.mu.Unlock()
	m.changes.tell()
	m.reassign() // it need not be watched any more
	if away && m.root.Err() == nil {
		m.assign()
	}
}

// registered takes a new broker epoch: whatever was led is fenced.
func (m *Manager) registered(r metaclient.Registration) {
	m.mu.Lock()
	m.current = r
	m.lease.Store(&lease{epoch: r.Epoch, sentAt: -r.SessionTimeout, timeout: r.SessionTimeout})
	m.mu.Unlock()
	for _, p := range m.all() {
		p.post(partition.Registered{BrokerEpoch: r.Epoch})
	}
	select {
	case <-m.ready:
	default:
		close(m.ready)
	}
}

// confirmed takes a confirmed heartbeat.
func (m *Manager) confirmed(c metaclient.Confirmation) {
	old := m.lease.Load()
	if old == nil || old.epoch != c.Epoch {
		return
	}
	next := &lease{epoch: c.Epoch, sentAt: c.SentAt.Sub(m.start), timeout: old.timeout}
	m.lease.Store(next)
	if m.now() >= old.sentAt+old.timeout {
		// LEADER acks were held back.
		for _, p := range m.all() {
			p.sessionBack()
		}
	}
	m.wished(c.Handovers)
}

func (m *Manager) lost(epoch int64, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.current.Epoch == epoch {
		m.current = metaclient.Registration{}
	}
}

// identity is what the feed introduces the broker with.
func (m *Manager) identity() (walfeed.Identity, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return walfeed.Identity{
		ClusterID: m.current.ClusterID, Incarnation: m.current.Incarnation, BrokerID: m.cfg.BrokerID, BrokerEpoch: m.current.Epoch,
	}, m.current.ClusterID != ""
}

func (m *Manager) position() cluster.Position { return m.follower.View().Position }

// applied is the metadata offset (exclusive) that the broker has applied.
func (m *Manager) applied() int64 { return m.position().Offset }

// registerRequest introduces the broker.
func (m *Manager) registerRequest() *metadatav1.RegisterBrokerRequest {
	pos := m.position()
	if seen := m.member.position(); seen.Incarnation == pos.Incarnation && seen.Offset > pos.Offset {
		pos = seen // what a former life has applied tells of a rolled-back log
	}
	start := m.dir.Start()
	return &metadatav1.RegisterBrokerRequest{
		BrokerId: m.cfg.BrokerID, Address: m.cfg.AdvertiseAddress, Zone: m.cfg.Zone,
		DirectoryId: m.member.directoryID(), ClusterId: m.follower.View().ClusterID,
		AppliedMetadataOffset: pos.Offset, Incarnation: pos.Incarnation,
		LogsIntact: start.Clean || start.Created,
	}
}

// confirmSession tells the machine of the session, if it is the one that it
// leads under; mu is held.
func (p *Partition) confirmSession() {
	l := p.mgr.lease.Load()
	if v, _ := p.machine.View(); l != nil && l.epoch == v.Fence.BrokerEpoch && l.sentAt >= 0 {
		p.machine.ConfirmSession(l.sentAt, l.timeout)
	}
}

// sessionLive reports whether LEADER acks may be given now; mu is held.
func (p *Partition) sessionLive() bool {
	p.confirmSession()
	return p.machine.SessionLive(p.mgr.now())
}

// sessionBack gives the LEADER acks that were held back.
func (p *Partition) sessionBack() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.sessionLive() {
		return
	}
	if s, _ := p.machine.State(); s != partition.Active {
		return
	}
	for w := p.leaderWaits.pop(maxOffset); w != nil; w = p.leaderWaits.pop(maxOffset) {
		p.await(w)
	}
}
