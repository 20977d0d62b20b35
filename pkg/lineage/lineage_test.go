package lineage_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
)

const (
	a uint32 = 0xA // incarnations of two clusters
	b uint32 = 0xB
)

func entry(incarnation uint32, epoch int32, start int64) lineage.Entry {
	return lineage.Entry{Leadership: lead(incarnation, epoch), StartOffset: start}
}

func lead(incarnation uint32, epoch int32) lineage.Leadership {
	return lineage.Leadership{Incarnation: incarnation, LeaderEpoch: epoch}
}

var _ record.Epochs = lineage.Lineage(nil)

func TestLookUps(t *testing.T) {
	l := lineage.Lineage{entry(a, 1, 10), entry(a, 3, 20), entry(b, 7, 35)}
	require.NoError(t, l.Validate())
	for _, tt := range []struct {
		offset int64
		index  int
	}{{-1, -1}, {9, -1}, {10, 0}, {19, 0}, {20, 1}, {34, 1}, {35, 2}, {math.MaxInt64, 2}} {
		require.Equal(t, tt.index, l.IndexAt(tt.offset), "offset %d", tt.offset)
		who, ok := l.LeadershipAt(tt.offset)
		epoch, end, ok2 := l.EpochAt(tt.offset)
		require.Equal(t, tt.index >= 0, ok)
		require.Equal(t, ok, ok2)
		if ok {
			require.Equal(t, l[tt.index].Leadership, who)
			require.Equal(t, who.LeaderEpoch, epoch)
			require.Equal(t, l.EndOf(tt.index), end)
		}
	}
	require.Equal(t, []int64{20, 35, math.MaxInt64}, []int64{l.EndOf(0), l.EndOf(1), l.EndOf(2)})

	_, ok := l.Predecessor(10)
	require.False(t, ok, "nobody wrote below the start")
	_, ok = l.Predecessor(0)
	require.False(t, ok)
	who, ok := l.Predecessor(20)
	require.True(t, ok)
	require.Equal(t, lead(a, 1), who)
	who, _ = l.Predecessor(21)
	require.Equal(t, lead(a, 3), who)

	require.True(t, l.Covers(10))
	require.False(t, l.Covers(9))
	require.False(t, lineage.Lineage(nil).Covers(0))
	require.Equal(t, "[0000000a:1@10 0000000a:3@20 0000000b:7@35]", l.String())
}

func TestSliceKeepsTheStartsOfItsEntries(t *testing.T) {
	l := lineage.Lineage{entry(a, 1, 10), entry(a, 3, 20), entry(b, 7, 35)}
	for _, tt := range []struct {
		base, end int64
		want      lineage.Lineage
	}{
		{10, 20, l[:1]}, {12, 15, l[:1]}, {12, 20, l[:1]}, {12, 21, l[:2]}, {20, 35, l[1:2]}, {20, 36, l[1:]}, {34, 36, l[1:]},
		{35, math.MaxInt64, l[2:]}, {15, 15, nil}, {16, 15, nil}, {0, 10, nil}, {0, 11, l[:1]},
	} {
		require.Equal(t, tt.want, l.Slice(tt.base, tt.end), "[%d, %d)", tt.base, tt.end)
	}
	require.Nil(t, lineage.Lineage(nil).Slice(0, 5))
}

