package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/backoff"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Follower keeps the newest view in reach.
type Follower struct {
	conn     grpc.ClientConnInterface
	log      *slog.Logger
	onChange func(*View)

	view    atomic.Pointer[View]
	ready   chan struct{} // closed with the first view
	once    sync.Once
	lastErr atomic.Pointer[error]
}

// NewFollower makes a follower that reads from conn, any metadata replica.
// onChange is called for each new view, in order, by the goroutine of Run, and
// must not block for long.
func NewFollower(conn grpc.ClientConnInterface, log *slog.Logger, onChange func(*View)) *Follower {
	f := &Follower{conn: conn, log: log.With("component", "cluster"), onChange: onChange, ready: make(chan struct{})}
	f.view.Store(newView())
	return f
}

// View is the newest view; an empty one before Ready.
func (f *Follower) View() *View { return f.view.Load() }

// Ready is closed once there is a view.
func (f *Follower) Ready() <-chan struct{} { return f.ready }

// Err is why the stream is broken at the moment, nil while it is not.
func (f *Follower) Err() error {
	if err := f.lastErr.Load(); err != nil {
		return *err
	}
	return nil
}

// Run follows the metadata log until ctx ends or the log holds something this
// broker does not understand (ErrFeatureLevel).
func (f *Follower) Run(ctx context.Context) error {
	tracker := NewTracker()
	policy := backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second, Multiplier: 2, Jitter: 0.5}
	for attempt := 1; ; attempt++ {
		progressed, err := f.stream(ctx, tracker)
		if errors.Is(err, ErrFeatureLevel) {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		f.lastErr.Store(&err)
		if progressed {
			attempt = 1
		}
		f.log.DebugContext(ctx, "membership stream ended, opening another", "err", err)
		if err := backoff.Sleep(ctx, policy.Delay(attempt, rand.Float64())); err != nil {
			return context.Cause(ctx)
		}
	}
}

func (f *Follower) stream(ctx context.Context, t *Tracker) (progressed bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req := &metadatav1.WatchMetadataRequest{Filter: metadatav1.MetadataFilter_METADATA_FILTER_MEMBERSHIP}
	t.image = nil
	if p := t.View().Position; p.Incarnation != 0 {
		req.From = &metadatav1.MetadataPosition{Incarnation: p.Incarnation, ControllerEpoch: p.ControllerEpoch, Offset: p.Offset}
	}
	s, err := metadatav1.NewSnapshotServiceClient(f.conn).WatchMetadata(ctx, req)
	if err != nil {
		return false, fmt.Errorf("watch the metadata log: %w", err)
	}
	for {
		m, err := s.Recv()
		if err != nil {
			return progressed, fmt.Errorf("watch the metadata log: %w", err)
		}
		progressed = true
		f.lastErr.Store(nil)
		switch k := m.GetKind().(type) {
		case *metadatav1.WatchMetadataResponse_Reset_:
			ready, err := t.Reset(k.Reset_)
			if err != nil {
				return true, err
			}
			if !ready {
				continue
			}
		case *metadatav1.WatchMetadataResponse_Entry:
			if k.Entry.GetOffset() < t.View().Position.Offset {
				continue // seen before
			}
			if err := t.Apply(k.Entry); err != nil {
				return true, err
			}
		case *metadatav1.WatchMetadataResponse_Progress:
			t.Progress(k.Progress)
			f.view.Store(t.View())
			continue
		}
		f.view.Store(t.View())
		f.onChange(t.View())
		f.once.Do(func() { close(f.ready) })
	}
}
