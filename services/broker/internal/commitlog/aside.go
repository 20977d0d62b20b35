package commitlog

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// asideInfix is in the name of a file that keeps cut bytes: the segment's name,
// it, and the offset expected at the first byte. Such a file is never read as a
// part of the log and never removed but with the whole directory.
const asideInfix = ".cut-"

// AsideLimit bounds the bytes that one partition directory keeps of what was cut
// out of its log, over all cuts. Past it the rest of a cut is not kept.
const AsideLimit = 256 << 20

// Cut is a part of the log that was taken away although not all of it was known
// to be worthless: batches were found behind the ones that are damaged, or the
// bytes were synced once.
type Cut struct {
	// From is the first offset that is gone; To the end of what is known to have
	// been there, -1 if that is not known.
	From, To int64
	// Bytes were cut, Kept of them were put aside in Files.
	Bytes, Kept int64
	Files       []string
	// Cause says what was wrong at From; Err why not all was put aside, nil when
	// that was the limit, or when it was.
	Cause, Err error
}

// asidePart are the bytes [position, end) of a segment file, the first of which
// were to hold an offset.
type asidePart struct {
	name          string
	offset        int64
	position, end int64
}

// putAside copies what is about to be cut. Failing to is noted and no error: what
// it would save is worth less than the log's opening.
func (c *Cut) putAside(fsys vfs.FS, dir string, parts []asidePart) {
	room := int64(AsideLimit)
	names, err := fsys.List(dir)
	if err != nil {
		c.Err = fmt.Errorf("list %s: %w", dir, err)
	}
	for _, name := range names {
		if !strings.Contains(name, asideInfix) {
			continue
		}
		if info, err := fsys.Stat(fsys.PathJoin(dir, name)); err == nil {
			room -= info.Size()
		}
	}
	for _, p := range parts {
		c.Bytes += p.end - p.position
		n := min(p.end-p.position, room)
		if n <= 0 || c.Err != nil {
			continue
		}
		name, err := copyAside(fsys, dir, p, n)
		if err != nil {
			c.Err = err
			continue
		}
		c.Files, c.Kept, room = append(c.Files, name), c.Kept+n, room-n
	}
}

// copyAside writes n bytes of a part to a file of its own, durably.
func copyAside(fsys vfs.FS, dir string, p asidePart, n int64) (name string, err error) {
	name = fmt.Sprintf("%s%s%020d", p.name, asideInfix, p.offset)
	for i := 2; ; i++ {
		if _, err := fsys.Stat(fsys.PathJoin(dir, name)); errors.Is(err, fs.ErrNotExist) {
			break
		}
		// An older cut at the same place.
		name = fmt.Sprintf("%s%s%020d-%d", p.name, asideInfix, p.offset, i)
	}
	temp := fsys.PathJoin(dir, name+tempSuffix)
	if err := copyPart(fsys, fsys.PathJoin(dir, p.name), temp, p.position, n); err != nil {
		return "", errors.Join(err, removeIfThere(fsys, temp))
	}
	if err := fsys.Rename(temp, fsys.PathJoin(dir, name)); err != nil {
		return "", fmt.Errorf("rename %s: %w", temp, err)
	}
	return name, syncDir(fsys, dir)
}

func copyPart(fsys vfs.FS, from, to string, position, n int64) (err error) {
	in, err := fsys.Open(from)
	if err != nil {
		return fmt.Errorf("open %s: %w", from, err)
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	out, err := fsys.Create(to, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("create %s: %w", to, err)
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	pooled := scanBuffers.Get().(*[]byte)
	defer scanBuffers.Put(pooled)
	for end := position + n; position < end; {
		part := (*pooled)[:min(int64(len(*pooled)), end-position)]
		if err := readFull(in, part, position); err != nil {
			return fmt.Errorf("read %s at %d: %w", from, position, err)
		}
		if _, err := out.Write(part); err != nil {
			return fmt.Errorf("write %s: %w", to, err)
		}
		position += int64(len(part))
	}
	if err := out.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", to, err)
	}
	return nil
}

// damagedFiles are the segment files from a damage on, as they are on disk.
func damagedFiles(fsys vfs.FS, dir string, d *Damage) ([]asidePart, error) {
	files, err := listSegments(fsys, dir)
	if err != nil {
		return nil, err
	}
	var parts []asidePart
	for _, base := range files.logs {
		name := segmentName(base, logSuffix)
		p := asidePart{name: name, offset: base}
		switch {
		case fsys.PathJoin(dir, name) == d.Path:
			p.offset, p.position = d.From, d.Position
		case base < d.From || base == d.From && d.Path != "":
			continue
		}
		info, err := fsys.Stat(fsys.PathJoin(dir, name))
		if err != nil {
			return nil, fmt.Errorf("stat %s: %w", name, err)
		}
		if p.end = info.Size(); p.end > p.position {
			parts = append(parts, p)
		}
	}
	return parts, nil
}

// cutDamage puts aside what a truncation or reset of a damaged log is about to
// remove.
func (l *Log) cutDamage(d *Damage) {
	c := &Cut{From: d.From, To: d.To, Cause: d.Cause}
	parts, err := damagedFiles(l.fs, l.dir, d)
	if err != nil {
		c.Err = err
	} else {
		c.putAside(l.fs, l.dir, parts)
	}
	l.cut.Store(c)
}

// Cut is what was cut out of the log since it was opened, or by the opening; nil
// if nothing was.
func (l *Log) Cut() *Cut { return l.cut.Load() }

// Dirty says that Sync has something to do.
func (l *Log) Dirty() bool { return l.End() > l.RecoveryPoint() }
