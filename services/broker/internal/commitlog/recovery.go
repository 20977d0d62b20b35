package commitlog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/braidlog/braid/pkg/record"
)

// RecoveryReport says what Open found and did.
type RecoveryReport struct {
	// Created says that the directory held no log before.
	Created bool
	// Trusted says that the log was closed cleanly and nothing was scanned.
	Trusted bool
	// Finished names the operation that a crash had cut short and Open brought
	// to its end: "truncate", "reset" or "".
	Finished string
	// ScannedSegments and ScannedBytes count what was validated again.
	ScannedSegments int
	ScannedBytes    int64
	// RebuiltIndexes are the names of index files written anew.
	RebuiltIndexes []string
	// Removed are the names of files that were left over.
	Removed []string
	// Trimmed is the torn tail that was cut, nil if there was none.
	Trimmed *Trim
	// Cut is what Trimmed took away when valid batches lay behind the place that
	// was not good: that is damage, or a loss of power, and no torn tail. Nil
	// otherwise.
	Cut *Cut
	// Damage is what is wrong below the recovery point, nil if nothing.
	Damage *Damage
	// Start and End are the bounds of the log [Start, End).
	Start, End int64
}

// Intact says that nothing is known to be missing or damaged but, at most, a
// torn end. Together with an unchanged kernel boot it proves the log whole
// (DataDir.Start).
func (r *RecoveryReport) Intact() bool {
	return r.Damage == nil && (r.Trimmed == nil || r.Trimmed.ValidBehind < 0 && r.Trimmed.Segments == 0)
}

// Trim is a tail, never known to be synced, that recovery cut off.
type Trim struct {
	// Path is the segment that was cut, bytes [Position, EndPosition) of it.
	Path                  string
	Position, EndPosition int64
	// Offset is the log end afterwards.
	Offset int64
	// Segments is the number of later segments that were removed.
	Segments int
	// ValidBehind says that a batch with a fitting checksum, of this log and
	// above Offset, began at this position behind the one that failed; -1 if
	// none was found in the first maxProbe bytes. After a loss of power that
	// happens to pages of one unsynced run. Where the kernel is still the same,
	// or every append was synced by itself, it means that written bytes were
	// damaged.
	ValidBehind int64
	// Cause says what was wrong at Position.
	Cause error
}

// Damage is a part of the log below its recovery point that is missing or not
// valid. Nothing was changed on disk. Offsets below From can be read.
type Damage struct {
	// From is where the log ends now; To the recovery point: [From, To) was
	// durable once and can't be served.
	From, To int64
	// Path is the segment file, with the bytes [Position, EndPosition).
	Path                  string
	Position, EndPosition int64
	// Cause says what was wrong.
	Cause error
}

var (
	errMissingBytes   = errors.New("synced bytes are missing")
	errMissingSegment = errors.New("segment is missing")
	errOtherChain     = errors.New("chain hash at the recovery point is another")
)

// recovery is the state of one Open.
type recovery struct {
	fs     vfs.FS
	dir    string
	opts   Options
	saved  checkpoint
	report RecoveryReport

	segments []*segment
	// end is the border up to which segments are good.
	end border
}

// Open opens the log in a partition directory, making it if it is not there,
// and recovers it. The directory must carry exactly this identity, otherwise it
// is a MismatchError. A metadata or checkpoint file that can't be decoded is a
// FormatError; a failed read is returned as it is. Damage in segments is not an
// error: see RecoveryReport and DamagedError.
func Open(fsys vfs.FS, dir string, id Identity, opts Options) (*Log, RecoveryReport, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, RecoveryReport{}, err
	}
	r := &recovery{fs: fsys, dir: dir, opts: opts}
	err = r.run(id)
	if err != nil {
		for _, s := range r.segments {
			err = errors.Join(err, s.release())
		}
		return nil, r.report, err
	}
	return r.log(id), r.report, nil
}

func (r *recovery) run(id Identity) error {
	if err := id.validate(); err != nil {
		return err
	}
	if err := r.identify(id); err != nil {
		return err
	}
	if err := r.finishPending(); err != nil {
		return err
	}
	files, err := r.tidy()
	if err != nil {
		return err
	}
	if err := r.load(files); err != nil {
		return err
	}
	if err := r.dropSnapshots(files.snapshots); err != nil {
		return err
	}
	return r.conclude()
}

