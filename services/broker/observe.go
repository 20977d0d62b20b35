package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/metric"
)

// observe registers what is read off the broker when metrics are asked for.
func (s *Server) observe(meter metric.Meter) error {
	session, e1 := meter.Int64ObservableGauge("broker_session_registered",
		metric.WithDescription("1 while the broker is registered with the metadata service."))
	feeding, e2 := meter.Int64ObservableGauge("broker_wal_feed_rlm",
		metric.WithDescription("Id of the remote-log manager in use, 0 for none."))
	outstanding, e3 := meter.Int64ObservableGauge("broker_wal_feed_outstanding_bytes", metric.WithUnit("By"),
		metric.WithDescription("Bytes sent to the remote-log manager and not judged yet."))
	oldest, e4 := meter.Float64ObservableGauge("broker_wal_feed_oldest_unanswered_seconds", metric.WithUnit("s"),
		metric.WithDescription("Age of the oldest range without a verdict."))
	applied, e5 := meter.Int64ObservableGauge("broker_metadata_offset",
		metric.WithDescription("Metadata offset (exclusive) that the broker has applied."))
	if err := errors.Join(e1, e2, e3, e4, e5); err != nil {
		return fmt.Errorf("build the metrics: %w", err)
	}
	registration, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		var registered int64
		if _, ok := s.Epoch(); ok {
			registered = 1
		}
		o.ObserveInt64(session, registered)
		feed := s.manager.Feed()
		o.ObserveInt64(feeding, int64(feed.RLMID))
		o.ObserveInt64(outstanding, feed.OutstandingBytes)
		age := 0.0
		if !feed.OldestUnanswered.IsZero() {
			age = time.Since(feed.OldestUnanswered).Seconds()
		}
		o.ObserveFloat64(oldest, age)
		o.ObserveInt64(applied, s.manager.Cluster().Position.Offset)
		return nil
	}, session, feeding, outstanding, oldest, applied)
	if err != nil {
		return fmt.Errorf("build the metrics: %w", err)
	}
	s.onClose(registration.Unregister)
	return nil
}
