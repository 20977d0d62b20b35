package rlm_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/objstore/gcs"
	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	"github.com/braidlog/braid/services/rlm/rlmtest"
)

// TestFaultyBucket runs ranges through the real client library and a bucket
// that fails once or twice, and reads them back.
func TestFaultyBucket(t *testing.T) {
	create := func(a gcsemu.Action, n int) gcsemu.Rule {
		return gcsemu.Rule{Op: gcsemu.OpCreate, ObjectContains: "/wal/", Action: a, Count: n}
	}
	read := func(a gcsemu.Action, bytes int64) gcsemu.Rule {
		return gcsemu.Rule{Op: gcsemu.OpRead, ObjectContains: "/wal/", Action: a, Count: 1, Bytes: bytes}
	}
	late := create(gcsemu.ActLate, 1)
	late.Late = gcsemu.Duration(300 * time.Millisecond)
	truncated := create(gcsemu.ActTruncate, 1)
	for name, c := range map[string]struct {
		rule gcsemu.Rule
		// stray is how many objects beside the committed ones may be left.
		stray int
	}{
		"B169 503 twice":                        {create(gcsemu.ActStatus, 2), 0},
		"B170 stored, the answer is cut off":    {create(gcsemu.ActCutAfter, 1), 0},
		"B170 stored, and 503":                  {create(gcsemu.ActStatusAfter, 1), 0},
		"B171 cut off, stored later":            {late, 1}, // or refused, when the repeat under the same name was faster
		"B173 the upload is never answered":     {create(gcsemu.ActHang, 1), 0},
		"B173 stored and never answered":        {create(gcsemu.ActHangAfter, 1), 1},
		"B183 arrives empty":                    {truncated, 1},
		"B175 a read stops in the middle":       {read(gcsemu.ActCutBody, 100), 0},
		"B177 a bit flips on the way to us":     {read(gcsemu.ActFlip, 90), 0},
		"the bucket is as slow as a cloud's is": {gcsemu.Rule{Latency: gcsemu.Latency{Base: gcsemu.Duration(40 * time.Millisecond), Jitter: gcsemu.Duration(40 * time.Millisecond)}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			emu, err := gcsemu.Start(gcsemu.Options{StorageRoot: t.TempDir(), Buckets: []string{"harbour"}, Seed: 1})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, emu.Close()) })
			cfg := gcs.DefaultConfig("harbour")
			cfg.Endpoint = emu.Endpoint()
			store, err := gcs.Open(t.Context(), cfg)
			require.NoError(t, err)
			t.Cleanup(func() { _ = store.Close() })
			rlmtest.Mark(t, store, clusterID, walobjecttest.Incarnation)
			m := startMetadata(t)
			i := rlmtest.Start(t, rlmtest.Options{Metadata: []string{m.address}, Bucket: store})
			i.WaitRegistered(0)
			require.NoError(t, emu.SetRules(c.rule))

			conn := i.Conn()
			s, err := dial(t, conn, initial())
			require.NoError(t, err)
			p, q := walobjecttest.NewPartition(5, 0), walobjecttest.NewPartition(5, 1)
			begin := time.Now()
			const n = 10
			for range n {
				s.send(next(p, 1, 500))
				s.send(next(q, 1, 500))
			}
			for range 2 * n {
				require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
			}
			require.Less(t, time.Since(begin), 20*time.Second)
			total := 0
			for _, commit := range m.commits() {
				for _, d := range commit.GetRanges() {
					got, err := readWal(t, conn, commit.GetObject(), d.GetPosition(), d.GetLengthBytes())
					require.NoError(t, err)
					require.NoError(t, walobject.VerifyRange(d, got))
					total++
				}
			}
			require.Equal(t, 2*n, total, "each range once")
			require.LessOrEqual(t, objects(t, store), len(m.commits())+c.stray)
			require.GreaterOrEqual(t, objects(t, store), len(m.commits()))
		})
	}
}

// objects counts the combined objects in a bucket.
func objects(t *testing.T, store *gcs.Store) (n int) {
	t.Helper()
	page, _, err := store.ListPage(t.Context(), "", "", 0)
	require.NoError(t, err)
	for _, a := range page {
		if strings.HasPrefix(a.Name, walobject.Prefix(clusterID)) {
			n++
		}
	}
	return n
}
