package replica

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// A replica that does not lead copies the committed ranges from the bucket, one
// at a time, checks them against its own chain hash, and appends them. The log is
// changed in the writer's role only, between one event of the machine and the
// next, so that an order to cut it can't be out of date when it is carried out.

// Events of a follower beside those of the machine.
type (
	// copied answers a copyJob.
	copied struct {
		job  *copyJob
		data []byte
		err  error
	}
	// retryCopy ends the pause after a failure.
	retryCopy struct{}
)

// copyPolicy is between attempts at a range that can't be had now: neither an
// outage nor an object that is gone ever changes the log (design review F17).
var copyPolicy = backoff.Policy{Initial: 100 * time.Millisecond, Max: 5 * time.Second, Multiplier: 2, Jitter: 0.5}

var (
	// errNotListed says that a committed offset is in no range that is known.
	errNotListed = errors.New("the range that holds the next offset is not known here yet")
	// errDiverged says that this log does not hold what was committed below its
	// end.
	errDiverged = errors.New("the log holds other bytes than were committed")
)

// first puts an event before all others: it tells of a change of the log, which
// the machine has to know before it decides anything else.
func (p *Partition) first(ev any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events.putFirst(ev)
}

// openLog has the log opened, which answers with loaded; mu is held.
func (p *Partition) openLog() {
	if p.loading || p.closed || p.gone {
		return
	}
	p.loading = true
	// Not bound to the fence: the log is wanted whatever comes next.
	if !p.mgr.spawn(p.load) {
		p.logger().Debug("log not opened, the broker is stopping")
	}
}

