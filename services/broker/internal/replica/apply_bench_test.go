package replica

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// follower is a partition that follows, on a log of its own, with nothing around
// it: what is measured is what happens to a range once it has come.
type follower struct {
	p     *Partition
	log   *commitlog.Log
	fence partition.Fence
	end   int64
	hash  chainhash.Hash
}

func newFollowerAlone(tb testing.TB, fs vfs.FS, dir string) *follower {
	tb.Helper()
	cfg := DefaultConfig()
	cfg.BrokerID = 2
	m := &Manager{cfg: cfg, log: slog.New(slog.DiscardHandler), caughtUp: make(chan struct{}, 1)}
	m.root, m.endRoot = context.WithCancel(tb.Context())
	tb.Cleanup(m.endRoot)
	var err error
	m.metrics, err = newMetrics(nil, m)
	require.NoError(tb, err)
	m.copier = newCopier(m)
	data, err := commitlog.OpenDataDir(fs, dir, commitlog.Owner{ClusterID: "11111111-2222-4333-8444-555555555555", BrokerID: 2}, "boot")
	require.NoError(tb, err)
	topic, err := commitlog.ParseTopicID("aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee")
	require.NoError(tb, err)
	log, _, err := data.OpenLog(commitlog.Identity{TopicID: topic, CreationOffset: 3}, commitlog.Options{})
	require.NoError(tb, err)
	tb.Cleanup(func() {
		require.NoError(tb, log.Close())
		require.NoError(tb, data.Close(true))
	})
	f := &follower{log: log, fence: partition.Fence{Incarnation: 7, LeaderEpoch: 1, BrokerEpoch: 5}}
	f.p = &Partition{mgr: m, topic: "t", log: log, machine: partition.New(2, 6, partition.LogFacts{})}
	f.p.tasks, f.p.endTasks = context.WithCancel(m.root)
	f.p.fence = f.fence
	f.p.mu.Lock()
	defer f.p.mu.Unlock()
	f.p.busy = true // no writer but the caller
	f.p.step(partition.ViewReset{View: partition.View{
		Fence: f.fence, Leader: 1, Opened: true, Lineage: lineage.Lineage{{Leadership: f.fence.Leadership()}},
	}}, false)
	f.drainEvents()
	return f
}

// drainEvents does what the writer does; mu is held.
func (f *follower) drainEvents() {
	for !f.p.events.empty() {
		f.p.handle(f.p.events.take())
	}
}

// next makes the bytes of the next committed range stand at their place, and
// tells the machine that they are committed.
func (f *follower) next(tb testing.TB, data []byte) *copyJob {
	rg := remote.Located{Range: remote.Range{Base: f.end, Length: int64(len(data))}, BaseHash: f.hash, BaseKnown: true}
	for rest := data; len(rest) > 0; {
		b := record.Batch(rest)
		b = b[:b.Length()]
		b.SetBaseOffset(f.end)
		b.SetLeaderEpoch(f.fence.LeaderEpoch)
		f.end, f.hash = b.EndOffset(), chainhash.Next(f.hash, b)
		rest = rest[len(b):]
	}
	rg.End, rg.EndHash = f.end, f.hash
	f.p.mu.Lock()
	defer f.p.mu.Unlock()
	f.p.copying = true // as if it was asked for
	f.p.step(partition.RangeCommitted{Base: rg.Base, End: rg.End, EndHash: rg.EndHash}, false)
	_, _, attempt, ok := f.p.machine.Wanted()
	if !ok {
		tb.Fatal("nothing is wanted")
	}
	return &copyJob{p: f.p, attempt: attempt, rg: rg, lineage: lineage.Lineage{{Leadership: f.fence.Leadership()}}, ctx: f.p.tasks}
}

func (f *follower) take(j *copyJob, data []byte) {
	f.p.mu.Lock()
	f.p.handle(copied{job: j, data: data})
	f.p.mu.Unlock()
}

// rangeOf builds batches, of an idempotent producer when sequence >= 0.
func rangeOf(tb testing.TB, batches, records, size int, sequence int32) []byte {
	var out []byte
	for range batches {
		b := record.NewBuilder(record.CodecNone)
		if sequence >= 0 {
			b.SetProducer(7<<32|1, 0, sequence)
			sequence += int32(records)
		}
		for i := range records {
			require.NoError(tb, b.Append(record.Record{Timestamp: int64(i), Value: make([]byte, size)}))
		}
		var err error
		out, _, err = b.Build(out)
		require.NoError(tb, err)
	}
	return out
}

// BenchmarkFollowerApply is one committed range that was fetched and verified: it
// is compared with the log's chain hash, appended and its producers noted.
func BenchmarkFollowerApply(b *testing.B) {
	for _, c := range []struct{ batches, records, size int }{{1, 1, 100}, {1, 100, 1000}, {10, 100, 1000}, {100, 10, 100}} {
		b.Run(fmt.Sprintf("batches=%d/records=%d/bytes=%d", c.batches, c.records, c.size), func(b *testing.B) {
			f := newFollowerAlone(b, vfs.Default, b.TempDir())
			data := rangeOf(b, c.batches, c.records, c.size, -1)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				f.take(f.next(b, data), data)
			}
			if f.log.End() != f.end {
				b.Fatalf("the log ends at %d, not at %d", f.log.End(), f.end)
			}
		})
	}
}

// A follower's work is per range, not per record.
func TestFollowerApplyAllocatesPerRangeOnly(t *testing.T) {
	f := newFollowerAlone(t, vfs.Default, t.TempDir())
	allocs := func(records int) float64 {
		data := rangeOf(t, 1, records, 20, 0)
		return testing.AllocsPerRun(100, func() {
			f.take(f.next(t, data), data)
		})
	}
	one, many := allocs(1), allocs(2000)
	t.Logf("allocations for a range of 1 record: %.1f, of 2000: %.1f (the job's own included)", one, many)
	require.Equal(t, f.end, f.log.End())
	require.LessOrEqual(t, many, one+3)
	require.Equal(t, f.end, f.p.own.End(), "the producer state follows")
}
