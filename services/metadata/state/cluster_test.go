package state_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/topicconfig"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

func TestBootstrapHappensOnce(t *testing.T) {
	s := state.New()
	for _, bad := range []struct {
		id string
		in uint32
	}{{"", 1}, {"not-a-uuid", 1}, {clusterID, 0}, {clusterID, 1 << 31}} {
		_, err := s.DecideBootstrap(bad.id, bad.in)
		assert.ErrorAs(t, err, new(*state.FieldError))
	}
	m := newMachine(t, 0, 0)
	_, err := m.s.DecideBootstrap(clusterID, incarnation)
	assert.ErrorAs(t, err, new(*state.TransitionError))
	assert.Equal(t, clusterID, m.s.ClusterID())
	assert.Equal(t, incarnation, m.s.Incarnation())
	epoch, id, address := m.s.Controller()
	assert.Equal(t, int64(0), epoch)
	assert.Equal(t, int32(1), id)
	assert.Equal(t, "meta-1:7000", address)
	_, err = m.s.DecideControllerElected(0, "x:1")
	assert.ErrorAs(t, err, new(*state.FieldError))
	at := m.do(m.s.DecideControllerElected(2, "meta-2:7000"))
	epoch, id, _ = m.s.Controller()
	assert.Equal(t, at, epoch, "a controller's epoch is the offset of its election")
	assert.Equal(t, int32(2), id)
	assert.Equal(t, &metadatav1.MetadataPosition{Incarnation: incarnation, ControllerEpoch: at, Offset: at + 1}, m.s.Position())
}

func TestRegisterBroker(t *testing.T) {
	m := newMachine(t, 1, 0)
	for name, tc := range map[string]struct {
		change func(r *metadatav1.RegisterBrokerRequest)
		want   any
	}{
		"id":           {func(r *metadatav1.RegisterBrokerRequest) { r.BrokerId = 0 }, new(*state.FieldError)},
		"address":      {func(r *metadatav1.RegisterBrokerRequest) { r.Address = "host" }, new(*state.FieldError)},
		"port":         {func(r *metadatav1.RegisterBrokerRequest) { r.Address = "host:70000" }, new(*state.FieldError)},
		"directory":    {func(r *metadatav1.RegisterBrokerRequest) { r.DirectoryId = "x" }, new(*state.FieldError)},
		"cluster":      {func(r *metadatav1.RegisterBrokerRequest) { r.ClusterId = topicID }, new(*state.ClusterMismatchError)},
		"incarnation":  {func(r *metadatav1.RegisterBrokerRequest) { r.Incarnation = 5 }, new(*state.IncarnationMismatchError)},
		"rolled back":  {func(r *metadatav1.RegisterBrokerRequest) { r.Incarnation, r.AppliedMetadataOffset = incarnation, 99 }, new(*state.RolledBackError)},
		"held by live": {func(r *metadatav1.RegisterBrokerRequest) { r.BrokerId = 1 }, new(*state.BrokerIDInUseError)},
	} {
		r := brokerRequest(2)
		tc.change(r)
		_, err := m.s.DecideRegisterBroker(r)
		assert.ErrorAs(t, err, tc.want, name)
	}
	again := m.registerBroker(1) // the same data directory: a fast restart
	b, ok := m.s.Broker(1)
	require.True(t, ok)
	assert.Equal(t, again, b.GetBrokerEpoch())
	m.offline(1)
	replaced := brokerRequest(2)
	replaced.BrokerId, replaced.ClusterId, replaced.Incarnation, replaced.AppliedMetadataOffset = 1, clusterID, incarnation, m.s.EndOffset()
	m.do(m.s.DecideRegisterBroker(replaced)) // with another disk, once the session is over
	assert.NoError(t, m.s.CheckBrokerEpoch(1, m.s.EndOffset()-1))
}

