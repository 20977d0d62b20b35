package api

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/invariant"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// sink is a partition that takes everything and keeps nothing.
type sink struct{ fakePartition }

type sinkTicket struct{}

var sinkLevels = []partition.Level{partition.Leader}

func (*sink) Submit(context.Context, replica.AppendInput) (Ticket, error) { return sinkTicket{}, nil }

func (sinkTicket) Admitted(context.Context) error { return nil }

func (sinkTicket) Wait(context.Context) (replica.AppendResult, error) {
	return replica.AppendResult{End: 1, Leadership: leads, Levels: sinkLevels, AppendTime: time.Unix(1, 0)}, nil
}

// handler is a service whose partition is a sink, and a function that calls its
// Append with the batches.
func handler(t testing.TB) func(batches []byte) error {
	w := newWorld(t, 1, 1, func(c *Config) { c.MaxDecodedBytes = 12 << 20 })
	t.Cleanup(w.close)
	b := w.brokers[1]
	b.replicas.partitions[target{"orders", 0}] = new(sink)
	req := new(brokerv1.AppendRequest)
	ctx := context.Background() //nolint:usetesting // shared with benchmarks
	return func(batches []byte) error {
		req.Reset()
		req.Topic, req.Batches = "orders", batches
		_, err := b.service.Append(ctx, req)
		return err
	}
}

func TestAppendOfRawBatchesAllocatesNothingPerRecord(t *testing.T) {
	if invariant.Enabled { // also with -race, under which pools drop things at random
		t.Skip("counts allocations of ordinary builds")
	}
	call := handler(t)
	for _, codec := range []record.Codec{record.CodecNone, record.CodecLZ4, record.CodecZstd, record.CodecSnappy} {
		allocs := func(n int) float64 {
			raw := batch(t, codec, n, 20)
			require.NoError(t, call(raw))
			return testing.AllocsPerRun(200, func() {
				if err := call(raw); err != nil {
					t.Error(err)
				}
			})
		}
		few, many := allocs(1), allocs(1000)
		t.Logf("%s: %v allocations for 1 record, %v for 1000", codec, few, many)
		// Readers and codecs come from pools that the collector may empty.
		require.LessOrEqual(t, many, few+5, codec)
	}
}

func BenchmarkAppendHandler(b *testing.B) {
	for _, shape := range []struct {
		codec   record.Codec
		n, size int
	}{{record.CodecNone, 1, 1024}, {record.CodecNone, 50, 1024}, {record.CodecNone, 500, 100}, {record.CodecLZ4, 50, 1024}, {record.CodecZstd, 50, 1024}} {
		b.Run(fmt.Sprintf("%s/%dx%d", shape.codec, shape.n, shape.size), func(b *testing.B) {
			call := handler(b)
			raw := batch(b, shape.codec, shape.n, shape.size)
			b.SetBytes(int64(shape.n * shape.size))
			b.ReportAllocs()
			for b.Loop() {
				if err := call(raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkCheck tells what each part of the checks costs: CRC and structure, and
// decoding all records.
func BenchmarkCheck(b *testing.B) {
	for _, shape := range []struct {
		codec   record.Codec
		n, size int
	}{{record.CodecNone, 64, 1024}, {record.CodecNone, 640, 100}, {record.CodecLZ4, 64, 1024}, {record.CodecZstd, 64, 1024}, {record.CodecGzip, 64, 1024}, {record.CodecSnappy, 64, 1024}} {
		raw := record.Batch(batch(b, shape.codec, shape.n, shape.size))
		name := fmt.Sprintf("%s/%dx%d", shape.codec, shape.n, shape.size)
		b.Run(name+"/validate", func(b *testing.B) {
			b.SetBytes(int64(shape.n * shape.size))
			for b.Loop() {
				if err := raw.Validate(); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/decode", func(b *testing.B) {
			r := record.NewReader(12 << 20)
			b.SetBytes(int64(shape.n * shape.size))
			for b.Loop() {
				if err := r.Verify(raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
