package replica

import (
	"fmt"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/broker/partition"
)

func fenceToProto(f partition.Fence) *logv1.Fence {
	return &logv1.Fence{Incarnation: f.Incarnation, LeaderEpoch: f.LeaderEpoch, BrokerEpoch: f.BrokerEpoch, LinkGeneration: f.LinkGeneration}
}

func fenceFromProto(m *logv1.Fence) partition.Fence {
	return partition.Fence{Incarnation: m.GetIncarnation(), LeaderEpoch: m.GetLeaderEpoch(), BrokerEpoch: m.GetBrokerEpoch(), LinkGeneration: m.GetLinkGeneration()}
}

func leadershipToProto(l lineage.Leadership) *logv1.Leadership {
	return &logv1.Leadership{Incarnation: l.Incarnation, LeaderEpoch: l.LeaderEpoch}
}

func lineageToProto(l lineage.Lineage) []*logv1.LineageEntry {
	out := make([]*logv1.LineageEntry, 0, len(l))
	for _, e := range l {
		out = append(out, &logv1.LineageEntry{Leadership: leadershipToProto(e.Leadership), StartOffset: e.StartOffset})
	}
	return out
}

func lineageFromProto(all []*logv1.LineageEntry) (lineage.Lineage, error) {
	out := make(lineage.Lineage, 0, len(all))
	for _, m := range all {
		out = append(out, lineage.Entry{
			Leadership:  lineage.Leadership{Incarnation: m.GetLeadership().GetIncarnation(), LeaderEpoch: m.GetLeadership().GetLeaderEpoch()},
			StartOffset: m.GetStartOffset(),
		})
	}
	if err := out.Validate(); err != nil {
		return nil, err
	}
	return out, nil
}

// viewFromProto reads a reset of the segment stream.
func viewFromProto(m *metadatav1.SegmentsReset) (partition.View, error) {
	hash, err := chainhash.FromBytes(m.GetObjectEndChainHash())
	if err != nil && m.GetObjectEndOffset() > 0 {
		return partition.View{}, fmt.Errorf("object end %d: %w", m.GetObjectEndOffset(), err)
	}
	l, err := lineageFromProto(m.GetLineage())
	if err != nil {
		return partition.View{}, err
	}
	return partition.View{
		Fence: fenceFromProto(m.GetFence()), Leader: m.GetLeaderId(), Opened: m.GetOpened(),
		Exact:      m.GetStartRule() == metadatav1.StartRule_START_RULE_EXACT,
		EpochStart: m.GetEpochStart(), Lineage: l, LogStart: m.GetLogStartOffset(),
		ObjectEnd: m.GetObjectEndOffset(), ObjectHash: hash,
	}, nil
}

// verdictFromProto reads a verdict. A state that it does not give whole is left
// out, so that only the outcome counts.
func verdictFromProto(m *remotelogv1.WalVerdict) (partition.Verdict, error) {
	v := m.GetVerdict()
	out := partition.Verdict{
		Run: m.GetRun(), Base: m.GetBaseOffset(), End: m.GetEndOffset(),
		LogStart: v.GetLogStartOffset(), ObjectEnd: v.GetObjectEndOffset(),
		Fence: fenceFromProto(v.GetFence()), Opened: v.GetOpened(), NextEpochStart: -1,
	}
	if v != nil && v.NextEpochStart != nil {
		out.NextEpochStart = v.GetNextEpochStart()
	}
	switch v.GetOutcome() {
	case metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED:
		out.Outcome = partition.Accepted
	case metadatav1.RangeOutcome_RANGE_OUTCOME_FENCED:
		out.Outcome = partition.Fenced
	case metadatav1.RangeOutcome_RANGE_OUTCOME_GAP:
		out.Outcome = partition.Gap
	case metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED:
		out.Outcome = partition.AlreadyCommitted
	case metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH:
		out.Outcome = partition.ChainMismatch
	case metadatav1.RangeOutcome_RANGE_OUTCOME_UNKNOWN_PARTITION:
		out.Outcome = partition.UnknownPartition
	case metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED:
		out.Outcome = partition.NotJudged
	case metadatav1.RangeOutcome_RANGE_OUTCOME_MALFORMED:
		out.Outcome = partition.Malformed
	default:
		return out, fmt.Errorf("unknown outcome %v", v.GetOutcome())
	}
	hash, err := chainhash.FromBytes(v.GetObjectEndChainHash())
	if err != nil {
		if out.Outcome == partition.Accepted {
			return out, fmt.Errorf("object end %d of an accepted range: %w", out.ObjectEnd, err)
		}
		out.ObjectEnd = -1
	}
	out.ObjectHash = hash
	return out, nil
}