func TestBrokerSessionsEndOnce(t *testing.T) {
	m := newMachine(t, 1, 0)
	b, _ := m.s.Broker(1)
	assert.Empty(t, m.s.DecideBrokerOffline(1, b.GetBrokerEpoch()-1, state.ReasonStopped), "an older epoch's end says nothing")
	assert.Empty(t, m.s.DecideBrokerOffline(7, 1, state.ReasonStopped))
	require.NoError(t, m.s.CheckBrokerEpoch(1, b.GetBrokerEpoch()))
	m.offline(1)
	assert.Empty(t, m.s.DecideBrokerOffline(1, b.GetBrokerEpoch(), state.ReasonStopped))
	assert.ErrorAs(t, m.s.CheckBrokerEpoch(1, b.GetBrokerEpoch()), new(*state.StaleBrokerEpochError))
	assert.ErrorAs(t, m.s.CheckBrokerEpoch(7, 1), new(*state.StaleBrokerEpochError))
}

func TestRegisterRemoteLogManagerClosesItsEarlierEpoch(t *testing.T) {
	m := newMachine(t, 0, 1)
	before, _ := m.s.RemoteLogManager(1)
	require.NoError(t, m.s.CheckRemoteLogManagerEpoch(1, before.GetRlmEpoch()))
	at := m.registerRLM(1)
	assert.ErrorAs(t, m.s.CheckRemoteLogManagerEpoch(1, before.GetRlmEpoch()), new(*state.RLMEpochClosedError))
	require.NoError(t, m.s.CheckRemoteLogManagerEpoch(1, at))
	for name, r := range map[string]*metadatav1.RegisterRemoteLogManagerRequest{
		"rlm_id": {Address: "a:1"}, "address": {RlmId: 1, Address: ":1"},
	} {
		_, err := m.s.DecideRegisterRemoteLogManager(r)
		var field *state.FieldError
		require.ErrorAs(t, err, &field)
		assert.Equal(t, name, field.Field)
	}
	_, err := m.s.DecideRegisterRemoteLogManager(&metadatav1.RegisterRemoteLogManagerRequest{RlmId: 1, Address: "a:1", ClusterId: topicID})
	assert.ErrorAs(t, err, new(*state.ClusterMismatchError))
}

func TestProducerIDsAreNeverGivenTwice(t *testing.T) {
	m := newMachine(t, 1, 0)
	b, _ := m.s.Broker(1)
	next := int64(incarnation)<<32 | 1
	for _, count := range []int32{0, 1, 10_000} {
		events, r, err := m.s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{
			BrokerId: 1, BrokerEpoch: b.GetBrokerEpoch(), Count: count,
		})
		require.NoError(t, err)
		m.apply(events)
		assert.Equal(t, next, r.GetFirstProducerId())
		assert.Positive(t, r.GetFirstProducerId())
		next += int64(r.GetCount())
	}
	for _, count := range []int32{-1, 10_001} {
		_, _, err := m.s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: b.GetBrokerEpoch(), Count: count})
		assert.ErrorAs(t, err, new(*state.FieldError))
	}
	_, _, err := m.s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: 1 << 40})
	assert.ErrorAs(t, err, new(*state.StaleBrokerEpochError))

	for used := next & (1<<32 - 1); used < 1<<32-1; {
		count := int32(min(1<<31-1, 1<<32-1-used))
		m.apply([]*metadatav1.Event{{Kind: &metadatav1.Event_ProducerIdsAllocated{ProducerIdsAllocated: &metadatav1.ProducerIdsAllocated{
			First: used, Count: count, BrokerId: 1,
		}}}})
		used += int64(count)
	}
	_, _, err = m.s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: b.GetBrokerEpoch(), Count: 2})
	assert.ErrorAs(t, err, new(*state.ExhaustedError))
}

