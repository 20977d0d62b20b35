package producerstate_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/producerstate"
)

// send is a batch of n records as a client sends it.
func send(id int64, epoch int16, seq, n int32) record.ProducerBatch {
	return record.ProducerBatch{ProducerID: id, ProducerEpoch: epoch, BaseSequence: seq, LastSequence: record.NextSequence(seq, n-1)}
}

// placed is the batch at an offset.
func placed(b record.ProducerBatch, base int64) record.ProducerBatch {
	n := int64(b.LastSequence) - int64(b.BaseSequence) + 1
	if n <= 0 {
		n += 1 << 31
	}
	b.BaseOffset, b.EndOffset, b.MaxTimestamp = base, base+n, base*10
	return b
}

// store checks a batch, wants it accepted and stores it at the end.
func store(t *testing.T, s *producerstate.State, b record.ProducerBatch, now time.Duration) record.ProducerBatch {
	t.Helper()
	d, err := s.Check(b)
	require.NoError(t, err)
	require.Equal(t, producerstate.Accept, d.Verdict)
	b = placed(b, s.End())
	require.NoError(t, s.Update(b, now))
	return b
}

func requireDuplicate(t *testing.T, s *producerstate.State, b record.ProducerBatch) {
	t.Helper()
	d, err := s.Check(b)
	require.NoError(t, err)
	require.Equal(t, producerstate.Decision{Verdict: producerstate.Duplicate, BaseOffset: b.BaseOffset, EndOffset: b.EndOffset}, d)
}

func requireGap(t *testing.T, s *producerstate.State, b record.ProducerBatch) *producerstate.SequenceGapError {
	t.Helper()
	_, err := s.Check(b)
	var gap *producerstate.SequenceGapError
	require.ErrorAs(t, err, &gap)
	return gap
}

// Field report B054, on the same leader and on one that got the state.
func TestFiveBatchesInFlightAreAllAnsweredAgain(t *testing.T) {
	s := producerstate.New(producerstate.Options{}, 100)
	var sent []record.ProducerBatch
	for i := range int32(7) {
		sent = append(sent, store(t, s, send(9, 0, i*10, 10), 0))
		s.AdvanceTo(s.End() + 3) // others write too
	}
	other, err := producerstate.Restore(producerstate.Options{}, s.Snapshot())
	require.NoError(t, err)
	for _, s := range []*producerstate.State{s, other} {
		for _, b := range sent[2:] {
			requireDuplicate(t, s, b)
		}
		gap := requireGap(t, s, sent[1])
		require.True(t, gap.Behind, "older than the window")
		require.Equal(t, producerstate.Kept{Known: true, Epoch: 0, LastSequence: 69, LastOffset: sent[6].EndOffset - 1}, gap.Kept)
		gap = requireGap(t, s, send(9, 0, 71, 1))
		require.False(t, gap.Behind)
		gap = requireGap(t, s, send(9, 0, 60, 11))
		require.True(t, gap.Behind, "the same start with another length is no repetition")
	}
}

// Field reports B050, B052.
func TestUnknownProducerGetsAGapOnWhichItCanGoOn(t *testing.T) {
	s := producerstate.New(producerstate.Options{}, 0)
	gap := requireGap(t, s, send(1, 0, 7, 1))
	require.False(t, gap.Kept.Known)
	require.EqualValues(t, -1, gap.Kept.LastSequence)
	store(t, s, send(1, 1, 0, 5), 0)

	const ttl = 10 * time.Second
	require.Empty(t, s.Expire(ttl-1, ttl))
	expired := s.Expire(ttl, ttl)
	require.Equal(t, []producerstate.Expiry{{ProducerID: 1, Epoch: 1, Offset: 5}}, expired)
	require.Zero(t, s.Len())
	// The same answer before and after a change of leader.
	next := producerstate.New(producerstate.Options{}, 0)
	require.NoError(t, next.Replay(slices.Values([]record.ProducerBatch{placed(send(1, 1, 0, 5), 0)}), s.Expiries(0, 6), 6))
	for _, s := range []*producerstate.State{s, next} {
		require.False(t, requireGap(t, s, send(1, 1, 5, 1)).Kept.Known)
		store(t, s, send(1, 2, 0, 1), 0)
	}
}

