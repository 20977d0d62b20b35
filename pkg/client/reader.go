package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// Start says where a reader begins. The zero Start is the log start.
type Start struct {
	offset int64
	after  Leadership
	time   time.Time
	kind   startKind
}

type startKind uint8

const (
	startBeginning startKind = iota
	startOffset
	startTime
	startEnd
)

// FromOffset begins at an offset.
func FromOffset(offset int64) Start { return Start{kind: startOffset, offset: offset} }

// FromOffsetAfter begins at an offset whose record before was written by the
// leadership: when that record was cut since, the reader is told LOG_TRUNCATED.
func FromOffsetAfter(offset int64, last Leadership) Start {
	return Start{kind: startOffset, offset: offset, after: last}
}

// FromTime begins at the first record with a timestamp at or after t, or at the
// end when there is none.
func FromTime(t time.Time) Start { return Start{kind: startTime, time: t} }

// FromEnd begins at the high watermark.
func FromEnd() Start { return Start{kind: startEnd} }

// ReaderOptions configure a Reader. Topic is needed.
type ReaderOptions struct {
	Topic     string
	Partition int32
	// Start is where to begin.
	Start Start
	// Follow waits at the end for more instead of ending there.
	Follow bool
	// Patience bounds the time without any leader that answers. 0 = 2 min.
	Patience time.Duration
	// StallTimeout is how long a broker may be silent before another stream is
	// opened; it must be longer than the servers' progress interval. 0 = 30 s.
	StallTimeout time.Duration
}

// Message is a record that was read. Its slices are valid until the reader's
// next call.
type Message struct {
	Partition  int32
	Offset     int64
	Timestamp  time.Time // with milliseconds; zero for none
	Key, Value []byte    // nil for none
	Headers    []record.Header
	Leadership Leadership // who wrote it; zero when the broker didn't tell
}

// Reader delivers the committed records of one partition in order. See the
// package comment. It starts nothing in the background.
type Reader struct {
	c    *Client
	opts ReaderOptions

	next    int64 // offset wanted next
	placed  bool  // next is known
	last    Leadership
	hw      int64
	start   int64 // log start as last told
	broken  error // what ended the reader for good
	attempt int
	quiet   time.Time // since when nothing was heard

	stream brokerv1.LogService_ReadClient // nil between streams
	cancel context.CancelCauseFunc
	at     lead
	fresh  bool

	batches []byte // what is left of the last answer
	lineage lineage.Lineage
	checker record.Checker
	checked bool // checker stands at the next batch
	records record.Reader
	inBatch bool
	by      Leadership
}

// NewReader makes a reader; nothing happens before its first call. The caller
// closes it.
func (c *Client) NewReader(opts ReaderOptions) (*Reader, error) {
	if opts.Topic == "" {
		return nil, errors.New("client: a reader needs a topic")
	}
	if opts.Partition < 0 {
		return nil, fmt.Errorf("client: partition %d: must be 0 or more", opts.Partition)
	}
	if opts.Patience <= 0 {
		opts.Patience = 2 * time.Minute
	}
	if opts.StallTimeout <= 0 {
		opts.StallTimeout = 30 * time.Second
	}
	r := &Reader{c: c, opts: opts, last: opts.Start.after}
	if opts.Start.kind == startOffset {
		r.next, r.placed = opts.Start.offset, true
	}
	return r, nil
}

// Close ends the reader's stream.
func (r *Reader) Close() error {
	r.hangUp(nil)
	if r.broken == nil {
		r.broken = ErrClosed
	}
	return nil
}

// Offset is the offset of the next record; false before the first answer of a
// reader that didn't begin at an offset.
func (r *Reader) Offset() (int64, bool) { return r.next, r.placed }

// HighWatermark is the end of what readers may see, as last told.
func (r *Reader) HighWatermark() int64 { return r.hw }

// LogStart is the first offset of the log, as last told.
func (r *Reader) LogStart() int64 { return r.start }

// Next returns the next record. At the end of the partition it returns io.EOF,
// or waits when following. When ctx ends it returns ctx's error and may be
// called again. Other errors end the reader: LOG_TRUNCATED, EXPIRED and
// OFFSET_OUT_OF_RANGE with their bounds, damage, a deleted topic, or the last
// reason why nobody answered for Options.Patience.
func (r *Reader) Next(ctx context.Context) (Message, error) {
	for {
		if r.broken != nil {
			return Message{}, r.broken
		}
		m, ok, err := r.decoded()
		if err != nil {
			return Message{}, r.end(err)
		}
		if ok {
			return m, nil
		}
		if err := r.fill(ctx); err != nil {
			if ctx.Err() != nil {
				return Message{}, context.Cause(ctx)
			}
			return Message{}, r.end(err)
		}
	}
}

func (r *Reader) end(err error) error {
	r.hangUp(err)
	if !errors.Is(err, io.EOF) {
		err = fmt.Errorf("read %s/%d at offset %d: %w", r.opts.Topic, r.opts.Partition, r.next, err)
	}
	r.broken = err
	return err
}

