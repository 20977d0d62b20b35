package state

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Reasons in ReplicasChanged, beside ReasonOperator, and in the PartitionFenced
// that follows it.
const (
	ReasonReplicasChanged  = "replicas_changed"  // the leader is not among the new replicas
	ReasonReplicasReplaced = "replicas_replaced" // all replicas were offline for long
)

func (s *State) applyReplicasChanged(e *metadatav1.ReplicasChanged) error {
	p := s.lookup(PartitionID{e.GetTopicCreationOffset(), e.GetPartition()})
	if p == nil {
		return fmt.Errorf("no partition %d/%d", e.GetTopicCreationOffset(), e.GetPartition())
	}
	if err := s.checkReplicas(e.GetBrokerIds()); err != nil {
		return fmt.Errorf("%v: %w", p, err)
	}
	p.replicas = slices.Clone(e.GetBrokerIds())
	return nil
}

// checkLeaders says whether, behind an entry that changed replicas, the leader
// of each such partition is one of them.
func (s *State) checkLeaders(events []*metadatav1.Event) error {
	for _, event := range events {
		changed := event.GetReplicasChanged()
		if changed == nil {
			continue
		}
		p := s.lookup(PartitionID{changed.GetTopicCreationOffset(), changed.GetPartition()})
		if p != nil && p.leaderID != 0 && !slices.Contains(p.replicas, p.leaderID) {
			return fmt.Errorf("%v: leader %d is not among the replicas %v", p, p.leaderID, p.replicas)
		}
	}
	return nil
}

// DecideReassign replaces the replicas of a partition. It is true already, by
// whatever leader epoch, if they are those asked for. A leader that is not among
// them is fenced in the same entry: the first live one that is a replica already
// is elected, else the first live one. The errors are [*FieldError],
// [*UnknownTopicError], [*UnknownPartitionError], [*ConflictError] (the leader
// epoch is not the expected one), [*NoCandidateError] (a new leader is needed,
// and none of the new replicas is live) and [*ExhaustedError].
func (s *State) DecideReassign(r *metadatav1.ReassignPartitionRequest) ([]*metadatav1.Event, error) {
	p, err := s.find(r.GetTopic(), r.GetPartition())
	if err != nil {
		return nil, err
	}
	ids := r.GetBrokerIds()
	if len(ids) == 0 {
		return nil, &FieldError{Field: "broker_ids", Problem: "is empty"}
	}
	for i, id := range ids {
		switch {
		case s.brokers[id] == nil:
			return nil, &FieldError{Field: "broker_ids", Problem: fmt.Sprintf("broker %d is not registered", id)}
		case slices.Contains(ids[:i], id):
			return nil, &FieldError{Field: "broker_ids", Problem: fmt.Sprintf("broker %d is named twice", id)}
		}
	}
	if slices.Equal(ids, p.replicas) {
		return nil, nil
	}
	if want := r.GetExpectedLeaderEpoch(); want > 0 && want != p.leaderEpoch {
		return nil, &ConflictError{Subject: "expected_leader_epoch",
			Reason: fmt.Sprintf("the leader epoch of %v is %d, not %d", p, p.leaderEpoch, want)}
	}
	events := one(replicasEvent(p, ids, ReasonOperator))
	if p.leaderID == 0 || slices.Contains(ids, p.leaderID) {
		return events, nil
	}
	leader := s.firstLiveOf(ids, func(id int32) bool { return slices.Contains(p.replicas, id) })
	if leader == 0 {
		leader = s.firstLiveOf(ids, func(int32) bool { return true })
	}
	if leader == 0 {
		return nil, &NoCandidateError{Replicas: slices.Clone(ids)}
	}
	fence, err := s.fenceEvent(p, s.brokers[leader], ReasonReplicasChanged)
	if err != nil {
		return nil, err
	}
	return append(events, fence), nil
}

func (s *State) firstLiveOf(ids []int32, ok func(int32) bool) int32 {
	for _, id := range ids {
		if s.brokers[id].online && ok(id) {
			return id
		}
	}
	return 0
}

func replicasEvent(p *partition, ids []int32, reason string) *metadatav1.Event {
	return &metadatav1.Event{Kind: &metadatav1.Event_ReplicasChanged{ReplicasChanged: &metadatav1.ReplicasChanged{
		TopicCreationOffset: p.topic.creationOffset, Partition: p.index, BrokerIds: slices.Clone(ids), Reason: reason,
	}}}
}

// fenceEvent raises the fence of a partition for a broker; the error is an
// [*ExhaustedError].
func (s *State) fenceEvent(p *partition, leader *broker, reason string) (*metadatav1.Event, error) {
	last := max(p.leaderEpoch, lastEpoch(p.lineage))
	if last == math.MaxInt32 {
		return nil, &ExhaustedError{What: fmt.Sprintf("leader epochs of %v", p)}
	}
	return fencedEvent(&metadatav1.PartitionFenced{
		TopicCreationOffset: p.topic.creationOffset, Partition: p.index, LeaderEpoch: last + 1,
		LeaderId: leader.id, BrokerEpoch: leader.epoch, StartRule: p.startRule(), Reason: reason,
	}), nil
}

// Replacement is a broker to be made a replica, and the leader, of a partition
// that has lost all its replicas.
type Replacement struct {
	Partition PartitionID
	BrokerID  int32
}

// Orphaned says whether a partition has no live replica.
func (s *State) Orphaned(id PartitionID) bool {
	p := s.lookup(id)
	return p != nil && s.firstLive(p) == 0
}

