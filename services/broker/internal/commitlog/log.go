package commitlog

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
)

// FlushPolicy says what Append has done when it returns.
type FlushPolicy uint8

const (
	// FlushOS leaves writing back to the operating system: an append survives
	// the process, not the machine.
	FlushOS FlushPolicy = iota
	// FlushAlways syncs before an append is visible and before it returns.
	FlushAlways
)

// String gives the value of the topic setting flush.
func (p FlushPolicy) String() string {
	if p == FlushAlways {
		return "always"
	}
	return "os"
}

// Options are the settings of a log. The zero value of a field means its
// default.
type Options struct {
	// SegmentBytes is the size at which a segment is rolled, 1 to 2^31-1;
	// default 64 MiB. An append larger than that gets a segment of its own.
	SegmentBytes int64
	// SegmentAge rolls a segment that has been appended to for so long; 0 never
	// does.
	SegmentAge time.Duration
	// IndexInterval is the distance of index entries in bytes, default 32 KiB.
	IndexInterval int64
	// Flush is the flush policy at first; SetFlushPolicy changes it.
	Flush FlushPolicy
	// Trusted says that the whole data directory was closed cleanly and
	// untouched since (DataDir.Start): segments are not scanned where the
	// checkpoint agrees.
	Trusted bool
}

func (o Options) withDefaults() (Options, error) {
	if o.SegmentBytes == 0 {
		o.SegmentBytes = 64 << 20
	}
	if o.IndexInterval == 0 {
		o.IndexInterval = 32 << 10
	}
	if o.SegmentBytes < 1 || o.SegmentBytes > math.MaxInt32 || o.IndexInterval < 1 || o.SegmentAge < 0 || o.Flush > FlushAlways {
		return o, fmt.Errorf("commitlog: impossible options: segment bytes %d, index interval %d, segment age %v, flush %d",
			o.SegmentBytes, o.IndexInterval, o.SegmentAge, o.Flush)
	}
	return o, nil
}

// view is what readers see of the structure of the log. It is never changed,
// only replaced.
type view struct {
	segments []*segment // by base; at least one; the last is the active one
	start    int64      // log start
	lineage  lineage.Lineage
	epochs   record.Epochs // lineage, made an interface once
	damage   *Damage       // what Open found at the end, or nil
}

func newView(segments []*segment, start int64, l lineage.Lineage, damage *Damage) *view {
	return &view{segments: segments, start: start, lineage: l, epochs: l, damage: damage}
}

// Log is the local log of one partition. See the package documentation for the
// rules of concurrent use.
type Log struct {
	fs   vfs.FS
	dir  string
	id   Identity
	opts Options

	// mu serializes the writer's methods and is held across their input and
	// output; no read takes it. Lock order: syncing, mu, checkpointMu, tailMu.
	mu sync.Mutex
	// syncing serializes Sync.
	syncing sync.Mutex
	// written is the end including deferred appends that are not yet visible.
	written border
	size    int64 // bytes of the active segment, ditto
	maxTime int64 // largest timestamp in the active segment, ditto
	indexed int64 // position of the last index entry of the active segment
	staged  int   // index entries not yet visible
	closed  bool
	policy  FlushPolicy

	// checkpointMu guards saved, the content of log.checkpoint, and is held
	// while the file is replaced.
	checkpointMu sync.Mutex
	saved        checkpoint

	// failure is set once, by the first failed write or sync.
	failure atomic.Pointer[FailedError]

	// generation is odd while bytes that were visible are being taken away. A
	// read whose generation has changed at its end is repeated.
	generation atomic.Uint64
	cut        atomic.Pointer[Cut]
	end        atomic.Int64
	view       atomic.Pointer[view]
	hints      hintCache

	// tailMu guards tail, the visible end with its chain hash.
	tailMu sync.Mutex
	tail   border
}

// Position names the place of an append (I3).
type Position struct {
	// Offset must be the log end.
	Offset int64
	// Chain must be the chain hash at the log end, if CheckChain is set.
	Chain      chainhash.Hash
	CheckChain bool
}

// Appended says where an append went.
type Appended struct {
	// Base and End are the offsets [Base, End).
	Base, End int64
	// Chain is the chain hash at End.
	Chain chainhash.Hash
}