func TestEpochsFenceAndBeginAtZero(t *testing.T) {
	s := producerstate.New(producerstate.Options{}, 0)
	store(t, s, send(4, 3, 0, 2), 0)
	_, err := s.Check(send(4, 2, 2, 1))
	var fenced *producerstate.FencedError
	require.ErrorAs(t, err, &fenced)
	require.Equal(t, producerstate.Kept{Known: true, Epoch: 3, LastSequence: 1, LastOffset: 1}, fenced.Kept)
	gap := requireGap(t, s, send(4, 4, 2, 1))
	require.EqualValues(t, 1, gap.Kept.LastSequence)
	b := store(t, s, send(4, 4, 0, 1), 0) // field report B056
	requireDuplicate(t, s, b)
	require.False(t, requireGap(t, s, send(4, 4, 5, 1)).Behind)
	_, err = s.Check(send(4, 3, 2, 1))
	require.ErrorAs(t, err, &fenced)
}

func TestSequencesWrapAround(t *testing.T) {
	s := producerstate.New(producerstate.Options{}, 0)
	require.NoError(t, s.Update(placed(send(1, 0, math.MaxInt32-4, 3), 0), 0))
	b := store(t, s, send(1, 0, math.MaxInt32-1, 4), 0)
	require.EqualValues(t, 1, b.LastSequence)
	requireDuplicate(t, s, b)
	require.False(t, requireGap(t, s, send(1, 0, 3, 1)).Behind)
	require.True(t, requireGap(t, s, send(1, 0, math.MaxInt32-10, 1)).Behind)
	store(t, s, send(1, 0, 2, 1), 0)
}

func TestTheNumberOfProducersIsBounded(t *testing.T) {
	s := producerstate.New(producerstate.Options{MaxProducers: 3}, 0)
	for id := range int64(3) {
		store(t, s, send(id, 0, 0, 1), time.Duration(id))
	}
	_, err := s.Check(send(3, 0, 0, 1))
	var limit *producerstate.LimitError
	require.ErrorAs(t, err, &limit)
	require.Equal(t, 3, limit.Max)
	store(t, s, send(0, 0, 1, 1), 5)
	require.NoError(t, s.Update(placed(send(3, 0, 0, 1), s.End()), 6), "what the leader let in is taken")
	// Expiries that are not forgotten yet are bounded too.
	require.Len(t, s.Expire(100, 10), 3)
	require.Empty(t, s.Expire(100, 10))
	require.Equal(t, 1, s.Len())
	s.ForgetExpiries(s.End() + 1)
	require.Len(t, s.Expire(100, 10), 1)
}

func TestANewLeaderBeginsItsOwnTime(t *testing.T) {
	s := producerstate.New(producerstate.Options{}, 0)
	store(t, s, send(1, 0, 0, 1), 0)
	s.Touch(time.Hour)
	require.Empty(t, s.Expire(time.Hour+9, 10))
	require.Len(t, s.Expire(time.Hour+10, 10), 1)
}

func TestUpdateAndMergeRefuseAHole(t *testing.T) {
	s := producerstate.New(producerstate.Options{}, 10)
	require.ErrorIs(t, s.Update(placed(send(1, 0, 0, 1), 9), 0), producerstate.ErrNotContiguous)
	require.ErrorIs(t, s.Merge(producerstate.Summary{Base: 11, End: 12}), producerstate.ErrNotContiguous)
	require.NoError(t, s.Merge(producerstate.Summary{Base: 10, End: 12}))
	require.EqualValues(t, 12, s.End())
	bad := producerstate.Producer{ID: 1, Batches: []producerstate.Batch{{BaseOffset: 13}}}
	var format *producerstate.FormatError
	require.ErrorAs(t, s.Merge(producerstate.Summary{Base: 12, End: 13, Producers: []producerstate.Producer{bad}}), &format)
	require.NoError(t, s.Merge(producerstate.Summary{Base: 90, End: 100, Complete: true}))
	require.EqualValues(t, 100, s.End())
}

