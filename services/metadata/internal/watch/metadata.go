package watch

import (
	"context"
	"errors"
	"time"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/state"
)

// imageTopics and imagePartitions bound a message of a reset to well below
// 1 MiB for topics of usual size.
const (
	imageTopics     = 64
	imagePartitions = 2_000
)

// catchUp is how long a position beyond what was applied is waited for, before
// it is taken for one of another log.
const catchUp = time.Second

var errCaughtUp = errors.New("caught up")

// Metadata serves one stream of whole entries until ctx ends or send fails,
// with a progress mark every interval. It begins at from if that is a position
// of this log (offset 0 is one of every log), else with a reset. What is not in
// memory any more is read from the log. Where that was trimmed the stream begins
// again with a reset, or, if all events are wanted and no reset has them, it ends
// with the log's [*metalog.TrimmedError].
func (h *Hub) Metadata(ctx context.Context, interval time.Duration, log Reader, from *metadatav1.MetadataPosition,
	all bool, send func(*metadatav1.WatchMetadataResponse) error,
) error {
	var trimmed *metalog.TrimmedError
	known, err := h.known(ctx, log, from)
	if err != nil && (all || !errors.As(err, &trimmed)) {
		return err
	}
	next := from.GetOffset()
	if !known {
		if next, err = h.image(send); err != nil {
			return err
		}
	}
	deliver := func(e *metadatav1.Entry) error {
		next = e.GetOffset() + 1
		if !all {
			if e = membership(e); e == nil {
				return nil
			}
		}
		return send(&metadatav1.WatchMetadataResponse{Kind: &metadatav1.WatchMetadataResponse_Entry{Entry: e}})
	}
	for {
		start, _, _ := h.Ring()
		if next >= start {
			break
		}
		err := log.Entries(ctx, next, func(e *metadatav1.Entry) error {
			if start, _, _ := h.Ring(); e.GetOffset() >= start {
				return errCaughtUp
			}
			return deliver(e)
		})
		switch {
		case errors.As(err, &trimmed) && !all:
			if next, err = h.image(send); err != nil {
				return err
			}
		case err != nil && !errors.Is(err, errCaughtUp):
			return err
		}
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		records, more, err := h.tail(next, recordsAtOnce)
		if err != nil {
			return err
		}
		for _, r := range records {
			if err := deliver(r.entry); err != nil {
				return err
			}
		}
		if len(records) > 0 {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			continue
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-more:
		case <-ticker.C:
			err := send(&metadatav1.WatchMetadataResponse{Kind: &metadatav1.WatchMetadataResponse_Progress{Progress: h.position(next)}})
			if err != nil {
				return err
			}
		}
	}
}

// known says whether from is a position of this log from which entries can be
// delivered. The error is that of the log, if it has to be asked: a
// [*metalog.TrimmedError] where they can't be any more.
func (h *Hub) known(ctx context.Context, log Reader, from *metadatav1.MetadataPosition) (bool, error) {
	whole := from.GetOffset() == 0 && from.GetIncarnation() == 0
	switch {
	case from == nil:
		return false, nil
	case h.holds(from):
		return true, nil
	}
	if _, incarnation := h.Identity(); from.GetIncarnation() == incarnation && from.GetOffset() > h.End() {
		// Maybe from a replica that is a little ahead, as a snapshot's id may be.
		bounded, cancel := context.WithTimeout(ctx, catchUp)
		defer cancel()
		if h.Wait(bounded, from.GetOffset()) == nil && h.holds(from) {
			return true, nil
		}
	}
	h.mu.RLock()
	below := from.GetOffset() < h.base && (whole || from.GetIncarnation() == h.state.Incarnation())
	h.mu.RUnlock()
	if !below {
		return whole, nil
	}
	// Only the log knows what was before the snapshot that this replica began with.
	epoch, err := log.EpochBefore(ctx, max(from.GetOffset(), 0))
	return err == nil && (whole || epoch == from.GetControllerEpoch()), err
}

// image sends the state without ranges and returns its position. The messages
// are of one moment, so they are made together; they hold no ranges.
func (h *Hub) image(send func(*metadatav1.WatchMetadataResponse) error) (int64, error) {
	var images []*metadatav1.MetadataImage
	h.Read(func(st *state.State) { images = st.Image(imageTopics) })
	for _, image := range images {
		for _, part := range split(image) {
			if err := send(&metadatav1.WatchMetadataResponse{Kind: &metadatav1.WatchMetadataResponse_Reset_{Reset_: part}}); err != nil {
				return 0, err
			}
		}
	}
	return images[0].GetPosition().GetOffset(), nil
}

// split cuts a message whose topics have many partitions.
func split(image *metadatav1.MetadataImage) []*metadatav1.MetadataImage {
	var out []*metadatav1.MetadataImage
	part := &metadatav1.MetadataImage{Position: image.GetPosition(), Cluster: image.GetCluster()}
	partitions := 0
	for _, t := range image.GetTopics() {
		if partitions > 0 && partitions+len(t.GetPartitions()) > imagePartitions {
			part.More = true
			out = append(out, part)
			part, partitions = &metadatav1.MetadataImage{Position: image.GetPosition()}, 0
		}
		part.Topics = append(part.Topics, t)
		partitions += len(t.GetPartitions())
	}
	part.More = image.GetMore()
	return append(out, part)
}

// membership leaves out the committed ranges; nil if nothing remains.
func membership(e *metadatav1.Entry) *metadatav1.Entry {
	keep := 0
	for _, ev := range e.GetEvents() {
		if !isRange(ev) {
			keep++
		}
	}
	switch keep {
	case 0:
		return nil
	case len(e.GetEvents()):
		return e
	}
	out := &metadatav1.Entry{
		Offset: e.GetOffset(), Incarnation: e.GetIncarnation(), ControllerEpoch: e.GetControllerEpoch(),
		FeatureLevel: e.GetFeatureLevel(), AppendTime: e.GetAppendTime(), WriteId: e.GetWriteId(),
		Events: make([]*metadatav1.Event, 0, keep),
	}
	for _, ev := range e.GetEvents() {
		if !isRange(ev) {
			out.Events = append(out.Events, ev)
		}
	}
	return out
}

func isRange(ev *metadatav1.Event) bool {
	return ev.GetCombinedSegmentCommitted() != nil || ev.GetRangeCommitted() != nil
}
