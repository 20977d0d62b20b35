package metadata_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/config"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/metadata/metadatatest"
	"github.com/braidlog/braid/services/metadata/state"
)

type segmentsStream = grpc.BidiStreamingClient[metadatav1.WatchSegmentsRequest, metadatav1.WatchSegmentsResponse]

// mirror folds a WatchSegments stream into what its subscriber knows, and checks
// on the way that nothing is missing, nothing comes twice and positions never go
// back.
type mirror struct {
	t        *testing.T
	stream   segmentsStream
	ends     map[string]int64 // object end by topic/partition
	fences   map[string]int32
	opened   map[string]bool
	resets   int
	messages int
	position *metadatav1.MetadataPosition
	failures []*metadatav1.WatchSegmentsFailure
	names    map[string]string // topic id to name
}

func newMirror(t *testing.T, stream segmentsStream) *mirror {
	return &mirror{
		t: t, stream: stream, ends: map[string]int64{}, fences: map[string]int32{}, opened: map[string]bool{}, names: map[string]string{},
	}
}

func (m *mirror) key(topicID string, partition int32) string {
	return fmt.Sprintf("%s/%d", m.names[topicID], partition)
}

func (m *mirror) at(p *metadatav1.MetadataPosition) {
	m.t.Helper()
	if m.position != nil {
		require.GreaterOrEqual(m.t, p.GetOffset(), m.position.GetOffset(), "positions never go back")
	}
	m.position = p
}

// step takes one message; it returns true for a progress mark.
func (m *mirror) step() (bool, error) {
	m.t.Helper()
	r, err := m.stream.Recv()
	if err != nil {
		return false, err
	}
	m.messages++
	switch {
	case r.GetReset_() != nil:
		reset := r.GetReset_()
		m.names[reset.GetPartition().GetTopicId()] = reset.GetTopic()
		key := m.key(reset.GetPartition().GetTopicId(), reset.GetPartition().GetPartition())
		if !reset.GetMore() {
			m.resets++
			m.at(reset.GetPosition())
		}
		m.ends[key], m.fences[key], m.opened[key] = reset.GetObjectEndOffset(), reset.GetFence().GetLeaderEpoch(), reset.GetOpened()
		if n := len(reset.GetRanges()); n > 0 && !reset.GetMore() {
			require.Equal(m.t, reset.GetObjectEndOffset(), reset.GetRanges()[n-1].GetEndOffset())
		}
	case r.GetEvents() != nil:
		m.at(r.GetEvents().GetPosition())
		for _, ev := range r.GetEvents().GetEvents() {
			key := m.key(ev.GetPartition().GetTopicId(), ev.GetPartition().GetPartition())
			switch {
			case ev.GetRangeCommitted() != nil:
				require.Equal(m.t, m.ends[key], ev.GetRangeCommitted().GetBaseOffset(), "contiguous")
				require.NotEmpty(m.t, ev.GetRangeCommitted().GetObjectName())
				m.ends[key] = ev.GetRangeCommitted().GetEndOffset()
			case ev.GetFenceRaised() != nil:
				require.Greater(m.t, ev.GetFenceRaised().GetFence().GetLeaderEpoch(), m.fences[key])
				m.fences[key], m.opened[key] = ev.GetFenceRaised().GetFence().GetLeaderEpoch(), false
			case ev.GetOpenedEpoch() != nil:
				require.Equal(m.t, m.fences[key], ev.GetOpenedEpoch().GetFence().GetLeaderEpoch())
				require.NotEmpty(m.t, ev.GetOpenedEpoch().GetLineage())
				m.opened[key] = true
			case ev.GetRemoved() != nil:
				delete(m.ends, key)
			}
		}
	case r.GetProgress() != nil:
		m.at(r.GetProgress())
		return true, nil
	case r.GetFailure() != nil:
		m.failures = append(m.failures, r.GetFailure())
	}
	return false, nil
}

func (m *mirror) until(what string, ok func() bool) {
	m.t.Helper()
	for !ok() {
		_, err := m.step()
		require.NoError(m.t, err, what)
	}
}

func add(topics ...string) *metadatav1.WatchSegmentsRequest {
	r := &metadatav1.WatchSegmentsRequest{}
	for _, topic := range topics {
		r.Add = append(r.Add, &metadatav1.WatchSegmentsPartition{Topic: topic})
	}
	return r
}

