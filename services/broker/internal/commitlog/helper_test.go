package commitlog_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

var (
	testTopic = commitlog.TopicID{0x0a, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	testID    = commitlog.Identity{ClusterID: "cluster-a", TopicID: testTopic, CreationOffset: 7, Partition: 3}
	testNow   = time.UnixMilli(1_700_000_000_000)
	testDir   = "/data/" + commitlog.PartitionDirName(testTopic, 3)
)

func entry(epoch int32, start int64) lineage.Entry {
	return lineage.Entry{Leadership: lineage.Leadership{Incarnation: 77, LeaderEpoch: epoch}, StartOffset: start}
}

// batch makes one batch of n records of about size bytes each.
func batch(tb testing.TB, base int64, epoch int32, n, size int, ts int64) record.Batch {
	tb.Helper()
	b := record.NewBuilder(record.CodecNone)
	for i := range n {
		v := make([]byte, size)
		for j := range v {
			v[j] = byte(base + int64(i)*7 + int64(j))
		}
		require.NoError(tb, b.Append(record.Record{Timestamp: ts + int64(i), Key: fmt.Appendf(nil, "%d", base+int64(i)), Value: v}))
	}
	_, out, err := b.Build(nil)
	require.NoError(tb, err)
	out.SetBaseOffset(base)
	out.SetLeaderEpoch(epoch)
	require.NoError(tb, out.Validate())
	return out
}

func newFS(tb testing.TB) *vfs.MemFS {
	tb.Helper()
	fs := vfs.NewCrashableMem()
	require.NoError(tb, fs.MkdirAll("/data", 0o755))
	root, err := fs.OpenDir("/")
	require.NoError(tb, err)
	require.NoError(tb, root.Sync())
	require.NoError(tb, root.Close())
	return fs
}

func openLog(tb testing.TB, fs vfs.FS, opts commitlog.Options) (*commitlog.Log, commitlog.RecoveryReport) {
	tb.Helper()
	l, report, err := commitlog.Open(fs, testDir, testID, opts)
	require.NoError(tb, err)
	return l, report
}

// newLog opens an empty log with epoch 1 from offset 0 on.
func newLog(tb testing.TB, fs vfs.FS, opts commitlog.Options) *commitlog.Log {
	tb.Helper()
	l, report := openLog(tb, fs, opts)
	require.True(tb, report.Created)
	require.NoError(tb, l.AppendLineage(entry(1, 0)))
	return l
}

// appendN appends n batches of three records each and returns them.
func appendN(tb testing.TB, l *commitlog.Log, n, size int) []record.Batch {
	tb.Helper()
	last, ok := l.Lineage().Last()
	require.True(tb, ok)
	var out []record.Batch
	for range n {
		end := l.End()
		b := batch(tb, end, last.LeaderEpoch, 3, size, testNow.UnixMilli()+end)
		_, err := l.Append(b, commitlog.Position{Offset: end}, testNow)
		require.NoError(tb, err)
		out = append(out, b)
	}
	return out
}

// readAll reads from an offset to the end.
func readAll(tb testing.TB, l *commitlog.Log, from int64, maxBytes int) []record.Batch {
	tb.Helper()
	var out []record.Batch
	for from < l.End() {
		c, err := l.Read(nil, commitlog.ReadRequest{Offset: from, MaxBytes: maxBytes})
		require.NoError(tb, err)
		require.Greater(tb, c.End, from)
		require.NoError(tb, record.Walk(c.Bytes, func(b record.Batch) error { out = append(out, b); return nil }))
		from = c.End
	}
	return out
}

func chainOf(batches []record.Batch) chainhash.Hash {
	var h chainhash.Hash
	for _, b := range batches {
		h = chainhash.Next(h, b)
	}
	return h
}

func requireBatches(tb testing.TB, want, got []record.Batch) {
	tb.Helper()
	require.Len(tb, got, len(want))
	for i := range want {
		require.Equal(tb, []byte(want[i]), []byte(got[i]), "batch %d", i)
	}
}

func fileBytes(tb testing.TB, fs vfs.FS, path string) []byte {
	tb.Helper()
	f, err := fs.Open(path)
	require.NoError(tb, err)
	defer func() { require.NoError(tb, f.Close()) }()
	info, err := f.Stat()
	require.NoError(tb, err)
	b := make([]byte, info.Size())
	if len(b) > 0 {
		_, err = f.ReadAt(b, 0)
		require.NoError(tb, err)
	}
	return b
}

// patch overwrites bytes of a file.
func patch(tb testing.TB, fs vfs.FS, path string, at int64, data []byte) {
	tb.Helper()
	f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	require.NoError(tb, err)
	_, err = f.WriteAt(data, at)
	require.NoError(tb, err)
	require.NoError(tb, f.Sync())
	require.NoError(tb, f.Close())
}

func logPath(fs vfs.FS, base int64) string {
	return fs.PathJoin(testDir, fmt.Sprintf("%020d.log", base))
}

func indexPath(fs vfs.FS, base int64) string {
	return fs.PathJoin(testDir, fmt.Sprintf("%020d.index", base))
}

func rng(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed^0x9e3779b97f4a7c15)) }
