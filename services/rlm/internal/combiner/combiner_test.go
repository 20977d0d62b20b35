package combiner_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/rlm/internal/combiner"
)

const (
	accepted  = metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
	notJudged = metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED
)

func TestRangesOfManyPartitionsBecomeOneObject(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		var first atomic.Bool
		f := start(t, nil, func(s objstore.Store) objstore.Store {
			return storeFunc{s, func(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
				if first.CompareAndSwap(false, true) {
					<-release
				}
				return s.Create(ctx, name, body)
			}}
		})
		defer f.stop()
		a, b := f.open(), f.open()
		var parts []*walobjecttest.Partition
		for i := range int32(10) {
			parts = append(parts, walobjecttest.NewPartition(5, i))
		}
		f.send(a, next(parts[0], 1, 10)) // begins an upload at once
		for i, p := range parts {
			s := a
			if i%2 == 1 {
				s = b
			}
			f.send(s, next(p, 1, 100))
		}
		time.Sleep(20 * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
		close(release)
		got := append(f.verdicts(a, 6), f.verdicts(b, 5)...)
		for _, v := range got {
			require.Equal(t, accepted, v.GetVerdict().GetOutcome())
			require.EqualValues(t, 41, v.GetObject().GetRlmEpoch())
			require.Equal(t, 100+v.GetObject().GetSequence(), v.GetMetadataOffset())
		}
		require.Len(t, f.judge.accepted, 2)
		require.Len(t, f.judge.accepted[1].GetRanges(), 10, "ten partitions in one object")
		require.Equal(t, 11, f.readBack())
		_, used, _ := f.c.Stats()
		require.Zero(t, used, "all buffers were given back")
		require.Zero(t, a.Outstanding())
	})
}

// Field report B170: the PUT succeeded, its answer was lost, the repeat says
// that the object exists.
func TestPutWhoseAnswerWasLostIsReadBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		defer f.stop()
		f.faults.Set(decorate.Fault{Op: objstore.OpCreate, When: decorate.After})
		s := f.open()
		f.send(s, next(walobjecttest.NewPartition(5, 0), 1, 10))
		require.Equal(t, accepted, f.verdicts(s, 1)[0].GetVerdict().GetOutcome())
		require.Len(t, f.names(), 1, "the same object, not a second one")
		require.Equal(t, 1, f.readBack())
	})
}

// Field reports B169, B115: a store that fails for 70 s and heals.
func TestUploadsResumeSoonAfterAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		defer f.stop()
		s := f.open()
		f.faults.Set(decorate.Fault{Op: objstore.OpCreate, Count: -1})
		p := walobjecttest.NewPartition(5, 0)
		for range 20 {
			f.send(s, next(p, 1, 10))
		}
		time.Sleep(70 * time.Second) //nolint:forbidigo // virtual time inside a bubble
		require.Empty(t, s.Take())
		f.faults.Set()
		healed := time.Now()
		for _, v := range f.verdicts(s, 20) {
			require.Equal(t, accepted, v.GetVerdict().GetOutcome())
			require.Positive(t, v.GetObject().GetAttempt())
		}
		require.Less(t, time.Since(healed), 10*time.Second)
		require.Equal(t, 20, f.readBack())
		require.Greater(t, f.judge.accepted[0].GetObject().GetAttempt(), int32(10), "a new name for each attempt")
	})
}

// Field report B183: the store acknowledges an upload that arrived empty.
func TestUploadThatArrivedShortIsNeverCommitted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var broken atomic.Int32
		f := start(t, nil, func(s objstore.Store) objstore.Store {
			return storeFunc{s, func(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
				if broken.Add(1) <= 2 {
					return s.Create(ctx, name, objstore.NewParts(nil))
				}
				return s.Create(ctx, name, body)
			}}
		})
		defer f.stop()
		s := f.open()
		f.send(s, next(walobjecttest.NewPartition(5, 0), 1, 10))
		v := f.verdicts(s, 1)[0]
		require.Equal(t, accepted, v.GetVerdict().GetOutcome())
		require.EqualValues(t, 3, v.GetObject().GetAttempt())
		require.Len(t, f.judge.commits, 1, "nothing was submitted for the empty ones")
		require.Equal(t, 1, f.readBack())
	})
}

