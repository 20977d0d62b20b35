package commitlog_test

import (
	"math"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

func TestAppendedBatchesAreReadBackByteForByteOverRollsAndReopening(t *testing.T) {
	for name, fs := range map[string]vfs.FS{"mem": newFS(t), "disk": nil} {
		t.Run(name, func(t *testing.T) {
			dir := testDir
			if fs == nil {
				fs, dir = vfs.Default, t.TempDir()+"/p"
			}
			opts := commitlog.Options{SegmentBytes: 2000, IndexInterval: 300}
			l, _, err := commitlog.Open(fs, dir, testID, opts)
			require.NoError(t, err)
			require.NoError(t, l.AppendLineage(entry(1, 0)))
			want := appendN(t, l, 40, 50)
			check := func() {
				for _, maxBytes := range []int{1, 700, 1 << 20} {
					requireBatches(t, want, readAll(t, l, 0, maxBytes))
				}
				for i, b := range want {
					for o := b.BaseOffset(); o < b.EndOffset(); o++ {
						c, err := l.Read(nil, commitlog.ReadRequest{Offset: o, MaxBytes: 1})
						require.NoError(t, err)
						require.Equal(t, []byte(b), c.Bytes)
					}
					h, err := l.ChainAt(b.BaseOffset())
					require.NoError(t, err)
					require.Equal(t, chainOf(want[:i]), h)
				}
				end, chain := l.Tail()
				require.Equal(t, want[len(want)-1].EndOffset(), end)
				require.Equal(t, chainOf(want), chain)
			}
			check()
			require.NoError(t, l.Close())
			for _, trusted := range []bool{true, false} {
				opts.Trusted = trusted
				var report commitlog.RecoveryReport
				l, report, err = commitlog.Open(fs, dir, testID, opts)
				require.NoError(t, err)
				require.Equal(t, trusted, report.Trusted)
				require.Nil(t, report.Damage)
				require.Nil(t, report.Trimmed)
				check()
				want = append(want, appendN(t, l, 3, 50)...)
				check()
				require.NoError(t, l.Close())
			}
			require.ErrorIs(t, l.Close(), commitlog.ErrClosed)
			_, err = l.Read(nil, commitlog.ReadRequest{Offset: 0})
			require.ErrorIs(t, err, commitlog.ErrClosed)
		})
	}
}

func TestAppendRefusesWhatDoesNotContinueTheLog(t *testing.T) {
	l := newLog(t, newFS(t), commitlog.Options{})
	appendN(t, l, 2, 10)
	_, chain := l.Tail()
	good := batch(t, 6, 1, 3, 10, 0)
	refused := func(b []byte, at commitlog.Position) {
		t.Helper()
		_, err := l.Append(b, at, testNow)
		require.ErrorIs(t, err, commitlog.ErrNotAppendable)
		require.EqualValues(t, 6, l.End())
	}
	refused(good, commitlog.Position{Offset: 5})
	refused(batch(t, 5, 1, 3, 10, 0), commitlog.Position{Offset: 6})
	refused(batch(t, 6, 2, 3, 10, 0), commitlog.Position{Offset: 6})
	refused(good[:len(good)-1], commitlog.Position{Offset: 6})
	refused(append(append([]byte(nil), good...), good...), commitlog.Position{Offset: 6})
	refused(good, commitlog.Position{Offset: 6, CheckChain: true})
	require.NoError(t, l.AppendLineage(entry(2, 8)))
	refused(good, commitlog.Position{Offset: 6}) // reaches over a border of the lineage
	_, err := l.Append(batch(t, 6, 1, 2, 10, 0), commitlog.Position{Offset: 6, CheckChain: true, Chain: chain}, testNow)
	require.NoError(t, err)
	_, err = l.Append(batch(t, 8, 2, 2, 10, 0), commitlog.Position{Offset: 8}, testNow)
	require.NoError(t, err)
	require.Len(t, readAll(t, l, 0, 1), 4)
}

func TestAppendOfSeveralBatchesEqualsAppendingThemOneByOne(t *testing.T) {
	one := newLog(t, newFS(t), commitlog.Options{IndexInterval: 1})
	var all []byte
	var want []record.Batch
	for i := range int64(9) {
		b := batch(t, i*3, 1, 3, 20, i)
		all = append(all, b...)
		want = append(want, b)
	}
	out, err := one.Append(all, commitlog.Position{}, testNow)
	require.NoError(t, err)
	require.Equal(t, commitlog.Appended{Base: 0, End: 27, Chain: chainOf(want)}, out)
	requireBatches(t, want, readAll(t, one, 0, 1))
}

func TestReadStopsAtTheLimitAndRefusesOffsetsOutside(t *testing.T) {
	l := newLog(t, newFS(t), commitlog.Options{})
	appendN(t, l, 5, 10)
	c, err := l.Read(nil, commitlog.ReadRequest{Offset: 4, Limit: 9, MaxBytes: 1 << 20})
	require.NoError(t, err)
	require.EqualValues(t, 3, c.Base)
	require.EqualValues(t, 9, c.End)
	for _, req := range []commitlog.ReadRequest{{Offset: 9, Limit: 9, MaxBytes: 1}, {Offset: 6, Limit: 7, MaxBytes: 1}, {Offset: 15, MaxBytes: 1}} {
		c, err = l.Read(nil, req)
		require.NoError(t, err)
		require.Empty(t, c.Bytes)
		require.Equal(t, c.Base, c.End)
	}
	var out *commitlog.OutOfRangeError
	for _, o := range []int64{-1, 16, math.MaxInt64} {
		_, err = l.Read(nil, commitlog.ReadRequest{Offset: o, MaxBytes: 1})
		require.ErrorAs(t, err, &out)
	}
	buf := make([]byte, 0, 1<<16)
	c, err = l.Read(buf, commitlog.ReadRequest{MaxBytes: 1 << 15})
	require.NoError(t, err)
	require.Same(t, &buf[:1][0], &c.Bytes[0], "the caller's buffer is used")
	require.Len(t, c.Bytes, int(l.Size()))
}

func TestSegmentsRollBySizeAndByAge(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{SegmentAge: time.Minute})
	appendAt := func(now time.Time) {
		_, err := l.Append(batch(t, l.End(), 1, 1, 10, 0), commitlog.Position{Offset: l.End()}, now)
		require.NoError(t, err)
	}
	appendAt(testNow)
	appendAt(testNow.Add(59 * time.Second))
	appendAt(testNow.Add(60 * time.Second))
	_, err := fs.Stat(logPath(fs, 2))
	require.NoError(t, err)
	_, err = fs.Stat(logPath(fs, 1))
	require.Error(t, err)
	require.NoError(t, l.Roll())
	require.NoError(t, l.Roll(), "an empty segment is not rolled")
	_, err = fs.Stat(logPath(fs, 3))
	require.NoError(t, err)
	require.Len(t, readAll(t, l, 0, 1000), 3)
}

