package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
)

// recordOverhead is more than the format adds to a record's key, value and
// headers; headerOverhead the same per header.
const (
	recordOverhead = 40
	headerOverhead = 12
)

// ProducerOptions configure a Producer. Topic is needed, everything else has a
// default.
type ProducerOptions struct {
	// Topic by name.
	Topic string
	// Level to wait for; LevelDefault is the topic's min.ack.level.
	Level Level
	// BatchBytes is the size at which a batch is closed; a larger record gets a
	// batch of its own. At most the topic's max.batch.bytes. 0 = 256 KiB.
	BatchBytes int
	// Codec compresses batches.
	Codec record.Codec
	// Linger is how long a batch that isn't full waits for more. 0 = 5 ms,
	// negative = not at all.
	Linger time.Duration
	// MaxInFlight is how many batches of a partition may wait for their answer,
	// 1 to 5: a broker remembers the last five of a producer. 0 = 5.
	MaxInFlight int
	// BufferBytes bounds the records that have no answer yet, in bytes; past it
	// Send waits. 0 = 32 MiB.
	BufferBytes int64
	// DeliveryTimeout bounds the time from Send to the answer. 0 = 2 min.
	DeliveryTimeout time.Duration
	// StallTimeout is how long a leader may be silent about a batch before the
	// stream is given up and the batch sent again. 0 = 30 s.
	StallTimeout time.Duration
}

func (o ProducerOptions) withDefaults() (ProducerOptions, error) {
	if o.Topic == "" {
		return o, errors.New("client: a producer needs a topic")
	}
	if o.MaxInFlight < 0 || o.MaxInFlight > 5 {
		return o, fmt.Errorf("client: MaxInFlight is %d: must be 1 to 5", o.MaxInFlight)
	}
	if o.BatchBytes < 0 || o.BatchBytes > record.MaxBatchSize {
		return o, fmt.Errorf("client: BatchBytes is %d: must be 0 to %d", o.BatchBytes, record.MaxBatchSize)
	}
	if o.BatchBytes == 0 {
		o.BatchBytes = 256 << 10
	}
	if o.Linger == 0 {
		o.Linger = 5 * time.Millisecond
	}
	if o.MaxInFlight == 0 {
		o.MaxInFlight = 5
	}
	if o.BufferBytes <= 0 {
		o.BufferBytes = 32 << 20
	}
	if o.DeliveryTimeout <= 0 {
		o.DeliveryTimeout = 2 * time.Minute
	}
	if o.StallTimeout <= 0 {
		o.StallTimeout = 30 * time.Second
	}
	return o, nil
}

// Record is a record to send.
type Record struct {
	// Key; nil = none. Records of one key keep their order.
	Key []byte
	// Value; nil = none, which differs from an empty one.
	Value []byte
	// Headers in order.
	Headers []record.Header
	// Timestamp; zero = now.
	Timestamp time.Time
}

func (r *Record) size() int {
	n := recordOverhead + len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += headerOverhead + len(h.Key) + len(h.Value)
	}
	return n
}

// RecordTooLargeError says that a record can't be sent; nothing was stored.
type RecordTooLargeError struct {
	// Size is what the record would take, Limit what is allowed, in bytes.
	Size, Limit int64
	// What names the limit.
	What string
}

func (e *RecordTooLargeError) Error() string {
	return fmt.Sprintf("the record takes %d bytes, %s allows %d", e.Size, e.What, e.Limit)
}

// DeliveryError says that a record was not acked.
type DeliveryError struct {
	Topic     string
	Partition int32
	// MaybeStored says that the record may be in the log all the same.
	MaybeStored bool
	// Err is the reason; see package rpcerr.
	Err error
}

func (e *DeliveryError) Error() string {
	outcome := "not stored"
	if e.MaybeStored {
		outcome = "outcome unknown"
	}
	return fmt.Sprintf("%s/%d: %s: %v", e.Topic, e.Partition, outcome, e.Err)
}

func (e *DeliveryError) Unwrap() error { return e.Err }