// identify reads or writes the identity and the checkpoint.
func (r *recovery) identify(id Identity) error {
	if err := r.fs.MkdirAll(r.dir, 0o750); err != nil {
		return fmt.Errorf("make %s: %w", r.dir, err)
	}
	files, err := listSegments(r.fs, r.dir)
	if err != nil {
		return err
	}
	path := r.fs.PathJoin(r.dir, metaName)
	data, err := readSmall(r.fs, path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if len(files.logs) > 0 {
			return &FormatError{Path: path, Reason: "segments without an identity"}
		}
		r.report.Created = true
		if err := syncDir(r.fs, r.fs.PathDir(r.dir)); err != nil {
			return err
		}
		if err := writeAtomic(r.fs, r.dir, metaName, encodeMeta(id)); err != nil {
			return err
		}
	case err != nil:
		return fmt.Errorf("identity: %w", err)
	default:
		found, err := decodeMeta(data)
		if err != nil {
			return withPath(err, path)
		}
		if err := found.check(path, id); err != nil {
			return err
		}
	}

	path = r.fs.PathJoin(r.dir, checkpointName)
	data, err = readSmall(r.fs, path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if len(files.logs) > 0 {
			return &FormatError{Path: path, Reason: "segments without a checkpoint"}
		}
		r.report.Created = true
		r.saved = checkpoint{clean: cleanEnd{offset: -1}}
		return r.save()
	case err != nil:
		return fmt.Errorf("checkpoint: %w", err)
	}
	r.saved, err = decodeCheckpoint(data)
	return withPath(err, path)
}

// withPath names the file in a FormatError.
func withPath(err error, path string) error {
	var f *FormatError
	if errors.As(err, &f) {
		f.Path = path
	}
	return err
}

func (r *recovery) save() error {
	return writeAtomic(r.fs, r.dir, checkpointName, r.saved.encode())
}

// finishPending repeats a truncation or reset that may have been cut short.
// Nothing is appended before it is done, so repeating it loses nothing.
func (r *recovery) finishPending() error {
	var err error
	var removed []string
	switch r.saved.op {
	case opNone:
		return nil
	case opTruncate:
		r.report.Finished = "truncate"
		removed, err = applyTruncate(r.fs, r.dir, scanPoint{border: r.saved.pending, position: r.saved.pendingPosition})
	case opReset:
		r.report.Finished = "reset"
		removed, err = applyReset(r.fs, r.dir)
	}
	if err != nil {
		return err
	}
	r.report.Removed = append(r.report.Removed, removed...)
	r.saved.op, r.saved.pending, r.saved.pendingPosition = opNone, border{}, 0
	return r.save()
}

// tidy removes what crashes leave behind: temporary files, segments below the
// first one and index files of no segment.
func (r *recovery) tidy() (segmentFiles, error) {
	files, err := listSegments(r.fs, r.dir)
	if err != nil {
		return files, err
	}
	stale := files.temps
	isLog := map[int64]bool{}
	kept := files.logs[:0]
	for _, base := range files.logs {
		if base < r.saved.first.offset {
			stale = append(stale, segmentName(base, logSuffix))
			continue
		}
		isLog[base] = true
		kept = append(kept, base)
	}
	files.logs = kept
	for _, base := range files.indexes {
		if !isLog[base] {
			stale = append(stale, segmentName(base, indexSuffix))
		}
	}
	for _, name := range stale {
		if err := removeIfThere(r.fs, r.fs.PathJoin(r.dir, name)); err != nil {
			return files, err
		}
	}
	r.report.Removed = append(r.report.Removed, stale...)
	return files, nil
}

// dropSnapshots removes producer snapshots above the end: they speak of batches
// that are gone, and would be taken for those that come in their place.
func (r *recovery) dropSnapshots(offsets []int64) error {
	for _, offset := range offsets {
		if offset <= r.end.offset || r.report.Damage != nil {
			continue
		}
		name := segmentName(offset, snapshotSuffix)
		if err := removeIfThere(r.fs, r.fs.PathJoin(r.dir, name)); err != nil {
			return err
		}
		r.report.Removed = append(r.report.Removed, name)
	}
	return nil
}

