package snapshot

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/state"
)

const (
	clusterID   = "00000000-0000-4000-8000-00000000c1a5"
	incarnation = uint32(0x1f3a9c02)
)

// history is a log with its state; it plays the applied state, the log in etcd
// and the leadership of a replica.
type history struct {
	t     testing.TB
	s     *state.State
	epoch int64
	log   []*metadatav1.Entry
	bytes int64

	start     metalog.Start
	compacted int64
	leads     bool
	down      bool // etcd
	trims     int
}

func newHistory(t testing.TB) *history {
	h := &history{t: t, s: state.New()}
	events, err := h.s.DecideBootstrap(clusterID, incarnation)
	require.NoError(t, err)
	elected, err := h.s.DecideControllerElected(1, "m:1")
	require.NoError(t, err)
	h.write(append(events, elected...))
	h.write(one(h.s.DecideRegisterBroker(&metadatav1.RegisterBrokerRequest{
		BrokerId: 1, Address: "b:1", DirectoryId: "00000000-0000-4000-8000-000000000001",
	})))
	return h
}

func one(events []*metadatav1.Event, err error) []*metadatav1.Event {
	if err != nil {
		panic(err)
	}
	return events
}

func (h *history) write(events []*metadatav1.Event) {
	e := &metadatav1.Entry{
		Offset: h.s.EndOffset(), Incarnation: incarnation, ControllerEpoch: h.epoch, FeatureLevel: state.FeatureLevel, Events: events,
	}
	require.NoError(h.t, h.s.Apply(e))
	h.log = append(h.log, e)
	h.bytes += int64(proto.Size(e))
}

// elect makes another controller.
func (h *history) elect() {
	h.epoch = h.s.EndOffset()
	h.write(one(h.s.DecideControllerElected(1, "m:1")))
}

// grow adds entries, each a topic.
func (h *history) grow(n int) {
	for range n {
		at := h.s.EndOffset()
		h.write(one(h.s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: fmt.Sprint("t", at), PartitionCount: 1},
			fmt.Sprintf("00000000-0000-4000-8000-%012x", at))))
	}
}

func (h *history) Log() (end, bytes int64)    { return h.s.EndOffset(), h.bytes }
func (h *history) Identity() (string, uint32) { return h.s.ClusterID(), h.s.Incarnation() }
func (h *history) Clone() *state.State        { return h.s.Clone() }

func (h *history) Leadership() (metalog.Guard, bool) { return metalog.Guard{Key: "k"}, h.leads }

func (h *history) Tail(context.Context) (metalog.Tail, error) {
	if h.down {
		return metalog.Tail{}, metalog.ErrUnreachable
	}
	return metalog.Tail{End: int64(len(h.log)), Start: h.start}, nil
}

func (h *history) EpochBefore(_ context.Context, offset int64) (int64, error) {
	switch {
	case h.down:
		return 0, metalog.ErrUnreachable
	case offset == h.start.Offset:
		return h.start.ControllerEpoch, nil
	case offset < h.start.Offset:
		return 0, &metalog.TrimmedError{Offset: offset, Start: h.start}
	case offset > int64(len(h.log)):
		return 0, metalog.ErrRolledBack
	}
	return h.log[offset-1].GetControllerEpoch(), nil
}

func (h *history) Trim(_ context.Context, _ metalog.Guard, to metalog.Start) (revision, deleted int64, err error) {
	if h.down {
		return 0, 0, metalog.ErrUnreachable
	}
	h.trims++
	deleted = max(0, to.Offset-h.start.Offset)
	if deleted > 0 {
		h.start = to
	}
	return to.Offset, deleted, nil
}

func (h *history) Compact(_ context.Context, revision int64) error {
	h.compacted = revision
	return nil
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
