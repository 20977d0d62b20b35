package replica_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

const (
	clusterID      = "11111111-2222-4333-8444-555555555555"
	topicID        = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
	topicName      = "quakes"
	creation       = int64(3)
	incarnation    = uint32(77)
	sessionTimeout = 4 * time.Second
)

// world is a hand-played metadata service: one replica, always the controller.
// It judges commits by the rules of the design, and takes orders from tests.
type world struct {
	metadatav1.UnimplementedClusterServiceServer
	metadatav1.UnimplementedSegmentServiceServer
	metadatav1.UnimplementedSnapshotServiceServer
	metadatav1.UnimplementedTopicServiceServer

	mu       sync.Mutex
	offset   int64
	configs  map[string]string
	brokers  map[int32]*metadatav1.Broker
	rlms     map[int32]*metadatav1.RemoteLogManager
	parts    []*part
	members  map[*stream[*metadatav1.WatchMetadataResponse]]bool
	segments map[*stream[*metadatav1.WatchSegmentsResponse]]map[int32]bool
	// Orders.
	silent     bool // heartbeats are not answered
	elect      int32
	refuseOpen func(*metadatav1.OpenEpochRequest) error
	openings   int
	elections  int
	stopped    []int32
	removed    bool
	wishes     []*metadatav1.Handover // told with every heartbeat, to whomever
	electErr   error                  // elections fail with it, and are counted
	refusals   int
}

// part is the truth about one partition.
type part struct {
	index   int32
	fence   *logv1.Fence
	leader  int32
	opened  bool
	start   int64
	lineage []*logv1.LineageEntry
	end     int64
	hash    chainhash.Hash
	ranges  []*metadatav1.SegmentRange
	// replicas in order of preference.
	replicas []int32
}

// stream is an unbounded queue to one subscriber.
type stream[T any] struct {
	mu   sync.Mutex
	list []T
	wake chan struct{}
}

func newStream[T any]() *stream[T] { return &stream[T]{wake: make(chan struct{}, 1)} }

