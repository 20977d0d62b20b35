package state_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/chainhash"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

const (
	clusterID   = "00000000-0000-4000-8000-00000000c1a5"
	incarnation = uint32(0x1f3a9c02)
	topicID     = "00000000-0000-4000-8000-000000000001"
)

// machine is a state with the log that led to it. Entries pass through their
// bytes, as they do through etcd.
type machine struct {
	t   testing.TB
	s   *state.State
	log [][]byte
}

// newMachine has a controller, brokers 1..brokers and rlms 1..rlms.
func newMachine(t testing.TB, brokers, rlms int) *machine {
	t.Helper()
	m := &machine{t: t, s: state.New()}
	events, err := m.s.DecideBootstrap(clusterID, incarnation)
	require.NoError(t, err)
	elected, err := m.s.DecideControllerElected(1, "meta-1:7000")
	require.NoError(t, err)
	m.apply(append(events, elected...))
	for id := 1; id <= brokers; id++ {
		m.registerBroker(int32(id))
	}
	for id := 1; id <= rlms; id++ {
		m.registerRLM(int32(id))
	}
	return m
}

func (m *machine) entry(events []*metadatav1.Event) *metadatav1.Entry {
	epoch, _, _ := m.s.Controller()
	if len(events) > 0 && events[0].GetControllerElected() != nil || epoch < 0 {
		epoch = m.s.EndOffset()
	}
	return &metadatav1.Entry{
		Offset: m.s.EndOffset(), Incarnation: incarnation, ControllerEpoch: epoch, FeatureLevel: state.FeatureLevel, Events: events,
	}
}

// apply writes the events as one entry and returns its offset.
func (m *machine) apply(events []*metadatav1.Event) int64 {
	m.t.Helper()
	require.NotEmpty(m.t, events)
	b, err := proto.Marshal(m.entry(events))
	require.NoError(m.t, err)
	m.log = append(m.log, b)
	e := &metadatav1.Entry{}
	require.NoError(m.t, proto.Unmarshal(b, e))
	require.NoError(m.t, m.s.Apply(e))
	return e.GetOffset()
}

// do applies what a decider decided.
func (m *machine) do(events []*metadatav1.Event, err error) int64 {
	m.t.Helper()
	require.NoError(m.t, err)
	return m.apply(events)
}

// replay applies the whole log to a fresh state.
func (m *machine) replay() *state.State {
	m.t.Helper()
	s := state.New()
	for _, b := range m.log {
		e := &metadatav1.Entry{}
		require.NoError(m.t, proto.Unmarshal(b, e))
		require.NoError(m.t, s.Apply(e))
	}
	return s
}

func brokerRequest(id int32) *metadatav1.RegisterBrokerRequest {
	return &metadatav1.RegisterBrokerRequest{
		BrokerId: id, Address: fmt.Sprintf("broker-%d:9000", id), Zone: fmt.Sprintf("z%d", id%3),
		DirectoryId: fmt.Sprintf("00000000-0000-4000-8000-%012x", id), LogsIntact: true,
	}
}

func (m *machine) registerBroker(id int32) int64 {
	m.t.Helper()
	return m.do(m.s.DecideRegisterBroker(brokerRequest(id)))
}

func (m *machine) registerRLM(id int32) int64 {
	m.t.Helper()
	return m.do(m.s.DecideRegisterRemoteLogManager(&metadatav1.RegisterRemoteLogManagerRequest{
		RlmId: id, Address: fmt.Sprintf("rlm-%d:9100", id), Zone: "z1",
	}))
}

func (m *machine) offline(id int32) int64 {
	m.t.Helper()
	b, ok := m.s.Broker(id)
	require.True(m.t, ok)
	return m.do(m.s.DecideBrokerOffline(id, b.GetBrokerEpoch(), state.ReasonSessionExpired), nil)
}

// createTopic creates a topic with the id "…01" in its last digits.
func (m *machine) createTopic(name, id string, partitions int32) state.PartitionID {
	m.t.Helper()
	offset := m.do(m.s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: name, PartitionCount: partitions}, id))
	return state.PartitionID{TopicCreationOffset: offset}
}

func (m *machine) partition(id state.PartitionID) *metadatav1.Partition {
	m.t.Helper()
	p, ok := m.s.Partition(id)
	require.True(m.t, ok)
	return p
}

func (m *machine) topicID(id state.PartitionID) string {
	m.t.Helper()
	v, ok := m.s.View(id)
	require.True(m.t, ok)
	return v.TopicID
}

// openRequest is what a leader with nothing above the object end sends.
func (m *machine) openRequest(id state.PartitionID) *metadatav1.OpenEpochRequest {
	m.t.Helper()
	p := m.partition(id)
	return &metadatav1.OpenEpochRequest{
		Partition: &logv1.TopicIdPartition{
			TopicId: m.topicID(id), TopicCreationOffset: id.TopicCreationOffset, Partition: id.Partition,
		},
		Fence: p.GetFence(), StartOffset: p.GetObjectEndOffset(), Lineage: p.GetLineage(),
		ObjectEndChainHash: p.GetObjectEndChainHash(), ObjectEndOffset: p.GetObjectEndOffset(),
	}
}

