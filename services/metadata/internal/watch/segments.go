package watch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

const (
	// MaxPartitions is how many partitions one stream may watch.
	MaxPartitions = 10_000
	// rangesPerMessage keeps a message of a reset below 1 MiB: a range is about
	// 250 bytes with its object's name.
	rangesPerMessage = 3_000
	// recordsAtOnce is how many entries a stream takes from the ring at a time.
	recordsAtOnce = 256
)

// ErrResumeLate: a resume position came with a later message than the first.
var ErrResumeLate = errors.New("resume is allowed with the first message only")

// Segments serves one stream until ctx ends, requests is closed or send fails;
// it sends a progress mark after every request and every interval. A closed
// requests ends nothing: the stream goes on with the set that it has.
func (h *Hub) Segments(ctx context.Context, interval time.Duration,
	requests <-chan *metadatav1.WatchSegmentsRequest, send func(*metadatav1.WatchSegmentsResponse) error,
) error {
	s := &segments{hub: h, send: send, set: make(map[state.PartitionID]int64)}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		// Requests and ticks have their turn even while entries never end.
		var more <-chan struct{}
		idle := true
		if s.started {
			var err error
			if idle, more, err = s.step(); err != nil {
				return err
			}
		}
		if idle {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case r, ok := <-requests:
				if !ok {
					requests = nil
					continue
				}
				if err := s.request(ctx, r); err != nil {
					return err
				}
			case <-more:
			case <-ticker.C:
				if !s.started {
					continue // it has no position yet
				}
				if err := s.progress(); err != nil {
					return err
				}
			}
			continue
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case r, ok := <-requests:
			if !ok {
				requests = nil
				continue
			}
			if err := s.request(ctx, r); err != nil {
				return err
			}
		default:
		}
	}
}

// segments is one stream.
type segments struct {
	hub  *Hub
	send func(*metadatav1.WatchSegmentsResponse) error
	// set holds the partitions watched, each with the offset of the first entry
	// that its reset did not cover.
	set     map[state.PartitionID]int64
	next    int64 // everything below was sent
	started bool  // the first request was seen
}

// step sends the events of some entries; idle is true when there were none.
func (s *segments) step() (idle bool, more <-chan struct{}, err error) {
	if len(s.set) == 0 {
		// Nothing is wanted of what is there, so the stream can't be behind.
		s.hub.mu.RLock()
		s.next, more = s.hub.state.EndOffset(), s.hub.changed
		s.hub.mu.RUnlock()
		return true, more, nil
	}
	records, more, err := s.hub.tail(s.next, recordsAtOnce)
	if err != nil {
		return false, nil, err
	}
	return len(records) == 0, more, s.deliver(records)
}

