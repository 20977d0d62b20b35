package replica

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/producerstate"
	"github.com/braidlog/braid/services/broker/partition"
)

// retryPolicy is between attempts of what a leadership needs and nobody else
// can do for it.
var retryPolicy = backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second, Multiplier: 2, Jitter: 0.5}

// pauseRetry waits before attempt+1; false when ctx ended.
func pauseRetry(ctx context.Context, attempt int) bool {
	return backoff.Sleep(ctx, retryPolicy.Delay(attempt, rand.Float64())) == nil
}

// load opens the log. How many are recovered at once is bounded.
func (p *Partition) load() {
	select {
	case p.mgr.loading <- struct{}{}:
		defer func() { <-p.mgr.loading }()
	case <-p.mgr.root.Done():
		return
	}
	p.mu.Lock()
	opts := commitlog.Options{SegmentBytes: p.cfg.SegmentBytes, Flush: flushPolicy(p.cfg)}
	p.mu.Unlock()
	start := time.Now()
	log, report, err := p.mgr.dir.OpenLog(p.logID, opts)
	if err != nil {
		p.post(loaded{err: fmt.Errorf("open the log: %w", err)})
		return
	}
	lg := p.logger()
	if report.Damage != nil {
		lg.Error("the log is damaged below what was synced", "offset", report.Damage.From, "err", report.Damage.Cause)
	}
	switch {
	case report.Cut != nil:
		p.reportCut(p.mgr.root, report.Cut)
	case report.Trimmed != nil:
		lg.Warn("a torn tail was cut from the log", "offset", report.Trimmed.Offset, "err", report.Trimmed.Cause)
	}
	lg.Info("log opened", "offset", report.Start, "end", report.End, "created", report.Created, "dur", time.Since(start))
	p.post(loaded{log: log})
}

// hydrate begins again with a machine that knows the log; in the writer's role
// with mu held.
func (p *Partition) hydrate(e loaded) {
	p.loading = false
	if p.gone {
		if e.log != nil {
			p.mu.Unlock()
			if err := e.log.Close(); err != nil {
				p.logger().Warn("closing the log of a removed partition", "err", err)
			}
			p.mu.Lock()
		}
		return
	}
	p.log = e.log
	if p.away { // while it was opened
		p.away = false
		if p.release(); p.gone {
			return
		}
	}
	if e.err != nil {
		p.logger().Error("the log can't be opened", "err", e.err)
		p.step(partition.LogFailed{Err: e.err}, false)
		return
	}
	v, known := p.machine.View()
	p.machine = partition.New(p.mgr.cfg.BrokerID, p.mgr.epoch(), partition.LogFacts{Start: e.log.Start(), End: e.log.End(), Lineage: e.log.Lineage()})
	if known {
		p.step(partition.ViewReset{View: v}, false)
	}
}

// reconcile does what the machine found by comparing lineages. What can't be
// done answers with another hash, on which the log starts again. In the writer's
// role without mu.
func (p *Partition) reconcile(e partition.Reconcile) {
	p.mu.Lock()
	log, current := p.log, p.machine.Current(e.Attempt)
	if log == nil {
		p.openLog() // the machine begins again when it is there
	}
	p.mu.Unlock()
	if log == nil || !current || p.salvage(log, e) {
		return
	}
	if e.Reset {
		if from, ranges, ok := p.lacking(log, e); ok {
			p.mu.Lock()
			known := p.hydrations
			p.mu.Unlock()
			p.task("fill", func(ctx context.Context) { p.fill(ctx, e, known, from, ranges) })
			return
		}
	}
	p.arranged(log, e, p.arrange(log, e))
}

