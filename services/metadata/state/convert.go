package state

import (
	"maps"
	"slices"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

func brokerProto(b *broker) *metadatav1.Broker {
	return &metadatav1.Broker{
		BrokerId: b.id, Address: b.address, Zone: b.zone, BrokerEpoch: b.epoch, Online: b.online, DirectoryId: b.directoryID,
	}
}

func rlmProto(r *remoteLogManager) *metadatav1.RemoteLogManager {
	return &metadatav1.RemoteLogManager{
		RlmId: r.id, Address: r.address, Zone: r.zone, RlmEpoch: r.epoch, Open: r.open, LastAcceptedSequence: r.lastSequence(),
	}
}

// Cluster describes the cluster: members, controller, counts.
func (s *State) Cluster() *metadatav1.GetClusterResponse {
	return &metadatav1.GetClusterResponse{
		ClusterId: s.clusterID, Incarnation: s.incarnation,
		ControllerEpoch: s.controller.epoch, ControllerId: s.controller.id, ControllerAddress: s.controller.address,
		MetadataOffset: s.end, Brokers: s.Brokers(), RemoteLogManagers: s.RemoteLogManagers(),
		FeatureLevel: s.featureLevel, TopicCount: int32(len(s.sorted)), RangeCount: s.rangeCount,
	}
}

// Image is the whole state without its ranges, in messages of at most
// topicsPerMessage topics, all but the last with more set.
func (s *State) Image(topicsPerMessage int) []*metadatav1.MetadataImage {
	topicsPerMessage = max(topicsPerMessage, 1)
	images := []*metadatav1.MetadataImage{{Position: s.Position(), Cluster: s.Cluster()}}
	for after := ""; ; {
		page := s.Topics(after, topicsPerMessage, true)
		last := images[len(images)-1]
		if len(page) == 0 {
			last.More = false
			return images
		}
		after = page[len(page)-1].GetName()
		if len(last.GetTopics()) > 0 {
			last = &metadatav1.MetadataImage{Position: s.Position()}
			images = append(images, last)
		}
		last.Topics, last.More = page, true
	}
}

func (s *State) topicProto(t *topic, withLineage bool) *metadatav1.Topic {
	out := &metadatav1.Topic{
		TopicId: t.id, Name: t.name, CreationOffset: t.creationOffset, Configs: maps.Clone(t.overrides),
		Partitions: make([]*metadatav1.Partition, len(t.partitions)),
	}
	for i := range t.partitions {
		out.Partitions[i] = s.partitionProto(&t.partitions[i], withLineage)
	}
	return out
}

func (s *State) partitionProto(p *partition, withLineage bool) *metadatav1.Partition {
	out := &metadatav1.Partition{
		Partition: p.index, ReplicaIds: slices.Clone(p.replicas), LeaderId: p.leaderID, Fence: s.fenceProto(p), Opened: s.isOpen(p),
		EpochStart: p.epochStart, StartRule: p.startRule(), LogStartOffset: p.logStart, ObjectEndOffset: p.objectEnd,
		ObjectEndChainHash: hashBytes(p.hash), RangeCount: int64(p.ranges.count), ObjectBytes: p.bytes, FenceReason: p.reason,
	}
	if withLineage {
		out.Lineage = lineageProto(p.lineage)
	}
	return out
}

// fenceProto is the fence as it was raised: after its leader's broker registered
// again it still names the old broker epoch, and is not open.
func (s *State) fenceProto(p *partition) *logv1.Fence {
	return &logv1.Fence{Incarnation: s.incarnation, LeaderEpoch: p.leaderEpoch, BrokerEpoch: p.brokerEpoch}
}

func (s *State) rangeProto(p *partition, i int) *metadatav1.SegmentRange {
	r := p.ranges.at(i)
	o := s.objects.of(r)
	return &metadatav1.SegmentRange{
		BaseOffset: p.ranges.base(i), EndOffset: r.end,
		Object:   &logv1.ObjectRef{Incarnation: o.incarnation, RlmEpoch: o.rlmEpoch, Sequence: o.sequence, Attempt: o.attempt},
		Position: r.position, LengthBytes: int64(r.length), Crc32C: r.crc32c, EndChainHash: hashBytes(r.hash),
		MaxTimestampMs: r.maxTimestamp, LeaderEpoch: r.leaderEpoch, ProducersComplete: r.object&1 != 0, ObjectSizeBytes: o.size,
	}
}

// Reset describes a partition to a subscriber that begins or begins again, with
// the ranges that end above from, in messages of at most perMessage ranges, all
// but the last with more set. The object names are left to the caller. It is nil
// if there is no such partition.
func (s *State) Reset(id PartitionID, from int64, perMessage int) []*metadatav1.SegmentsReset {
	p := s.lookup(id)
	if p == nil {
		return nil
	}
	perMessage = max(perMessage, 1)
	var out []*metadatav1.SegmentsReset
	for next := p.ranges.search(from); ; {
		m := &metadatav1.SegmentsReset{
			Partition: partitionName(p), Topic: p.topic.name, Position: s.Position(), Fence: s.fenceProto(p), LeaderId: p.leaderID,
			Opened: s.isOpen(p), StartRule: p.startRule(), EpochStart: p.epochStart, Lineage: lineageProto(p.lineage),
			LogStartOffset: p.logStart, ObjectEndOffset: p.objectEnd, ObjectEndChainHash: hashBytes(p.hash),
		}
		last := min(p.ranges.count, next+perMessage)
		for ; next < last; next++ {
			m.Ranges = append(m.Ranges, s.rangeProto(p, next))
		}
		m.More = next < p.ranges.count
		if out = append(out, m); !m.More {
			return out
		}
	}
}

func partitionName(p *partition) *logv1.TopicIdPartition {
	return &logv1.TopicIdPartition{TopicId: p.topic.id, TopicCreationOffset: p.topic.creationOffset, Partition: p.index}
}

// SegmentEvents is what an entry means to those who watch partitions. It has to
// be called on the state right behind Apply of that very entry, since some
// events are told by their result. The object names are left to the caller.
func (s *State) SegmentEvents(e *metadatav1.Entry) []*metadatav1.SegmentEvent {
	var out []*metadatav1.SegmentEvent
	add := func(p *partition, event *metadatav1.SegmentEvent) {
		event.Partition = partitionName(p)
		out = append(out, event)
	}
	var combined *metadatav1.CombinedSegmentCommitted
	for _, event := range e.GetEvents() {
		switch kind := event.GetKind().(type) {
		case *metadatav1.Event_CombinedSegmentCommitted:
			combined = kind.CombinedSegmentCommitted
		case *metadatav1.Event_RangeCommitted:
			r := kind.RangeCommitted
			if p := s.lookup(PartitionID{r.GetTopicCreationOffset(), r.GetPartition()}); p != nil && combined != nil {
				add(p, &metadatav1.SegmentEvent{Kind: &metadatav1.SegmentEvent_RangeCommitted{RangeCommitted: committedRange(r, combined)}})
			}
		case *metadatav1.Event_PartitionFenced:
			if p := s.lookup(PartitionID{kind.PartitionFenced.GetTopicCreationOffset(), kind.PartitionFenced.GetPartition()}); p != nil {
				add(p, &metadatav1.SegmentEvent{Kind: &metadatav1.SegmentEvent_FenceRaised{FenceRaised: &metadatav1.FenceRaised{
					Fence: s.fenceProto(p), LeaderId: p.leaderID, StartRule: p.startRule(),
				}}})
			}
		case *metadatav1.Event_EpochOpened:
			if p := s.lookup(PartitionID{kind.EpochOpened.GetTopicCreationOffset(), kind.EpochOpened.GetPartition()}); p != nil {
				add(p, &metadatav1.SegmentEvent{Kind: &metadatav1.SegmentEvent_OpenedEpoch{OpenedEpoch: &metadatav1.OpenedEpoch{
					Fence: s.fenceProto(p), StartOffset: p.epochStart, Lineage: lineageProto(p.lineage),
				}}})
			}
		case *metadatav1.Event_TopicDeleted:
			if t := s.topics[kind.TopicDeleted.GetTopicCreationOffset()]; t != nil {
				for i := range t.partitions {
					add(&t.partitions[i], &metadatav1.SegmentEvent{
						Kind: &metadatav1.SegmentEvent_Removed{Removed: &metadatav1.PartitionRemoved{}},
					})
				}
			}
		}
	}
	return out
}

func committedRange(r *metadatav1.RangeCommitted, c *metadatav1.CombinedSegmentCommitted) *metadatav1.SegmentRange {
	o := c.GetObject()
	return &metadatav1.SegmentRange{
		BaseOffset: r.GetBaseOffset(), EndOffset: r.GetEndOffset(),
		Object: &logv1.ObjectRef{
			Incarnation: o.GetIncarnation(), RlmEpoch: o.GetRlmEpoch(), Sequence: o.GetSequence(), Attempt: o.GetAttempt(),
		},
		Position: r.GetPosition(), LengthBytes: r.GetLengthBytes(), Crc32C: r.GetCrc32C(), EndChainHash: slices.Clone(r.GetEndChainHash()),
		MaxTimestampMs: r.GetMaxTimestampMs(), LeaderEpoch: r.GetLeaderEpoch(), ProducersComplete: r.GetProducersComplete(),
		ObjectSizeBytes: c.GetSizeBytes(),
	}
}