// Field report B171: an upload that was given up appears later.
func TestLateUploadOfAGivenUpAttemptIsGarbage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var calls atomic.Int32
		f := start(t, func(c *combiner.Config) { c.PutTimeout = time.Second }, func(s objstore.Store) objstore.Store {
			return storeFunc{s, func(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
				if calls.Add(1) == 1 {
					<-ctx.Done()
					go func() {
						time.Sleep(2 * time.Second) //nolint:forbidigo // virtual time inside a bubble
						_, _ = s.Create(context.WithoutCancel(ctx), name, body)
					}()
					return objstore.Attrs{}, objstore.ContextError(ctx, objstore.OpCreate, name)
				}
				return s.Create(ctx, name, body)
			}}
		})
		defer f.stop()
		s := f.open()
		f.send(s, next(walobjecttest.NewPartition(5, 0), 1, 10))
		require.EqualValues(t, 2, f.verdicts(s, 1)[0].GetObject().GetAttempt())
		time.Sleep(5 * time.Second) //nolint:forbidigo // virtual time inside a bubble
		require.Len(t, f.names(), 2)
		require.Len(t, f.judge.commits, 1)
		require.Equal(t, 1, f.readBack())
	})
}

func TestSlowPutIsHedged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var calls atomic.Int32
		f := start(t, func(c *combiner.Config) {
			c.Plan.HedgeMin, c.Plan.HedgeCold = 50*time.Millisecond, 200*time.Millisecond
		}, func(s objstore.Store) objstore.Store {
			return storeFunc{s, func(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
				if calls.Add(1) == 1 {
					<-ctx.Done()
					return objstore.Attrs{}, objstore.ContextError(ctx, objstore.OpCreate, name)
				}
				return s.Create(ctx, name, body)
			}}
		})
		defer f.stop()
		s := f.open()
		begin := time.Now()
		f.send(s, next(walobjecttest.NewPartition(5, 0), 1, 10))
		require.EqualValues(t, 2, f.verdicts(s, 1)[0].GetObject().GetAttempt())
		require.Equal(t, 200*time.Millisecond, time.Since(begin))
		synctest.Wait()
		_, used, _ := f.c.Stats()
		require.Zero(t, used, "the loser has ended as well")
	})
}

// Design review F9: without a verdict the same command is repeated, and a
// repeat of an accepted one gets the first verdict.
func TestCommitIsRepeatedUntilThereIsAVerdict(t *testing.T) {
	for name, hook := range map[string]func(*judge, func(*metadatav1.CommitCombinedSegmentRequest) error){
		"lost before": func(j *judge, fn func(*metadatav1.CommitCombinedSegmentRequest) error) { j.before = fn },
		"lost after":  func(j *judge, fn func(*metadatav1.CommitCombinedSegmentRequest) error) { j.after = fn },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := start(t, nil, nil)
				defer f.stop()
				var lost atomic.Int32
				hook(f.judge, func(*metadatav1.CommitCombinedSegmentRequest) error {
					if lost.Add(1) <= 5 {
						return errLost
					}
					return nil
				})
				s := f.open()
				f.send(s, next(walobjecttest.NewPartition(5, 0), 1, 10))
				require.Equal(t, accepted, f.verdicts(s, 1)[0].GetVerdict().GetOutcome())
				require.Len(t, f.judge.commits, 6)
				for _, c := range f.judge.commits {
					require.True(t, proto.Equal(f.judge.commits[0], c), "the same command")
				}
				require.Len(t, f.judge.accepted, 1)
			})
		})
	}
}

func TestOnlyOneCommitIsOutAtATime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, func(c *combiner.Config) { c.Plan.MaxRanges = 1 }, nil)
		defer f.stop()
		var out, most atomic.Int32
		f.judge.before = func(*metadatav1.CommitCombinedSegmentRequest) error {
			most.Store(max(most.Load(), out.Add(1)))
			time.Sleep(20 * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
			out.Add(-1)
			return nil
		}
		s := f.open()
		p := walobjecttest.NewPartition(5, 0)
		for range 10 {
			f.send(s, next(p, 1, 10))
		}
		f.verdicts(s, 10)
		require.EqualValues(t, 1, most.Load())
		for i, c := range f.judge.accepted {
			require.EqualValues(t, i+1, c.GetObject().GetSequence())
		}
	})
}