// Append writes one or more whole batches in one write. They must be validated
// (record.Batch.Validate), carry their final base offsets, contiguous from the
// log end, and the leader epoch that the lineage has there; the latter three
// are checked again here, a mismatch is ErrNotAppendable and writes nothing.
// now is the wall-clock time, for rolling by age. The batches stay the
// caller's. On return they are visible, and durable if the policy is
// FlushAlways. A failed write or sync is a FailedError, and final: the outcome
// of this append is unknown until the log is opened again.
func (l *Log) Append(batches []byte, at Position, now time.Time) (Appended, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out, err := l.write(batches, at, now)
	if err != nil {
		return Appended{}, err
	}
	return out, l.flush()
}

// AppendDeferred is Append without the sync: under FlushAlways the batches are
// neither visible nor durable before Flush, which a group of appends shares.
// Under FlushOS it is Append.
func (l *Log) AppendDeferred(batches []byte, at Position, now time.Time) (Appended, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out, err := l.write(batches, at, now)
	if err != nil {
		return Appended{}, err
	}
	if l.policy == FlushOS {
		l.publish()
	}
	return out, nil
}

// Flush makes deferred appends visible, and durable if the policy is
// FlushAlways.
func (l *Log) Flush() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	return l.flush()
}

// SetFlushPolicy changes the policy for later appends. Changing to FlushAlways
// syncs what is there first.
func (l *Log) SetFlushPolicy(p FlushPolicy) error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	if p == FlushAlways && l.policy != FlushAlways {
		if err := l.syncDirty(l.view.Load().segments); err != nil {
			return err
		}
	}
	l.policy = p
	return l.flush()
}

// syncDirty syncs segments that have bytes written since their last sync.
func (l *Log) syncDirty(segments []*segment) error {
	for _, s := range segments {
		if s.dirty {
			if err := s.file.Sync(); err != nil {
				return l.fail("sync of "+s.path, err)
			}
			s.dirty = false
		}
	}
	return nil
}

// writable says why the log takes no writes.
func (l *Log) writable() error {
	if l.closed {
		return ErrClosed
	}
	if f := l.failure.Load(); f != nil {
		return f
	}
	return nil
}

// fail ends the log's life as a writer and gives the error for the caller.
func (l *Log) fail(op string, err error) error {
	l.failure.CompareAndSwap(nil, &FailedError{Op: op, Err: err})
	return l.failure.Load()
}

func (l *Log) active() *segment {
	segs := l.view.Load().segments
	return segs[len(segs)-1]
}

// write appends without making the bytes visible.
func (l *Log) write(batches []byte, at Position, now time.Time) (Appended, error) {
	if err := l.writable(); err != nil {
		return Appended{}, err
	}
	if d := l.view.Load().damage; d != nil {
		return Appended{}, &DamagedError{Damage: *d}
	}
	if at.Offset != l.written.offset {
		return Appended{}, fmt.Errorf("%w: append at %d, log end is %d", ErrNotAppendable, at.Offset, l.written.offset)
	}
	if at.CheckChain && at.Chain != l.written.chain {
		return Appended{}, fmt.Errorf("%w: other chain hash at %d", ErrNotAppendable, at.Offset)
	}
	if len(batches) == 0 {
		return Appended{Base: l.written.offset, End: l.written.offset, Chain: l.written.chain}, nil
	}
	if len(batches) > maxPosition {
		return Appended{}, fmt.Errorf("%w: %d bytes at once", ErrNotAppendable, len(batches))
	}
	if err := l.checkHeaders(batches); err != nil {
		return Appended{}, err
	}
	if err := l.rollIfNeeded(int64(len(batches)), now); err != nil {
		return Appended{}, err
	}
	s := l.active()
	if s.since.IsZero() {
		s.since = now
	}
	out := Appended{Base: l.written.offset}
	next, position, maxTime := l.written, l.size, l.maxTime
	for rest := batches; len(rest) > 0; {
		b := record.Batch(rest)
		b = b[:b.Length()]
		if position == 0 || position-l.indexed >= l.opts.IndexInterval {
			s.idx.stage(l.staged, indexEntry{offset: next.offset, position: uint32(position), maxTime: maxTime, chain: next.chain})
			l.staged++
			l.indexed = position
		}
		next = border{offset: b.EndOffset(), chain: chainhash.Next(next.chain, b)}
		maxTime = max(maxTime, b.MaxTimestamp())
		position += int64(len(b))
		rest = rest[len(b):]
	}
	s.dirty = true
	if _, err := s.file.WriteAt(batches, l.size); err != nil {
		return Appended{}, l.fail("append to "+s.path, err)
	}
	l.written, l.size, l.maxTime = next, position, maxTime
	out.End, out.Chain = next.offset, next.chain
	return out, nil
}

