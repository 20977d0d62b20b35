package replica_test

import (
	"bytes"
	"context"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// stored reads the bytes of a partition from 0 to end.
func stored(t testing.TB, read func(context.Context, int64, int, []byte) (replica.Fetched, error), end int64) []byte {
	t.Helper()
	var out []byte
	for next := int64(0); next < end; {
		got, err := read(t.Context(), next, 1<<20, nil)
		require.NoError(t, err)
		require.Greater(t, got.Next, next)
		require.LessOrEqual(t, got.Next, end)
		out, next = append(out, got.Batches...), got.Next
	}
	return out
}

// copyOf reads what a follower serves.
func copyOf(t testing.TB, p *replica.Partition, end int64) []byte {
	t.Helper()
	n, ok := p.Nearest()
	require.True(t, ok)
	require.GreaterOrEqual(t, n.Offsets().HighWatermark, end)
	return stored(t, n.Read, end)
}

func (b *bucket) with(fn func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fn()
}

func TestFollowerHoldsTheLeadersBytes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 3)
		s.rlm(1, "a")
		leader := s.broker(1, vfs.NewMem())
		for i := range int32(3) {
			leader.leading(i)
		}
		early := leader.leading(0)
		for i := range 5 {
			mustAdd(t, early, batch(t, fmt.Sprint("early", i), 3), partition.Object)
		}
		follower := s.broker(2, vfs.NewMem())
		follower.following(0, 15)
		for i := range int32(3) {
			p := leader.leading(i)
			for k := range int32(4) {
				mustAdd(t, p, sequenced(t, producerA, 0, 2*k, 2), partition.Object)
				mustAdd(t, p, batch(t, fmt.Sprint("more", k), 1), partition.Object)
			}
		}
		for i := range int32(3) {
			p := leader.leading(i)
			end := p.Offsets().LogEnd
			q := follower.following(i, end)
			require.Equal(t, stored(t, p.Read, end), copyOf(t, q, end))
			o := q.Offsets()
			require.Zero(t, o.LocalLogStart)
			require.Equal(t, end, o.LogEnd)
			require.Len(t, findings(q, "FOLLOWING"), 1)
		}
		reads := 0
		s.bucket.with(func() { reads = s.bucket.reads })
		copyOf(t, follower.following(0, 27), 27)
		s.bucket.with(func() { require.Equal(t, reads, s.bucket.reads, "from its own disk") })

		// The leader knows, by reports that carry no records.
		until(t, "the leader is told", func() bool {
			all := leader.leading(0).Explain().Replicas
			return len(all) == 2 && all[1].BrokerID == 2 && all[1].Online && all[1].State == partition.Fetching && all[1].Lag == 0 && all[1].LogEnd == 27
		})
		require.Equal(t, partition.Active, leader.leading(0).Explain().Replicas[0].State)
		require.Equal(t, []string{"HEALTHY"}, []string{leader.leading(0).Explain().Findings[0].Code})
	})
}

// A follower takes over with its copy: nothing is fetched again, and retries get
// their first answers though no footer can be read (I7).
func TestCaughtUpFollowerLeadsWithItsCopyAndItsProducers(t *testing.T) {
	for name, restart := range map[string]bool{"at once": false, "after a restart": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				s.rlm(1, "a")
				first := s.broker(1, vfs.NewMem())
				p := first.leading(0)
				disk := vfs.NewMem()
				second := s.broker(2, disk)
				for i := range int32(5) {
					mustAdd(t, p, sequenced(t, producerA, 0, 2*i, 2), partition.Object)
					mustAdd(t, p, batch(t, "other", 1), partition.Object)
				}
				second.following(0, 15)
				if restart {
					second.stop()
					second = s.broker(2, disk)
					second.following(0, 15)
				}
				s.bucket.with(func() {
					s.bucket.failFooters = status.Error(codes.Unavailable, "no footers today")
					s.bucket.fail = s.bucket.failFooters
				})
				first.stop()
				s.world.fence(0, 2)
				q := second.leading(0)
				require.Zero(t, q.Offsets().LocalLogStart)
				require.EqualValues(t, 15, q.Offsets().LogEnd)
				for i := range int32(5) {
					res := mustAdd(t, q, sequenced(t, producerA, 0, 2*i, 2), partition.Object)
					assert.True(t, res.Duplicate)
					assert.EqualValues(t, 3*i, res.Base)
					assert.EqualValues(t, 1, res.Leadership.LeaderEpoch)
				}
				res := mustAdd(t, q, sequenced(t, producerA, 0, 10, 1), partition.Object)
				require.False(t, res.Duplicate)
				require.EqualValues(t, 15, res.Base)
				require.Len(t, values(t, q), 16)
			})
		})
	}
}