func TestAppendRisesOrRefuses(t *testing.T) {
	var l lineage.Lineage
	for _, e := range []lineage.Entry{entry(a, 0, 0), entry(a, 2, 5)} {
		var err error
		l, err = l.Append(e)
		require.NoError(t, err)
	}
	same, err := l.Append(entry(a, 2, 5))
	require.NoError(t, err)
	require.Equal(t, l, same, "the same entry again")
	replaced, err := l.Append(entry(b, 3, 5))
	require.NoError(t, err)
	require.Equal(t, lineage.Lineage{entry(a, 0, 0), entry(b, 3, 5)}, replaced, "who wrote nothing leaves its place")
	require.Equal(t, lineage.Lineage{entry(a, 0, 0), entry(a, 2, 5)}, l, "the receiver is not modified")
	for _, bad := range []lineage.Entry{
		entry(a, 2, 6), entry(b, 2, 5), entry(a, 1, 9), entry(a, 3, 4), entry(0, 3, 9), entry(math.MaxUint32, 3, 9), entry(a, -1, 9), entry(a, 1, 5),
	} {
		next, err := l.Append(bad)
		require.ErrorIs(t, err, lineage.ErrInvalid, "%v", bad)
		require.Nil(t, next)
		var e *lineage.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, bad, e.Entry)
	}
	_, err = lineage.Lineage(nil).Append(entry(a, 0, -1))
	require.ErrorIs(t, err, lineage.ErrInvalid)
}

func TestValuesShareNoSpareCapacity(t *testing.T) {
	l := slices.Grow(lineage.Lineage{entry(a, 1, 0), entry(a, 2, 5), entry(a, 3, 9)}, 8)
	cut := l.DropAt(5)
	branch, err := cut.Append(entry(b, 9, 4))
	require.NoError(t, err)
	require.Equal(t, entry(a, 2, 5), l[1], "appending to a cut lineage leaves the other alone")
	require.Equal(t, entry(b, 9, 4), branch[1])
	_, err = l.Append(entry(b, 9, 20))
	require.NoError(t, err)
	require.Equal(t, lineage.Entry{}, l[:4][3], "nothing is written behind a shared value")
}

func TestDropAtAlwaysTrims(t *testing.T) { // KAFKA-10706
	l := lineage.Lineage{entry(a, 1, 0), entry(a, 2, 5), entry(a, 3, 9)}
	for _, tt := range []struct {
		at   int64
		keep int
	}{{0, 0}, {1, 1}, {5, 1}, {6, 2}, {9, 2}, {10, 3}, {1000, 3}} {
		require.Equal(t, l[:tt.keep], l.DropAt(tt.at), "at %d", tt.at)
	}
}

func TestTrimBelowKeepsWhoCoversTheStart(t *testing.T) {
	l := lineage.Lineage{entry(a, 1, 0), entry(a, 2, 5), entry(a, 3, 9)}
	for _, tt := range []struct {
		start int64
		from  int
	}{{0, 0}, {4, 0}, {5, 1}, {8, 1}, {9, 2}, {100, 2}} {
		require.Equal(t, l[tt.from:], l.TrimBelow(tt.start), "start %d", tt.start)
	}
	require.Empty(t, lineage.Lineage(nil).TrimBelow(5))
}

func TestEqual(t *testing.T) {
	l := lineage.Lineage{entry(a, 1, 0), entry(a, 2, 5), entry(a, 3, 9)}
	m := lineage.Lineage{entry(a, 1, 0), entry(a, 2, 5), entry(b, 4, 9)}
	require.True(t, lineage.EqualBelow(l, m, 9))
	require.False(t, lineage.EqualBelow(l, m, 10))
	require.False(t, lineage.EqualBelow(l, m[1:], 9))
	require.True(t, lineage.EqualIn(l, m[1:], 5, 9))
	require.False(t, lineage.EqualIn(l, m[1:], 4, 9))
	require.False(t, lineage.EqualIn(l, m, 5, 10))
	require.True(t, lineage.EqualIn(l, nil, 3, 3))
	require.False(t, lineage.EqualIn(l, nil, 3, 4))
	require.False(t, lineage.EqualIn(nil, nil, 3, 4), "who wrote it is unknown")
}

