package controller

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// etcdLease is a lease service whose answers a test chooses.
type etcdLease struct {
	clientv3.Lease
	mu      sync.Mutex // guards err and revoked
	err     error
	revoked bool
}

func (e *etcdLease) set(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.err = err
}

func (e *etcdLease) Grant(_ context.Context, ttl int64) (*clientv3.LeaseGrantResponse, error) {
	return &clientv3.LeaseGrantResponse{ID: 7, TTL: ttl}, nil
}

func (e *etcdLease) KeepAliveOnce(context.Context, clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return &clientv3.LeaseKeepAliveResponse{TTL: 9}, e.err
}

func (e *etcdLease) Revoke(context.Context, clientv3.LeaseID) (*clientv3.LeaseRevokeResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.revoked = true
	return &clientv3.LeaseRevokeResponse{}, nil
}

// leased runs a test in a bubble with a lease of 9 s, granted now.
func leased(t *testing.T, run func(t *testing.T, e *etcdLease, l *lease)) {
	synctest.Test(t, func(t *testing.T) {
		e, began := &etcdLease{}, time.Now()
		l, err := grantLease(t.Context(), e, 9*time.Second, func() time.Duration { return time.Since(began) },
			slog.New(slog.DiscardHandler), func(string, error) {})
		require.NoError(t, err)
		run(t, e, l)
		l.close(t.Context())
	})
}

func after(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // inside a bubble
	synctest.Wait()
}

var errSilent = errors.New("no answer")

func TestLease(t *testing.T) {
	t.Run("stays fresh while etcd confirms it", func(t *testing.T) {
		leased(t, func(t *testing.T, e *etcdLease, l *lease) {
			for range 100 {
				after(777 * time.Millisecond)
				require.True(t, l.fresh())
			}
		})
	})
	t.Run("is not fresh a third of its life after the last confirmation, and fresh again with the next", func(t *testing.T) {
		leased(t, func(t *testing.T, e *etcdLease, l *lease) {
			after(10*time.Second + time.Millisecond) // confirmed at 10 s
			e.set(errSilent)
			after(2900 * time.Millisecond)
			assert.True(t, l.fresh())
			after(200 * time.Millisecond)
			assert.False(t, l.fresh())
			assert.False(t, l.isLost())
			e.set(nil)
			after(time.Second)
			assert.True(t, l.fresh())
		})
	})
	t.Run("is lost without a confirmation for its whole life", func(t *testing.T) {
		leased(t, func(t *testing.T, e *etcdLease, l *lease) {
			e.set(errSilent)
			after(8500 * time.Millisecond)
			assert.False(t, l.isLost())
			after(time.Second)
			assert.True(t, l.isLost())
			require.ErrorIs(t, l.err(), errLeaseUnknown)
			e.set(nil)
			after(10 * time.Second)
			assert.False(t, l.fresh(), "for good")
		})
	})
	t.Run("is lost at once when etcd does not know it", func(t *testing.T) {
		leased(t, func(t *testing.T, e *etcdLease, l *lease) {
			e.set(rpctypes.ErrLeaseNotFound)
			after(time.Second)
			require.ErrorIs(t, l.err(), errLeaseLost)
		})
	})
	t.Run("is revoked when closed", func(t *testing.T) {
		var e *etcdLease
		leased(t, func(_ *testing.T, inner *etcdLease, _ *lease) { e = inner })
		assert.True(t, e.revoked)
	})
}

// While etcd does not confirm the controller no heartbeat is answered and no
// session ends; then everybody has one full timeout (design review F19, H14).
func TestAnEtcdHiccupIsNobodysDeath(t *testing.T) {
	leased(t, func(t *testing.T, e *etcdLease, l *lease) {
		began := time.Now()
		c := &Controller{began: began}
		tm := &term{c: c, lease: l, sessions: newSessions(4 * time.Second)}
		m := Member{Broker, 1, 10}
		tm.sessions.grant(m, c.now())
		require.NoError(t, tm.heartbeat(m))
		e.set(errSilent)
		after(3500 * time.Millisecond)
		require.ErrorIs(t, tm.heartbeat(m), ErrNotConfirmed)
		after(4500 * time.Millisecond) // overdue by now
		require.ErrorIs(t, tm.heartbeat(m), ErrNotConfirmed)
		e.set(nil)
		after(time.Second)
		require.NoError(t, tm.heartbeat(m))
		tm.mu.Lock()
		assert.Empty(t, tm.sessions.expire(c.now()))
		tm.mu.Unlock()
		after(4 * time.Second)
		require.ErrorIs(t, tm.heartbeat(m), ErrStaleMember)
	})
}
