package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

var (
	errLeaseLost    = errors.New("the controller's lease in etcd is lost")
	errLeaseUnknown = errors.New("etcd did not confirm the controller's lease for its whole time to live")
)

// lease is a lease in etcd that is kept alive and knows how long ago etcd last
// confirmed it. The moment that counts is when the confirmation was asked for.
type lease struct {
	client  clientv3.Lease
	id      clientv3.LeaseID
	ttl     time.Duration
	now     func() time.Duration
	log     *slog.Logger
	onError func(op string, err error)

	confirmed atomic.Int64 // time.Duration of now
	stop      context.CancelFunc
	done      chan struct{} // closed when nothing runs any more

	mu    sync.Mutex // guards cause
	cause error
	lost  chan struct{} // closed when the lease can't be relied on any more
}

// grantLease asks for a lease of about ttl (whole seconds, and no less than
// etcd's minimum) and keeps it alive until close.
func grantLease(ctx context.Context, client clientv3.Lease, ttl time.Duration, now func() time.Duration,
	log *slog.Logger, onError func(string, error),
) (*lease, error) {
	asked := now()
	bounded, cancel := context.WithTimeout(ctx, max(ttl, time.Second))
	defer cancel()
	resp, err := client.Grant(bounded, int64(math.Ceil(ttl.Seconds())))
	if err != nil {
		onError("lease grant", err)
		return nil, fmt.Errorf("grant a lease: %w", err)
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	l := &lease{
		client: client, id: resp.ID, ttl: time.Duration(resp.TTL) * time.Second, now: now, log: log, onError: onError,
		stop: stop, done: make(chan struct{}), lost: make(chan struct{}),
	}
	l.confirmed.Store(int64(asked))
	go l.keep(run)
	return l, nil
}

// freshFor is how long a confirmation lets heartbeats be answered.
func (l *lease) freshFor() time.Duration { return l.ttl / 3 }

// fresh says whether the lease was confirmed lately enough to act on it.
func (l *lease) fresh() bool {
	return !l.isLost() && l.now()-time.Duration(l.confirmed.Load()) <= l.freshFor()
}

func (l *lease) isLost() bool {
	select {
	case <-l.lost:
		return true
	default:
		return false
	}
}

// err is why the lease was lost.
func (l *lease) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

func (l *lease) lose(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == nil {
		l.cause = cause
		close(l.lost)
	}
}

// keep renews the lease several times within the span in which a confirmation
// counts, so that one lost answer does not stop the heartbeats.
func (l *lease) keep(ctx context.Context) {
	defer close(l.done)
	ticker := time.NewTicker(l.ttl / 9)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		asked := l.now()
		attempt, cancel := context.WithTimeout(ctx, l.ttl/3)
		resp, err := l.client.KeepAliveOnce(attempt, l.id)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, rpctypes.ErrLeaseNotFound) || err == nil && resp.TTL <= 0:
			l.lose(errLeaseLost)
			return
		case err == nil:
			l.confirmed.Store(int64(asked))
			continue
		}
		l.onError("lease keepalive", err)
		if l.now()-time.Duration(l.confirmed.Load()) >= l.ttl {
			l.lose(fmt.Errorf("%w: %w", errLeaseUnknown, err))
			return
		}
		l.log.WarnContext(ctx, "etcd did not confirm the lease", "err", err)
	}
}

// close ends the renewals and revokes the lease, which deletes its keys: others
// need not wait for it to expire. When etcd does not answer within ctx it
// expires by itself.
func (l *lease) close(ctx context.Context) {
	l.stop()
	<-l.done
	if errors.Is(l.err(), errLeaseLost) {
		return
	}
	if _, err := l.client.Revoke(ctx, l.id); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		l.onError("lease revoke", err)
		l.log.WarnContext(ctx, "could not revoke the lease, it will expire", "err", err)
	}
}
