package partition_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/partition"
)

// led is a partition that broker 2 leads under epoch 2, opened at 100.
func led(end int64) partition.View {
	return partition.View{
		Fence: foreign(2), Leader: 2, Opened: true, EpochStart: 100, Lineage: lineage.Lineage{entry(1, 0), entry(2, 100)},
		ObjectEnd: end, ObjectHash: h(byte(end)),
	}
}

// fetching is a follower whose tail of 120 was cut to the fork at 100.
func fetching(t *testing.T) *partition.Machine {
	t.Helper()
	m := partition.New(self, epoch, tail())
	cut := one[partition.Truncate](t, m.Step(partition.ViewReset{View: led(100)}))
	require.Equal(t, partition.Truncate{Attempt: cut.Attempt, At: 100}, cut)
	_, ok := m.Serves()
	require.False(t, ok, "not reconciled yet")
	fx := m.Step(partition.Cut{Attempt: cut.Attempt, Log: partition.LogFacts{End: 100, Lineage: lineage.Lineage{entry(1, 0)}}})
	require.Equal(t, cut.Attempt, one[partition.Fetch](t, fx).Attempt)
	state(t, m, partition.Fetching)
	return m
}

// A leader that registers again makes the metadata call its epoch not open, under
// the same fence: such a view is newer where it knows of more committed records.
func TestAFollowerTakesAViewOfAnEpochThatIsNotOpenAnyMore(t *testing.T) {
	m := fetching(t)
	closed := led(110)
	closed.Opened = false
	one[partition.Fetch](t, m.Step(partition.ViewReset{View: closed}))
	from, to, _, ok := m.Wanted()
	require.True(t, ok)
	require.EqualValues(t, 100, from)
	require.EqualValues(t, 110, to)

	m = fetching(t)
	closed.ObjectEnd, closed.ObjectHash = 100, h(100)
	require.Empty(t, m.Step(partition.ViewReset{View: closed}), "older, or no news")
}

func TestOrdersOfAnOlderAttemptAreVoid(t *testing.T) {
	m := fetching(t)
	m.Step(partition.RangeCommitted{Base: 100, End: 110, EndHash: h(110)})
	_, _, attempt, ok := m.Wanted()
	require.True(t, ok)
	m.Step(partition.FenceRaised{Fence: foreign(3), Leader: 3})
	require.False(t, m.Replicated(attempt, 110, nil))
	require.False(t, m.Current(attempt))
	_, ok = m.Serves()
	require.False(t, ok, "between an election and its opening")
	require.Empty(t, m.Step(partition.Diverged{Attempt: attempt}))
	cut := one[partition.Truncate](t, m.Step(partition.EpochOpened{Fence: foreign(3), Start: 110, Lineage: lineage.Lineage{entry(1, 0), entry(2, 100), entry(3, 110)}}))
	require.True(t, m.Current(cut.Attempt))
	require.EqualValues(t, 100, cut.At)
}