// A leader that was replaced cuts the tail that nobody else has, and follows; its
// tail is never served (H8), and a leader that was deposed leads again with what it
// copied.
func TestDeposedLeaderCutsItsTailAndFollows(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		one, two := s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())
		p := one.leading(0)
		mustAdd(t, p, sequenced(t, producerA, 0, 0, 2), partition.Object)
		two.following(0, 2)
		r.with(func() { r.down = true })
		mustAdd(t, p, batch(t, "tail", 3), partition.Leader)
		n, ok := p.Nearest()
		require.True(t, ok)
		require.EqualValues(t, 2, n.Offsets().HighWatermark, "not committed")

		s.world.fence(0, 2)
		q := two.leading(0)
		r.cut()
		r.up()
		mustAdd(t, q, batch(t, "new", 2), partition.Object)
		mustAdd(t, q, sequenced(t, producerA, 0, 2, 1), partition.Object)
		p = one.following(0, 5)
		require.EqualValues(t, 5, p.Offsets().LogEnd)
		require.Equal(t, stored(t, q.Read, 5), copyOf(t, p, 5))
		_, _, _, err := n.OffsetForTime(t.Context(), 0)
		require.NoError(t, err)
		require.EqualValues(t, 5, n.Offsets().HighWatermark, "the same reader goes on")
		// Only the leader says for sure that somebody's records are gone.
		var elsewhere *replica.NotLeaderError
		require.ErrorAs(t, n.CheckPosition(4, lineage.Leadership{Incarnation: incarnation, LeaderEpoch: 1}), &elsewhere)
		require.NoError(t, n.CheckPosition(5, lineage.Leadership{Incarnation: incarnation, LeaderEpoch: 2}))

		s.bucket.with(func() { s.bucket.fail = status.Error(codes.Unavailable, "down") })
		s.bucket.with(func() { s.bucket.failFooters = s.bucket.fail })
		s.world.fence(0, 1)
		p = one.leading(0)
		res := mustAdd(t, p, sequenced(t, producerA, 0, 2, 1), partition.Object)
		require.True(t, res.Duplicate)
		require.EqualValues(t, 4, res.Base)
	})
}

// Between an election and its opening a replica serves nothing: it waits, bounded.
func TestNearestReadsWaitForTheOpening(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		one, two := s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())
		p := one.leading(0)
		mustAdd(t, p, batch(t, "x", 2), partition.Object)
		q := two.following(0, 2)
		n, ok := q.Nearest()
		require.True(t, ok)
		s.world.with(func() {
			s.world.refuseOpen = func(*metadatav1.OpenEpochRequest) error { return status.Error(codes.Unavailable, "not now") }
		})
		s.world.fence(0, 1)
		until(t, "the follower knows of the election", func() bool { return q.Explain().State == partition.Truncating })
		require.True(t, findings(q, "TRUNCATING")[0].Blocking)
		_, ok = q.Nearest()
		require.False(t, ok)
		began := time.Now()
		_, err := n.Read(t.Context(), 0, 100, nil)
		var unavailable *replica.UnavailableError
		require.ErrorAs(t, err, &unavailable)
		require.Equal(t, 3*time.Second, time.Since(began), "bounded")

		type answer struct {
			got replica.Fetched
			err error
		}
		waiting := make(chan answer, 1)
		go func() {
			got, err := n.Read(t.Context(), 0, 1<<20, nil)
			waiting <- answer{got, err}
		}()
		time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
		s.world.with(func() { s.world.refuseOpen = nil })
		a := <-waiting
		require.NoError(t, a.err)
		require.EqualValues(t, 2, a.got.Next)

		// An offset above what it knows waits, and is there when it is.
		visible := make(chan error, 1)
		go func() { visible <- n.WaitVisible(t.Context(), 2) }()
		time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
		require.Empty(t, visible)
		mustAdd(t, one.leading(0), batch(t, "y", 1), partition.Object)
		require.NoError(t, <-visible)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorAs(t, n.WaitVisible(ctx, 3), &unavailable)
		_, err = n.Read(t.Context(), 4, 100, nil)
		require.ErrorAs(t, err, &unavailable, "above the end is not out of range here")
	})
}

