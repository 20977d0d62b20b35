package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

// errStalled says that a leader was silent for too long.
var errStalled = errors.New("the leader gave no answer in time")

// errMoved says that another broker leads while the one asked says nothing.
var errMoved = errors.New("another broker leads the partition")

// doubtAfter is how long a leader may be silent about a batch before another
// broker is asked who leads: a process that was paused, or cut off, can't say
// itself that it was replaced.
const doubtAfter = 2 * time.Second

// idleStream is how long a stream is kept open without a batch.
const idleStream = 10 * time.Second

// answer is what the receiving half of a session passes on.
type answer struct {
	resp *brokerv1.ProduceResponse
	err  error
}

// session produces to the present leader until something ends that. answered
// says whether a batch was acked; a nil error means that nothing is left to do.
func (l *lane) session(ctx context.Context, fresh bool) (answered bool, address string, err error) {
	c, opts := l.p.c, &l.p.opts
	if address, err = c.leader(ctx, opts.Topic, l.partition, fresh); err != nil {
		return false, "", err
	}
	if address == "" {
		return false, "", rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, 0, "%s/%d has no leader now", opts.Topic, l.partition)
	}
	service, err := c.service(address)
	if err != nil {
		return false, address, err
	}
	ctx, cancel := context.WithCancelCause(direct(ctx))
	stream, err := service.Produce(ctx)
	if err != nil {
		cancel(nil)
		return false, address, err
	}
	answers := make(chan answer)
	var helpers sync.WaitGroup
	helpers.Go(func() { receive(ctx, stream, answers) })
	defer helpers.Wait()
	defer cancel(nil)

	stall := time.AfterFunc(opts.StallTimeout, func() { cancel(errStalled) })
	defer stall.Stop()
	s := &session{l: l, stream: stream, address: address, answers: answers, stall: stall}
	helpers.Go(func() { s.doubt(ctx, cancel) })
	err = s.run(ctx)
	if cause := context.Cause(ctx); err != nil && (errors.Is(cause, errStalled) || errors.Is(cause, errMoved)) {
		err = cause
	}
	return s.answered, address, err
}

// doubt ends the session when the leader is silent and another broker is said
// to lead.
func (s *session) doubt(ctx context.Context, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(doubtAfter)
	defer tick.Stop()
	for last := int64(-1); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		oldest := s.oldest.Load()
		if oldest == 0 || oldest != last {
			last = oldest
			continue
		}
		c, opts := s.l.p.c, &s.l.p.opts
		address, err := c.leader(ctx, opts.Topic, s.l.partition, true)
		if err == nil && address != "" && address != s.address && s.oldest.Load() == oldest {
			cancel(errMoved)
			return
		}
	}
}

func receive(ctx context.Context, stream brokerv1.LogService_ProduceClient, answers chan<- answer) {
	for {
		resp, err := stream.Recv()
		select {
		case answers <- answer{resp, err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// session is one Produce stream.
type session struct {
	l        *lane
	stream   brokerv1.LogService_ProduceClient
	address  string
	answers  <-chan answer
	stall    *time.Timer
	request  int64 // number of the last request
	head     int64 // number of the oldest request without an answer
	answered bool
	// oldest is the number of the oldest request without an answer, 0 when
	// there is none.
	oldest atomic.Int64
}

// note keeps oldest true.
func (s *session) note() {
	if s.request < s.head {
		s.oldest.Store(0)
		return
	}
	s.oldest.Store(s.head)
}

func (s *session) run(ctx context.Context) error {
	s.head = 1
	for _, b := range s.l.inFlight() {
		if err := s.send(ctx, b); err != nil {
			return err
		}
	}
	timer := time.NewTimer(idleStream)
	defer timer.Stop()
	for {
		wait, idle := idleStream, s.request < s.head
		if int(s.request-s.head)+1 < s.l.p.opts.MaxInFlight {
			b, left, err := s.l.take(time.Now())
			if err != nil {
				return err
			}
			if b != nil {
				if idle {
					s.stall.Reset(s.l.p.opts.StallTimeout)
				}
				if err := s.send(ctx, b); err != nil {
					return err
				}
				continue
			}
			if left >= 0 {
				wait = left
			}
		}
		if idle {
			s.stall.Stop()
		}
		timer.Reset(wait)
		select {
		case a := <-s.answers:
			if err := s.take(a); err != nil {
				return err
			}
		case <-s.l.wake:
		case <-timer.C:
			if idle && wait == idleStream && !s.l.hasWork() {
				_ = s.stream.CloseSend() // the stream is cancelled next anyway
				return nil
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// send sends one batch. The reason of a failure comes from the receiving half.
func (s *session) send(ctx context.Context, b *batch) error {
	s.request++
	s.note()
	b.attempts++
	req := &brokerv1.ProduceRequest{
		Request: s.request, Partition: s.l.partition, Batches: b.bytes, Level: logv1.Level(s.l.p.opts.Level),
	}
	if s.request == 1 {
		req.Topic = s.l.p.opts.Topic
	}
	err := s.stream.Send(req)
	if !errors.Is(err, io.EOF) {
		return err
	}
	for {
		select {
		case a := <-s.answers:
			if err := s.take(a); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// take deals with an answer.
func (s *session) take(a answer) error {
	if a.err != nil {
		if errors.Is(a.err, io.EOF) {
			return io.EOF // ended without a refusal: open another
		}
		return a.err
	}
	result := a.resp.GetResult()
	if a.resp.GetRequest() != s.head || s.request < s.head || result == nil {
		return rpcerr.Internal(fmt.Errorf("broker %s answered request %d where %d was due", s.address, a.resp.GetRequest(), s.head))
	}
	s.head++
	s.note()
	s.answered = true
	s.stall.Reset(s.l.p.opts.StallTimeout)
	s.l.finish(Ack{
		Offset: result.GetBaseOffset(), Leadership: leadershipOf(result.GetLeadership()),
		Levels: levelsOf(result.GetLevels()), Duplicate: result.GetDuplicate(), Broker: s.address,
	})
	return nil
}
