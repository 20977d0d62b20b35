package snapshot

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/state"
)

// KeeperConfig is a [Keeper]'s data. All fields are required.
type KeeperConfig struct {
	// TailBytes: a snapshot is due once the entries since the last one have more
	// bytes than this and than the last one.
	TailBytes int64
	// Interval: a snapshot is due when the last one is this old and there are
	// entries since.
	Interval time.Duration
	// Check is how often the keeper looks whether something is due.
	Check time.Duration
}

// Trimmer is the log in etcd.
type Trimmer interface {
	Log
	Trim(ctx context.Context, g metalog.Guard, to metalog.Start) (revision, deleted int64, err error)
	Compact(ctx context.Context, revision int64) error
}

// Applied is what this replica has applied of the log.
type Applied interface {
	// Log returns the end of what was applied, and how many bytes the entries had
	// that were applied since the process began: a number that only rises.
	Log() (end, bytes int64)
	// Identity is the cluster's; zero before its log has begun.
	Identity() (clusterID string, incarnation uint32)
	// Clone returns a copy of the applied state.
	Clone() *state.State
}

// Deps are the live things a [Keeper] needs. All are required.
type Deps struct {
	Applied Applied
	Log     Trimmer
	Disk    *Disk
	// Store is the cluster's object store.
	Store Store
	// Leadership returns the guard of this replica's leadership, false while it
	// does not lead.
	Leadership func() (metalog.Guard, bool)
	Logger     *slog.Logger
	Metrics    *Metrics
}

// Keeper takes snapshots of the applied state to the disk when they are due. On
// the controller it also stores them in the bucket, trims the log behind the
// older of the two newest there, has etcd compacted, and deletes what is older.
//
// When a snapshot is due depends on the replica's last one, whoever leads or led
// meanwhile (KAFKA-14300), and never on entries that are not applied yet.
type Keeper struct {
	cfg  KeeperConfig
	deps Deps
	log  *slog.Logger

	// The goroutine of Run alone uses these.
	last      Info
	lastBytes int64     // Applied's count at the last snapshot
	lastTime  time.Time // of the last one
	uploaded  ID        // the last one that this replica saw in the bucket
	trimmed   ID        // the last one that this replica trimmed to and compacted behind
	takeAt    time.Time // after a failure
	publishAt time.Time
	failures  [2]int // in a row: taking, publishing

	logStart atomic.Int64

	mu      sync.Mutex // guards trouble
	trouble error
}

// NewKeeper returns a keeper of a replica that has loaded what it begins with.
func NewKeeper(cfg KeeperConfig, deps Deps) *Keeper {
	return &Keeper{cfg: cfg, deps: deps, log: deps.Logger}
}

