package api

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

var recovering = &replica.RecoveringError{Reason: "its log is being reconciled"}

// recovers makes a broker's orders/0 recover, for a while if that is above 0.
func (b *broker) recovers(while time.Duration) {
	refuse := func(err error) func() {
		return func() {
			b.orders.refuse = func(replica.AppendInput) error { return err }
			b.orders.readErr = err
		}
	}
	b.orders.set(refuse(recovering))
	if while > 0 {
		time.AfterFunc(while, func() { b.orders.set(refuse(nil)) })
	}
}

// calls are what waits for a leader.
var calls = map[string]func(ctx context.Context, t *testing.T, c brokerv1.LogServiceClient) error{
	"Append of records": func(ctx context.Context, _ *testing.T, c brokerv1.LogServiceClient) error {
		_, err := c.Append(ctx, &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		return err
	},
	"Append of batches": func(ctx context.Context, t *testing.T, c brokerv1.LogServiceClient) error {
		_, err := c.Append(ctx, &brokerv1.AppendRequest{Topic: "orders", Batches: batch(t, record.CodecNone, 1, 10)})
		return err
	},
	"Produce": func(ctx context.Context, t *testing.T, c brokerv1.LogServiceClient) error {
		s, err := c.Produce(ctx)
		require.NoError(t, err)
		require.NoError(t, s.Send(&brokerv1.ProduceRequest{Request: 1, Topic: "orders", Batches: batch(t, record.CodecNone, 1, 10)}))
		if _, err = s.Recv(); err != nil {
			return err
		}
		return s.CloseSend()
	},
	"Read": func(ctx context.Context, t *testing.T, c brokerv1.LogServiceClient) error {
		s, err := c.Read(ctx, &brokerv1.ReadRequest{Topic: "orders", MaxRecords: 1})
		require.NoError(t, err)
		for err == nil {
			var m *brokerv1.ReadResponse
			if m, err = s.Recv(); err == nil && m.GetStart() == nil {
				return nil
			}
		}
		return err
	},
}

func TestCallsWaitForALeaderThatIsNotReady(t *testing.T) {
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			run(t, 1, 1, nil, func(t *testing.T, w *world) {
				_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)}) // for the reader
				require.NoError(t, err)

				w.brokers[1].recovers(700 * time.Millisecond)
				began := time.Now()
				require.NoError(t, call(t.Context(), t, w.client(1)))
				require.Equal(t, 700*time.Millisecond, time.Since(began), "as soon as it is ready")

				w.brokers[1].recovers(0)
				began = time.Now()
				refused(t, call(t.Context(), t, w.client(1)), "RECOVERING")
				require.Equal(t, 5*time.Second, time.Since(began), "bounded")

				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				began = time.Now()
				refused(t, call(ctx, t, w.client(1)), "RECOVERING")
				require.Equal(t, 900*time.Millisecond, time.Since(began), "while the caller listens")
			})
		})
	}
}

func TestAWaitForALeaderStoresOnce(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		b := w.brokers[1]
		b.recovers(time.Second)
		for i := range 5 { // changes that do not help
			time.AfterFunc(time.Duration(i+1)*100*time.Millisecond, func() { b.orders.set(func() {}) })
		}
		resp, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(3)})
		require.NoError(t, err)
		require.Equal(t, int64(0), resp.GetBaseOffset())
		require.Equal(t, int64(3), b.orders.Offsets().LogEnd)
		require.LessOrEqual(t, b.orders.attempted, 8, "it is not asked in a circle")
	})
}

// What has waited for the producer state already is not kept waiting again.
func TestWhatHasWaitedIsAnsweredAtOnce(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].orders.set(func() {
			w.brokers[1].orders.refuse = func(replica.AppendInput) error { return &replica.RecoveringError{Waited: true} }
		})
		began := time.Now()
		refused(t, calls["Append of records"](t.Context(), t, w.client(1)), "RECOVERING")
		refused(t, calls["Produce"](t.Context(), t, w.client(1)), "RECOVERING")
		require.Zero(t, time.Since(began))
	})
}

