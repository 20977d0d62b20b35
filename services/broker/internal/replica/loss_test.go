package replica_test

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/walobject"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

const (
	producerB = producerA + 1
	producerC = producerA + 2
)

// lossScene has three ranges [0, 2), [2, 4) and [4, 6) of the producers A, B and C, and
// returns their objects, with the bucket held back from the broker that wrote
// them.
func lossScene(t *testing.T, s *scene, fs vfs.FS) []*logRef {
	t.Helper()
	s.rlm(1, "a")
	first := s.broker(1, fs)
	p := first.leading(0)
	for _, id := range []int64{producerA, producerB, producerC} {
		mustAdd(t, p, sequenced(t, id, 0, 0, 2), partition.Object)
	}
	first.stop()
	var out []*logRef
	s.world.with(func() {
		for _, r := range s.world.parts[0].ranges {
			out = append(out, r.GetObject())
		}
	})
	require.Len(t, out, 3)
	return out
}

func requireGap(t *testing.T, p *replica.Partition, batches []byte, last int32) {
	t.Helper()
	_, err := add(t, p, batches, partition.Object)
	var gap *replica.SequenceGapError
	require.ErrorAs(t, err, &gap)
	require.Equal(t, last, gap.LastSequence)
}

func requireDuplicate(t *testing.T, p *replica.Partition, batches []byte, base int64) {
	t.Helper()
	res := mustAdd(t, p, batches, partition.Object)
	require.True(t, res.Duplicate)
	require.Equal(t, base, res.Base)
}

// A missing or damaged object does not keep a partition from leading: what it
// told of producers is given up, which is said to them and to people.
func TestRecoveryGoesOnWithoutALostObject(t *testing.T) {
	for name, lose := range map[string]func(b *bucket, ref *logv1.ObjectRef){
		"missing": func(b *bucket, ref *logv1.ObjectRef) { delete(b.objects, refKey(ref)) },
		"damaged": func(b *bucket, ref *logv1.ObjectRef) {
			b.objects[refKey(ref)].footerErr = status.Error(codes.DataLoss, "checksum")
			b.objects[refKey(ref)].data[70] ^= 1
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				refs := lossScene(t, s, vfs.NewMem())
				s.bucket.mu.Lock()
				lose(s.bucket, refs[1])
				s.bucket.mu.Unlock()
				s.world.with(func() { s.world.elect = 2 })
				p := s.broker(2, vfs.NewMem()).leading(0)
				requireGap(t, p, sequenced(t, producerB, 0, 2, 1), -1)
				requireDuplicate(t, p, sequenced(t, producerA, 0, 0, 2), 0)
				requireGap(t, p, sequenced(t, producerA, 0, 2, 1), 1)
				requireDuplicate(t, p, sequenced(t, producerC, 0, 0, 2), 4)
				require.EqualValues(t, 6, mustAdd(t, p, sequenced(t, producerC, 0, 2, 1), partition.Object).Base)
				require.EqualValues(t, 7, mustAdd(t, p, sequenced(t, producerA, 1, 0, 1), partition.Object).Base, "a new epoch is the way on")
				until(t, "uploads go on", func() bool { return s.world.objectEnd(0) == 8 })
				found := findings(p, "PRODUCER_STATE_INCOMPLETE")
				require.Len(t, found, 1)
				require.False(t, found[0].Blocking)
				require.Equal(t, walobject.Name(clusterID, refs[1]), found[0].Evidence["object"])
				require.Equal(t, "2", found[0].Evidence["base_offset"])
				require.Equal(t, "4", found[0].Evidence["end_offset"])
				require.Empty(t, findings(p, "PRODUCERS_RECOVERING"))
				// The records themselves are DATA_LOSS, by the object's name.
				_, err := p.Read(t.Context(), 2, 1<<20, nil)
				var damaged *replica.DamagedError
				require.ErrorAs(t, err, &damaged)
				require.Equal(t, "object "+walobject.Name(clusterID, refs[1]), damaged.Where)
				require.Equal(t, name == "missing", damaged.Length == 0)
				require.Contains(t, err.Error(), walobject.Name(clusterID, refs[1])+" is "+name)
			})
		})
	}
}

// A damaged footer costs nothing while the records are there, be it also the one
// that holds the whole state.
func TestRecoveryReadsTheRecordsOfALostFooter(t *testing.T) {
	for name, which := range map[string][]int{"one": {1}, "the one with the whole state": {0}, "all": {0, 1, 2}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				refs := lossScene(t, s, vfs.NewMem())
				s.bucket.mu.Lock()
				for _, i := range which {
					s.bucket.objects[refKey(refs[i])].footerErr = status.Error(codes.DataLoss, "checksum")
				}
				s.bucket.mu.Unlock()
				s.world.with(func() { s.world.elect = 2 })
				p := s.broker(2, vfs.NewMem()).leading(0)
				for i, id := range []int64{producerA, producerB, producerC} {
					requireDuplicate(t, p, sequenced(t, id, 0, 0, 2), int64(2*i))
					require.False(t, mustAdd(t, p, sequenced(t, id, 0, 2, 1), partition.Object).Duplicate)
				}
				require.Empty(t, findings(p, "PRODUCER_STATE_INCOMPLETE"))
			})
		})
	}
}

// When a later footer with the whole state is lost with its object, recovery goes
// back to the one before: what it tells is still true.
func TestRecoveryGoesBackToAnOlderWholeState(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		refs := lossScene(t, s, vfs.NewMem())
		p := s.broker(1, vfs.NewMem()).leading(0)
		mustAdd(t, p, sequenced(t, producerB, 0, 2, 2), partition.Object)
		mustAdd(t, p, sequenced(t, producerC, 0, 2, 2), partition.Object)
		var whole *logv1.ObjectRef
		s.world.with(func() {
			r := s.world.parts[0].ranges[3]
			require.True(t, r.GetProducersComplete())
			whole = r.GetObject()
			s.world.elect = 2
		})
		require.NotContains(t, refs, whole)
		s.bucket.mu.Lock()
		delete(s.bucket.objects, refKey(whole))
		s.bucket.mu.Unlock()
		s.world.with(func() { s.world.fenceLocked(s.world.parts[0], 2) })
		p = s.broker(2, vfs.NewMem()).leading(0)
		requireDuplicate(t, p, sequenced(t, producerA, 0, 0, 2), 0)
		requireDuplicate(t, p, sequenced(t, producerB, 0, 0, 2), 2)
		requireGap(t, p, sequenced(t, producerB, 0, 2, 2), 1)
		requireDuplicate(t, p, sequenced(t, producerC, 0, 2, 2), 8)
		require.False(t, mustAdd(t, p, sequenced(t, producerC, 0, 4, 1), partition.Object).Duplicate)
		require.Len(t, findings(p, "PRODUCER_STATE_INCOMPLETE"), 1)
	})
}

// The own log stands in for the bucket where it reaches back.
func TestRecoveryPrefersTheOwnLogOverALoss(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		fs := vfs.NewMem()
		refs := lossScene(t, s, fs)
		s.bucket.mu.Lock()
		for _, r := range refs {
			delete(s.bucket.objects, refKey(r))
		}
		s.bucket.mu.Unlock()
		p := s.broker(1, fs).leading(0)
		for i, id := range []int64{producerA, producerB, producerC} {
			requireDuplicate(t, p, sequenced(t, id, 0, 0, 2), int64(2*i))
		}
		require.Empty(t, findings(p, "PRODUCER_STATE_INCOMPLETE"))
	})
}
