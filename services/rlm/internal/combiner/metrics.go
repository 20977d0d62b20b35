package combiner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/braidlog/braid/pkg/objstore"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

var (
	latency = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30}
	sizes   = []float64{1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20}
	counts  = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 4096}
)

// metrics are the combiner's instruments.
type metrics struct {
	puts, commits        metric.Float64Histogram
	bytes, ranges, parts metric.Int64Histogram
	verdicts             metric.Int64Counter
}

func newMetrics(m metric.Meter, c *Combiner) (*metrics, error) {
	var errs []error
	x := &metrics{}
	hist := func(name, unit, text string, b []float64) metric.Int64Histogram {
		h, err := m.Int64Histogram(name, metric.WithUnit(unit), metric.WithDescription(text), metric.WithExplicitBucketBoundaries(b...))
		errs = append(errs, err)
		return h
	}
	secs := func(name, text string) metric.Float64Histogram {
		h, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(text), metric.WithExplicitBucketBoundaries(latency...))
		errs = append(errs, err)
		return h
	}
	x.puts = secs("rlm.wal.put.duration", "Time of one attempt to upload a combined object, retries included.")
	x.commits = secs("rlm.wal.commit.duration", "Time from sending a commit to its verdict, repeats included.")
	x.bytes = hist("rlm.wal.object.size", "By", "Size of uploaded combined objects.", sizes)
	x.ranges = hist("rlm.wal.object.ranges", "{range}", "Ranges per uploaded combined object.", counts)
	x.parts = hist("rlm.wal.object.partitions", "{partition}", "Partitions per uploaded combined object.", counts)
	var err error
	x.verdicts, err = m.Int64Counter("rlm.wal.verdicts", metric.WithUnit("{range}"), metric.WithDescription("Ranges answered, by outcome."))
	errs = append(errs, err)

	gauge := func(name, unit, text string) metric.Int64ObservableGauge {
		g, err := m.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(text))
		errs = append(errs, err)
		return g
	}
	queuedBytes := gauge("rlm.wal.queue.size", "By", "Bytes that wait for an object.")
	queuedRanges := gauge("rlm.wal.queue.ranges", "{range}", "Ranges that wait for an object.")
	buffered := gauge("rlm.wal.buffer.size", "By", "Buffer in use: bytes that wait or are in upload.")
	uploading := gauge("rlm.wal.uploads", "{object}", "Objects in upload.")
	uncommitted := gauge("rlm.wal.uncommitted", "{object}", "Objects without a verdict, those in upload included.")
	streams := gauge("rlm.wal.streams", "{stream}", "Open streams of brokers.")
	_, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		plan, used, n := c.Stats()
		o.ObserveInt64(queuedBytes, plan.QueuedBytes)
		o.ObserveInt64(queuedRanges, int64(plan.QueuedRanges))
		o.ObserveInt64(buffered, used)
		o.ObserveInt64(uploading, int64(plan.Uploading))
		o.ObserveInt64(uncommitted, int64(plan.Uncommitted))
		o.ObserveInt64(streams, int64(n))
		return nil
	}, queuedBytes, queuedRanges, buffered, uploading, uncommitted, streams)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, fmt.Errorf("create the combiner's metrics: %w", err)
	}
	return x, nil
}

func (x *metrics) put(ctx context.Context, d time.Duration, err error) {
	outcome := "ok"
	switch {
	case err == nil:
	case errors.Is(err, context.Canceled):
		outcome = "canceled"
	case errors.Is(err, objstore.ErrCorrupt):
		outcome = "corrupt"
	case errors.Is(err, objstore.ErrAmbiguous):
		outcome = "unknown"
	default:
		outcome = "failed"
	}
	x.puts.Record(context.WithoutCancel(ctx), d.Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
}

func (x *metrics) commit(ctx context.Context, d time.Duration, err error) {
	outcome := "judged"
	if err != nil {
		outcome = "refused"
		if ctx.Err() != nil {
			outcome = "canceled"
		}
	}
	x.commits.Record(context.WithoutCancel(ctx), d.Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
}

func (x *metrics) object(size int64, ranges, partitions int) {
	ctx := context.Background()
	x.bytes.Record(ctx, size)
	x.ranges.Record(ctx, int64(ranges))
	x.parts.Record(ctx, int64(partitions))
}

var outcomes = func() map[metadatav1.RangeOutcome]metric.MeasurementOption {
	m := make(map[metadatav1.RangeOutcome]metric.MeasurementOption)
	for n, name := range metadatav1.RangeOutcome_name {
		m[metadatav1.RangeOutcome(n)] = metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", name[len("RANGE_OUTCOME_"):])))
	}
	return m
}()

func (x *metrics) answered(o metadatav1.RangeOutcome) {
	if opt, ok := outcomes[o]; ok {
		x.verdicts.Add(context.Background(), 1, opt)
	}
}
