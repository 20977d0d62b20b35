package replica_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// While no footer can be read the broker's own log is enough, be it from a
// snapshot of a clean stop or from the partition's first record.
func TestProducerStateFromTheOwnLogWhileTheBucketIsDown(t *testing.T) {
	for name, clean := range map[string]bool{"clean stop": true, "crash": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				r := s.rlm(1, "a")
				fs := vfs.NewCrashableMem()
				b := s.broker(1, fs)
				p := b.leading(0)
				mustAdd(t, p, sequenced(t, producerA, 0, 0, 2), partition.Object)
				r.with(func() { r.down = true })
				mustAdd(t, p, sequenced(t, producerA, 0, 2, 2), partition.Leader)
				s.bucket.mu.Lock()
				s.bucket.fail = status.Error(codes.Unavailable, "down")
				s.bucket.mu.Unlock()
				disk := fs
				if !clean {
					disk = fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 2))})
				}
				b.stop()
				p = s.broker(1, disk).leading(0)
				for i, sequence := range []int32{0, 2} {
					res := mustAdd(t, p, sequenced(t, producerA, 0, sequence, 2), partition.Leader)
					require.True(t, res.Duplicate)
					require.EqualValues(t, 2*i, res.Base)
				}
				require.False(t, mustAdd(t, p, sequenced(t, producerA, 0, 4, 1), partition.Leader).Duplicate)
			})
		})
	}
}

// Field report B052: an idle producer is forgotten by the leader's clock, the
// answer tells so, and it is the same after a change of leader.
func TestExpiredProducersAreForgottenByEveryLeader(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.world.configs["producer.expiry"] = "1m"
		s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		other := producerA + 1
		mustAdd(t, p, sequenced(t, producerA, 0, 0, 7), partition.Object)
		time.Sleep(2 * time.Minute) //nolint:forbidigo // virtual time inside a bubble
		mustAdd(t, p, sequenced(t, other, 0, 0, 1), partition.Object)
		check := func(p *replica.Partition) {
			t.Helper()
			_, err := add(t, p, sequenced(t, producerA, 0, 7, 1), partition.Object)
			var gap *replica.SequenceGapError
			require.ErrorAs(t, err, &gap)
			require.EqualValues(t, -1, gap.LastSequence)
			require.Equal(t, 1, p.Explain().ProducerCount)
		}
		check(p)
		b.stop()
		s.world.with(func() { s.world.elect = 2 })
		q := s.broker(2, vfs.NewMem()).leading(0)
		until(t, "producers known", func() bool { return q.Explain().ProducerCount == 1 })
		check(q)
		require.EqualValues(t, 8, mustAdd(t, q, sequenced(t, producerA, 0, 0, 1), partition.Object).Base)
	})
}

// Recovery reads few footers however many ranges there are: now and then one
// holds the whole state.
func TestFootersHoldTheWholeStateNowAndThen(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		mustAdd(t, p, sequenced(t, producerA, 0, 0, 1), partition.Object)
		for range 300 {
			mustAdd(t, p, batch(t, "x", 1), partition.Object)
		}
		var complete []int
		for i, rg := range r.ranges() {
			if rg.GetRange().GetProducersComplete() {
				complete = append(complete, i)
				require.Len(t, rg.GetProducers(), 1)
			} else {
				require.Empty(t, rg.GetProducers())
			}
		}
		require.Equal(t, []int{0, 256}, complete)
		b.stop()
		s.world.with(func() { s.world.elect = 2 })
		q := s.broker(2, vfs.NewMem()).leading(0)
		res := mustAdd(t, q, sequenced(t, producerA, 0, 0, 1), partition.Object)
		require.True(t, res.Duplicate)
		require.Zero(t, res.Base)
	})
}
