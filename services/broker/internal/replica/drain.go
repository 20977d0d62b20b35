package replica

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/partition"
)

const (
	// drainPace is how often a stopping broker looks whether everything is
	// uploaded, and whether another leads.
	drainPace = 10 * time.Millisecond
	// handOversAtOnce bounds how many partitions are without a leader at a time.
	handOversAtOnce = 16
	// catchUpPatience is how long a partition that takes no appends waits for its
	// next leader to have copied all of it.
	catchUpPatience = time.Second
	// electTimeout bounds one request for an election.
	electTimeout = 3 * time.Second
	// stopBound is what the end of the session may take.
	stopBound = 2 * time.Second
)

// drain is an event: from it on a partition takes no appends, or, when over is
// set, does so again. done is closed when it is in effect.
type drain struct {
	over bool
	done chan struct{}
}

// Drain is the first half of a stop. As long as ctx allows, each partition that
// is led here is handed to its best live replica: it takes no more appends, is
// waited for until all of it is in the bucket, so that nothing acked can be lost,
// and the other replica is elected. Then appends are refused everywhere with
// ErrStopped, what could not be handed over is waited for, and the session ends,
// so that others are elected at once for the rest.
func (m *Manager) Drain(ctx context.Context) error {
	m.stopping.Store(true)
	var g errgroup.Group
	g.SetLimit(handOversAtOnce)
	for _, p := range m.all() {
		g.Go(func() error {
			if err := p.handOver(ctx); err != nil {
				p.logger().WarnContext(ctx, "not handed over", "err", err)
			}
			return nil
		})
	}
	_ = g.Wait()
	m.draining.Store(true)
	ticker := time.NewTicker(drainPace)
	defer ticker.Stop()
	var err error
	for m.unuploaded.Load() > 0 && err == nil {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			err = fmt.Errorf("%d bytes are not in the bucket yet: %w", m.unuploaded.Load(), context.Cause(ctx))
		}
	}
	if _, ok := m.session.Current(); !ok {
		return err
	}
	// The session is ended even when the wait was in vain.
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopBound)
	defer cancel()
	return errors.Join(err, m.session.Stop(stopCtx))
}

// handOver gives the leadership of a partition to another replica, where there is
// one. An error leaves it here, taking no appends.
func (p *Partition) handOver(ctx context.Context) error {
	to, epoch := p.successor()
	if to == 0 || !p.live() {
		return nil // nobody to lead, or others are about to be elected anyway
	}
	began := time.Now()
	quiet := make(chan struct{})
	p.post(drain{done: quiet})
	select {
	case <-quiet:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	uploaded := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		s, _ := p.machine.State()
		v, _ := p.machine.View()
		return s != partition.Active || v.Fence.LeaderEpoch != epoch || v.ObjectEnd == p.machine.Log().End
	}
	if err := pollUntil(ctx, uploaded); err != nil {
		return fmt.Errorf("waiting for the upload: %w", err)
	}
	// A replica that lacks the last ranges would lead as well, but begin its log
	// again: it gets a moment to copy them.
	wait, cancel := context.WithTimeout(ctx, catchUpPatience)
	_ = pollUntil(wait, func() bool { return p.caughtUp() })
	cancel()
	client := metadatav1.NewClusterServiceClient(p.mgr.deps.Metadata.Controller())
	for attempt := 1; ; attempt++ {
		// A better one may have turned up, and the first may be gone.
		to, now := p.successor()
		if to == 0 || now != epoch {
			return nil // led elsewhere by now, or nobody is left
		}
		callCtx, cancel := context.WithTimeout(ctx, electTimeout)
		_, err := client.ElectLeader(callCtx, &metadatav1.ElectLeaderRequest{
			Topic: p.topic, Partition: p.partition, BrokerId: to, ExpectedLeaderEpoch: epoch,
		})
		cancel()
		if err == nil {
			break
		}
		if code := status.Code(err); code == codes.NotFound || code == codes.Aborted && answered(err) {
			return nil // deleted, or elected otherwise
		}
		if !p.live() || !pauseRetry(ctx, attempt) {
			return fmt.Errorf("electing broker %d: %w", to, err)
		}
	}
	// Whoever asks here is told the new leader from now on.
	err := pollUntil(ctx, func() bool { _, now := p.successor(); return now != epoch })
	p.logger().InfoContext(ctx, "handed over", "to", to, "leader_epoch", epoch, "dur", time.Since(began))
	return err
}

// live says whether the broker's session is confirmed.
func (p *Partition) live() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sessionLive()
}

// caughtUp says whether the replica that would lead next has said that it has
// everything; or that nobody leads here any more.
func (p *Partition) caughtUp() bool {
	to, _ := p.successor()
	p.mu.Lock()
	defer p.mu.Unlock()
	return to == 0 || p.followers[to].state == partition.Fetching && p.followers[to].end >= p.machine.Log().End
}

// pollUntil looks at a condition until it holds or ctx ends.
func pollUntil(ctx context.Context, cond func() bool) error {
	ticker := time.NewTicker(drainPace)
	defer ticker.Stop()
	for !cond() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// successor is the live replica that shall lead after this one, the most caught
// up first, 0 when there is none or this broker does not lead; and the epoch that
// this broker leads under, 0 likewise.
func (p *Partition) successor() (broker, epoch int32) {
	view := p.mgr.Cluster()
	p.mu.Lock()
	defer p.mu.Unlock()
	if s, _ := p.machine.State(); s != partition.Active || p.gone {
		return 0, 0
	}
	v, _ := p.machine.View()
	best := int64(-2)
	for _, id := range p.replicas(view) {
		b, ok := view.Broker(id)
		if !ok || !b.Online || id == p.mgr.cfg.BrokerID {
			continue
		}
		end := int64(-1)
		if f, ok := p.followers[id]; ok && f.epoch == b.Epoch && f.state == partition.Fetching {
			end = f.end
		}
		if end > best {
			broker, best = id, end
		}
	}
	return broker, v.Fence.LeaderEpoch
}

// replicas are the brokers that hold the partition, in order of preference.
func (p *Partition) replicas(view *cluster.View) []int32 {
	t, ok := view.TopicByCreation(p.key.CreationOffset)
	if !ok || int(p.partition) >= len(t.Partitions) {
		return nil
	}
	return slices.Clone(t.Partitions[p.partition].Replicas)
}