func TestTruncateToAnyBorderKeepsExactlyWhatIsBelow(t *testing.T) {
	for cut := 0; cut <= 20; cut++ {
		fs := newFS(t)
		opts := commitlog.Options{SegmentBytes: 1000, IndexInterval: 200}
		l := newLog(t, fs, opts)
		want := appendN(t, l, 20, 30)
		require.NoError(t, l.Sync())
		at := int64(cut * 3)
		if cut > 0 && cut < 20 {
			var inside *commitlog.NotBorderError
			require.ErrorAs(t, l.TruncateTo(at+1), &inside)
			require.Equal(t, at, inside.Below)
			require.Equal(t, at+3, inside.Above)
		}
		require.NoError(t, l.TruncateTo(at))
		want = want[:cut]
		check := func() {
			t.Helper()
			require.Equal(t, int64(len(want)*3), l.End())
			requireBatches(t, want, readAll(t, l, 0, 500))
			end, chain := l.Tail()
			h, err := l.ChainAt(end)
			require.NoError(t, err)
			require.Equal(t, chainOf(want), chain)
			require.Equal(t, chain, h)
		}
		check()
		if cut == 0 {
			require.Empty(t, l.Lineage())
			require.NoError(t, l.AppendLineage(entry(2, 0)))
		} else {
			require.NoError(t, l.AppendLineage(entry(2, at)))
		}
		want = append(want, appendN(t, l, 7, 30)...)
		check()
		require.NoError(t, l.Close())
		for _, trusted := range []bool{true, false} {
			opts.Trusted = trusted
			var report commitlog.RecoveryReport
			l, report = openLog(t, fs, opts)
			require.Nil(t, report.Damage)
			require.Nil(t, report.Trimmed)
			require.Empty(t, report.RebuiltIndexes)
			check()
			require.NoError(t, l.Close())
		}
	}
}

