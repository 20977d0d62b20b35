package replica_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// watchers counts the streams on which a partition is watched.
func (w *world) watchers(index int32) (n int) {
	w.with(func() {
		for watched := range maps.Values(w.segments) {
			if watched[index] {
				n++
			}
		}
	})
	return n
}

// holdsPartition says whether a broker holds a partition; if not the error names its leader.
func holdsPartition(t *testing.T, b *broker, index int32) bool {
	t.Helper()
	_, err := b.m.Lookup(topicName, index)
	if err == nil {
		return true
	}
	var elsewhere *replica.NotLeaderError
	require.ErrorAs(t, err, &elsewhere)
	return false
}

// A broker that is not among the replicas any more lets go of the partition,
// whether it followed or led, keeps its directory, and goes on with it when it is
// among them again.
func TestPartitionsThatMovedAwayAreReleased(t *testing.T) {
	for name, leads := range map[string]bool{"leader": true, "follower": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 2)
				r := s.rlm(1, "a")
				disks := map[int32]*vfs.MemFS{1: vfs.NewMem(), 2: vfs.NewMem()}
				brokers := map[int32]*broker{1: s.broker(1, disks[1]), 2: s.broker(2, disks[2])}
				mustAdd(t, brokers[1].leading(0), batch(t, "x", 3), partition.Object)
				brokers[2].following(0, 3)
				brokers[2].following(1, 0)
				leaves, stays := int32(2), int32(1)
				if leads {
					leaves, stays = 1, 2
				}
				old, err := brokers[leaves].m.Lookup(topicName, 0)
				require.NoError(t, err)
				if leads {
					// What waits is answered.
					r.with(func() { r.down = true })
					answer := make(chan error, 1)
					tail := batch(t, "tail", 1)
					go func() {
						_, err := add(t, old, tail, partition.Object)
						answer <- err
					}()
					until(t, "it is in the log", func() bool { return old.Offsets().LogEnd == 4 })
					s.world.reassign(0, stays)
					var unknown *replica.OutcomeUnknownError
					require.ErrorAs(t, <-answer, &unknown)
					r.cut()
					r.up()
				} else {
					s.world.reassign(0, stays)
				}
				until(t, "it is let go of", func() bool { return !holdsPartition(t, brokers[leaves], 0) })
				until(t, "it is not watched", func() bool { return s.world.watchers(0) == 1 })
				require.Equal(t, 2, s.world.watchers(1))
				require.True(t, holdsPartition(t, brokers[leaves], 1))
				require.Zero(t, brokers[leaves].m.Unuploaded())
				until(t, "who kept it is told of the leader", func() bool {
					_, err = add(t, old, batch(t, "late", 1), partition.Leader)
					var elsewhere *replica.NotLeaderError
					require.ErrorAs(t, err, &elsewhere)
					return elsewhere.LeaderID == stays
				})
				mustAdd(t, brokers[stays].leading(0), batch(t, "y", 1), partition.Object)
				files, err := disks[leaves].List("data")
				require.NoError(t, err)
				require.True(t, slices.ContainsFunc(files, func(f string) bool { return f == topicID+"-0" || f == topicID }), "%v", files)

				// And back, more than once, at any moment.
				for range 5 {
					s.world.reassign(0, stays, leaves)
					s.world.reassign(0, stays)
				}
				s.world.reassign(0, stays, leaves)
				q := brokers[leaves].following(0, 4)
				require.Zero(t, q.Offsets().LocalLogStart, "with what it kept")
				require.Equal(t, stored(t, brokers[stays].leading(0).Read, 4), copyOf(t, q, 4))
				s.world.fence(0, leaves)
				require.Equal(t, []string{"x-0", "x-1", "x-2", "y-0"}, values(t, brokers[leaves].leading(0)))
			})
		})
	}
}
