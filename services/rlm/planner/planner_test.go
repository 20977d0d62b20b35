package planner

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

const ms = time.Millisecond

func small() Config {
	return Config{InFlight: 2, Linger: 10 * ms, MaxBytes: 100, MaxRanges: 8}
}

// single has one slot, so that what is offered meanwhile is cut together.
func single() Config {
	cfg := small()
	cfg.InFlight, cfg.Uncommitted = 1, 9
	return cfg
}

// ranged makes ranges of one offset each.
func ranged(partition int32, run, base, bytes int64) Range {
	return Range{Partition: Key{TopicCreationOffset: 1, TopicID: "t", Partition: partition}, Run: run, Base: base, End: base + 1, Bytes: bytes}
}

func verdict(o metadatav1.RangeOutcome) *metadatav1.RangeVerdict {
	return &metadatav1.RangeVerdict{Outcome: o}
}

func verdicts(n int, o metadatav1.RangeOutcome) []*metadatav1.RangeVerdict {
	list := make([]*metadatav1.RangeVerdict, n)
	for i := range list {
		list[i] = verdict(o)
	}
	return list
}

func ready(cfg Config) *Planner {
	p := New(cfg)
	p.Registered(0, 7)
	p.StreamOpened(1)
	p.StreamOpened(2)
	return p
}

func at(seq int64, attempt int32) Attempt {
	return Attempt{Object: Object{Epoch: 7, Sequence: seq}, Attempt: attempt}
}

func bases(u Upload) (list []int64) {
	for _, r := range u.Ranges {
		list = append(list, int64(r.Partition.Partition)*1000+r.Base)
	}
	return list
}

func TestFirstUploadStartsAtOnceTheSecondLingers(t *testing.T) {
	p := ready(small())
	e := p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	require.Len(t, e.Uploads, 1)
	require.Equal(t, Object{Epoch: 7, Sequence: 1}, e.Uploads[0].Object)

	require.Empty(t, p.Offer(1*ms, 1, ranged(0, 1, 1, 10), nil).Uploads)
	require.Empty(t, p.Offer(5*ms, 1, ranged(1, 1, 0, 10), nil).Uploads)
	wake, ok := p.Wake()
	require.True(t, ok)
	require.Equal(t, 11*ms, wake, "the oldest one's linger")
	require.Empty(t, p.Tick(10*ms).Uploads)
	e = p.Tick(11 * ms)
	require.Len(t, e.Uploads, 1)
	require.Equal(t, []int64{1, 1000}, bases(e.Uploads[0]))

	// Two are in flight: nothing more, however long and however much.
	for i := range 20 {
		require.Empty(t, p.Offer(12*ms, 1, ranged(0, 1, int64(2+i), 10), nil).Uploads)
	}
	require.Empty(t, p.Tick(time.Hour).Uploads)
	// A full object does not linger.
	require.Len(t, p.Uploaded(time.Hour, at(1, 1)).Uploads, 1)
}

func TestCommitsFollowTheSequence(t *testing.T) {
	p := ready(small())
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 1, ranged(0, 1, 1, 10), nil)
	p.Tick(10 * ms)
	require.Empty(t, p.Uploaded(20*ms, at(2, 1)).Commits, "the first is not there yet")
	e := p.Uploaded(30*ms, at(1, 1))
	require.Equal(t, []Attempt{at(1, 1)}, e.Commits)
	require.Empty(t, p.Tick(40*ms).Commits, "sent once; repeating it is the sender's")
	e = p.Judged(50*ms, at(1, 1), verdicts(1, accepted), 99, false)
	require.Equal(t, []Attempt{at(2, 1)}, e.Commits, "the second after the first one's verdict")
	require.Len(t, e.Answers, 1)
	require.EqualValues(t, 99, e.Answers[0].MetadataOffset)
	require.Equal(t, at(1, 1), e.Answers[0].Attempt)
	e = p.Judged(60*ms, at(2, 1), verdicts(1, accepted), 100, false)
	require.Len(t, e.Answers, 1)
	require.True(t, p.Idle())
	require.Empty(t, p.Judged(61*ms, at(2, 1), verdicts(1, accepted), 100, false).Answers, "a second verdict is ignored")
}