func TestValidate(t *testing.T) {
	require.NoError(t, lineage.Lineage(nil).Validate())
	for name, bad := range map[string]lineage.Lineage{
		"incarnation 0":         {entry(0, 1, 0)},
		"incarnation 32 bits":   {entry(1<<31, 1, 0)},
		"negative epoch":        {entry(a, -1, 0)},
		"negative start":        {entry(a, 1, -1)},
		"equal starts":          {entry(a, 1, 0), entry(a, 2, 0)},
		"falling starts":        {entry(a, 1, 5), entry(a, 2, 4)},
		"an epoch twice":        {entry(a, 1, 0), entry(a, 1, 4)},
		"falling epochs":        {entry(a, 2, 0), entry(a, 1, 4)},
		"no rise over clusters": {entry(a, 2, 0), entry(b, 2, 4)},
	} {
		require.ErrorIs(t, bad.Validate(), lineage.ErrInvalid, name)
	}
}

// Each scenario has the numbers of its report; want is the offset (exclusive)
// up to which the two logs share their records.
func TestCommonPrefixScenarios(t *testing.T) {
	tests := []struct {
		name       string
		x          lineage.Lineage
		xEnd       int64
		y          lineage.Lineage
		yEnd, want int64
	}{
		{
			// A and B hold m0, m1; A's high watermark is 1. By watermark A
			// would cut m1 and lose it; by leadership nothing is cut.
			"KIP-101 loss", lineage.Lineage{entry(a, 0, 0)}, 2, lineage.Lineage{entry(a, 0, 0)}, 2, 2,
		},
		{
			// Both crash; A comes back with m0 only, leads epoch 1, writes m2
			// at 1; B comes back with m0, m1.
			"KIP-101 divergence", lineage.Lineage{entry(a, 0, 0)}, 2, lineage.Lineage{entry(a, 0, 0), entry(a, 1, 1)}, 2, 1,
		},
		{
			// A: epoch 1 0-19, then 3 with 20-24. B: epoch 1 0-9, 2 with 10-14.
			"KIP-279 fast failovers",
			lineage.Lineage{entry(a, 1, 0), entry(a, 2, 10)}, 15,
			lineage.Lineage{entry(a, 1, 0), entry(a, 3, 20)}, 25, 10,
		},
		{
			// A: epoch 1 0-9, epoch 3 10-11. B: epoch 1 0-4, epoch 2 one at 5.
			"B020", lineage.Lineage{entry(a, 1, 0), entry(a, 2, 5)}, 6, lineage.Lineage{entry(a, 1, 0), entry(a, 3, 10)}, 12, 5,
		},
		{
			// Source epoch 10 0-100, of which 81-100 are lost and 81-95
			// written anew in epoch 11; the target promoted at 101 in its own
			// epoch 11. Common: records 0 to 80.
			"B213",
			lineage.Lineage{entry(a, 10, 0), entry(a, 11, 81)}, 96,
			lineage.Lineage{entry(a, 10, 0), entry(b, 11, 101)}, 120, 81,
		},
		{
			// C1: clean fail-over, the source wrote one more.
			"C1", lineage.Lineage{entry(a, 0, 0), entry(a, 1, 1), entry(a, 2, 2)}, 3,
			lineage.Lineage{entry(a, 0, 0), entry(a, 1, 1), entry(b, 12, 2)}, 3, 2,
		},
		{
			// C2: an empty replica of the source led; nothing is shared.
			"C2", lineage.Lineage{entry(a, 2, 0)}, 2, lineage.Lineage{entry(a, 0, 0), entry(b, 2, 2)}, 3, 0,
		},
		{
			// C3: half of the source's records were lost.
			"C3", lineage.Lineage{entry(a, 0, 0), entry(a, 2, 1)}, 2, lineage.Lineage{entry(a, 0, 0), entry(b, 2, 2)}, 3, 1,
		},
		{
			// C4: both clusters gave epoch 3 to different records.
			"C4", lineage.Lineage{entry(a, 2, 0), entry(a, 3, 2)}, 3, lineage.Lineage{entry(a, 2, 0), entry(b, 3, 2)}, 3, 2,
		},
		{
			// C5: two mirrors of one source, the second promoted; neither
			// knows the other.
			"C5 siblings", lineage.Lineage{entry(a, 1, 0), entry(a, 2, 40)}, 55,
			lineage.Lineage{entry(a, 1, 0), entry(a, 2, 40), entry(b, 3, 50)}, 60, 50,
		},
		{"one is empty", nil, 0, lineage.Lineage{entry(a, 1, 0)}, 9, 0},
		{"both are empty", nil, 0, nil, 0, 0},
		{"an opened epoch without a record", lineage.Lineage{entry(a, 1, 0), entry(a, 2, 9)}, 9, lineage.Lineage{entry(a, 1, 0), entry(a, 2, 9)}, 30, 9},
		{"the end is not known", lineage.Lineage{entry(a, 1, 0), entry(a, 2, 9)}, 12, lineage.Lineage{entry(a, 1, 0), entry(a, 2, 9)}, math.MaxInt64, 12},
		{"trimmed at different log starts", lineage.Lineage{entry(a, 5, 50), entry(a, 6, 70)}, 90, lineage.Lineage{entry(a, 1, 0), entry(a, 5, 50), entry(b, 9, 60)}, 80, 60},
		{"same leadership, other start: rot", lineage.Lineage{entry(a, 1, 0), entry(a, 2, 8)}, 20, lineage.Lineage{entry(a, 1, 0), entry(a, 2, 9)}, 20, 8},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			require.NoError(t, tt.x.Validate())
			require.NoError(t, tt.y.Validate())
			require.Equal(t, tt.want, lineage.CommonPrefix(tt.x, tt.xEnd, tt.y, tt.yEnd))
			require.Equal(t, tt.want, lineage.CommonPrefix(tt.y, tt.yEnd, tt.x, tt.xEnd), "it is symmetric")
			require.True(t, lineage.EqualIn(tt.x, tt.y, max(first(tt.x), first(tt.y)), tt.want))
		})
	}
	require.Equal(t, lineage.Common{}, lineage.FindCommon(lineage.Lineage{entry(a, 2, 0)}, 9, lineage.Lineage{entry(b, 2, 0)}, 9),
		"no shared entry is not the same as an empty log")
	require.Equal(t, lineage.Common{Last: entry(a, 2, 0), Found: true}, lineage.FindCommon(lineage.Lineage{entry(a, 2, 0)}, 0, lineage.Lineage{entry(a, 2, 0)}, 9))
}