// arranged answers a reconciliation that was carried out, or could not be.
func (p *Partition) arranged(log *commitlog.Log, e partition.Reconcile, err error) {
	if unusable(err) {
		p.first(partition.LogFailed{Err: err})
		return
	}
	hash, tail := e.Hash, int64(0)
	if err == nil {
		hash, err = log.ChainAt(e.ObjectEnd)
	}
	if err == nil {
		tail, err = log.BytesFrom(e.ObjectEnd)
	}
	if err != nil {
		if e.Reset {
			p.first(partition.LogFailed{Err: err})
			return
		}
		p.logger().Warn("the log does not hold the object end, it starts again there", "offset", e.ObjectEnd, "err", err)
		hash = other(e.Hash)
	} else if hash != e.Hash {
		p.logger().Error("the log holds other bytes than were committed, it starts again at the object end", "offset", e.ObjectEnd)
	}
	if p.own != nil && p.own.End() > log.End() {
		p.own = nil
	}
	p.first(partition.Reconciled{
		Attempt:   e.Attempt,
		Log:       partition.LogFacts{Start: log.Start(), End: log.End(), Lineage: log.Lineage()},
		Hash:      hash,
		TailBytes: tail,
	})
}

// arrange truncates or resets, and tells of what was cut out for its damage.
func (p *Partition) arrange(log *commitlog.Log, e partition.Reconcile) error {
	before := log.Cut()
	err := arrange(log, e)
	if cut := log.Cut(); cut != before {
		p.reportCut(p.mgr.root, cut)
	}
	return err
}

func arrange(log *commitlog.Log, e partition.Reconcile) error {
	if e.Reset {
		return log.Reset(e.At, e.Hash, e.Lineage)
	}
	at := min(e.At, log.End())
	err := log.TruncateTo(at)
	var inside *commitlog.NotBorderError
	if errors.As(err, &inside) && inside.Below >= e.ObjectEnd {
		err = log.TruncateTo(inside.Below)
	}
	return err
}

// other is a hash that differs from h.
func other(h chainhash.Hash) chainhash.Hash {
	h[0] ^= 0xff
	return h
}

// checkHash compares an object end learnt from elsewhere with the own log.
func (p *Partition) checkHash(e partition.CheckHash) {
	p.mu.Lock()
	log := p.log
	p.mu.Unlock()
	hash, err := log.ChainAt(e.At)
	var tail int64
	if err == nil {
		tail, err = log.BytesFrom(e.At)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		// A border that this log does not have, or bytes it can't read: either
		// way it does not hold what was committed.
		p.events.putFirst(partition.LogFailed{Err: fmt.Errorf("chain hash at the object end %d: %w", e.At, err)})
		return
	}
	p.events.putFirst(partition.Hashed{Attempt: e.Attempt, Hash: hash, TailBytes: tail})
}

// open asks the metadata service to open the epoch, until it is answered or the
// fence is history.
func (p *Partition) open(ctx context.Context, e partition.Open) {
	client := metadatav1.NewClusterServiceClient(p.mgr.deps.Metadata.Controller())
	req := &metadatav1.OpenEpochRequest{
		Partition: p.id, Fence: fenceToProto(e.Fence), StartOffset: e.Start, Lineage: lineageToProto(e.Lineage),
		ObjectEndChainHash: e.Hash.Bytes(), ObjectEndOffset: e.ObjectEnd,
	}
	for attempt := 1; ctx.Err() == nil; attempt++ {
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		_, err := client.OpenEpoch(callCtx, req)
		cancel()
		if err == nil {
			p.post(partition.OpenAnswered{Fence: e.Fence, Accepted: true})
			return
		}
		if ctx.Err() != nil {
			return
		}
		if answered(err) {
			// The controller sees the partition otherwise: look again before the next
			// election.
			p.mgr.refresh(p)
			p.post(partition.OpenAnswered{Fence: e.Fence, Reason: err.Error()})
			return
		}
		p.logger().WarnContext(ctx, "opening the epoch was not answered, asking again", "leader_epoch", e.Fence.LeaderEpoch, "err", err)
		if !pauseRetry(ctx, attempt) {
			return
		}
	}
}

// callTimeout bounds one call to the metadata service, retries inside included.
const callTimeout = 10 * time.Second

// answered says that an error is the controller's decision, not a failure to
// get one.
func answered(err error) bool {
	switch status.Code(err) {
	case codes.FailedPrecondition, codes.InvalidArgument, codes.NotFound, codes.OutOfRange, codes.PermissionDenied, codes.Unimplemented:
		return true
	case codes.Aborted:
		return !rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER)
	}
	return false
}