// load opens the segments in order, checking each by its index or by a scan,
// until the end or the first one that is not good.
func (r *recovery) load(files segmentFiles) error {
	r.end = r.saved.first
	r.report.Trusted = r.opts.Trusted && r.saved.clean.offset >= 0
	for i, base := range files.logs {
		if base != r.end.offset {
			// Only before the first segment: later ones are compared with the
			// end of their predecessor.
			return r.broken(files.logs[i:], scanPoint{border: r.end}, 0, "", errMissingSegment)
		}
		next := int64(-1)
		if i+1 < len(files.logs) {
			next = files.logs[i+1]
		}
		done, err := r.loadSegment(files.logs[i+1:], next)
		if err != nil || done {
			return err
		}
	}
	if r.end.offset < r.saved.recovery.offset {
		return r.broken(nil, scanPoint{border: r.end}, 0, "", errMissingBytes)
	}
	return nil
}

// loadSegment opens the segment at the current end. next is the base of the one
// behind it, -1 for the last. done says that nothing behind it is to be loaded.
func (r *recovery) loadSegment(later []int64, next int64) (done bool, err error) {
	name := segmentName(r.end.offset, logSuffix)
	path := r.fs.PathJoin(r.dir, name)
	f, err := r.fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return false, fmt.Errorf("open %s: %w", path, err)
	}
	s := newSegment(path, r.end, f, nil)
	r.segments = append(r.segments, s)
	info, err := f.Stat()
	if err != nil {
		return false, fmt.Errorf("stat %s: %w", path, err)
	}
	size := info.Size()

	if x, ok := r.trustedIndex(s.base, size, next); ok {
		s.idx = newIndex(x.entries)
		s.size.Store(size)
		s.maxTime.Store(x.maxTime)
		s.end, r.end = x.end, x.end
		return false, nil
	}
	return r.scan(s, size, later, next)
}

// trustedIndex reads the index file of a segment that need not be scanned: it
// lies below the recovery point, or the log was closed cleanly. ok is false
// where the segment must be scanned.
func (r *recovery) trustedIndex(base border, size, next int64) (indexFile, bool) {
	synced := next >= 0 && next <= r.saved.recovery.offset
	closed := next < 0 && r.report.Trusted && size == r.saved.clean.size
	if !synced && !closed {
		return indexFile{}, false
	}
	data, err := readSmall(r.fs, r.fs.PathJoin(r.dir, segmentName(base.offset, indexSuffix)))
	if err != nil {
		// Whatever the reason, the segment itself has the answer.
		return indexFile{}, false
	}
	x, err := decodeIndex(data)
	if err != nil || x.base != base || x.size != size {
		return indexFile{}, false
	}
	if next >= 0 && x.end.offset != next || next < 0 && x.end.offset != r.saved.clean.offset {
		return indexFile{}, false
	}
	if p := r.saved.recovery; p.offset == x.end.offset && p.chain != x.end.chain || p.offset == base.offset && p.chain != base.chain {
		return indexFile{}, false
	}
	return x, true
}

// scan validates a whole segment and builds its index.
func (r *recovery) scan(s *segment, size int64, later []int64, next int64) (done bool, err error) {
	r.report.Trusted = false
	known := r.saved.recovery
	x := newIndexer(r.opts.IndexInterval)
	at, err := scanSegment(s.file, s.path, min(size, maxPosition), scanPoint{border: s.base}, r.saved.lineage, func(b record.Batch, at scanPoint) error {
		if at.offset == known.offset && at.chain != known.chain {
			return errOtherChain
		}
		if at.offset < known.offset {
			s.rewrite = at.position + int64(len(b))
		}
		x.add(b, at)
		return nil
	})
	r.report.ScannedSegments++
	r.report.ScannedBytes += at.position
	s.idx = newIndex(x.entries)
	s.size.Store(at.position)
	s.maxTime.Store(x.maxTime)
	s.end, s.dirty = at.border, at.offset > known.offset
	r.end = at.border
	var corrupt *CorruptionError
	switch {
	case errors.Is(err, errOtherChain), err == nil && at.offset == known.offset && at.chain != known.chain:
		// Some batch of the segment is whole, but not the one that was synced.
		return r.brokenSegment(s, size, later, scanPoint{border: s.base}, errOtherChain)
	case errors.As(err, &corrupt):
		return r.brokenSegment(s, size, later, at, err)
	case err != nil:
		return false, err
	case size > maxPosition:
		return r.brokenSegment(s, size, later, at, fmt.Errorf("%d bytes are too many: %w", size, record.ErrCorrupt))
	case next >= 0 && next != at.offset:
		return r.brokenSegment(s, size, later, at, fmt.Errorf("the next segment begins at %d: %w", next, errMissingBytes))
	case next < 0:
		return false, nil
	}
	content := s.indexContent(at.border)
	name := segmentName(s.base.offset, indexSuffix)
	r.report.RebuiltIndexes = append(r.report.RebuiltIndexes, name)
	return false, writeFile(r.fs, r.fs.PathJoin(r.dir, name), content.encode(), false)
}