func TestWaitsForALeaderAreBounded(t *testing.T) {
	run(t, 1, 1, func(c *Config) {
		c.LeaderMaxWaiters = 2
		c.LeaderMaxWait = config.Duration(20 * time.Second)
	}, func(t *testing.T, w *world) {
		w.brokers[1].recovers(0)
		errs := make(chan error, 3)
		c := w.client(1)
		began := time.Now()
		for range 3 {
			go func() {
				_, err := c.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
				errs <- err
			}()
		}
		refused(t, <-errs, "RECOVERING")
		require.Zero(t, time.Since(began), "the third is not kept")
		go func() { _ = w.brokers[1].server.Drain(t.Context()) }()
		refused(t, <-errs, "DRAINING")
		refused(t, <-errs, "DRAINING")
		require.Less(t, time.Since(began), 20*time.Second)
	})
}

// The broker that is asked does not hold the partition, and the election is under
// way.
func TestForwardingWaitsForTheElection(t *testing.T) {
	run(t, 2, 2, nil, func(t *testing.T, w *world) {
		r := w.brokers[1].replicas
		for name, call := range calls {
			r.set(func() { r.lookup = &replica.NotLeaderError{Epoch: 5} })
			time.AfterFunc(300*time.Millisecond, func() { r.set(func() { r.lookup = w.brokers[1].orders.notLeader() }) })
			began := time.Now()
			if name == "Read" {
				_, err := w.client(2).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
				require.NoError(t, err)
			}
			require.NoError(t, call(t.Context(), t, w.client(1)), name)
			require.Equal(t, 300*time.Millisecond, time.Since(began), name)
		}
		r.set(func() { r.lookup = &replica.NotLeaderError{Epoch: 5} })
		for name, call := range calls {
			began := time.Now()
			e := refusal(t, call(t.Context(), t, w.client(1)), "NOT_LEADER")
			require.Equal(t, codes.Aborted, e.Code)
			require.Equal(t, 5*time.Second, time.Since(began), name)
		}
		// Assigned meanwhile, and then ready.
		r.set(func() { r.lookup = recovering })
		w.brokers[1].recovers(2 * time.Second)
		time.AfterFunc(time.Second, func() {
			r.set(func() { r.lookup = nil })
			w.brokers[1].orders.set(func() { w.brokers[1].orders.leader = 1 })
		})
		began := time.Now()
		require.NoError(t, calls["Append of records"](t.Context(), t, w.client(1)))
		require.Equal(t, 2*time.Second, time.Since(began))
	})
}

func TestAReaderOutlastsARecovery(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		b := w.brokers[1]
		s, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Follow: true})
		require.NoError(t, err)
		m, err := s.Recv()
		require.NoError(t, err)
		require.NotNil(t, m.GetStart())
		for range 3 {
			b.recovers(3 * time.Second)
			time.Sleep(4 * time.Second) //nolint:forbidigo // virtual time inside a bubble
			_, err = w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
			require.NoError(t, err)
			for m.GetRecords() == nil {
				m, err = s.Recv()
				require.NoError(t, err)
			}
			m = nil
		}
		b.recovers(0)
		for err == nil {
			_, err = s.Recv()
		}
		refused(t, err, "RECOVERING")
	})
}

// An append that was written is not repeated, here or elsewhere, though its error
// says who leads now.
func TestWhatWasWrittenIsNotDoneAgain(t *testing.T) {
	s := &Service{self: 1}
	elsewhere := &replica.NotLeaderError{LeaderID: 2, Address: "broker-2:9090"}
	for _, err := range []error{
		&replica.OutcomeUnknownError{Err: elsewhere},
		&replica.OutcomeUnknownError{Err: &replica.NotLeaderError{}},
		&replica.PipelineBrokenError{Err: elsewhere},
		&startedError{&replica.NotLeaderError{}},
		&startedError{recovering},
	} {
		_, forward := s.leaderFor(t.Context(), err)
		require.False(t, forward, "%#v", err)
		require.False(t, leaderless(err), "%#v", err)
	}
	_, forward := s.leaderFor(t.Context(), elsewhere)
	require.True(t, forward)
	require.False(t, leaderless(elsewhere))
	require.True(t, leaderless(recovering))
}
