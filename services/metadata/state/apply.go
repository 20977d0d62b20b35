package state

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/braidlog/braid/pkg/topicconfig"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Apply folds the next entry into the state: whole, or the state is of no more
// use. The errors are [*OffsetError], [*UnknownEventError] and
// [*BadEntryError]; after one of the latter two every later call returns it
// again. The state keeps nothing of the entry's memory but strings.
func (s *State) Apply(e *metadatav1.Entry) error {
	if s.failed != nil {
		return s.failed
	}
	if e.GetOffset() != s.end {
		return &OffsetError{Want: s.end, Got: e.GetOffset()}
	}
	if err := s.apply(e); err != nil {
		s.failed = err
		return err
	}
	s.end++
	s.lastEpoch = e.GetControllerEpoch()
	s.featureLevel = max(s.featureLevel, e.GetFeatureLevel())
	return nil
}

func (s *State) apply(e *metadatav1.Entry) error {
	if e.GetFeatureLevel() > FeatureLevel {
		return &UnknownEventError{Offset: s.end, Index: -1, FeatureLevel: e.GetFeatureLevel()}
	}
	if e.GetFeatureLevel() == 0 {
		return s.bad(-1, "no feature level")
	}
	if len(e.GetEvents()) == 0 {
		return s.bad(-1, "no events")
	}
	var commit openCommit
	changed := false // replicas of a partition
	for i, event := range e.GetEvents() {
		if event.GetKind() == nil {
			return &UnknownEventError{Offset: s.end, Index: i, FeatureLevel: e.GetFeatureLevel()}
		}
		if i == 0 {
			if err := s.admit(e, event); err != nil {
				return s.bad(-1, err.Error())
			}
		}
		if commit.active && event.GetRangeCommitted() == nil {
			return s.bad(i, "an event between the ranges of a combined object")
		}
		if err := s.applyEvent(e, event, &commit); err != nil {
			if unknown := (*UnknownEventError)(nil); errors.As(err, &unknown) {
				unknown.Index = i
				return unknown
			}
			return s.bad(i, err.Error())
		}
		changed = changed || event.GetReplicasChanged() != nil
	}
	if changed {
		if err := s.checkLeaders(e.GetEvents()); err != nil {
			return s.bad(len(e.GetEvents())-1, err.Error())
		}
	}
	if commit.active && !commit.complete() {
		return s.bad(len(e.GetEvents())-1, "the ranges of the combined object are not those that were accepted")
	}
	return nil
}

// admit checks who wrote the entry: this log, and its controller or the one
// that takes over with this very entry.
func (s *State) admit(e *metadatav1.Entry, first *metadatav1.Event) error {
	if created := first.GetClusterCreated(); created != nil {
		if e.GetIncarnation() != created.GetIncarnation() || e.GetControllerEpoch() != 0 {
			return errors.New("incarnation or controller epoch are not those of a first entry")
		}
		return nil
	}
	if s.end == 0 {
		return errors.New("the log does not begin with ClusterCreated")
	}
	if e.GetIncarnation() != s.incarnation {
		return fmt.Errorf("incarnation %08x in a log of %08x", e.GetIncarnation(), s.incarnation)
	}
	want := s.controller.epoch
	if first.GetControllerElected() != nil {
		want = s.end
	}
	if e.GetControllerEpoch() != want {
		return fmt.Errorf("controller epoch %d, expected %d", e.GetControllerEpoch(), want)
	}
	return nil
}

func (s *State) bad(index int, reason string) error {
	return &BadEntryError{Offset: s.end, Index: index, Reason: reason}
}