// decoded takes the next record out of what was received.
func (r *Reader) decoded() (Message, bool, error) {
	for {
		if r.inBatch {
			for r.records.Next() {
				offset := r.records.Offset()
				if offset < r.next {
					continue // the first batch may begin before the offset wanted
				}
				rec := r.records.Record()
				r.next, r.last = offset+1, r.by
				m := Message{Partition: r.opts.Partition, Offset: offset, Key: rec.Key, Value: rec.Value, Headers: rec.Headers, Leadership: r.by}
				if rec.Timestamp >= 0 {
					m.Timestamp = time.UnixMilli(rec.Timestamp)
				}
				return m, true, nil
			}
			r.inBatch = false
			if err := r.records.Err(); err != nil {
				return Message{}, false, fmt.Errorf("broker %s sent a damaged batch: %w", r.at.address, err)
			}
		}
		if len(r.batches) == 0 {
			return Message{}, false, nil
		}
		if err := r.openBatch(); err != nil {
			return Message{}, false, fmt.Errorf("broker %s sent a damaged batch: %w", r.at.address, err)
		}
	}
}

// openBatch checks the next batch (F14) and begins to decode it.
func (r *Reader) openBatch() error {
	size, err := record.Peek(r.batches)
	if err != nil {
		return err
	}
	b := record.Batch(r.batches[:size])
	r.batches = r.batches[size:]
	if err := b.ValidateHeader(); err != nil {
		return err
	}
	if !r.checked {
		if b.BaseOffset() > r.next || b.EndOffset() <= r.next {
			return fmt.Errorf("%w: it holds offsets %d to %d, %d was due", record.ErrCorrupt, b.BaseOffset(), b.LastOffset(), r.next)
		}
		r.checker, r.checked = record.NewChecker(b.BaseOffset(), r.epochs(b.BaseOffset())), true
	}
	if err := r.checker.Next(b); err != nil {
		return err
	}
	r.by = Leadership{LeaderEpoch: b.LeaderEpoch()}
	if who, ok := r.lineage.LeadershipAt(b.BaseOffset()); ok {
		r.by = Leadership{Incarnation: uint32(who.Incarnation), LeaderEpoch: who.LeaderEpoch}
	}
	r.inBatch = true
	return r.records.Reset(b)
}

func (r *Reader) epochs(base int64) record.Epochs {
	if !r.lineage.Covers(base) {
		return nil
	}
	return r.lineage
}

// fill receives one answer, opening a stream when there is none. Without an
// error there may still be nothing to decode.
func (r *Reader) fill(ctx context.Context) error {
	if r.stream == nil {
		if err := r.connect(ctx); err != nil {
			return r.wait(ctx, err)
		}
		r.fresh = false
	}
	resp, err := r.receive(ctx)
	if err != nil {
		address := r.at.address
		r.hangUp(err)
		if errors.Is(err, io.EOF) {
			if r.opts.Follow { // the server ended it without a reason
				return r.wait(ctx, errStalled)
			}
			return io.EOF
		}
		r.c.log.DebugContext(ctx, "read interrupted", "topic", r.opts.Topic, "partition", r.opts.Partition, "offset", r.next, "peer", address, "err", err)
		return r.wait(ctx, err)
	}
	r.attempt, r.quiet = 0, time.Time{}
	return r.accept(resp)
}

// accept stores what an answer tells.
func (r *Reader) accept(resp *brokerv1.ReadResponse) error {
	switch k := resp.GetKind().(type) {
	case *brokerv1.ReadResponse_Start:
		if !r.placed {
			r.next, r.placed = k.Start.GetOffset(), true
		}
		r.start, r.hw = k.Start.GetLogStartOffset(), k.Start.GetHighWatermark()
		r.checked = false
	case *brokerv1.ReadResponse_Batches:
		r.hw = k.Batches.GetHighWatermark()
		r.batches = k.Batches.GetBatches()
		r.lineage = r.lineage[:0:0]
		for _, e := range k.Batches.GetLineage() {
			r.lineage = append(r.lineage, lineage.Entry{
				Leadership:  lineage.Leadership{Incarnation: e.GetLeadership().GetIncarnation(), LeaderEpoch: e.GetLeadership().GetLeaderEpoch()},
				StartOffset: e.GetStartOffset(),
			})
		}
		if !r.placed {
			return rpcerr.Internal(fmt.Errorf("broker %s sent batches before the start of the stream", r.at.address))
		}
		if len(r.batches) > 0 {
			// Each answer brings its own lineage; offsets go on where they were.
			if r.checked {
				r.checker = record.NewChecker(r.checker.End(), r.epochs(r.checker.End()))
			}
		}
	case *brokerv1.ReadResponse_Progress:
		r.hw = k.Progress.GetHighWatermark()
	}
	return nil
}

