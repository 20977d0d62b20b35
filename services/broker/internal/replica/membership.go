package replica

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/braidlog/braid/services/broker/internal/cluster"
)

// membershipName is the file beside the partitions that remembers which
// directory this is and how far the metadata log was applied, so that an etcd
// that was rolled back is noticed (design review F12).
const membershipName = "membership.json"

// storePace is how often the position is written down.
const storePace = 30 * time.Second

type membershipFile struct {
	Format          int    `json:"format_version"`
	DirectoryID     string `json:"directory_id"`
	Incarnation     uint32 `json:"incarnation"`
	ControllerEpoch int64  `json:"controller_epoch"`
	Offset          int64  `json:"metadata_offset"`
}

// membership is the content of that file.
type membership struct {
	fs   vfs.FS
	path string
	dir  string

	mu    sync.Mutex // guards saved and is held while the file is written
	saved membershipFile
}

// load reads the file, or begins it.
func (s *membership) load(fsys vfs.FS, dir string) error {
	s.fs, s.dir, s.path = fsys, dir, fsys.PathJoin(dir, membershipName)
	f, err := fsys.Open(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		id, err := newUUID()
		if err != nil {
			return err
		}
		s.saved = membershipFile{Format: 1, DirectoryID: id}
		return s.write(s.saved)
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", s.path, err)
	}
	data, err := io.ReadAll(io.LimitReader(f, 1<<16))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("read %s: %w", s.path, err)
	}
	if err := json.Unmarshal(data, &s.saved); err != nil {
		return fmt.Errorf("decode %s: %w", s.path, err)
	}
	if s.saved.Format != 1 || s.saved.DirectoryID == "" {
		return fmt.Errorf("decode %s: format version %d, this program knows 1", s.path, s.saved.Format)
	}
	return nil
}

func (s *membership) write(v membershipFile) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", s.path, err)
	}
	temp := s.path + ".tmp"
	f, err := s.fs.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("create %s: %w", temp, err)
	}
	_, err = f.Write(append(data, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = s.fs.Rename(temp, s.path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", s.path, err)
	}
	d, err := s.fs.OpenDir(s.dir)
	if err != nil {
		return fmt.Errorf("sync %s: %w", s.dir, err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// store writes the position down if it moved.
func (s *membership) store(p cluster.Position) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.saved
	next.Incarnation, next.ControllerEpoch, next.Offset = p.Incarnation, p.ControllerEpoch, p.Offset
	if next == s.saved || p.Incarnation == 0 || s.saved.DirectoryID == "" {
		return nil
	}
	if err := s.write(next); err != nil {
		return err
	}
	s.saved = next
	return nil
}

// keep writes the position down now and then, until ctx ends.
func (s *membership) keep(ctx context.Context, position func() cluster.Position, log *slog.Logger) error {
	ticker := time.NewTicker(storePace)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
			if err := s.store(position()); err != nil {
				log.WarnContext(ctx, "the metadata position was not written down", "err", err)
			}
		}
	}
}

func (s *membership) directoryID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.saved.DirectoryID
}

func (s *membership) position() cluster.Position {
	s.mu.Lock()
	defer s.mu.Unlock()
	return cluster.Position{Incarnation: s.saved.Incarnation, ControllerEpoch: s.saved.ControllerEpoch, Offset: s.saved.Offset}
}

func newUUID() (string, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", fmt.Errorf("directory id: %w", err)
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16]), nil
}