// deliver sends one message for each entry that has events of the set.
func (s *segments) deliver(records []record) error {
	for _, r := range records {
		var events []*metadatav1.SegmentEvent
		for _, ev := range r.events {
			id := state.PartitionID{
				TopicCreationOffset: ev.GetPartition().GetTopicCreationOffset(), Partition: ev.GetPartition().GetPartition(),
			}
			from, watched := s.set[id]
			if !watched || r.entry.GetOffset() < from {
				continue
			}
			events = append(events, ev)
			if ev.GetRemoved() != nil {
				delete(s.set, id)
			}
		}
		s.next = r.entry.GetOffset() + 1
		if len(events) == 0 {
			continue
		}
		err := s.send(&metadatav1.WatchSegmentsResponse{Kind: &metadatav1.WatchSegmentsResponse_Events{Events: &metadatav1.SegmentEvents{
			Position: &metadatav1.MetadataPosition{
				Incarnation: r.entry.GetIncarnation(), ControllerEpoch: r.entry.GetControllerEpoch(), Offset: s.next,
			},
			Events: events,
		}}})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *segments) progress() error {
	return s.send(&metadatav1.WatchSegmentsResponse{
		Kind: &metadatav1.WatchSegmentsResponse_Progress{Progress: s.hub.position(s.next)},
	})
}

// request changes the set.
func (s *segments) request(ctx context.Context, r *metadatav1.WatchSegmentsRequest) error {
	resume := int64(-1) // offset to resume from
	if !s.started {
		s.started = true
		s.next = s.hub.End()
		if p := r.GetResume(); p != nil && s.hub.holds(p) {
			if start, _, _ := s.hub.Ring(); p.GetOffset() >= start {
				resume, s.next = p.GetOffset(), p.GetOffset()
			}
		}
	} else if r.GetResume() != nil {
		return ErrResumeLate
	}
	for _, p := range r.GetRemove() {
		s.hub.Read(func(st *state.State) {
			if id, err := st.FindPartition(p.GetTopic(), p.GetPartition()); err == nil {
				delete(s.set, id)
			}
		})
	}
	for _, p := range r.GetAdd() {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if err := s.add(p, resume); err != nil {
			return err
		}
	}
	return s.progress()
}

func (s *segments) add(p *metadatav1.WatchSegmentsPartition, resume int64) error {
	if p.GetFromOffset() < 0 {
		return s.fail(p, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, "from_offset is negative")
	}
	var (
		id     state.PartitionID
		header *metadatav1.SegmentsReset
		at     int64
		full   bool
		err    error
	)
	s.hub.Read(func(st *state.State) {
		if id, err = st.FindPartition(p.GetTopic(), p.GetPartition()); err != nil {
			return
		}
		if _, again := s.set[id]; !again && len(s.set) >= MaxPartitions {
			full = true
			return
		}
		at = st.EndOffset()
		if resume > id.TopicCreationOffset {
			return // it was there before: its events from the position on suffice
		}
		header = st.Reset(id, math.MaxInt64, 1)[0]
	})
	switch {
	case err != nil:
		return s.fail(p, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION, err.Error())
	case full:
		return s.fail(p, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, fmt.Sprintf("a stream may watch %d partitions", MaxPartitions))
	case header == nil:
		s.set[id] = resume
		return nil
	}
	// The others catch up to the reset first, so that positions never go back.
	for s.next < at {
		records, _, err := s.hub.tail(s.next, int(min(at-s.next, recordsAtOnce)))
		if err != nil {
			return err
		}
		if err := s.deliver(records); err != nil {
			return err
		}
	}
	s.set[id] = at
	return s.reset(id, header, p.GetFromOffset())
}

// reset sends the partition's ranges as they were at the header's position,
// page by page: committed ranges don't change, so only what came since is left
// out.
func (s *segments) reset(id state.PartitionID, header *metadatav1.SegmentsReset, from int64) error {
	for more := true; more; {
		m := &metadatav1.SegmentsReset{
			Partition: header.GetPartition(), Topic: header.GetTopic(), Position: header.GetPosition(), Fence: header.GetFence(),
			LeaderId: header.GetLeaderId(), Opened: header.GetOpened(), StartRule: header.GetStartRule(),
			EpochStart: header.GetEpochStart(), Lineage: header.GetLineage(), LogStartOffset: header.GetLogStartOffset(),
			ObjectEndOffset: header.GetObjectEndOffset(), ObjectEndChainHash: header.GetObjectEndChainHash(),
		}
		var clusterID string
		s.hub.Read(func(st *state.State) {
			clusterID = st.ClusterID()
			m.Ranges, more = st.Ranges(id, from, rangesPerMessage)
		})
		for n := len(m.Ranges); n > 0 && m.Ranges[n-1].GetEndOffset() > header.GetObjectEndOffset(); n-- {
			m.Ranges, more = m.Ranges[:n-1], false
		}
		if n := len(m.Ranges); n > 0 {
			from = m.Ranges[n-1].GetEndOffset()
		}
		more = more && from < header.GetObjectEndOffset()
		m.More = more
		NameObjects(clusterID, m.Ranges)
		if err := s.send(&metadatav1.WatchSegmentsResponse{Kind: &metadatav1.WatchSegmentsResponse_Reset_{Reset_: m}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *segments) fail(p *metadatav1.WatchSegmentsPartition, reason errorsv1.ErrorReason, message string) error {
	return s.send(&metadatav1.WatchSegmentsResponse{Kind: &metadatav1.WatchSegmentsResponse_Failure{Failure: &metadatav1.WatchSegmentsFailure{
		Topic: p.GetTopic(), Partition: p.GetPartition(), Reason: rpcerr.ReasonName(reason), Message: message,
	}}})
}