// ChooseReplacements picks a live broker for each of the partitions that has no
// live replica: one that leads few partitions of the topic, then few at all,
// then holds few. Without a live broker there are none. The caller asks only for
// partitions that have been without for long enough, and of topics that need no
// replica for their records: those with the commit rule "object", which all have
// so far.
func (s *State) ChooseReplacements(ids ...PartitionID) []Replacement {
	var out []Replacement
	var loads []*load
	for _, id := range ids {
		p := s.lookup(id)
		if p == nil || s.firstLive(p) != 0 {
			continue
		}
		if loads == nil {
			loads = slices.DeleteFunc(s.loads(), func(l *load) bool { return !l.online })
			if len(loads) == 0 {
				return nil
			}
		}
		best := slices.MinFunc(loads, func(a, b *load) int {
			topic := p.topic.creationOffset
			return cmp.Or(cmp.Compare(a.led[topic], b.led[topic]), cmp.Compare(a.first, b.first), cmp.Compare(a.any, b.any),
				cmp.Compare(a.id, b.id))
		})
		best.lead(p.topic.creationOffset)
		best.any++
		out = append(out, Replacement{Partition: id, BrokerID: best.id})
	}
	return out
}

// DecideReplacements adds each broker to the replicas of its partition, as the
// least preferred, and elects it. The partitions are different ones, at most
// MaxElections / 2. The errors are [*FieldError], [*UnknownPartitionError],
// [*TransitionError] (the partition has a live replica, or the broker is not
// live) and [*ExhaustedError].
func (s *State) DecideReplacements(replacements ...Replacement) ([]*metadatav1.Event, error) {
	if len(replacements) > MaxElections/2 {
		return nil, &FieldError{Field: "replacements",
			Problem: fmt.Sprintf("%d, at most %d fit in an entry", len(replacements), MaxElections/2)}
	}
	events := make([]*metadatav1.Event, 0, 2*len(replacements))
	seen := make(map[PartitionID]bool, len(replacements))
	for _, r := range replacements {
		if seen[r.Partition] {
			return nil, &FieldError{Field: "replacements", Problem: fmt.Sprintf("%v is named twice", r.Partition)}
		}
		seen[r.Partition] = true
		p := s.lookup(r.Partition)
		if p == nil {
			return nil, &UnknownPartitionError{Topic: fmt.Sprint(r.Partition.TopicCreationOffset), Partition: r.Partition.Partition}
		}
		if live := s.firstLive(p); live != 0 {
			return nil, &TransitionError{Subject: p.String(), Reason: fmt.Sprintf("replica %d is live", live)}
		}
		b := s.brokers[r.BrokerID]
		if b == nil || !b.online {
			return nil, &TransitionError{Subject: fmt.Sprintf("broker %d", r.BrokerID), Reason: "is not live"}
		}
		fence, err := s.fenceEvent(p, b, ReasonReplicasReplaced)
		if err != nil {
			return nil, err
		}
		events = append(events, replicasEvent(p, append(slices.Clone(p.replicas), b.id), ReasonReplicasReplaced), fence)
	}
	return events, nil
}

// Preference is a partition whose leader is not the live replica that is
// preferred most.
type Preference struct {
	Partition   PartitionID
	LeaderID    int32
	LeaderEpoch int32
	BrokerID    int32 // the live replica that is preferred most
	BrokerEpoch int64 // of its registration
}

// Unpreferred calls fn for every partition whose epoch is open, whose leader is
// live, and before whose leader a live replica stands in the order of
// preference, until it returns false. In order of topic name and index.
func (s *State) Unpreferred(fn func(Preference) bool) {
	for _, t := range s.sorted {
		for i := range t.partitions {
			if pref, ok := s.preference(&t.partitions[i]); ok && !fn(pref) {
				return
			}
		}
	}
}

func (s *State) preference(p *partition) (Preference, bool) {
	if p.leaderID == p.replicas[0] || !s.isOpen(p) || !s.brokers[p.leaderID].online {
		return Preference{}, false
	}
	best := s.firstLive(p)
	if best == p.leaderID {
		return Preference{}, false
	}
	return Preference{
		Partition: p.key(), LeaderID: p.leaderID, LeaderEpoch: p.leaderEpoch, BrokerID: best, BrokerEpoch: s.brokers[best].epoch,
	}, true
}

// Handover is the wish to the leader that a preference means; false if it does
// not hold any more.
func (s *State) Handover(pref Preference) (*metadatav1.Handover, bool) {
	p := s.lookup(pref.Partition)
	if p == nil {
		return nil, false
	}
	if now, ok := s.preference(p); !ok || now != pref {
		return nil, false
	}
	return &metadatav1.Handover{
		Partition: &logv1.TopicIdPartition{
			TopicId: p.topic.id, TopicCreationOffset: p.topic.creationOffset, Partition: p.index,
		},
		BrokerId: pref.BrokerID, LeaderEpoch: pref.LeaderEpoch,
	}, true
}

// load is how much a broker has.
type load struct {
	*broker
	led    map[int64]int // partitions led, by topic
	first  int           // led at all
	any    int           // held
	behind map[int32]int // how often it is second behind each broker, in the topic being assigned
}

func (l *load) lead(topic int64) {
	l.led[topic]++
	l.first++
}

// loads are the loads of all brokers in order of id.
func (s *State) loads() []*load {
	out := make([]*load, 0, len(s.brokers))
	byID := make(map[int32]*load, len(s.brokers))
	for _, id := range sortedIDs(s.brokers) {
		l := &load{broker: s.brokers[id], led: map[int64]int{}, behind: map[int32]int{}}
		out, byID[id] = append(out, l), l
	}
	for _, t := range s.sorted {
		for i := range t.partitions {
			p := &t.partitions[i]
			if l := byID[p.leaderID]; l != nil {
				l.lead(t.creationOffset)
			}
			for _, id := range p.replicas {
				byID[id].any++
			}
		}
	}
	return out
}
