package replica

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/partition"
)

// syncsAtOnce bounds the logs synced at the same time: more would hold up the
// disk's other users.
const syncsAtOnce = 4

// keepSynced syncs logs that were written to, over and over, until ctx ends. No
// append waits for it. It keeps the part small that a crash of the machine can
// tear, and tells damage in what lies below from a torn end.
func (m *Manager) keepSynced(ctx context.Context) error {
	if m.cfg.SyncInterval <= 0 {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	ticker := time.NewTicker(m.cfg.SyncInterval.Std())
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		var g errgroup.Group
		g.SetLimit(syncsAtOnce)
		for _, p := range m.all() {
			p.mu.Lock()
			log := p.log
			p.mu.Unlock()
			if log == nil || !log.Dirty() || ctx.Err() != nil {
				continue
			}
			g.Go(func() error {
				if err := log.Sync(); err != nil && !errors.Is(err, commitlog.ErrClosed) {
					p.post(partition.LogFailed{Err: err})
				}
				return nil
			})
		}
		_ = g.Wait() // failures are the partitions' own
	}
}

// salvage keeps what a damaged log has behind the damage, where the bucket holds
// good bytes of the damaged part. The machine begins anew with the log that is
// left. In the writer's role without mu.
func (p *Partition) salvage(log *commitlog.Log, e partition.Reconcile) bool {
	ctx := p.mgr.root
	d := log.Damage()
	if d == nil || e.ObjectEnd <= d.From {
		return false
	}
	end := d.To
	if err := log.Salvage(e.ObjectEnd, e.Hash, time.Now()); err != nil {
		p.logger().WarnContext(ctx, "what lies behind the damage of the log is not kept", "offset", e.ObjectEnd, "end", end, "err", err)
		return false
	}
	p.mu.Lock()
	p.hydrations++ // what was asked for until now knows the old log
	p.mu.Unlock()
	p.logger().WarnContext(ctx, "the log starts again behind its damage, at the object end, with what it holds above", "offset", e.ObjectEnd, "end", log.End())
	p.reportCut(ctx, log.Cut())
	p.first(loaded{log: log})
	return true
}

// reportCut tells of bytes that were cut out of the log.
func (p *Partition) reportCut(ctx context.Context, c *commitlog.Cut) {
	p.logger().ErrorContext(ctx, "damaged bytes were cut out of the log",
		"offset", c.From, "end", c.To, "bytes", c.Bytes, "kept", c.Kept, "files", strings.Join(c.Files, ","), "cause", c.Cause, "err", c.Err)
}

// notes adds findings that stop nothing, behind the others; the partition's mutex
// is held.
func (x *explainer) notes() {
	if state, _ := x.p.machine.State(); state == partition.Active {
		x.incomplete(x.p.missing)
	}
	if x.p.log == nil {
		return
	}
	c := x.p.log.Cut()
	if c == nil {
		return
	}
	evidence := []string{"from", str(c.From), "bytes", str(c.Bytes), "cause", c.Cause.Error(),
		"bytes_put_aside", str(c.Kept), "files", strings.Join(c.Files, ","), "file_count", strconv.Itoa(len(c.Files))}
	if c.To >= 0 {
		evidence = append(evidence, "to", str(c.To))
	}
	x.add(false, "LOCAL_LOG_WAS_CUT", "Damaged bytes were cut out of this broker's log since it started; what was not in the bucket is lost.", evidence...)
}