// fed is a cluster with a broker, a remote-log manager and two topics that are
// led and fed.
type fed struct {
	ctx     context.Context
	cluster *metadatatest.Cluster
	c       clients
	rlm     *metadatav1.RegisterRemoteLogManagerResponse
	leaders map[string]*leader
	seq     int64
}

func feed(t *testing.T, opts metadatatest.Options, topics ...string) *fed {
	t.Helper()
	change := opts.Change
	opts.Change = func(c *metadata.Config) {
		c.SessionTimeout = config.Duration(time.Minute) // nobody needs to send heartbeats
		if change != nil {
			change(c)
		}
	}
	f := &fed{ctx: bounded(t), cluster: metadatatest.Start(t, opts), leaders: map[string]*leader{}}
	f.c = of(f.cluster.Controller())
	registerBroker(t, f.ctx, f.c, 1)
	f.rlm = registerRLM(t, f.ctx, f.c, 1)
	for _, name := range topics {
		f.leaders[name] = open(t, f.ctx, f.c, createTopic(t, f.ctx, f.c, name, 1), 0)
	}
	return f
}

// commit commits the next range of a topic; one rlm numbers them all.
func (f *fed) commit(topic string) {
	l := f.leaders[topic]
	l.seq = f.seq
	f.seq++
	l.commit(f.rlm, 1, 0)
}

func TestWatchSegments(t *testing.T) {
	f := feed(t, metadatatest.Options{}, "a", "b")
	f.commit("a")
	f.commit("a")
	stream, err := f.c.WatchSegments(f.ctx)
	require.NoError(t, err)
	m := newMirror(t, stream)
	require.NoError(t, stream.Send(add("a", "nobody")))
	m.until("reset", func() bool { return m.resets == 1 && len(m.failures) == 1 })
	assert.Equal(t, "nobody", m.failures[0].GetTopic())
	assert.Equal(t, "UNKNOWN_TOPIC_OR_PARTITION", m.failures[0].GetReason())
	assert.EqualValues(t, 20, m.ends["a/0"])
	assert.True(t, m.opened["a/0"])

	f.commit("b") // not watched
	f.commit("a")
	m.until("event", func() bool { return m.ends["a/0"] == 30 })
	assert.NotContains(t, m.ends, "b/0")

	// The set changes on the open stream.
	require.NoError(t, stream.Send(add("b")))
	m.until("second reset", func() bool { return m.resets == 2 })
	assert.EqualValues(t, 10, m.ends["b/0"])
	f.commit("b")
	f.commit("a")
	m.until("both", func() bool { return m.ends["a/0"] == 40 && m.ends["b/0"] == 20 })
	require.NoError(t, stream.Send(&metadatav1.WatchSegmentsRequest{Remove: []*metadatav1.TopicPartition{{Topic: "a"}}}))
	for mark := false; !mark; { // the request was done
		mark, err = m.step()
		require.NoError(t, err)
	}
	f.commit("a")
	f.commit("b")
	m.until("only b", func() bool { return m.ends["b/0"] == 30 })
	assert.EqualValues(t, 40, m.ends["a/0"])

	// Elections and the end of a topic.
	_, err = f.c.ElectLeader(f.ctx, &metadatav1.ElectLeaderRequest{Topic: "b"})
	require.NoError(t, err)
	m.until("fence", func() bool { return m.fences["b/0"] == 2 })
	assert.False(t, m.opened["b/0"])
	_, err = f.c.DeleteTopic(f.ctx, &metadatav1.DeleteTopicRequest{Name: "b"})
	require.NoError(t, err)
	m.until("removed", func() bool { _, there := m.ends["b/0"]; return !there })

	// A position that comes late is refused.
	require.NoError(t, stream.Send(&metadatav1.WatchSegmentsRequest{Resume: m.position}))
	for err == nil {
		_, err = m.step()
	}
	requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD)
}