func TestHeadsComeBeforeAnybodysBacklog(t *testing.T) {
	cfg := single()
	cfg.MaxBytes = 40
	p := ready(cfg)
	p.Offer(0, 1, ranged(9, 1, 0, 10), nil) // takes the first slot
	for i := range 10 {
		p.Offer(0, 1, ranged(0, 1, int64(i), 10), nil) // a backlog of one partition
	}
	for part := range int32(3) {
		p.Offer(1*ms, 2, ranged(1+part, 1, 0, 10), nil)
	}
	e := p.Uploaded(1*ms, at(1, 1))
	require.Equal(t, []int64{0, 1000, 2000, 3000}, bases(e.Uploads[0]), "one of the backlog, and three heads")
	p.Offer(1*ms, 2, ranged(4, 1, 0, 10), nil)
	e = p.Uploaded(2*ms, at(2, 1))
	require.Equal(t, []int64{1, 2, 3, 4000}, bases(e.Uploads[0]), "the room that is left is the backlog's")
}

func TestLaneThatDidNotFitIsFirstInTheNextObject(t *testing.T) {
	cfg := single()
	p := ready(cfg)
	p.Offer(0, 1, ranged(9, 1, 0, 1), nil)
	p.Offer(0, 1, ranged(0, 1, 0, 60), nil)
	p.Offer(0, 1, ranged(0, 1, 1, 10), nil)
	p.Offer(0, 1, ranged(1, 1, 0, 60), nil) // does not fit beside the first
	e := p.Uploaded(1*ms, at(1, 1))
	require.Equal(t, []int64{0}, bases(e.Uploads[0]), "the later one of partition 0 waits as well")
	p.Offer(1*ms, 1, ranged(2, 1, 0, 60), nil)
	e = p.Uploaded(2*ms, at(2, 1))
	require.Equal(t, []int64{1, 1000}, bases(e.Uploads[0]))
}

func TestOversizedRangeIsAnObjectOfItsOwn(t *testing.T) {
	p := ready(small())
	e := p.Offer(0, 1, ranged(0, 1, 0, 5000), nil)
	require.Len(t, e.Uploads, 1)
}

func TestOnePartitionComesFromOneStreamPerObject(t *testing.T) {
	cfg := single()
	p := ready(cfg)
	p.Offer(0, 1, ranged(9, 1, 0, 1), nil)
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 2, ranged(0, 1, 0, 10), nil) // the next leader, at the same base
	e := p.Uploaded(1*ms, at(1, 1))
	require.Equal(t, []int64{0}, bases(e.Uploads[0]))
	e = p.Uploaded(2*ms, at(2, 1))
	require.Equal(t, []int64{0}, bases(e.Uploads[0]))
}

