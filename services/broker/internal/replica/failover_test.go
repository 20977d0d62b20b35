package replica_test

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/lineage"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// Design review F3: what was acked at LEADER outlives a restart of the process
// while the bucket is down, and is uploaded under the new fence with its old
// leader epochs.
func TestLeaderTailIsKeptOverARestartWhileTheBucketIsDown(t *testing.T) {
	for name, clean := range map[string]bool{"clean stop": true, "crash": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				r := s.rlm(1, "a")
				fs := vfs.NewCrashableMem()
				b := s.broker(1, fs)
				p := b.leading(0)
				mustAdd(t, p, batch(t, "up", 2), partition.Object)
				r.with(func() { r.down = true })
				mustAdd(t, p, batch(t, "tail", 3), partition.Leader)
				mustAdd(t, p, sequenced(t, producerA, 0, 0, 2), partition.Leader)
				disk := vfs.FS(fs)
				if !clean {
					// The process dies, the machine does not: everything written is there.
					disk = fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 2))})
				}
				b.stop()
				r.cut()
				if clean {
					disk = fs
				}

				b = s.broker(1, disk)
				p = b.leading(0)
				require.EqualValues(t, 7, p.Offsets().LogEnd, "the tail is there")
				require.EqualValues(t, 2, p.Offsets().HighWatermark)
				mustAdd(t, p, batch(t, "more", 1), partition.Leader)
				// The producer goes on, and its retry is known (I7).
				res := mustAdd(t, p, sequenced(t, producerA, 0, 0, 2), partition.Leader)
				require.True(t, res.Duplicate)
				require.EqualValues(t, 5, res.Base)
				require.EqualValues(t, 1, res.Leadership.LeaderEpoch, "the first leadership wrote it")
				res = mustAdd(t, p, sequenced(t, producerA, 0, 2, 1), partition.Leader)
				require.False(t, res.Duplicate)

				r.up()
				until(t, "the tail is uploaded", func() bool { return s.world.objectEnd(0) == 9 })
				until(t, "visible", func() bool { return p.Offsets().HighWatermark == 9 })
				require.Equal(t, []string{"up-0", "up-1", "tail-0", "tail-1", "tail-2", "p9/0-0", "p9/0-1", "more-0", "p9/2-0"}, values(t, p))
				l := p.Offsets().Lineage
				require.Len(t, l, 2)
				require.EqualValues(t, 7, l[1].StartOffset, "the new epoch starts behind the kept tail")
			})
		})
	}
}

// Design review F5: a broker with an empty disk takes over at the object end,
// serves older records from the bucket, and knows the producers from footers.
func TestEmptyBrokerTakesOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		first := s.broker(1, vfs.NewMem())
		p := first.leading(0)
		for i := range 5 {
			res := mustAdd(t, p, sequenced(t, producerA, 0, int32(2*i), 2), partition.Object)
			require.EqualValues(t, 2*i, res.Base)
		}
		mustAdd(t, p, batch(t, "last", 1), partition.Object)
		r.with(func() { r.down = true })
		mustAdd(t, p, batch(t, "lost", 1), partition.Leader)
		first.stop()
		r.cut()
		r.with(func() { r.down = false })

		s.world.fence(0, 2) // or it would have time to copy before it is elected
		s.world.with(func() { s.world.elect = 2 })
		second := s.broker(2, vfs.NewMem())
		q := second.leading(0)
		o := q.Offsets()
		require.EqualValues(t, 11, o.LogEnd)
		require.EqualValues(t, 11, o.LocalLogStart)
		// Five in flight, all answers lost: five original offsets (field report B054).
		for i := range 5 {
			res := mustAdd(t, q, sequenced(t, producerA, 0, int32(2*i), 2), partition.Object)
			assert.True(t, res.Duplicate)
			assert.EqualValues(t, 2*i, res.Base)
			assert.EqualValues(t, 2*i+2, res.End)
			assert.EqualValues(t, 1, res.Leadership.LeaderEpoch)
		}
		res := mustAdd(t, q, sequenced(t, producerA, 0, 10, 1), partition.Object)
		require.EqualValues(t, 11, res.Base)
		got := values(t, q)
		require.Len(t, got, 12)
		require.Equal(t, "last-0", got[10])
		require.Equal(t, "p9/10-0", got[11])
		require.Len(t, q.Offsets().Lineage, 2)

		// The lost tail is told, not passed over (F16, H15).
		lost := lineage.Leadership{Incarnation: incarnation, LeaderEpoch: 1}
		_, err := q.Await(t.Context(), 12, lost, partition.Object)
		var truncated *replica.TruncatedError
		require.ErrorAs(t, err, &truncated)
		require.EqualValues(t, 11, truncated.ForkPoint)
		_, err = add(t, q, sequenced(t, producerA, 0, 20, 1), partition.Object)
		var gap *replica.SequenceGapError
		require.ErrorAs(t, err, &gap)
		require.EqualValues(t, 10, gap.LastSequence)
		require.EqualValues(t, 11, gap.EpochStart)
	})
}