func TestWatchSegmentsResumes(t *testing.T) {
	f := feed(t, metadatatest.Options{Replicas: 2}, "a")
	f.commit("a")
	first, cut := context.WithCancel(f.ctx)
	stream, err := f.c.WatchSegments(first)
	require.NoError(t, err)
	m := newMirror(t, stream)
	require.NoError(t, stream.Send(add("a")))
	m.until("reset", func() bool { return m.resets == 1 })
	f.commit("a")
	m.until("event", func() bool { return m.ends["a/0"] == 20 })
	cut()
	for err == nil {
		_, err = m.step()
	}
	f.commit("a")
	f.commit("a")

	resume := func(m *mirror, at *metadatav1.MetadataPosition, r *metadatatest.Replica) *mirror {
		t.Helper()
		stream, err := of(r).WatchSegments(f.ctx)
		require.NoError(t, err)
		next := newMirror(t, stream)
		next.ends, next.fences, next.names, next.opened = m.ends, m.fences, m.names, m.opened
		req := add("a")
		req.Resume = at
		require.NoError(t, stream.Send(req))
		return next
	}
	// On another replica too: the position is one of the log, not of a process.
	for _, r := range f.cluster.Replicas() {
		copied := *m
		copied.ends = map[string]int64{"a/0": 20}
		require.NoError(t, of(r).waitFor(f.ctx, f.c))
		again := resume(&copied, m.position, r)
		again.until("caught up", func() bool { return again.ends["a/0"] == 40 })
		assert.Zero(t, again.resets, "resumed, not reset")
	}
	// A position of another log, or of another branch of this one, is reset.
	for _, p := range []*metadatav1.MetadataPosition{
		{Incarnation: m.position.GetIncarnation() ^ 1, ControllerEpoch: m.position.GetControllerEpoch(), Offset: m.position.GetOffset()},
		{Incarnation: m.position.GetIncarnation(), ControllerEpoch: m.position.GetControllerEpoch() + 1, Offset: m.position.GetOffset()},
		{Incarnation: m.position.GetIncarnation(), ControllerEpoch: m.position.GetControllerEpoch(), Offset: 1 << 40},
	} {
		again := resume(newMirror(t, nil), p, f.cluster.Controller())
		again.until("reset", func() bool { return again.resets == 1 })
		assert.EqualValues(t, 40, again.ends["a/0"])
	}
}

// waitFor waits until this replica has applied what the controller has.
func (c clients) waitFor(ctx context.Context, controller clients) error {
	want, err := controller.GetCluster(ctx, &metadatav1.GetClusterRequest{})
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		have, err := c.GetCluster(ctx, &metadatav1.GetClusterRequest{})
		if err == nil && have.GetMetadataOffset() >= want.GetMetadataOffset() {
			return nil
		}
	}
	return ctx.Err()
}

// A subscriber further behind than the memory reaches gets a reset when it
// resumes, and one that falls behind on an open stream is ended.
func TestSlowSubscribersCostNoMemory(t *testing.T) {
	f := feed(t, metadatatest.Options{Change: func(c *metadata.Config) {
		c.RingEntries = 16
		c.Stall = config.Duration(300 * time.Millisecond)
		c.Progress = config.Duration(10 * time.Millisecond)
	}}, "a")
	stream, err := f.c.WatchSegments(f.ctx)
	require.NoError(t, err)
	m := newMirror(t, stream)
	require.NoError(t, stream.Send(add("a")))
	m.until("reset", func() bool { return m.resets == 1 })
	old := m.position
	for range 40 {
		f.commit("a")
	}
	again, err := f.c.WatchSegments(f.ctx)
	require.NoError(t, err)
	n := newMirror(t, again)
	req := add("a")
	req.Resume = old
	require.NoError(t, again.Send(req))
	n.until("reset", func() bool { return n.resets == 1 })
	assert.EqualValues(t, 400, n.ends["a/0"])

	// Not reading: the client's window fills with resets, then the server gives up.
	lazy, err := f.c.WatchSegments(f.ctx)
	require.NoError(t, err)
	big := &metadatav1.WatchSegmentsRequest{}
	for range 20_000 {
		big.Add = append(big.Add, &metadatav1.WatchSegmentsPartition{Topic: "a"})
	}
	var sendErr error
	for range 20 {
		if sendErr = lazy.Send(big); sendErr != nil {
			break
		}
	}
	l := newMirror(t, lazy)
	awaitStall(t, f)
	for err == nil {
		_, err = l.step()
	}
	requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED)
}

