package replica_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// quiet is a leading partition outside of a bubble whose ranges are all accepted
// at once and whose bytes are not kept.
func quiet(tb testing.TB, fs vfs.FS, dir string) *replica.Partition {
	tb.Helper()
	s := newScene(tb, 1)
	s.world.configs["wal.max.unuploaded.bytes"] = "1GiB"
	r := newRLM(s.world, s.bucket, 1)
	r.forgetful = true
	s.serve("rlm:1", func(g *grpc.Server) { registerRLM(g, r) })
	r.epoch = s.world.addRLM(1, "rlm:1", "a")
	log := slog.New(slog.DiscardHandler)
	meta, err := metaclient.New(metaclient.Options{Addresses: []string{"meta:1"}, Dial: s.dial, Logger: log})
	require.NoError(tb, err)
	cfg := replica.DefaultConfig()
	cfg.BrokerID, cfg.AdvertiseAddress, cfg.Zone, cfg.DataDir = 1, "broker:1", "a", dir
	cfg.MaxUnuploadedBytes = 1 << 30
	m, err := replica.NewManager(cfg, replica.Deps{FS: fs, Metadata: meta, DialRemoteLog: s.dial, DialBroker: s.dial, Logger: log})
	require.NoError(tb, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	tb.Cleanup(func() {
		cancel()
		require.NoError(tb, <-done)
		require.NoError(tb, meta.Close())
	})
	var p *replica.Partition
	require.Eventually(tb, func() bool {
		var err error
		p, err = m.Lookup(topicName, 0)
		return err == nil && p.Offsets().Leading
	}, 10*time.Second, time.Millisecond)
	return p
}

func bigBatch(tb testing.TB, records, size int, sequence int32) []byte {
	b := record.NewBuilder(record.CodecNone)
	if sequence >= 0 {
		b.SetProducer(producerA, 0, sequence)
	}
	for i := range records {
		require.NoError(tb, b.Append(record.Record{Timestamp: int64(i), Value: make([]byte, size)}))
	}
	out, _, err := b.Build(nil)
	require.NoError(tb, err)
	return out
}

// progress waits until the object end moves on, if anything is above it.
func progress(b *testing.B, p *replica.Partition) {
	if o := p.Offsets(); o.HighWatermark < o.LogEnd {
		if err := p.WaitVisible(b.Context(), o.HighWatermark); err != nil {
			b.Error(err)
		}
	}
}

// BenchmarkSubmit appends raw batches at LEADER: allocations are per batch,
// whatever the number of records.
func BenchmarkSubmit(b *testing.B) {
	for _, c := range []struct{ records, size int }{{1, 100}, {1000, 60}, {64, 1024}, {1000, 1000}} {
		b.Run(fmt.Sprintf("records=%d/bytes=%d", c.records, c.size), func(b *testing.B) {
			p := quiet(b, vfs.Default, b.TempDir())
			proto := bigBatch(b, c.records, c.size, -1)
			ctx := b.Context()
			b.SetBytes(int64(len(proto)))
			b.ReportAllocs()
			for b.Loop() {
				for {
					t, err := p.Submit(ctx, replica.AppendInput{Batches: proto, Level: partition.Leader})
					if err != nil {
						progress(b, p) // the backlog is full: the stub is slower
						continue
					}
					if _, err := t.Wait(ctx); err != nil {
						b.Fatal(err)
					}
					break
				}
			}
		})
	}
}

// BenchmarkSubmitParallel shows how many appends share a write.
func BenchmarkSubmitParallel(b *testing.B) {
	p := quiet(b, vfs.Default, b.TempDir())
	b.SetParallelism(32)
	b.ReportAllocs()
	var full atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		ctx := b.Context()
		mine := bigBatch(b, 10, 100, -1)
		for pb.Next() {
			for {
				t, err := p.Submit(ctx, replica.AppendInput{Batches: mine, Level: partition.Leader})
				if err != nil {
					full.Add(1)
					progress(b, p)
					continue
				}
				if _, err := t.Wait(ctx); err != nil {
					b.Error(err)
				}
				break
			}
		}
	})
	b.ReportMetric(float64(full.Load())/float64(b.N), "refused/op")
}

// The append path allocates nothing per record, and little per batch.
func TestAppendAllocatesPerBatchOnly(t *testing.T) {
	p := quiet(t, vfs.Default, t.TempDir())
	ctx := t.Context()
	allocs := func(records int) float64 {
		in := bigBatch(t, records, 20, -1)
		return testing.AllocsPerRun(200, func() {
			ticket, err := p.Submit(ctx, replica.AppendInput{Batches: in, Level: partition.Leader})
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := ticket.Wait(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	one, many := allocs(1), allocs(2000)
	t.Logf("allocations for a batch of 1 record: %.1f, of 2000: %.1f (the feed's included)", one, many)
	// The feed runs beside and its allocations are counted too: one range and its
	// messages for each batch at most.
	require.Less(t, many, one+60)
}
