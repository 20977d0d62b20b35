package metalog

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Follow delivers what comes after the tail, in order and without a gap, each
// entry once, the entries of one transaction in one call. It returns the error
// of ctx, of fn, one that is [Fatal], or a [*TrimmedError] when what it has not
// delivered yet was trimmed; everything else it repairs: a lost
// connection, a compaction below the watch, a member without a leader, a watch
// that left something out.
//
// fn must not keep the slice.
func (l *Log) Follow(ctx context.Context, from Tail, fn func([]*metadatav1.Entry) error) error {
	f := &follower{log: l, tail: from, fn: fn}
	wait := 10 * time.Millisecond
	for {
		before := f.tail
		err := f.watch(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case f.failed != nil:
			return f.failed
		case Fatal(err), errors.As(err, new(*TrimmedError)):
			return err
		}
		if f.tail != before {
			wait = 10 * time.Millisecond
		}
		l.opts.OnError("watch", err)
		l.log.WarnContext(ctx, "metadata watch ended, opening it again", "offset", f.tail.End, "revision", f.tail.Revision, "err", err)
		if !sleep(ctx, wait) {
			return context.Cause(ctx)
		}
		wait = min(2*wait, time.Second)
	}
}

// follower is the state of one Follow; one goroutine at a time touches it.
type follower struct {
	log    *Log
	tail   Tail // delivered up to here
	fn     func([]*metadatav1.Entry) error
	failed error // fn's error
	// incarnation of the entries delivered; 0 before the first.
	incarnation uint32
}

// probed is the answer to a probe.
type probed struct {
	tail Tail
	err  error
}

var errStuck = errors.New("the watch does not deliver what the log holds")

// watch opens one watch and delivers from it until it ends.
func (f *follower) watch(ctx context.Context) error {
	l := f.log
	wctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	ch := l.watcher.Watch(wctx, l.entryPrefix(), clientv3.WithPrefix(), clientv3.WithRev(f.tail.Revision+1),
		clientv3.WithProgressNotify(), clientv3.WithFragment(), clientv3.WithFilterDelete())

	ticker := time.NewTicker(l.opts.ProbeInterval)
	defer ticker.Stop()
	// The probe asks in a goroutine of its own, so that a dead etcd doesn't keep
	// entries waiting that have arrived. At most one is out.
	answers := make(chan probed, 1)
	asking := false
	var floor int64 = -1 // the end that an earlier probe saw

	for {
		select {
		case resp, ok := <-ch:
			if !ok {
				return errors.New("the watch was closed")
			}
			if err := l.checkCluster(resp.Header); err != nil {
				return err
			}
			if resp.CompactRevision != 0 {
				return f.reload(ctx, fmt.Sprintf("the log was compacted up to revision %d", resp.CompactRevision))
			}
			if err := resp.Err(); err != nil {
				return err
			}
			if err := f.deliver(ctx, resp.Events); err != nil {
				return err
			}
		case <-ticker.C:
			if !asking {
				asking = true
				go func() {
					tail, err := l.Tail(wctx)
					answers <- probed{tail, err}
				}()
			}
		case p := <-answers:
			asking = false
			switch {
			case Fatal(p.err):
				return p.err
			case p.err != nil:
				// The watch itself finds out; what was delivered stays good.
			case p.tail.End < f.tail.End:
				// Delivered entries were read from the log, maybe after the
				// probe was answered: look again.
				tail, err := l.Tail(ctx)
				if err == nil && tail.End < f.tail.End {
					return fmt.Errorf("%w: it ends at %d, read up to %d", ErrRolledBack, tail.End, f.tail.End)
				}
			case floor > f.tail.End:
				// A whole probe interval ago there was more than we have now.
				return errors.Join(errStuck, f.reload(ctx, errStuck.Error()))
			}
			if p.err == nil {
				floor = p.tail.End
			}
		}
	}
}

// deliver hands out the events of a response, which may cover many revisions,
// one revision at a time.
func (f *follower) deliver(ctx context.Context, events []*clientv3.Event) error {
	for len(events) > 0 {
		revision, n := events[0].Kv.ModRevision, 1
		for n < len(events) && events[n].Kv.ModRevision == revision {
			n++
		}
		group, err := f.group(events[:n])
		switch {
		case errors.Is(err, errStuck):
			return f.reload(ctx, err.Error())
		case err != nil:
			return err
		}
		if err := f.hand(group); err != nil {
			return err
		}
		f.tail.Revision = revision
		events = events[n:]
	}
	return nil
}

// group decodes the entries of one revision that were not delivered yet. Within
// a revision etcd orders by key, that is by offset.
func (f *follower) group(events []*clientv3.Event) ([]*metadatav1.Entry, error) {
	var group []*metadatav1.Entry
	next := f.tail.End
	for _, ev := range events {
		if ev.Type != mvccpb.Event_PUT {
			continue
		}
		e, err := f.log.decode(ev.Kv)
		switch {
		case err != nil:
			return nil, err
		case e.GetOffset() < next:
			continue
		case e.GetOffset() > next:
			return nil, fmt.Errorf("%w: entry %d came before %d", errStuck, e.GetOffset(), next)
		}
		group = append(group, e)
		next++
	}
	return group, nil
}

func (f *follower) hand(group []*metadatav1.Entry) error {
	for _, e := range group {
		if f.incarnation == 0 {
			f.incarnation = e.GetIncarnation()
		}
		if e.GetIncarnation() != f.incarnation {
			return fmt.Errorf("%w: entry %d has %d instead of %d", ErrForeign, e.GetOffset(), e.GetIncarnation(), f.incarnation)
		}
	}
	if len(group) == 0 {
		return nil
	}
	if err := f.fn(group); err != nil {
		f.failed = err
		return err
	}
	f.tail.End += int64(len(group))
	return nil
}

// reload reads from the log itself what the watch can't give any more. The
// watch is opened again after it.
func (f *follower) reload(ctx context.Context, why string) error {
	f.log.log.WarnContext(ctx, "reading the metadata log again", "offset", f.tail.End, "reason", why)
	tail, err := f.log.load(ctx, f.tail.End, f.hand)
	if err != nil {
		return err
	}
	f.tail = tail
	return errors.New(why)
}