// requestElection asks for another election until there was one.
func (p *Partition) requestElection(ctx context.Context, e partition.RequestElection) {
	client := metadatav1.NewClusterServiceClient(p.mgr.deps.Metadata.Controller())
	p.mu.Lock()
	fruitless := p.fruitless
	p.fruitless++
	p.mu.Unlock()
	// One election after the other without an opening in between helps nobody.
	if fruitless > 0 && !pauseRetry(ctx, fruitless) {
		return
	}
	for attempt := 1; ctx.Err() == nil; attempt++ {
		req := &metadatav1.ElectLeaderRequest{
			Topic: p.topic, Partition: p.partition, ExpectedLeaderEpoch: e.Fence.LeaderEpoch, BrokerId: p.candidate(),
		}
		callCtx, cancel := context.WithTimeout(ctx, callTimeout)
		_, err := client.ElectLeader(callCtx, req)
		cancel()
		if status.Code(err) == codes.NotFound {
			return
		}
		if err != nil && ctx.Err() == nil {
			p.logger().WarnContext(ctx, "the election was not held", "leader_epoch", e.Fence.LeaderEpoch, "err", err)
		}
		// Held or not, the fence tells: this task ends with it.
		if !pauseRetry(ctx, attempt+3) {
			return
		}
	}
}

// candidate is whom to ask for: anybody, unless this broker's log is of no use;
// then another live replica where there is one.
func (p *Partition) candidate() int32 {
	p.mu.Lock()
	state, _ := p.machine.State()
	p.mu.Unlock()
	if state != partition.Offline {
		return 0
	}
	v := p.mgr.Cluster()
	t, ok := v.TopicByCreation(p.key.CreationOffset)
	if !ok || int(p.partition) >= len(t.Partitions) {
		return 0
	}
	for _, id := range t.Partitions[p.partition].Replicas {
		if b, ok := v.Broker(id); ok && b.Online && id != p.mgr.cfg.BrokerID {
			return id
		}
	}
	return 0
}

// recoverProducers rebuilds the producer state: from footers up to the object
// end, from the log above it. Where no remote-log manager answers, the log alone
// may be enough. own is what this broker kept as a follower, nil if nothing; it is
// enough where it ends at the object end.
func (p *Partition) recoverProducers(ctx context.Context, e partition.RecoverProducers, own *producerstate.State) {
	p.mu.Lock()
	log := p.log
	p.mu.Unlock()
	for attempt := 1; ctx.Err() == nil; attempt++ {
		l, missing, err := p.rebuild(ctx, log, e, own)
		if err == nil {
			if len(missing) > 0 {
				p.reportMissing(ctx, e, missing)
			}
			p.post(recovered{fence: e.Fence, ledger: l, missing: missing})
			return
		}
		if ctx.Err() != nil {
			return
		}
		p.mu.Lock()
		p.recoveryErr = err
		p.mu.Unlock()
		p.logger().WarnContext(ctx, "the producer state can't be recovered, trying again", "leader_epoch", e.Fence.LeaderEpoch, "err", err)
		if !pauseRetry(ctx, attempt) {
			return
		}
	}
}

func (p *Partition) producerOptions() producerstate.Options {
	return producerstate.Options{MaxProducers: p.mgr.cfg.MaxProducers}
}

func (p *Partition) rebuild(ctx context.Context, log *commitlog.Log, e partition.RecoverProducers, own *producerstate.State) (*ledger, []missingRange, error) {
	opts := p.producerOptions()
	if own == nil || own.End() != e.ObjectEnd {
		own = p.fromSnapshot(opts, log, e.ObjectEnd)
	}
	// Only footers tell which producers were forgotten, so they come first; a copy
	// that remembers those too doubles nothing, so it need not wait long for them,
	// and is better than footers that are lost.
	footers, cancel := ctx, context.CancelFunc(func() {})
	if own != nil {
		footers, cancel = context.WithTimeout(ctx, footerPatience)
	}
	state, missing, err := p.fromFooters(footers, opts, log, e.ObjectEnd)
	cancel()
	switch {
	case own != nil && (err != nil || len(missing) > 0):
		p.logger().InfoContext(ctx, "the producer state is this replica's own", "offset", e.ObjectEnd, "err", err)
		state, missing = own, nil
	case err != nil:
		var ferr error
		if state, ferr = p.fromLog(ctx, opts, log, e.ObjectEnd); ferr != nil {
			return nil, nil, errors.Join(err, ferr)
		}
	}
	// What was appended since has no producer: those wait for this.
	end := log.End()
	tail, err := collectBatches(ctx, log, e.ObjectEnd, end)
	if err != nil {
		return nil, nil, err
	}
	l, err := newLedger(opts, state.Snapshot(), tail, end, p.mgr.now())
	return l, missing, err
}