func TestResetStartsAtTheGivenBorder(t *testing.T) {
	fs := newFS(t)
	opts := commitlog.Options{SegmentBytes: 500}
	l := newLog(t, fs, opts)
	appendN(t, l, 10, 30)
	chain := chainhash.Hash{1, 2, 3}
	for _, at := range []int64{1000, 5, 0, 6} {
		require.NoError(t, l.Reset(at, chain, lineage.Lineage{entry(4, 0), entry(6, at+6)}))
		require.Equal(t, at, l.Start())
		require.Equal(t, at, l.End())
		for i := range int64(4) {
			epoch := int32(4)
			if i >= 2 {
				epoch = 6
			}
			_, err := l.Append(batch(t, at+i*3, epoch, 3, 30, 0), commitlog.Position{Offset: at + i*3, Chain: chain, CheckChain: i == 0}, testNow)
			require.NoError(t, err)
		}
		require.Len(t, readAll(t, l, at, 1), 4)
		h, err := l.ChainAt(at)
		require.NoError(t, err)
		require.Equal(t, chain, h)
		require.NoError(t, l.Close())
		var report commitlog.RecoveryReport
		l, report = openLog(t, fs, opts)
		require.Equal(t, at, report.Start)
		require.Equal(t, at+12, report.End)
		require.Nil(t, report.Damage)
		require.Len(t, readAll(t, l, at, 1), 4)
	}
}

func TestAdvanceStartRemovesWholeSegmentsOnly(t *testing.T) {
	fs := newFS(t)
	opts := commitlog.Options{SegmentBytes: 1000}
	l := newLog(t, fs, opts)
	appendN(t, l, 20, 30)
	before := l.Size()
	require.NoError(t, l.AdvanceStart(31))
	require.NoError(t, l.AdvanceStart(10), "never falls")
	require.EqualValues(t, 31, l.Start())
	require.Less(t, l.Size(), before)
	c, err := l.Read(nil, commitlog.ReadRequest{Offset: 31, MaxBytes: 1})
	require.NoError(t, err)
	require.EqualValues(t, 30, c.Base)
	var out *commitlog.OutOfRangeError
	_, err = l.Read(nil, commitlog.ReadRequest{Offset: 30, MaxBytes: 1})
	require.ErrorAs(t, err, &out)
	require.ErrorAs(t, l.AdvanceStart(61), &out)
	require.ErrorAs(t, l.TruncateTo(30), &out)
	size := l.Size()
	crashed := fs.CrashClone(vfs.CrashCloneCfg{})
	l, report := openLog(t, crashed, opts)
	require.EqualValues(t, 31, report.Start)
	require.EqualValues(t, 60, report.End)
	require.Equal(t, size, l.Size())
	require.NoError(t, l.AdvanceStart(60))
	require.EqualValues(t, 60, l.Start())
	appendN(t, l, 2, 30)
	require.Len(t, readAll(t, l, 60, 1), 2)
}