// history is a random run of a leader with everything it appended and decided.
type history struct {
	leader   *producerstate.State
	log      []record.ProducerBatch
	expiries []producerstate.Expiry
	now      time.Duration
}

func (h *history) step(t *testing.T, r *rand.Rand) {
	h.now += time.Duration(r.IntN(3))
	switch r.IntN(12) {
	case 0:
		h.expiries = append(h.expiries, h.leader.Expire(h.now, time.Duration(4+r.IntN(20)))...)
	case 1:
		h.leader.AdvanceTo(h.leader.End() + r.Int64N(3)) // others
	default:
		id := r.Int64N(6)
		n := 1 + r.Int32N(3)
		var b record.ProducerBatch
		_, err := h.leader.Check(send(id, 0, math.MaxInt32/2, n))
		switch e := err.(type) { //nolint:errorlint // Check returns these themselves
		case *producerstate.SequenceGapError:
			if !e.Kept.Known {
				b = send(id, int16(r.IntN(3)), 0, n)
			} else if r.IntN(8) == 0 {
				b = send(id, e.Kept.Epoch+1, 0, n)
			} else {
				b = send(id, e.Kept.Epoch, record.NextSequence(e.Kept.LastSequence, 1), n)
			}
		case *producerstate.FencedError:
			b = send(id, e.Kept.Epoch, record.NextSequence(e.Kept.LastSequence, 1), n)
		}
		h.log = append(h.log, store(t, h.leader, b, h.now))
	}
}

func (h *history) between(base, end int64) []record.ProducerBatch {
	var out []record.ProducerBatch
	for _, b := range h.log {
		if b.BaseOffset >= base && b.EndOffset <= end {
			out = append(out, b)
		}
	}
	return out
}

func TestMergingSummariesReplayingAndSnapshotsGiveTheSameState(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		start := r.Int64N(50)
		opts := producerstate.Options{}
		h := &history{leader: producerstate.New(opts, start)}
		cutter, merged, lagging := producerstate.New(opts, start), producerstate.New(opts, start), producerstate.New(opts, start)
		var history []producerstate.Snapshot
		for range 60 {
			h.step(t, r)
			if r.IntN(5) > 0 || len(h.log) == 0 {
				continue
			}
			// Cut a range that ends somewhere behind the leader's end.
			end := h.log[max(0, len(h.log)-1-r.IntN(8))].EndOffset
			if end <= cutter.End() {
				continue
			}
			base := cutter.End()
			require.NoError(t, cutter.Replay(slices.Values(h.between(base, end)), h.leader.Expiries(base, end), end))
			sum := cutter.Summary(base)
			require.NoError(t, merged.Merge(sum))
			want := cutter.Snapshot()
			got := merged.Snapshot()
			require.Equal(t, want.Producers, got.Producers, "seed %d", seed)
			if r.IntN(3) == 0 {
				require.NoError(t, lagging.Merge(producerstate.Summary{Base: 0, End: end, Complete: true, Producers: want.Producers}))
				require.Equal(t, want.Producers, lagging.Snapshot().Producers)
			}
			scratch := producerstate.New(opts, start)
			require.NoError(t, scratch.Replay(slices.Values(h.between(start, end)), h.expiries, end))
			require.Equal(t, want, scratch.Snapshot(), "seed %d", seed)
			history = append(history, want)
		}
		end := h.leader.End()
		for _, snap := range history {
			decoded, err := producerstate.DecodeSnapshot(snap.Append(nil))
			require.NoError(t, err)
			s, err := producerstate.Restore(opts, decoded)
			require.NoError(t, err)
			require.NoError(t, s.Replay(slices.Values(h.between(snap.End, end)), h.leader.Expiries(snap.End, end+1), end))
			for _, e := range h.leader.Expiries(end, end+1) {
				require.NoError(t, s.Merge(producerstate.Summary{Base: end, End: end, Expiries: []producerstate.Expiry{e}}))
			}
			require.Equal(t, h.leader.Snapshot().Producers, s.Snapshot().Producers, "seed %d", seed)
		}
	}
}

