package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// batch is records of one partition that are sent and answered together.
type batch struct {
	created time.Time // of the first record
	held    int64     // bytes of the producer's buffer
	done    chan struct{}

	// Guarded by the lane's mutex until the batch is sent, then the worker's.
	builder *record.Builder // nil once built
	flush   bool
	bytes   []byte
	// out says that the batch was sent on the stream that is open; maybe, that a
	// stream it was sent on ended in a way that doesn't exclude that it was stored.
	out, maybe bool

	// Written before done is closed.
	ack    Ack // of the first record
	err    error
	doneAt time.Time
}

// lane is one partition of a producer: a queue and the worker that empties it.
type lane struct {
	p         *Producer
	partition int32
	wake      chan struct{} // capacity 1: a reminder to look

	mu sync.Mutex // guards all below
	// batches have no answer yet, oldest first: sent of them are in flight,
	// then full ones, and the last may still be open.
	batches []*batch
	sent    int
	open    *batch
	made    int64 // batches begun so far
	failed  error
	id      identity
	nextSeq int32
}

func (l *lane) remind() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// progress is the number of batches begun so far and whether the last is open.
func (l *lane) progress() (made int64, open bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.made, l.open != nil
}

func (l *lane) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// add puts a record into the open batch.
func (l *lane) add(r *Record, size int64) (Pending, error) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		return Pending{}, l.failed
	}
	if l.open != nil && l.open.builder.Size()+int(size) > l.p.limit {
		l.open = nil // full
		l.remind()
	}
	if l.open == nil {
		b := &batch{created: now, done: make(chan struct{}), builder: l.p.builders.Get().(*record.Builder)}
		l.batches = append(l.batches, b)
		l.open = b
		l.made++
		l.remind()
	}
	b := l.open
	index := int32(b.builder.Len())
	if err := b.builder.Append(record.Record{Timestamp: r.Timestamp.UnixMilli(), Key: r.Key, Value: r.Value, Headers: r.Headers}); err != nil {
		if index == 0 { // don't leave an empty batch
			l.batches = l.batches[:len(l.batches)-1]
			l.open = nil
		}
		return Pending{}, fmt.Errorf("client: %w", err)
	}
	b.held += size
	if b.builder.Size() >= l.p.limit {
		l.open = nil
		l.remind()
	}
	return Pending{b: b, index: index, at: now}, nil
}

// flush makes the open batch ready and returns all that have no answer.
func (l *lane) flush() []*batch {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open != nil {
		l.open.flush = true
		l.remind()
	}
	return append([]*batch(nil), l.batches...)
}

func (l *lane) resume(id identity) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		l.failed, l.id, l.nextSeq = nil, id, 0
	}
}

// take gives the next batch to send, built, or how long to wait for it; wait is
// negative when there is none.
func (l *lane) take(now time.Time) (b *batch, wait time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sent == len(l.batches) {
		return nil, -1, nil
	}
	b = l.batches[l.sent]
	if b == l.open {
		if left := l.p.opts.Linger - now.Sub(b.created); left > 0 && !b.flush {
			return nil, left, nil
		}
		l.open = nil
	}
	l.sent++
	b.builder.SetProducer(l.id.id, l.id.epoch, l.nextSeq)
	count := int32(b.builder.Len())
	b.bytes, _, err = b.builder.Build(nil)
	b.builder.Reset()
	l.p.builders.Put(b.builder)
	b.builder = nil
	l.nextSeq = record.NextSequence(l.nextSeq, count)
	return b, 0, err
}

// inFlight is the batches sent and not answered, oldest first. Only the worker
// calls it, and only the worker shortens the list.
func (l *lane) inFlight() []*batch {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]*batch(nil), l.batches[:l.sent]...)
}

func (l *lane) hasWork() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.batches) > 0
}

