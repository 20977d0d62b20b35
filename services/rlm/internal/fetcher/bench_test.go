package fetcher_test

import (
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/rlm/internal/fetcher"
)

// What rlm does for a broker that takes 2,000 partitions over whose last ranges
// are in one object. With a footer decoded for each of them it took 23 s and 7 GB
// of allocations.
func BenchmarkTakeOver(b *testing.B) {
	const partitions = 2000
	store := memstore.New(memstore.Options{})
	var ranges []walobject.Range
	for i := range int32(partitions) {
		d, data := walobjecttest.NewPartition(5, i).Append(1, 1, 300)
		f := &storagev1.RangeFooter{Range: d}
		for id := range int64(3) {
			f.Producers = append(f.Producers, &logv1.ProducerSummary{ProducerId: id + 1, Batches: []*logv1.ProducerBatch{{LastSequence: 5, BaseOffset: 1, EndOffset: 7}, {FirstSequence: 6, LastSequence: 8, BaseOffset: 7, EndOffset: 10}}})
		}
		ranges = append(ranges, walobject.Range{Footer: f, Data: data})
	}
	o, err := walobject.Build(walobject.Header{ClusterID: "c", Object: &logv1.ObjectRef{Incarnation: 1, RlmEpoch: 2, Sequence: 1, Attempt: 1}}, ranges)
	require.NoError(b, err)
	_, err = store.Create(b.Context(), o.Name, objstore.NewParts(o.Parts...))
	require.NoError(b, err)
	b.Logf("object %d bytes, footer %d", o.Size, o.FooterSize)
	b.ReportAllocs()
	for b.Loop() {
		f, err := fetcher.New(fetcher.Config{BlockBytes: 8 << 20, CacheBytes: 256 << 20, FooterBytes: 32 << 20, FooterWorkBytes: 64 << 20, PeerPinnedBytes: 64 << 20, PinnedBytes: 256 << 20, ReadTimeout: 20 * time.Second, MaxFetches: 32},
			store, slog.New(slog.DiscardHandler), noop.NewMeterProvider().Meter(""))
		require.NoError(b, err)
		for i := range ranges {
			d := ranges[i].Footer.GetRange()
			err := f.Footers(b.Context(), []fetcher.Object{{Name: o.Name, Size: o.Size}}, func(_ int, footer *fetcher.Footer) error {
				got, err := footer.Range(d.GetPartition(), d.GetBaseOffset())
				if err == nil && got == nil {
					err = io.EOF
				}
				return err
			})
			require.NoError(b, err)
		}
		f.Close()
	}
}