// connect opens a stream at the leader.
func (r *Reader) connect(ctx context.Context) error {
	at, err := r.c.leader(ctx, r.opts.Topic, r.opts.Partition, r.fresh)
	if err != nil {
		return err
	}
	if at.address == "" {
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, 0, "%s/%d has no leader now", r.opts.Topic, r.opts.Partition)
	}
	r.at = at
	service, err := r.c.service(at.address)
	if err != nil {
		return err
	}
	req := &brokerv1.ReadRequest{
		Topic: r.opts.Topic, Partition: r.opts.Partition, Follow: r.opts.Follow, Format: brokerv1.ReadFormat_READ_FORMAT_BATCHES,
	}
	// The stream outlives ctx, which is one call's: receive ties them together.
	sctx, cancel := context.WithCancelCause(direct(context.WithoutCancel(ctx)))
	release := r.guard(ctx, cancel, at)
	defer release()
	switch {
	case r.placed:
		req.Start = &brokerv1.ReadRequest_Offset{Offset: r.next}
		if r.last != (Leadership{}) && r.last.Incarnation != 0 {
			req.LastLeadership = r.last.proto()
		}
	case r.opts.Start.kind == startTime:
		req.Start = &brokerv1.ReadRequest_Time{Time: timestamppb.New(r.opts.Start.time)}
	case r.opts.Start.kind == startEnd:
		if err := r.placeAtEnd(sctx, service); err != nil {
			err = replacedCause(sctx, err)
			cancel(err)
			return err
		}
		req.Start = &brokerv1.ReadRequest_Offset{Offset: r.next}
	}
	stream, err := service.Read(sctx, req)
	if err != nil {
		err = replacedCause(sctx, err)
		cancel(err)
		return err
	}
	r.stream, r.cancel = stream, cancel
	r.batches, r.inBatch, r.checked = nil, false, false
	return nil
}

func (r *Reader) placeAtEnd(ctx context.Context, service brokerv1.LogServiceClient) error {
	resp, err := service.ListOffsets(ctx, &brokerv1.ListOffsetsRequest{
		Topic: r.opts.Topic, Partition: r.opts.Partition,
		Spec: &brokerv1.ListOffsetsRequest_At{At: brokerv1.OffsetSpec_OFFSET_SPEC_LATEST},
	})
	if err != nil {
		return err
	}
	r.next, r.placed = resp.GetOffset(), true
	return nil
}

// receive takes one answer.
func (r *Reader) receive(ctx context.Context) (*brokerv1.ReadResponse, error) {
	release := r.guard(ctx, r.cancel, r.at)
	resp, err := r.stream.Recv()
	release()
	if err != nil && ctx.Err() == nil {
		err = replacedCause(r.stream.Context(), err)
	}
	return resp, err
}

// guard cancels a wait for the leader at the end of ctx, after too long a
// silence, and as soon as another broker is known to lead while this one is
// silent. The wait ends with a call of release.
func (r *Reader) guard(ctx context.Context, cancel context.CancelCauseFunc, at lead) (release func()) {
	unlink := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	stall := time.AfterFunc(r.opts.StallTimeout, func() { cancel(errStalled) })
	watched, end := context.WithCancel(ctx)
	begun, done := time.Now(), make(chan struct{})
	doubt := time.AfterFunc(doubtStreamAfter, func() {
		defer close(done)
		r.c.watch(watched, r.opts.Topic, r.opts.Partition, at, doubtStreamAfter,
			func() time.Duration { return time.Since(begun) }, func() { cancel(errMoved) })
	})
	return func() {
		unlink()
		stall.Stop()
		end()
		if !doubt.Stop() {
			<-done
		}
	}
}

// replacedCause is the reason why a stream was cancelled, where the client itself
// had one, else err.
func replacedCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, errStalled) || errors.Is(cause, errMoved) {
		return cause
	}
	return err
}

func (r *Reader) hangUp(err error) {
	if r.cancel != nil {
		r.cancel(err)
	}
	r.stream, r.cancel = nil, nil
}

// wait is the pause before another stream. It returns err when there will be
// none.
func (r *Reader) wait(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if !reactToRead(err) {
		return err
	}
	now := time.Now()
	if r.quiet.IsZero() {
		r.quiet = now
	}
	if now.Sub(r.quiet) > r.opts.Patience {
		return fmt.Errorf("nobody answered for %s; last: %w", r.opts.Patience, err)
	}
	r.attempt++
	if r.fresh = !errors.Is(err, errMoved); !r.fresh {
		return nil // it is known who leads now
	}
	if errors.Is(err, errStalled) {
		r.c.skip(r.at.address) // it would be silent about who leads, too
	}
	if e, ok := rpcerr.From(err); ok && e.Reason == errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER {
		if hint := hintOf(e); hint.address != "" && hint.address != r.at.address {
			r.c.topicState(r.opts.Topic).hint(r.opts.Partition, hint)
			if r.attempt == 1 {
				r.fresh = false
				return nil
			}
		}
	}
	return backoff.Sleep(ctx, r.c.retryDelay(r.attempt, err))
}
