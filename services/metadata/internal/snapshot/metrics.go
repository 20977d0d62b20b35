package snapshot

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

const attrStep = attribute.Key("step")

// Metrics counts what a keeper does. A nil *Metrics counts nothing.
type Metrics struct {
	snapshots metric.Int64Counter
	failures  metric.Int64Counter
	duration  metric.Float64Histogram
	size      metric.Int64Gauge
	end       metric.Int64Gauge
	entries   metric.Int64Counter
}

// NewMetrics builds the instruments.
func NewMetrics(m metric.Meter) (*Metrics, error) {
	var errs [6]error
	c := &Metrics{}
	c.snapshots, errs[0] = m.Int64Counter("metadata.snapshots", metric.WithUnit("{snapshot}"),
		metric.WithDescription("Snapshots that this replica took of the metadata state."))
	c.failures, errs[1] = m.Int64Counter("metadata.snapshot.failures", metric.WithUnit("{failure}"),
		metric.WithDescription("Failed attempts to take a snapshot, or to store it in the bucket and trim behind it, by step."))
	c.duration, errs[2] = m.Float64Histogram("metadata.snapshot.duration", metric.WithUnit("s"),
		metric.WithDescription("Time to write a snapshot to the disk."),
		metric.WithExplicitBucketBoundaries(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60))
	c.size, errs[3] = m.Int64Gauge("metadata.snapshot.size", metric.WithUnit("By"),
		metric.WithDescription("Size of the newest snapshot that this replica took."))
	c.end, errs[4] = m.Int64Gauge("metadata.snapshot.end", metric.WithUnit("{entry}"),
		metric.WithDescription("End offset of the newest snapshot that this replica took."))
	c.entries, errs[5] = m.Int64Counter("metadata.log.trimmed_entries", metric.WithUnit("{entry}"),
		metric.WithDescription("Entries that this replica deleted from the metadata log as controller."))
	return c, errors.Join(errs[:]...)
}

func (m *Metrics) taken(ctx context.Context, i Info, d time.Duration) {
	if m == nil {
		return
	}
	m.snapshots.Add(ctx, 1)
	m.duration.Record(ctx, d.Seconds())
	m.size.Record(ctx, i.Size)
	m.end.Record(ctx, i.End)
}

func (m *Metrics) failed(ctx context.Context, step string) {
	if m != nil {
		m.failures.Add(ctx, 1, metric.WithAttributes(attrStep.String(step)))
	}
}

func (m *Metrics) trimmed(ctx context.Context, entries int64) {
	if m != nil {
		m.entries.Add(ctx, entries)
	}
}
