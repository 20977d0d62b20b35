package replica_test

import (
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// Design reviews H7 and F18: a leader answers for what it leads and has opened,
// takes reports made at its own fence, and forgets a follower that registered
// again.
func TestFetchReplicaAnswersOnlyForWhatIsLedAndOpen(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		mustAdd(t, p, batch(t, "x", 3), partition.Object)
		s.world.with(func() { // a follower that only talks
			s.world.append(&metadatav1.Event{Kind: &metadatav1.Event_BrokerRegistered{BrokerRegistered: &metadatav1.BrokerRegistered{BrokerId: 2, Address: "broker:2"}}})
		})
		until(t, "the follower is known", func() bool { _, ok := b.m.Cluster().Broker(2); return ok })
		follower, _ := b.m.Cluster().Broker(2)
		var fence *logv1.Fence
		s.world.with(func() { fence = proto.Clone(s.world.parts[0].fence).(*logv1.Fence) })
		service := replica.NewPeerService(b.m)
		ask := func(change func(*brokerv1.FetchReplicaRequest)) (*brokerv1.LeaderPosition, error) {
			req := &brokerv1.FetchReplicaRequest{
				ClusterId: clusterID, BrokerId: 2, BrokerEpoch: follower.Epoch,
				Partitions: []*brokerv1.ReplicaPosition{{
					Partition: s.world.id(0), Fence: proto.Clone(fence).(*logv1.Fence), LogEndOffset: 2, ObjectEndOffset: 3,
					State: brokerv1.ReplicaState_REPLICA_STATE_FETCHING,
				}},
			}
			if change != nil {
				change(req)
			}
			resp, err := service.FetchReplica(t.Context(), req)
			if err != nil {
				return nil, err
			}
			require.Len(t, resp.GetPartitions(), 1)
			return resp.GetPartitions()[0], nil
		}
		reason := func(want errorsv1.ErrorReason, change func(*brokerv1.FetchReplicaRequest)) {
			t.Helper()
			got, err := ask(change)
			require.NoError(t, err)
			require.Equal(t, want, got.GetReason())
			if want != errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED {
				require.Zero(t, got.GetObjectEndOffset(), "and nothing else")
			}
		}
		got, err := ask(nil)
		require.NoError(t, err)
		require.Equal(t, []int64{3, 3, 3, 0}, []int64{got.GetHighWatermark(), got.GetObjectEndOffset(), got.GetLogEndOffset(), got.GetLogStartOffset()})
		require.True(t, proto.Equal(fence, got.GetFence()))
		status2 := func() replica.Status { return p.Explain().Replicas[1] }
		require.Equal(t, replica.Status{BrokerID: 2, Online: true, State: partition.Fetching, LogEnd: 2, Lag: 1}, status2())
		mustAdd(t, p, batch(t, "y", 1), partition.Object)
		require.EqualValues(t, 2, status2().Lag, "seen from here")

		reason(errorsv1.ErrorReason_ERROR_REASON_FENCED_LEADER_EPOCH, func(r *brokerv1.FetchReplicaRequest) { r.Partitions[0].Fence.LeaderEpoch-- })
		reason(errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_LEADER_EPOCH, func(r *brokerv1.FetchReplicaRequest) { r.Partitions[0].Fence.LeaderEpoch++ })
		reason(errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION, func(r *brokerv1.FetchReplicaRequest) { r.Partitions[0].Partition.Partition = 7 })
		reason(errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION, func(r *brokerv1.FetchReplicaRequest) { r.Partitions[0].Partition.TopicId = clusterID })
		require.EqualValues(t, 2, status2().LogEnd, "none of these was taken")
		reason(errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED, func(r *brokerv1.FetchReplicaRequest) { r.BrokerId = 9 })
		require.Len(t, p.Explain().Replicas, 2, "no replica")

		_, err = ask(func(r *brokerv1.FetchReplicaRequest) { r.ClusterId = topicID })
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH), "%v", err)
		_, err = ask(func(r *brokerv1.FetchReplicaRequest) { r.BrokerEpoch-- })
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH), "%v", err)
		_, err = ask(func(r *brokerv1.FetchReplicaRequest) { r.BrokerId = 0 })
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD), "%v", err)

		// It registers again: its disk may be another.
		s.world.with(func() {
			s.world.append(&metadatav1.Event{Kind: &metadatav1.Event_BrokerRegistered{BrokerRegistered: &metadatav1.BrokerRegistered{BrokerId: 2, Address: "broker:2"}}})
		})
		until(t, "the new registration is known", func() bool { b, _ := b.m.Cluster().Broker(2); return b.Epoch > follower.Epoch })
		require.Zero(t, status2().LogEnd)
		require.Zero(t, status2().State)
		require.NotEmpty(t, status2().Reason)

		// Elected, not open.
		s.world.with(func() {
			s.world.refuseOpen = func(*metadatav1.OpenEpochRequest) error { return status.Error(codes.Unavailable, "not now") }
		})
		s.world.fence(0, 1)
		follower, _ = b.m.Cluster().Broker(2)
		until(t, "it recovers", func() bool { return p.Explain().State == partition.Recovering })
		reason(errorsv1.ErrorReason_ERROR_REASON_RECOVERING, nil)
		s.world.fence(0, 2)
		until(t, "it follows", func() bool { return p.Explain().State == partition.Truncating })
		reason(errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER, nil)
	})
}

// What a leader does not answer costs a follower nothing.
func TestFollowersCopyWhileTheirLeaderDoesNotAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		one := s.broker(1, vfs.NewMem())
		p := one.leading(0)
		s.silence("broker:1")
		two := s.broker(2, vfs.NewMem())
		mustAdd(t, p, batch(t, "x", 3), partition.Object)
		two.following(0, 3)
		time.Sleep(20 * time.Second) //nolint:forbidigo // virtual time inside a bubble
		mustAdd(t, p, batch(t, "y", 3), partition.Object)
		two.following(0, 6)
		require.Equal(t, "it has not said anything under the present leadership", one.leading(0).Explain().Replicas[1].Reason)
	})
}