func TestIdempotentAppendsWaitForTheProducerState(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		first := s.broker(1, vfs.NewMem())
		mustAdd(t, first.leading(0), sequenced(t, producerA, 0, 0, 2), partition.Object)
		first.stop()
		s.bucket.mu.Lock()
		s.bucket.fail = status.Error(codes.Unavailable, "the bucket is down")
		s.bucket.mu.Unlock()
		s.world.with(func() { s.world.elect = 2 })
		b := s.broker(2, vfs.NewMem())
		p := b.leading(0)
		mustAdd(t, p, batch(t, "plain", 1), partition.Leader) // needs no producer state
		began := time.Now()
		_, err := add(t, p, sequenced(t, producerA, 0, 0, 2), partition.Leader)
		var recovering *replica.RecoveringError
		require.ErrorAs(t, err, &recovering)
		require.Equal(t, 10*time.Second, time.Since(began), "bounded")
		require.NotEmpty(t, findings(p, "PRODUCERS_RECOVERING"))
		// A caller with less time gets its answer in time.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = p.Submit(ctx, replica.AppendInput{Batches: sequenced(t, producerA, 0, 0, 2)})
		require.Error(t, err)

		done := make(chan replica.AppendResult, 1)
		again := sequenced(t, producerA, 0, 0, 2)
		go func() {
			res, err := add(t, p, again, partition.Object)
			if err != nil {
				t.Error(err)
			}
			done <- res
		}()
		time.Sleep(3 * time.Second) //nolint:forbidigo // virtual time inside a bubble
		s.bucket.mu.Lock()
		s.bucket.fail = nil
		s.bucket.mu.Unlock()
		res := <-done
		require.True(t, res.Duplicate)
		require.EqualValues(t, 0, res.Base)
		require.EqualValues(t, 3, p.Offsets().LogEnd)
	})
}

func findings(p *replica.Partition, code string) []replica.Finding {
	var out []replica.Finding
	for _, f := range p.Explain().Findings {
		if f.Code == code {
			out = append(out, f)
		}
	}
	return out
}

// The stream is lost between the commit and the verdict: the re-send is refused
// as already committed, which is success once the hashes agree (F20, F21, H2).
func TestVerdictLostBehindTheCommit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		r.with(func() { r.dieAfterPut = true })
		res := mustAdd(t, p, batch(t, "x", 2), partition.Object)
		require.EqualValues(t, 2, res.End)
		res = mustAdd(t, p, batch(t, "y", 2), partition.Object)
		require.EqualValues(t, 4, res.End)
		require.Equal(t, []string{"x-0", "x-1", "y-0", "y-1"}, values(t, p))
		require.True(t, p.Offsets().Leading)
		require.Empty(t, s.world.elections)
	})
}

func TestVerdictTimeoutGoesToAnotherManager(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		frozen, other := s.rlm(1, "a"), s.rlm(2, "b")
		frozen.with(func() {
			frozen.judge = func(*remotelogv1.WalRange) *metadatav1.RangeVerdict { return nil }
		})
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		began := time.Now()
		mustAdd(t, p, batch(t, "x", 2), partition.Object)
		require.Less(t, time.Since(began), 13*time.Second)
		require.NotEmpty(t, frozen.ranges())
		require.NotEmpty(t, other.ranges())
		require.EqualValues(t, 0, other.ranges()[0].GetRange().GetBaseOffset(), "from the object end again")
		require.Greater(t, other.ranges()[0].GetRun(), frozen.ranges()[0].GetRun())
	})
}

// A manager of another zone is used after the patience, and the own zone again
// when it is back (F24).
func TestOwnZoneIsPreferred(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(2, "b")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		began := time.Now()
		mustAdd(t, p, batch(t, "x", 1), partition.Object)
		require.GreaterOrEqual(t, time.Since(began), 1500*time.Millisecond)
		require.EqualValues(t, 2, b.m.Feed().RLMID)
		local := s.rlm(1, "a")
		until(t, "back in the own zone", func() bool {
			mustAdd(t, p, batch(t, "y", 1), partition.Object)
			return b.m.Feed().RLMID == 1
		})
		mustAdd(t, p, batch(t, "z", 1), partition.Object)
		require.NotEmpty(t, local.ranges())
	})
}

