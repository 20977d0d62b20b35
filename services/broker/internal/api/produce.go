package api

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

type produceStream = grpc.BidiStreamingServer[brokerv1.ProduceRequest, brokerv1.ProduceResponse]

// Produce implements LogService.
func (s *Service) Produce(stream produceStream) (err error) {
	ctx := stream.Context()
	defer func() { s.metrics.failed(ctx, "Produce", err) }()
	first, err := stream.Recv()
	if err != nil {
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
	if err := checkProduce(first, first, 0); err != nil {
		return inRequest(first.GetRequest(), err)
	}
	t := target{first.GetTopic(), first.GetPartition()}
	p, err := s.withLeader(ctx, t, int64(len(first.GetBatches())), func(p Partition) error {
		return s.produceHere(stream, t, p, first)
	})
	if leader, ok := s.leaderFor(ctx, err); ok {
		return s.forwardProduce(first, stream, leader)
	}
	if leaderless(err) {
		return inRequest(first.GetRequest(), rpcError(t, p, err))
	}
	return rpcError(t, p, err)
}

// inRequest adds the number of the request that ended a pipeline.
func inRequest(n int64, err error) error {
	if e, ok := rpcerr.From(err); ok {
		return e.With("request", n)
	}
	return err
}

// step is a request of a pipeline on its way through.
type step struct {
	request int64
	level   partition.Level
	facts   facts
	start   time.Time
	ticket  Ticket
	// end says that this step is the last one: err is what to end the stream
	// with, nil for its regular end.
	end bool
	err error
}

// pipe is one Produce stream served here. Three goroutines pass steps on in
// order: receive checks and enqueues, admit waits for the local write, the
// handler waits for the level and answers.
type pipe struct {
	s        *Service
	t        target
	p        Partition
	stream   produceStream
	pipeline replica.Pipeline
	first    *brokerv1.ProduceRequest

	queued   chan step // waiting to be written; as many as Config.ProduceInFlight
	written  chan step // waiting for their level; as many
	admitted chan struct{}
}

// produceHere serves a stream from this broker's partition. An error that
// leaderFor takes, or that is leaderless, is about the first request: nothing was
// stored, nothing else was read from the stream.
func (s *Service) produceHere(stream produceStream, t target, p Partition, first *brokerv1.ProduceRequest) error {
	if err := s.produces.enter(); err != nil {
		return err
	}
	defer s.produces.leave()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	w := &pipe{
		s: s, t: t, p: p, stream: stream, first: first,
		queued:   make(chan step, s.cfg.ProduceInFlight),
		written:  make(chan step, s.cfg.ProduceInFlight),
		admitted: make(chan struct{}),
	}
	// The first request binds the pipeline to a leadership, or finds that it is
	// elsewhere: until that is known nothing is read behind it.
	head := w.enqueue(ctx, first)
	if head.end {
		return head.err
	}
	err := head.ticket.Admitted(ctx)
	s.buffered.Release(head.facts.bytes)
	if err != nil {
		if _, ok := s.leaderFor(ctx, err); ok || leaderless(err) {
			return err
		}
		return inRequest(head.request, rpcError(t, p, err))
	}
	w.first.Batches = nil
	go w.receive(ctx)
	go w.admit(ctx)
	return w.answer(ctx, head)
}

// enqueue hands a request to the partition. The bytes it holds are accounted for
// until the step was admitted.
func (w *pipe) enqueue(ctx context.Context, req *brokerv1.ProduceRequest) step {
	st := step{request: req.GetRequest(), level: partition.Level(req.GetLevel()), start: w.s.now()}
	fail := func(err error) step {
		st.end, st.err = true, inRequest(st.request, err)
		return st
	}
	f, err := w.s.checkBatches(req.GetBatches(), w.s.batchLimit(w.t.topic))
	if err != nil {
		return fail(err)
	}
	st.facts = f
	// A pipeline waits where an Append is refused: not reading on is back-pressure.
	if err := w.s.buffered.Acquire(ctx, f.bytes); err != nil {
		return fail(err)
	}
	st.ticket = w.p.Enqueue(ctx, replica.AppendInput{Batches: req.GetBatches(), Level: st.level, Pipeline: &w.pipeline})
	return st
}

// receive reads requests until the client or an error ends the stream. It
// outlives the handler by as long as Recv takes to notice.
func (w *pipe) receive(ctx context.Context) {
	defer func() {
		<-w.admitted
		for { // what admit did not come to
			select {
			case st := <-w.queued:
				if !st.end {
					w.s.buffered.Release(st.facts.bytes)
				}
			default:
				return
			}
		}
	}()
	previous := w.first.GetRequest()
	for {
		var st step
		req, err := w.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			st.end = true
		case err != nil:
			st.end, st.err = true, err
		default:
			if err = checkProduce(w.first, req, previous); err != nil {
				st = step{request: req.GetRequest(), end: true, err: inRequest(req.GetRequest(), err)}
			} else {
				previous = req.GetRequest()
				st = w.enqueue(ctx, req)
			}
		}
		select {
		case w.queued <- st:
		case <-ctx.Done():
			if !st.end {
				w.s.buffered.Release(st.facts.bytes)
			}
			return
		}
		if st.end {
			return
		}
	}
}

// admit waits for each step's local write.
func (w *pipe) admit(ctx context.Context) {
	defer close(w.admitted)
	for {
		var st step
		select {
		case st = <-w.queued:
		case <-ctx.Done():
			return
		}
		if !st.end {
			err := st.ticket.Admitted(ctx)
			w.s.buffered.Release(st.facts.bytes)
			if err != nil {
				st.end, st.err = true, inRequest(st.request, rpcError(w.t, w.p, err))
			}
		}
		select {
		case w.written <- st:
		case <-ctx.Done():
			return
		}
		if st.end {
			return
		}
	}
}

// answer sends the answers in order. It returns how the stream ends.
func (w *pipe) answer(ctx context.Context, st step) error {
	for {
		if st.end {
			return st.err
		}
		if err := w.reply(ctx, st); err != nil {
			return err
		}
		select {
		case st = <-w.written:
			continue
		default:
		}
		select {
		case st = <-w.written:
		case <-w.s.draining:
			// What is under way has been answered; more may come in, but not here.
			return rpcerr.Draining()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (w *pipe) reply(ctx context.Context, st step) error {
	option := w.s.metrics.level(st.level)
	w.s.metrics.ackWaiters.Add(ctx, 1, option)
	defer w.s.metrics.ackWaiters.Add(ctx, -1, option)
	result, err := w.s.settle(ctx, st.ticket)
	w.s.metrics.answered(ctx, st.level, st.facts, result, err, w.s.now().Sub(st.start))
	if err != nil {
		return inRequest(st.request, rpcError(w.t, w.p, err))
	}
	return w.stream.Send(&brokerv1.ProduceResponse{Request: st.request, Result: appendResponse(w.p, result)})
}