func TestRefusalTakesTheRestOfItsRun(t *testing.T) {
	cfg := single()
	p := ready(cfg)
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 1, ranged(0, 1, 1, 10), nil)
	p.Offer(0, 1, ranged(1, 1, 0, 10), nil)
	p.Uploaded(0, at(1, 1)) // object 2 = {0:1, 1:0} starts
	p.Offer(0, 1, ranged(0, 1, 2, 10), nil)
	fenced := verdict(metadatav1.RangeOutcome_RANGE_OUTCOME_FENCED)
	e := p.Judged(1*ms, at(1, 1), []*metadatav1.RangeVerdict{fenced}, -1, false)
	require.Len(t, e.Answers, 1, "the one in object 2 is not decided, so the one behind it waits")
	require.Same(t, fenced, e.Answers[0].Verdict)
	require.Equal(t, 0, p.Stats().QueuedRanges, "what was queued behind it is dropped")
	require.Empty(t, p.Offer(2*ms, 1, ranged(0, 1, 3, 10), nil).Answers)
	p.Uploaded(3*ms, at(2, 1))
	gap := verdict(metadatav1.RangeOutcome_RANGE_OUTCOME_GAP)
	e = p.Judged(4*ms, at(2, 1), []*metadatav1.RangeVerdict{gap, verdict(accepted)}, 5, false)
	require.Len(t, e.Answers, 4)
	var outcomes []metadatav1.RangeOutcome
	for _, a := range e.Answers {
		if a.Range.Partition.Partition == 0 {
			outcomes = append(outcomes, a.Verdict.GetOutcome())
		}
	}
	require.Equal(t, []metadatav1.RangeOutcome{gap.GetOutcome(), fenced.GetOutcome(), fenced.GetOutcome()}, outcomes, "in the order offered; dropped ones repeat the refusal")
	// A higher run begins anew.
	e = p.Offer(5*ms, 1, ranged(0, 2, 0, 10), nil)
	require.Empty(t, e.Answers)
	require.Len(t, e.Uploads, 1)
}

func TestHigherRunDropsTheOlder(t *testing.T) {
	cfg := single()
	p := ready(cfg)
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 1, ranged(0, 1, 1, 10), nil)
	require.Empty(t, p.Offer(0, 1, ranged(0, 2, 0, 10), nil).Answers, "behind the one in flight")
	e := p.Offer(0, 1, ranged(0, 1, 2, 10), nil) // late, of the old run
	require.Empty(t, e.Answers)
	p.Uploaded(1*ms, at(1, 1))
	e = p.Judged(1*ms, at(1, 1), verdicts(1, accepted), 5, false)
	require.Len(t, e.Answers, 2)
	require.Equal(t, accepted, e.Answers[0].Verdict.GetOutcome())
	require.Equal(t, notJudged, e.Answers[1].Verdict.GetOutcome())
	require.EqualValues(t, 1, e.Answers[1].Range.Run)
	p.Uploaded(2*ms, at(2, 1))
	e = p.Judged(2*ms, at(2, 1), verdicts(1, accepted), 6, false)
	require.Len(t, e.Answers, 2, "the new run's, then the late one behind it")
}

func TestRunMustBeContiguous(t *testing.T) {
	p := ready(small())
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 1, ranged(0, 1, 2, 10), nil)
	p.Uploaded(0, at(1, 1))
	e := p.Judged(0, at(1, 1), verdicts(1, accepted), 5, false)
	require.Len(t, e.Answers, 2)
	require.Equal(t, malformed, e.Answers[1].Verdict.GetOutcome())
}

func TestRefusedOnArrivalIsNeverUploaded(t *testing.T) {
	p := ready(small())
	bad := verdict(metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH)
	e := p.Offer(0, 1, ranged(0, 1, 0, 10), bad)
	require.Empty(t, e.Uploads)
	require.Len(t, e.Answers, 1)
	require.Same(t, bad, e.Answers[0].Verdict)
	e = p.Offer(0, 1, ranged(0, 1, 1, 10), nil)
	require.Len(t, e.Answers, 1, "nor what follows it")
	require.Same(t, bad, e.Answers[0].Verdict)
}

func TestFailedPutGetsANewNameAfterAGrowingPause(t *testing.T) {
	cfg := small()
	cfg.RetryMin, cfg.RetryMax = 50*ms, 150*ms
	p := ready(cfg)
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	now := time.Duration(0)
	for i, pause := range []time.Duration{50 * ms, 100 * ms, 150 * ms, 150 * ms} {
		attempt := int32(i + 1)
		require.Empty(t, p.UploadFailed(now, at(1, attempt)).Uploads)
		wake, ok := p.Wake()
		require.True(t, ok)
		require.Equal(t, now+pause, wake)
		now = wake
		e := p.Tick(now)
		require.Len(t, e.Uploads, 1)
		require.Equal(t, attempt+1, e.Uploads[0].Attempt)
	}
	require.Equal(t, []Attempt{at(1, 5)}, p.Uploaded(now, at(1, 5)).Commits)
	require.Empty(t, p.Uploaded(now, at(1, 1)).Commits, "an attempt long given up")
}

