package state

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/braidlog/braid/pkg/topicconfig"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// DecideCreateTopic creates a topic with leaders for its partitions. topicID is
// a fresh UUID. The events name [State.EndOffset] as the creation offset. The
// errors are [*FieldError], [*topicconfig.NameError] and [*topicconfig.Error]
// (joined), [*TopicExistsError] and [*NoCandidateError].
func (s *State) DecideCreateTopic(r *metadatav1.CreateTopicRequest, topicID string) ([]*metadatav1.Event, error) {
	if err := topicconfig.ValidateName(r.GetName()); err != nil {
		return nil, err
	}
	if t := s.byName[r.GetName()]; t != nil {
		return nil, &TopicExistsError{Name: t.name, TopicID: t.id}
	}
	if !isUUID(topicID) {
		return nil, &FieldError{Field: "topic_id", Problem: fmt.Sprintf("%q is not a UUID", topicID)}
	}
	if t := s.byID[topicID]; t != nil {
		return nil, &TopicExistsError{Name: t.name, TopicID: t.id}
	}
	if n := r.GetPartitionCount(); n < 1 || n > MaxPartitions {
		return nil, &FieldError{Field: "partition_count", Problem: fmt.Sprintf("%d is not within 1 to %d", n, MaxPartitions)}
	}
	config, err := topicconfig.Parse(r.GetConfigs())
	if err != nil {
		return nil, err
	}
	if len(s.brokers) == 0 {
		return nil, &NoCandidateError{}
	}
	factor := int(r.GetReplicationFactor())
	if factor == 0 {
		factor = min(3, len(s.brokers))
	}
	if factor < 1 || factor > len(s.brokers) {
		return nil, &FieldError{Field: "replication_factor",
			Problem: fmt.Sprintf("%d is not within 1 to %d, the registered brokers", factor, len(s.brokers))}
	}
	assignments := s.assign(int(r.GetPartitionCount()), factor)
	events := one(&metadatav1.Event{Kind: &metadatav1.Event_TopicCreated{TopicCreated: &metadatav1.TopicCreated{
		TopicId: topicID, Name: r.GetName(), Configs: config.Overrides(), Assignments: assignments,
	}}})
	if len(assignments) > MaxElections { // they get their leaders as any partition without one does
		return events, nil
	}
	for i, a := range assignments {
		leader := s.brokers[a.GetBrokerIds()[0]]
		if !leader.online { // then none of its replicas is
			continue
		}
		events = append(events, fencedEvent(&metadatav1.PartitionFenced{
			TopicCreationOffset: s.end, Partition: int32(i), LeaderEpoch: 1, LeaderId: leader.id, BrokerEpoch: leader.epoch,
			StartRule: metadatav1.StartRule_START_RULE_FREE, Reason: ReasonCreated,
		}))
	}
	return events, nil
}

// assign spreads replicas: first places evenly over the live brokers, the new
// topic's among themselves before those of all topics together (after failovers
// one broker may lead little, and must not get a whole topic for it); the others
// over zones first, then so that the partitions led by one broker have many
// different second choices, then evenly. It depends on the state alone.
func (s *State) assign(partitions, factor int) []*metadatav1.ReplicaAssignment {
	loads := s.loads()
	offline := func(l *load) int {
		if l.online {
			return 0
		}
		return 1
	}
	out := make([]*metadatav1.ReplicaAssignment, partitions)
	for i := range out {
		ids := make([]int32, 0, factor)
		zones := map[string]int{}
		for len(ids) < factor {
			best := slices.MinFunc(loads, func(a, b *load) int {
				taken := func(l *load) int {
					if slices.Contains(ids, l.id) {
						return 1
					}
					return 0
				}
				if c := cmp.Or(cmp.Compare(taken(a), taken(b)), cmp.Compare(offline(a), offline(b))); c != 0 {
					return c
				}
				if len(ids) == 0 {
					return cmp.Or(cmp.Compare(a.led[s.end], b.led[s.end]), cmp.Compare(a.first, b.first),
						cmp.Compare(a.any, b.any), cmp.Compare(a.id, b.id))
				}
				return cmp.Or(cmp.Compare(zones[a.zone], zones[b.zone]),
					cmp.Compare(a.behind[ids[0]], b.behind[ids[0]]), cmp.Compare(a.any, b.any), cmp.Compare(a.id, b.id))
			})
			if len(ids) == 0 {
				best.lead(s.end)
			} else if len(ids) == 1 {
				best.behind[ids[0]]++
			}
			best.any++
			zones[best.zone]++
			ids = append(ids, best.id)
		}
		out[i] = &metadatav1.ReplicaAssignment{BrokerIds: ids}
	}
	return out
}

// DecideUpdateTopic changes settings; no events if nothing would change. The
// errors are [*FieldError], [*UnknownTopicError] and [*topicconfig.Error],
// joined.
func (s *State) DecideUpdateTopic(r *metadatav1.UpdateTopicRequest) ([]*metadatav1.Event, error) {
	t := s.byName[r.GetName()]
	if t == nil {
		return nil, &UnknownTopicError{Topic: r.GetName()}
	}
	values := maps.Clone(t.overrides)
	for _, name := range r.GetUnset() {
		if _, both := r.GetSet()[name]; both {
			return nil, &FieldError{Field: "unset", Problem: name + " is also in set"}
		}
		if !slices.Contains(topicconfig.Names(), name) {
			return nil, &topicconfig.Error{Name: name, Unknown: true, Allowed: topicconfig.Names()}
		}
		delete(values, name)
	}
	maps.Copy(values, r.GetSet())
	config, err := topicconfig.Parse(values)
	if err != nil {
		return nil, err
	}
	next := config.Overrides()
	if maps.Equal(next, t.overrides) {
		return nil, nil
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_TopicUpdated{TopicUpdated: &metadatav1.TopicUpdated{
		TopicCreationOffset: t.creationOffset, Configs: next,
	}}}), nil
}

// DecideDeleteTopic ends a topic's life. The errors are [*UnknownTopicError]
// and, where the request names another id than the topic's, [*ConflictError].
func (s *State) DecideDeleteTopic(r *metadatav1.DeleteTopicRequest) ([]*metadatav1.Event, error) {
	t := s.byName[r.GetName()]
	if t == nil {
		return nil, &UnknownTopicError{Topic: r.GetName()}
	}
	if r.GetTopicId() != "" && r.GetTopicId() != t.id {
		return nil, &ConflictError{Subject: "topic_id", Reason: fmt.Sprintf("topic %q has id %s", t.name, t.id)}
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_TopicDeleted{TopicDeleted: &metadatav1.TopicDeleted{
		TopicCreationOffset: t.creationOffset,
	}}}), nil
}
