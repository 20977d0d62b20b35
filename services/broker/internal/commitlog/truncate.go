package commitlog

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
)

// TruncateTo removes everything at and above a batch border in
// [Start, End], together with the leaderships that begin at or above it, and
// clears damage. It is durable on return. An offset inside of a batch is a
// NotBorderError and removes nothing.
func (l *Log) TruncateTo(offset int64) error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	if err := l.flush(); err != nil {
		return err
	}
	v := l.view.Load()
	if offset < v.start || offset > l.written.offset {
		return &OutOfRangeError{Offset: offset, Start: v.start, End: l.written.offset}
	}
	kept := v.lineage.DropAt(offset)
	if offset == l.written.offset && v.damage == nil && len(kept) == len(v.lineage) {
		return nil
	}
	at, err := l.pointAt(v, l.written.offset, offset)
	if err != nil {
		return err
	}
	_, i := v.segmentFor(offset)
	maxTime, err := maxTimeBelow(v.segments[i], at, v.epochs)
	if err != nil {
		return err
	}

	if v.damage != nil {
		l.cutDamage(v.damage)
	}
	// Readers must not see bytes at and above the border any more before those
	// change; readers that are under way are made to repeat.
	l.generation.Add(1)
	err = l.truncate(v, i, at, maxTime, kept)
	l.generation.Add(1)
	return err
}

// truncate does what TruncateTo has checked: v.segments[:i] stay whole,
// v.segments[i] up to the point, unless that is its base: then a new segment
// begins in its place.
func (l *Log) truncate(v *view, i int, at scanPoint, maxTime int64, kept lineage.Lineage) error {
	l.checkpointMu.Lock()
	next := l.saved
	if at.offset < next.recovery.offset {
		next.recovery = at.border
	}
	next.op, next.pending, next.pendingPosition = opTruncate, at.border, at.position
	next.clean, next.lineage = cleanEnd{offset: -1}, kept
	err := l.saveLocked(next)
	l.checkpointMu.Unlock()
	if err != nil {
		return err
	}

	l.written, l.size, l.maxTime, l.staged = at.border, at.position, maxTime, 0
	l.tailMu.Lock()
	l.tail = at.border
	l.tailMu.Unlock()
	l.end.Store(at.offset)

	if _, err := applyTruncate(l.fs, l.dir, at); err != nil {
		return l.fail("truncation", err)
	}
	var active *segment
	if at.position > 0 {
		if active, err = l.reopenCut(v.segments[i], at, maxTime); err != nil {
			return l.fail("reopening a truncated segment", err)
		}
	} else if active, err = l.createSegment(at.border); err != nil {
		return l.fail("creation of a segment", err)
	}
	segs := append(slices.Clone(v.segments[:i]), active)
	return l.install(v, segs, i, newView(nil, v.start, kept, nil))
}

// install makes new segments visible, drops the old ones from index from on and
// notes in the checkpoint that the pending operation is done.
func (l *Log) install(old *view, segs []*segment, from int, v *view) error {
	v.segments = segs
	if entries := segs[len(segs)-1].idx.snapshot(); len(entries) > 0 {
		l.indexed = int64(entries[len(entries)-1].position)
	} else {
		l.indexed = 0
	}
	l.view.Store(v)
	var err error
	for _, s := range old.segments[from:] {
		err = errors.Join(err, s.release())
	}
	if err != nil {
		return l.fail("closing a removed segment", err)
	}
	l.checkpointMu.Lock()
	defer l.checkpointMu.Unlock()
	next := l.saved
	next.op, next.pending, next.pendingPosition = opNone, border{}, 0
	return l.saveLocked(next)
}

// reopenCut opens a segment anew after its file was cut at a point.
func (l *Log) reopenCut(old *segment, at scanPoint, maxTime int64) (*segment, error) {
	f, err := l.fs.OpenReadWrite(old.path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", old.path, err)
	}
	entries := old.idx.snapshot()
	n := sort.Search(len(entries), func(i int) bool { return int64(entries[i].position) >= at.position })
	s := newSegment(old.path, old.base, f, append([]indexEntry(nil), entries[:n]...))
	s.size.Store(at.position)
	s.maxTime.Store(maxTime)
	s.since, s.dirty = old.since, true
	return s, nil
}

