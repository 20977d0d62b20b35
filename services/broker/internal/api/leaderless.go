package api

import (
	"context"
	"errors"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// leaderless says that a call did nothing because nobody leads the partition at
// the moment: no leader is known, or the one that was elected, this broker, is
// not ready. That passes by itself, in a second after CreateTopic or in a few
// after the death of a leader.
func leaderless(err error) bool {
	var (
		recovering *replica.RecoveringError
		elsewhere  *replica.NotLeaderError
	)
	switch {
	case err == nil || happened(err):
		return false
	case errors.As(err, &recovering):
		return !recovering.Waited
	case errors.As(err, &elsewhere):
		return elsewhere.Address == ""
	}
	return false
}

// happened says that an error is about something that has had effects: records
// written, an answer begun. Such a call is neither repeated nor forwarded,
// whatever the error wraps.
func happened(err error) bool {
	var (
		unknown *replica.OutcomeUnknownError
		broken  *replica.PipelineBrokenError
		started *startedError
	)
	return errors.As(err, &unknown) || errors.As(err, &broken) || errors.As(err, &started)
}

// withLeader runs attempt on a partition of this broker, and again after every
// change for as long as it fails with a leaderless error; bounded, and no longer
// than the caller has time. held is how many bytes the call keeps meanwhile. The
// error is the last attempt's; p may be nil with it.
func (s *Service) withLeader(ctx context.Context, t target, held int64, attempt func(Partition) error) (p Partition, err error) {
	try := func() (Partition, error) {
		p, err := s.replicas.Lookup(t.topic, t.partition)
		if err != nil {
			return nil, err
		}
		return p, attempt(p)
	}
	if p, err = try(); !leaderless(err) {
		return p, err
	}
	w := s.newPatience(ctx)
	defer w.end()
	for {
		// Taken before the attempt, or a change during it would be missed.
		asked, changes := p, s.changes(p)
		if p, err = try(); !leaderless(err) {
			return p, err
		}
		if p != asked {
			continue // it has been assigned meanwhile: listen to it
		}
		if stop := w.wait(changes, held); stop != nil {
			if errors.Is(stop, errDraining) {
				return p, rpcerr.Draining()
			}
			return p, err
		}
	}
}

// changes are channels that are closed when the cluster's picture or the
// partition, which may be nil, changes.
func (s *Service) changes(p Partition) [2]<-chan struct{} {
	out := [2]<-chan struct{}{s.replicas.Changed()}
	if p != nil {
		out[1] = p.Changed()
	}
	return out
}

// patience is the time that one call may wait for a leader, all waits together.
type patience struct {
	s       *Service
	ctx     context.Context // ends with the patience
	cancel  context.CancelFunc
	entered bool // is counted in Service.leaderless
}

func (s *Service) newPatience(ctx context.Context) *patience {
	w := &patience{s: s}
	w.ctx, w.cancel = answerWithin(ctx, s.cfg.LeaderMaxWait.Std())
	return w
}

func (w *patience) end() {
	w.cancel()
	if w.entered {
		w.s.leaderless.leave()
	}
}

// wait returns nil after a change. Otherwise the call is to end, with errDraining
// as the reason or with the error that it has.
func (w *patience) wait(changes [2]<-chan struct{}, held int64) error {
	if !w.entered {
		if err := w.s.leaderless.enter(); err != nil {
			return err
		}
		w.entered = true
	}
	// Batches of callers that wait are batches that are not written yet.
	if !w.s.buffered.TryAcquire(held) {
		return w.s.bufferFull()
	}
	defer w.s.buffered.Release(held)
	w.s.metrics.leaderless.Add(w.ctx, 1)
	defer w.s.metrics.leaderless.Add(context.WithoutCancel(w.ctx), -1)
	select {
	case <-changes[0]:
	case <-changes[1]:
	case <-w.s.draining:
		return errDraining
	case <-w.ctx.Done():
		return context.Cause(w.ctx)
	}
	return nil
}

// outlast lets a Read stream that was begun wait where a leaderless error meets
// it, and says whether to go on. The wait is bounded from the first such error
// on, until something was read.
func (r *read) outlast(ctx context.Context, err error) bool {
	if !leaderless(err) {
		return false
	}
	if r.patience == nil {
		r.patience, r.changes = r.s.newPatience(ctx), r.s.changes(r.p)
		return true // once more, now that no change can be missed
	}
	if r.patience.wait(r.changes, 0) != nil {
		return false
	}
	r.changes = r.s.changes(r.p)
	return true
}

// settled ends the patience of a Read stream that goes on.
func (r *read) settled() {
	if r.patience != nil {
		r.patience.end()
		r.patience = nil
	}
}