func TestSlowPutIsHedgedAndTheFirstOneWins(t *testing.T) {
	cfg := small()
	cfg.HedgeMin, cfg.HedgeCold = 20*ms, 300*ms
	p := ready(cfg)
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	wake, ok := p.Wake()
	require.True(t, ok)
	require.Equal(t, 300*ms, wake, "cold: nothing is known")
	e := p.Tick(wake)
	require.Len(t, e.Uploads, 1)
	require.EqualValues(t, 2, e.Uploads[0].Attempt)
	require.Empty(t, p.Tick(time.Hour).Uploads, "two attempts at most")
	e = p.Uploaded(time.Hour, at(1, 2))
	require.Equal(t, []Attempt{at(1, 2)}, e.Commits)
	require.Equal(t, []Attempt{at(1, 1)}, e.Cancels)
	require.Empty(t, p.Uploaded(time.Hour, at(1, 1)).Commits, "the loser is garbage")
	require.Len(t, p.Judged(time.Hour, at(1, 2), verdicts(1, accepted), 5, false).Answers, 1)
}

func TestAttemptsAreBoundedByTheName(t *testing.T) {
	cfg := small()
	cfg.MaxAttempt = 2
	p := ready(cfg)
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.UploadFailed(0, at(1, 1))
	p.Tick(time.Second)
	p.UploadFailed(time.Second, at(1, 2))
	e := p.Tick(time.Minute)
	require.True(t, e.Reregister)
	require.Empty(t, e.Uploads)
	wake, ok := p.Wake()
	require.True(t, ok)
	require.Greater(t, wake, time.Minute, "asked for again, but not at once")
	e = p.Registered(time.Minute, 8)
	require.Len(t, e.Answers, 1)
	require.Equal(t, notJudged, e.Answers[0].Verdict.GetOutcome())
}

func TestClosedEpochAnswersAllButTheCommitThatIsOut(t *testing.T) {
	p := ready(small())
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil) // object 1: commit out
	p.Uploaded(0, at(1, 1))
	p.Offer(0, 1, ranged(0, 1, 1, 10), nil) // object 2: in upload
	p.Offer(0, 1, ranged(0, 1, 2, 10), nil) // queued
	p.Offer(0, 1, ranged(1, 1, 0, 10), nil) // queued, another partition
	e := p.EpochClosed(1*ms, 7)
	require.Equal(t, []Attempt{at(2, 1)}, e.Cancels)
	require.Len(t, e.Answers, 1, "partition 0 waits for the verdict")
	require.EqualValues(t, 1, e.Answers[0].Range.Partition.Partition)
	require.Equal(t, notJudged, e.Answers[0].Verdict.GetOutcome())
	require.Zero(t, p.Epoch())

	// New work waits for an epoch, then begins at sequence 1.
	require.Empty(t, p.Offer(2*ms, 1, ranged(1, 2, 0, 10), nil).Uploads)
	e = p.Registered(3*ms, 12)
	require.Len(t, e.Uploads, 1)
	require.Equal(t, Object{Epoch: 12, Sequence: 1}, e.Uploads[0].Object)

	// The old commit had been accepted before the epoch was closed: it says so.
	e = p.Judged(4*ms, at(1, 1), verdicts(1, accepted), 5, false)
	require.Len(t, e.Answers, 3)
	require.Equal(t, accepted, e.Answers[0].Verdict.GetOutcome())
	require.Equal(t, notJudged, e.Answers[1].Verdict.GetOutcome())
	require.Empty(t, p.EpochClosed(5*ms, 7).Answers, "an old epoch's end says nothing about this one")
	require.EqualValues(t, 12, p.Epoch())
}