// checkHeaders compares what an append claims with the log, without the CRC.
func (l *Log) checkHeaders(batches []byte) error {
	next := l.written.offset
	epoch, until := int32(0), next
	for pos := 0; pos < len(batches); {
		size, err := record.Peek(batches[pos:])
		if err != nil {
			return fmt.Errorf("%w: at byte %d: %w", ErrNotAppendable, pos, err)
		}
		b := record.Batch(batches[pos : pos+size])
		if err := b.ValidateHeader(); err != nil {
			return fmt.Errorf("%w: at byte %d: %w", ErrNotAppendable, pos, err)
		}
		if b.BaseOffset() != next {
			return fmt.Errorf("%w: base offset %d, expected %d", ErrNotAppendable, b.BaseOffset(), next)
		}
		if next >= until {
			var ok bool
			if epoch, until, ok = l.view.Load().epochs.EpochAt(next); !ok {
				return fmt.Errorf("%w: no leadership covers offset %d", ErrNotAppendable, next)
			}
		}
		if b.LeaderEpoch() != epoch || b.EndOffset() > until {
			return fmt.Errorf("%w: batch [%d, %d) has leader epoch %d, the lineage has %d up to %d",
				ErrNotAppendable, next, b.EndOffset(), b.LeaderEpoch(), epoch, until)
		}
		next = b.EndOffset()
		pos += size
	}
	return nil
}

// flush syncs if the policy asks for it and makes all written bytes visible.
func (l *Log) flush() error {
	if l.policy == FlushAlways {
		if s := l.active(); s.dirty {
			if err := s.file.SyncData(); err != nil {
				return l.fail("sync of "+s.path, err)
			}
			s.dirty = false
		}
	}
	l.publish()
	return nil
}

// publish makes all written bytes visible. Size and index come before the end.
func (l *Log) publish() {
	s := l.active()
	if l.staged > 0 {
		s.idx.publish(l.staged)
		l.staged = 0
	}
	s.maxTime.Store(l.maxTime)
	s.size.Store(l.size)
	l.tailMu.Lock()
	l.tail = l.written
	l.tailMu.Unlock()
	l.end.Store(l.written.offset)
}

// rollIfNeeded begins a new segment when the active one is full or old.
func (l *Log) rollIfNeeded(adding int64, now time.Time) error {
	if l.size == 0 {
		return nil
	}
	s := l.active()
	full := l.size+adding > l.opts.SegmentBytes
	old := l.opts.SegmentAge > 0 && !s.since.IsZero() && now.Sub(s.since) >= l.opts.SegmentAge
	if !full && !old {
		return nil
	}
	return l.roll()
}

// Roll begins a new segment, if the active one has any bytes, so that the old
// one may be handed to the tier.
func (l *Log) Roll() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	if d := l.view.Load().damage; d != nil {
		return &DamagedError{Damage: *d}
	}
	if l.size == 0 {
		return nil
	}
	return l.roll()
}

func (l *Log) roll() error {
	// Deferred bytes would be left behind in a segment that Flush no longer
	// looks at.
	if err := l.flush(); err != nil {
		return err
	}
	s := l.active()
	s.end = l.written
	// The index is derived: it is not synced, and a torn one is rebuilt.
	x := s.indexContent(s.end)
	if err := writeFile(l.fs, l.fs.PathJoin(l.dir, segmentName(s.base.offset, indexSuffix)), x.encode(), false); err != nil {
		return l.fail("write of an index", err)
	}
	next, err := l.createSegment(l.written)
	if err != nil {
		return l.fail("creation of a segment", err)
	}
	old := l.view.Load()
	segs := make([]*segment, 0, len(old.segments)+1)
	segs = append(append(segs, old.segments...), next)
	l.size, l.maxTime, l.indexed = 0, noTimestamp, 0
	l.view.Store(newView(segs, old.start, old.lineage, nil))
	return nil
}