// An rlm that dies between PUT and commit: what it uploaded is never accepted
// later, and the leader's repeat through another one is.
func TestDeathBetweenPutAndCommit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		reached := make(chan struct{})
		f.judge.before = func(*metadatav1.CommitCombinedSegmentRequest) error {
			select {
			case <-reached:
			default:
				close(reached)
			}
			return errLost // the command never arrives
		}
		s := f.open()
		p := walobjecttest.NewPartition(5, 0)
		r := next(p, 1, 10)
		f.send(s, r)
		<-reached
		f.stop()
		require.Len(t, f.names(), 1, "the object is there")
		require.Empty(t, f.judge.accepted)
		require.Empty(t, s.Take(), "and nobody was told anything")

		// The next instance registers, which closes the epoch.
		f.judge.close()
		f.judge.before = nil
		g := f.again()
		defer g.stop()
		s2 := g.open()
		g.send(s2, proto.CloneOf(r))
		v := g.verdicts(s2, 1)[0]
		require.Equal(t, accepted, v.GetVerdict().GetOutcome())
		require.EqualValues(t, 42, v.GetObject().GetRlmEpoch())
		require.Len(t, g.names(), 2, "the first one is garbage")
		// The dead one's command, still in the network, arrives now.
		late, err := f.judge.Commit(t.Context(), f.judge.commits[0])
		require.NoError(t, err)
		require.True(t, late.GetRlmEpochClosed())
		require.Equal(t, notJudged, late.GetVerdicts()[0].GetOutcome())
		require.Equal(t, 1, g.readBack())
	})
}

// An rlm that dies between the commit and the ack: the range is accepted once,
// and the leader's repeat is told so.
func TestDeathBetweenCommitAndAck(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		reached := make(chan struct{})
		f.judge.after = func(*metadatav1.CommitCombinedSegmentRequest) error {
			select {
			case <-reached:
			default:
				close(reached)
			}
			return errLost
		}
		s := f.open()
		p := walobjecttest.NewPartition(5, 0)
		r := next(p, 1, 10)
		f.send(s, r)
		<-reached
		f.stop()
		require.Len(t, f.judge.accepted, 1)
		require.Empty(t, s.Take())

		f.judge.close()
		f.judge.after = nil
		g := f.again()
		defer g.stop()
		s2 := g.open()
		g.send(s2, proto.CloneOf(r))
		require.Equal(t, metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED, g.verdicts(s2, 1)[0].GetVerdict().GetOutcome())
		g.send(s2, next(p, 2, 10))
		require.Equal(t, accepted, g.verdicts(s2, 1)[0].GetVerdict().GetOutcome())
		require.Equal(t, 2, g.readBack())
	})
}

func TestClosedEpochIsAnsweredAndLeft(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		defer f.stop()
		s := f.open()
		p := walobjecttest.NewPartition(5, 0)
		f.send(s, next(p, 1, 10))
		f.verdicts(s, 1)
		f.judge.close() // the session expired
		lost := next(p, 1, 10)
		f.send(s, lost)
		require.Equal(t, notJudged, f.verdicts(s, 1)[0].GetVerdict().GetOutcome())
		require.EqualValues(t, 41, <-f.unusable, "a new registration is asked for")
		_, ok := f.c.Identity()
		require.False(t, ok)
		f.register()
		again := proto.CloneOf(lost)
		again.Run = 2
		f.send(s, again)
		v := f.verdicts(s, 1)[0]
		require.Equal(t, accepted, v.GetVerdict().GetOutcome())
		require.EqualValues(t, 42, v.GetObject().GetRlmEpoch())
		require.EqualValues(t, 1, v.GetObject().GetSequence())
	})
}

func TestCommitRefusedForGoodGivesUpTheEpoch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		defer f.stop()
		f.judge.before = func(*metadatav1.CommitCombinedSegmentRequest) error {
			return status.Error(codes.InvalidArgument, "no")
		}
		s := f.open()
		f.send(s, next(walobjecttest.NewPartition(5, 0), 1, 10))
		require.Equal(t, notJudged, f.verdicts(s, 1)[0].GetVerdict().GetOutcome())
		require.EqualValues(t, 41, <-f.unusable)
		_, used, _ := f.c.Stats()
		require.Zero(t, used)
	})
}

