package cluster_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
)

const id = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"

func entry(offset int64, events ...*metadatav1.Event) *metadatav1.Entry {
	return &metadatav1.Entry{Offset: offset, Incarnation: 7, ControllerEpoch: 1, FeatureLevel: 1, Events: events}
}

func created(name string) *metadatav1.Event {
	return &metadatav1.Event{Kind: &metadatav1.Event_TopicCreated{TopicCreated: &metadatav1.TopicCreated{
		TopicId: id, Name: name, Configs: map[string]string{"min.ack.level": "OBJECT"},
		Assignments: []*metadatav1.ReplicaAssignment{{BrokerIds: []int32{1, 2}}, {BrokerIds: []int32{2}}},
	}}}
}

func TestEntriesMakeViewsThatDoNotChange(t *testing.T) {
	tr := cluster.NewTracker()
	require.NoError(t, tr.Apply(entry(0, &metadatav1.Event{Kind: &metadatav1.Event_ClusterCreated{ClusterCreated: &metadatav1.ClusterCreated{ClusterId: "c", Incarnation: 7}}})))
	require.NoError(t, tr.Apply(entry(1,
		&metadatav1.Event{Kind: &metadatav1.Event_BrokerRegistered{BrokerRegistered: &metadatav1.BrokerRegistered{BrokerId: 1, Address: "b:1", Zone: "a"}}},
		&metadatav1.Event{Kind: &metadatav1.Event_RemoteLogManagerRegistered{RemoteLogManagerRegistered: &metadatav1.RemoteLogManagerRegistered{RlmId: 4, Address: "r:4"}}},
	)))
	require.NoError(t, tr.Apply(entry(2, created("quakes"))))
	before := tr.View()
	topic, ok := before.Topic("quakes")
	require.True(t, ok)
	require.EqualValues(t, 2, topic.CreationOffset)
	require.Len(t, topic.Partitions, 2)
	_, _, ok = before.Leader(topic, 0)
	require.False(t, ok)

	require.NoError(t, tr.Apply(entry(3,
		&metadatav1.Event{Kind: &metadatav1.Event_PartitionFenced{PartitionFenced: &metadatav1.PartitionFenced{TopicCreationOffset: 2, Partition: 0, LeaderEpoch: 1, LeaderId: 1, BrokerEpoch: 1}}},
		&metadatav1.Event{Kind: &metadatav1.Event_PartitionFenced{PartitionFenced: &metadatav1.PartitionFenced{TopicCreationOffset: 2, Partition: 1, LeaderEpoch: 1}}},
		&metadatav1.Event{Kind: &metadatav1.Event_EpochOpened{EpochOpened: &metadatav1.EpochOpened{TopicCreationOffset: 2, Partition: 0, LeaderEpoch: 1}}},
	)))
	v := tr.View()
	now, _ := v.TopicByID(id)
	b, epoch, ok := v.Leader(now, 0)
	require.True(t, ok)
	require.Equal(t, "b:1", b.Address)
	require.EqualValues(t, 1, epoch)
	require.True(t, now.Partitions[0].Opened)
	require.Zero(t, topic.Partitions[0].LeaderID, "the older view is what it was")
	require.Equal(t, cluster.Position{Incarnation: 7, ControllerEpoch: 1, Offset: 4}, v.Position)

	require.NoError(t, tr.Apply(entry(4,
		&metadatav1.Event{Kind: &metadatav1.Event_BrokerOffline{BrokerOffline: &metadatav1.BrokerOffline{BrokerId: 1, BrokerEpoch: 0}}},
		&metadatav1.Event{Kind: &metadatav1.Event_RemoteLogManagerClosed{RemoteLogManagerClosed: &metadatav1.RemoteLogManagerClosed{RlmId: 4, RlmEpoch: 1}}},
	)))
	b, _ = tr.View().Broker(1)
	require.True(t, b.Online, "another epoch went offline")
	require.False(t, tr.View().RemoteLogManagers()[0].Open)
	require.NoError(t, tr.Apply(entry(5, &metadatav1.Event{Kind: &metadatav1.Event_TopicDeleted{TopicDeleted: &metadatav1.TopicDeleted{TopicCreationOffset: 2}}})))
	_, ok = tr.View().Topic("quakes")
	require.False(t, ok)
	_, ok = tr.View().TopicByCreation(2)
	require.False(t, ok)
	_, ok = v.Topic("quakes")
	require.True(t, ok)
}

func TestImagesMayComeInParts(t *testing.T) {
	tr := cluster.NewTracker()
	ready, err := tr.Reset(&metadatav1.MetadataImage{More: true, Topics: []*metadatav1.Topic{{TopicId: id, Name: "a", CreationOffset: 2,
		Partitions: []*metadatav1.Partition{{LeaderId: 1, Fence: &logv1.Fence{LeaderEpoch: 3}}}}}})
	require.NoError(t, err)
	require.False(t, ready)
	require.Zero(t, tr.View().TopicCount())
	ready, err = tr.Reset(&metadatav1.MetadataImage{
		Position: &metadatav1.MetadataPosition{Incarnation: 7, Offset: 9}, Topics: []*metadatav1.Topic{{TopicId: "b", Name: "b", CreationOffset: 5}},
		Cluster: &metadatav1.GetClusterResponse{ClusterId: "c", Brokers: []*metadatav1.Broker{{BrokerId: 1, Online: true}}},
	})
	require.NoError(t, err)
	require.True(t, ready)
	require.Equal(t, 2, tr.View().TopicCount())
	require.EqualValues(t, 9, tr.View().Position.Offset)
}

func TestWhatIsNotUnderstoodStopsTheReader(t *testing.T) {
	tr := cluster.NewTracker()
	newer := entry(0)
	newer.FeatureLevel = 2
	require.ErrorIs(t, tr.Apply(newer), cluster.ErrFeatureLevel)
	require.ErrorIs(t, tr.Apply(entry(0, &metadatav1.Event{})), cluster.ErrFeatureLevel)
	strange := created("x")
	strange.GetTopicCreated().Configs = map[string]string{"from.the.future": "1"}
	require.ErrorIs(t, tr.Apply(entry(0, strange)), cluster.ErrFeatureLevel)
}

func TestReplicasChange(t *testing.T) {
	tr := cluster.NewTracker()
	require.NoError(t, tr.Apply(entry(0, &metadatav1.Event{Kind: &metadatav1.Event_ClusterCreated{ClusterCreated: &metadatav1.ClusterCreated{ClusterId: "c", Incarnation: 7}}})))
	require.NoError(t, tr.Apply(entry(1, created("quakes"))))
	before, _ := tr.View().Topic("quakes")
	require.NoError(t, tr.Apply(entry(2,
		&metadatav1.Event{Kind: &metadatav1.Event_ReplicasChanged{ReplicasChanged: &metadatav1.ReplicasChanged{TopicCreationOffset: 1, Partition: 1, BrokerIds: []int32{3, 2}}}},
		&metadatav1.Event{Kind: &metadatav1.Event_ReplicasChanged{ReplicasChanged: &metadatav1.ReplicasChanged{TopicCreationOffset: 77, BrokerIds: []int32{3}}}},
	)))
	after, _ := tr.View().Topic("quakes")
	require.Equal(t, []int32{1, 2}, after.Partitions[0].Replicas)
	require.Equal(t, []int32{3, 2}, after.Partitions[1].Replicas)
	require.Equal(t, []int32{2}, before.Partitions[1].Replicas, "the older view is what it was")
}
