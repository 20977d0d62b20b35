package replica

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/backoff"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/partition"
)

// The controller wishes, with every heartbeat, that partitions go back to the
// brokers that stand first in their replica lists. The leader fulfils a wish when
// it costs little and loses nothing: the other one holds nearly everything, for a
// moment no appends are taken, and only when all of them are in the bucket and on
// the other's disk is it elected. Else appends go on as if nothing had been.

const (
	// wishesAtOnce bounds how many wishes are being fulfilled at a time.
	wishesAtOnce = 4
	// closeRecords is how many committed records the next leader may lack when it
	// is begun; one that lacked none of those known to it freshReport ago is as
	// good, so that a busy partition can move too.
	closeRecords = 10_000
	freshReport  = time.Second
	// passPatience bounds how long a partition takes no appends before the election.
	passPatience = 2 * time.Second
	// fencePatience is how long somebody else's election, of which the controller
	// told, is waited for.
	fencePatience = 10 * time.Second
)

// passPolicy is between attempts in vain: each has held appends up.
var passPolicy = backoff.Policy{Initial: 10 * time.Second, Max: 5 * time.Minute, Multiplier: 2, Jitter: 0.5}

// pass is an event: while on, appends wait for another leader. done, when not
// nil, is closed when it is in effect.
type pass struct {
	on   bool
	done chan struct{}
}

// errWishVoid says that a wish need not be fulfilled any more.
var errWishVoid = errors.New("there is nothing to hand over any more, or nobody to take it")

// wished takes what the controller wishes. It does not block; what is too much at
// once is left for a repeat.
func (m *Manager) wished(list []*metadatav1.Handover) {
	parts := m.index.Load()
	if parts == nil {
		return
	}
	for _, h := range list {
		if m.stopping.Load() {
			return
		}
		p := (*parts)[cluster.Key{CreationOffset: h.GetPartition().GetTopicCreationOffset(), Partition: h.GetPartition().GetPartition()}]
		if p == nil || p.topicID != h.GetPartition().GetTopicId() {
			continue
		}
		select {
		case m.wishes <- struct{}{}:
		default:
			return
		}
		if !p.heed(h.GetBrokerId(), h.GetLeaderEpoch()) {
			<-m.wishes
		}
	}
}

// heed begins to fulfil a wish if it is sensible; the one who does gives the place
// in Manager.wishes back.
func (p *Partition) heed(to, epoch int32) bool {
	p.mu.Lock()
	ctx := p.tasks
	v, _ := p.machine.View()
	f := p.followers[to]
	ok := !p.wish && !p.passing && !p.drained && time.Now().After(p.passAfter) && p.mayPass(to, epoch) &&
		(f.end >= v.ObjectEnd-closeRecords || f.end >= f.objectEnd && time.Since(f.at) < freshReport)
	if ok {
		p.wish = true
	}
	p.mu.Unlock()
	if !ok {
		return false
	}
	return p.mgr.spawn(func() { // refused only when the manager ends
		p.fulfil(ctx, to, epoch)
		p.mu.Lock()
		p.wish = false
		p.mu.Unlock()
		<-p.mgr.wishes
	})
}

// fulfil hands the leadership over, or says why not.
func (p *Partition) fulfil(ctx context.Context, to, epoch int32) {
	began := time.Now()
	err := p.passTo(ctx, to, epoch)
	lg := p.logger().With("to", to, "leader_epoch", epoch, "dur", time.Since(began))
	switch {
	case err == nil:
		lg.InfoContext(ctx, "handed over to the preferred replica")
	case ctx.Err() != nil || errors.Is(err, errWishVoid):
		lg.DebugContext(ctx, "a wish came to nothing", "err", err)
	default:
		p.mu.Lock()
		p.passFailures++
		wait := passPolicy.Delay(p.passFailures, rand.Float64())
		p.passAfter = time.Now().Add(wait)
		p.mu.Unlock()
		lg.WarnContext(ctx, "not handed over to the preferred replica, appends go on", "retry_in", wait, "err", err)
	}
}

// passTo hands the leadership of an epoch to another replica; ctx ends with the
// epoch. Unless it returns nil appends are taken again.
func (p *Partition) passTo(ctx context.Context, to, epoch int32) (err error) {
	quiet := make(chan struct{})
	p.post(pass{on: true, done: quiet})
	defer func() {
		if err != nil {
			p.post(pass{})
		}
	}()
	wait, cancel := context.WithTimeoutCause(ctx, passPatience, fmt.Errorf("not everything was uploaded and copied within %v", passPatience))
	defer cancel()
	select {
	case <-quiet:
	case <-wait.Done():
		return context.Cause(wait)
	}
	void := false
	err = pollUntil(wait, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		if void = !p.mayPass(to, epoch); void {
			return true
		}
		v, _ := p.machine.View()
		end := p.machine.Log().End
		return v.ObjectEnd == end && p.followers[to].end >= end
	})
	switch {
	case err != nil:
		return err
	case void:
		return errWishVoid
	}
	return p.elect(ctx, to, epoch)
}

// elect has another broker elected, nil when there was an election. Without an
// answer it asks again, for what was decided can't be guessed; but not for long.
func (p *Partition) elect(parent context.Context, to, epoch int32) error {
	ctx, cancel := context.WithTimeout(parent, electTimeout)
	defer cancel()
	client := metadatav1.NewClusterServiceClient(p.mgr.deps.Metadata.Controller())
	for attempt := 1; ; attempt++ {
		_, err := client.ElectLeader(ctx, &metadatav1.ElectLeaderRequest{
			Topic: p.topicID, Partition: p.partition, BrokerId: to, ExpectedLeaderEpoch: epoch,
		})
		_, now := p.successor()
		switch {
		case err == nil, now != epoch:
			return nil
		case status.Code(err) == codes.Aborted && answered(err):
			// Elected otherwise, perhaps by a request whose answer was lost: appends
			// taken now would be lost with this leadership.
			p.mgr.refresh(p)
			wait, stop := context.WithTimeout(parent, fencePatience)
			defer stop()
			return pollUntil(wait, func() bool { _, now := p.successor(); return now != epoch })
		case answered(err) || !pauseRetry(ctx, attempt):
			p.mgr.refresh(p)
			return fmt.Errorf("electing broker %d: %w", to, err)
		}
	}
}

// mayPass says whether this broker leads in an epoch, and another replica lives
// and follows; mu is held.
func (p *Partition) mayPass(to, epoch int32) bool {
	if s, _ := p.machine.State(); s != partition.Active || p.gone || to == p.mgr.cfg.BrokerID || !p.sessionLive() {
		return false
	}
	view := p.mgr.Cluster()
	b, ok := view.Broker(to)
	f := p.followers[to]
	v, _ := p.machine.View()
	return ok && b.Online && f.epoch == b.Epoch && f.state == partition.Fetching &&
		v.Fence.LeaderEpoch == epoch && holds(p.replicas(view), to)
}
