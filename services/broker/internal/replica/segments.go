package replica

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/backoff"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// maxWatched is how many partitions one segment stream takes.
const maxWatched = 10_000

// addAtOnce bounds the partitions named in one message.
const addAtOnce = 1_000

// readdPace is when a partition that could not be watched is asked for again:
// the replica asked may not know it yet.
const readdPace = 300 * time.Millisecond

type segmentStream = grpc.BidiStreamingClient[metadatav1.WatchSegmentsRequest, metadatav1.WatchSegmentsResponse]

// watchSegments follows the partitions of this broker, over reconnects, until
// ctx ends. Each stream begins every partition anew: the lists are compact, and
// a machine takes a repeated view for what it is.
func (m *Manager) watchSegments(ctx context.Context) error {
	policy := backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second, Multiplier: 2, Jitter: 0.5}
	for attempt := 1; ; attempt++ {
		began := time.Now()
		err := m.watchOnce(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		m.log.DebugContext(ctx, "segment stream ended, opening another", "err", err)
		if time.Since(began) > 10*time.Second {
			attempt = 1
		}
		if err := backoff.Sleep(ctx, policy.Delay(attempt, rand.Float64())); err != nil {
			return context.Cause(ctx)
		}
	}
}

// watch is one segment stream.
type watch struct {
	m       *Manager
	watched map[cluster.Key]*Partition
	// Owned by the receiver:
	resets map[cluster.Key][]remote.Range // collected of resets in several messages
}

func (m *Manager) watchOnce(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	s, err := metadatav1.NewSegmentServiceClient(m.deps.Metadata.Any()).WatchSegments(ctx)
	if err != nil {
		return fmt.Errorf("watch segments: %w", err)
	}
	w := &watch{m: m, watched: map[cluster.Key]*Partition{}, resets: map[cluster.Key][]remote.Range{}}
	failed := make(chan string, 64) // names asked for in vain; more are dropped and asked for with the next
	received := make(chan error, 1)
	go func() { received <- w.receive(s, failed) }() // ends with the stream
	defer func() {
		cancel()
		if err := <-received; err != nil {
			m.log.DebugContext(parent, "the stream of committed ranges ended", "err", err)
		}
	}()
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	again := false
	for {
		if err := w.assign(s, again); err != nil {
			return fmt.Errorf("watch segments: %w", err)
		}
		again = false
		select {
		case err := <-received:
			received <- err
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-m.assigned:
		case <-failed:
			retry.Reset(readdPace)
			select {
			case <-retry.C:
			case <-ctx.Done():
			}
			again = true
		}
	}
}

// assign asks for the partitions that are not watched yet; again asks for those
// once more that were never answered.
func (w *watch) assign(s segmentStream, again bool) error {
	var add []*metadatav1.WatchSegmentsPartition
	for _, p := range w.m.all() {
		if old := w.watched[p.key]; old == p && !w.m.takeStale(p) && (!again || p.known()) {
			continue
		}
		if len(w.watched) >= maxWatched {
			w.m.log.Error("too many partitions on this broker: not all are followed", "limit", maxWatched)
			break
		}
		w.watched[p.key] = p
		add = append(add, &metadatav1.WatchSegmentsPartition{Topic: p.topicID, Partition: p.partition})
	}
	if drop := w.unheld(); len(drop) > 0 {
		if err := s.Send(&metadatav1.WatchSegmentsRequest{Remove: drop}); err != nil {
			return err
		}
	}
	w.m.dropAbsent()
	for len(add) > 0 {
		n := min(len(add), addAtOnce)
		if err := s.Send(&metadatav1.WatchSegmentsRequest{Add: add[:n]}); err != nil {
			return err
		}
		add = add[n:]
	}
	return nil
}

// unheld forgets partitions that this broker does not hold any more and lists
// those that are to be told to the other side, which knows itself of deletions.
func (w *watch) unheld() (drop []*metadatav1.TopicPartition) {
	held := w.m.index.Load()
	for key, p := range w.watched {
		if _, ok := w.m.Cluster().TopicByCreation(key.CreationOffset); !ok {
			delete(w.watched, key)
		} else if held != nil && (*held)[key] == nil {
			delete(w.watched, key)
			drop = append(drop, &metadatav1.TopicPartition{Topic: p.topicID, Partition: p.partition})
		}
	}
	return drop
}

// refresh asks the metadata service anew what a partition's state is.
func (m *Manager) refresh(p *Partition) {
	m.mu.Lock()
	p.stale = true
	m.mu.Unlock()
	m.reassign()
}

func (m *Manager) takeStale(p *Partition) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := p.stale
	p.stale = false
	return was
}

// absentPatience is how long a partition that the cluster's picture does not
// list stays: the deletion itself comes with the segment stream.
const absentPatience = 30 * time.Second

