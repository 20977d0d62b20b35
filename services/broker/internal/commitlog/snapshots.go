package commitlog

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
)

// snapshotSuffix marks producer snapshots, named by the offset they end at.
const snapshotSuffix = ".producers"

// keptSnapshots is how many snapshots are kept: the newest may turn out to be
// damaged, or to lie above a truncation.
const keptSnapshots = 2

// SaveSnapshot stores the producer snapshot of the log at an offset in
// [Start, End], durably, and removes older ones but one. What the log itself
// holds below the offset is not synced by this: a snapshot found above the end
// after a crash is removed by Open (field report B016). The bytes are opaque
// here and carry their own checksum.
func (l *Log) SaveSnapshot(offset int64, data []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.writable(); err != nil {
		return err
	}
	if start := l.Start(); offset < start || offset > l.written.offset {
		return &OutOfRangeError{Offset: offset, Start: start, End: l.written.offset}
	}
	if len(data) > maxSmallFile {
		return fmt.Errorf("commitlog: a snapshot of %d bytes is too large", len(data))
	}
	if err := writeAtomic(l.fs, l.dir, segmentName(offset, snapshotSuffix), slices.Clone(data)); err != nil {
		return l.fail("write of a snapshot", err)
	}
	files, err := listSegments(l.fs, l.dir)
	if err != nil {
		return err
	}
	for i := 0; i < len(files.snapshots)-keptSnapshots; i++ {
		if err := removeIfThere(l.fs, l.fs.PathJoin(l.dir, segmentName(files.snapshots[i], snapshotSuffix))); err != nil {
			return err
		}
	}
	return nil
}

// SnapshotOffsets lists the offsets of the producer snapshots held, newest
// first. They all lie at or below the log end.
func (l *Log) SnapshotOffsets() ([]int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	files, err := listSegments(l.fs, l.dir)
	if err != nil {
		return nil, err
	}
	slices.Reverse(files.snapshots)
	return files.snapshots, nil
}

// LoadSnapshot reads the producer snapshot at an offset; fs.ErrNotExist if there
// is none. A caller that can't decode it goes on to the next older one, or
// replays the log.
func (l *Log) LoadSnapshot(offset int64) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	data, err := readSmall(l.fs, l.fs.PathJoin(l.dir, segmentName(offset, snapshotSuffix)))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("snapshot at %d: %w", offset, err)
	}
	return data, err
}
