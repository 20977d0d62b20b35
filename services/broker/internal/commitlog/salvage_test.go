package commitlog_test

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

// bytesOf puts batches behind each other.
func bytesOf(batches []record.Batch) []byte {
	var out []byte
	for _, b := range batches {
		out = append(out, b...)
	}
	return out
}

// cutFiles lists what was put aside.
func cutFiles(t *testing.T, fs vfs.FS) []string {
	t.Helper()
	names, err := fs.List(testDir)
	require.NoError(t, err)
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.Contains(n, ".cut-") })
	slices.Sort(names)
	return names
}

// Valid batches behind the one that is not are not a torn tail: what is cut is
// reported and put aside, and later opens neither read nor remove it.
func TestWhatIsCutThoughItMayBeWorthSomethingIsPutAside(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{SegmentBytes: 1000})
	want := appendN(t, l, 12, 60)
	at := len(bytesOf(want[:2]))
	bad := slices.Clone(want[2])
	bad[80] ^= 1
	patch(t, fs, logPath(fs, 0), int64(at), bad)
	segments := l.Segments()
	require.Greater(t, len(segments), 2)

	l, report := openLog(t, fs, commitlog.Options{})
	require.Nil(t, report.Damage)
	require.EqualValues(t, 6, report.End)
	cut := report.Cut
	require.Equal(t, l.Cut(), cut)
	require.EqualValues(t, 6, cut.From)
	require.GreaterOrEqual(t, cut.To, segments[len(segments)-1].Base)
	require.NoError(t, cut.Err)
	require.Error(t, cut.Cause)
	lost := bytesOf(want[3:])
	require.EqualValues(t, len(bad)+len(lost), cut.Bytes)
	require.Equal(t, cut.Bytes, cut.Kept)
	require.Equal(t, "00000000000000000000.log.cut-00000000000000000006", cut.Files[0])
	require.Equal(t, cut.Files, cutFiles(t, fs))
	var kept []byte
	for _, name := range cut.Files {
		kept = append(kept, fileBytes(t, fs, fs.PathJoin(testDir, name))...)
	}
	require.True(t, bytes.Equal(append(bad, lost...), kept))

	again := appendN(t, l, 4, 60)
	require.NoError(t, l.Close())
	l, report = openLog(t, fs, commitlog.Options{})
	require.Nil(t, report.Cut)
	require.Nil(t, l.Cut(), "until the next start")
	require.Empty(t, report.Removed)
	require.Equal(t, cut.Files, cutFiles(t, fs))
	requireBatches(t, append(slices.Clone(want[:2]), again...), readAll(t, l, 0, 1000))
	require.NoError(t, l.Reset(100, chainhash.Hash{1}, nil))
	require.Equal(t, cut.Files, cutFiles(t, fs))
}

// A torn tail is only that: nothing is put aside.
func TestATornTailIsNotPutAside(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 3, 60)
	patch(t, fs, logPath(fs, 0), l.Size(), want[0][:50])
	_, report := openLog(t, fs, commitlog.Options{})
	require.NotNil(t, report.Trimmed)
	require.Nil(t, report.Cut)
	require.Empty(t, cutFiles(t, fs))
}

// Damage below the recovery point is put aside when the log is truncated or reset.
func TestTruncationOfADamagedLogPutsAsideWhatItRemoves(t *testing.T) {
	for name, mend := range map[string]func(l *commitlog.Log) error{
		"truncate": func(l *commitlog.Log) error { return l.TruncateTo(3) },
		"reset":    func(l *commitlog.Log) error { return l.Reset(40, chainhash.Hash{1}, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			fs := newFS(t)
			l := newLog(t, fs, commitlog.Options{})
			want := appendN(t, l, 8, 60)
			require.NoError(t, l.Sync())
			at := len(bytesOf(want[:2]))
			patch(t, fs, logPath(fs, 0), int64(at)+80, []byte{want[2][80] ^ 1})
			l, report := openLog(t, fs, commitlog.Options{})
			require.NotNil(t, report.Damage)
			require.Nil(t, l.Cut(), "nothing is cut yet")
			require.NoError(t, mend(l))
			cut := l.Cut()
			require.EqualValues(t, 6, cut.From)
			require.EqualValues(t, 24, cut.To)
			require.EqualValues(t, len(bytesOf(want))-at, cut.Kept)
			kept := fileBytes(t, fs, fs.PathJoin(testDir, cut.Files[0]))
			require.True(t, bytes.HasSuffix(kept, bytesOf(want[3:])))
		})
	}
}

