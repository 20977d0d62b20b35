package metaclient_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

type journal struct {
	mu         sync.Mutex
	registered []int64
	lost       []int64
	confirmed  int
}

func (j *journal) read() (registered, lost []int64, confirmed int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]int64(nil), j.registered...), append([]int64(nil), j.lost...), j.confirmed
}

func session(t *testing.T, c *metaclient.Client) (*metaclient.Session, *journal, <-chan error) {
	t.Helper()
	j := &journal{}
	s, err := c.NewSession(metaclient.SessionOptions{
		Role: metaclient.RemoteLogManagerRole(func() *metadatav1.RegisterRemoteLogManagerRequest {
			return &metadatav1.RegisterRemoteLogManagerRequest{RlmId: 3}
		}),
		OnRegistered: func(r metaclient.Registration) {
			j.mu.Lock()
			defer j.mu.Unlock()
			j.registered = append(j.registered, r.Epoch)
		},
		OnLost: func(epoch int64, _ error) {
			j.mu.Lock()
			defer j.mu.Unlock()
			j.lost = append(j.lost, epoch)
		},
		OnConfirmed: func(metaclient.Confirmation) {
			j.mu.Lock()
			defer j.mu.Unlock()
			j.confirmed++
		},
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		stopCtx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
		defer cancel()
		require.NoError(t, s.Stop(stopCtx))
	})
	return s, j, done
}

// until waits for a condition, bounded.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, 10*time.Second, 2*time.Millisecond, what)
}

func TestSessionBeatsAndStopClosesTheEpoch(t *testing.T) {
	a := start(t)
	s, j, done := session(t, client(t, nil, a.address))
	until(t, "two heartbeats confirmed", func() bool { _, _, n := j.read(); return n >= 2 })
	require.False(t, s.ConfirmedAt().IsZero())
	reg, ok := s.Current()
	require.True(t, ok)
	require.EqualValues(t, 1, reg.Epoch)

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	require.NoError(t, s.Stop(ctx))
	require.NoError(t, <-done)
	a.mu.Lock()
	defer a.mu.Unlock()
	require.Equal(t, []int64{1}, a.stopped)
}

func TestClosedEpochRegistersAgain(t *testing.T) {
	a := start(t)
	s, j, _ := session(t, client(t, nil, a.address))
	until(t, "first heartbeat", func() bool { _, _, n := j.read(); return n >= 1 })
	a.mu.Lock()
	a.closed[1] = true
	a.mu.Unlock()
	until(t, "second epoch", func() bool { r, l, _ := j.read(); return len(r) == 2 && len(l) == 1 })

	// A refused commit tells as well.
	until(t, "second epoch confirmed", func() bool { return !s.ConfirmedAt().IsZero() })
	s.Invalidate(1) // an old one: ignored
	s.Invalidate(2)
	until(t, "third epoch", func() bool { r, _, _ := j.read(); return len(r) == 3 })
	registered, lost, _ := j.read()
	require.Equal(t, []int64{1, 2, 3}, registered)
	require.Equal(t, []int64{1, 2}, lost)
}

func TestSessionFollowsTheControllerWithItsEpoch(t *testing.T) {
	a, b := start(t), start(t)
	b.leads(a.address)
	_, j, _ := session(t, client(t, nil, a.address, b.address))
	until(t, "first heartbeat", func() bool { _, _, n := j.read(); return n >= 1 })
	a.leads(b.address)
	b.leads(b.address)
	until(t, "heartbeats at the new controller", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.beats >= 2
	})
	registered, lost, _ := j.read()
	require.Equal(t, []int64{1}, registered, "a change of controller costs no epoch")
	require.Empty(t, lost)
}

func TestSessionLeavesAReplicaThatDied(t *testing.T) {
	a, b := start(t), start(t)
	b.leads(a.address)
	_, j, _ := session(t, client(t, nil, a.address, b.address))
	until(t, "first heartbeat", func() bool { _, _, n := j.read(); return n >= 1 })
	b.leads(b.address)
	a.server.Stop()
	until(t, "heartbeats at the new controller", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.beats >= 2
	})
}

func TestHopelessRegistrationEndsRun(t *testing.T) {
	a := start(t)
	a.fail = func(string) error {
		return rpcerr.New(codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, "other cluster")
	}
	_, _, done := session(t, client(t, nil, a.address))
	err := <-done
	require.Equal(t, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, rpcerr.Reason(err))
}

// A replica that holds its connections and answers nothing any more, as after
// its host was cut off, costs less than the session.
func TestSessionLeavesASilentControllerInTime(t *testing.T) {
	a, b := start(t), start(t)
	b.leads(a.address)
	s, j, _ := session(t, client(t, nil, a.address, b.address))
	until(t, "first heartbeat", func() bool { _, _, n := j.read(); return n >= 1 })
	a.mu.Lock()
	a.mute = true
	a.mu.Unlock()
	// b still points at a for a while, as replicas do.
	time.AfterFunc(120*time.Millisecond, func() { b.leads(b.address) })
	last := s.ConfirmedAt()
	until(t, "confirmed by b", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.beats >= 2
	})
	until(t, "confirmed", func() bool { return s.ConfirmedAt().After(last) })
	registered, lost, _ := j.read()
	require.Equal(t, []int64{1}, registered)
	require.Empty(t, lost)
}
