package api

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

const nearestPreference = brokerv1.ReadPreference_READ_PREFERENCE_NEAREST

// near gives broker 1, which follows, a replica with the first n of the leader's
// batches.
func (w *world) near(n int) *fakePartition {
	leader, copied := w.brokers[2].orders, newFakePartition(1, 1)
	leader.mu.Lock()
	defer leader.mu.Unlock()
	copied.batches = leader.batches[:n]
	copied.end = copied.batches[n-1].EndOffset()
	copied.hw = copied.end
	w.brokers[1].orders.near = follows{copied}
	return copied
}

// follows is a replica that does not lead.
type follows struct{ *fakePartition }

func (f follows) Offsets() replica.Offsets {
	o := f.fakePartition.Offsets()
	o.Leading, o.LeaderID = false, 2
	return o
}

func TestNearestReadsAreAnsweredByTheReplicaAsked(t *testing.T) {
	run(t, 3, 2, func(c *Config) { c.ReadVisibleWait = c.ReadProgressInterval }, func(t *testing.T, w *world) {
		w.brokers[2].seed(t, 5)
		copied := w.near(3)
		read := func(req *brokerv1.ReadRequest) ([]*brokerv1.ReadResponse, error) {
			req.Topic = "orders"
			stream, err := w.client(1).Read(noForward(t.Context()), req)
			require.NoError(t, err)
			return drain(stream)
		}
		all, err := read(&brokerv1.ReadRequest{ReadPreference: nearestPreference})
		require.ErrorIs(t, err, io.EOF)
		require.EqualValues(t, 1, all[0].GetStart().GetBrokerId())
		require.EqualValues(t, 3, all[0].GetStart().GetHighWatermark(), "what it serves, not what is committed")
		require.Equal(t, []int64{0, 1, 2}, offsets(all))
		_, err = read(&brokerv1.ReadRequest{})
		refused(t, err, "NOT_LEADER")

		// An offset above what it knows waits, bounded, and is not called out of range
		// (design review H8).
		began := time.Now()
		_, err = read(&brokerv1.ReadRequest{ReadPreference: nearestPreference, Start: at(5)})
		e := refusal(t, err, "NOT_READY")
		require.Equal(t, codes.Unavailable, e.Code)
		require.Equal(t, w.brokers[1].service.cfg.ReadVisibleWait.Std(), time.Since(began))

		// It gets there while somebody waits.
		go func() {
			time.Sleep(time.Second) //nolint:forbidigo // virtual time inside a bubble
			leader := w.brokers[2].orders
			copied.set(func() { copied.batches = leader.batches; copied.end, copied.hw = leader.end, leader.end })
		}()
		all, err = read(&brokerv1.ReadRequest{ReadPreference: nearestPreference, Start: at(4), Follow: true, MaxRecords: 1})
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, []int64{4}, offsets(all))
	})
}

// elsewhereOnly is a replica that leaves a question to the leader.
type elsewhereOnly struct{ *fakePartition }

func (e elsewhereOnly) CheckPosition(int64, lineage.Leadership) error {
	return &replica.NotLeaderError{LeaderID: 2, Address: brokerAddress(2), Epoch: 4}
}

func TestNearestReadsGoToTheLeaderWhereTheReplicaCanNotAnswer(t *testing.T) {
	run(t, 3, 2, nil, func(t *testing.T, w *world) {
		w.brokers[2].seed(t, 3)
		req := &brokerv1.ReadRequest{Topic: "orders", ReadPreference: nearestPreference, Start: at(1)}
		from := func() int32 {
			stream, err := w.client(1).Read(t.Context(), req)
			require.NoError(t, err)
			all, err := drain(stream)
			require.ErrorIs(t, err, io.EOF)
			require.Equal(t, []int64{1, 2}, offsets(all))
			return all[0].GetStart().GetBrokerId()
		}
		require.EqualValues(t, 2, from(), "it holds nothing that is reconciled")
		copied := w.near(3)
		require.EqualValues(t, 1, from())
		w.brokers[1].orders.near = elsewhereOnly{copied}
		req.LastLeadership = &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: leads.LeaderEpoch}
		require.EqualValues(t, 2, from(), "what only the leader can say")

		// Once records were sent the stream ends, and the reader goes on elsewhere.
		copied.readErr = &replica.UnavailableError{Reason: replica.NotReady, Message: "an election", Retry: time.Second}
		w.brokers[1].orders.near, req.LastLeadership = follows{copied}, nil
		stream, err := w.client(1).Read(t.Context(), req)
		require.NoError(t, err)
		_, err = drain(stream)
		refused(t, err, "NOT_READY")
	})
}

func TestExplainShowsTheReplicas(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].submit(t, batch(t, record.CodecNone, 1, 10))
		w.brokers[1].orders.explain.Replicas = []replica.Status{
			{BrokerID: 1, Online: true, State: 4, LogEnd: 1},
			{BrokerID: 2, Online: true, State: 8, LogEnd: 7, Lag: 3, Age: 1500 * time.Millisecond, Reason: "slow"},
		}
		resp, err := w.client(1).ExplainPartition(t.Context(), &brokerv1.ExplainPartitionRequest{Topic: "orders"})
		require.NoError(t, err)
		require.Len(t, resp.GetReplicas(), 2)
		r := resp.GetReplicas()[1]
		require.Equal(t, brokerv1.ReplicaState_REPLICA_STATE_FETCHING, r.GetState())
		require.Equal(t, []int64{2, 7, 3, 1500}, []int64{int64(r.GetBrokerId()), r.GetLogEndOffset(), r.GetLag(), r.GetAgeMs()})
		require.Equal(t, "slow", r.GetReason())
	})
}