// maxTimeBelow is the largest timestamp of a segment below a point.
func maxTimeBelow(s *segment, at scanPoint, epochs record.Epochs) (int64, error) {
	entries := s.idx.snapshot()
	n := sort.Search(len(entries), func(i int) bool { return int64(entries[i].position) >= at.position }) - 1
	if n < 0 {
		return noTimestamp, nil
	}
	e := entries[n]
	maxTime := e.maxTime
	from := scanPoint{border: border{offset: e.offset, chain: e.chain}, position: int64(e.position)}
	_, err := scanSegment(s.file, s.path, at.position, from, epochs, func(b record.Batch, _ scanPoint) error {
		maxTime = max(maxTime, b.MaxTimestamp())
		return nil
	})
	return maxTime, err
}

// applyTruncate brings the files of a directory to the state that a truncation
// asks for. Repeating it after a crash at any line gives the same. Derived
// files go first, then segments from the last on, so that what is left never
// has a hole. It returns the names removed.
func applyTruncate(fsys vfs.FS, dir string, at scanPoint) ([]string, error) {
	files, err := listSegments(fsys, dir)
	if err != nil {
		return nil, err
	}
	cut := int64(-1) // base of the segment that is cut
	for _, base := range files.logs {
		if base < at.offset && at.position > 0 {
			cut = base
		}
	}
	var removed []string
	remove := func(base int64, suffix string) error {
		name := segmentName(base, suffix)
		removed = append(removed, name)
		return removeIfThere(fsys, fsys.PathJoin(dir, name))
	}
	for _, offset := range files.snapshots {
		if offset > at.offset {
			if err := remove(offset, snapshotSuffix); err != nil {
				return removed, err
			}
		}
	}
	for _, base := range files.indexes {
		if base >= at.offset || base == cut {
			if err := remove(base, indexSuffix); err != nil {
				return removed, err
			}
		}
	}
	for i := len(files.logs) - 1; i >= 0 && files.logs[i] >= at.offset; i-- {
		if err := remove(files.logs[i], logSuffix); err != nil {
			return removed, err
		}
	}
	if cut >= 0 {
		name := segmentName(cut, logSuffix)
		info, err := fsys.Stat(fsys.PathJoin(dir, name))
		if err != nil {
			return removed, fmt.Errorf("stat %s: %w", name, err)
		}
		if info.Size() > at.position {
			if err := shrinkFile(fsys, dir, name, at.position); err != nil {
				return removed, err
			}
		}
	}
	return removed, syncDir(fsys, dir)
}

// Reset removes everything and starts the log again, empty, at an offset with a
// known chain hash and lineage. It clears damage and is durable on return.
func (l *Log) Reset(offset int64, chain chainhash.Hash, entries lineage.Lineage) error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	if offset < 0 {
		return &OutOfRangeError{Offset: offset, Start: l.Start(), End: l.written.offset}
	}
	kept := slices.Clone(entries)
	if err := kept.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrLineage, err)
	}
	if d := l.view.Load().damage; d != nil {
		l.cutDamage(d)
	}
	l.generation.Add(1)
	err := l.reset(border{offset: offset, chain: chain}, kept)
	l.generation.Add(1)
	return err
}

func (l *Log) reset(at border, kept lineage.Lineage) error {
	l.checkpointMu.Lock()
	next := checkpoint{
		start: at.offset, first: at, recovery: at, op: opReset, pending: at,
		clean: cleanEnd{offset: -1}, lineage: kept,
	}
	err := l.saveLocked(next)
	l.checkpointMu.Unlock()
	if err != nil {
		return err
	}
	old := l.view.Load()
	l.written, l.size, l.maxTime, l.staged = at, 0, noTimestamp, 0
	l.tailMu.Lock()
	l.tail = at
	l.tailMu.Unlock()
	l.end.Store(at.offset)
	if _, err := applyReset(l.fs, l.dir); err != nil {
		return l.fail("reset", err)
	}
	active, err := l.createSegment(at)
	if err != nil {
		return l.fail("creation of a segment", err)
	}
	return l.install(old, []*segment{active}, 0, newView(nil, at.offset, kept, nil))
}

// applyReset removes all segments, derived files first.
func applyReset(fsys vfs.FS, dir string) ([]string, error) {
	files, err := listSegments(fsys, dir)
	if err != nil {
		return nil, err
	}
	var removed []string
	for _, offset := range files.snapshots {
		removed = append(removed, segmentName(offset, snapshotSuffix))
	}
	for _, base := range files.indexes {
		removed = append(removed, segmentName(base, indexSuffix))
	}
	for i := len(files.logs) - 1; i >= 0; i-- {
		removed = append(removed, segmentName(files.logs[i], logSuffix))
	}
	for _, name := range removed {
		if err := removeIfThere(fsys, fsys.PathJoin(dir, name)); err != nil {
			return removed, err
		}
	}
	return removed, syncDir(fsys, dir)
}