func TestRefusedRanges(t *testing.T) {
	outcome := func(o metadatav1.RangeOutcome, change func(*metadatav1.RangeVerdict)) func(s *scene, r *rlm) {
		return func(s *scene, r *rlm) {
			refused := 0
			r.with(func() {
				r.judge = func(rg *remotelogv1.WalRange) *metadatav1.RangeVerdict {
					if refused < 3 {
						refused++
						s.world.mu.Lock()
						defer s.world.mu.Unlock()
						v := s.world.verdictLocked(s.world.parts[0], rg.GetRange(), o)
						if change != nil {
							change(v)
						}
						return v
					}
					return s.world.commit(rg.GetRange(), refOf(r), int64(len(rg.GetData())))
				}
			})
		}
	}
	t.Run("a gap, or not judged: sent again from the object end", func(t *testing.T) {
		for _, o := range []metadatav1.RangeOutcome{metadatav1.RangeOutcome_RANGE_OUTCOME_GAP, metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED} {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				r := s.rlm(1, "a")
				b := s.broker(1, vfs.NewMem())
				p := b.leading(0)
				outcome(o, nil)(s, r)
				mustAdd(t, p, batch(t, "x", 2), partition.Object)
				require.Zero(t, s.world.elections)
				runs := map[int64]bool{}
				for _, rg := range r.ranges() {
					runs[rg.GetRun()] = true
					require.EqualValues(t, 0, rg.GetRange().GetBaseOffset())
				}
				require.Len(t, runs, 4, "each under a run of its own")
			})
		}
	})
	t.Run("malformed, unknown or another chain: gives up and reconciles", func(t *testing.T) {
		for _, o := range []metadatav1.RangeOutcome{
			metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH, metadatav1.RangeOutcome_RANGE_OUTCOME_MALFORMED,
			metadatav1.RangeOutcome_RANGE_OUTCOME_UNKNOWN_PARTITION,
		} {
			bubble(t, func(t *testing.T) {
				s := newScene(t, 1)
				r := s.rlm(1, "a")
				b := s.broker(1, vfs.NewMem())
				p := b.leading(0)
				outcome(o, nil)(s, r)
				_, err := add(t, p, batch(t, "x", 2), partition.Object)
				var unknown *replica.OutcomeUnknownError
				require.ErrorAs(t, err, &unknown)
				require.EqualValues(t, 0, unknown.Base)
				require.EqualValues(t, 2, unknown.End)
				// Elected again it keeps its tail, which continues the lineage, and
				// commits it in the end: AwaitDurability settles it (F16).
				until(t, "committed after all", func() bool { return s.world.objectEnd(0) == 2 })
				p = b.leading(0)
				levels, err := p.Await(t.Context(), unknown.End, unknown.Leadership, partition.Object)
				require.NoError(t, err)
				require.Contains(t, levels, partition.Object)
				require.GreaterOrEqual(t, s.world.elections, 1)
			})
		}
	})
	t.Run("fenced: acks what is committed on its own branch", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			s := newScene(t, 1)
			b := s.broker(1, vfs.NewMem())
			p := b.leading(0)
			ctx := t.Context()
			var tickets []*replica.Ticket
			for range 2 {
				ticket, err := p.Submit(ctx, replica.AppendInput{Batches: batch(t, "x", 2), Level: partition.Object})
				require.NoError(t, err)
				tickets = append(tickets, ticket)
			}
			r := s.rlm(1, "a")
			r.with(func() {
				r.judge = func(rg *remotelogv1.WalRange) *metadatav1.RangeVerdict {
					// Another manager committed [0, 2) of the range; then another broker was
					// elected, opened at 2 and committed [2, 9) of its own (H15).
					start := int64(2)
					f := fenceOf(rg)
					f.LeaderEpoch, f.BrokerEpoch = f.GetLeaderEpoch()+1, 999
					return &metadatav1.RangeVerdict{
						Outcome: metadatav1.RangeOutcome_RANGE_OUTCOME_FENCED, ObjectEndOffset: 9, ObjectEndChainHash: make([]byte, 16),
						Fence: f, Opened: true, NextEpochStart: &start,
					}
				}
			})
			res, err := tickets[0].Wait(ctx)
			require.NoError(t, err)
			require.Equal(t, []partition.Level{partition.Object}, res.Levels)
			_, err = tickets[1].Wait(ctx)
			var unknown *replica.OutcomeUnknownError
			require.ErrorAs(t, err, &unknown)
			require.ErrorAs(t, err, new(*replica.NotLeaderError))
			require.EqualValues(t, 4, r.ranges()[0].GetRange().GetEndOffset(), "both were in one range")
		})
	})
}

