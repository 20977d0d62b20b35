package commitlog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// maxSmallFile bounds what readSmall takes into memory: a checkpoint with a
// million lineage entries has 16 MB.
const maxSmallFile = 64 << 20

// syncDir makes creations, renames and removals in a directory durable.
func syncDir(fsys vfs.FS, dir string) (err error) {
	d, err := fsys.OpenDir(dir)
	if err != nil {
		return fmt.Errorf("open directory %s: %w", dir, err)
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, err)
	}
	return nil
}

// writeAtomic replaces a file so that after a crash it holds its old or its new
// bytes, and durably the new ones once the call has returned.
func writeAtomic(fsys vfs.FS, dir, name string, data []byte) error {
	path, temp := fsys.PathJoin(dir, name), fsys.PathJoin(dir, name+tempSuffix)
	if err := writeFile(fsys, temp, data, true); err != nil {
		return err
	}
	if err := fsys.Rename(temp, path); err != nil {
		return fmt.Errorf("rename %s: %w", temp, err)
	}
	return syncDir(fsys, dir)
}

// writeFile creates a file with the given bytes.
func writeFile(fsys vfs.FS, path string, data []byte, sync bool) (err error) {
	f, err := fsys.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// vfs allows Write to change what it is given; data is not used again.
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if !sync {
		return nil
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	return nil
}

// readSmall reads a whole file of bounded size.
func readSmall(fsys vfs.FS, path string) (data []byte, err error) {
	f, err := fsys.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	if info.Size() > maxSmallFile {
		return nil, &FormatError{Path: path, Reason: fmt.Sprintf("%d bytes are too many", info.Size())}
	}
	data = make([]byte, info.Size())
	if err := readFull(f, data, 0); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return data, nil
}

// readFull fills p from position on; a short file is io.ErrUnexpectedEOF.
func readFull(f io.ReaderAt, p []byte, position int64) error {
	if len(p) == 0 {
		return nil
	}
	n, err := f.ReadAt(p, position)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// removeIfThere removes a file; an absent one is success.
func removeIfThere(fsys vfs.FS, path string) error {
	if err := fsys.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// truncater is what the operating system's files have beyond vfs.File.
type truncater interface{ Truncate(size int64) error }

// shrinkFile cuts a file to size and syncs it. Where the file can't be
// truncated in place its head is copied and renamed over it. Both leave the
// head [0, size) intact whenever the process dies; the caller repeats the call
// after a crash. An open handle of the old file is no longer to be used.
func shrinkFile(fsys vfs.FS, dir, name string, size int64) error {
	path := fsys.PathJoin(dir, name)
	f, err := fsys.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	if t, ok := f.(truncater); ok {
		err := t.Truncate(size)
		if err == nil {
			err = f.Sync()
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("truncate %s to %d: %w", path, size, err)
		}
		return nil
	}
	err = copyHead(fsys, f, fsys.PathJoin(dir, name+tempSuffix), size)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("copy %s: %w", path, err)
	}
	if err := fsys.Rename(fsys.PathJoin(dir, name+tempSuffix), path); err != nil {
		return fmt.Errorf("rename over %s: %w", path, err)
	}
	return syncDir(fsys, dir)
}

func copyHead(fsys vfs.FS, from io.ReaderAt, path string, size int64) (err error) {
	to, err := fsys.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	buf := make([]byte, min(size, 1<<20))
	for position := int64(0); position < size; {
		n := min(int64(len(buf)), size-position)
		if err := readFull(from, buf[:n], position); err != nil {
			return err
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return err
		}
		position += n
	}
	return to.Sync()
}

// maxPosition bounds positions in a segment: the index keeps them in 32 bits.
const maxPosition = math.MaxUint32