func TestCreateTopicRefuses(t *testing.T) {
	m := newMachine(t, 2, 0)
	m.createTopic("taken", topicID, 1)
	fresh := "00000000-0000-4000-8000-0000000000ff"
	for name, tc := range map[string]struct {
		r    *metadatav1.CreateTopicRequest
		id   string
		want any
	}{
		"name":        {&metadatav1.CreateTopicRequest{Name: "a/b", PartitionCount: 1}, fresh, new(*topicconfig.NameError)},
		"taken":       {&metadatav1.CreateTopicRequest{Name: "taken", PartitionCount: 1}, fresh, new(*state.TopicExistsError)},
		"id":          {&metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1}, "x", new(*state.FieldError)},
		"id taken":    {&metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1}, topicID, new(*state.TopicExistsError)},
		"none":        {&metadatav1.CreateTopicRequest{Name: "a"}, fresh, new(*state.FieldError)},
		"too many":    {&metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 10_001}, fresh, new(*state.FieldError)},
		"replication": {&metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1, ReplicationFactor: 3}, fresh, new(*state.FieldError)},
		"negative":    {&metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1, ReplicationFactor: -1}, fresh, new(*state.FieldError)},
		"config": {&metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1, Configs: map[string]string{"commit.rule": "either"}},
			fresh, new(*topicconfig.Error)},
	} {
		_, err := m.s.DecideCreateTopic(tc.r, tc.id)
		assert.ErrorAs(t, err, tc.want, name)
	}
	_, err := newMachine(t, 0, 0).s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "a", PartitionCount: 1}, fresh)
	assert.ErrorAs(t, err, new(*state.NoCandidateError))
}

func TestLargestTopicFitsInOneEntry(t *testing.T) {
	for _, partitions := range []int32{4_096, state.MaxPartitions} {
		m := newMachine(t, 100, 0)
		m.log = m.log[:0]
		id := m.createTopic("wide", topicID, partitions)
		// In a log that has lived for long an election's two offsets take 5 bytes more each.
		assert.Less(t, len(m.log[0])+state.MaxElections*10, 512<<10)
		leaders := 0
		m.s.Undecided(func(state.PartitionID) bool { leaders++; return true })
		assert.Equal(t, int(partitions), leaders)
		e, needed, _ := m.s.ChooseLeader(state.PartitionID{TopicCreationOffset: id.TopicCreationOffset, Partition: partitions - 1}, fresh)
		assert.Equal(t, partitions > 4_096, needed, "%v", e)
	}
}