func TestLineageMayOnlyChangeAboveTheEnd(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	appendN(t, l, 2, 10)
	require.ErrorIs(t, l.AppendLineage(entry(2, 5)), commitlog.ErrLineage)
	require.ErrorIs(t, l.SetLineage(lineage.Lineage{entry(3, 0)}), commitlog.ErrLineage)
	require.ErrorIs(t, l.SetLineage(nil), commitlog.ErrLineage)
	require.ErrorIs(t, l.AppendLineage(entry(1, 9)), commitlog.ErrLineage)
	require.NoError(t, l.AppendLineage(entry(2, 6)))
	require.NoError(t, l.AppendLineage(entry(5, 6)), "an epoch that wrote nothing is replaced")
	require.NoError(t, l.AppendLineage(entry(1, 0)), "what is there already changes nothing")
	require.NoError(t, l.SetLineage(lineage.Lineage{entry(1, 0), entry(7, 6), entry(8, 20)}))
	want := l.Lineage()
	l, _ = openLog(t, fs.CrashClone(vfs.CrashCloneCfg{}), commitlog.Options{})
	// The batches were never synced and are gone; what was decided is not.
	require.EqualValues(t, 0, l.End())
	require.Equal(t, want, l.Lineage())
}

func TestOffsetForTimeFindsTheFirstBatchThatReachesTheTime(t *testing.T) {
	for seed := range uint64(30) {
		r := rng(seed)
		l := newLog(t, newFS(t), commitlog.Options{SegmentBytes: 600, IndexInterval: 250})
		var all []record.Batch
		for range 40 {
			b := batch(t, l.End(), 1, 1+r.IntN(3), 10, int64(r.IntN(1000)))
			_, err := l.Append(b, commitlog.Position{Offset: l.End()}, testNow)
			require.NoError(t, err)
			all = append(all, b)
		}
		if r.IntN(2) == 0 {
			require.NoError(t, l.AdvanceStart(int64(r.IntN(int(l.End())))))
		}
		for ts := int64(-5); ts < 1010; ts += 13 {
			hit, found, err := l.OffsetForTime(ts)
			require.NoError(t, err)
			want := commitlog.TimeHit{}
			for _, b := range all {
				if b.EndOffset() > l.Start() && b.MaxTimestamp() >= ts {
					want = commitlog.TimeHit{Base: b.BaseOffset(), End: b.EndOffset(), MaxTimestamp: b.MaxTimestamp()}
					break
				}
			}
			require.Equal(t, want.End > 0, found, "seed %d time %d", seed, ts)
			require.Equal(t, want, hit, "seed %d time %d", seed, ts)
		}
	}
}

func TestDeferredAppendsBecomeVisibleAndDurableTogether(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{Flush: commitlog.FlushAlways})
	for i := range int64(3) {
		_, err := l.AppendDeferred(batch(t, i*2, 1, 2, 10, 0), commitlog.Position{Offset: i * 2}, testNow)
		require.NoError(t, err)
	}
	require.EqualValues(t, 0, l.End())
	require.NoError(t, l.Flush())
	require.EqualValues(t, 6, l.End())
	l, report := openLog(t, fs.CrashClone(vfs.CrashCloneCfg{}), commitlog.Options{})
	require.EqualValues(t, 6, report.End)
	require.Len(t, readAll(t, l, 0, 1), 3)
}

func TestSegmentsDescribeTheLog(t *testing.T) {
	l := newLog(t, newFS(t), commitlog.Options{})
	appendN(t, l, 2, 30)
	require.NoError(t, l.SetRolling(400, 0))
	require.Error(t, l.SetRolling(-1, 0))
	appendN(t, l, 6, 30)
	all := l.Segments()
	require.Greater(t, len(all), 2)
	var bytes, next int64
	for i, s := range all {
		require.Equal(t, next, s.Base)
		require.Equal(t, i == len(all)-1, s.Active)
		h, err := l.ChainAt(s.Base)
		require.NoError(t, err)
		require.Equal(t, h, s.BaseChain)
		require.Equal(t, testNow.UnixMilli()+s.End-3+2, s.MaxTimestamp)
		bytes += s.Bytes
		next = s.End
	}
	require.Equal(t, l.End(), next)
	require.Equal(t, l.Size(), bytes)
	for _, at := range []int64{0, 9, all[1].Base, next} {
		want := int64(0)
		for _, b := range readAll(t, l, at, 1) {
			want += int64(len(b))
		}
		got, err := l.BytesFrom(at)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, chain := l.Tail()
	require.Equal(t, chain, all[len(all)-1].EndChain)
}
