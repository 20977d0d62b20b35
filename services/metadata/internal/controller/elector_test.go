package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// script applies decisions to a state and keeps the clock.
type script struct {
	t  *testing.T
	st *state.State
	e  *elector
}

func newScript(t *testing.T) *script {
	s := &script{t: t, st: state.New(), e: newElector(6*time.Second, 10*time.Second, 10*time.Minute)}
	boot, err := s.st.DecideBootstrap(ours.ClusterID, ours.Incarnation)
	require.NoError(t, err)
	elected, err := s.st.DecideControllerElected(1, "h:1")
	require.NoError(t, err)
	s.apply(append(boot, elected...), nil)
	return s
}

func (s *script) apply(events []*metadatav1.Event, err error) int64 {
	s.t.Helper()
	require.NoError(s.t, err)
	require.NotEmpty(s.t, events)
	offset := s.st.EndOffset()
	require.NoError(s.t, s.st.Apply(&metadatav1.Entry{
		Offset: offset, Incarnation: ours.Incarnation, FeatureLevel: state.FeatureLevel, Events: events,
	}))
	return offset
}

func (s *script) register(id int32) int64 {
	return s.apply(s.st.DecideRegisterBroker(&metadatav1.RegisterBrokerRequest{
		BrokerId: id, Address: "h:1", DirectoryId: fmt.Sprintf("%08d-0000-4000-8000-000000000000", id),
	}))
}

func (s *script) offline(id int32) {
	b, _ := s.st.Broker(id)
	s.apply(s.st.DecideBrokerOffline(id, b.GetBrokerEpoch(), state.ReasonSessionExpired), nil)
}

func (s *script) topic(configs map[string]string) state.PartitionID {
	at := s.apply(s.st.DecideCreateTopic(&metadatav1.CreateTopicRequest{
		Name: fmt.Sprintf("t%d", s.st.EndOffset()), PartitionCount: 1, Configs: configs,
	}, fmt.Sprintf("%08d-0000-4000-8000-000000000000", s.st.EndOffset())))
	return state.PartitionID{TopicCreationOffset: at}
}

func (s *script) open(id state.PartitionID) {
	topic := s.st.Topics("", 1, true)[0]
	p := topic.GetPartitions()[0]
	events, _, err := s.st.DecideOpenEpoch(openRequest(topic, p))
	s.apply(events, err)
	require.Equal(s.t, id.TopicCreationOffset, topic.GetCreationOffset())
}

// at decides at a moment given in seconds and applies the elections.
func (s *script) at(seconds float64) (leaders []int32, reason string, wait time.Duration) {
	s.t.Helper()
	elections, wait := s.e.decide(s.st, time.Duration(seconds*float64(time.Second)))
	for _, e := range elections {
		leaders, reason = append(leaders, e.LeaderID), e.Reason
	}
	if len(elections) > 0 {
		s.apply(s.st.DecideElections(elections...))
	}
	return leaders, reason, wait
}

func (s *script) quiet(seconds float64, wait time.Duration) {
	s.t.Helper()
	leaders, _, got := s.at(seconds)
	assert.Empty(s.t, leaders)
	assert.Equal(s.t, wait, got)
}

func (s *script) elects(seconds float64, leader int32, why string) {
	s.t.Helper()
	leaders, reason, _ := s.at(seconds)
	assert.Equal(s.t, []int32{leader}, leaders)
	assert.Equal(s.t, why, reason)
}

func TestElector(t *testing.T) {
	t.Run("a leader that does not open is replaced, and the next one too", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.register(2)
		s.topic(nil)
		s.quiet(5, 10*time.Second) // first seen now
		s.quiet(14, time.Second)
		s.elects(15, 2, state.ReasonOpenTimeout)
		s.quiet(15, 10*time.Second)
		s.elects(25, 1, state.ReasonOpenTimeout)
	})
	t.Run("a leader alone is elected again", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.topic(nil)
		s.quiet(0, 10*time.Second)
		s.elects(10, 1, state.ReasonOpenTimeout)
	})
	t.Run("an opened leader is waited for", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.register(2)
		id := s.topic(nil)
		s.open(id)
		s.quiet(1, 0)
		s.offline(1)
		s.quiet(2, 6*time.Second)
		s.quiet(7, time.Second)
		s.elects(8, 2, state.ReasonLeaderOffline)
	})
	t.Run("it comes back in time", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.register(2)
		id := s.topic(nil)
		s.open(id)
		s.offline(1)
		s.quiet(2, 6*time.Second)
		s.register(1)
		s.elects(3, 1, state.ReasonLeaderRegistered)
		// and when it goes again, the grace begins anew
		s.open(id)
		s.offline(1)
		s.quiet(100, 6*time.Second)
	})
	t.Run("nobody waits where every ack is OBJECT", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.register(2)
		id := s.topic(map[string]string{"min.ack.level": "OBJECT"})
		s.open(id)
		s.offline(1)
		s.elects(2, 2, state.ReasonLeaderOffline)
	})
	t.Run("without a live replica it waits for an event, not for the clock", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		id := s.topic(nil)
		s.open(id)
		s.offline(1)
		s.quiet(0, 6*time.Second)
		s.quiet(6, 0)
		s.quiet(1000, 0)
		s.register(1)
		s.elects(1001, 1, state.ReasonLeaderRegistered)
	})
	t.Run("a new controller counts from its own start", func(t *testing.T) {
		s := newScript(t)
		s.register(1)
		s.register(2)
		id := s.topic(nil)
		s.open(id)
		s.offline(1)
		s.quiet(0, 6*time.Second)
		s.e = newElector(6*time.Second, 10*time.Second, 10*time.Minute)
		s.quiet(5, 6*time.Second)
		s.elects(11, 2, state.ReasonLeaderOffline)
	})
}

func openRequest(topic *metadatav1.Topic, p *metadatav1.Partition) *metadatav1.OpenEpochRequest {
	return &metadatav1.OpenEpochRequest{
		Partition: &logv1.TopicIdPartition{TopicId: topic.GetTopicId(), TopicCreationOffset: topic.GetCreationOffset()},
		Fence:     p.GetFence(), StartOffset: p.GetObjectEndOffset(), Lineage: p.GetLineage(),
		ObjectEndChainHash: p.GetObjectEndChainHash(), ObjectEndOffset: p.GetObjectEndOffset(),
	}
}