// Design review F17: an object that is gone, or a bucket that is down, cuts
// nothing; when the bytes are there again the follower goes on.
func TestFollowerKeepsAskingForWhatItCantHave(t *testing.T) {
	for name, c := range map[string]struct {
		code    string
		spoil   func(b *bucket, key string) (mend func())
		refused bool
	}{
		"object gone": {"OBJECT_MISSING", func(b *bucket, key string) func() {
			o := b.objects[key]
			delete(b.objects, key)
			return func() { b.objects[key] = o }
		}, true},
		"bucket down": {"COPY_STALLED", func(b *bucket, _ string) func() {
			b.fail = status.Error(codes.Unavailable, "down")
			return func() { b.fail = nil }
		}, false},
		"bytes rotten": {"OBJECT_DAMAGED", func(b *bucket, key string) func() {
			o := b.objects[key]
			bad := bytes.Clone(o.data)
			bad[len(bad)-1] ^= 1
			b.objects[key] = &object{data: bad, footer: o.footer}
			return func() { b.objects[key] = o }
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 2)
				s.rlm(1, "a")
				s.rlm(2, "b") // damage is believed when two say so
				one, two := s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())
				p := one.leading(0)
				mustAdd(t, p, batch(t, "x", 2), partition.Object)
				two.following(0, 2)
				two.stop()
				mustAdd(t, p, batch(t, "y", 2), partition.Object)
				mustAdd(t, p, batch(t, "z", 2), partition.Object)
				var key string
				s.world.with(func() { key = refKey(s.world.parts[0].ranges[1].Object) })
				var mend func()
				s.bucket.with(func() { mend = c.spoil(s.bucket, key) })
				two = s.broker(2, vfs.NewMem())
				var q *replica.Partition
				until(t, "the follower says what is wrong", func() bool {
					var err error
					q, err = two.m.Lookup(topicName, 0)
					return err == nil && len(findings(q, c.code)) == 1
				})
				require.True(t, findings(q, c.code)[0].Blocking)
				time.Sleep(20 * time.Second) //nolint:forbidigo // virtual time inside a bubble
				want := int64(2)
				if !c.refused {
					want = 0
				}
				require.Equal(t, want, q.Offsets().LogEnd, "not cut")
				n, ok := q.Nearest()
				require.True(t, ok)
				require.Equal(t, want, n.Offsets().HighWatermark)
				// Others go on meanwhile.
				if c.refused {
					mustAdd(t, one.leading(1), batch(t, "other", 1), partition.Object)
					two.following(1, 1)
				}
				until(t, "the leader knows why", func() bool {
					r := one.leading(0).Explain().Replicas[1]
					return r.Lag == 6-want && r.Reason != ""
				})
				s.bucket.with(mend)
				two.following(0, 6)
				require.Equal(t, stored(t, p.Read, 6), copyOf(t, q, 6))
			})
		})
	}
}

// A copy that holds other bytes than were committed, with the same lineage, gives
// way: rot, lost pages, or an etcd that was restored.
func TestFollowerWithOtherBytesBeginsAgain(t *testing.T) {
	for name, more := range map[string]bool{"caught up": false, "behind": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				s.rlm(1, "a")
				one := s.broker(1, vfs.NewMem())
				disk := vfs.NewMem()
				two := s.broker(2, disk)
				mustAdd(t, one.leading(0), batch(t, "mine", 2), partition.Object)
				two.following(0, 2)
				two.stop()
				one.stop()
				// The truth was another.
				s.world.with(func() {
					p := s.world.parts[0]
					b := record.Batch(batch(t, "truth", 2))
					b.SetLeaderEpoch(1)
					p.hash = chainhash.Next(chainhash.Hash{}, b)
					rg := p.ranges[0]
					rg.EndChainHash, rg.LengthBytes = p.hash.Bytes(), int64(len(b))
					rg.Crc32C = crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
					s.bucket.with(func() {
						s.bucket.objects[refKey(rg.Object)] = &object{data: b, footer: s.bucket.objects[refKey(rg.Object)].footer}
					})
				})
				one = s.broker(1, vfs.NewMem())
				p := one.leading(0)
				end := int64(2)
				if more {
					mustAdd(t, p, batch(t, "more", 1), partition.Object)
					end = 3
				}
				two = s.broker(2, disk)
				q := two.following(0, end)
				require.Equal(t, end, q.Offsets().LogEnd)
				require.Positive(t, q.Offsets().LocalLogStart, "it began again")
				require.Equal(t, stored(t, p.Read, end), copyOf(t, q, end), "older records come from the bucket")
				mustAdd(t, p, batch(t, "last", 1), partition.Object)
				two.following(0, end+1)
			})
		})
	}
}

