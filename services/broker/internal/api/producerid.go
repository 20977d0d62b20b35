package api

import (
	"context"
	"fmt"
	"math"
	"time"

	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// tagShift places the incarnation in a producer id: ids of two incarnations, and
// so of two clusters, are never the same (design review F6).
const tagShift = 32

// tagOf is the incarnation that issued a producer id.
func tagOf(id int64) uint32 { return uint32(id >> tagShift) }

// allocateTimeout bounds one fetch of a block of producer ids.
const allocateTimeout = 5 * time.Second

// InitProducer implements LogService. Any broker answers: an id means the same to
// all partitions, and the epoch is the producer's own count of its beginnings, so
// nobody has to be asked for it.
func (s *Service) InitProducer(ctx context.Context, req *brokerv1.InitProducerRequest) (resp *brokerv1.InitProducerResponse, err error) {
	defer func() { s.metrics.failed(ctx, "InitProducer", err) }()
	id, epoch := req.GetProducerId(), req.GetProducerEpoch()
	var v violations
	v.check(id >= 0, "producer_id", fmt.Sprintf("is %d: give an id from InitProducer, or 0 for a new one", id))
	v.check(epoch >= 0 && epoch <= math.MaxInt16, "producer_epoch", fmt.Sprintf("is %d: epochs run from 0 to %d", epoch, math.MaxInt16))
	v.check(id != 0 || epoch == 0, "producer_epoch", "is given without a producer_id: leave it out for a new id")
	if err := v.err(); err != nil {
		return nil, err
	}
	_, incarnation, ok := s.replicas.Registration()
	if !ok {
		return nil, notRegistered()
	}
	if id > 0 && tagOf(id) != incarnation {
		return nil, fencedTag("the producer", id, incarnation)
	}
	if id > 0 && epoch < math.MaxInt16 {
		return &brokerv1.InitProducerResponse{ProducerId: id, ProducerEpoch: epoch + 1}, nil
	}
	// No id yet, or all of its epochs are used up.
	id, err = s.ids.next(ctx)
	if err != nil {
		return nil, err
	}
	return &brokerv1.InitProducerResponse{ProducerId: id}, nil
}

func notRegistered() error {
	return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soonRetry, "this broker is not registered with the metadata service")
}

// fencedTag refuses a producer id of another incarnation.
func fencedTag(subject string, id int64, incarnation uint32) *rpcerr.Error {
	return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_PRODUCER_FENCED, subject,
		"producer id %d was issued under incarnation %08x, writes here need one of %08x: ask InitProducer for a new id", id, tagOf(id), incarnation).
		With("last_sequence", -1).With("last_offset", -1)
}

// idBlocks hands out producer ids from blocks that were allocated to this broker.
// A block lost in a crash, or with an answer, costs ids and nothing else.
type idBlocks struct {
	source   ProducerIDs
	replicas Replicas
	self     int32
	count    int32

	turn        chan struct{} // capacity 1: who holds it may use what is below
	first, end  int64         // the rest of the block
	incarnation uint32        // of the block
}

func newIDBlocks(source ProducerIDs, r Replicas, self, count int32) *idBlocks {
	return &idBlocks{source: source, replicas: r, self: self, count: count, turn: make(chan struct{}, 1)}
}

// next is an id never given before.
func (b *idBlocks) next(ctx context.Context) (int64, error) {
	select {
	case b.turn <- struct{}{}:
		defer func() { <-b.turn }()
	case <-ctx.Done():
		return 0, status.FromContextError(ctx.Err()).Err()
	}
	brokerEpoch, incarnation, ok := b.replicas.Registration()
	if !ok {
		return 0, notRegistered()
	}
	if b.first >= b.end || b.incarnation != incarnation {
		if err := b.fetch(ctx, brokerEpoch, incarnation); err != nil {
			return 0, err
		}
	}
	id := b.first
	b.first++
	return id, nil
}

func (b *idBlocks) fetch(ctx context.Context, brokerEpoch int64, incarnation uint32) error {
	call, cancel := context.WithTimeout(ctx, allocateTimeout)
	defer cancel()
	resp, err := b.source.AllocateProducerIds(call, &metadatav1.AllocateProducerIdsRequest{
		BrokerId: b.self, BrokerEpoch: brokerEpoch, Count: b.count,
	})
	if err != nil {
		if ctx.Err() != nil {
			return status.FromContextError(ctx.Err()).Err()
		}
		if rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH) {
			return notRegistered() // it is registering anew
		}
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE, time.Second,
			"the metadata service gave out no producer ids").WithCause(err)
	}
	first, count := resp.GetFirstProducerId(), int64(resp.GetCount())
	if first <= 0 || count <= 0 || tagOf(first) != incarnation || tagOf(first+count-1) != incarnation {
		return fmt.Errorf("api: the metadata service gave out producer ids [%d, +%d), which are not of incarnation %08x", first, count, incarnation)
	}
	b.first, b.end, b.incarnation = first, first+count, incarnation
	return nil
}
