package replica

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/braidlog/braid/pkg/record"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/producerstate"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// Recovery of the producer state when an object that should tell of it is gone
// or damaged. Waiting would leave the partition without uploads for ever, so the
// leader goes on with what is left: first with its own log, then with the
// records themselves where only the footer is damaged, and at last without the
// range. That is safe: what nobody can look at any more makes producers unknown
// or doubtful, and those are told SEQUENCE_GAP (package producerstate, "Lost
// bytes"). A bucket that can't be asked is no loss: that is waited for.

// missingRange is a committed range that nothing is known of any more.
type missingRange struct {
	base, end int64
	object    string // its name in the bucket, empty when it was not looked at
	err       error
}

// refreshPatience bounds the wait for the list of ranges to come anew.
const refreshPatience = 5 * time.Second

// refreshRanges asks for the partition's ranges anew and waits for them: what is
// said to be in a lost object may be in another one by now (design review F17).
func (p *Partition) refreshRanges(ctx context.Context) error {
	replaced := p.ranges.Replaced()
	p.mgr.refresh(p)
	timer := time.NewTimer(refreshPatience)
	defer timer.Stop()
	select {
	case <-replaced:
		return nil
	case <-timer.C:
		return fmt.Errorf("the ranges did not come anew within %v", refreshPatience)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// sinceComplete are the ranges up to the object end that tell of the producers
// there.
func (p *Partition) sinceComplete(objectEnd int64) ([]remote.Range, error) {
	ranges := p.ranges.SinceComplete(objectEnd)
	if len(ranges) == 0 || ranges[len(ranges)-1].End != objectEnd {
		return nil, fmt.Errorf("the committed ranges up to %d are not known yet", objectEnd)
	}
	return ranges, nil
}

// fromFooters reads the state at the object end from the footers of the
// committed ranges. Of what it returns as missing nothing could be learnt.
func (p *Partition) fromFooters(ctx context.Context, opts producerstate.Options, log *commitlog.Log, objectEnd int64) (*producerstate.State, []missingRange, error) {
	if objectEnd == 0 {
		return producerstate.New(opts, 0), nil, nil
	}
	for refreshed := false; ; refreshed = true {
		ranges, err := p.sinceComplete(objectEnd)
		if err != nil {
			return nil, nil, err
		}
		footers, lost, err := p.mgr.remote.Footers(ctx, p.id, ranges)
		if err != nil {
			return nil, nil, fmt.Errorf("producer summaries: %w", err)
		}
		if len(lost) == 0 {
			state := producerstate.New(opts, ranges[0].Base)
			for i := range ranges {
				if err := p.mergeFooter(state, &ranges[i], footers[i]); err != nil {
					return nil, nil, err
				}
			}
			return state, nil, nil
		}
		if state, err := p.fromLog(ctx, opts, log, objectEnd); err == nil {
			p.logger().ErrorContext(ctx, "the bucket lost producer summaries, the own log still holds what they told",
				"object", p.mgr.remote.ObjectName(&ranges[lost[0].Index]), "count", len(lost), "err", lost[0].Err)
			return state, nil, nil
		}
		if !refreshed {
			if err := p.refreshRanges(ctx); err != nil {
				return nil, nil, fmt.Errorf("after the loss of a producer summary (%w): %w", lost[0].Err, err)
			}
			continue
		}
		return p.mend(ctx, opts, log, ranges, footers, lost)
	}
}

// mergeFooter takes in what a footer says of a range. One that contradicts the
// state is no better than none, but it is a defect and not a loss.
func (p *Partition) mergeFooter(state *producerstate.State, rg *remote.Range, f *storagev1.RangeFooter) error {
	sum, err := summaryFromProto(f.GetRange(), f.GetProducers(), f.GetExpiries())
	if err == nil {
		err = state.Merge(sum)
	}
	if err != nil {
		return fmt.Errorf("producer summary in object %s: %w", p.mgr.remote.ObjectName(rg), err)
	}
	return nil
}

// learnt is what is known of one range: a footer, else the producers' batches,
// else that nothing is.
type learnt struct {
	rg      remote.Range
	footer  *storagev1.RangeFooter
	batches []record.ProducerBatch
	missing error
}

// maxStretches bounds how often recovery goes back to an older footer with the
// whole state, when the newest one is lost.
const maxStretches = 8

// mend builds the state although footers are lost.
func (p *Partition) mend(ctx context.Context, opts producerstate.Options, log *commitlog.Log,
	ranges []remote.Range, footers []*storagev1.RangeFooter, lost []remote.Loss,
) (*producerstate.State, []missingRange, error) {
	var all []learnt
	for stretch := 1; ; stretch++ {
		found := make([]learnt, len(ranges))
		for i := range ranges {
			found[i] = learnt{rg: ranges[i], footer: footers[i]}
		}
		for _, l := range lost {
			err := p.relearn(ctx, log, &found[l.Index], l.Err)
			if err != nil {
				return nil, nil, err
			}
		}
		all = append(found, all...)
		first := all[0].rg
		if all[0].footer != nil || first.Base == 0 || stretch == maxStretches {
			break
		}
		// The footer with the whole state is one of the lost ones: what was known
		// below it is in older ones.
		var err error
		if ranges, err = p.sinceComplete(first.Base); err != nil {
			break // the list begins here
		}
		if footers, lost, err = p.mgr.remote.Footers(ctx, p.id, ranges); err != nil {
			return nil, nil, fmt.Errorf("producer summaries: %w", err)
		}
	}
	return p.assemble(opts, all)
}

// relearn reads the records of a range whose footer is lost; where they are lost
// too it notes so. An error says that this can't be told now.
func (p *Partition) relearn(ctx context.Context, log *commitlog.Log, l *learnt, cause error) error {
	if log.Start() <= l.rg.Base && l.rg.End <= log.End() {
		batches, err := collectBatches(ctx, log, l.rg.Base, l.rg.End)
		if err == nil {
			l.batches = batches
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	located, ok := p.ranges.At(l.rg.Base)
	if !ok || located.Range != l.rg {
		return fmt.Errorf("the committed range at %d was replaced meanwhile", l.rg.Base)
	}
	p.mu.Lock()
	v, _ := p.machine.View()
	p.mu.Unlock()
	data, err := p.mgr.remote.Fetch(ctx, located, v.Lineage)
	var damage *remote.DamageError
	switch {
	case errors.Is(err, remote.ErrNotFound), errors.As(err, &damage):
		l.missing = cause
		return nil
	case err != nil:
		return fmt.Errorf("the records of [%d, %d), whose producer summary is lost: %w", l.rg.Base, l.rg.End, err)
	}
	for b, err := range record.Batches(data) {
		if err != nil {
			return err // Fetch has checked them
		}
		if pb, ok := b.Producer(); ok {
			l.batches = append(l.batches, pb)
		}
	}
	return nil
}

// assemble makes a state of what was learnt, in order.
func (p *Partition) assemble(opts producerstate.Options, all []learnt) (*producerstate.State, []missingRange, error) {
	state := producerstate.New(opts, 0)
	var missing []missingRange
	if first := &all[0]; first.footer == nil && first.rg.Base > 0 {
		state.MissTo(first.rg.Base)
		missing = append(missing, missingRange{end: first.rg.Base, err: errors.New("only lost footers tell of the producers at its end")})
	} else {
		state.AdvanceTo(first.rg.Base)
	}
	for i := range all {
		l := &all[i]
		switch {
		case l.footer != nil:
			if err := p.mergeFooter(state, &l.rg, l.footer); err != nil {
				return nil, nil, err
			}
		case l.missing != nil:
			state.MissTo(l.rg.End)
			missing = append(missing, missingRange{base: l.rg.Base, end: l.rg.End, object: p.mgr.remote.ObjectName(&l.rg), err: l.missing})
		default:
			if err := state.Replay(slices.Values(l.batches), nil, l.rg.End); err != nil {
				return nil, nil, err
			}
		}
	}
	return state, missing, nil
}

// collectBatches lists the producers' batches in [from, end) of a log.
func collectBatches(ctx context.Context, log *commitlog.Log, from, end int64) ([]record.ProducerBatch, error) {
	var out []record.ProducerBatch
	for b, err := range producerBatches(ctx, log, from, end) {
		if err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}

// maxLossLines bounds the log lines about one recovery.
const maxLossLines = 10

// reportMissing tells of ranges that recovery went on without.
func (p *Partition) reportMissing(ctx context.Context, e partition.RecoverProducers, missing []missingRange) {
	for i, m := range missing {
		if i == maxLossLines {
			p.logger().ErrorContext(ctx, "producers of more committed ranges are lost", "count", len(missing)-i)
			break
		}
		p.logger().ErrorContext(ctx, "the producers of a committed range are lost, going on without them",
			"object", m.object, "offset", m.base, "end", m.end, "leader_epoch", e.Fence.LeaderEpoch, "err", m.err)
	}
	p.mgr.metrics.producersMissing(len(missing))
}

// incomplete adds the finding about producers that could not be recovered.
func (x *explainer) incomplete(missing []missingRange) {
	if len(missing) == 0 {
		return
	}
	// The newest one says most.
	m := missing[len(missing)-1]
	x.add(false, "PRODUCER_STATE_INCOMPLETE",
		"What the bucket lost told of idempotent producers: those only known from it are answered SEQUENCE_GAP.",
		"object", m.object, "base_offset", str(m.base), "end_offset", str(m.end), "cause", m.err.Error(),
		"ranges", strconv.Itoa(len(missing)), "first_offset", str(missing[0].base))
}
