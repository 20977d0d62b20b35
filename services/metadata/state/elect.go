package state

import (
	"fmt"
	"slices"
	"time"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Reasons in PartitionFenced.
const (
	ReasonCreated          = "created"
	ReasonLeaderOffline    = "leader_offline"
	ReasonLeaderRegistered = "leader_registered"
	ReasonOpenTimeout      = "open_timeout"
	ReasonNoLeader         = "no_leader" // there was none, and now a replica is live
)

// internReason shares the usual reasons between millions of partitions.
func internReason(reason string) string {
	for _, known := range [...]string{
		ReasonCreated, ReasonLeaderOffline, ReasonLeaderRegistered, ReasonOpenTimeout, ReasonNoLeader, ReasonOperator,
		ReasonReplicasChanged, ReasonReplicasReplaced,
	} {
		if reason == known {
			return known
		}
	}
	return reason
}

// ElectionFacts is what the log does not hold: for how long things have been as
// they are, by the controller's monotonic clock. A new controller counts from
// its own start, which gives everybody one full timeout.
type ElectionFacts struct {
	// SinceFenced is how long the partition's present fence has stood.
	SinceFenced time.Duration
	// LeaderGone is how long the leader's session has been over; not looked at
	// while it is live.
	LeaderGone time.Duration
	// SessionTimeout is the brokers' session timeout, the default of
	// leader.return.grace.
	SessionTimeout time.Duration
	// OpenTimeout is how long an elected leader may take to open its epoch.
	OpenTimeout time.Duration
}

// Election is one leader to be elected.
type Election struct {
	Partition PartitionID
	LeaderID  int32
	Reason    string
}

// ChooseLeader says whether a partition needs a new fence now, and for whom. If
// it does not, wait is after how long to ask again should nothing happen until
// then; 0 means that only an event of the log can change the answer.
//
// The rules (architecture §5, commit rule "object": any live replica may lead):
// without a leader the first live replica in order of preference is elected. A
// leader that registered again is elected again, at once. A leader whose session
// ended is waited for as long as the topic's leader.return.grace, if it is the
// one that opened the last epoch and so may hold acked records that nobody else
// has; then the next live replica is elected. A leader that does not open its
// epoch in time is replaced by the next live replica behind it, or elected again
// if it is alone.
func (s *State) ChooseLeader(id PartitionID, f ElectionFacts) (e Election, needed bool, wait time.Duration) {
	p := s.lookup(id)
	if p == nil {
		return Election{}, false, 0
	}
	elect := func(leader int32, reason string) (Election, bool, time.Duration) {
		return Election{Partition: id, LeaderID: leader, Reason: reason}, leader != 0, 0
	}
	leader := s.brokers[p.leaderID]
	switch {
	case leader == nil:
		return elect(s.firstLive(p), ReasonNoLeader)
	case leader.online && leader.epoch != p.brokerEpoch:
		return elect(leader.id, ReasonLeaderRegistered)
	case leader.online && p.opened:
		return Election{}, false, 0
	case leader.online:
		if f.SinceFenced < f.OpenTimeout {
			return Election{}, false, f.OpenTimeout - f.SinceFenced
		}
		return elect(s.nextLive(p, leader.id), ReasonOpenTimeout)
	}
	grace := time.Duration(0)
	if p.openedBy == leader.id {
		grace = p.topic.config.ReturnGrace(f.SessionTimeout)
	}
	if f.LeaderGone < grace {
		return Election{}, false, grace - f.LeaderGone
	}
	return elect(s.firstLive(p), ReasonLeaderOffline)
}

// firstLive is the first live replica in order of preference, 0 for none.
func (s *State) firstLive(p *partition) int32 {
	for _, id := range p.replicas {
		if s.brokers[id].online {
			return id
		}
	}
	return 0
}

// nextLive is the first live replica behind one, in a circle that ends with it.
func (s *State) nextLive(p *partition, behind int32) int32 {
	at := slices.Index(p.replicas, behind)
	for i := range p.replicas {
		id := p.replicas[(at+1+i)%len(p.replicas)]
		if s.brokers[id].online {
			return id
		}
	}
	return 0
}

// DecideElections raises the fence of each partition, of at most [MaxElections]
// different ones. The errors are [*FieldError], [*UnknownPartitionError],
// [*TransitionError] (the broker is no live replica) and [*ExhaustedError].
func (s *State) DecideElections(elections ...Election) ([]*metadatav1.Event, error) {
	if len(elections) > MaxElections {
		return nil, &FieldError{Field: "elections", Problem: fmt.Sprintf("%d, at most %d fit in an entry", len(elections), MaxElections)}
	}
	events := make([]*metadatav1.Event, 0, len(elections))
	seen := make(map[PartitionID]bool, len(elections))
	for _, e := range elections {
		if seen[e.Partition] {
			return nil, &FieldError{Field: "elections", Problem: fmt.Sprintf("%v is named twice", e.Partition)}
		}
		seen[e.Partition] = true
		p := s.lookup(e.Partition)
		if p == nil {
			return nil, &UnknownPartitionError{Topic: fmt.Sprint(e.Partition.TopicCreationOffset), Partition: e.Partition.Partition}
		}
		b := s.brokers[e.LeaderID]
		if b == nil || !b.online || !slices.Contains(p.replicas, e.LeaderID) {
			return nil, &TransitionError{Subject: fmt.Sprintf("broker %d", e.LeaderID),
				Reason: fmt.Sprintf("is not a live replica of %v (replicas %v)", p, p.replicas)}
		}
		fence, err := s.fenceEvent(p, b, e.Reason)
		if err != nil {
			return nil, err
		}
		events = append(events, fence)
	}
	return events, nil
}

// DecideElectLeader is an operator's election. The errors are [*FieldError],
// [*UnknownTopicError], [*UnknownPartitionError], [*ConflictError] (the leader
// epoch is not the expected one), [*NoCandidateError] and those of
// [State.DecideElections].
func (s *State) DecideElectLeader(r *metadatav1.ElectLeaderRequest) ([]*metadatav1.Event, error) {
	p, err := s.find(r.GetTopic(), r.GetPartition())
	if err != nil {
		return nil, err
	}
	if want := r.GetExpectedLeaderEpoch(); want > 0 && want != p.leaderEpoch {
		return nil, &ConflictError{Subject: "expected_leader_epoch",
			Reason: fmt.Sprintf("the leader epoch of %v is %d, not %d", p, p.leaderEpoch, want)}
	}
	leader := r.GetBrokerId()
	if leader != 0 && !slices.Contains(p.replicas, leader) {
		return nil, &FieldError{Field: "broker_id", Problem: fmt.Sprintf("%d is not among the replicas %v", leader, p.replicas)}
	}
	if leader == 0 {
		if leader = s.firstLive(p); leader == 0 {
			return nil, &NoCandidateError{Replicas: slices.Clone(p.replicas)}
		}
	}
	return s.DecideElections(Election{Partition: p.key(), LeaderID: leader, Reason: ReasonOperator})
}

// find finds a partition of a live topic by name or id.
func (s *State) find(topicName string, partition int32) (*partition, error) {
	t := s.findTopic(topicName)
	if t == nil {
		return nil, &UnknownTopicError{Topic: topicName}
	}
	if partition < 0 || int(partition) >= len(t.partitions) {
		return nil, &UnknownPartitionError{Topic: topicName, Partition: partition}
	}
	return &t.partitions[partition], nil
}

func fencedEvent(e *metadatav1.PartitionFenced) *metadatav1.Event {
	return &metadatav1.Event{Kind: &metadatav1.Event_PartitionFenced{PartitionFenced: e}}
}
