package replica

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// A replica that is elected while it lacks the last committed ranges may begin
// its log again at the object end, and read what is older from the bucket. That
// is always right, and a pity for a copy that is nearly whole: where little is
// missing it is fetched first, if that goes quickly.

const (
	// fillBytes is how much may be missing, and fillPatience how long an election
	// waits for it.
	fillBytes    = 8 << 20
	fillPatience = time.Second
)

// filled brings what a log lacks below the object end, as an event.
type filled struct {
	order partition.Reconcile
	known int   // Partition.hydrations when it was given
	from  int64 // where the log leaves the partition's branch
	parts []filling
	err   error
}

type filling struct {
	rg   remote.Located
	data []byte
}

// lacking lists the committed ranges that a log lacks below the object end, and
// where it leaves the partition's branch; ok is false when the log had better
// begin again.
func (p *Partition) lacking(log *commitlog.Log, e partition.Reconcile) (from int64, out []remote.Located, ok bool) {
	from = lineage.CommonPrefix(log.Lineage(), log.End(), e.Lineage, math.MaxInt64)
	if from <= log.Start() || from >= e.ObjectEnd || log.Damage() != nil {
		return 0, nil, false
	}
	size := int64(0)
	for at := from; at < e.ObjectEnd; {
		rg, ok := p.ranges.At(at)
		if !ok || rg.End > e.ObjectEnd {
			return 0, nil, false
		}
		if size += rg.Length; size > fillBytes {
			return 0, nil, false
		}
		out = append(out, rg)
		at = rg.End
	}
	return from, out, true
}

// fill fetches what is missing, beside the writer, and has it answer e.
func (p *Partition) fill(ctx context.Context, e partition.Reconcile, known int, from int64, ranges []remote.Located) {
	ctx, cancel := context.WithTimeout(ctx, fillPatience)
	defer cancel()
	ev := filled{order: e, known: known, from: from}
	for _, rg := range ranges {
		data, err := p.mgr.remote.Copy(ctx, rg, e.Lineage, nil)
		if err != nil {
			ev.err = err
			break
		}
		ev.parts = append(ev.parts, filling{rg: rg, data: data})
	}
	p.post(ev)
}

// filled completes the log and goes on with the order; in the writer's role with
// mu held.
func (p *Partition) filled(e filled) {
	if p.log == nil || e.known != p.hydrations || !p.machine.Current(e.order.Attempt) {
		return
	}
	log := p.log
	p.mu.Unlock()
	defer p.mu.Lock()
	err := e.err
	if err == nil {
		err = p.complete(log, e)
	}
	if err != nil {
		p.logger().Info("the log lacks committed records and begins again at the object end", "offset", e.order.ObjectEnd, "err", err)
		p.arranged(log, e.order, p.arrange(log, e.order))
		return
	}
	p.arranged(log, e.order, nil)
}

func (p *Partition) complete(log *commitlog.Log, e filled) error {
	if err := log.TruncateTo(e.from); err != nil {
		return err
	}
	if p.own != nil && p.own.End() > e.from {
		p.own = nil
	}
	for _, part := range e.parts {
		if err := p.extend(log, e.order.Lineage, log.End(), &part.rg, part.data); err != nil {
			return err
		}
	}
	if log.End() != e.order.ObjectEnd {
		return fmt.Errorf("the log ends at %d", log.End())
	}
	p.logger().Info("the log was completed before it leads", "offset", e.from, "end", log.End())
	return nil
}
