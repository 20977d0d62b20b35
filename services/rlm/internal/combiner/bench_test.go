package combiner_test

import (
	"context"
	"log/slog"
	"testing"

	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/rlm/internal/combiner"
)

// discard takes objects and keeps none, so that the combiner alone is measured.
type discard struct{ objects int }

func (d *discard) Create(_ context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	d.objects++
	return objstore.Attrs{Name: name, Size: body.Size(), CRC32C: body.CRC32C(), Generation: 1}, nil
}

// accept accepts everything.
type accept struct{}

func (accept) Commit(_ context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	resp := &metadatav1.CommitCombinedSegmentResponse{MetadataOffset: 1, Verdicts: make([]*metadatav1.RangeVerdict, len(r.GetRanges()))}
	v := &metadatav1.RangeVerdict{Outcome: metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED}
	for i := range resp.Verdicts {
		resp.Verdicts[i] = v
	}
	return resp, nil
}

// BenchmarkCombine200x16KiB takes 200 ranges of 16 KiB from arrival, with their
// verification, to their verdicts.
func BenchmarkCombine200x16KiB(b *testing.B) {
	cfg := config()
	cfg.Plan.MaxBytes, cfg.Plan.MaxRanges, cfg.BufferBytes = 8<<20, 4096, 256<<20
	store := &discard{}
	c, err := combiner.New(cfg, combiner.Deps{
		Store: store, Committer: accept{}, OnUnusable: func(int64) {}, MetadataEnd: func() int64 { return 0 },
		Logger: slog.New(slog.DiscardHandler), Meter: noop.NewMeterProvider().Meter(""),
	})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = c.Run(ctx) }()
	defer func() { cancel(); <-done }()
	c.Registered(combiner.Identity{ClusterID: clusterID, Incarnation: walobjecttest.Incarnation, Epoch: 1})
	s, err := c.Open(walobjecttest.Incarnation, 77)
	if err != nil {
		b.Fatal(err)
	}
	ranges := make([]*remotelogv1.WalRange, 200)
	var bytes int64
	for i := range ranges {
		d, data := walobjecttest.NewPartition(5, int32(i)).Append(1, 16, 1000)
		ranges[i] = &remotelogv1.WalRange{Range: d, Data: data}
		bytes += int64(len(data))
	}
	b.SetBytes(bytes)
	b.ReportAllocs()
	run := int64(0)
	for b.Loop() {
		run++
		for _, r := range ranges {
			// A new message per range, as it comes off the wire; the bytes are shared.
			if err := s.Append(ctx, &remotelogv1.WalRange{Range: proto.CloneOf(r.GetRange()), Run: run, Data: r.GetData()}); err != nil {
				b.Fatal(err)
			}
		}
		for n := 0; n < len(ranges); {
			<-s.Ready()
			n += len(s.Take())
		}
	}
	b.ReportMetric(float64(store.objects)/float64(b.N), "objects/op")
}

// BenchmarkClone is the part of BenchmarkCombine200x16KiB that is the wire's.
func BenchmarkClone(b *testing.B) {
	d, _ := walobjecttest.NewPartition(5, 0).Append(1, 16, 1000)
	b.ReportAllocs()
	for b.Loop() {
		for range 200 {
			_ = proto.CloneOf(d)
		}
	}
}
