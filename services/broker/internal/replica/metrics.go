package replica

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// metrics counts what happens; all methods are safe for concurrent use.
type metrics struct {
	appends, appendBytes, refusals metric.Int64Counter
	groups                         metric.Int64Histogram
	readBytes                      metric.Int64Counter
	verdicts                       metric.Int64Counter
	missing                        metric.Int64Counter
	copies, copyBytes, copyErrors  metric.Int64Counter

	local, bucket metric.MeasurementOption
}

func newMetrics(meter metric.Meter, m *Manager) (*metrics, error) {
	if meter == nil {
		meter = noop.NewMeterProvider().Meter("")
	}
	out := &metrics{
		local:  metric.WithAttributeSet(attribute.NewSet(attribute.String("source", "local"))),
		bucket: metric.WithAttributeSet(attribute.NewSet(attribute.String("source", "bucket"))),
	}
	var errs [10]error
	out.appends, errs[0] = meter.Int64Counter("broker_appends", metric.WithDescription("Appends written to a local log."))
	out.appendBytes, errs[1] = meter.Int64Counter("broker_append_bytes", metric.WithUnit("By"), metric.WithDescription("Bytes of batches written to a local log."))
	out.refusals, errs[2] = meter.Int64Counter("broker_append_refusals", metric.WithDescription("Appends refused before anything was stored, by kind."))
	out.groups, errs[3] = meter.Int64Histogram("broker_append_group_size", metric.WithDescription("Appends that shared one write to a log."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256))
	out.readBytes, errs[4] = meter.Int64Counter("broker_read_bytes", metric.WithUnit("By"), metric.WithDescription("Bytes of batches read, by source."))
	out.verdicts, errs[5] = meter.Int64Counter("broker_wal_verdicts", metric.WithDescription("Verdicts on ranges sent, by outcome."))
	out.missing, errs[6] = meter.Int64Counter("broker_producer_ranges_missing", metric.WithDescription("Committed ranges, lost in the bucket, without which the producer state was recovered."))
	out.copies, errs[7] = meter.Int64Counter("broker_follower_ranges", metric.WithDescription("Committed ranges fetched for partitions that this broker follows."))
	out.copyBytes, errs[8] = meter.Int64Counter("broker_follower_fetched_bytes", metric.WithUnit("By"), metric.WithDescription("Bytes of committed ranges fetched for partitions that this broker follows."))
	out.copyErrors, errs[9] = meter.Int64Counter("broker_follower_errors", metric.WithDescription("Ranges that could not be copied now, by kind."))
	_, lerr := meter.Int64ObservableGauge("broker_follower_lag", metric.WithDescription("Committed offsets that followed partitions lack here: the largest lag, and the sum of all."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			most, sum := int64(0), int64(0)
			for _, p := range m.all() {
				lag := p.lag()
				most, sum = max(most, lag), sum+lag
			}
			o.Observe(most, metric.WithAttributes(attribute.String("of", "largest")))
			o.Observe(sum, metric.WithAttributes(attribute.String("of", "sum")))
			return nil
		}))
	_, err := meter.Int64ObservableGauge("broker_unuploaded_bytes", metric.WithUnit("By"),
		metric.WithDescription("Bytes in local logs that are not in the bucket yet."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(m.unuploaded.Load())
			return nil
		}))
	_, perr := meter.Int64ObservableGauge("broker_partitions", metric.WithDescription("Partitions that this broker may hold, by state."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			counts := map[partition.State]int64{}
			for _, p := range m.all() {
				counts[p.state()]++
			}
			for s, n := range counts {
				o.Observe(n, metric.WithAttributes(attribute.String("state", s.String())))
			}
			return nil
		}))
	if err := errors.Join(append(errs[:], err, perr, lerr)...); err != nil {
		return nil, fmt.Errorf("replica metrics: %w", err)
	}
	return out, nil
}

func (p *Partition) state() partition.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, _ := p.machine.State()
	return s
}

func (m *metrics) appended(n, size int) {
	ctx := context.Background()
	m.appends.Add(ctx, int64(n))
	m.appendBytes.Add(ctx, int64(size))
	m.groups.Record(ctx, int64(n))
}

func (m *metrics) refused(err error) {
	m.refusals.Add(context.Background(), 1, metric.WithAttributes(attribute.String("kind", fmt.Sprintf("%T", err))))
}

func (m *metrics) read(size int, bucket bool) {
	source := m.local
	if bucket {
		source = m.bucket
	}
	m.readBytes.Add(context.Background(), int64(size), source)
}

func (m *metrics) verdict(o partition.Outcome) {
	m.verdicts.Add(context.Background(), 1, metric.WithAttributes(attribute.String("outcome", o.String())))
}

func (m *metrics) producersMissing(n int) { m.missing.Add(context.Background(), int64(n)) }

func (m *metrics) copied(size int) {
	ctx := context.Background()
	m.copies.Add(ctx, 1)
	m.copyBytes.Add(ctx, int64(size))
}

func (m *metrics) copyFailed(err error) {
	kind := "other"
	var damage *remote.DamageError
	switch {
	case errors.Is(err, remote.ErrNotFound):
		kind = "not_found"
	case errors.As(err, &damage):
		kind = "damaged"
	case errors.Is(err, remote.ErrUnavailable):
		kind = "unavailable"
	case errors.Is(err, errNotListed):
		kind = "not_listed"
	}
	m.copyErrors.Add(context.Background(), 1, metric.WithAttributes(attribute.String("kind", kind)))
}

// lag is how many committed offsets a following replica lacks.
func (p *Partition) lag() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, known := p.machine.View()
	if s, _ := p.machine.State(); !known || s != partition.Fetching && s != partition.Truncating {
		return 0
	}
	return max(v.ObjectEnd-max(p.machine.Log().End, v.LogStart), 0)
}