// finish answers the oldest batch in flight.
func (l *lane) finish(ack Ack) {
	l.mu.Lock()
	b := l.batches[0]
	l.batches[0] = nil
	l.batches = l.batches[1:]
	l.sent--
	l.mu.Unlock()
	ack.Partition = l.partition
	b.ack = ack
	l.answer(b)
}

func (l *lane) answer(b *batch) {
	b.doneAt = time.Now()
	b.bytes = nil
	close(b.done)
	l.p.buffer.Release(b.held)
}

// conclude notes what the end of a stream, with err, says about the batches that
// were sent on it. A refusal is certain: of the batch refused and of those behind
// it nothing was stored by this stream.
func (l *lane) conclude(err error) {
	executed := rpcerr.Executed(err)
	for _, b := range l.inFlight() {
		b.maybe = b.maybe || b.out && executed
		b.out = false
	}
}

// fail answers everything with an error; the partition takes no more records.
func (l *lane) fail(err error) {
	l.mu.Lock()
	all := l.batches
	l.batches, l.sent, l.open = nil, 0, nil
	l.failed = &DeliveryError{Topic: l.p.opts.Topic, Partition: l.partition, Err: fmt.Errorf("the partition stopped before: %w", err)}
	l.mu.Unlock()
	// With a gap the server says which sequence it holds last: none of these.
	gap := rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP)
	for _, b := range all {
		b.err = &DeliveryError{Topic: l.p.opts.Topic, Partition: l.partition, MaybeStored: b.maybe && !gap, Err: err}
		l.answer(b)
	}
}

// run is the worker.
func (l *lane) run(ctx context.Context) {
	attempt, fresh := 0, false
	for {
		if !l.hasWork() {
			select {
			case <-l.wake:
			case <-ctx.Done():
			}
			attempt = 0
		}
		if ctx.Err() != nil {
			l.fail(context.Cause(ctx))
			return
		}
		if !l.hasWork() {
			continue
		}
		answered, address, err := l.session(ctx, fresh)
		if answered {
			attempt = 0
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		attempt++
		fresh = l.recover(ctx, address, err, attempt)
	}
}

// recover deals with the end of a session and says whether brokers have to be
// asked for the leader.
func (l *lane) recover(ctx context.Context, address string, err error, attempt int) (fresh bool) {
	reaction := reactToProduce(err)
	head := l.inFlight()
	l.p.c.log.DebugContext(ctx, "produce interrupted", "topic", l.p.opts.Topic, "partition", l.partition, "peer", address,
		"reaction", reaction.String(), "attempt", attempt, "in_flight", len(head), "err", err)
	if len(head) == 0 && reaction != giveUp {
		reaction = resolve // nothing waits for an answer
	}
	switch {
	case errors.Is(err, errMoved):
		return l.expire(err) // it is known who leads now
	case errors.Is(err, errStalled):
		l.p.c.skip(address) // it would be silent about who leads, too
	}
	switch reaction {
	case giveUp:
		l.fail(err)
		return true
	case settle:
		if l.settle(ctx, err, head[0].created.Add(l.p.opts.DeliveryTimeout)) {
			return true
		}
	case resolve:
		if e, ok := rpcerr.From(err); ok && e.Reason == errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER {
			if hint := hintOf(e); hint.address != "" && hint.address != address {
				l.p.c.topicState(l.p.opts.Topic).hint(l.partition, hint)
				if attempt == 1 {
					return false
				}
			}
		}
	}
	if l.expire(err) {
		return true
	}
	_ = backoff.Sleep(ctx, l.p.c.retryDelay(attempt, err)) // run looks at ctx
	return true
}

// expire fails the lane when its oldest batch has waited too long.
func (l *lane) expire(last error) bool {
	l.mu.Lock()
	late := len(l.batches) > 0 && time.Since(l.batches[0].created) > l.p.opts.DeliveryTimeout
	l.mu.Unlock()
	if late {
		l.fail(fmt.Errorf("no ack within %s; last: %w", l.p.opts.DeliveryTimeout, last))
	}
	return late
}