// brokenSegment cuts what readers see of a segment to a point and hands on to
// broken.
func (r *recovery) brokenSegment(s *segment, size int64, later []int64, at scanPoint, cause error) (bool, error) {
	if at.position < s.size.Load() {
		s.idx = newIndex(nil)
		s.size.Store(0)
		s.maxTime.Store(noTimestamp)
		s.end = s.base
	}
	r.end = at.border
	return true, r.broken(later, at, size, s.path, cause)
}

// broken ends the log at a point. Below the recovery point that is damage and
// only reported; above it is a torn tail and cut.
func (r *recovery) broken(later []int64, at scanPoint, size int64, path string, cause error) error {
	if at.offset < r.saved.recovery.offset {
		r.report.Damage = &Damage{
			From: at.offset, To: r.saved.recovery.offset,
			Path: path, Position: at.position, EndPosition: max(size, at.position), Cause: cause,
		}
		return nil
	}
	r.report.Trimmed = &Trim{
		Path: path, Position: at.position, EndPosition: max(size, at.position), Offset: at.offset,
		Segments: len(later), ValidBehind: -1, Cause: cause,
	}
	validEnd := int64(-1)
	if path != "" {
		s := r.segments[len(r.segments)-1]
		behind, end, err := probe(s.file, at, size, r.saved.lineage)
		if err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
		r.report.Trimmed.ValidBehind, validEnd = behind, end
	}
	r.cutTail(later, at, size, path, validEnd, cause)
	for i := len(later) - 1; i >= 0; i-- {
		for _, suffix := range []string{indexSuffix, logSuffix} {
			if err := removeIfThere(r.fs, r.fs.PathJoin(r.dir, segmentName(later[i], suffix))); err != nil {
				return err
			}
		}
	}
	if path == "" {
		return syncDir(r.fs, r.dir)
	}
	// The cut replaces the file, so the handle must be replaced too.
	s := r.segments[len(r.segments)-1]
	if err := s.file.Close(); err != nil {
		r.segments = r.segments[:len(r.segments)-1]
		return fmt.Errorf("close %s: %w", s.path, err)
	}
	r.segments = r.segments[:len(r.segments)-1]
	if err := removeIfThere(r.fs, r.fs.PathJoin(r.dir, segmentName(s.base.offset, indexSuffix))); err != nil {
		return err
	}
	if err := shrinkFile(r.fs, r.dir, segmentName(s.base.offset, logSuffix), at.position); err != nil {
		return err
	}
	f, err := r.fs.OpenReadWrite(s.path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("open %s: %w", s.path, err)
	}
	s.file = f
	r.segments = append(r.segments, s)
	return syncDir(r.fs, r.dir)
}

// cutTail puts a tail that is about to be cut aside, if there is more to it than
// being torn.
func (r *recovery) cutTail(later []int64, at scanPoint, size int64, path string, validEnd int64, cause error) {
	var parts []asidePart
	if path != "" && size > at.position {
		parts = append(parts, asidePart{name: r.fs.PathBase(path), offset: at.offset, position: at.position, end: size})
	}
	held := false
	for _, base := range later {
		name := segmentName(base, logSuffix)
		info, err := r.fs.Stat(r.fs.PathJoin(r.dir, name))
		if err != nil || info.Size() == 0 {
			continue
		}
		held, validEnd = true, max(validEnd, base)
		parts = append(parts, asidePart{name: name, offset: base, end: info.Size()})
	}
	if !held && r.report.Trimmed.ValidBehind < 0 {
		return
	}
	r.report.Cut = &Cut{From: at.offset, To: validEnd, Cause: cause}
	r.report.Cut.putAside(r.fs, r.dir, parts)
}

