package replica_test

import (
	"context"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// wish has the controller repeat wishes that broker to lead, for the present
// epochs of all partitions; delta is added to the epochs.
func (w *world) wish(to, delta int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wishes = nil
	for _, p := range w.parts {
		w.wishes = append(w.wishes, &metadatav1.Handover{Partition: w.id(p.index), BrokerId: to, LeaderEpoch: p.fence.LeaderEpoch + delta})
	}
}

func (w *world) held() (n int) {
	w.with(func() { n = w.elections })
	return n
}

// A leader that is asked to hands over, more partitions than at once, and nothing
// that was acked is lost with it, nor an append refused for longer than a moment.
func TestWishesAreFulfilled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const partitions = 9
		s := newScene(t, partitions)
		r := s.rlm(1, "a")
		one, two := s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())
		for i := range int32(partitions) {
			mustAdd(t, one.leading(i), batch(t, "x", 1), partition.Object)
			two.following(i, 1)
		}
		s.world.wish(2, -1)
		time.Sleep(3 * sessionTimeout) //nolint:forbidigo // virtual time inside a bubble
		require.Zero(t, s.world.held(), "another epoch is meant")
		s.world.wish(1, 0)
		time.Sleep(3 * sessionTimeout) //nolint:forbidigo // virtual time inside a bubble
		require.Zero(t, s.world.held(), "it leads already")

		r.with(func() { r.down = true })
		p := one.leading(0)
		mustAdd(t, p, batch(t, "acked", 2), partition.Leader)
		s.world.wish(2, 0)
		until(t, "it takes nothing at the moment", func() bool { return len(findings(p, "HANDING_OVER")) == 1 })
		_, err := add(t, p, batch(t, "refused", 1), partition.Leader)
		var recovering *replica.RecoveringError
		require.ErrorAs(t, err, &recovering)
		require.Positive(t, recovering.Retry)
		r.up()
		for i := range int32(partitions) {
			q := two.leading(i)
			want := []string{"x-0"}
			if i == 0 {
				want = append(want, "acked-0", "acked-1")
			}
			require.Equal(t, want, values(t, q))
			require.Zero(t, q.Offsets().LocalLogStart, "with the copy that it has")
		}
		require.Equal(t, partitions, s.world.held(), "one election each")
		time.Sleep(3 * sessionTimeout) //nolint:forbidigo // virtual time inside a bubble
		require.Equal(t, partitions, s.world.held(), "repeats are void")

		// And back.
		s.world.wish(1, 0)
		for i := range int32(partitions) {
			mustAdd(t, one.leading(i), batch(t, "back", 1), partition.Object)
		}
		require.Equal(t, 2*partitions, s.world.held())
	})
}

// What can't be handed over without loss, or to nobody who is ready, stays, and
// appends go on.
func TestWishesThatCannotBeFulfilled(t *testing.T) {
	goesOn := func(t *testing.T, p *replica.Partition) {
		t.Helper()
		until(t, "appends are taken", func() bool {
			_, err := add(t, p, batch(t, "on", 1), partition.Leader)
			return err == nil
		})
	}
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		one := s.broker(1, vfs.NewMem())
		p := one.leading(0)
		mustAdd(t, p, batch(t, "x", 3), partition.Object)
		s.world.wish(2, 0)
		time.Sleep(3 * sessionTimeout) //nolint:forbidigo // virtual time inside a bubble
		require.Zero(t, s.world.held(), "it is not there")

		two := s.broker(2, vfs.NewMem())
		s.world.with(func() { s.world.wishes = nil })
		two.following(0, 3)
		r.with(func() { r.down = true })
		mustAdd(t, p, batch(t, "acked", 1), partition.Leader)
		s.world.wish(2, 0)
		until(t, "it tries", func() bool { return len(findings(p, "HANDING_OVER")) == 1 })
		began := time.Now()
		until(t, "it gives up", func() bool { return len(findings(p, "HANDING_OVER")) == 0 })
		require.Less(t, time.Since(began), 3*time.Second)
		goesOn(t, p)
		for range 400 { // not with every repeat of the wish
			require.Empty(t, findings(p, "HANDING_OVER"))
			time.Sleep(10 * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
		}
		require.Zero(t, s.world.held())

		// Everything is in the bucket, but the controller refuses.
		s.world.with(func() { s.world.electErr = status.Error(codes.FailedPrecondition, "no") })
		r.up()
		until(t, "it tries again", func() bool {
			n := 0
			s.world.with(func() { n = s.world.refusals })
			return n == 1
		})
		goesOn(t, p)
		require.Zero(t, s.world.held())
		s.world.with(func() { s.world.electErr = nil })
		until(t, "another try, later", func() bool { return s.world.held() == 1 })
		require.Contains(t, values(t, two.leading(0)), "acked-0")
	})
}

// A broker that stops hears no wishes: it hands everything over anyway.
func TestDrainHearsNoWishes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		one, two := s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())
		p := one.leading(0)
		mustAdd(t, p, batch(t, "x", 1), partition.Object)
		two.following(0, 1)
		r.with(func() { r.down = true })
		mustAdd(t, p, batch(t, "acked", 1), partition.Leader)
		s.world.wish(2, 0)
		until(t, "it tries", func() bool { return len(findings(p, "HANDING_OVER")) == 1 })
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		drained := make(chan error, 1)
		go func() { drained <- one.m.Drain(ctx) }()
		time.Sleep(10 * time.Second) //nolint:forbidigo // virtual time inside a bubble
		_, err := add(t, p, batch(t, "late", 1), partition.Leader)
		require.ErrorIs(t, err, replica.ErrStopped, "the end of the wish changes nothing")
		r.up()
		require.NoError(t, <-drained)
		require.Equal(t, 1, s.world.held())
		require.Equal(t, []string{"x-0", "acked-0"}, values(t, two.leading(0)))
	})
}
