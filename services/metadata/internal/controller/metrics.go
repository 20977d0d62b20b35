package controller

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/braidlog/braid/services/metadata/state"
)

// Attribute keys of this package's metrics.
const (
	attrOp     = attribute.Key("op")
	attrReason = attribute.Key("reason")
	attrClass  = attribute.Key("class")
)

// Metrics counts what the controller does. A nil *Metrics counts nothing.
type Metrics struct {
	entries    metric.Int64Counter
	groups     metric.Int64Histogram
	bytes      metric.Int64Counter
	latency    metric.Float64Histogram
	elections  metric.Int64Counter
	etcdErrors metric.Int64Counter
	refused    metric.Int64Counter
}

// NewMetrics builds the instruments.
func NewMetrics(m metric.Meter) (*Metrics, error) {
	var errs [7]error
	c := &Metrics{}
	c.entries, errs[0] = m.Int64Counter("metadata.log.appended_entries", metric.WithUnit("{entry}"),
		metric.WithDescription("Entries that this replica appended to the metadata log as controller."))
	c.groups, errs[1] = m.Int64Histogram("metadata.log.group_size", metric.WithUnit("{entry}"),
		metric.WithDescription("Entries written in one etcd transaction."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64))
	c.bytes, errs[2] = m.Int64Counter("metadata.log.appended", metric.WithUnit("By"),
		metric.WithDescription("Bytes of entries that this replica appended to the metadata log as controller."))
	c.latency, errs[3] = m.Float64Histogram("metadata.log.commit.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from a group being decided to its publication, the etcd transaction included."),
		metric.WithExplicitBucketBoundaries(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5))
	c.elections, errs[4] = m.Int64Counter("metadata.elections", metric.WithUnit("{election}"),
		metric.WithDescription("Leaders elected by the controller, by reason."))
	c.etcdErrors, errs[5] = m.Int64Counter("metadata.etcd.errors", metric.WithUnit("{error}"),
		metric.WithDescription("Failed requests to etcd, by operation."))
	c.refused, errs[6] = m.Int64Counter("metadata.etcd.space.refused_commands", metric.WithUnit("{command}"),
		metric.WithDescription("Commands refused because etcd is too full for them, by class."))
	return c, errors.Join(errs[:]...)
}

// EtcdError counts a failed request to etcd.
func (m *Metrics) EtcdError(op string, _ error) {
	if m != nil {
		m.etcdErrors.Add(context.Background(), 1, metric.WithAttributes(attrOp.String(op)))
	}
}

func (m *Metrics) spaceRefused(class Class) {
	if m != nil {
		m.refused.Add(context.Background(), 1, metric.WithAttributes(attrClass.String(class.String())))
	}
}

func (m *Metrics) committed(ctx context.Context, entries, bytes int, d time.Duration) {
	if m == nil {
		return
	}
	m.entries.Add(ctx, int64(entries))
	m.groups.Record(ctx, int64(entries))
	m.bytes.Add(ctx, int64(bytes))
	m.latency.Record(ctx, d.Seconds())
}

func (m *Metrics) replaced(n int) {
	if m != nil {
		m.elections.Add(context.Background(), int64(n), metric.WithAttributes(attrReason.String(state.ReasonReplicasReplaced)))
	}
}

func (m *Metrics) elected(elections []state.Election) {
	if m == nil {
		return
	}
	for _, e := range elections {
		m.elections.Add(context.Background(), 1, metric.WithAttributes(attrReason.String(e.Reason)))
	}
}