// AdvanceStart raises the local log start, durably, and then removes the
// segments that lie wholly below it (I9). An offset at or below the start does
// nothing; one above the end is an OutOfRangeError.
func (l *Log) AdvanceStart(offset int64) error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	v := l.view.Load()
	if offset <= v.start {
		return nil
	}
	if err := l.flush(); err != nil {
		return err
	}
	if offset > l.written.offset {
		return &OutOfRangeError{Offset: offset, Start: v.start, End: l.written.offset}
	}
	// The start must not be able to survive a crash that the end does not.
	if err := l.syncDirty(v.segments); err != nil {
		return err
	}
	_, i := v.segmentFor(offset)
	l.checkpointMu.Lock()
	next := l.saved
	next.start, next.first, next.clean = offset, v.segments[i].base, cleanEnd{offset: -1}
	if v.damage == nil {
		next.recovery = l.written
	}
	err := l.saveLocked(next)
	l.checkpointMu.Unlock()
	if err != nil {
		return err
	}
	l.view.Store(newView(v.segments[i:], offset, v.lineage, v.damage))
	for _, s := range v.segments[:i] {
		// A file that can't be removed now is removed by the next Open.
		err = errors.Join(err, removeIfThere(l.fs, strings.TrimSuffix(s.path, logSuffix)+indexSuffix),
			removeIfThere(l.fs, s.path), s.release())
	}
	return err
}

// SetLineage replaces the lineage, durably. What it says about the batches held
// must be what the old one says, otherwise it is ErrLineage.
func (l *Log) SetLineage(entries lineage.Lineage) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.setLineage(slices.Clone(entries))
}

// AppendLineage adds a leadership, durably. It must begin at or above the log
// end; leaderships that begin at or above it are dropped: they wrote nothing. A
// leadership that is in the lineage already changes nothing.
func (l *Log) AppendLineage(e lineage.Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.view.Load().lineage
	if slices.Contains(old, e) {
		return l.writable()
	}
	if e.StartOffset < l.written.offset {
		return fmt.Errorf("%w: %v begins below the log end %d", ErrLineage, e, l.written.offset)
	}
	next, err := old.DropAt(e.StartOffset).Append(e)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrLineage, err)
	}
	return l.setLineage(next)
}

func (l *Log) setLineage(next lineage.Lineage) error {
	if err := l.writable(); err != nil {
		return err
	}
	v := l.view.Load()
	if err := next.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrLineage, err)
	}
	if slices.Equal(next, v.lineage) {
		return nil
	}
	if first := v.segments[0].base.offset; !lineage.EqualIn(v.lineage, next, first, l.written.offset) {
		return fmt.Errorf("%w: %v is not %v in [%d, %d)", ErrLineage, next, v.lineage, first, l.written.offset)
	}
	l.checkpointMu.Lock()
	saved := l.saved
	saved.lineage, saved.clean = next, cleanEnd{offset: -1}
	err := l.saveLocked(saved)
	l.checkpointMu.Unlock()
	if err != nil {
		return err
	}
	l.view.Store(newView(v.segments, v.start, next, v.damage))
	return nil
}

// segmentFiles are the files of a directory that belong to segments, by base.
type segmentFiles struct {
	logs, indexes, snapshots []int64
	temps                    []string
}

func listSegments(fsys vfs.FS, dir string) (segmentFiles, error) {
	var out segmentFiles
	names, err := fsys.List(dir)
	if err != nil {
		return out, fmt.Errorf("list %s: %w", dir, err)
	}
	for _, name := range names {
		if base, ok := parseSegmentName(name, logSuffix); ok {
			out.logs = append(out.logs, base)
		} else if base, ok := parseSegmentName(name, indexSuffix); ok {
			out.indexes = append(out.indexes, base)
		} else if offset, ok := parseSegmentName(name, snapshotSuffix); ok {
			out.snapshots = append(out.snapshots, offset)
		} else if strings.HasSuffix(name, tempSuffix) {
			out.temps = append(out.temps, name)
		}
	}
	slices.Sort(out.logs)
	slices.Sort(out.indexes)
	slices.Sort(out.snapshots)
	slices.Sort(out.temps)
	return out, nil
}