func fenceOf(rg *remotelogv1.WalRange) *logv1.Fence {
	return proto.Clone(rg.GetRange().GetFence()).(*logv1.Fence)
}

func refOf(r *rlm) *logRef {
	return &logRef{Incarnation: incarnation, RlmEpoch: r.epoch, Sequence: r.seqNow(), Attempt: 1}
}

// CHAIN_MISMATCH for real: the committed bytes are others than the leader's. It
// resigns, finds by hash that its log is off, and starts again at the object end.
func TestOtherBytesUnderTheSameLineageAreDropped(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		fs := vfs.NewMem()
		b := s.broker(1, fs)
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 2), partition.Object)
		r.with(func() { r.down = true })
		mustAdd(t, p, batch(t, "mine", 2), partition.Leader)
		b.stop()
		r.cut()
		s.world.with(func() { s.world.parts[0].hash[3] ^= 1 }) // the cluster holds another chain
		r.with(func() { r.down, r.kept = false, nil })
		p = s.broker(1, fs).leading(0)
		require.EqualValues(t, 2, p.Offsets().LogEnd)
		require.EqualValues(t, 2, p.Offsets().LocalLogStart)
		mustAdd(t, p, batch(t, "z", 1), partition.Object)
	})
}

// An opening whose outcome is unknown is repeated; one that is refused leads to
// another election (H3).
func TestOpeningIsRepeatedUntilAnswered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		failures := 0
		s.world.refuseOpen = func(*metadatav1.OpenEpochRequest) error {
			if failures++; failures <= 3 {
				return status.Error(codes.Unavailable, "no answer")
			}
			return nil
		}
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		require.Zero(t, s.world.elections)
		mustAdd(t, p, batch(t, "x", 1), partition.Object)

		refused := false
		s.world.with(func() {
			s.world.refuseOpen = func(*metadatav1.OpenEpochRequest) error {
				if refused {
					return nil
				}
				refused = true
				return status.Error(codes.FailedPrecondition, "no")
			}
		})
		s.world.fence(0, 1)
		until(t, "elected again", func() bool { return p.Offsets().Leading && p.Offsets().Fence.LeaderEpoch == 3 })
		require.Equal(t, 1, s.world.elections)
	})
}

func TestDeposedLeaderPointsToTheNext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		r := s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 1), partition.Object)
		r.with(func() { r.down = true })
		ctx := t.Context()
		waiting, err := p.Submit(ctx, replica.AppendInput{Batches: batch(t, "y", 1), Level: partition.Object})
		require.NoError(t, err)
		visible := make(chan error, 1)
		go func() { visible <- p.WaitVisible(ctx, 1) }()
		s.world.with(func() {
			s.world.append(&metadatav1.Event{Kind: &metadatav1.Event_BrokerRegistered{BrokerRegistered: &metadatav1.BrokerRegistered{BrokerId: 2, Address: "broker:2"}}})
		})
		until(t, "the other broker is known", func() bool { _, ok := b.m.Cluster().Broker(2); return ok })
		s.world.with(func() {
			s.world.brokers[2] = &metadatav1.Broker{BrokerId: 2, Address: "broker:2", BrokerEpoch: 5}
			s.world.fenceLocked(s.world.parts[0], 2)
		})
		_, err = waiting.Wait(ctx)
		var unknown *replica.OutcomeUnknownError
		require.ErrorAs(t, err, &unknown)
		require.EqualValues(t, 1, unknown.Base)
		var elsewhere *replica.NotLeaderError
		require.ErrorAs(t, <-visible, &elsewhere)
		_, err = add(t, p, batch(t, "z", 1), partition.Leader)
		require.ErrorAs(t, err, &elsewhere)
		require.EqualValues(t, 2, elsewhere.LeaderID)
		require.Equal(t, "broker:2", elsewhere.Address)
		_, err = p.Read(ctx, 0, 100, nil)
		require.ErrorAs(t, err, &elsewhere)
		require.Len(t, findings(p, "LEADER_ELSEWHERE"), 1)
		require.Zero(t, b.m.Unuploaded())
	})
}
