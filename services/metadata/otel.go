package metadata

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/metric"

	"github.com/braidlog/braid/services/metadata/state"
)

// scope of the service's instruments.
const scope = "github.com/braidlog/braid/services/metadata"

// observe registers the gauges and returns how to take them back.
func (s *Server) observe(m metric.Meter) (func() error, error) {
	var errs []error
	gauge := func(name, unit, description string) metric.Int64ObservableGauge {
		g, err := m.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
		return g
	}
	end := gauge("metadata.log.end", "{entry}", "End of the metadata log as applied by this replica.")
	ranges := gauge("metadata.ranges.live", "{range}", "Committed ranges of live topics.")
	objects := gauge("metadata.objects.live", "{object}", "Combined objects with a live range.")
	topics := gauge("metadata.topics", "{topic}", "Live topics.")
	leading := gauge("metadata.controller.leading", "{controller}", "1 while this replica is the controller.")
	queue := gauge("metadata.controller.queue", "{command}", "Commands waiting for the controller.")
	sessions := gauge("metadata.sessions.live", "{session}", "Live sessions of brokers and remote-log managers, on the controller.")
	ringEntries := gauge("metadata.watch.ring.entries", "{entry}", "Newest entries in memory for watchers.")
	ringBytes := gauge("metadata.watch.ring.size", "By", "Size of the newest entries in memory for watchers.")
	start := gauge("metadata.log.start", "{entry}", "First offset of the metadata log that is still in etcd, as last seen.")
	spaceUsed := gauge("metadata.etcd.space.used", "By", "Space in use in the fullest member of etcd, on the controller.")
	spaceQuota := gauge("metadata.etcd.space.quota", "By", "Space quota of that member, on the controller.")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	registration, err := m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s.hub.Read(func(st *state.State) {
			o.ObserveInt64(end, st.EndOffset())
			o.ObserveInt64(ranges, st.RangeCount())
			o.ObserveInt64(objects, int64(st.ObjectCount()))
			o.ObserveInt64(topics, int64(st.TopicCount()))
		})
		status := s.controller.Status()
		if status.Leading {
			o.ObserveInt64(leading, 1)
		} else {
			o.ObserveInt64(leading, 0)
		}
		o.ObserveInt64(queue, int64(status.Queue))
		o.ObserveInt64(sessions, int64(status.Sessions))
		o.ObserveInt64(start, s.keeper.LogStart())
		if status.SpaceQuota > 0 {
			o.ObserveInt64(spaceUsed, status.SpaceInUse)
			o.ObserveInt64(spaceQuota, status.SpaceQuota)
		}
		first, last, size := s.hub.Ring()
		o.ObserveInt64(ringEntries, last-first)
		o.ObserveInt64(ringBytes, int64(size))
		return nil
	}, end, ranges, objects, topics, leading, queue, sessions, ringEntries, ringBytes, start, spaceUsed, spaceQuota)
	if err != nil {
		return nil, err
	}
	return registration.Unregister, nil
}
