package cluster

import (
	"errors"
	"io"
	"os"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// errDead is what a killed member gets from its disk.
var errDead = errors.New("cluster: the process was killed")

// disk is a file system of one life of a broker. After kill nothing that the life
// still does reads or changes a file, and its locks are free: what the operating
// system sees of a process that died.
type disk struct {
	vfs.FS

	mu    sync.RWMutex // held for reading by everything that touches a file
	dead  bool
	locks map[io.Closer]bool
}

func newDisk() *disk { return &disk{FS: vfs.Default, locks: map[io.Closer]bool{}} }

// kill waits for operations under way, as the kernel does, and then refuses all.
func (d *disk) kill() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dead = true
	for l := range d.locks {
		_ = l.Close()
	}
	clear(d.locks)
}

// do runs fn unless the process is dead.
func (d *disk) do(fn func() error) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.dead {
		return errDead
	}
	return fn()
}

func (d *disk) file(open func() (vfs.File, error)) (f vfs.File, err error) {
	err = d.do(func() error {
		f, err = open()
		return err
	})
	if err != nil {
		return nil, err
	}
	return &diskFile{File: f, d: d}, nil
}

func (d *disk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.file(func() (vfs.File, error) { return d.FS.Create(name, c) })
}

func (d *disk) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	return d.file(func() (vfs.File, error) { return d.FS.Open(name, opts...) })
}

func (d *disk) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return d.file(func() (vfs.File, error) { return d.FS.OpenReadWrite(name, c, opts...) })
}

func (d *disk) OpenDir(name string) (vfs.File, error) {
	return d.file(func() (vfs.File, error) { return d.FS.OpenDir(name) })
}

func (d *disk) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return d.file(func() (vfs.File, error) { return d.FS.ReuseForWrite(from, to, c) })
}

func (d *disk) Link(from, to string) error {
	return d.do(func() error { return d.FS.Link(from, to) })
}

func (d *disk) Remove(name string) error { return d.do(func() error { return d.FS.Remove(name) }) }

func (d *disk) RemoveAll(name string) error {
	return d.do(func() error { return d.FS.RemoveAll(name) })
}

func (d *disk) Rename(from, to string) error {
	return d.do(func() error { return d.FS.Rename(from, to) })
}

func (d *disk) MkdirAll(dir string, perm os.FileMode) error {
	return d.do(func() error { return d.FS.MkdirAll(dir, perm) })
}

func (d *disk) List(dir string) (names []string, err error) {
	err = d.do(func() error {
		names, err = d.FS.List(dir)
		return err
	})
	return names, err
}

func (d *disk) Stat(name string) (info vfs.FileInfo, err error) {
	err = d.do(func() error {
		info, err = d.FS.Stat(name)
		return err
	})
	return info, err
}

func (d *disk) Lock(name string) (io.Closer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errDead
	}
	l, err := d.FS.Lock(name)
	if err != nil {
		return nil, err
	}
	d.locks[l] = true
	return &diskLock{d: d, l: l}, nil
}

type diskLock struct {
	d *disk
	l io.Closer
}

// Close gives the lock back, unless the death of the process did already.
func (l *diskLock) Close() error {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	if !l.d.locks[l.l] {
		return nil
	}
	delete(l.d.locks, l.l)
	return l.l.Close()
}

type diskFile struct {
	vfs.File
	d *disk
}

func (f *diskFile) Read(p []byte) (n int, err error) {
	err = f.d.do(func() error { n, err = f.File.Read(p); return err })
	return n, err
}

func (f *diskFile) ReadAt(p []byte, off int64) (n int, err error) {
	err = f.d.do(func() error { n, err = f.File.ReadAt(p, off); return err })
	return n, err
}

func (f *diskFile) Write(p []byte) (n int, err error) {
	err = f.d.do(func() error { n, err = f.File.Write(p); return err })
	return n, err
}

func (f *diskFile) WriteAt(p []byte, off int64) (n int, err error) {
	err = f.d.do(func() error { n, err = f.File.WriteAt(p, off); return err })
	return n, err
}

func (f *diskFile) Preallocate(off, length int64) error {
	return f.d.do(func() error { return f.File.Preallocate(off, length) })
}

func (f *diskFile) Stat() (info vfs.FileInfo, err error) {
	err = f.d.do(func() error { info, err = f.File.Stat(); return err })
	return info, err
}

func (f *diskFile) Sync() error { return f.d.do(f.File.Sync) }

func (f *diskFile) SyncTo(length int64) (full bool, err error) {
	err = f.d.do(func() error { full, err = f.File.SyncTo(length); return err })
	return full, err
}

func (f *diskFile) SyncData() error { return f.d.do(f.File.SyncData) }

// Truncate is what the broker's log looks for beyond vfs.File.
func (f *diskFile) Truncate(size int64) error {
	t, ok := f.File.(interface{ Truncate(size int64) error })
	if !ok {
		return errors.ErrUnsupported
	}
	return f.d.do(func() error { return t.Truncate(size) })
}
