package record_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
)

// benchBatch is n records of size bytes each, of text that compresses about as
// well as JSON does.
func benchBatch(b *testing.B, codec record.Codec, n, size int) record.Batch {
	r := rand.New(rand.NewPCG(1, 2))
	bl := record.NewBuilder(codec)
	for i := range n {
		var v bytes.Buffer
		for v.Len() < size {
			fmt.Fprintf(&v, `{"id":%d,"place":"%d km of somewhere","value":%0.3f}`, r.Uint32(), r.IntN(300), r.Float64()*9)
		}
		if err := bl.Append(record.Record{Timestamp: 1_790_000_000_000 + int64(i), Value: v.Bytes()[:size]}); err != nil {
			b.Fatal(err)
		}
	}
	_, batch, err := bl.Build(nil)
	if err != nil {
		b.Fatal(err)
	}
	return batch
}

func BenchmarkValidate(b *testing.B) {
	for _, n := range []int{1, 16, 256} {
		batch := benchBatch(b, record.CodecNone, n, 1024)
		b.Run(fmt.Sprintf("%dKiB", n), func(b *testing.B) {
			b.SetBytes(int64(len(batch)))
			b.ReportAllocs()
			for b.Loop() {
				if err := batch.Validate(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkChecker(b *testing.B) {
	var run []byte
	for i := range 64 {
		batch := benchBatch(b, record.CodecNone, 16, 1024)
		batch.SetBaseOffset(100 + int64(i)*16)
		batch.SetLeaderEpoch(6)
		run = append(run, batch...)
	}
	var epochs record.Epochs = lineage.Lineage{
		{Leadership: lineage.Leadership{Incarnation: 1, LeaderEpoch: 6}, StartOffset: 100},
	}
	b.SetBytes(int64(len(run)))
	b.ReportAllocs()
	for b.Loop() {
		c := record.NewChecker(100, epochs)
		if err := c.Check(run); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRead(b *testing.B) {
	for _, codec := range codecs {
		batch := benchBatch(b, codec, 256, 1024)
		b.Run(codec.String(), func(b *testing.B) {
			b.SetBytes(256 * 1024)
			b.ReportAllocs()
			r := record.NewReader(0)
			for b.Loop() {
				if err := r.Verify(batch); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkBuild(b *testing.B) {
	for _, codec := range codecs {
		b.Run(codec.String(), func(b *testing.B) {
			var records []record.Record
			for r, err := range benchBatch(b, record.CodecNone, 256, 1024).Records() {
				if err != nil {
					b.Fatal(err)
				}
				records = append(records, r.Clone())
			}
			bl, out := record.NewBuilder(codec), make([]byte, 0, 1<<20)
			b.SetBytes(256 * 1024)
			b.ReportAllocs()
			for b.Loop() {
				bl.Reset()
				for _, r := range records {
					if err := bl.Append(r); err != nil {
						b.Fatal(err)
					}
				}
				if _, _, err := bl.Build(out[:0]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
