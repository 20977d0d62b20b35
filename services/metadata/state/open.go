package state

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// DecideOpenEpoch judges the second half of an election (design review H1, H3):
// the fence must be current and not yet open, the start at or above the object
// end (equal to it under the mark EXACT), the lineage below the start the
// partition's, and the chain hash at the object end the partition's.
//
// A leader may keep a tail above the object end, but only records of
// leaderships that the lineage holds: an epoch that was never opened wrote none.
//
// A repeat with the same content is true already: no events, and openedAt is the
// offset of the entry that opened the epoch. Otherwise openedAt is
// [State.EndOffset]. The errors are [*FieldError], [*UnknownPartitionError],
// [*FencedError], [*StaleBrokerEpochError] (the leader's session is over),
// [*ObjectEndError] (reconcile again), [*ChainMismatchError] and
// [*TransitionError].
func (s *State) DecideOpenEpoch(r *metadatav1.OpenEpochRequest) (events []*metadatav1.Event, openedAt int64, err error) {
	given, hash, err := openingFields(r)
	if err != nil {
		return nil, 0, err
	}
	id := r.GetPartition()
	p := s.lookupNamed(id.GetTopicId(), PartitionID{id.GetTopicCreationOffset(), id.GetPartition()})
	if p == nil {
		return nil, 0, &UnknownPartitionError{Topic: id.GetTopicId(), Partition: id.GetPartition()}
	}
	if !s.fenceCurrent(p, r.GetFence()) {
		return nil, 0, &FencedError{Partition: s.partitionProto(p, false)}
	}
	start, end := r.GetStartOffset(), p.objectEnd
	if p.opened {
		known, border := p.ranges.hashAt(r.GetObjectEndOffset())
		if start != p.epochStart || !lineage.EqualBelow(given, p.lineage, start) || !border || known != hash {
			return nil, 0, &TransitionError{Subject: "epoch",
				Reason: fmt.Sprintf("leader epoch %d of %v was opened at %d with other content", p.leaderEpoch, p, p.epochStart)}
		}
		return nil, p.openedAt, nil
	}
	if err := s.CheckBrokerEpoch(p.leaderID, p.brokerEpoch); err != nil {
		return nil, 0, err
	}
	switch {
	case r.GetObjectEndOffset() != end:
		return nil, 0, &ObjectEndError{Named: r.GetObjectEndOffset(), ObjectEnd: end}
	case hash != p.hash:
		return nil, 0, &ChainMismatchError{Offset: end, Want: p.hash, Got: hash}
	case start < end:
		return nil, 0, &TransitionError{Subject: "start_offset", Reason: fmt.Sprintf("%d is below the object end %d", start, end)}
	case p.exact && start != end:
		return nil, 0, &TransitionError{Subject: "start_offset",
			Reason: fmt.Sprintf("%d is not the object end %d, as the mark EXACT demands: cut the tail", start, end)}
	case !lineage.EqualBelow(given, p.lineage, start):
		return nil, 0, &TransitionError{Subject: "lineage",
			Reason: fmt.Sprintf("%v below %d is not the partition's %v", given.DropAt(start), start, p.lineage.DropAt(start))}
	case start > end && !p.lineage.Covers(end):
		return nil, 0, &TransitionError{Subject: "start_offset",
			Reason: fmt.Sprintf("nobody wrote [%d, %d)", end, start)}
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_EpochOpened{EpochOpened: &metadatav1.EpochOpened{
		TopicCreationOffset: p.topic.creationOffset, Partition: p.index, LeaderEpoch: p.leaderEpoch, StartOffset: start,
	}}}), s.end, nil
}

func openingFields(r *metadatav1.OpenEpochRequest) (lineage.Lineage, chainhash.Hash, error) {
	hash, err := chainhash.FromBytes(r.GetObjectEndChainHash())
	if err != nil {
		return nil, hash, &FieldError{Field: "object_end_chain_hash", Problem: err.Error()}
	}
	if r.GetStartOffset() < 0 {
		return nil, hash, &FieldError{Field: "start_offset", Problem: fmt.Sprintf("%d is negative", r.GetStartOffset())}
	}
	given := lineageOf(r.GetLineage())
	if err := given.Validate(); err != nil {
		return nil, hash, &FieldError{Field: "lineage", Problem: err.Error()}
	}
	return given, hash, nil
}

// fenceCurrent says whether f is the partition's fence and its leader's broker
// is still registered as it was elected.
func (s *State) fenceCurrent(p *partition, f *logv1.Fence) bool {
	return f.GetIncarnation() == s.incarnation && f.GetLeaderEpoch() == p.leaderEpoch &&
		f.GetBrokerEpoch() == p.brokerEpoch && f.GetLinkGeneration() == 0 && p.leaderID != 0 && s.leaderCurrent(p)
}

// samePredecessor says whether named is who wrote the record before base;
// nobody did at the start of a lineage.
func samePredecessor(l lineage.Lineage, base int64, named *logv1.Leadership) bool {
	who, ok := l.Predecessor(base)
	if !ok {
		return named == nil
	}
	return named != nil && leadershipOf(named) == who
}

// sameInside says whether given, already valid, is what the lineage says of
// [base, end).
func sameInside(l lineage.Lineage, base, end int64, given []*logv1.LineageEntry) bool {
	if !l.Covers(base) {
		return false
	}
	own := l.Slice(base, end)
	if len(own) != len(given) {
		return false
	}
	for i, e := range given {
		if own[i] != entryOf(e) {
			return false
		}
	}
	return true
}

func leadershipOf(l *logv1.Leadership) lineage.Leadership {
	return lineage.Leadership{Incarnation: l.GetIncarnation(), LeaderEpoch: l.GetLeaderEpoch()}
}

func entryOf(e *logv1.LineageEntry) lineage.Entry {
	return lineage.Entry{Leadership: leadershipOf(e.GetLeadership()), StartOffset: e.GetStartOffset()}
}

func lineageOf(entries []*logv1.LineageEntry) lineage.Lineage {
	out := make(lineage.Lineage, len(entries))
	for i, e := range entries {
		out[i] = entryOf(e)
	}
	return out
}

func lineageProto(l lineage.Lineage) []*logv1.LineageEntry {
	out := make([]*logv1.LineageEntry, len(l))
	for i, e := range l {
		out[i] = &logv1.LineageEntry{Leadership: leadershipProto(e.Leadership), StartOffset: e.StartOffset}
	}
	return out
}

func leadershipProto(l lineage.Leadership) *logv1.Leadership {
	return &logv1.Leadership{Incarnation: l.Incarnation, LeaderEpoch: l.LeaderEpoch}
}

func hashBytes(h chainhash.Hash) []byte { return bytes.Clone(h[:]) }

// sortedIDs returns the keys in order.
func sortedIDs[V any](m map[int32]V) []int32 {
	ids := make([]int32, 0, len(m))
	for id := range m {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}