// Run works until ctx ends, and then returns nil. A write under way to the disk
// is completed.
func (k *Keeper) Run(ctx context.Context) error {
	k.begin(time.Now())
	ticker := time.NewTicker(k.cfg.Check)
	defer ticker.Stop()
	for {
		k.step(ctx, time.Now())
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// begin takes over what earlier processes left on the disk.
func (k *Keeper) begin(now time.Time) {
	k.lastTime = now
	end, _ := k.deps.Applied.Log()
	_, incarnation := k.deps.Applied.Identity()
	if list := k.deps.Disk.List(incarnation); len(list) > 0 && list[0].End <= end {
		k.last = list[0]
		k.lastTime = now.Add(-min(max(k.deps.Disk.Age(list[0], now), 0), k.cfg.Interval))
	}
}

// step does what is due.
func (k *Keeper) step(ctx context.Context, now time.Time) {
	tail, err := k.tail(ctx)
	if err == nil && now.After(k.takeAt) && k.due(now, tail.Start.Offset) {
		err := k.take(ctx, now)
		k.takeAt = now.Add(k.settle(ctx, 0, "take", err))
	}
	if guard, leads := k.deps.Leadership(); leads && now.After(k.publishAt) && k.last.End > 0 {
		err := k.publish(ctx, guard)
		k.publishAt = now.Add(k.settle(ctx, 1, "publish", err))
	}
}

// tail looks at the log's start now and then; etcd being away is nobody's news
// here.
func (k *Keeper) tail(ctx context.Context) (metalog.Tail, error) {
	tail, err := k.deps.Log.Tail(ctx)
	if err == nil {
		k.logStart.Store(tail.Start.Offset)
	}
	return tail, err
}

// settle notes the outcome of an attempt and returns how long to leave off.
func (k *Keeper) settle(ctx context.Context, which int, what string, err error) time.Duration {
	if err == nil || ctx.Err() != nil {
		k.failures[which] = 0
		if err == nil {
			k.setTrouble(nil)
		}
		return 0
	}
	k.failures[which]++
	k.setTrouble(fmt.Errorf("%s: %w", what, err))
	k.deps.Metrics.failed(ctx, what)
	if errors.Is(err, ErrDiffers) {
		k.log.ErrorContext(ctx, "two replicas disagree about the metadata state", "err", err)
	} else {
		k.log.WarnContext(ctx, "metadata snapshot failed, will try again", "step", what, "err", err)
	}
	return min(time.Second<<min(k.failures[which], 6), time.Minute)
}

func (k *Keeper) setTrouble(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.trouble = err
}

// Trouble is why the last attempt failed; nil if it did not.
func (k *Keeper) Trouble() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.trouble
}

// LogStart is the log's start as last seen.
func (k *Keeper) LogStart() int64 { return k.logStart.Load() }

// due says whether a snapshot is to be taken now. One is due at once when the
// log was trimmed behind the snapshots of others and none of ours reaches its
// start: readers of this replica would find nothing to begin with.
func (k *Keeper) due(now time.Time, logStart int64) bool {
	end, bytes := k.deps.Applied.Log()
	switch {
	case end == k.last.End || end == 0:
		return false
	case logStart > k.last.End:
		return true
	case bytes-k.lastBytes > max(k.cfg.TailBytes, k.last.Size):
		return true
	}
	return now.Sub(k.lastTime) >= k.cfg.Interval
}

// take writes the applied state to the disk.
func (k *Keeper) take(ctx context.Context, now time.Time) error {
	began := time.Now()
	_, bytes := k.deps.Applied.Log() // first: what is applied meanwhile counts again rather than not at all
	s := k.deps.Applied.Clone()
	info, err := k.deps.Disk.Save(s)
	if err != nil {
		return err
	}
	k.last, k.lastBytes, k.lastTime = info, bytes, now
	took := time.Since(began)
	k.deps.Metrics.taken(ctx, info, took)
	k.log.InfoContext(ctx, "metadata snapshot taken", "offset", info.End, "size", info.Size, "ranges", s.RangeCount(), "dur", took)
	return nil
}

// publish brings the newest snapshot to the bucket and trims behind the older of
// the two newest there. Each of its steps may be the last one: the next
// controller, or the next call, finds out what is done and does the rest.
func (k *Keeper) publish(ctx context.Context, guard metalog.Guard) error {
	if k.uploaded == k.last.ID && k.trimmed == k.uploaded {
		return nil
	}
	clusterID, _ := k.deps.Applied.Identity()
	b := NewBucket(k.deps.Store, clusterID)
	listed, err := b.List(ctx, k.last.Incarnation)
	if err != nil {
		return err
	}
	if len(listed) > 0 {
		// What another log would have put there must not be trimmed behind.
		if err := Belongs(ctx, k.deps.Log, listed[0].ID); err != nil {
			return err
		}
	}
	for _, other := range listed {
		if other.ID == k.last.ID && other.Name() != k.last.Name() {
			return fmt.Errorf("snapshot %v: %w: %s instead of %s", k.last.ID, ErrDiffers, other.Name(), k.last.Name())
		}
	}
	if len(listed) == 0 || listed[0].End < k.last.End {
		began := time.Now()
		if err := b.Create(ctx, k.deps.Disk, k.last); err != nil {
			if errors.As(err, new(*state.SnapshotError)) { // rotted on the disk: the next one is taken anew
				err = errors.Join(err, k.deps.Disk.SetAside(k.last))
				k.last = Info{}
			}
			return err
		}
		k.log.InfoContext(ctx, "metadata snapshot stored in the bucket", "offset", k.last.End, "size", k.last.Size, "dur", time.Since(began))
		if listed, err = b.List(ctx, k.last.Incarnation); err != nil {
			return err
		}
	}
	k.uploaded = k.last.ID
	if err := k.trim(ctx, guard, b, listed); err != nil {
		return err
	}
	k.trimmed = k.uploaded
	return nil
}

// trim raises the log's start to the end of the second newest snapshot.
func (k *Keeper) trim(ctx context.Context, guard metalog.Guard, b *Bucket, listed []Stored) error {
	var ends []ID // different ones, newest first
	for _, s := range listed {
		if len(ends) == 0 || ends[len(ends)-1].End != s.End {
			ends = append(ends, s.ID)
		}
	}
	if len(ends) < Keep {
		return nil
	}
	to := metalog.Start{Offset: ends[Keep-1].End, ControllerEpoch: ends[Keep-1].ControllerEpoch}
	if err := Belongs(ctx, k.deps.Log, ends[Keep-1]); err != nil {
		return err
	}
	revision, deleted, err := k.deps.Log.Trim(ctx, guard, to)
	if err != nil {
		return err
	}
	// Also when nothing was left to delete: the one who did may not have come here.
	if err := k.deps.Log.Compact(ctx, revision); err != nil {
		return err
	}
	if deleted > 0 {
		k.deps.Metrics.trimmed(ctx, deleted)
		k.log.InfoContext(ctx, "metadata log trimmed", "log_start", to.Offset, "entries", deleted, "revision", revision)
	}
	k.logStart.Store(max(k.logStart.Load(), to.Offset))
	return b.Prune(ctx, listed, to.Offset)
}

// Snapshots serves what the disk keeps; see the contract.
func (k *Keeper) Snapshots(incarnation uint32) []Info { return k.deps.Disk.List(incarnation) }

// ReadAt reads a piece of a snapshot.
func (k *Keeper) ReadAt(i Info, p []byte, position int64) (int, error) {
	return k.deps.Disk.ReadAt(i, p, position)
}