func (s *stream[T]) put(m T) {
	s.mu.Lock()
	s.list = append(s.list, m)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// pump sends what is put until the context ends.
func (s *stream[T]) pump(ctx context.Context, send func(T) error) error {
	for {
		s.mu.Lock()
		list := s.list
		s.list = nil
		s.mu.Unlock()
		for _, m := range list {
			if err := send(m); err != nil {
				return err
			}
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func newWorld(partitions int) *world {
	w := &world{
		offset: 10, configs: map[string]string{},
		brokers: map[int32]*metadatav1.Broker{}, rlms: map[int32]*metadatav1.RemoteLogManager{},
		members:  map[*stream[*metadatav1.WatchMetadataResponse]]bool{},
		segments: map[*stream[*metadatav1.WatchSegmentsResponse]]map[int32]bool{},
	}
	for i := range partitions {
		w.parts = append(w.parts, &part{index: int32(i), fence: &logv1.Fence{Incarnation: incarnation}, replicas: []int32{1, 2}})
	}
	return w
}

func (w *world) register(s *grpc.Server) {
	metadatav1.RegisterClusterServiceServer(s, w)
	metadatav1.RegisterSegmentServiceServer(s, w)
	metadatav1.RegisterSnapshotServiceServer(s, w)
	metadatav1.RegisterTopicServiceServer(s, w)
}

func (w *world) id(index int32) *logv1.TopicIdPartition {
	return &logv1.TopicIdPartition{TopicId: topicID, TopicCreationOffset: creation, Partition: index}
}

func (w *world) position() *metadatav1.MetadataPosition {
	return &metadatav1.MetadataPosition{Incarnation: incarnation, ControllerEpoch: 1, Offset: w.offset}
}

// append publishes an entry; mu is held.
func (w *world) append(events ...*metadatav1.Event) int64 {
	e := &metadatav1.Entry{Offset: w.offset, Incarnation: incarnation, ControllerEpoch: 1, FeatureLevel: 1, Events: events}
	w.offset++
	for s := range w.members {
		s.put(&metadatav1.WatchMetadataResponse{Kind: &metadatav1.WatchMetadataResponse_Entry{Entry: e}})
	}
	return e.Offset
}

// tell publishes an event of one partition; mu is held.
func (w *world) tell(index int32, e *metadatav1.SegmentEvent) {
	e.Partition = w.id(index)
	for s, watched := range w.segments {
		if watched[index] {
			s.put(&metadatav1.WatchSegmentsResponse{Kind: &metadatav1.WatchSegmentsResponse_Events{Events: &metadatav1.SegmentEvents{
				Position: w.position(), Events: []*metadatav1.SegmentEvent{e},
			}}})
		}
	}
}

func (w *world) topic() *metadatav1.Topic {
	t := &metadatav1.Topic{TopicId: topicID, Name: topicName, CreationOffset: creation, Configs: w.configs}
	for _, p := range w.parts {
		t.Partitions = append(t.Partitions, &metadatav1.Partition{
			Partition: p.index, ReplicaIds: slices.Clone(p.replicas), LeaderId: p.leader, Fence: p.fence, Opened: p.opened, EpochStart: p.start,
			ObjectEndOffset: p.end, ObjectEndChainHash: p.hash.Bytes(), Lineage: p.lineage,
		})
	}
	return t
}

// addRLM opens a remote-log manager's epoch.
func (w *world) addRLM(id int32, address, zone string) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	epoch := w.append(&metadatav1.Event{Kind: &metadatav1.Event_RemoteLogManagerRegistered{
		RemoteLogManagerRegistered: &metadatav1.RemoteLogManagerRegistered{RlmId: id, Address: address, Zone: zone},
	}})
	w.rlms[id] = &metadatav1.RemoteLogManager{RlmId: id, Address: address, Zone: zone, RlmEpoch: epoch, Open: true}
	return epoch
}

func (w *world) closeRLM(id int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rlms[id]
	r.Open = false
	w.append(&metadatav1.Event{Kind: &metadatav1.Event_RemoteLogManagerClosed{
		RemoteLogManagerClosed: &metadatav1.RemoteLogManagerClosed{RlmId: id, RlmEpoch: r.RlmEpoch},
	}})
}

// fenceLocked elects a leader, in one entry with other events.
func (w *world) fenceLocked(p *part, leader int32, others ...*metadatav1.Event) {
	var epoch int64
	if b := w.brokers[leader]; b != nil {
		epoch = b.BrokerEpoch
	}
	p.fence = &logv1.Fence{Incarnation: incarnation, LeaderEpoch: p.fence.GetLeaderEpoch() + 1, BrokerEpoch: epoch}
	p.leader, p.opened = leader, false
	w.append(append(others, &metadatav1.Event{Kind: &metadatav1.Event_PartitionFenced{PartitionFenced: &metadatav1.PartitionFenced{
		TopicCreationOffset: creation, Partition: p.index, LeaderEpoch: p.fence.LeaderEpoch, LeaderId: leader, BrokerEpoch: epoch,
		StartRule: metadatav1.StartRule_START_RULE_FREE,
	}}})...)
	w.tell(p.index, &metadatav1.SegmentEvent{Kind: &metadatav1.SegmentEvent_FenceRaised{FenceRaised: &metadatav1.FenceRaised{
		Fence: p.fence, LeaderId: leader, StartRule: metadatav1.StartRule_START_RULE_FREE,
	}}})
}

// reassign changes who holds a partition, and elects another leader with it when
// the present one is not among them.
func (w *world) reassign(index int32, replicas ...int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.parts[index]
	p.replicas = replicas
	e := &metadatav1.Event{Kind: &metadatav1.Event_ReplicasChanged{ReplicasChanged: &metadatav1.ReplicasChanged{
		TopicCreationOffset: creation, Partition: index, BrokerIds: replicas,
	}}}
	if slices.Contains(replicas, p.leader) {
		w.append(e)
	} else {
		w.fenceLocked(p, replicas[0], e)
	}
}

// fence elects a leader of a partition.
func (w *world) fence(index, leader int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fenceLocked(w.parts[index], leader)
}

// openLocked opens an epoch.
func (w *world) openLocked(p *part, start int64) {
	kept := p.lineage[:0:0]
	for _, e := range p.lineage {
		if e.StartOffset < start {
			kept = append(kept, e)
		}
	}
	p.lineage = append(kept, &logv1.LineageEntry{Leadership: &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: p.fence.LeaderEpoch}, StartOffset: start})
	p.opened, p.start = true, start
	w.append(&metadatav1.Event{Kind: &metadatav1.Event_EpochOpened{EpochOpened: &metadatav1.EpochOpened{
		TopicCreationOffset: creation, Partition: p.index, LeaderEpoch: p.fence.LeaderEpoch, StartOffset: start,
	}}})
	w.tell(p.index, &metadatav1.SegmentEvent{Kind: &metadatav1.SegmentEvent_OpenedEpoch{OpenedEpoch: &metadatav1.OpenedEpoch{
		Fence: p.fence, StartOffset: start, Lineage: p.lineage,
	}}})
}

// commit judges a range as the controller does.
func (w *world) commit(d *logv1.RangeDescriptor, ref *logv1.ObjectRef, size int64) *metadatav1.RangeVerdict {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.parts[d.GetPartition().GetPartition()]
	outcome := metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
	base := chainhash.Hash(d.GetBaseChainHash())
	switch {
	case !proto.Equal(d.GetFence(), p.fence) || !p.opened:
		outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_FENCED
	case d.GetBaseOffset() > p.end:
		outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_GAP
	case d.GetBaseOffset() < p.end:
		outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED
	case base != p.hash:
		outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH
	}
	if outcome == metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED {
		p.end, p.hash = d.GetEndOffset(), chainhash.Hash(d.GetEndChainHash())
		rg := &metadatav1.SegmentRange{
			BaseOffset: d.GetBaseOffset(), EndOffset: d.GetEndOffset(), Object: ref, Position: 0, LengthBytes: d.GetLengthBytes(),
			Crc32C: d.GetCrc32C(), EndChainHash: d.GetEndChainHash(), MaxTimestampMs: d.GetMaxTimestampMs(),
			LeaderEpoch: d.GetFence().GetLeaderEpoch(), ProducersComplete: d.GetProducersComplete(), ObjectSizeBytes: size,
		}
		p.ranges = append(p.ranges, rg)
		w.offset++
		w.tell(p.index, &metadatav1.SegmentEvent{Kind: &metadatav1.SegmentEvent_RangeCommitted{RangeCommitted: rg}})
	}
	return w.verdictLocked(p, d, outcome)
}

func (w *world) verdictLocked(p *part, d *logv1.RangeDescriptor, outcome metadatav1.RangeOutcome) *metadatav1.RangeVerdict {
	v := &metadatav1.RangeVerdict{
		Outcome: outcome, ObjectEndOffset: p.end, ObjectEndChainHash: p.hash.Bytes(), Fence: p.fence, Opened: p.opened,
	}
	for _, e := range p.lineage {
		if e.GetLeadership().GetLeaderEpoch() > d.GetFence().GetLeaderEpoch() {
			v.NextEpochStart = &e.StartOffset
			break
		}
	}
	return v
}

func (w *world) RegisterBroker(_ context.Context, r *metadatav1.RegisterBrokerRequest) (*metadatav1.RegisterBrokerResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.GetClusterId() != clusterID || r.GetDirectoryId() == "" {
		return nil, status.Error(codes.FailedPrecondition, "other cluster")
	}
	epoch := w.append(&metadatav1.Event{Kind: &metadatav1.Event_BrokerRegistered{BrokerRegistered: &metadatav1.BrokerRegistered{
		BrokerId: r.GetBrokerId(), Address: r.GetAddress(), Zone: r.GetZone(), DirectoryId: r.GetDirectoryId(),
	}}})
	w.brokers[r.GetBrokerId()] = &metadatav1.Broker{BrokerId: r.GetBrokerId(), Address: r.GetAddress(), BrokerEpoch: epoch, Online: true}
	if r.GetBrokerId() == w.elect {
		for _, p := range w.parts {
			w.fenceLocked(p, w.elect)
		}
	}
	return &metadatav1.RegisterBrokerResponse{
		BrokerEpoch: epoch, ClusterId: clusterID, Incarnation: incarnation, SessionTimeout: durationpb.New(sessionTimeout), ControllerEpoch: 1,
	}, nil
}

func (w *world) BrokerSession(s grpc.BidiStreamingServer[metadatav1.BrokerSessionRequest, metadatav1.BrokerSessionResponse]) error {
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		w.mu.Lock()
		silent := w.silent
		current := w.brokers[m.GetBrokerId()].GetBrokerEpoch() == m.GetBrokerEpoch()
		if m.GetStopping() {
			w.stopped = append(w.stopped, m.GetBrokerId())
		}
		w.mu.Unlock()
		w.mu.Lock()
		wishes := slices.Clone(w.wishes)
		w.mu.Unlock()
		if !current {
			return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH, "broker", "registered again")
		}
		if silent {
			continue
		}
		if err := s.Send(&metadatav1.BrokerSessionResponse{Heartbeat: m.GetHeartbeat(), ControllerEpoch: 1, Handovers: wishes}); err != nil {
			return err
		}
	}
}

