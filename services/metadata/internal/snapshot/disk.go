package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/braidlog/braid/services/metadata/state"
)

const (
	suffix        = ".snapshot"
	partSuffix    = ".part"    // being written; removed at start
	corruptSuffix = ".corrupt" // set aside for whoever wants to know what happened
)

// Keep is how many snapshots a replica's disk and the bucket keep: the log may
// be trimmed below the older one.
const Keep = 2

// ErrUnknown: no snapshot of this id is kept.
var ErrUnknown = errors.New("snapshot unknown")

// Disk keeps snapshots in a directory of its own. A file under a snapshot's name
// is whole and durable: it was written under another name, synced, and renamed.
// Its bytes may rot later, so what is loaded is checked. A Disk is safe for
// concurrent use.
type Disk struct {
	fs  vfs.FS
	dir string

	writing sync.Mutex // one file is written at a time

	mu   sync.Mutex // guards kept
	kept []Info     // newest first
}

// OpenDisk opens the directory, which it makes if need be, removes what earlier
// processes did not finish, and lists what is there.
func OpenDisk(fsys vfs.FS, dir string) (*Disk, error) {
	if err := fsys.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of snapshots: %w", err)
	}
	for child := dir; fsys.PathDir(child) != child; child = fsys.PathDir(child) { // whatever of them was made now
		if err := syncDir(fsys, fsys.PathDir(child)); err != nil {
			return nil, err
		}
	}
	d := &Disk{fs: fsys, dir: dir}
	names, err := fsys.List(dir)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, partSuffix) {
			if err := fsys.Remove(fsys.PathJoin(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("remove an unfinished snapshot: %w", err)
			}
			continue
		}
		base, ok := strings.CutSuffix(name, suffix)
		info, valid := parseName(base)
		if !ok || !valid {
			continue
		}
		sound, err := d.inspect(&info)
		switch {
		case errors.Is(err, fs.ErrNotExist): // vanished meanwhile
		case err != nil:
			return nil, err
		case sound:
			d.kept = append(d.kept, info)
		default:
			if err := d.setAside(info); err != nil {
				return nil, err
			}
		}
	}
	d.sort()
	return d, nil
}

// inspect fills in size and sum from the file; false if they can't be those of
// the name.
func (d *Disk) inspect(i *Info) (sound bool, err error) {
	f, err := d.open(*i)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	stat, err := f.Stat()
	if err != nil {
		return false, fmt.Errorf("snapshot %v: %w", i.ID, err)
	}
	i.Size = stat.Size()
	if i.Size < state.SnapshotSumSize {
		return false, nil
	}
	prefix := bytes.Clone(i.Sum[:sumDigits/2])
	if _, err := f.ReadAt(i.Sum[:], i.Size-state.SnapshotSumSize); err != nil {
		return false, fmt.Errorf("snapshot %v: %w", i.ID, err)
	}
	sound = bytes.Equal(prefix, i.Sum[:sumDigits/2])
	if !sound { // back to what its name says
		i.Sum = [state.SnapshotSumSize]byte{}
		copy(i.Sum[:], prefix)
	}
	return sound, nil
}

// sort brings the kept ones in order, newest first. The caller holds mu or owns d.
func (d *Disk) sort() {
	slices.SortFunc(d.kept, func(a, b Info) int { return strings.Compare(b.Name(), a.Name()) })
}

// List returns the snapshots of an incarnation, newest first.
func (d *Disk) List(incarnation uint32) []Info {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []Info
	for _, i := range d.kept {
		if i.Incarnation == incarnation {
			out = append(out, i)
		}
	}
	return out
}

func (d *Disk) path(i Info) string { return d.fs.PathJoin(d.dir, i.Name()+suffix) }

func (d *Disk) open(i Info) (vfs.File, error) {
	f, err := d.fs.Open(d.path(i))
	if err != nil {
		return nil, fmt.Errorf("open snapshot %v: %w", i.ID, err)
	}
	return f, nil
}

// ReadAt reads up to len(p) bytes of a snapshot from a position within
// [0, size]. ErrUnknown if it is not kept.
func (d *Disk) ReadAt(i Info, p []byte, position int64) (n int, err error) {
	f, err := d.open(i)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("%w: %v", ErrUnknown, i.ID)
	}
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	p = p[:min(int64(len(p)), i.Size-position)]
	if len(p) == 0 {
		return 0, nil
	}
	if n, err = f.ReadAt(p, position); n == len(p) {
		return n, nil
	}
	return n, fmt.Errorf("read snapshot %v at %d: %w", i.ID, position, err)
}

// Age is how long ago the file was written by the clock of the file system.
func (d *Disk) Age(i Info, now time.Time) time.Duration {
	stat, err := d.fs.Stat(d.path(i))
	if err != nil {
		return 0
	}
	return now.Sub(stat.ModTime())
}

// Load reads a snapshot into a state. One that is damaged is set aside, and the
// error is then a [*state.SnapshotError].
func (d *Disk) Load(i Info) (*state.State, error) {
	s, err := d.decode(i)
	if damaged := (*state.SnapshotError)(nil); errors.As(err, &damaged) && damaged.Cause == nil {
		err = errors.Join(err, d.SetAside(i))
	}
	return s, err
}