// errLogShort says that the local log does not reach back far enough.
var errLogShort = errors.New("the local log does not hold what the producer state needs")

// footerPatience is how long a leader waits for footers that it can do without.
const footerPatience = time.Second

// fromSnapshot is the state at the object end where a clean stop left just that.
func (p *Partition) fromSnapshot(opts producerstate.Options, log *commitlog.Log, objectEnd int64) *producerstate.State {
	data, err := log.LoadSnapshot(objectEnd)
	if err != nil {
		return nil
	}
	snap, err := producerstate.DecodeSnapshot(data)
	if err != nil || snap.End != objectEnd {
		return nil
	}
	state, err := producerstate.Restore(opts, snap)
	if err != nil {
		return nil
	}
	return state
}

// fromLog builds the state at the object end from a snapshot on disk, or from
// the partition's first record where the log still has it.
func (p *Partition) fromLog(ctx context.Context, opts producerstate.Options, log *commitlog.Log, objectEnd int64) (*producerstate.State, error) {
	offsets, err := log.SnapshotOffsets()
	if err != nil {
		return nil, err
	}
	var state *producerstate.State
	for _, o := range offsets {
		if o > objectEnd || o < log.Start() {
			continue
		}
		data, err := log.LoadSnapshot(o)
		if err != nil {
			continue
		}
		snap, err := producerstate.DecodeSnapshot(data)
		if err != nil || snap.End != o {
			continue
		}
		if state, err = producerstate.Restore(opts, snap); err == nil {
			break
		}
	}
	if state == nil {
		if log.Start() > 0 {
			return nil, errLogShort
		}
		state = producerstate.New(opts, 0)
	}
	for b, err := range producerBatches(ctx, log, state.End(), objectEnd) {
		if err != nil {
			return nil, err
		}
		if err := state.Update(b, 0); err != nil {
			return nil, err
		}
	}
	state.AdvanceTo(objectEnd)
	return state, nil
}

// producerBatches walks the batches of idempotent producers in [from, end) of a
// log.
func producerBatches(ctx context.Context, log *commitlog.Log, from, end int64) iter.Seq2[record.ProducerBatch, error] {
	return func(yield func(record.ProducerBatch, error) bool) {
		var buf []byte
		for from < end {
			if ctx.Err() != nil {
				yield(record.ProducerBatch{}, context.Cause(ctx))
				return
			}
			chunk, err := log.Read(buf, commitlog.ReadRequest{Offset: from, Limit: end, MaxBytes: 1 << 20})
			if err == nil && chunk.End == chunk.Base {
				err = fmt.Errorf("%w: nothing at %d", errLogShort, from)
			}
			if err != nil {
				yield(record.ProducerBatch{}, err)
				return
			}
			for b, err := range record.Batches(chunk.Bytes) {
				if err != nil {
					yield(record.ProducerBatch{}, err)
					return
				}
				if pb, ok := b.Producer(); ok && !yield(pb, nil) {
					return
				}
			}
			from, buf = chunk.End, chunk.Bytes[:0]
		}
	}
}

// install takes the recovered producer state; in the writer's role with mu held.
func (p *Partition) install(e recovered) {
	v, _ := p.machine.View()
	if state, _ := p.machine.State(); state != partition.Active || v.Fence != e.fence {
		return
	}
	e.ledger.head.AdvanceTo(p.machine.Log().End)
	if err := e.ledger.committedTo(v.ObjectEnd); err != nil {
		p.step(partition.LogFailed{Err: err}, false)
		return
	}
	p.producers, p.recoveryErr, p.missing = e.ledger, nil, e.missing
	p.step(partition.ProducersRecovered{Fence: e.fence}, false)
	p.unpark()
	p.mgr.feed.Wake(p)
}