func (m *machine) openAt(id state.PartitionID, start int64) int64 {
	m.t.Helper()
	r := m.openRequest(id)
	r.StartOffset = start
	events, at, err := m.s.DecideOpenEpoch(r)
	require.NoError(m.t, err)
	require.Equal(m.t, at, m.apply(events))
	return at
}

func (m *machine) elect(id state.PartitionID, broker int32) int64 {
	m.t.Helper()
	return m.do(m.s.DecideElections(state.Election{Partition: id, LeaderID: broker, Reason: state.ReasonOperator}))
}

// written stands for the bytes of [base, end) behind prev, as one batch of the
// writer's.
func written(prev chainhash.Hash, base, end int64, writer string) chainhash.Hash {
	return chainhash.Next(prev, fmt.Appendf(nil, "%d-%d %s", base, end, writer))
}

// descriptor is a range that extends the partition as it stands, at the given
// position of the object, 100 bytes long.
func (m *machine) descriptor(id state.PartitionID, end, position int64) *logv1.RangeDescriptor {
	m.t.Helper()
	p := m.partition(id)
	base := p.GetObjectEndOffset()
	d := &logv1.RangeDescriptor{
		Partition: &logv1.TopicIdPartition{
			TopicId: m.topicID(id), TopicCreationOffset: id.TopicCreationOffset, Partition: id.Partition,
		},
		Fence: p.GetFence(), EpochStart: p.GetEpochStart(), BaseOffset: base, EndOffset: end,
		BaseChainHash: p.GetObjectEndChainHash(), Position: position, LengthBytes: 100, Crc32C: 7, MaxTimestampMs: 1_700_000_000_000,
		BatchCount: 1,
	}
	hash := written(chainhash.Hash(d.GetBaseChainHash()), base, end, fmt.Sprint(p.GetFence().GetLeaderEpoch()))
	d.EndChainHash = hash.Bytes()
	fill(d, p.GetLineage())
	return d
}

// fill sets predecessor and lineage inside from a whole lineage.
func fill(d *logv1.RangeDescriptor, whole []*logv1.LineageEntry) {
	d.Predecessor, d.Lineage = nil, nil
	for i, e := range whole {
		if e.GetStartOffset() < d.GetBaseOffset() {
			d.Predecessor = e.GetLeadership()
		}
		ends := i+1 < len(whole) && whole[i+1].GetStartOffset() <= d.GetBaseOffset()
		if !ends && e.GetStartOffset() < d.GetEndOffset() {
			d.Lineage = append(d.Lineage, e)
		}
	}
}

// behind continues d with a range up to end.
func behind(d *logv1.RangeDescriptor, end int64) *logv1.RangeDescriptor {
	next := proto.Clone(d).(*logv1.RangeDescriptor)
	next.BaseOffset, next.EndOffset = d.GetEndOffset(), end
	next.BaseChainHash = d.GetEndChainHash()
	next.EndChainHash = written(chainhash.Hash(d.GetEndChainHash()), next.GetBaseOffset(), end, "next").Bytes()
	next.Position = d.GetPosition() + d.GetLengthBytes()
	next.Predecessor = d.GetLineage()[len(d.GetLineage())-1].GetLeadership()
	next.Lineage = d.GetLineage()[len(d.GetLineage())-1:]
	return next
}

func (m *machine) command(rlm int32, sequence int64, ranges ...*logv1.RangeDescriptor) *metadatav1.CommitCombinedSegmentRequest {
	m.t.Helper()
	r, ok := m.s.RemoteLogManager(rlm)
	require.True(m.t, ok)
	return &metadatav1.CommitCombinedSegmentRequest{
		ClusterId: clusterID, RlmId: rlm,
		Object:    &logv1.ObjectRef{Incarnation: incarnation, RlmEpoch: r.GetRlmEpoch(), Sequence: sequence, Attempt: 1},
		SizeBytes: 1 << 20, Crc32C: 42, Ranges: ranges,
	}
}

// commit decides and applies a command.
func (m *machine) commit(r *metadatav1.CommitCombinedSegmentRequest) *metadatav1.CommitCombinedSegmentResponse {
	m.t.Helper()
	events, response, err := m.s.DecideCommit(r)
	require.NoError(m.t, err)
	if len(events) > 0 {
		require.Equal(m.t, response.GetMetadataOffset(), m.apply(events))
	}
	return response
}

func outcomes(r *metadatav1.CommitCombinedSegmentResponse) []metadatav1.RangeOutcome {
	out := make([]metadatav1.RangeOutcome, len(r.GetVerdicts()))
	for i, v := range r.GetVerdicts() {
		out[i] = v.GetOutcome()
	}
	return out
}

const (
	accepted  = metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
	fenced    = metadatav1.RangeOutcome_RANGE_OUTCOME_FENCED
	gap       = metadatav1.RangeOutcome_RANGE_OUTCOME_GAP
	already   = metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED
	mismatch  = metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH
	unknown   = metadatav1.RangeOutcome_RANGE_OUTCOME_UNKNOWN_PARTITION
	notJudged = metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED
	malformed = metadatav1.RangeOutcome_RANGE_OUTCOME_MALFORMED
)

// facts of an election in which nothing has waited yet.
var fresh = state.ElectionFacts{SessionTimeout: 6 * time.Second, OpenTimeout: 10 * time.Second}
