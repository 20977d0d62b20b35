package watch

import (
	"context"
	"errors"
	"time"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// imageTopics and imagePartitions bound a message of a reset to well below
// 1 MiB for topics of usual size.
const (
	imageTopics     = 64
	imagePartitions = 2_000
)

var errCaughtUp = errors.New("caught up")

// Metadata serves one stream of whole entries until ctx ends or send fails,
// with a progress mark every interval. It begins at from if that is a position
// of this log (offset 0 is one of every log), else with a reset. What is not in
// memory any more is read from the log.
func (h *Hub) Metadata(ctx context.Context, interval time.Duration, log Reader, from *metadatav1.MetadataPosition,
	all bool, send func(*metadatav1.WatchMetadataResponse) error,
) error {
	var next int64
	switch whole := from != nil && from.GetOffset() == 0 && from.GetIncarnation() == 0; {
	case whole:
	case from != nil && h.holds(from):
		next = from.GetOffset()
	default:
		var err error
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
		if err != nil && !errors.Is(err, errCaughtUp) {
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