func (s *State) applyEvent(e *metadatav1.Entry, event *metadatav1.Event, commit *openCommit) error {
	switch kind := event.GetKind().(type) {
	case *metadatav1.Event_ClusterCreated:
		return s.applyClusterCreated(kind.ClusterCreated)
	case *metadatav1.Event_ControllerElected:
		return s.applyControllerElected(e, kind.ControllerElected)
	case *metadatav1.Event_BrokerRegistered:
		return s.applyBrokerRegistered(kind.BrokerRegistered)
	case *metadatav1.Event_BrokerOffline:
		return s.applyBrokerOffline(kind.BrokerOffline)
	case *metadatav1.Event_RemoteLogManagerRegistered:
		return s.applyRLMRegistered(kind.RemoteLogManagerRegistered)
	case *metadatav1.Event_RemoteLogManagerClosed:
		return s.applyRLMClosed(kind.RemoteLogManagerClosed)
	case *metadatav1.Event_ProducerIdsAllocated:
		return s.applyProducerIDs(kind.ProducerIdsAllocated)
	case *metadatav1.Event_TopicCreated:
		return s.applyTopicCreated(kind.TopicCreated)
	case *metadatav1.Event_TopicUpdated:
		return s.applyTopicUpdated(kind.TopicUpdated)
	case *metadatav1.Event_TopicDeleted:
		return s.applyTopicDeleted(kind.TopicDeleted)
	case *metadatav1.Event_PartitionFenced:
		return s.applyPartitionFenced(kind.PartitionFenced)
	case *metadatav1.Event_ReplicasChanged:
		return s.applyReplicasChanged(kind.ReplicasChanged)
	case *metadatav1.Event_EpochOpened:
		return s.applyEpochOpened(kind.EpochOpened)
	case *metadatav1.Event_CombinedSegmentCommitted:
		return s.applyCombinedSegment(kind.CombinedSegmentCommitted, commit)
	case *metadatav1.Event_RangeCommitted:
		return s.applyRange(kind.RangeCommitted, commit)
	default:
		return &UnknownEventError{Offset: s.end, FeatureLevel: e.GetFeatureLevel()}
	}
}

func (s *State) applyClusterCreated(e *metadatav1.ClusterCreated) error {
	if s.end != 0 || s.clusterID != "" {
		return errors.New("ClusterCreated in a log that has begun")
	}
	if err := checkNewCluster(e.GetClusterId(), e.GetIncarnation()); err != nil {
		return err
	}
	s.clusterID = e.GetClusterId()
	s.incarnation = e.GetIncarnation()
	return nil
}

func (s *State) applyControllerElected(entry *metadatav1.Entry, e *metadatav1.ControllerElected) error {
	if entry.GetControllerEpoch() != s.end {
		return errors.New("a controller is elected in the entry of another")
	}
	if e.GetMetadataId() < 1 {
		return fmt.Errorf("metadata id %d", e.GetMetadataId())
	}
	if s.controller.epoch == s.end {
		return errors.New("two controllers in one entry")
	}
	s.controller = controller{epoch: s.end, id: e.GetMetadataId(), address: e.GetAddress()}
	return nil
}

func (s *State) applyBrokerRegistered(e *metadatav1.BrokerRegistered) error {
	if e.GetBrokerId() < 1 {
		return fmt.Errorf("broker id %d", e.GetBrokerId())
	}
	if b := s.brokers[e.GetBrokerId()]; b != nil && b.epoch == s.end {
		return fmt.Errorf("broker %d registers twice in one entry", b.id)
	}
	s.brokers[e.GetBrokerId()] = &broker{
		id: e.GetBrokerId(), address: e.GetAddress(), zone: e.GetZone(), directoryID: e.GetDirectoryId(),
		epoch: s.end, online: true, logsIntact: e.GetLogsIntact(),
	}
	return nil
}

func (s *State) applyBrokerOffline(e *metadatav1.BrokerOffline) error {
	b := s.brokers[e.GetBrokerId()]
	if b == nil || b.epoch != e.GetBrokerEpoch() || !b.online {
		return fmt.Errorf("broker %d has no session with epoch %d", e.GetBrokerId(), e.GetBrokerEpoch())
	}
	b.online = false
	return nil
}

func (s *State) applyRLMRegistered(e *metadatav1.RemoteLogManagerRegistered) error {
	if e.GetRlmId() < 1 {
		return fmt.Errorf("rlm id %d", e.GetRlmId())
	}
	r := &remoteLogManager{id: e.GetRlmId(), address: e.GetAddress(), zone: e.GetZone(), epoch: s.end, open: true}
	if before := s.rlms[r.id]; before != nil {
		if before.epoch == s.end {
			return fmt.Errorf("rlm %d registers twice in one entry", r.id)
		}
		r.previous = before.previous
		if before.last != nil {
			r.previous = before.last
		}
	}
	s.rlms[r.id] = r
	return nil
}

func (s *State) applyRLMClosed(e *metadatav1.RemoteLogManagerClosed) error {
	r := s.rlms[e.GetRlmId()]
	if r == nil || r.epoch != e.GetRlmEpoch() || !r.open {
		return fmt.Errorf("rlm %d has no open epoch %d", e.GetRlmId(), e.GetRlmEpoch())
	}
	r.open = false
	return nil
}

func (s *State) applyProducerIDs(e *metadatav1.ProducerIdsAllocated) error {
	if e.GetFirst() != s.producers || e.GetCount() < 1 || int64(e.GetCount()) > maxProducerCounter-s.producers {
		return fmt.Errorf("producer ids [%d, +%d) where %d is next", e.GetFirst(), e.GetCount(), s.producers)
	}
	s.producers += int64(e.GetCount())
	return nil
}