func (w *world) OpenEpoch(_ context.Context, r *metadatav1.OpenEpochRequest) (*metadatav1.OpenEpochResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.openings++
	if w.refuseOpen != nil {
		if err := w.refuseOpen(r); err != nil {
			return nil, err
		}
	}
	p := w.parts[r.GetPartition().GetPartition()]
	switch {
	case !proto.Equal(r.GetFence(), p.fence):
		return nil, rpcerr.FencedLeaderEpoch("p", r.GetFence().GetLeaderEpoch(), p.fence.LeaderEpoch)
	case p.opened && p.start == r.GetStartOffset():
		return &metadatav1.OpenEpochResponse{}, nil
	case p.opened || r.GetStartOffset() < p.end || r.GetObjectEndOffset() != p.end || chainhash.Hash(r.GetObjectEndChainHash()) != p.hash:
		return nil, rpcerr.IllegalTransition("partition", "unfit", "another start")
	}
	below := slices.DeleteFunc(slices.Clone(p.lineage), func(e *logv1.LineageEntry) bool { return e.StartOffset >= r.GetStartOffset() })
	if !slices.EqualFunc(below, r.GetLineage(), func(a, b *logv1.LineageEntry) bool { return proto.Equal(a, b) }) {
		return nil, rpcerr.IllegalTransition("partition", "unfit", "the partition's lineage")
	}
	w.openLocked(p, r.GetStartOffset())
	return &metadatav1.OpenEpochResponse{}, nil
}