func TestTopicLife(t *testing.T) {
	m := newMachine(t, 3, 0)
	for i, name := range []string{"m", "a", "z", "k"} {
		m.createTopic(name, fmt.Sprintf("00000000-0000-4000-8000-%012x", i+1), 2)
	}
	names := func(topics []*metadatav1.Topic) (out []string) {
		for _, t := range topics {
			out = append(out, t.GetName())
		}
		return out
	}
	assert.Equal(t, []string{"a", "k", "m", "z"}, names(m.s.Topics("", 10, false)))
	assert.Equal(t, []string{"m"}, names(m.s.Topics("k", 1, false)))
	assert.Equal(t, []string{"z"}, names(m.s.Topics("n", 5, false)))

	m.do(m.s.DecideUpdateTopic(&metadatav1.UpdateTopicRequest{Name: "k", Set: map[string]string{"flush": "always", "segment.bytes": "2097152"}}))
	topic, ok := m.s.Topic("k")
	require.True(t, ok)
	assert.Equal(t, map[string]string{"flush": "always", "segment.bytes": "2MiB"}, topic.GetConfigs())
	events, err := m.s.DecideUpdateTopic(&metadatav1.UpdateTopicRequest{Name: "k", Set: map[string]string{"flush": "always"}})
	require.NoError(t, err)
	assert.Empty(t, events, "repeating is harmless")
	m.do(m.s.DecideUpdateTopic(&metadatav1.UpdateTopicRequest{Name: "k", Unset: []string{"flush"}}))
	config, ok := m.s.TopicConfig(topic.GetTopicId())
	require.True(t, ok)
	assert.Equal(t, topicconfig.FlushOS, config.Flush)
	for _, r := range []*metadatav1.UpdateTopicRequest{
		{Name: "k", Unset: []string{"nope"}}, {Name: "k", Set: map[string]string{"nope": "1"}},
		{Name: "k", Set: map[string]string{"max.batch.bytes": "4MiB"}},
	} {
		_, err := m.s.DecideUpdateTopic(r)
		assert.ErrorAs(t, err, new(*topicconfig.Error))
	}
	_, err = m.s.DecideUpdateTopic(&metadatav1.UpdateTopicRequest{Name: "k", Set: map[string]string{"flush": "os"}, Unset: []string{"flush"}})
	assert.ErrorAs(t, err, new(*state.FieldError))
	_, err = m.s.DecideUpdateTopic(&metadatav1.UpdateTopicRequest{Name: "nope"})
	assert.ErrorAs(t, err, new(*state.UnknownTopicError))

	_, err = m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "k", TopicId: clusterID})
	assert.ErrorAs(t, err, new(*state.ConflictError))
	m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "k", TopicId: topic.GetTopicId()}))
	_, err = m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "k"})
	assert.ErrorAs(t, err, new(*state.UnknownTopicError))
	_, ok = m.s.Topic(topic.GetTopicId())
	assert.False(t, ok)
	_, ok = m.s.TopicByID(topic.GetTopicId())
	assert.False(t, ok)
	_, ok = m.s.TopicByName("k")
	assert.False(t, ok)
	named := m.createTopic(topicID, "00000000-0000-4000-8000-0000000000aa", 1) // named as another topic's id
	byName, _ := m.s.TopicByName(topicID)
	byID, _ := m.s.TopicByID(topicID)
	assert.Equal(t, named.TopicCreationOffset, byName.GetCreationOffset())
	assert.Equal(t, "m", byID.GetName())
	m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: topicID}))
	_, err = m.s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "k", PartitionCount: 1}, topic.GetTopicId())
	assert.ErrorAs(t, err, new(*state.TopicExistsError), "the tombstone keeps the id")
	assert.Equal(t, 3, m.s.TopicCount())
	assert.Equal(t, m.s.Digest(), m.replay().Digest())
}

func TestImageHoldsEverythingButRanges(t *testing.T) {
	m, _ := opened(t, 2)
	m.createTopic("b", "00000000-0000-4000-8000-000000000002", 1)
	m.createTopic("c", "00000000-0000-4000-8000-000000000003", 1)
	for _, size := range []int{1, 2, 3, 100} {
		images := m.s.Image(size)
		var topics []string
		for i, image := range images {
			assert.Equal(t, i < len(images)-1, image.GetMore())
			assert.True(t, proto.Equal(m.s.Position(), image.GetPosition()))
			for _, topic := range image.GetTopics() {
				topics = append(topics, topic.GetName())
			}
		}
		assert.Equal(t, []string{"b", "c", "quakes"}, topics)
		assert.Len(t, images[0].GetCluster().GetBrokers(), 3)
		assert.Len(t, images[0].GetCluster().GetRemoteLogManagers(), 2)
	}
	assert.Len(t, newMachine(t, 0, 0).s.Image(10), 1)
}

