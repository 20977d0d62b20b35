package api

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/lineage"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// A deposed leader that does not know it yet holds less than its successor. None
// of what it can't see may be called cut or out of range (design review H8).
func TestAStaleLeaderNeverSaysThatRecordsAreGone(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		w.brokers[1].seed(t, 10)
		client := w.client(1)
		p.confirm = &replica.NotLeaderError{LeaderID: 2, Epoch: 5}
		read := func(req *brokerv1.ReadRequest) error {
			req.Topic = "orders"
			stream, err := client.Read(noForward(t.Context()), req)
			require.NoError(t, err)
			_, err = drain(stream)
			return err
		}
		refused(t, read(&brokerv1.ReadRequest{Start: at(15)}), "NOT_LEADER")

		// A position of a leadership that it has not heard of.
		later := &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: leads.LeaderEpoch + 1}
		e := refusal(t, read(&brokerv1.ReadRequest{Start: at(8), LastLeadership: later}), "UNKNOWN_LEADER_EPOCH")
		require.Equal(t, codes.Unavailable, e.Code)
		_, err := client.AwaitDurability(t.Context(), &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 8, Leadership: later, Level: logv1.Level_LEVEL_OBJECT})
		refused(t, err, "UNKNOWN_LEADER_EPOCH")

		// A position that its lineage contradicts.
		p.lineage = lineage.Lineage{{Leadership: lineage.Leadership{Incarnation: incarnation, LeaderEpoch: 1}}, {Leadership: leads, StartOffset: 5}}
		before := &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: 2}
		refused(t, read(&brokerv1.ReadRequest{Start: at(8), LastLeadership: before}), "NOT_LEADER")
		for _, said := range []error{&replica.TruncatedError{ForkPoint: 5}, &replica.OffsetOutOfRangeError{Offset: 8}} {
			p.awaitErr = said
			_, err = client.AwaitDurability(noForward(t.Context()), &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 8, Leadership: before, Level: logv1.Level_LEVEL_OBJECT})
			refused(t, err, "NOT_LEADER")
		}

		// Nobody can confirm: it is not known.
		p.confirm = &replica.UnavailableError{Reason: replica.MetadataUnreachable, Message: "the controller does not answer"}
		refused(t, read(&brokerv1.ReadRequest{Start: at(15)}), "METADATA_UNREACHABLE")
		_, err = client.AwaitDurability(t.Context(), &brokerv1.AwaitDurabilityRequest{Topic: "orders", EndOffset: 8, Leadership: before, Level: logv1.Level_LEVEL_OBJECT})
		refused(t, err, "METADATA_UNREACHABLE")

		// Confirmed, it is said.
		p.confirm = nil
		refused(t, read(&brokerv1.ReadRequest{Start: at(15)}), "OFFSET_OUT_OF_RANGE")
		refused(t, read(&brokerv1.ReadRequest{Start: at(8), LastLeadership: before}), "LOG_TRUNCATED")
	})
}

// What is below the log start stays there: no confirmation is needed.
func TestExpiredNeedsNoConfirmation(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		w.brokers[1].seed(t, 10)
		p.set(func() { p.start = 5 })
		p.confirm = &replica.UnavailableError{Reason: replica.MetadataUnreachable, Message: "down"}
		stream, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(1)})
		require.NoError(t, err)
		_, err = drain(stream)
		refused(t, err, "EXPIRED")
	})
}

// A reader that names a leadership is sent to the leader, not judged by a broker
// that does not lead.
func TestOnlyTheLeaderJudgesAPosition(t *testing.T) {
	run(t, 2, 2, nil, func(t *testing.T, w *world) {
		w.brokers[2].seed(t, 10)
		w.brokers[1].orders.lineage = nil
		other := lineage.Leadership{Incarnation: incarnation, LeaderEpoch: 1}
		w.brokers[1].orders.lineage = lineage.Lineage{{Leadership: other}}
		stream, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(8), LastLeadership: leadershipToProto(leads)})
		require.NoError(t, err)
		all, err := drain(stream)
		require.EqualError(t, err, "EOF")
		require.Equal(t, []int64{8, 9}, offsets(all))
	})
}