func first(l lineage.Lineage) int64 {
	if len(l) == 0 {
		return 0
	}
	return l[0].StartOffset
}

func TestForkPoint(t *testing.T) {
	l := lineage.Lineage{entry(a, 1, 0), entry(a, 3, 20), entry(b, 7, 35)}
	for _, tt := range []struct {
		name   string
		last   lineage.Leadership
		offset int64
		point  int64
		cut    bool
	}{
		{"still there", lead(a, 1), 20, 20, false},
		{"still there, inside", lead(a, 3), 25, 25, false},
		{"begins at the start", lead(a, 1), 0, 0, false},
		{"read more of a leadership than survived", lead(a, 1), 30, 20, true},
		{"a leadership that is unknown here", lead(a, 2), 30, 20, true},
		{"the same number of another cluster", lead(b, 3), 30, 20, true},
		{"a later epoch than any", lead(a, 9), 50, 50, true},
		{"before all", lead(a, 0), 5, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			point, cut := l.ForkPoint(tt.last, tt.offset)
			require.Equal(t, tt.cut, cut)
			require.Equal(t, tt.point, point)
		})
	}
	_, cut := l[1:].ForkPoint(lead(a, 1), 20)
	require.False(t, cut, "below the lineage nothing can be said")
}

func TestLookUpsAllocateNothing(t *testing.T) {
	x := lineage.Lineage{entry(a, 1, 0), entry(a, 3, 20), entry(b, 7, 35)}
	y := lineage.Lineage{entry(a, 1, 0), entry(a, 2, 15)}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		x.LeadershipAt(22)
		x.EpochAt(22)
		x.Predecessor(22)
		x.Slice(3, 25)
		x.DropAt(30)
		lineage.CommonPrefix(x, 40, y, 20)
	}))
}