func (s *State) applyTopicCreated(e *metadatav1.TopicCreated) error {
	if s.topics[s.end] != nil {
		return errors.New("two topics in one entry")
	}
	if err := topicconfig.ValidateName(e.GetName()); err != nil {
		return err
	}
	if e.GetTopicId() == "" || s.byID[e.GetTopicId()] != nil {
		return fmt.Errorf("topic id %q is empty or taken", e.GetTopicId())
	}
	if s.byName[e.GetName()] != nil {
		return fmt.Errorf("topic %q exists", e.GetName())
	}
	config, err := topicconfig.Parse(e.GetConfigs())
	if err != nil {
		return err
	}
	if n := len(e.GetAssignments()); n < 1 || n > MaxPartitions {
		return fmt.Errorf("%d partitions", n)
	}
	t := &topic{
		id: e.GetTopicId(), name: strings.Clone(e.GetName()), creationOffset: s.end,
		overrides: config.Overrides(), config: config, partitions: make([]partition, len(e.GetAssignments())),
	}
	for i, a := range e.GetAssignments() {
		if err := s.checkReplicas(a.GetBrokerIds()); err != nil {
			return fmt.Errorf("partition %d: %w", i, err)
		}
		t.partitions[i] = partition{
			topic: t, index: int32(i), replicas: slices.Clone(a.GetBrokerIds()), openedAt: -1, fencedAt: s.end,
		}
	}
	s.topics[t.creationOffset] = t
	s.byID[t.id] = t
	s.byName[t.name] = t
	at, _ := s.searchName(t.name)
	s.sorted = slices.Insert(s.sorted, at, t)
	return nil
}

func (s *State) searchName(name string) (int, bool) {
	return slices.BinarySearchFunc(s.sorted, name, func(t *topic, name string) int { return strings.Compare(t.name, name) })
}

func (s *State) checkReplicas(ids []int32) error {
	if len(ids) == 0 {
		return errors.New("no replicas")
	}
	for i, id := range ids {
		if s.brokers[id] == nil || slices.Contains(ids[:i], id) {
			return fmt.Errorf("replicas %v: %d is unknown or listed twice", ids, id)
		}
	}
	return nil
}

func (s *State) applyTopicUpdated(e *metadatav1.TopicUpdated) error {
	t := s.topics[e.GetTopicCreationOffset()]
	if t == nil || t.deleted {
		return fmt.Errorf("no topic created at %d", e.GetTopicCreationOffset())
	}
	config, err := topicconfig.Parse(e.GetConfigs())
	if err != nil {
		return err
	}
	t.config, t.overrides = config, config.Overrides()
	return nil
}

// applyTopicDeleted leaves a tombstone: the id stays taken and the fences are
// remembered (design review F7); ranges and the objects that only they were in
// are forgotten.
func (s *State) applyTopicDeleted(e *metadatav1.TopicDeleted) error {
	t := s.topics[e.GetTopicCreationOffset()]
	if t == nil || t.deleted {
		return fmt.Errorf("no topic created at %d", e.GetTopicCreationOffset())
	}
	for i := range t.partitions {
		p := &t.partitions[i]
		for r := range p.ranges.count {
			s.objects.release(p.ranges.at(r))
		}
		s.rangeCount -= int64(p.ranges.count)
		t.partitions[i] = partition{
			topic: t, index: p.index, leaderEpoch: p.leaderEpoch, leaderID: p.leaderID, brokerEpoch: p.brokerEpoch,
			fencedAt: p.fencedAt, reason: p.reason, openedAt: -1,
		}
	}
	t.deleted = true
	t.overrides, t.config = nil, topicconfig.Config{}
	delete(s.byName, t.name)
	at, _ := s.searchName(t.name)
	s.sorted = slices.Delete(s.sorted, at, at+1)
	return nil
}

func checkNewCluster(clusterID string, incarnation uint32) error {
	if !isUUID(clusterID) {
		return &FieldError{Field: "cluster_id", Problem: fmt.Sprintf("%q is not a UUID", clusterID)}
	}
	if incarnation == 0 || incarnation > math.MaxInt32 {
		return &FieldError{Field: "incarnation", Problem: fmt.Sprintf("%d is not within 1 to 2^31-1", incarnation)}
	}
	return nil
}

// isUUID says whether id is a UUID in its canonical text form.
func isUUID(id string) bool {
	if len(id) != 36 {
		return false
	}
	for i, c := range []byte(id) {
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return false
			}
		default:
			if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f') {
				return false
			}
		}
	}
	return true
}