func TestBadRangesAreRefusedOnArrival(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		defer f.stop()
		s := f.open()
		malformed := metadatav1.RangeOutcome_RANGE_OUTCOME_MALFORMED
		run := int64(0)
		try := func(part int32, want metadatav1.RangeOutcome, change func(r *remotelogv1.WalRange)) {
			run++
			r := next(walobjecttest.NewPartition(5, part), run, 10)
			change(r)
			f.send(s, r)
			require.Equal(t, want, f.verdicts(s, 1)[0].GetVerdict().GetOutcome())
		}
		try(0, malformed, func(r *remotelogv1.WalRange) { r.Data[len(r.Data)-1] ^= 1 })
		try(1, malformed, func(r *remotelogv1.WalRange) { r.Range.Fence.BrokerEpoch++ })
		try(2, malformed, func(r *remotelogv1.WalRange) { r.Range.Fence.Incarnation++ })
		try(3, malformed, func(r *remotelogv1.WalRange) { r.Range.EndOffset++ })
		try(4, malformed, func(r *remotelogv1.WalRange) { r.Data = nil })
		try(5, metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH, func(r *remotelogv1.WalRange) { r.Range.BaseChainHash[0] ^= 1 })
		try(6, malformed, func(r *remotelogv1.WalRange) { r.Range = nil })
		require.Empty(t, f.names(), "nothing of it was uploaded")
		_, used, _ := f.c.Stats()
		require.Zero(t, used)
	})
}

func TestCreditsAreHeld(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, func(c *combiner.Config) {
			c.PartitionCreditBytes, c.StreamCreditBytes, c.MaxPartitions = 2000, 5000, 4
		}, nil)
		defer f.stop()
		f.faults.Set(decorate.Fault{Op: objstore.OpCreate, Count: -1}) // nothing is answered
		s := f.open()
		var credit *combiner.CreditError

		p := walobjecttest.NewPartition(5, 0)
		f.send(s, next(p, 1, 3000)) // more than the credit, but alone: allowed
		err := s.Append(t.Context(), next(p, 1, 10))
		require.ErrorAs(t, err, &credit)
		require.Equal(t, "partition", credit.Scope)

		s = f.open()
		q := walobjecttest.NewPartition(5, 1)
		f.send(s, next(q, 1, 100))
		f.send(s, next(q, 1, 100))
		for part := range int32(2) {
			f.send(s, next(walobjecttest.NewPartition(5, 2+part), 1, 1100))
		}
		err = s.Append(t.Context(), next(q, 1, 400))
		require.ErrorAs(t, err, &credit)
		require.Equal(t, "stream", credit.Scope)

		f.send(s, next(walobjecttest.NewPartition(5, 5), 1, 10))
		err = s.Append(t.Context(), next(walobjecttest.NewPartition(5, 6), 1, 10))
		require.ErrorAs(t, err, &credit)
		require.Equal(t, "partitions of the stream", credit.Scope)
	})
}

func TestFullBuffersStopTheSenderAndNobodyElseStarves(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, func(c *combiner.Config) { c.BufferBytes = 10_000 }, nil)
		defer f.stop()
		f.faults.Set(decorate.Fault{Op: objstore.OpCreate, Count: -1})
		s := f.open()
		sent := make(chan error)
		go func() {
			p := walobjecttest.NewPartition(5, 0)
			for range 20 {
				if err := s.Append(t.Context(), next(p, 1, 1000)); err != nil {
					sent <- err
					return
				}
			}
			sent <- nil
		}()
		time.Sleep(time.Minute) //nolint:forbidigo // virtual time inside a bubble
		_, used, _ := f.c.Stats()
		require.LessOrEqual(t, used, int64(10_000))
		require.Greater(t, used, int64(5_000))

		// One who waits and gives up leaves nothing behind.
		other := f.open()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, other.Append(ctx, next(walobjecttest.NewPartition(5, 1), 1, 3000)), context.DeadlineExceeded)
		require.Zero(t, other.Outstanding())

		f.faults.Set()
		require.NoError(t, <-sent)
		f.verdicts(s, 20)
		_, used, _ = f.c.Stats()
		require.Zero(t, used)
	})
}

