package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/braidlog/braid/services/metadata/internal/metalog"
)

// campaign waits until the lease holds the election under prefix and returns
// the guard of that leadership. The keys are laid out as those of etcd's
// concurrency.Election, of which it takes part: "<prefix>/<lease in hex>", the
// oldest key leads. Unlike that one it never outlives ctx and it notices the
// loss of its own key while waiting.
func campaign(ctx context.Context, client *clientv3.Client, prefix string, l *lease, value string) (metalog.Guard, error) {
	key := fmt.Sprintf("%s/%x", prefix, l.id)
	put, err := bounded(ctx, l, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return client.Txn(ctx).
			If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, value, clientv3.WithLease(l.id))).
			Else(clientv3.OpGet(key)).Commit()
	})
	if err != nil {
		return metalog.Guard{}, fmt.Errorf("campaign: %w", err)
	}
	guard := metalog.Guard{Key: key, CreateRevision: put.Header.Revision}
	if !put.Succeeded { // an earlier attempt of ours whose answer was lost
		guard.CreateRevision = put.Responses[0].GetResponseRange().Kvs[0].CreateRevision
	}
	for {
		state, err := bounded(ctx, l, func(ctx context.Context) (*clientv3.TxnResponse, error) {
			return client.Txn(ctx).
				If(clientv3.Compare(clientv3.CreateRevision(key), "=", guard.CreateRevision)).
				Then(clientv3.OpGet(prefix+"/", append(clientv3.WithLastCreate(), clientv3.WithMaxCreateRev(guard.CreateRevision-1))...)).
				Commit()
		})
		switch {
		case err != nil:
			return metalog.Guard{}, fmt.Errorf("campaign: %w", err)
		case !state.Succeeded:
			return metalog.Guard{}, fmt.Errorf("campaign: %w", errLeaseLost)
		}
		before := state.Responses[0].GetResponseRange().Kvs
		if len(before) == 0 {
			return guard, nil
		}
		if err := waitGone(ctx, client, string(before[0].Key), state.Header.Revision+1, l); err != nil {
			return metalog.Guard{}, err
		}
	}
}

// bounded makes one request that may take no longer than the lease lives.
func bounded[T any](ctx context.Context, l *lease, request func(context.Context) (T, error)) (T, error) {
	attempt, cancel := context.WithTimeout(ctx, l.ttl)
	defer cancel()
	return request(attempt)
}

// waitGone waits for the deletion of the key of the candidate before us, or for
// anything that makes it worth looking again.
func waitGone(ctx context.Context, client clientv3.Watcher, key string, revision int64, l *lease) error {
	wctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	ch := client.Watch(wctx, key, clientv3.WithRev(revision), clientv3.WithFilterPut())
	// Watches have been known to be silent without an error; a look at the key
	// now and then costs nothing.
	look := time.NewTimer(2 * l.ttl)
	defer look.Stop()
	for {
		select {
		case resp, ok := <-ch:
			if !ok || resp.Err() != nil || len(resp.Events) > 0 {
				// The caller asks etcd what is true now. A pause keeps a failing
				// watch from spinning.
				if (!ok || resp.Err() != nil) && !pause(ctx, l, 100*time.Millisecond) {
					return errors.Join(context.Cause(ctx), l.err())
				}
				return nil
			}
		case <-look.C:
			return nil
		case <-l.lost:
			return l.err()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pause waits for d; false if the lease or ctx ended first.
func pause(ctx context.Context, l *lease, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-l.lost:
		return false
	case <-ctx.Done():
		return false
	}
}

// resign gives up the leadership, if it is still this one, so that the next
// candidate need not wait for the lease.
func resign(ctx context.Context, client clientv3.KV, g metalog.Guard) error {
	_, err := client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(g.Key), "=", g.CreateRevision)).
		Then(clientv3.OpDelete(g.Key)).Commit()
	if err != nil {
		return fmt.Errorf("resign: %w", err)
	}
	return nil
}
