package fetcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

type metrics struct {
	blocks  metric.Int64Counter
	footers metric.Int64Counter
	gets    metric.Float64Histogram
	bytes   metric.Int64Counter
	damages metric.Int64Counter

	onHit, onMiss, onShared metric.MeasurementOption
}

func newMetrics(m metric.Meter, f *Fetcher) (*metrics, error) {
	var errs []error
	counter := func(name, unit, text string) metric.Int64Counter {
		c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
		errs = append(errs, err)
		return c
	}
	source := func(s string) metric.MeasurementOption {
		return metric.WithAttributeSet(attribute.NewSet(attribute.String("source", s)))
	}
	x := &metrics{
		blocks:  counter("rlm.cache.blocks", "{block}", "Blocks asked for: found in the cache, fetched, or shared with a fetch under way."),
		footers: counter("rlm.cache.footers", "{footer}", "Footers asked for: found in the cache, fetched, or shared with a fetch under way."),
		bytes:   counter("rlm.cache.fetched", "By", "Bytes fetched from the object store."),
		damages: counter("rlm.cache.damaged", "{block}", "Blocks that were damaged twice."),
		onHit:   source("cache"), onMiss: source("store"), onShared: source("shared"),
	}
	var err error
	x.gets, err = m.Float64Histogram("rlm.cache.get.duration", metric.WithUnit("s"), metric.WithDescription("Time of a GET of a block, retries included."),
		metric.WithExplicitBucketBoundaries(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30))
	errs = append(errs, err)
	size, err := m.Int64ObservableGauge("rlm.cache.size", metric.WithUnit("By"), metric.WithDescription("Bytes in the block cache."))
	errs = append(errs, err)
	pinned, err := m.Int64ObservableGauge("rlm.cache.pinned", metric.WithUnit("By"), metric.WithDescription("Bytes that readers hold on to."))
	errs = append(errs, err)
	footers, err := m.Int64ObservableGauge("rlm.cache.footer.size", metric.WithUnit("By"), metric.WithDescription("Bytes in the cache of footers."))
	errs = append(errs, err)
	_, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		c, p, _ := f.Stats()
		o.ObserveInt64(size, c)
		o.ObserveInt64(pinned, p)
		n, _ := f.FooterStats()
		o.ObserveInt64(footers, n)
		return nil
	}, size, pinned, footers)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, fmt.Errorf("create the fetcher's metrics: %w", err)
	}
	return x, nil
}

// asked counts one who asks for a block or a footer.
func (x *metrics) asked(ctx context.Context, k key, source metric.MeasurementOption) {
	if k.footer {
		x.footers.Add(ctx, 1, source)
		return
	}
	x.blocks.Add(ctx, 1, source)
}

func (x *metrics) damaged(ctx context.Context) { x.damages.Add(ctx, 1) }

func (x *metrics) get(ctx context.Context, d time.Duration, n int, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "failed"
	}
	ctx = context.WithoutCancel(ctx)
	x.gets.Record(ctx, d.Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
	x.bytes.Add(ctx, int64(n))
}
