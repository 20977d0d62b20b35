package metadata

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/objstore"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/internal/snapshot"
	"github.com/braidlog/braid/services/metadata/state"
)

// Names in the data directory.
const (
	lockName     = "LOCK"
	snapshotsDir = "snapshots"
)

// openDisk opens the data directory, which one process may use at a time.
func (s *Server) openDisk(fsys vfs.FS) error {
	dir := s.cfg.DataDir
	if fsys == nil || dir == "" {
		fsys = vfs.Default
	}
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "braid-metadata-"); err != nil {
			return fmt.Errorf("make a temporary directory for snapshots: %w", err)
		}
		s.closers = append(s.closers, func() error { return os.RemoveAll(dir) })
	} else {
		if err := fsys.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("data.dir: %w", err)
		}
		lock, err := fsys.Lock(fsys.PathJoin(dir, lockName))
		if err != nil {
			return fmt.Errorf("data.dir %s is in use by another process: %w", dir, err)
		}
		s.closers = append(s.closers, lock.Close)
	}
	disk, err := snapshot.OpenDisk(fsys, fsys.PathJoin(dir, snapshotsDir))
	if err != nil {
		return fmt.Errorf("data.dir %s: %w", filepath.Clean(dir), err)
	}
	s.disk = disk
	return nil
}

// peers finds the other replicas by their candidacies in etcd.
func (s *Server) peers(deps Deps) snapshot.Peers {
	return snapshot.Peers{
		Addresses: func(ctx context.Context) ([]string, error) {
			candidates, err := s.metalog.Candidates(ctx)
			if err != nil {
				return nil, err
			}
			var out []string
			for _, c := range candidates {
				id, address, ok := strings.Cut(c, " ")
				if ok && id != strconv.Itoa(s.cfg.ID) && address != s.address {
					out = append(out, address)
				}
			}
			return out, nil
		},
		Dial: func(address string) (grpc.ClientConnInterface, func() error, error) {
			conn, err := grpcclient.Dial(address, grpcclient.DefaultConfig(), grpcclient.Deps{
				Logger: s.log, TracerProvider: deps.Telemetry.TracerProvider, MeterProvider: deps.Telemetry.MeterProvider, Dialer: deps.Dial,
			})
			if err != nil {
				return nil, nil, err
			}
			return conn, conn.Close, nil
		},
	}
}

// loadAttempts bounds the starts over when the log is trimmed while it is read.
const loadAttempts = 3

// load applies the log as it is, from a snapshot on if there is one, and checks
// that log and bucket belong together.
func (s *Server) load(ctx context.Context) error {
	began := time.Now()
	for attempt := 1; ; attempt++ {
		err := s.catchUp(ctx)
		if errors.As(err, new(*metalog.TrimmedError)) && attempt < loadAttempts {
			continue
		}
		if err != nil {
			return fmt.Errorf("load the metadata log: %w", err)
		}
		if s.tail.End > 0 {
			break
		}
		// The first controller will claim the bucket prefix. That it can't is
		// better said now; another replica may be doing it at this moment.
		claimed := func(ctx context.Context) (controller.Identity, error) { return controller.Claimed(ctx, s.metalog) }
		if _, err := controller.Claimable(ctx, s.store, claimed); err == nil || attempt == loadAttempts {
			return err
		}
	}
	clusterID := s.ClusterID()
	s.log.InfoContext(ctx, "metadata log loaded", "cluster_id", clusterID, "offset", s.tail.End, "log_start", s.tail.Start.Offset, "dur", time.Since(began))
	limit := s.cfg.Store.StartTimeout.Std()
	if s.storeAway { // it was waited for
		limit = min(limit, time.Second)
	}
	for _, check := range []func(context.Context) error{
		func(ctx context.Context) error { return controller.CheckMarker(ctx, s.store, clusterID) },
		s.checkBucket,
	} {
		bounded, cancel := context.WithTimeout(ctx, limit)
		err := check(bounded)
		away := errors.Is(err, objstore.ErrUnavailable) || bounded.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case err == nil:
		case away:
			s.log.WarnContext(ctx, "the object store does not answer, its content is not compared with the log", "err", err)
		default:
			return err
		}
	}
	return nil
}

// checkBucket looks for snapshots that the log does not reach.
func (s *Server) checkBucket(ctx context.Context) error {
	clusterID, incarnation := s.hub.Identity()
	return snapshot.CheckBucket(ctx, s.metalog, snapshot.NewBucket(s.store, clusterID), incarnation)
}

// catchUp brings what is applied to the log's end. Where the log itself does not
// reach down to it, a snapshot does.
func (s *Server) catchUp(ctx context.Context) error {
	tail, err := s.metalog.Tail(ctx)
	if err != nil {
		return err
	}
	if end := s.hub.End(); tail.End > 0 && (end == 0 || end < tail.Start.Offset) {
		if err := s.restore(ctx, tail); err != nil {
			return err
		}
	}
	s.tail, err = s.metalog.Load(ctx, s.hub.End(), func(e *metadatav1.Entry) error {
		return s.hub.Publish([]*metadatav1.Entry{e})
	})
	return err
}

// restore installs a snapshot. The cluster's identity is needed to know which
// ones are its own: it stands in etcd since the bootstrap.
func (s *Server) restore(ctx context.Context, tail metalog.Tail) error {
	id, err := controller.Claimed(ctx, s.metalog)
	switch {
	case err != nil:
		return err
	case id == controller.Identity{} && tail.Start.Offset == 0:
		return nil // a log that is whole needs no snapshot
	case id == controller.Identity{}:
		return fmt.Errorf("%w: the log was trimmed and the cluster's identity is missing", metalog.ErrDamaged)
	}
	s.restorer.Bucket = snapshot.NewBucket(s.store, id.ClusterID)
	st, err := s.restorer.Restore(ctx, id.Incarnation)
	if err != nil || st == nil {
		return err
	}
	if st.ClusterID() != id.ClusterID {
		return fmt.Errorf("%w: a snapshot of cluster %s, this is %s", metalog.ErrForeign, st.ClusterID(), id.ClusterID)
	}
	s.hub.Install(st)
	return nil
}

// follow applies what comes into the log. When it was away so long that the log
// was trimmed meanwhile, it goes on from a snapshot.
func (s *Server) follow(ctx context.Context) error {
	wait := 100 * time.Millisecond
	for {
		err := s.metalog.Follow(ctx, s.tail, func(entries []*metadatav1.Entry) error {
			if err := s.hub.Publish(entries); err != nil {
				return err
			}
			s.controller.Observe(entries)
			return nil
		})
		if !errors.As(err, new(*metalog.TrimmedError)) {
			return err
		}
		s.log.WarnContext(ctx, "the metadata log was trimmed while this replica was away", "offset", s.hub.End(), "err", err)
		for {
			err := s.catchUp(ctx)
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case metalog.Fatal(err), refused(err):
				return err
			}
			if err == nil {
				break
			}
			// Nobody has a snapshot at the moment, or cannot be reached. What is
			// applied stays true until then, only older.
			s.log.WarnContext(ctx, "no metadata snapshot yet, will try again", "err", err)
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return context.Cause(ctx)
			}
			wait = min(2*wait, 5*time.Second)
		}
		wait = 100 * time.Millisecond
	}
}

// refused says whether the state can't apply what the log holds.
func refused(err error) bool {
	return errors.As(err, new(*state.BadEntryError)) || errors.As(err, new(*state.UnknownEventError))
}