func (w *world) ElectLeader(_ context.Context, r *metadatav1.ElectLeaderRequest) (*metadatav1.ElectLeaderResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.parts[r.GetPartition()]
	if w.electErr != nil {
		w.refusals++
		return nil, w.electErr
	}
	if r.GetExpectedLeaderEpoch() != p.fence.LeaderEpoch {
		return nil, rpcerr.Conflict("partition")
	}
	w.elections++
	leader := r.GetBrokerId()
	if leader == 0 {
		leader = p.leader
	}
	w.fenceLocked(p, leader)
	return &metadatav1.ElectLeaderResponse{}, nil
}

func (w *world) GetTopic(context.Context, *metadatav1.GetTopicRequest) (*metadatav1.GetTopicResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return &metadatav1.GetTopicResponse{Topic: proto.Clone(w.topic()).(*metadatav1.Topic)}, nil
}

func (w *world) WatchMetadata(_ *metadatav1.WatchMetadataRequest, s grpc.ServerStreamingServer[metadatav1.WatchMetadataResponse]) error {
	q := newStream[*metadatav1.WatchMetadataResponse]()
	w.mu.Lock()
	img := &metadatav1.MetadataImage{Position: w.position(), Cluster: &metadatav1.GetClusterResponse{ClusterId: clusterID, Incarnation: incarnation}}
	for _, b := range w.brokers {
		img.Cluster.Brokers = append(img.Cluster.Brokers, proto.Clone(b).(*metadatav1.Broker))
	}
	for _, r := range w.rlms {
		img.Cluster.RemoteLogManagers = append(img.Cluster.RemoteLogManagers, proto.Clone(r).(*metadatav1.RemoteLogManager))
	}
	if !w.removed {
		img.Topics = append(img.Topics, proto.Clone(w.topic()).(*metadatav1.Topic))
	}
	q.put(&metadatav1.WatchMetadataResponse{Kind: &metadatav1.WatchMetadataResponse_Reset_{Reset_: img}})
	w.members[q] = true
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.members, q)
		w.mu.Unlock()
	}()
	return q.pump(s.Context(), s.Send)
}