func TestApplyRefusesWhatDoesNotFollow(t *testing.T) {
	event := func(k *metadatav1.BrokerOffline) []*metadatav1.Event {
		return []*metadatav1.Event{{Kind: &metadatav1.Event_BrokerOffline{BrokerOffline: k}}}
	}
	m, ids := opened(t, 1)
	b, _ := m.s.Broker(1)
	good := event(&metadatav1.BrokerOffline{BrokerId: 1, BrokerEpoch: b.GetBrokerEpoch()})
	commit, _, err := m.s.DecideCommit(m.command(1, 1, m.descriptor(ids[0], 10, 0)))
	require.NoError(t, err)
	bad := map[string]struct {
		change func(e *metadatav1.Entry)
		want   any
	}{
		"a gap":              {func(e *metadatav1.Entry) { e.Offset++ }, new(*state.OffsetError)},
		"a repeat":           {func(e *metadatav1.Entry) { e.Offset-- }, new(*state.OffsetError)},
		"other incarnation":  {func(e *metadatav1.Entry) { e.Incarnation++ }, new(*state.BadEntryError)},
		"other controller":   {func(e *metadatav1.Entry) { e.ControllerEpoch++ }, new(*state.BadEntryError)},
		"newer level":        {func(e *metadatav1.Entry) { e.FeatureLevel++ }, new(*state.UnknownEventError)},
		"no level":           {func(e *metadatav1.Entry) { e.FeatureLevel = 0 }, new(*state.BadEntryError)},
		"unknown event":      {func(e *metadatav1.Entry) { e.Events = append(e.Events, &metadatav1.Event{}) }, new(*state.UnknownEventError)},
		"empty":              {func(e *metadatav1.Entry) { e.Events = nil }, new(*state.BadEntryError)},
		"stale broker epoch": {func(e *metadatav1.Entry) { e.Events[0].GetBrokerOffline().BrokerEpoch-- }, new(*state.BadEntryError)},
		"twice":              {func(e *metadatav1.Entry) { e.Events = append(e.Events, e.Events[0]) }, new(*state.BadEntryError)},
		"a second beginning": {func(e *metadatav1.Entry) {
			e.ControllerEpoch = 0
			e.Events = []*metadatav1.Event{{Kind: &metadatav1.Event_ClusterCreated{ClusterCreated: &metadatav1.ClusterCreated{
				ClusterId: clusterID, Incarnation: incarnation,
			}}}}
		}, new(*state.BadEntryError)},
		"a controller's entry by another": {func(e *metadatav1.Entry) {
			e.Events = append(e.Events, must(m.s.DecideControllerElected(2, "m:2"))...)
		}, new(*state.BadEntryError)},
		"a range of no object":    {func(e *metadatav1.Entry) { e.Events = commit[1:] }, new(*state.BadEntryError)},
		"an object without range": {func(e *metadatav1.Entry) { e.Events = commit[:1] }, new(*state.BadEntryError)},
		"a range twice":           {func(e *metadatav1.Entry) { e.Events = append(slices.Clone(commit), commit[1]) }, new(*state.BadEntryError)},
		"an event in a commit":    {func(e *metadatav1.Entry) { e.Events = append(slices.Clone(commit[:1]), append(e.Events, commit[1])...) }, new(*state.BadEntryError)},
		"a range of another base": {func(e *metadatav1.Entry) {
			other := proto.Clone(commit[1]).(*metadatav1.Event)
			other.GetRangeCommitted().BaseOffset++
			e.Events = []*metadatav1.Event{commit[0], other}
		}, new(*state.BadEntryError)},
	}
	for name, tc := range bad {
		t.Run(name, func(t *testing.T) {
			s := m.s.Clone()
			before := s.Digest()
			e := proto.Clone(m.entry(good)).(*metadatav1.Entry)
			tc.change(e)
			require.ErrorAs(t, s.Apply(e), tc.want)
			if _, offset := tc.want.(**state.OffsetError); offset {
				assert.Equal(t, before, s.Digest())
				assert.NoError(t, s.Apply(m.entry(good)), "a wrong offset harms nothing")
				return
			}
			assert.ErrorAs(t, s.Apply(m.entry(good)), tc.want, "it stops, it never skips")
		})
	}
	assert.ErrorAs(t, state.New().Apply(&metadatav1.Entry{FeatureLevel: 1, Events: good}), new(*state.BadEntryError))
	assert.NoError(t, m.s.Clone().Apply(m.entry(good)), "clones do not touch the original")
	assert.Equal(t, m.s.Digest(), m.replay().Digest())
}
