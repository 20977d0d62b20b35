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
	at, err := c.leader(ctx, opts.Topic, l.partition, fresh)
	if err != nil {
		return false, "", err
	}
	if at.address == "" {
		return false, "", rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, 0, "%s/%d has no leader now", opts.Topic, l.partition)
	}
	service, err := c.service(at.address)
	if err != nil {
		return false, at.address, err
	}
	ctx, cancel := context.WithCancelCause(direct(ctx))
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel(nil)

	// The opening is watched too: a connection to a paused process takes a while
	// to fail.
	s := &session{l: l, address: at.address, begun: time.Now()}
	s.since.Store(1)
	s.stall = time.AfterFunc(opts.StallTimeout, func() { cancel(errStalled) })
	defer s.stall.Stop()
	helpers.Go(func() {
		c.watch(ctx, opts.Topic, l.partition, at, doubtAfter, s.silent, func() { cancel(errMoved) })
	})
	if s.stream, err = service.Produce(ctx); err == nil {
		answers := make(chan answer)
		s.answers = answers
		helpers.Go(func() { receive(ctx, s.stream, answers) })
		err = s.run(ctx)
	}
	if cause := context.Cause(ctx); err != nil && (errors.Is(cause, errStalled) || errors.Is(cause, errMoved)) {
		err = cause
	}
	l.conclude(err)
	return s.answered, at.address, err
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
	noted    int64 // the request that since is about
	// since is for how long after begun the oldest request without an answer has
	// been that, 0 when there is none.
	begun time.Time
	since atomic.Int64
}

// note keeps since true.
func (s *session) note() {
	switch {
	case s.request < s.head:
		s.since.Store(0)
	case s.noted != s.head:
		s.since.Store(max(1, int64(time.Since(s.begun))))
		s.noted = s.head
	}
}

// silent is how long the leader has said nothing about the oldest request.
func (s *session) silent() time.Duration {
	since := s.since.Load()
	if since == 0 {
		return 0
	}
	return time.Since(s.begun) - time.Duration(since)
}

func (s *session) run(ctx context.Context) error {
	s.head = 1
	s.note()
	s.stall.Reset(s.l.p.opts.StallTimeout)
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
	b.out = true
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