func (w *world) WatchSegments(s grpc.BidiStreamingServer[metadatav1.WatchSegmentsRequest, metadatav1.WatchSegmentsResponse]) error {
	q := newStream[*metadatav1.WatchSegmentsResponse]()
	watched := map[int32]bool{}
	w.mu.Lock()
	w.segments[q] = watched
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.segments, q)
		w.mu.Unlock()
	}()
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(s.Context())
	defer cancel()
	go func() {
		for {
			m, err := s.Recv()
			if err != nil {
				cancel()
				done <- err
				return
			}
			w.mu.Lock()
			for _, r := range m.GetRemove() {
				delete(watched, r.GetPartition())
			}
			for _, a := range m.GetAdd() {
				p := w.parts[a.GetPartition()]
				watched[a.GetPartition()] = true
				q.put(&metadatav1.WatchSegmentsResponse{Kind: &metadatav1.WatchSegmentsResponse_Reset_{Reset_: proto.Clone(w.resetOf(p)).(*metadatav1.SegmentsReset)}})
			}
			w.mu.Unlock()
		}
	}()
	err := q.pump(ctx, s.Send)
	if e := <-done; err == nil {
		err = e
	}
	return err
}

func (w *world) resetOf(p *part) *metadatav1.SegmentsReset {
	return &metadatav1.SegmentsReset{
		Partition: w.id(p.index), Topic: topicName, Position: w.position(), Ranges: p.ranges, Fence: p.fence, LeaderId: p.leader,
		Opened: p.opened, StartRule: metadatav1.StartRule_START_RULE_FREE, EpochStart: p.start, Lineage: p.lineage,
		ObjectEndOffset: p.end, ObjectEndChainHash: p.hash.Bytes(),
	}
}

// objectEnd is where the truth stands.
func (w *world) objectEnd(index int32) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.parts[index].end
}

func (w *world) with(fn func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fn()
}

// removeTopic deletes the topic.
func (w *world) removeTopic() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.removed = true
	w.append(&metadatav1.Event{Kind: &metadatav1.Event_TopicDeleted{TopicDeleted: &metadatav1.TopicDeleted{TopicCreationOffset: creation}}})
	for _, p := range w.parts {
		w.tell(p.index, &metadatav1.SegmentEvent{Kind: &metadatav1.SegmentEvent_Removed{Removed: &metadatav1.PartitionRemoved{}}})
	}
}