func TestClosedStreamGivesBackWhatWasQueued(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		defer f.stop()
		f.faults.Set(decorate.Fault{Op: objstore.OpCreate, Count: -1})
		s := f.open()
		p := walobjecttest.NewPartition(5, 0)
		for range 30 {
			f.send(s, next(p, 1, 1000))
		}
		time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
		s.Close()
		s.Close()
		require.ErrorIs(t, s.Append(t.Context(), next(p, 1, 10)), combiner.ErrStopped)
		f.faults.Set()
		time.Sleep(time.Minute) //nolint:forbidigo // virtual time inside a bubble
		plan, used, streams := f.c.Stats()
		require.Zero(t, used)
		require.Zero(t, streams)
		require.Zero(t, plan.Lanes)
		require.NotEmpty(t, f.judge.accepted, "what was in an object is committed")
		f.readBack()
	})
}

func TestDrainFinishesAndTakesNoMore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, func(c *combiner.Config) { c.Plan.Linger = time.Hour }, nil)
		defer f.stop()
		f.faults.Set(decorate.Fault{Op: objstore.OpCreate, Latency: time.Second, NoError: true})
		s := f.open()
		p := walobjecttest.NewPartition(5, 0)
		for range 5 {
			f.send(s, next(p, 1, 10))
		}
		require.NoError(t, f.c.Drain(t.Context()))
		require.Len(t, s.Take(), 5)
		require.ErrorIs(t, s.Append(t.Context(), next(p, 1, 10)), combiner.ErrDraining)
		_, err := f.c.Open(1, 1)
		require.ErrorIs(t, err, combiner.ErrDraining)
	})
}

func TestStopLeavesNothingRunning(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		f.faults.Set(decorate.Fault{Op: objstore.OpCreate, Latency: time.Hour, NoError: true, Count: -1})
		s := f.open()
		p := walobjecttest.NewPartition(5, 0)
		f.send(s, next(p, 1, 10))
		f.send(s, next(p, 1, 10))
		time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
		f.stop()                // the bubble fails the test if a goroutine stays
		require.ErrorIs(t, s.Append(t.Context(), next(p, 1, 10)), combiner.ErrStopped)
		require.Error(t, f.c.Run(t.Context()), "once is all")
	})
}

func TestBadConfigurationIsRefused(t *testing.T) {
	_, err := combiner.New(combiner.Config{}, combiner.Deps{})
	require.Error(t, err)
	_, err = combiner.New(config(), combiner.Deps{})
	require.Error(t, err)
	require.NotErrorIs(t, err, combiner.ErrStopped)
}

// Field report B105: one object whose ranges are in order, above and below
// their partitions' ends gets a verdict for each.
func TestEachRangeOfAnObjectHasItsOwnVerdict(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := start(t, nil, nil)
		defer f.stop()
		s := f.open()
		var parts [3]*walobjecttest.Partition
		for i := range parts {
			parts[i] = walobjecttest.NewPartition(5, int32(i))
			f.send(s, next(parts[i], 1, 10))
		}
		f.verdicts(s, 3)
		behind := next(parts[2], 1, 10)
		f.send(s, behind)
		f.verdicts(s, 1)
		next(parts[1], 1, 10) // lost on its way: what follows leaves a gap

		f.send(s, next(walobjecttest.NewPartition(5, 9), 1, 10)) // keeps the first slot busy
		f.send(s, next(parts[0], 2, 10))
		f.send(s, next(parts[1], 2, 10))
		again := proto.CloneOf(behind)
		again.Run = 2
		f.send(s, again)
		got := map[int32]metadatav1.RangeOutcome{}
		for _, v := range f.verdicts(s, 4) {
			got[v.GetPartition().GetPartition()] = v.GetVerdict().GetOutcome()
		}
		require.Equal(t, map[int32]metadatav1.RangeOutcome{
			0: accepted, 1: metadatav1.RangeOutcome_RANGE_OUTCOME_GAP,
			2: metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED, 9: accepted,
		}, got)
		f.readBack()
	})
}