// Where good bytes of the damaged part are held elsewhere, the tail above them is
// kept if the recovery point proves that it is theirs.
func TestSalvageKeepsTheTailBehindADamage(t *testing.T) {
	for name, opts := range map[string]commitlog.Options{"one segment": {}, "several": {SegmentBytes: 1500}} {
		t.Run(name, func(t *testing.T) {
			fs := newFS(t)
			l := newLog(t, fs, opts)
			want := appendN(t, l, 5, 60)
			// A batch that holds the bytes of an offset searched for, and all of another batch.
			b := record.NewBuilder(record.CodecNone)
			require.NoError(t, b.Append(record.Record{Value: binary.BigEndian.AppendUint64(nil, 30)}))
			require.NoError(t, b.Append(record.Record{Value: batch(t, 30, 1, 3, 60, 5)}))
			_, sly, err := b.Build(nil)
			require.NoError(t, err)
			sly.SetBaseOffset(l.End())
			sly.SetLeaderEpoch(1)
			_, err = l.Append(sly, commitlog.Position{Offset: l.End()}, testNow)
			require.NoError(t, err)
			want = append(want, sly)
			b = record.NewBuilder(record.CodecNone)
			require.NoError(t, b.Append(record.Record{}))
			_, one, err := b.Build(nil)
			require.NoError(t, err)
			one.SetBaseOffset(l.End())
			one.SetLeaderEpoch(1)
			_, err = l.Append(one, commitlog.Position{Offset: l.End()}, testNow)
			require.NoError(t, err)
			want = append(want, one)
			want = append(want, appendN(t, l, 8, 60)...)
			require.NoError(t, l.Sync())
			want = append(want, appendN(t, l, 3, 60)...)
			end, chain := l.Tail()

			patch(t, fs, logPath(fs, 0), 80, []byte{want[0][80] ^ 1})
			if opts.SegmentBytes > 0 {
				require.NoError(t, fs.Remove(indexPath(fs, 0))) // or it would not be looked at
			}
			i := slices.IndexFunc(want, func(b record.Batch) bool { return b.BaseOffset() == 30 })
			require.Positive(t, i)
			at := chainOf(want[:i])
			l, report := openLog(t, fs, opts)
			require.NotNil(t, report.Damage)
			require.EqualValues(t, 0, report.End)

			require.ErrorIs(t, l.Salvage(30, chainhash.Hash{9}, testNow), commitlog.ErrNotSalvaged, "another history")
			require.ErrorIs(t, l.Salvage(31, at, testNow), commitlog.ErrNotSalvaged, "no border")
			require.ErrorIs(t, l.Salvage(0, chainhash.Hash{}, testNow), commitlog.ErrNotSalvaged, "not behind the damage")
			require.ErrorIs(t, l.Salvage(end, chain, testNow), commitlog.ErrNotSalvaged, "above what is proven")
			require.NotNil(t, l.Damage(), "nothing was changed")
			require.Empty(t, cutFiles(t, fs))

			require.NoError(t, l.Salvage(30, at, testNow))
			check := func(l *commitlog.Log) {
				t.Helper()
				require.Nil(t, l.Damage())
				require.EqualValues(t, 30, l.Start())
				gotEnd, gotChain := l.Tail()
				require.Equal(t, end, gotEnd)
				require.Equal(t, chain, gotChain)
				requireBatches(t, want[i:], readAll(t, l, 30, 1000))
			}
			check(l)
			require.Equal(t, end, l.RecoveryPoint())
			require.NotEmpty(t, l.Cut().Files)
			_, ok := l.Lineage().Last()
			require.True(t, ok)
			reopened, report := openLog(t, fs, opts)
			require.Nil(t, report.Damage)
			require.Nil(t, report.Trimmed)
			check(reopened)
			appendN(t, reopened, 2, 60)
		})
	}
}

// A second damage between the border and the recovery point leaves no proof.
func TestSalvageTakesNothingOnTrust(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 10, 60)
	require.NoError(t, l.Sync())
	patch(t, fs, logPath(fs, 0), 80, []byte{want[0][80] ^ 1})
	patch(t, fs, logPath(fs, 0), int64(len(bytesOf(want[:6])))+80, []byte{want[6][80] ^ 1})
	l, _ = openLog(t, fs, commitlog.Options{})
	require.ErrorIs(t, l.Salvage(9, chainOf(want[:3]), testNow), commitlog.ErrNotSalvaged)
	require.NoError(t, l.Salvage(21, chainOf(want[:7]), testNow), "behind both")
	requireBatches(t, want[7:], readAll(t, l, 21, 1000))
}
