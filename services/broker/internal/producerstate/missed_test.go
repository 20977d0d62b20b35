package producerstate_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/producerstate"
)

// What could not be looked at is never taken for not there.
func TestMissedBytesAreTold(t *testing.T) {
	batch := func(id int64, epoch int16, sequence int32, base int64) record.ProducerBatch {
		return record.ProducerBatch{ProducerID: id, ProducerEpoch: epoch, BaseSequence: sequence, LastSequence: sequence + 1, BaseOffset: base, EndOffset: base + 2}
	}
	s := producerstate.New(producerstate.Options{}, 0)
	require.NoError(t, s.Update(batch(1, 0, 0, 0), 0))
	s.MissTo(10)
	s.MissTo(5)
	require.EqualValues(t, 10, s.Missed())
	require.EqualValues(t, 10, s.End())
	require.NoError(t, s.Update(batch(2, 0, 6, 10), 0))
	check := func(s *producerstate.State) {
		t.Helper()
		d, err := s.Check(batch(1, 0, 0, 0))
		require.NoError(t, err)
		require.Equal(t, producerstate.Duplicate, d.Verdict)
		for _, next := range []int32{2, 4, 8} {
			_, err = s.Check(batch(1, 0, next, 0))
			var gap *producerstate.SequenceGapError
			require.ErrorAs(t, err, &gap)
			require.True(t, gap.Doubtful)
			require.EqualValues(t, 1, gap.Kept.LastSequence)
			require.Contains(t, err.Error(), "may be lost")
		}
		for _, ok := range []record.ProducerBatch{batch(1, 1, 0, 0), batch(2, 0, 8, 0), batch(3, 0, 0, 0)} {
			d, err = s.Check(ok)
			require.NoError(t, err)
			require.Equal(t, producerstate.Accept, d.Verdict)
		}
		_, err = s.Check(batch(3, 0, 2, 0))
		require.Error(t, err, "known only from what was missed")
	}
	check(s)
	again, err := producerstate.Restore(producerstate.Options{}, s.Snapshot())
	require.NoError(t, err)
	check(again)
	require.NoError(t, again.Merge(producerstate.Summary{Base: 12, End: 14, Complete: true, Producers: s.Snapshot().Producers}))
	require.Zero(t, again.Missed(), "a whole state leaves no doubt")
}