// dropAbsent lets go of partitions whose deletion was never seen.
func (m *Manager) dropAbsent() {
	v := m.Cluster()
	for _, p := range m.all() {
		if _, ok := v.TopicByCreation(p.key.CreationOffset); ok {
			continue
		}
		m.mu.Lock()
		begun := p.absent
		p.absent = true
		m.mu.Unlock()
		if !begun {
			m.spawn(func() { m.awaitRemoval(p) })
		}
	}
}

// awaitRemoval waits for the deletion of a partition; without one it is left
// alone, on disk too (field report B007).
func (m *Manager) awaitRemoval(p *Partition) {
	timer := time.NewTimer(absentPatience)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-m.root.Done():
		return
	}
	_, back := m.Cluster().TopicByCreation(p.key.CreationOffset)
	m.mu.Lock()
	p.absent = false
	m.mu.Unlock()
	if !back {
		p.post(vanished{})
	}
}

func (w *watch) receive(s segmentStream, failed chan<- string) error {
	for {
		m, err := s.Recv()
		if err != nil {
			return fmt.Errorf("watch segments: %w", err)
		}
		switch k := m.GetKind().(type) {
		case *metadatav1.WatchSegmentsResponse_Reset_:
			err = w.reset(k.Reset_)
		case *metadatav1.WatchSegmentsResponse_Events:
			for _, e := range k.Events.GetEvents() {
				if err = w.event(e); err != nil {
					break
				}
			}
		case *metadatav1.WatchSegmentsResponse_Failure:
			f := k.Failure
			w.m.log.Debug("a partition can't be watched yet", "topic_id", f.GetTopic(), "partition", f.GetPartition(), "reason", f.GetReason())
			select {
			case failed <- f.GetTopic():
			default:
			}
		}
		if err != nil {
			return err
		}
	}
}

// find gives the partition an event is about, nil if it is not ours.
func (w *watch) find(id *logv1.TopicIdPartition) *Partition {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	return w.m.parts[cluster.Key{CreationOffset: id.GetTopicCreationOffset(), Partition: id.GetPartition()}]
}

func (w *watch) reset(r *metadatav1.SegmentsReset) error {
	p := w.find(r.GetPartition())
	if p == nil {
		return nil
	}
	list := w.resets[p.key]
	for _, m := range r.GetRanges() {
		rg, err := remote.FromProto(m)
		if err != nil {
			return fmt.Errorf("watch segments of %s/%d: %w", p.topic, p.partition, err)
		}
		if n := len(list); n > 0 && list[n-1].End != rg.Base {
			return fmt.Errorf("watch segments of %s/%d: range [%d, %d) follows one that ends at %d", p.topic, p.partition, rg.Base, rg.End, list[n-1].End)
		}
		list = append(list, rg)
	}
	if r.GetMore() {
		w.resets[p.key] = list
		return nil
	}
	delete(w.resets, p.key)
	view, err := viewFromProto(r)
	if err != nil {
		return fmt.Errorf("watch segments of %s/%d: %w", p.topic, p.partition, err)
	}
	// A slower replica may know less than this broker: a list never shrinks
	// within one incarnation.
	if end, ok := p.ranges.End(); !ok || len(list) > 0 && list[len(list)-1].End >= end {
		p.ranges.Replace(list)
	}
	p.post(partition.ViewReset{View: view})
	return nil
}

var errUnknownEvent = errors.New("the segment stream holds an event that this broker does not know")

func (w *watch) event(e *metadatav1.SegmentEvent) error {
	p := w.find(e.GetPartition())
	if p == nil {
		return nil
	}
	switch k := e.GetKind().(type) {
	case *metadatav1.SegmentEvent_RangeCommitted:
		rg, err := remote.FromProto(k.RangeCommitted)
		if err == nil {
			err = p.ranges.Append(rg)
		}
		if err != nil {
			return fmt.Errorf("watch segments of %s/%d: %w", p.topic, p.partition, err)
		}
		p.post(partition.RangeCommitted{Base: rg.Base, End: rg.End, EndHash: rg.EndHash})
	case *metadatav1.SegmentEvent_FenceRaised:
		f := k.FenceRaised
		p.post(partition.FenceRaised{
			Fence: fenceFromProto(f.GetFence()), Leader: f.GetLeaderId(),
			Exact: f.GetStartRule() == metadatav1.StartRule_START_RULE_EXACT,
		})
	case *metadatav1.SegmentEvent_OpenedEpoch:
		o := k.OpenedEpoch
		l, err := lineageFromProto(o.GetLineage())
		if err != nil {
			return fmt.Errorf("watch segments of %s/%d: %w", p.topic, p.partition, err)
		}
		p.post(partition.EpochOpened{Fence: fenceFromProto(o.GetFence()), Start: o.GetStartOffset(), Lineage: l})
	case *metadatav1.SegmentEvent_Removed:
		p.post(partition.Removed{})
	default:
		return errUnknownEvent
	}
	return nil
}

// known says whether the machine has a view.
func (p *Partition) known() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.machine.View()
	return ok
}
