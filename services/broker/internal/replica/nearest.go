package replica

import (
	"context"
	"errors"
	"time"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/partition"
)

// Nearest reads a partition from the replica at hand, whoever leads. It serves
// what this replica knows to be committed at the present fence, and nothing while
// it is not reconciled there (design review H8): then it waits. What it has served
// stays committed, whatever comes.
//
// A Nearest belongs to one reader and is not safe for concurrent use.
type Nearest struct {
	p    *Partition
	seen int64 // highest limit met
}

// Nearest reads from this replica; ok is false when it serves nothing at the
// moment.
func (p *Partition) Nearest() (n *Nearest, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok = p.machine.Serves()
	if !ok || p.gone {
		return nil, false
	}
	return &Nearest{p: p}, true
}

// nearestWait is how long a read waits for its replica to be reconciled.
const nearestWait = 3 * time.Second

// serving says from where this replica may serve, [Partition.readable] for
// whoever does not lead.
func (n *Nearest) serving() (readable, bool, error) {
	p := n.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return readable{}, false, p.goneErr()
	}
	if p.closed {
		return readable{}, false, ErrStopped
	}
	limit, ok := p.machine.Serves()
	if !ok {
		return readable{}, false, nil
	}
	v, _ := p.machine.View() // of a leader: what it has found to be its own
	limit = min(limit, v.ObjectEnd)
	n.seen = max(n.seen, limit)
	return readable{log: p.log, view: v, logEnd: limit, highMark: limit, follows: true}, true, nil
}

// ready waits, bounded, until this replica serves.
func (n *Nearest) ready(ctx context.Context) (readable, error) {
	wait, cancel := context.WithTimeout(ctx, nearestWait)
	defer cancel()
	for {
		woken := n.p.stepped.next()
		r, ok, err := n.serving()
		if ok || err != nil {
			return r, err
		}
		select {
		case <-woken:
		case <-wait.Done():
			if ctx.Err() != nil {
				return readable{}, context.Cause(ctx)
			}
			return readable{}, &UnavailableError{Reason: NotReady, Message: "this replica is not reconciled with the partition's present leader", Retry: 200 * time.Millisecond}
		}
	}
}

// TopicID is the topic's id.
func (n *Nearest) TopicID() string { return n.p.topicID }

// Offsets tells where the partition stands; the high watermark is the end of what
// this replica serves.
func (n *Nearest) Offsets() Offsets {
	_, _, _ = n.serving() // notes the limit
	o := n.p.Offsets()
	o.HighWatermark = max(n.seen, o.LogStart)
	return o
}

// CheckPosition is [Partition.CheckPosition]; what only a leader can say for sure
// is a NotLeaderError.
func (n *Nearest) CheckPosition(offset int64, last lineage.Leadership) error {
	err := n.p.CheckPosition(offset, last)
	var cut *TruncatedError
	if errors.As(err, &cut) {
		n.p.mu.Lock()
		defer n.p.mu.Unlock()
		if s, _ := n.p.machine.State(); s != partition.Active {
			return n.p.notLeader()
		}
	}
	return err
}

// Read is [Partition.Read] below what this replica serves, for which it waits a
// little after an election. An offset above that is an UnavailableError.
func (n *Nearest) Read(ctx context.Context, from int64, maxBytes int, dst []byte) (Fetched, error) {
	r, err := n.ready(ctx)
	if err != nil {
		return Fetched{}, err
	}
	return n.p.read(ctx, r, from, maxBytes, dst)
}

// OffsetForTime is [Partition.OffsetForTime] of what this replica serves.
func (n *Nearest) OffsetForTime(ctx context.Context, ms int64) (offset, timestamp int64, found bool, err error) {
	r, err := n.ready(ctx)
	if err != nil {
		return 0, 0, false, err
	}
	return n.p.offsetForTime(ctx, r, n.Read, ms)
}

// WaitVisible waits until this replica serves the record at offset.
func (n *Nearest) WaitVisible(ctx context.Context, offset int64) error {
	p := n.p
	p.mu.Lock()
	if p.waiting >= p.mgr.cfg.MaxWaiting {
		p.mu.Unlock()
		return &TooManyRequestsError{Limit: p.mgr.cfg.MaxWaiting}
	}
	p.waiting++
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.waiting--
		p.mu.Unlock()
	}()
	for {
		woken := p.stepped.next()
		r, ok, err := n.serving()
		if err != nil {
			return err
		}
		if ok && offset < r.highMark {
			return nil
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return &UnavailableError{Reason: NotReady, Message: "this replica does not serve the offset yet", Retry: 100 * time.Millisecond, Err: context.Cause(ctx)}
		}
	}
}