// A broker that stops hands its partitions over one by one: nothing acked is lost,
// nobody waits for a session to run out, and the most caught-up replica leads.
func TestDrainHandsLeadershipOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const partitions = 5
		s := newScene(t, partitions)
		r := s.rlm(1, "a")
		one, two := s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())
		for i := range int32(partitions) {
			mustAdd(t, one.leading(i), batch(t, "x", 1), partition.Object)
			two.following(i, 1)
		}
		r.with(func() { r.down = true })
		for i := range int32(partitions) {
			mustAdd(t, one.leading(i), batch(t, "acked", 2), partition.Leader)
		}
		drained := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		began := time.Now()
		go func() { drained <- one.m.Drain(ctx) }()
		p, err := one.m.Lookup(topicName, 0)
		require.NoError(t, err)
		until(t, "it takes nothing more", func() bool { return len(findings(p, "HANDING_OVER")) == 1 })
		_, err = add(t, p, batch(t, "late", 1), partition.Leader)
		require.ErrorIs(t, err, replica.ErrStopped)
		time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
		s.world.with(func() { require.Zero(t, s.world.elections, "not before everything is in the bucket") })
		r.up()
		require.NoError(t, <-drained)
		require.Less(t, time.Since(began), sessionTimeout)
		s.world.with(func() {
			require.Equal(t, partitions, s.world.elections)
			require.Equal(t, []int32{1}, s.world.stopped)
		})
		for i := range int32(partitions) {
			q := two.leading(i)
			require.Equal(t, []string{"x-0", "acked-0", "acked-1"}, values(t, q))
			require.Zero(t, q.Offsets().LocalLogStart)
		}
		var elsewhere *replica.NotLeaderError
		_, err = add(t, p, batch(t, "late", 1), partition.Leader)
		require.ErrorAs(t, err, &elsewhere)
		require.EqualValues(t, 2, elsewhere.LeaderID)
	})
}

// While the bucket is down a leader that stops keeps its partitions: another one
// would lead without what was acked.
func TestDrainDoesNotHandOverWhatIsNotInTheBucket(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		one, two := s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())
		mustAdd(t, one.leading(0), batch(t, "x", 1), partition.Object)
		two.following(0, 1)
		r.with(func() { r.down = true })
		mustAdd(t, one.leading(0), batch(t, "acked", 2), partition.Leader)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		require.Error(t, one.m.Drain(ctx))
		s.world.with(func() {
			require.Zero(t, s.world.elections)
			require.Equal(t, []int32{1}, s.world.stopped, "the session ends all the same, and the grace begins")
		})
	})
}

// Reads of one reader while leaders change never show what is not committed, nor
// one offset with two contents.
func TestNearestReadsDuringElectionsAreNeverWrong(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		brokers := []*broker{nil, s.broker(1, vfs.NewMem()), s.broker(2, vfs.NewMem())}
		brokers[1].leading(0)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop()
		var mu sync.Mutex
		seen := map[int64]string{}
		for id := 1; id <= 2; id++ {
			wg.Go(func() {
				for ctx.Err() == nil {
					time.Sleep(3 * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
					p, err := brokers[id].m.Lookup(topicName, 0)
					if err != nil {
						continue
					}
					n, ok := p.Nearest()
					if !ok {
						continue
					}
					for next := int64(0); ; {
						got, err := n.Read(ctx, next, 4096, nil)
						var outside *replica.OffsetOutOfRangeError
						assert.NotErrorAs(t, err, &outside) // field report B044
						if err != nil || got.Next == next {
							break
						}
						next = got.Next
						for b, err := range record.Batches(got.Batches) {
							if !assert.NoError(t, err) {
								return
							}
							mu.Lock()
							was, known := seen[b.BaseOffset()]
							seen[b.BaseOffset()] = string(b)
							mu.Unlock()
							if known && !assert.Equal(t, was, string(b), "offset %d changed", b.BaseOffset()) {
								return
							}
						}
					}
				}
			})
		}
		leader := int32(1)
		for round := range 30 {
			p := brokers[leader].leading(0)
			mustAdd(t, p, batch(t, fmt.Sprint("kept", round), 1), partition.Object)
			r.with(func() { r.down = true })
			mustAdd(t, p, batch(t, fmt.Sprint("tail", round), 1+round%3), partition.Leader)
			leader = 3 - leader
			s.world.fence(0, leader)
			time.Sleep(time.Duration(round%7) * 5 * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
			r.cut()
			r.up()
		}
		p := brokers[leader].leading(0)
		end := p.Offsets().HighWatermark
		brokers[3-leader].following(0, end)
		stop()
		wg.Wait()
		require.Len(t, seen, 30, "every committed batch, and no other")
		truth := stored(t, p.Read, end)
		for b, err := range record.Batches(truth) {
			require.NoError(t, err)
			require.Equal(t, string(b), seen[b.BaseOffset()])
		}
	})
}