// createSegment makes an empty segment file whose name is durable.
func (l *Log) createSegment(base border) (*segment, error) {
	path := l.fs.PathJoin(l.dir, segmentName(base.offset, logSuffix))
	if err := removeIfThere(l.fs, path); err != nil {
		return nil, err
	}
	f, err := l.fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	if err := syncDir(l.fs, l.dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return newSegment(path, base, f, nil), nil
}

// Sync makes everything that is visible durable and moves the recovery point
// there: from then on damage below it is told from a torn tail. It may be
// called by any goroutine; appends go on meanwhile.
func (l *Log) Sync() error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	if err := l.writable(); err != nil {
		l.mu.Unlock()
		return err
	}
	generation := l.generation.Load()
	l.tailMu.Lock()
	target := l.tail
	l.tailMu.Unlock()
	var dirty []*segment
	if l.policy == FlushAlways {
		// Flush syncs the same handle, and an error is reported to one of two
		// callers only: they must not run at once.
		if err := l.flush(); err != nil {
			l.mu.Unlock()
			return err
		}
		l.tailMu.Lock()
		target = l.tail
		l.tailMu.Unlock()
	}
	for _, s := range l.view.Load().segments {
		if s.dirty && s.acquire() {
			s.dirty = false
			dirty = append(dirty, s)
		}
	}
	l.mu.Unlock()

	var err error
	for _, s := range dirty {
		if err == nil {
			err = s.file.Sync()
		}
		err = errors.Join(err, s.release())
	}
	if err != nil {
		return l.fail("sync", err)
	}
	l.checkpointMu.Lock()
	defer l.checkpointMu.Unlock()
	if l.generation.Load() != generation || target.offset <= l.saved.recovery.offset {
		return nil
	}
	next := l.saved
	next.recovery, next.clean = target, cleanEnd{offset: -1}
	return l.saveLocked(next)
}

// saveLocked replaces the checkpoint; checkpointMu is held.
func (l *Log) saveLocked(next checkpoint) error {
	if err := writeAtomic(l.fs, l.dir, checkpointName, next.encode()); err != nil {
		return l.fail("write of the checkpoint", err)
	}
	l.saved = next
	return nil
}

// Close syncs, notes the clean end and closes all files. A log that failed or
// is damaged is closed without the note, so that the next Open recovers it.
// Close of a closed log is ErrClosed.
func (l *Log) Close() error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	err := l.settle()
	l.closed = true
	for _, s := range l.view.Load().segments {
		err = errors.Join(err, s.release())
	}
	return err
}

// settle writes what a trusting Open wants to find.
func (l *Log) settle() error {
	if l.failure.Load() != nil || l.view.Load().damage != nil {
		return nil
	}
	if err := l.flush(); err != nil {
		return err
	}
	segs := l.view.Load().segments
	if err := l.syncDirty(segs); err != nil {
		return err
	}
	s := segs[len(segs)-1]
	x := s.indexContent(l.written)
	if err := writeAtomic(l.fs, l.dir, segmentName(s.base.offset, indexSuffix), x.encode()); err != nil {
		return l.fail("write of an index", err)
	}
	l.checkpointMu.Lock()
	defer l.checkpointMu.Unlock()
	next := l.saved
	next.recovery = l.written
	next.clean = cleanEnd{offset: l.written.offset, size: l.size}
	return l.saveLocked(next)
}

// SetRolling changes when later appends roll the active segment; see Options.
func (l *Log) SetRolling(segmentBytes int64, age time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	next := l.opts
	next.SegmentBytes, next.SegmentAge = segmentBytes, age
	next, err := next.withDefaults()
	if err != nil {
		return err
	}
	l.opts = next
	return nil
}