// Ack says where a record is and how safe.
type Ack struct {
	Partition int32
	Offset    int64
	// Leadership wrote the record.
	Leadership Leadership
	// Levels is the set reached when the answer was given.
	Levels Levels
	// Duplicate says that a repeated send found the record stored already.
	Duplicate bool
	// Settled says that the answer came by AwaitDurability, after the outcome
	// had been unknown.
	Settled bool
	// Broker is the address of the broker that answered.
	Broker string
	// Latency is the time from Send to the answer.
	Latency time.Duration
}

// Pending is the answer to a record, when it comes. The zero Pending isn't one.
type Pending struct {
	b     *batch
	index int32
	at    time.Time
}

// Done is closed when the answer is there.
func (p Pending) Done() <-chan struct{} { return p.b.done }

// AnsweredAt is when the answer came. Only for use after Wait or Done.
func (p Pending) AnsweredAt() time.Time { return p.b.doneAt }

// Wait waits for the answer. An error is a *DeliveryError, or ctx's own: the
// record is then still under way.
func (p Pending) Wait(ctx context.Context) (Ack, error) {
	select {
	case <-p.b.done:
		return p.result()
	default:
	}
	select {
	case <-p.b.done:
		return p.result()
	case <-ctx.Done():
		return Ack{}, context.Cause(ctx)
	}
}

func (p Pending) result() (Ack, error) {
	if p.b.err != nil {
		return Ack{}, p.b.err
	}
	ack := p.b.ack
	ack.Offset += int64(p.index)
	ack.Latency = p.b.doneAt.Sub(p.at)
	return ack, nil
}

// identity is a producer id with its epoch.
type identity struct {
	id    int64
	epoch int16
}

// Producer sends records of one topic. See the package comment.
type Producer struct {
	c     *Client
	opts  ProducerOptions
	topic *Topic
	limit int // of a batch, in bytes
	id    identity

	buffer   *semaphore.Weighted
	builders sync.Pool
	ctx      context.Context // of the lanes
	cancel   context.CancelCauseFunc
	wg       sync.WaitGroup

	mu     sync.Mutex // guards all below
	closed bool
	lanes  []*lane // by partition, nil until used
	// sticky is the partition that records without a key go to, stickyBatch the
	// number of the batch there that they fill.
	sticky      int32
	stickyBatch int64
}

// NewProducer describes the topic, gets a producer id and returns a producer.
// The caller closes it.
func (c *Client) NewProducer(ctx context.Context, opts ProducerOptions) (*Producer, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	topic, err := c.DescribeTopic(ctx, opts.Topic)
	if err != nil {
		return nil, err
	}
	if len(topic.Partitions) == 0 {
		return nil, fmt.Errorf("client: topic %s has no partitions", opts.Topic)
	}
	if _, err := c.DescribeCluster(ctx); err != nil { // so that any broker may die
		return nil, err
	}
	id, err := c.initProducer(ctx)
	if err != nil {
		return nil, err
	}
	p := &Producer{c: c, opts: opts, topic: topic, id: id, limit: opts.BatchBytes, stickyBatch: 1, lanes: make([]*lane, len(topic.Partitions))}
	if topic.MaxBatchBytes > 0 {
		p.limit = int(min(int64(p.limit), topic.MaxBatchBytes))
	}
	p.buffer = semaphore.NewWeighted(opts.BufferBytes)
	p.builders.New = func() any { return record.NewBuilder(opts.Codec) }
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	return p, nil
}

// initProducer gets a new producer id. Repeating it only wastes an id.
func (c *Client) initProducer(ctx context.Context) (identity, error) {
	var resp *brokerv1.InitProducerResponse
	err := c.ask(ctx, func(ctx context.Context, s brokerv1.LogServiceClient) (err error) {
		resp, err = s.InitProducer(ctx, &brokerv1.InitProducerRequest{})
		return err
	})
	if err != nil {
		return identity{}, fmt.Errorf("get a producer id: %w", err)
	}
	return identity{id: resp.GetProducerId(), epoch: int16(resp.GetProducerEpoch())}, nil
}

