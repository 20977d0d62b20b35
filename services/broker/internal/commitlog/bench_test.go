package commitlog_test

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

func BenchmarkAppend(b *testing.B) {
	for _, records := range []int{1, 16, 256} {
		for _, flush := range []commitlog.FlushPolicy{commitlog.FlushOS, commitlog.FlushAlways} {
			b.Run(fmt.Sprintf("records=%d/flush=%v", records, flush), func(b *testing.B) {
				l, _, err := commitlog.Open(vfs.Default, b.TempDir()+"/p", testID, commitlog.Options{Flush: flush})
				require.NoError(b, err)
				require.NoError(b, l.AppendLineage(entry(1, 0)))
				data := batch(b, 0, 1, records, 1000, 0)
				b.SetBytes(int64(len(data)))
				b.ReportAllocs()
				for end := int64(0); b.Loop(); {
					data.SetBaseOffset(end)
					out, err := l.Append(data, commitlog.Position{Offset: end}, testNow)
					if err != nil {
						b.Fatal(err)
					}
					end = out.End
					if end > 2_000_000 {
						// Keeps the disk small.
						b.StopTimer()
						require.NoError(b, l.Reset(0, [16]byte{}, l.Lineage()))
						end = 0
						b.StartTimer()
					}
				}
				require.NoError(b, l.Close())
			})
		}
	}
}

func filled(b *testing.B, records, total int, opts commitlog.Options) (*commitlog.Log, string) {
	b.Helper()
	dir := b.TempDir() + "/p"
	l, _, err := commitlog.Open(vfs.Default, dir, testID, opts)
	require.NoError(b, err)
	require.NoError(b, l.AppendLineage(entry(1, 0)))
	data := batch(b, 0, 1, records, 1000, 0)
	for n := 0; n < total; n += len(data) {
		data.SetBaseOffset(l.End())
		_, err := l.Append(data, commitlog.Position{Offset: l.End()}, testNow)
		require.NoError(b, err)
	}
	return l, dir
}

func BenchmarkReadSequentially(b *testing.B) {
	for _, records := range []int{1, 64} {
		b.Run(fmt.Sprintf("records=%d", records), func(b *testing.B) {
			l, _ := filled(b, records, 64<<20, commitlog.Options{})
			buf := make([]byte, 0, 2<<20)
			at := int64(0)
			b.ReportAllocs()
			var total int64
			for b.Loop() {
				c, err := l.Read(buf, commitlog.ReadRequest{Offset: at, MaxBytes: 1 << 20})
				if err != nil {
					b.Fatal(err)
				}
				total += int64(len(c.Bytes))
				if at = c.End; at == l.End() {
					at = 0
				}
			}
			b.SetBytes(total / int64(b.N))
			require.NoError(b, l.Close())
		})
	}
}

func BenchmarkRecoveryScan(b *testing.B) {
	for _, records := range []int{1, 64} {
		b.Run(fmt.Sprintf("records=%d", records), func(b *testing.B) {
			const size = 128 << 20
			l, dir := filled(b, records, size, commitlog.Options{SegmentBytes: 1 << 30})
			require.NoError(b, l.Close())
			b.SetBytes(l.Size())
			b.ReportAllocs()
			for b.Loop() {
				l, report, err := commitlog.Open(vfs.Default, dir, testID, commitlog.Options{})
				if err != nil || report.ScannedBytes < size {
					b.Fatal(err, report)
				}
				// Not closed cleanly on purpose: the next Open scans again.
				_ = l
			}
		})
	}
}

func BenchmarkChainAt(b *testing.B) {
	l, _ := filled(b, 4, 16<<20, commitlog.Options{})
	var borders []int64
	for at := int64(0); at < l.End(); at += 4 {
		borders = append(borders, at)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, err := l.ChainAt(borders[i*7919%len(borders)]); err != nil {
			b.Fatal(err)
		}
	}
	require.NoError(b, l.Close())
}
