package state_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

var update = flag.Bool("update", false, "write the golden files anew")

// goldenLog is a log with an event of every kind.
func goldenLog(t *testing.T) *machine {
	m := newMachine(t, 3, 2)
	first := m.createTopic("quakes", topicID, 2)
	second := state.PartitionID{TopicCreationOffset: first.TopicCreationOffset, Partition: 1}
	m.openAt(first, 0)
	m.openAt(second, 0)
	b, _ := m.s.Broker(1)
	events, _, err := m.s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: b.GetBrokerEpoch()})
	m.do(events, err)
	late := m.descriptor(second, 9, 100)
	late.BaseOffset++
	m.commit(m.command(1, 3, m.descriptor(first, 10, 0), late))
	d := m.descriptor(first, 12, 0)
	d.ProducersComplete = true
	m.commit(m.command(2, 1, d, behind(d, 15)))
	m.offline(1)
	m.elect(first, 3)
	m.openAt(first, 20)
	m.do(m.s.DecideUpdateTopic(&metadatav1.UpdateTopicRequest{Name: "quakes", Set: map[string]string{"flush": "always"}}))
	info, _ := m.s.RemoteLogManager(2)
	m.do(m.s.DecideCloseRemoteLogManager(2, info.GetRlmEpoch(), state.ReasonStopped))
	m.createTopic("gone", "00000000-0000-4000-8000-000000000002", 1)
	m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "gone"}))
	m.do(m.s.DecideControllerElected(2, "meta-2:7000"))
	m.registerBroker(1)
	m.do(m.s.DecideReassign(&metadatav1.ReassignPartitionRequest{Topic: "quakes", Partition: 1, BrokerIds: []int32{3, 1}}))
	return m
}

// A log that was once written is understood by every later version.
func TestGoldenLog(t *testing.T) {
	path := filepath.Join("testdata", "log-v1.hex")
	if *update {
		var out bytes.Buffer
		for _, b := range goldenLog(t).log {
			fmt.Fprintf(&out, "%x\n", b)
		}
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, out.Bytes(), 0o644))
	}
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	s := state.New()
	kinds := map[string]bool{}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		b, err := hex.DecodeString(lines.Text())
		require.NoError(t, err)
		e := &metadatav1.Entry{}
		require.NoError(t, proto.Unmarshal(b, e))
		require.NoError(t, s.Apply(e))
		for _, event := range e.GetEvents() {
			kinds[fmt.Sprintf("%T", event.GetKind())] = true
		}
	}
	all := (&metadatav1.Event{}).ProtoReflect().Descriptor().Oneofs().ByName("kind").Fields().Len()
	assert.Len(t, kinds, all, "an event of every kind")

	assert.Equal(t, clusterID, s.ClusterID())
	assert.Equal(t, incarnation, s.Incarnation())
	epoch, id, _ := s.Controller()
	assert.Equal(t, s.EndOffset()-3, epoch)
	assert.Equal(t, int32(2), id)
	assert.Equal(t, 1, s.TopicCount())
	topic, ok := s.TopicByID(topicID)
	require.True(t, ok)
	assert.Equal(t, map[string]string{"flush": "always"}, topic.GetConfigs())
	p := topic.GetPartitions()[0]
	assertLineage(t, ofLineage(1, 0, 2, 20), p.GetLineage())
	assert.Equal(t, int64(15), p.GetObjectEndOffset())
	assert.Equal(t, int64(20), p.GetEpochStart())
	assert.Equal(t, int32(3), p.GetLeaderId())
	assert.True(t, p.GetOpened())
	assert.Equal(t, int64(0), topic.GetPartitions()[1].GetObjectEndOffset())
	assert.Equal(t, []int32{3, 1}, topic.GetPartitions()[1].GetReplicaIds())
	assert.Equal(t, state.ReasonReplicasChanged, topic.GetPartitions()[1].GetFenceReason())
	ranges, _ := s.Ranges(state.PartitionID{TopicCreationOffset: topic.GetCreationOffset()}, 0, 10)
	require.Len(t, ranges, 3)
	assert.True(t, ranges[1].GetProducersComplete())
	assert.Equal(t, int64(3), ranges[0].GetObject().GetSequence())
	assert.Equal(t, "52b5", fmt.Sprintf("%x", ranges[2].GetEndChainHash()[:2]))
}

// A snapshot that was once written is read by every later version, as the state
// of the golden log; this version still writes the same bytes.
func TestGoldenSnapshot(t *testing.T) {
	path := filepath.Join("testdata", "snapshot-v1.hex")
	s := goldenLog(t).replay()
	if *update {
		require.NoError(t, os.WriteFile(path, fmt.Appendf(nil, "%x\n", encode(t, s)), 0o644))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	b, err := hex.DecodeString(string(bytes.TrimSpace(text)))
	require.NoError(t, err)
	assert.Equal(t, s.Digest(), decode(t, b).Digest())
	assert.Equal(t, b, encode(t, s))
}