// A replica that lacks the last ranges when it is elected fetches them and keeps
// its copy; when that does not go quickly it begins again at the object end.
func TestElectedFollowerCompletesItsCopy(t *testing.T) {
	for name, reachable := range map[string]bool{"bucket up": true, "bucket down": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				s.rlm(1, "a")
				one := s.broker(1, vfs.NewMem())
				disk := vfs.NewMem()
				two := s.broker(2, disk)
				p := one.leading(0)
				mustAdd(t, p, sequenced(t, producerA, 0, 0, 3), partition.Object)
				two.following(0, 3)
				two.stop()
				for i := range int32(4) {
					mustAdd(t, p, sequenced(t, producerA, 0, 3+i, 1), partition.Object)
				}
				truth := stored(t, p.Read, 7)
				if !reachable {
					s.bucket.with(func() { s.bucket.fail = status.Error(codes.Unavailable, "down") })
				}
				s.world.fence(0, 2) // before it can follow
				one.stop()
				s.world.with(func() { s.world.elect = 2 })
				two = s.broker(2, disk)
				q := two.leading(0)
				require.EqualValues(t, 7, q.Offsets().LogEnd)
				if !reachable {
					require.EqualValues(t, 7, q.Offsets().LocalLogStart)
					s.bucket.with(func() { s.bucket.fail = nil })
				} else {
					require.Zero(t, q.Offsets().LocalLogStart)
					reads := 0
					s.bucket.with(func() { reads = s.bucket.reads })
					defer s.bucket.with(func() { require.Equal(t, reads, s.bucket.reads) })
				}
				require.Equal(t, truth, stored(t, q.Read, 7))
				require.True(t, mustAdd(t, q, sequenced(t, producerA, 0, 6, 1), partition.Object).Duplicate)
				require.EqualValues(t, 7, mustAdd(t, q, sequenced(t, producerA, 0, 7, 1), partition.Object).Base)
			})
		})
	}
}

// Field reports B038 and B042: a follower that dies at any moment, its disk
// without some of what was not synced, catches up by itself every time and holds
// its leader's bytes.
func TestFollowerCatchesUpAfterEveryDeath(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	bubble(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s := newScene(t, 1)
		s.rlm(1, "a")
		one := s.broker(1, vfs.NewMem())
		p := one.leading(0)
		disk := vfs.NewCrashableMem()
		ctx, stop := context.WithCancel(t.Context())
		var load sync.WaitGroup
		defer load.Wait()
		defer stop()
		load.Go(func() {
			for i := int32(0); ctx.Err() == nil; i++ {
				for { // until it is stored, once
					time.Sleep(time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
					if _, err := add(t, p, sequenced(t, producerA, 0, 2*i, 2), partition.Object); err == nil {
						break
					}
				}
			}
		})
		for range 40 {
			two := s.broker(2, disk)
			two.following(0, 1)
			time.Sleep(time.Duration(rng.IntN(40)) * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
			if rng.IntN(4) == 0 {
				s.world.fence(0, 1) // and cuts in between
				one.leading(0)
			}
			next := disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rand.New(rand.NewPCG(rng.Uint64(), 2))})
			two.stop()
			disk = next
		}
		stop()
		load.Wait()
		end := s.world.objectEnd(0)
		two := s.broker(2, disk)
		q := two.following(0, end)
		require.Equal(t, stored(t, one.leading(0).Read, end), copyOf(t, q, end))
		// Its indexes and its producers too: it leads with them.
		s.bucket.with(func() { s.bucket.failFooters = status.Error(codes.Unavailable, "down") })
		s.world.fence(0, 2)
		q = two.leading(0)
		require.Len(t, values(t, q), int(end))
		require.True(t, mustAdd(t, q, sequenced(t, producerA, 0, int32(end)-2, 2), partition.Object).Duplicate)
	})
}
