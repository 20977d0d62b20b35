package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// Attribute keys of this package's metrics. Topics are not among them: their
// number has no bound.
const (
	attrLevel  = attribute.Key("level")
	attrMethod = attribute.Key("method")
	attrReason = attribute.Key("reason")
	attrFormat = attribute.Key("format")
)

// appendBuckets resolve a local write as well as an upload, in seconds.
var appendBuckets = []float64{
	0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60,
}

type metrics struct {
	appendDuration  metric.Float64Histogram
	appendedRecords metric.Int64Counter
	duplicates      metric.Int64Counter
	ackWaiters      metric.Int64UpDownCounter
	readBytes       metric.Int64Counter
	readStreams     metric.Int64UpDownCounter
	awaits          metric.Int64UpDownCounter
	leaderless      metric.Int64UpDownCounter
	forwarded       metric.Int64Counter
	errors          metric.Int64Counter

	// Attribute sets made once, by level.
	byLevel [5]metric.MeasurementOption
	records metric.MeasurementOption
	batches metric.MeasurementOption
}

func newMetrics(meter metric.Meter) (*metrics, error) {
	m := new(metrics)
	var errs [10]error
	m.appendDuration, errs[0] = meter.Float64Histogram("broker_append_duration", metric.WithUnit("s"),
		metric.WithDescription("Time from the receipt of an append to its answer, by the level waited for."),
		metric.WithExplicitBucketBoundaries(appendBuckets...))
	m.appendedRecords, errs[1] = meter.Int64Counter("broker_append_records", metric.WithUnit("{record}"),
		metric.WithDescription("Records appended by clients."))
	m.duplicates, errs[2] = meter.Int64Counter("broker_append_duplicates", metric.WithUnit("{append}"),
		metric.WithDescription("Appends that were stored before."))
	m.ackWaiters, errs[3] = meter.Int64UpDownCounter("broker_append_waiters", metric.WithUnit("{append}"),
		metric.WithDescription("Appends that wait for the log or for their level, by level."))
	m.readBytes, errs[4] = meter.Int64Counter("broker_sent", metric.WithUnit("By"),
		metric.WithDescription("Bytes of record batches read by clients, by format."))
	m.readStreams, errs[5] = meter.Int64UpDownCounter("broker_read_streams", metric.WithUnit("{stream}"),
		metric.WithDescription("Read streams served here."))
	m.awaits, errs[6] = meter.Int64UpDownCounter("broker_await_waiters", metric.WithUnit("{call}"),
		metric.WithDescription("AwaitDurability calls that wait."))
	m.forwarded, errs[7] = meter.Int64Counter("broker_forwarded_calls", metric.WithUnit("{call}"),
		metric.WithDescription("Calls and streams forwarded to a leader, by method."))
	m.errors, errs[8] = meter.Int64Counter("broker_errors", metric.WithUnit("{error}"),
		metric.WithDescription("Calls and streams that ended with an error, by method and reason."))
	m.leaderless, errs[9] = meter.Int64UpDownCounter("broker_leader_waiters", metric.WithUnit("{call}"),
		metric.WithDescription("Calls that wait for a leader."))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("create the API's metrics: %w", err)
	}
	for level := range m.byLevel {
		name := "DEFAULT"
		if level > 0 {
			name = levelName(partition.Level(level))
		}
		m.byLevel[level] = metric.WithAttributeSet(attribute.NewSet(attrLevel.String(name)))
	}
	m.records = metric.WithAttributeSet(attribute.NewSet(attrFormat.String("records")))
	m.batches = metric.WithAttributeSet(attribute.NewSet(attrFormat.String("batches")))
	return m, nil
}

func (m *metrics) level(l partition.Level) metric.MeasurementOption {
	return m.byLevel[min(int(l), len(m.byLevel)-1)]
}

// answered notes the end of an append that was written.
func (m *metrics) answered(ctx context.Context, level partition.Level, f facts, r replica.AppendResult, err error, took time.Duration) {
	if err != nil {
		if unknown := (*replica.OutcomeUnknownError)(nil); !errors.As(err, &unknown) {
			return // nothing was stored
		}
	}
	if r.Duplicate {
		m.duplicates.Add(ctx, 1)
	} else {
		m.appendedRecords.Add(ctx, f.records)
	}
	if err == nil {
		m.appendDuration.Record(ctx, took.Seconds(), m.level(level))
	}
}

// failed counts the error that a call ends with.
func (m *metrics) failed(ctx context.Context, method string, err error) {
	if err == nil {
		return
	}
	reason := "INTERNAL"
	if e, ok := rpcerr.From(err); ok {
		if reason = rpcerr.ReasonName(e.Reason); e.Reason == 0 {
			reason = e.Code.String()
		}
	}
	m.errors.Add(ctx, 1, metric.WithAttributes(attrMethod.String(method), attrReason.String(reason)))
}