// truncate brings a follower's log to the common branch; in the writer's role
// without mu.
func (p *Partition) truncate(e partition.Truncate) {
	p.mu.Lock()
	log, current := p.log, p.machine.Current(e.Attempt)
	v, _ := p.machine.View()
	switch {
	case !current:
		p.mu.Unlock()
		return
	case log == nil && v.ObjectEnd == 0:
		// Nothing is committed that could be copied or served: the log is opened
		// when there is.
		p.events.putFirst(partition.Cut{Attempt: e.Attempt})
		p.mu.Unlock()
		return
	case log == nil:
		p.openLog()
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	before, known := log.End(), log.Cut()
	err := p.cut(log, v, e)
	if cut := log.Cut(); cut != known {
		p.reportCut(p.mgr.root, cut)
	}
	if err != nil {
		p.first(partition.LogFailed{Err: err})
		return
	}
	if p.own != nil && p.own.End() > log.End() {
		p.own = nil
	}
	if log.End() != before {
		p.logger().Info("the log was cut to the partition's branch", "leader_epoch", v.Fence.LeaderEpoch, "offset", log.End(), "end", before)
	}
	p.first(partition.Cut{
		Attempt: e.Attempt, Log: partition.LogFacts{Start: log.Start(), End: log.End(), Lineage: log.Lineage()},
	})
}

// cut truncates or resets. A log that can't be cut, or that holds other bytes
// than the partition at the last committed border below its end, begins again at
// the object end.
func (p *Partition) cut(log *commitlog.Log, v partition.View, e partition.Truncate) error {
	if e.Reset {
		return log.Reset(e.At, e.Hash, e.Lineage)
	}
	at := min(e.At, log.End())
	err := log.TruncateTo(at)
	var inside *commitlog.NotBorderError
	if errors.As(err, &inside) {
		err = log.TruncateTo(inside.Below)
	}
	if unusable(err) {
		return err
	}
	if err == nil {
		if err = p.onBranch(log, v.ObjectEnd); err == nil {
			return nil
		}
	}
	p.logger().Error("the log is not a part of the partition, it starts again at the object end", "offset", v.ObjectEnd, "err", err)
	return log.Reset(v.ObjectEnd, v.ObjectHash, v.Lineage.DropAt(v.ObjectEnd))
}

// unusable says that a log takes no writes any more.
func unusable(err error) bool {
	var failed *commitlog.FailedError
	return errors.As(err, &failed) || errors.Is(err, commitlog.ErrClosed)
}

// onBranch compares the log with the committed chain hash at the last border
// that both have, at or below the object end.
func (p *Partition) onBranch(log *commitlog.Log, objectEnd int64) error {
	at, want, ok := p.ranges.Border(min(log.End(), objectEnd))
	if !ok || at < log.Start() {
		return nil
	}
	got, err := log.ChainAt(at)
	if err != nil {
		return fmt.Errorf("chain hash at %d: %w", at, err)
	}
	if got != want {
		return fmt.Errorf("%w: chain hash at %d is %v, committed was %v", errDiverged, at, got, want)
	}
	return nil
}

// fetch looks whether there is something to copy; in the writer's role without
// mu.
func (p *Partition) fetch(e partition.Fetch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, _ := p.machine.View()
	if _, _, _, ok := p.machine.Wanted(); !ok {
		p.copyFailures, p.copyErr = 0, nil // what could not be had is not wanted any more
	}
	if state, _ := p.machine.State(); state == partition.Fetching && p.log != nil && p.log.End() >= v.ObjectEnd {
		// Nothing to copy, and no copy would tell that these are other bytes.
		log := p.log
		p.mu.Unlock()
		err := p.onBranch(log, v.ObjectEnd)
		p.mu.Lock()
		if err != nil {
			p.logger().Error("the log is not a part of the partition, it starts again at the object end", "offset", v.ObjectEnd, "err", err)
			p.events.putFirst(partition.Diverged(e))
		}
		return
	}
	p.want()
}

// want asks for the next range that this replica lacks, unless it was asked for;
// in the writer's role with mu held.
func (p *Partition) want() {
	if p.copying || p.copyTimer != nil || p.closed || p.gone {
		return
	}
	from, _, attempt, ok := p.machine.Wanted()
	if !ok {
		return
	}
	if p.log == nil {
		p.openLog()
		return
	}
	rg, ok := p.ranges.At(from)
	if !ok {
		p.copyFailed(errNotListed)
		return
	}
	v, _ := p.machine.View()
	p.copying = true
	p.mgr.copier.add(&copyJob{p: p, attempt: attempt, known: p.hydrations, rg: rg, lineage: v.Lineage, ctx: p.tasks})
}

// copyFailed pauses before the next attempt; mu is held.
func (p *Partition) copyFailed(err error) {
	p.copyFailures++
	p.copyErr = err
	p.mgr.metrics.copyFailed(err)
	if p.copyFailures == 1 || p.copyFailures%16 == 0 {
		p.logger().Warn("a committed range can't be copied, trying again", "offset", p.machine.Log().End, "attempt", p.copyFailures, "err", err)
	}
	if errors.Is(err, remote.ErrNotFound) || errors.Is(err, errNotListed) {
		// Every place is advisory: the metadata may name another by now.
		p.mgr.refresh(p)
	}
	p.copyTimer = time.AfterFunc(copyPolicy.Delay(p.copyFailures, rand.Float64()), func() { p.post(retryCopy{}) })
}

// took handles the answer to a copyJob; in the writer's role with mu held.
func (p *Partition) took(e copied) {
	p.copying = false
	if e.err != nil {
		if e.job.ctx.Err() == nil {
			p.copyFailed(e.err)
			return
		}
		p.want() // the job was given up with its fence; there may be another
		return
	}
	p.apply(e)
	p.mgr.copier.release(e.job.rg.Length, e.data)
	p.want()
}

// apply appends a copied range, as far as the log lacks it.
func (p *Partition) apply(e copied) {
	from, _, attempt, ok := p.machine.Wanted()
	log := p.log
	if !ok || attempt != e.job.attempt || p.hydrations != e.job.known || log == nil || from < e.job.rg.Base || from >= e.job.rg.End {
		return // its time is over
	}
	v, _ := p.machine.View()
	p.mu.Unlock()
	err := p.extend(log, v.Lineage, from, &e.job.rg, e.data)
	p.mu.Lock()
	switch {
	case errors.Is(err, errDiverged):
		p.logger().Error("this replica's log begins again at the object end", "offset", v.ObjectEnd, "err", err)
		p.step(partition.Diverged{Attempt: attempt}, false)
		return
	case unusable(err):
		p.step(partition.LogFailed{Err: err}, false)
		return
	case err != nil:
		p.copyFailed(err)
		return
	}
	if !p.machine.Replicated(attempt, log.End(), log.Lineage()) {
		panic("replica: the machine moved on while its writer appended")
	}
	p.copyFailures, p.copyErr = 0, nil
	p.stepped.tell()
	if log.End() >= v.ObjectEnd {
		select {
		case p.mgr.caughtUp <- struct{}{}:
		default:
		}
	}
}

// extend checks a range against the log's own chain hash and appends what is
// above its end, which is at from.
func (p *Partition) extend(log *commitlog.Log, branch lineage.Lineage, from int64, rg *remote.Located, data []byte) error {
	end, chain := log.Tail()
	if end != from {
		return fmt.Errorf("the log ends at %d, not at %d", end, from)
	}
	rest, hash := data, rg.BaseHash
	for at := rg.Base; at < from; {
		b := record.Batch(rest)
		b = b[:b.Length()] // checked when it was read
		if at = b.EndOffset(); at > from {
			return fmt.Errorf("%w: it ends at %d, inside of batch [%d, %d)", errDiverged, from, b.BaseOffset(), at)
		}
		hash = chainhash.Next(hash, b)
		rest = rest[len(b):]
	}
	if rg.BaseKnown && hash != chain {
		return fmt.Errorf("%w: chain hash at %d is %v, committed was %v", errDiverged, from, chain, hash)
	}
	if err := log.SetLineage(branch.DropAt(rg.End)); err != nil {
		if errors.Is(err, commitlog.ErrLineage) {
			return fmt.Errorf("%w: %w", errDiverged, err)
		}
		return err
	}
	out, err := log.Append(rest, commitlog.Position{Offset: from, Chain: chain, CheckChain: true}, time.Now())
	if err != nil {
		return err
	}
	if out.End != rg.End || out.Chain != rg.EndHash {
		// Only where the hash at the range's base was not known. Not told to the
		// machine, these bytes are served to nobody.
		return fmt.Errorf("%w: chain hash at %d is %v, committed was %v", errDiverged, out.End, out.Chain, rg.EndHash)
	}
	p.learn(log, rest, from, out.End)
	return nil
}

// snapshotBytes is how much a follower appends between two snapshots of the
// producer state, and cheapBytes how much it reads at once to have it again after
// a start.
const (
	snapshotBytes = 32 << 20
	cheapBytes    = 4 << 20
)

// learn keeps the producer state of a follower's log, so that it may lead without
// reading a footer when none can be read. Expiries are not in the records: a producer that the leader
// forgot is remembered here until this broker leads. In the writer's role.
func (p *Partition) learn(log *commitlog.Log, data []byte, base, end int64) {
	if p.own == nil {
		p.seed(log, base)
	}
	p.ownBytes += int64(len(data))
	if p.own == nil {
		return
	}
	if err := p.learnBatches(log, data, base); err != nil {
		p.logger().Warn("the producer state of the copy is given up", "offset", base, "err", err)
		p.own = nil
		return
	}
	p.own.AdvanceTo(end)
	if p.own.Len() > p.mgr.cfg.MaxProducers {
		p.own = nil // footers know which of them were forgotten
		return
	}
	if p.ownBytes < snapshotBytes {
		return
	}
	p.ownBytes = 0
	snap := p.own.Snapshot()
	if err := log.SaveSnapshot(snap.End, snap.Append(nil)); err != nil {
		p.logger().Warn("the producer snapshot can't be stored", "offset", snap.End, "err", err)
	}
}

func (p *Partition) learnBatches(log *commitlog.Log, data []byte, base int64) error {
	for b, err := range producerBatches(p.mgr.root, log, p.own.End(), base) {
		if err == nil {
			err = p.own.Update(b, 0)
		}
		if err != nil {
			return err
		}
	}
	for len(data) > 0 {
		b := record.Batch(data)
		b = b[:b.Length()]
		data = data[len(b):]
		if pb, ok := b.Producer(); ok {
			if err := p.own.Update(pb, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// seed finds the producer state at an offset of the log, where that is cheap or
// was put off for long enough.
func (p *Partition) seed(log *commitlog.Log, at int64) {
	from := log.Start()
	if offsets, err := log.SnapshotOffsets(); err == nil && len(offsets) > 0 && offsets[0] <= at {
		from = offsets[0]
	} else if from > 0 {
		return // neither a snapshot nor the first record
	}
	if behind, err := log.BytesFrom(from); err != nil || behind > cheapBytes && p.ownBytes < snapshotBytes {
		return
	}
	state, err := p.fromLog(p.mgr.root, p.producerOptions(), log, at)
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			p.logger().Info("the producer state of the copy can't be had yet", "offset", at, "err", err)
		}
		p.ownBytes = 0
		return
	}
	p.own = state
}
