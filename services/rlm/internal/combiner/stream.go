package combiner

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/walobject"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/rlm/planner"
)

// Stream is one broker's stream of ranges.
type Stream struct {
	c           *Combiner
	id          planner.StreamID
	incarnation uint32
	brokerEpoch int64

	// Guarded by c.mu.
	outstanding map[planner.Key]int64 // bytes not answered, by partition; entries stay
	total       int64
	ranges      int
	verdicts    []*remotelogv1.WalVerdict
	notify      chan struct{} // holds a token when verdicts is not empty
	closed      bool
}

// item is a range while it is buffered.
type item struct {
	stream   *Stream
	footer   *storagev1.RangeFooter
	data     []byte
	cost     int64   // of the buffer; 0 when it was given back
	object   *object // that holds it, nil while queued
	answered bool
}

// Open admits a stream of a broker, which sends under the given incarnation
// and broker epoch. The caller closes it.
func (c *Combiner) Open(incarnation uint32, brokerEpoch int64) (*Stream, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.admits(); err != nil {
		return nil, err
	}
	c.nextStream++
	s := &Stream{
		c: c, id: c.nextStream, incarnation: incarnation, brokerEpoch: brokerEpoch,
		outstanding: make(map[planner.Key]int64), notify: make(chan struct{}, 1),
	}
	c.streams[s.id] = s
	c.plan.StreamOpened(s.id)
	return s, nil
}

// Close forgets the stream. What is queued of it is dropped, what is in an
// object is still committed; nothing is answered any more.
func (s *Stream) Close() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	delete(s.c.streams, s.id)
	s.c.apply(s.c.plan.StreamClosed(s.c.now(), s.id))
	// The planner answers nothing on a closed stream, so what it dropped from
	// its queue is given back here.
	for it := range s.c.buffered {
		if it.stream == s && it.object == nil {
			s.c.release(it)
		}
	}
	s.verdicts = nil
}

// Append verifies a range and queues it; ranges of one partition are appended by
// one caller after the other. A range that fails the verification is
// not uploaded; its verdict says so. Append waits while the buffers are full. It
// keeps r. The error is a [*CreditError], [ErrDraining], [ErrStopped] or ctx's;
// the caller then ends the stream.
func (s *Stream) Append(ctx context.Context, r *remotelogv1.WalRange) error {
	d := r.GetRange()
	p := d.GetPartition()
	it := &item{
		stream: s, data: r.GetData(),
		footer: &storagev1.RangeFooter{Range: d, Producers: r.GetProducers(), Expiries: r.GetExpiries()},
	}
	footerSize := int64(proto.Size(it.footer))
	it.cost = int64(len(it.data)) + footerSize + rangeOverhead
	key := planner.Key{TopicCreationOffset: p.GetTopicCreationOffset(), TopicID: p.GetTopicId(), Partition: p.GetPartition()}
	if err := s.charge(key, int64(len(it.data))); err != nil {
		return err
	}
	if err := s.c.reserve(ctx, it); err != nil {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		s.refund(key, int64(len(it.data)))
		return err
	}
	refused := s.verify(ctx, r)
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if err := errors.Join(s.c.admits(), s.ended()); err != nil {
		s.c.release(it)
		s.refund(key, int64(len(it.data)))
		return err
	}
	s.c.apply(s.c.plan.Offer(s.c.now(), s.id, planner.Range{
		Partition: key, Run: r.GetRun(), Base: d.GetBaseOffset(), End: d.GetEndOffset(),
		// A footer entry has a tag and a length in front, and gets its position.
		Bytes: int64(len(it.data)) + footerSize + 16, Item: it,
	}, refused))
	return nil
}

func (s *Stream) ended() error {
	if s.closed {
		return ErrStopped
	}
	return nil
}

// verify returns the verdict on a range that must not be uploaded, nil if it may.
func (s *Stream) verify(ctx context.Context, r *remotelogv1.WalRange) *metadatav1.RangeVerdict {
	d := r.GetRange()
	err := walobject.VerifyRange(d, r.GetData())
	if err == nil {
		err = s.checkSender(d)
	}
	if err == nil {
		return nil
	}
	outcome := metadatav1.RangeOutcome_RANGE_OUTCOME_MALFORMED
	if errors.Is(err, walobject.ErrChain) {
		outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH
	}
	s.c.log.WarnContext(ctx, "refused a range on arrival",
		"topic_id", d.GetPartition().GetTopicId(), "partition", d.GetPartition().GetPartition(),
		"offset", d.GetBaseOffset(), "outcome", outcome.String(), "err", err)
	return &metadatav1.RangeVerdict{Outcome: outcome}
}

var errSender = errors.New("the fence is not the sender's: incarnation or broker epoch differ from the stream's")

// checkSender holds a range's fence against who opened the stream.
func (s *Stream) checkSender(d *logv1.RangeDescriptor) error {
	if f := d.GetFence(); f.GetIncarnation() != s.incarnation || f.GetBrokerEpoch() != s.brokerEpoch {
		return errSender
	}
	return nil
}

// charge takes n bytes of credit.
func (s *Stream) charge(key planner.Key, n int64) error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if err := s.c.admits(); err != nil {
		return err
	}
	used, known := s.outstanding[key]
	switch limits := s.c.cfg; {
	case !known && len(s.outstanding) >= limits.MaxPartitions:
		return &CreditError{Scope: "partitions of the stream", Limit: int64(limits.MaxPartitions), Actual: int64(len(s.outstanding) + 1)}
	case used == 0: // a partition with nothing outstanding may always send one range
	case used+n > limits.PartitionCreditBytes:
		return &CreditError{Scope: "partition", Limit: limits.PartitionCreditBytes, Actual: used + n}
	case s.total+n > limits.StreamCreditBytes:
		return &CreditError{Scope: "stream", Limit: limits.StreamCreditBytes, Actual: s.total + n}
	}
	s.outstanding[key] = used + n
	s.total += n
	s.ranges++
	return nil
}

// refund gives credit back. c.mu is held.
func (s *Stream) refund(key planner.Key, n int64) {
	s.outstanding[key] -= n
	s.total -= n
	s.ranges--
}

// deliver queues a verdict for the sender and gives its credit back. The queue
// is bounded by what the sender may have outstanding. c.mu is held.
func (s *Stream) deliver(a planner.Answer, it *item) {
	s.refund(a.Range.Partition, int64(len(it.data)))
	v := &remotelogv1.WalVerdict{
		Partition: it.footer.GetRange().GetPartition(), Run: a.Range.Run,
		BaseOffset: a.Range.Base, EndOffset: a.Range.End, Verdict: a.Verdict,
	}
	if a.Attempt.Attempt != 0 {
		v.Object, v.MetadataOffset = s.c.ref(a.Attempt, it.object), a.MetadataOffset
	}
	s.verdicts = append(s.verdicts, v)
	select {
	case s.notify <- struct{}{}:
	default:
	}
}

// Ready is a channel that holds a token when [Stream.Take] has something.
func (s *Stream) Ready() <-chan struct{} { return s.notify }

// Take returns the verdicts that came since the last call.
func (s *Stream) Take() []*remotelogv1.WalVerdict {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	list := slices.Clone(s.verdicts)
	clear(s.verdicts)
	s.verdicts = s.verdicts[:0]
	return list
}

// Outstanding is the number of ranges that have no verdict yet, or one that
// was not taken.
func (s *Stream) Outstanding() int {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	return s.ranges + len(s.verdicts)
}