func TestVerdictThatFindsTheEpochClosedEndsIt(t *testing.T) {
	p := ready(small())
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 1, ranged(1, 1, 0, 10), nil)
	p.Uploaded(0, at(1, 1))
	e := p.Judged(0, at(1, 1), verdicts(1, notJudged), -1, true)
	require.Len(t, e.Answers, 2)
	require.Zero(t, p.Epoch())
	require.False(t, e.Reregister)
}

func TestStaleSequenceAsksForANewEpoch(t *testing.T) {
	p := ready(small())
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Uploaded(0, at(1, 1))
	require.True(t, p.Judged(0, at(1, 1), verdicts(1, notJudged), -1, false).Reregister)
}

func TestUncommittedObjectsAreBounded(t *testing.T) {
	p := ready(small())
	for i := range int64(50) {
		p.Offer(0, 1, ranged(0, 1, i, 100), nil)
	}
	// Object 1 is stuck; the others go through.
	for seq := int64(2); seq < 50; seq++ {
		p.Uploaded(time.Second, at(seq, 1))
	}
	require.Equal(t, 4, p.Stats().Uncommitted)
	_, ok := p.Wake()
	require.False(t, ok, "only an event can help")
}

func TestClosedStreamIsForgotten(t *testing.T) {
	cfg := single()
	p := ready(cfg)
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 1, ranged(0, 1, 1, 10), nil)
	e := p.StreamClosed(0, 1)
	require.Empty(t, e.Answers)
	require.Zero(t, p.Stats().QueuedRanges)
	p.Uploaded(0, at(1, 1))
	e = p.Judged(0, at(1, 1), verdicts(1, accepted), 5, false)
	require.Empty(t, e.Answers, "it is committed, nobody is told")
	require.Zero(t, p.Stats().Lanes)
	require.True(t, p.Idle())
	require.Empty(t, p.Offer(0, 1, ranged(0, 1, 0, 10), nil).Uploads)
}

func TestFlushDoesNotLinger(t *testing.T) {
	p := ready(small())
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	p.Offer(0, 1, ranged(0, 1, 1, 10), nil)
	require.Len(t, p.Flush(0).Uploads, 1)
}

func TestAbandonedObjectIsAnswered(t *testing.T) {
	p := ready(small())
	p.Offer(0, 1, ranged(0, 1, 0, 10), nil)
	e := p.Abandoned(0, Object{Epoch: 7, Sequence: 1})
	require.Len(t, e.Answers, 1)
	require.Equal(t, notJudged, e.Answers[0].Verdict.GetOutcome())
	require.True(t, p.Idle())
}

func TestConfigNamesEveryProblem(t *testing.T) {
	require.NoError(t, small().Validate())
	err := Config{Linger: -1, Uncommitted: -1, HedgeMin: -1, RetryMin: -1, MaxAttempt: -1}.Validate()
	for _, word := range []string{"in flight", "uncommitted", "linger", "object bytes", "ranges", "hedge", "retry", "attempts"} {
		require.ErrorContains(t, err, word)
	}
}

// BenchmarkOffer4096 is the planner's share of an object of 4,096 partitions:
// a range of each, queued behind an upload, then cut.
func BenchmarkOffer4096(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		p := ready(Config{InFlight: 1, MaxBytes: 1 << 40, MaxRanges: 4096, Uncommitted: 9})
		p.Offer(0, 1, ranged(5000, 1, 0, 10), nil)
		for i := range int32(4096) {
			p.Offer(0, 1, ranged(i, 1, 0, 100), nil)
		}
		if n := len(p.Uploaded(1, at(1, 1)).Uploads[0].Ranges); n != 4096 {
			b.Fatal(n)
		}
	}
}
