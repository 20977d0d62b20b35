package walfeed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/rlmpool"
)

// MaxRangeBytes is the size up to which ranges are cut; one batch may be larger.
const MaxRangeBytes = 1 << 20

// Source is a partition as the feed sees it. Its methods must not block for
// long and must not call the feed, except Wake.
type Source interface {
	// FeedKey identifies the partition.
	FeedKey() cluster.Key
	// NextRange cuts the next range to send, of at most limit bytes; the first
	// batch may be larger unless strict is set. It reads the bytes into buf where
	// they fit. ok is false when there is nothing to send; held is true when
	// there is, but it is larger than limit.
	NextRange(buf []byte, limit int, strict bool) (r *remotelogv1.WalRange, ok, held bool)
	// Verdict answers a range sent.
	Verdict(v *remotelogv1.WalVerdict)
	// Lost says that the stream ended while ranges were unanswered.
	Lost()
}

// Identity is what the feed introduces the broker with.
type Identity struct {
	ClusterID   string
	Incarnation uint32
	BrokerID    int32
	BrokerEpoch int64
}

// Options configure a Feed; all are required but Zone.
type Options struct {
	Zone           string
	ZonePatience   time.Duration
	VerdictTimeout time.Duration
	Pool           *rlmpool.Pool
	View           func() *cluster.View
	// Identity is the broker's present registration; ok is false while it has
	// none.
	Identity func() (id Identity, ok bool)
	Logger   *slog.Logger
}

// Status says how the feed is.
type Status struct {
	// RLMID and Zone are of the manager in use; RLMID is 0 for none.
	RLMID int32
	Zone  string
	// Since is when that manager was admitted, or since when there is none.
	Since time.Time
	// LastError is why the last stream ended, nil if none did.
	LastError error
	// OldestUnanswered is when the oldest range without a verdict was sent, zero
	// for none; OutstandingBytes how much is unanswered.
	OldestUnanswered time.Time
	OutstandingBytes int64
}

// Feed is the broker's end of AppendWal.
type Feed struct {
	opts Options
	log  *slog.Logger
	wake chan struct{} // capacity 1: something changed for the sender

	mu    sync.Mutex // guards all below
	flows map[cluster.Key]*flow
	ready []*flow // with something to send, in turn; a queue from readyHead
	head  int
	// credits of the present stream
	streamCredit, partitionCredit int64
	outstanding                   int64
	current                       cluster.RemoteLogManager // ID 0 = none
	since                         time.Time
	lastErr                       error
	failed                        map[int32]failure // by manager
	noZoneSince                   time.Time         // since when the own zone could not be used
}

// failure remembers that a manager's stream ended badly.
type failure struct {
	at    time.Time
	count int
}

// flow is the feed's view of one source.
type flow struct {
	src    Source
	queued bool // in ready
	// blocked: has something to send and waits for a verdict's credit.
	blocked     bool
	outstanding int64
	pending     []sentRange // unanswered, oldest first
}

type sentRange struct {
	run, base int64
	size      int64
	at        time.Time
}

// New makes a feed; nothing happens before Run.
func New(opts Options) *Feed {
	return &Feed{
		opts: opts, log: opts.Logger.With("component", "walfeed"),
		wake:  make(chan struct{}, 1),
		flows: map[cluster.Key]*flow{}, failed: map[int32]failure{},
		since: time.Now(), noZoneSince: time.Now(),
	}
}

// Wake says that a source has something to send. It never blocks and may be
// called with the source's locks held.
func (f *Feed) Wake(s Source) {
	f.mu.Lock()
	fl := f.flows[s.FeedKey()]
	if fl == nil {
		fl = &flow{src: s}
		f.flows[s.FeedKey()] = fl
	}
	f.enqueue(fl)
	f.mu.Unlock()
	f.nudge()
}

// Remove forgets a source that will not send any more. Its outstanding ranges
// are still counted until they are answered or the stream ends.
func (f *Feed) Remove(s Source) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl := f.flows[s.FeedKey()]; fl != nil && !fl.queued && len(fl.pending) == 0 {
		delete(f.flows, s.FeedKey())
	}
}

// Status tells how the feed is.
func (f *Feed) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return Status{
		RLMID: f.current.ID, Zone: f.current.Zone, Since: f.since, LastError: f.lastErr,
		OldestUnanswered: f.oldest(), OutstandingBytes: f.outstanding,
	}
}

func (f *Feed) nudge() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// enqueue puts a flow in line; mu is held.
func (f *Feed) enqueue(fl *flow) {
	fl.blocked = false
	if fl.queued {
		return
	}
	fl.queued = true
	f.ready = append(f.ready, fl)
}