func TestTruncatingGivesTheStateOfTheShorterLog(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 2))
		opts := producerstate.Options{}
		h := &history{leader: producerstate.New(opts, 0)}
		snap := h.leader.Snapshot()
		for range 10 + r.IntN(40) {
			h.step(t, r)
			if r.IntN(10) == 0 {
				snap = h.leader.Snapshot()
			}
		}
		to := snap.End
		if later := h.between(snap.End, math.MaxInt64); len(later) > 0 {
			if k := r.IntN(len(later) + 1); k > 0 {
				to = later[k-1].EndOffset
			}
		}
		require.NoError(t, h.leader.TruncateTo(to, snap, slices.Values(h.between(snap.End, to))))
		require.Equal(t, to, h.leader.End())
		want := producerstate.New(opts, 0)
		require.NoError(t, want.Replay(slices.Values(h.between(0, to)), h.expiries, to))
		got := h.leader.Snapshot()
		// An expiry decided exactly at the new end is of the next range.
		var kept []producerstate.Producer
		for _, p := range want.Snapshot().Producers {
			if !slices.ContainsFunc(snap.Expiries, func(e producerstate.Expiry) bool { return e.Offset == to && e.ProducerID == p.ID }) || snap.End < to {
				kept = append(kept, p)
			}
		}
		require.ElementsMatch(t, kept, got.Producers, "seed %d", seed)
		// It goes on as a leader.
		h.log = h.between(0, to)
		for range 20 {
			h.step(t, r)
		}
		h.leader.Expire(math.MaxInt64/2, 1)
		require.Zero(t, h.leader.Len())
	}
	s := producerstate.New(producerstate.Options{}, 0)
	store(t, s, send(1, 0, 0, 1), 0)
	require.ErrorIs(t, s.TruncateTo(0, producerstate.Snapshot{End: 1}, nil), producerstate.ErrNotContiguous)
}

func TestAFlippedBitInASnapshotIsFound(t *testing.T) {
	s := producerstate.New(producerstate.Options{}, 0)
	for i := range int64(20) {
		store(t, s, send(i%4, 0, int32(i/4), 1), time.Duration(i))
	}
	s.Expire(18, 1)
	want := s.Snapshot()
	require.NotEmpty(t, want.Expiries)
	data := want.Append(nil)
	got, err := producerstate.DecodeSnapshot(data)
	require.NoError(t, err)
	require.Equal(t, want, got)
	for i := range data {
		for bit := range 8 {
			data[i] ^= 1 << bit
			_, err := producerstate.DecodeSnapshot(data)
			var format *producerstate.FormatError
			require.ErrorAs(t, err, &format)
			data[i] ^= 1 << bit
		}
	}
}

func FuzzDecodeSnapshot(f *testing.F) {
	s := producerstate.New(producerstate.Options{}, 0)
	for i := range int64(9) {
		if err := s.Update(placed(send(i%2, 0, int32(i/2), 1), i), time.Duration(i)); err != nil {
			f.Fatal(err)
		}
	}
	s.Expire(100, 95)
	snap := s.Snapshot()
	f.Add(snap.Append(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		snap, err := producerstate.DecodeSnapshot(fixChecksum(data))
		if err != nil {
			return
		}
		again, err := producerstate.DecodeSnapshot(snap.Append(nil))
		require.NoError(t, err)
		require.Equal(t, snap, again)
	})
}

func BenchmarkCheckAndUpdate(b *testing.B) {
	s := producerstate.New(producerstate.Options{}, 0)
	const producers = 1000
	seq := make([]int32, producers)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		id := int64(i % producers)
		p := send(id, 0, seq[id], 10)
		if _, err := s.Check(p); err != nil {
			b.Fatal(err)
		}
		if err := s.Update(placed(p, s.End()), time.Duration(i)); err != nil {
			b.Fatal(err)
		}
		seq[id] = record.NextSequence(seq[id], 10)
	}
}
