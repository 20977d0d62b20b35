package state

import (
	"slices"

	"github.com/braidlog/braid/pkg/topicconfig"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// EndOffset is the offset of the next entry: everything below is applied.
func (s *State) EndOffset() int64 { return s.end }

// Position is the end of what was applied, to resume from.
func (s *State) Position() *metadatav1.MetadataPosition {
	return &metadatav1.MetadataPosition{Incarnation: s.incarnation, ControllerEpoch: s.lastEpoch, Offset: s.end}
}

// ClusterID is the cluster's id, empty before the first entry.
func (s *State) ClusterID() string { return s.clusterID }

// Incarnation is the log's incarnation, 0 before the first entry.
func (s *State) Incarnation() uint32 { return s.incarnation }

// Controller is the newest controller; epoch is -1 before the first.
func (s *State) Controller() (epoch int64, id int32, address string) {
	return s.controller.epoch, s.controller.id, s.controller.address
}

// TopicCount is the number of live topics.
func (s *State) TopicCount() int { return len(s.sorted) }

// RangeCount is the number of committed ranges of live topics.
func (s *State) RangeCount() int64 { return s.rangeCount }

// ObjectCount is the number of combined objects with a range among them.
func (s *State) ObjectCount() int { return s.objects.live() }

// Broker returns a registered broker.
func (s *State) Broker(id int32) (*metadatav1.Broker, bool) {
	b := s.brokers[id]
	if b == nil {
		return nil, false
	}
	return brokerProto(b), true
}

// Brokers returns all registered brokers in order of id.
func (s *State) Brokers() []*metadatav1.Broker {
	out := make([]*metadatav1.Broker, 0, len(s.brokers))
	for _, id := range sortedIDs(s.brokers) {
		out = append(out, brokerProto(s.brokers[id]))
	}
	return out
}

// RemoteLogManager returns a registered remote-log manager.
func (s *State) RemoteLogManager(id int32) (*metadatav1.RemoteLogManager, bool) {
	r := s.rlms[id]
	if r == nil {
		return nil, false
	}
	return rlmProto(r), true
}

// RemoteLogManagers returns all registered remote-log managers in order of id.
func (s *State) RemoteLogManagers() []*metadatav1.RemoteLogManager {
	out := make([]*metadatav1.RemoteLogManager, 0, len(s.rlms))
	for _, id := range sortedIDs(s.rlms) {
		out = append(out, rlmProto(s.rlms[id]))
	}
	return out
}

// Settled says whether no commit that names the object can be accepted any
// more, except as the repeat of one that was: its rlm epoch is closed or its
// sequence is at or below the last accepted one. Once true it stays true, so a
// state however stale may be believed (design review S1). What the state does
// not know, another incarnation or an epoch above its end, is not settled.
func (s *State) Settled(o *logv1.ObjectRef) bool {
	if o.GetIncarnation() != s.incarnation || o.GetRlmEpoch() < 0 || o.GetRlmEpoch() >= s.end {
		return false
	}
	for _, r := range s.rlms {
		if r.epoch == o.GetRlmEpoch() && r.open {
			return o.GetSequence() <= r.lastSequence()
		}
	}
	return true
}

// PartitionView is a partition as elections and watchers see it.
type PartitionView struct {
	ID          PartitionID
	TopicID     string
	Topic       string // name
	Replicas    []int32
	LeaderEpoch int32 // 0 before the first election
	LeaderID    int32 // 0 for none
	BrokerEpoch int64 // of the leader, as elected
	FencedAt    int64 // metadata offset of the entry that raised the fence
	Opened      bool
	ObjectEnd   int64
}

func (s *State) view(p *partition) PartitionView {
	return PartitionView{
		ID: p.key(), TopicID: p.topic.id, Topic: p.topic.name, Replicas: slices.Clone(p.replicas),
		LeaderEpoch: p.leaderEpoch, LeaderID: p.leaderID, BrokerEpoch: p.brokerEpoch, FencedAt: p.fencedAt,
		Opened: s.isOpen(p), ObjectEnd: p.objectEnd,
	}
}

// View returns a partition of a live topic.
func (s *State) View(id PartitionID) (PartitionView, bool) {
	p := s.lookup(id)
	if p == nil {
		return PartitionView{}, false
	}
	return s.view(p), true
}

// FindPartition finds a partition by the name or the id of its live topic. The
// errors are [*UnknownTopicError] and [*UnknownPartitionError].
func (s *State) FindPartition(topicNameOrID string, partition int32) (PartitionID, error) {
	p, err := s.find(topicNameOrID, partition)
	if err != nil {
		return PartitionID{}, err
	}
	return p.key(), nil
}

// Partitions calls fn for every partition of live topics, in order of topic
// name and index, until it returns false.
func (s *State) Partitions(fn func(PartitionID) bool) {
	for _, t := range s.sorted {
		for i := range t.partitions {
			if !fn(t.partitions[i].key()) {
				return
			}
		}
	}
}

// Undecided calls fn for every partition for which [State.ChooseLeader] may ask
// for something: it has no leader, the leader's session is over or of another
// registration, or the epoch is not open.
func (s *State) Undecided(fn func(PartitionID) bool) {
	for _, t := range s.sorted {
		for i := range t.partitions {
			p := &t.partitions[i]
			if s.isOpen(p) && s.brokers[p.leaderID].online {
				continue
			}
			if !fn(p.key()) {
				return
			}
		}
	}
}

// TopicConfig returns the settings of a live topic by name or id.
func (s *State) TopicConfig(nameOrID string) (topicconfig.Config, bool) {
	t := s.findTopic(nameOrID)
	if t == nil {
		return topicconfig.Config{}, false
	}
	return t.config, true
}

// Topic returns a live topic by name or id, with its partitions. Where a topic
// is named as another's id, the name wins.
func (s *State) Topic(nameOrID string) (*metadatav1.Topic, bool) {
	t := s.findTopic(nameOrID)
	if t == nil {
		return nil, false
	}
	return s.topicProto(t, true), true
}

// TopicByID returns a live topic by its id alone, with its partitions.
func (s *State) TopicByID(id string) (*metadatav1.Topic, bool) {
	t := s.byID[id]
	if t == nil || t.deleted {
		return nil, false
	}
	return s.topicProto(t, true), true
}

// TopicByName returns a live topic by its name alone, with its partitions.
func (s *State) TopicByName(name string) (*metadatav1.Topic, bool) {
	t := s.byName[name]
	if t == nil {
		return nil, false
	}
	return s.topicProto(t, true), true
}

// Topics returns at most limit live topics with names above after, in order of
// name. Their partitions come with their lineage or without.
func (s *State) Topics(after string, limit int, withLineage bool) []*metadatav1.Topic {
	at, found := s.searchName(after)
	if found {
		at++
	}
	page := s.sorted[at:min(len(s.sorted), at+max(limit, 0))]
	out := make([]*metadatav1.Topic, len(page))
	for i, t := range page {
		out[i] = s.topicProto(t, withLineage)
	}
	return out
}

// Partition returns a partition of a live topic.
func (s *State) Partition(id PartitionID) (*metadatav1.Partition, bool) {
	p := s.lookup(id)
	if p == nil {
		return nil, false
	}
	return s.partitionProto(p, true), true
}

// Ranges returns at most limit ranges of a partition that end above from, in
// order of offset; more says that there are others behind them. The object
// names are left to the caller.
func (s *State) Ranges(id PartitionID, from int64, limit int) (ranges []*metadatav1.SegmentRange, more bool) {
	p := s.lookup(id)
	if p == nil {
		return nil, false
	}
	first := p.ranges.search(from)
	last := min(p.ranges.count, first+max(limit, 0))
	ranges = make([]*metadatav1.SegmentRange, 0, last-first)
	for i := first; i < last; i++ {
		ranges = append(ranges, s.rangeProto(p, i))
	}
	return ranges, last < p.ranges.count
}