// Topic is the topic as it was when the producer was made.
func (p *Producer) Topic() *Topic { return p.topic }

// PartitionFor is the partition that a record with the key goes to.
func (p *Producer) PartitionFor(key []byte) int32 { return PartitionForKey(key, len(p.lanes)) }

// Send takes a record, copying it, and returns at once unless the buffer is
// full; then it waits for room until ctx ends. An error means that the record
// was not taken.
func (p *Producer) Send(ctx context.Context, r Record) (Pending, error) {
	if r.Key == nil {
		return p.SendTo(ctx, p.stickyPartition(), r)
	}
	return p.SendTo(ctx, p.PartitionFor(r.Key), r)
}

// SendTo is Send to a partition of the caller's choice.
func (p *Producer) SendTo(ctx context.Context, partition int32, r Record) (Pending, error) {
	if err := p.topic.CheckRecord(&r); err != nil {
		return Pending{}, err
	}
	size := int64(r.size())
	if size > p.opts.BufferBytes {
		return Pending{}, &RecordTooLargeError{Size: size, Limit: p.opts.BufferBytes, What: "the producer's buffer"}
	}
	l, err := p.lane(partition)
	if err != nil {
		return Pending{}, err
	}
	if r.Timestamp.IsZero() {
		r.Timestamp = time.Now()
	}
	if !p.buffer.TryAcquire(size) {
		if err := p.buffer.Acquire(ctx, size); err != nil {
			return Pending{}, fmt.Errorf("wait for room in the producer's buffer: %w", err)
		}
	}
	pending, err := l.add(&r, size)
	if err != nil {
		p.buffer.Release(size)
	}
	return pending, err
}

// stickyPartition is the partition for records without a key: the same until
// the batch that the last of them went to is closed, then the next.
func (p *Producer) stickyPartition() int32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.lanes[p.sticky]; l != nil {
		made, open := l.progress()
		if made > p.stickyBatch || made == p.stickyBatch && !open {
			p.sticky = (p.sticky + 1) % int32(len(p.lanes))
			p.stickyBatch = 1
			if next := p.lanes[p.sticky]; next != nil {
				made, open := next.progress()
				p.stickyBatch = made
				if !open {
					p.stickyBatch++
				}
			}
		}
	}
	return p.sticky
}

func (p *Producer) lane(partition int32) (*lane, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	if err := p.topic.CheckPartition(int(partition)); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	l := p.lanes[partition]
	if l == nil {
		l = &lane{p: p, partition: partition, id: p.id, wake: make(chan struct{}, 1)}
		p.lanes[partition] = l
		p.wg.Go(func() { l.run(p.ctx) })
	}
	return l, nil
}

func (p *Producer) usedLanes() []*lane {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []*lane
	for _, l := range p.lanes {
		if l != nil {
			out = append(out, l)
		}
	}
	return out
}

// Flush sends what is buffered without lingering and waits until every record
// taken so far has its answer, good or bad, or ctx ends.
func (p *Producer) Flush(ctx context.Context) error {
	var all []*batch
	for _, l := range p.usedLanes() {
		all = append(all, l.flush()...)
	}
	for _, b := range all {
		select {
		case <-b.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Resume lets a partition take records again after it failed: the caller knows
// which records were not acked. The partition goes on under a new producer id.
// It does nothing for a partition that works.
func (p *Producer) Resume(ctx context.Context, partition int32) error {
	l, err := p.lane(partition)
	if err != nil {
		return err
	}
	if l.failure() == nil {
		return nil
	}
	id, err := p.c.initProducer(ctx)
	if err != nil {
		return err
	}
	l.resume(id)
	return nil
}

// Close flushes until ctx ends and stops the producer. Records without an
// answer by then get a DeliveryError. It returns ctx's error in that case.
func (p *Producer) Close(ctx context.Context) error {
	p.mu.Lock()
	again := p.closed
	p.closed = true
	p.mu.Unlock()
	if again {
		p.wg.Wait()
		return nil
	}
	err := p.Flush(ctx)
	p.cancel(ErrClosed)
	p.wg.Wait()
	return err
}