func (d *Disk) decode(i Info) (s *state.State, err error) {
	f, err := d.open(i)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if s, err = decode(f); err != nil {
		return nil, fmt.Errorf("load snapshot %v: %w", i.ID, err)
	}
	if idOf(s) != i.ID {
		return nil, fmt.Errorf("load snapshot %v: %w", i.ID, &state.SnapshotError{Reason: fmt.Sprintf("it is that of %v", idOf(s))})
	}
	return s, nil
}

// SetAside takes a damaged snapshot out of use. The newest damaged one is kept
// under another name.
func (d *Disk) SetAside(i Info) error {
	d.mu.Lock()
	d.kept = slices.DeleteFunc(d.kept, func(k Info) bool { return k.Name() == i.Name() })
	d.mu.Unlock()
	return d.setAside(i)
}

func (d *Disk) setAside(i Info) error {
	if err := d.fs.Rename(d.path(i), d.fs.PathJoin(d.dir, "damaged"+corruptSuffix)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("set snapshot %v aside: %w", i.ID, err)
	}
	return syncDir(d.fs, d.dir)
}

// Save writes the state's snapshot and forgets all but the newest [Keep] of its
// incarnation. One that is there already is left as it is.
func (d *Disk) Save(s *state.State) (Info, error) {
	info := Info{ID: idOf(s)}
	return d.write(info.ID, func(w io.Writer) (err error) {
		_, err = s.Encode(w)
		return err
	}, nil)
}

// Receive writes a snapshot that comes from elsewhere: fetch writes its bytes.
// It is kept only if it is whole and of the id, and then its state is returned.
func (d *Disk) Receive(id ID, fetch func(io.Writer) error) (s *state.State, info Info, err error) {
	info, err = d.write(id, fetch, func(f io.Reader) error {
		if s, err = decode(f); err != nil {
			return err
		}
		if got := idOf(s); got != id {
			return &state.SnapshotError{Reason: fmt.Sprintf("it is that of %v", got)}
		}
		return nil
	})
	if err != nil {
		return nil, Info{}, err
	}
	return s, info, nil
}

// write writes a file whole or not at all: fill gives its bytes, check reads
// them back if it is given.
func (d *Disk) write(id ID, fill func(io.Writer) error, check func(io.Reader) error) (info Info, err error) {
	d.writing.Lock()
	defer d.writing.Unlock()
	temp := d.fs.PathJoin(d.dir, id.String()+partSuffix)
	defer func() {
		if err != nil {
			err = fmt.Errorf("write snapshot %v: %w", id, err)
			if gone := d.fs.Remove(temp); gone != nil && !errors.Is(gone, fs.ErrNotExist) {
				err = errors.Join(err, gone)
			}
		}
	}()
	info.ID = id
	if err := d.fill(temp, fill); err != nil {
		return Info{}, err
	}
	if err := d.reread(temp, &info, check); err != nil {
		return Info{}, err
	}
	if err := d.fs.Rename(temp, d.path(info)); err != nil {
		return Info{}, err
	}
	if err := syncDir(d.fs, d.dir); err != nil {
		return Info{}, err
	}
	d.mu.Lock()
	d.kept = slices.DeleteFunc(d.kept, func(k Info) bool { return k.Name() == info.Name() })
	d.kept = append(d.kept, info)
	d.sort()
	d.mu.Unlock()
	return info, d.prune(id.Incarnation)
}

func (d *Disk) fill(path string, fill func(io.Writer) error) (err error) {
	f, err := d.fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := fill(f); err != nil {
		return err
	}
	return f.Sync()
}

// reread reads back what was written, to know it and its sum.
func (d *Disk) reread(path string, info *Info, check func(io.Reader) error) (err error) {
	f, err := d.fs.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	stat, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size = stat.Size(); info.Size < state.SnapshotSumSize {
		return &state.SnapshotError{Reason: fmt.Sprintf("it has %d bytes", info.Size)}
	}
	if check == nil {
		check = verify
	}
	if err := check(f); err != nil {
		return err
	}
	_, err = f.ReadAt(info.Sum[:], info.Size-state.SnapshotSumSize)
	return err
}

// prune removes all but the newest of an incarnation. Snapshots of others are
// not ours to judge.
func (d *Disk) prune(incarnation uint32) error {
	d.mu.Lock()
	seen := 0
	var old []Info
	d.kept = slices.DeleteFunc(d.kept, func(k Info) bool {
		if k.Incarnation != incarnation {
			return false
		}
		if seen++; seen > Keep {
			old = append(old, k)
			return true
		}
		return false
	})
	d.mu.Unlock()
	for _, i := range old {
		if err := d.fs.Remove(d.path(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove snapshot %v: %w", i.ID, err)
		}
	}
	return nil
}

func syncDir(fsys vfs.FS, dir string) (err error) {
	d, err := fsys.OpenDir(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return nil // above what is ours
	}
	if err != nil {
		return fmt.Errorf("open directory %s: %w", dir, err)
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, err)
	}
	return nil
}