// dequeue takes the flow whose turn it is; mu is held.
func (f *Feed) dequeue() *flow {
	if f.head == len(f.ready) {
		return nil
	}
	fl := f.ready[f.head]
	f.ready[f.head] = nil
	f.head++
	if f.head == len(f.ready) {
		f.ready, f.head = f.ready[:0], 0
	} else if f.head > 1024 && f.head > len(f.ready)/2 {
		n := copy(f.ready, f.ready[f.head:])
		clear(f.ready[n:])
		f.ready, f.head = f.ready[:n], 0
	}
	fl.queued = false
	return fl
}

// oldest is when the oldest unanswered range was sent; mu is held.
func (f *Feed) oldest() time.Time {
	var at time.Time
	if f.outstanding == 0 {
		return at
	}
	for _, fl := range f.flows {
		if len(fl.pending) > 0 && (at.IsZero() || fl.pending[0].at.Before(at)) {
			at = fl.pending[0].at
		}
	}
	return at
}

var (
	errNoManager  = errors.New("no remote-log manager can be used")
	errNoSession  = errors.New("the broker is not registered")
	errSwitch     = errors.New("a remote-log manager of the own zone is back")
	errVerdict    = errors.New("no verdict in time")
	errOtherEpoch = errors.New("the broker registered again")
	errClosed     = errors.New("the remote-log manager's epoch was closed")
)

// pace is how often the feed looks at its timers.
const pace = 250 * time.Millisecond

// Run sends until ctx ends.
func (f *Feed) Run(ctx context.Context) error {
	for {
		if !f.busy() {
			// Nothing to send: no stream is needed.
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-f.wake:
				continue
			}
		}
		m, err := f.choose(time.Now())
		if err == nil {
			err = f.serve(ctx, m)
			f.ended(ctx, m, err)
		} else {
			f.mu.Lock()
			f.lastErr = err
			f.mu.Unlock()
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, errSwitch) {
			continue
		}
		timer := time.NewTimer(pace / 2)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
	}
}

func (f *Feed) busy() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.head < len(f.ready)
}

// choose picks a manager: one of the own zone, or any once the zone's patience
// is over; one that failed lately only when there is no other.
func (f *Feed) choose(now time.Time) (cluster.RemoteLogManager, error) {
	id, ok := f.opts.Identity()
	if !ok {
		return cluster.RemoteLogManager{}, errNoSession
	}
	ranked := rlmpool.Rank(f.opts.View().RemoteLogManagers(), f.opts.Zone, fmt.Sprintf("broker/%d", id.BrokerID))
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noZoneSince.IsZero() {
		f.noZoneSince = now
	}
	patient := now.Sub(f.noZoneSince) < f.opts.ZonePatience
	best, oldest := -1, time.Time{}
	for i, m := range ranked {
		if m.Zone != f.opts.Zone && patient {
			continue
		}
		fail, bad := f.failed[m.ID]
		if !bad || now.Sub(fail.at) >= penalty(fail.count) {
			best = i
			break
		}
		// Only those that failed lately are left: the one longest ago.
		if best < 0 || fail.at.Before(oldest) {
			best, oldest = i, fail.at
		}
	}
	if best < 0 {
		return cluster.RemoteLogManager{}, errNoManager
	}
	if fail, bad := f.failed[ranked[best].ID]; bad && now.Sub(fail.at) < pace {
		return cluster.RemoteLogManager{}, errNoManager
	}
	return ranked[best], nil
}

// penalty is how long a manager that failed is avoided.
func penalty(count int) time.Duration {
	return min(time.Second<<min(count, 5), 20*time.Second)
}

// ended cleans up behind a stream.
func (f *Feed) ended(ctx context.Context, m cluster.RemoteLogManager, err error) {
	now := time.Now()
	f.mu.Lock()
	var lost []Source
	for key, fl := range f.flows {
		fl.outstanding = 0
		if len(fl.pending) > 0 {
			clear(fl.pending)
			fl.pending = fl.pending[:0]
			lost = append(lost, fl.src)
		} else if fl.blocked {
			f.enqueue(fl)
		} else if !fl.queued {
			delete(f.flows, key)
		}
	}
	f.outstanding, f.streamCredit, f.partitionCredit = 0, 0, 0
	f.current, f.since, f.lastErr = cluster.RemoteLogManager{}, now, err
	bad := !errors.Is(err, errSwitch) && !errors.Is(err, errOtherEpoch) && ctx.Err() == nil
	if m.Zone == f.opts.Zone && f.noZoneSince.IsZero() {
		f.noZoneSince = now
	}
	if bad {
		count := f.failed[m.ID].count + 1
		if errors.Is(err, errVerdict) {
			// It had its time: another one at once, and no early return.
			count = max(count, 4)
			f.noZoneSince = now.Add(-f.opts.ZonePatience)
		}
		f.failed[m.ID] = failure{at: now, count: count}
	}
	f.mu.Unlock()
	for _, s := range lost {
		s.Lost()
	}
	if bad {
		f.log.WarnContext(ctx, "stream to a remote-log manager ended", "peer", m.Address, "err", err, "lost", len(lost))
	}
}
