package state

import (
	"errors"
	"fmt"
	"slices"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

func (s *State) applyPartitionFenced(e *metadatav1.PartitionFenced) error {
	p := s.lookup(PartitionID{e.GetTopicCreationOffset(), e.GetPartition()})
	if p == nil {
		return fmt.Errorf("no partition %d/%d", e.GetTopicCreationOffset(), e.GetPartition())
	}
	if e.GetLeaderEpoch() <= max(p.leaderEpoch, lastEpoch(p.lineage)) {
		return fmt.Errorf("%v: leader epoch %d is not above %d", p, e.GetLeaderEpoch(), max(p.leaderEpoch, lastEpoch(p.lineage)))
	}
	if e.GetLeaderId() == 0 {
		if e.GetBrokerEpoch() != 0 {
			return fmt.Errorf("%v: broker epoch %d of no leader", p, e.GetBrokerEpoch())
		}
	} else if b := s.brokers[e.GetLeaderId()]; b == nil || b.epoch != e.GetBrokerEpoch() || !slices.Contains(p.replicas, b.id) {
		return fmt.Errorf("%v: broker %d with epoch %d is not registered or no replica", p, e.GetLeaderId(), e.GetBrokerEpoch())
	}
	switch e.GetStartRule() {
	case metadatav1.StartRule_START_RULE_FREE: // a mark that stands stays (design review H1)
	case metadatav1.StartRule_START_RULE_EXACT:
		p.exact = true
	default:
		return fmt.Errorf("%v: start rule %v", p, e.GetStartRule())
	}
	p.leaderEpoch, p.leaderID, p.brokerEpoch = e.GetLeaderEpoch(), e.GetLeaderId(), e.GetBrokerEpoch()
	p.reason, p.fencedAt = internReason(e.GetReason()), s.end
	p.opened = false
	return nil
}

func (s *State) applyEpochOpened(e *metadatav1.EpochOpened) error {
	p := s.lookup(PartitionID{e.GetTopicCreationOffset(), e.GetPartition()})
	switch {
	case p == nil:
		return fmt.Errorf("no partition %d/%d", e.GetTopicCreationOffset(), e.GetPartition())
	case p.opened || p.leaderEpoch != e.GetLeaderEpoch() || !s.leaderCurrent(p):
		return fmt.Errorf("%v: leader epoch %d is not one to be opened", p, e.GetLeaderEpoch())
	case e.GetStartOffset() < p.objectEnd || p.exact && e.GetStartOffset() != p.objectEnd:
		return fmt.Errorf("%v: epoch start %d at object end %d", p, e.GetStartOffset(), p.objectEnd)
	case e.GetStartOffset() > p.objectEnd && !p.lineage.Covers(p.objectEnd):
		return fmt.Errorf("%v: nobody wrote [%d, %d)", p, p.objectEnd, e.GetStartOffset())
	case len(e.GetAdopted()) > 0:
		return fmt.Errorf("%v: lineage entries adopted by a writable partition", p)
	}
	next, err := p.lineage.DropAt(e.GetStartOffset()).Append(lineage.Entry{
		Leadership:  lineage.Leadership{Incarnation: s.incarnation, LeaderEpoch: e.GetLeaderEpoch()},
		StartOffset: e.GetStartOffset(),
	})
	if err != nil {
		return fmt.Errorf("%v: %w", p, err)
	}
	p.lineage = next
	p.opened, p.exact = true, false
	p.epochStart, p.openedAt, p.openedBy = e.GetStartOffset(), s.end, p.leaderID
	return nil
}

// openCommit is the combined object that the entry being applied commits.
type openCommit struct {
	active   bool
	rlm      *remoteLogManager
	object   objectRecord
	slot     uint32
	expected int // accepted ranges
	seen     int
	index    int // of the last range
}

func (c *openCommit) complete() bool { return c.seen == c.expected }

func (s *State) applyCombinedSegment(e *metadatav1.CombinedSegmentCommitted, commit *openCommit) error {
	o := e.GetObject()
	r := s.rlms[e.GetRlmId()]
	n := int(e.GetSubmittedRanges())
	switch {
	case commit.active:
		return errors.New("two combined objects in one entry")
	case r == nil || !r.open || r.epoch != o.GetRlmEpoch() || o.GetIncarnation() != s.incarnation:
		return fmt.Errorf("rlm %d has no open epoch %d", e.GetRlmId(), o.GetRlmEpoch())
	case o.GetSequence() <= r.lastSequence():
		return fmt.Errorf("rlm %d: sequence %d is not above %d", r.id, o.GetSequence(), r.lastSequence())
	case o.GetAttempt() < 1 || o.GetAttempt() > maxAttempt || e.GetSizeBytes() < 1:
		return fmt.Errorf("rlm %d: attempt %d, %d bytes", r.id, o.GetAttempt(), e.GetSizeBytes())
	case n < 1 || n > MaxRanges:
		return fmt.Errorf("rlm %d: %d ranges", r.id, n)
	case len(e.GetOutcomes()) != 0 && len(e.GetOutcomes()) != n:
		return fmt.Errorf("rlm %d: %d outcomes for %d ranges", r.id, len(e.GetOutcomes()), n)
	}
	memory := &commitMemory{
		offset: s.end, epoch: r.epoch, sequence: o.GetSequence(), attempt: o.GetAttempt(),
		crc32c: e.GetCrc32C(), size: e.GetSizeBytes(), outcomes: make([]byte, n),
	}
	expected := 0
	for i := range memory.outcomes {
		outcome := metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
		if len(e.GetOutcomes()) != 0 {
			outcome = e.GetOutcomes()[i]
		}
		if outcome <= 0 || outcome > maxOutcome {
			return fmt.Errorf("rlm %d: outcome %v", r.id, outcome)
		}
		if outcome == metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED {
			expected++
		}
		memory.outcomes[i] = byte(outcome)
	}
	if expected == 0 {
		return fmt.Errorf("rlm %d: a combined object without an accepted range", r.id)
	}
	r.last = memory
	*commit = openCommit{
		active: true, rlm: r, expected: expected, index: -1,
		object: objectRecord{
			rlmEpoch: r.epoch, sequence: o.GetSequence(), size: e.GetSizeBytes(), committedAt: s.end,
			incarnation: s.incarnation, attempt: o.GetAttempt(), rlmID: r.id, crc32c: e.GetCrc32C(),
			refs: int32(expected),
		},
	}
	commit.slot = s.objects.add(commit.object)
	return nil
}

const maxOutcome = metadatav1.RangeOutcome_RANGE_OUTCOME_MALFORMED

func (s *State) applyRange(e *metadatav1.RangeCommitted, commit *openCommit) error {
	if !commit.active {
		return errors.New("a range of no combined object")
	}
	i := int(e.GetRangeIndex())
	outcomes := commit.rlm.last.outcomes
	if i <= commit.index || i >= len(outcomes) || outcomes[i] != byte(metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED) {
		return fmt.Errorf("range %d is not an accepted one behind %d", i, commit.index)
	}
	p := s.lookup(PartitionID{e.GetTopicCreationOffset(), e.GetPartition()})
	if p == nil {
		return fmt.Errorf("no partition %d/%d", e.GetTopicCreationOffset(), e.GetPartition())
	}
	hash, err := chainhash.FromBytes(e.GetEndChainHash())
	switch {
	case err != nil:
		return fmt.Errorf("%v: %w", p, err)
	case !s.isOpen(p) || e.GetLeaderEpoch() != p.leaderEpoch || e.GetEpochStart() != p.epochStart:
		return fmt.Errorf("%v: leader epoch %d from %d is not the open one", p, e.GetLeaderEpoch(), e.GetEpochStart())
	case e.GetBaseOffset() != p.objectEnd || e.GetEndOffset() <= e.GetBaseOffset():
		return fmt.Errorf("%v: range [%d, %d) at object end %d", p, e.GetBaseOffset(), e.GetEndOffset(), p.objectEnd)
	case !samePredecessor(p.lineage, e.GetBaseOffset(), e.GetPredecessor()):
		return fmt.Errorf("%v: predecessor %v at %d is not the lineage's", p, e.GetPredecessor(), e.GetBaseOffset())
	case !inObject(e.GetPosition(), e.GetLengthBytes(), commit.object.size):
		return fmt.Errorf("%v: bytes [%d, +%d) of %d", p, e.GetPosition(), e.GetLengthBytes(), commit.object.size)
	}
	record := rangeRecord{
		end: e.GetEndOffset(), maxTimestamp: e.GetMaxTimestampMs(), position: e.GetPosition(), hash: hash,
		length: uint32(e.GetLengthBytes()), crc32c: e.GetCrc32C(), leaderEpoch: e.GetLeaderEpoch(), object: commit.slot << 1,
	}
	if e.GetProducersComplete() {
		record.object |= 1
	}
	p.ranges.append(record)
	p.objectEnd, p.hash = record.end, hash
	p.bytes += e.GetLengthBytes()
	s.rangeCount++
	commit.seen++
	commit.index = i
	return nil
}

// inObject says whether [position, position+length) lies in an object of size
// bytes, without overflowing.
func inObject(position, length, size int64) bool {
	return position >= 0 && length > 0 && length <= maxLength && length <= size && position <= size-length
}

func lastEpoch(l lineage.Lineage) int32 {
	last, _ := l.Last()
	return last.LeaderEpoch
}