// maxProbe bounds how far probe looks, in bytes.
const maxProbe = 4 << 20

// probe looks for a valid batch behind the one that failed at a point, and for
// the end offset of those that follow it; both -1 if there is none.
func probe(f io.ReaderAt, at scanPoint, size int64, epochs record.Epochs) (position, end int64, err error) {
	buf := make([]byte, min(size-at.position, maxProbe))
	if err := readFull(f, buf, at.position); err != nil {
		return -1, -1, err
	}
	valid := func(b record.Batch) bool {
		// The cheap tests come first; few positions pass them.
		if len(b) < record.HeaderSize || b.Magic() != record.Magic2 || b.Length() < record.HeaderSize || b.Length() > len(b) || b.BaseOffset() <= at.offset {
			return false
		}
		epoch, _, ok := epochs.EpochAt(b.BaseOffset())
		return ok && epoch == b.LeaderEpoch() && b[:b.Length()].Validate() == nil
	}
	for pos := 1; pos+record.HeaderSize <= len(buf); pos++ {
		if b := record.Batch(buf[pos:]); valid(b) {
			position = at.position + int64(pos)
			for end = b.EndOffset(); ; end = b.EndOffset() {
				if b = b[b.Length():]; !valid(b) || b.BaseOffset() != end {
					return position, end, nil
				}
			}
		}
	}
	return -1, -1, nil
}

// conclude makes what was recovered durable, so that it can't be lost by a
// later crash after it was served, and moves the recovery point to the end.
func (r *recovery) conclude() error {
	r.report.Start = min(r.saved.start, r.end.offset)
	r.report.End = r.end.offset
	if len(r.segments) == 0 {
		path := r.fs.PathJoin(r.dir, segmentName(r.saved.first.offset, logSuffix))
		f, err := r.fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
		if err != nil {
			return fmt.Errorf("create %s: %w", path, err)
		}
		r.segments = append(r.segments, newSegment(path, r.saved.first, f, nil))
		if err := syncDir(r.fs, r.dir); err != nil {
			return err
		}
	}
	if r.report.Damage != nil || r.report.Trusted {
		return nil
	}
	for _, s := range r.segments {
		if s.dirty {
			if err := rewriteTail(s); err != nil {
				return err
			}
			s.dirty = false
		}
	}
	if r.saved.recovery != r.end || r.saved.clean.offset >= 0 {
		r.saved.recovery, r.saved.clean = r.end, cleanEnd{offset: -1}
		return r.save()
	}
	return nil
}

// rewriteTail writes the bytes past the recovery point again and syncs them. If
// an earlier process failed to sync them, the page cache may hold them as clean
// although they never reached the disk, and a sync alone would then be told
// that all is well. The bytes are the same, so a crash in between harms nothing.
func rewriteTail(s *segment) error {
	pooled := scanBuffers.Get().(*[]byte)
	defer scanBuffers.Put(pooled)
	for position, size := s.rewrite, s.size.Load(); position < size; {
		part := (*pooled)[:min(int64(len(*pooled)), size-position)]
		if err := readFull(s.file, part, position); err != nil {
			return fmt.Errorf("read %s at %d: %w", s.path, position, err)
		}
		if _, err := s.file.WriteAt(part, position); err != nil {
			return fmt.Errorf("write %s at %d: %w", s.path, position, err)
		}
		position += int64(len(part))
	}
	if err := s.file.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", s.path, err)
	}
	return nil
}

// log makes the Log of what was recovered.
func (r *recovery) log(id Identity) *Log {
	active := r.segments[len(r.segments)-1]
	l := &Log{
		fs: r.fs, dir: r.dir, id: id, opts: r.opts, policy: r.opts.Flush,
		written: r.end, size: active.size.Load(), maxTime: active.maxTime.Load(),
		saved: r.saved, tail: r.end,
	}
	if entries := active.idx.snapshot(); len(entries) > 0 {
		l.indexed = int64(entries[len(entries)-1].position)
	}
	l.cut.Store(r.report.Cut)
	l.end.Store(r.end.offset)
	l.view.Store(newView(r.segments, r.report.Start, r.saved.lineage, r.report.Damage))
	return l
}