// awaitStall lets the server's stall time pass by doing work elsewhere.
func awaitStall(t *testing.T, f *fed) {
	t.Helper()
	deadline := time.Now().Add(time.Second)
	require.Eventually(t, func() bool {
		f.commit("a")
		return time.Now().After(deadline)
	}, 20*time.Second, time.Millisecond)
}

func TestWatchMetadata(t *testing.T) {
	f := feed(t, metadatatest.Options{Change: func(c *metadata.Config) { c.RingEntries = 16 }}, "a", "b")
	for range 30 {
		f.commit("a")
	}
	info, err := f.c.GetCluster(f.ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)

	// From offset 0, entry by entry, although memory holds the newest only: the
	// state made of them is the replica's.
	ctx, stop := context.WithCancel(f.ctx)
	defer stop()
	whole, err := f.c.WatchMetadata(ctx, &metadatav1.WatchMetadataRequest{
		From: &metadatav1.MetadataPosition{}, Filter: metadatav1.MetadataFilter_METADATA_FILTER_ALL,
	})
	require.NoError(t, err)
	copied := state.New()
	var middle *metadatav1.MetadataPosition
	for copied.EndOffset() < info.GetMetadataOffset() {
		r, err := whole.Recv()
		require.NoError(t, err)
		require.NotNil(t, r.GetEntry(), "%v", r)
		require.NoError(t, copied.Apply(r.GetEntry()))
		if copied.EndOffset() == 12 {
			middle = copied.Position()
		}
	}
	assert.EqualValues(t, 30, copied.RangeCount())
	assert.Equal(t, info.GetClusterId(), copied.ClusterID())
	r, err := whole.Recv()
	require.NoError(t, err)
	assert.Equal(t, info.GetMetadataOffset(), r.GetProgress().GetOffset())

	// From a position, membership only: no ranges, the next one follows.
	members, err := f.c.WatchMetadata(ctx, &metadatav1.WatchMetadataRequest{From: middle})
	require.NoError(t, err)
	createTopic(t, f.ctx, f.c, "c", 1)
	for created := false; !created; {
		r, err := members.Recv()
		require.NoError(t, err)
		for _, ev := range r.GetEntry().GetEvents() {
			assert.Nil(t, ev.GetRangeCommitted())
			created = created || ev.GetTopicCreated().GetName() == "c"
		}
	}

	// Without one, or with one of another log: an image, then entries.
	for _, from := range []*metadatav1.MetadataPosition{nil, {Incarnation: 1, ControllerEpoch: 7, Offset: 3}} {
		s, err := f.c.WatchMetadata(ctx, &metadatav1.WatchMetadataRequest{From: from})
		require.NoError(t, err)
		r, err := s.Recv()
		require.NoError(t, err)
		image := r.GetReset_()
		require.NotNil(t, image)
		assert.False(t, image.GetMore())
		assert.Equal(t, info.GetClusterId(), image.GetCluster().GetClusterId())
		require.Len(t, image.GetTopics(), 3)
		assert.Equal(t, "a", image.GetTopics()[0].GetName())
		_, err = f.c.UpdateTopic(f.ctx, &metadatav1.UpdateTopicRequest{Name: "c", Set: map[string]string{
			"producer.expiry": fmt.Sprintf("%dm", 10+image.GetPosition().GetOffset()),
		}})
		require.NoError(t, err)
		for {
			r, err := s.Recv()
			require.NoError(t, err)
			if e := r.GetEntry(); e != nil {
				assert.Equal(t, image.GetPosition().GetOffset(), e.GetOffset())
				break
			}
		}
	}
}

// Draining ends watches with a status to resume from, and nothing waits for them.
func TestDrainEndsStreams(t *testing.T) {
	f := feed(t, metadatatest.Options{}, "a")
	stream, err := f.c.WatchSegments(f.ctx)
	require.NoError(t, err)
	m := newMirror(t, stream)
	require.NoError(t, stream.Send(add("a")))
	m.until("reset", func() bool { return m.resets == 1 })
	began := time.Now()
	require.NoError(t, f.cluster.Controller().Stop())
	assert.Less(t, time.Since(began), 10*time.Second)
	for err == nil {
		_, err = m.step()
	}
	require.NotErrorIs(t, err, context.Canceled)
	requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_DRAINING)
}
