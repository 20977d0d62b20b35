package api

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/topicconfig"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// Append implements LogService.
func (s *Service) Append(ctx context.Context, req *brokerv1.AppendRequest) (resp *brokerv1.AppendResponse, err error) {
	defer func() { s.metrics.failed(ctx, "Append", err) }()
	if err := checkAppend(req); err != nil {
		return nil, err
	}
	t := target{req.GetTopic(), req.GetPartition()}
	p, err := s.withLeader(ctx, t, int64(proto.Size(req)), func(p Partition) (err error) {
		resp, err = s.appendHere(ctx, t, p, req)
		return err
	})
	if leader, ok := s.leaderFor(ctx, err); ok {
		return forwardUnary(ctx, s, "Append", leader, changes, s.cfg.AppendMaxWait.Std(), func(ctx context.Context, c brokerv1.LogServiceClient, opts ...grpc.CallOption) (*brokerv1.AppendResponse, error) {
			return c.Append(ctx, req, opts...)
		})
	}
	if err != nil {
		return nil, rpcError(t, p, err)
	}
	return resp, nil
}

// appendHere appends to a partition of this broker. With an error that
// leaderFor takes, nothing was stored and req is whole.
func (s *Service) appendHere(ctx context.Context, t target, p Partition, req *brokerv1.AppendRequest) (*brokerv1.AppendResponse, error) {
	start := s.now()
	limit := s.batchLimit(t.topic)
	batches := req.GetBatches()
	f := facts{records: int64(len(req.GetRecords()))}
	var err error
	if len(batches) == 0 {
		// The builder's batches need no second look.
		if batches, err = s.buildBatch(req, limit); err == nil {
			f.bytes = int64(len(batches))
		}
	} else {
		f, err = s.checkBatches(batches, limit)
	}
	if err != nil {
		return nil, err
	}
	if !s.buffered.TryAcquire(f.bytes) {
		return nil, s.bufferFull()
	}
	level := partition.Level(req.GetLevel())
	s.metrics.ackWaiters.Add(ctx, 1, s.metrics.level(level))
	defer s.metrics.ackWaiters.Add(ctx, -1, s.metrics.level(level))

	ticket, err := p.Submit(ctx, replica.AppendInput{
		Batches: batches, Level: level, ExpectedLeaderEpoch: req.GetExpectedLeaderEpoch(),
	})
	s.buffered.Release(f.bytes)
	if err != nil {
		return nil, err
	}
	// From here on the wait may be long: let go of the bytes.
	req.Batches, req.Records = nil, nil
	result, err := s.settle(ctx, ticket)
	s.metrics.answered(ctx, level, f, result, err, s.now().Sub(start))
	if err != nil {
		return nil, err
	}
	return appendResponse(p, result), nil
}

// settle waits for a written append's level, bounded, so that the caller is told
// the offsets while it still listens.
func (s *Service) settle(ctx context.Context, ticket Ticket) (replica.AppendResult, error) {
	ctx, cancel := answerWithin(ctx, s.cfg.AppendMaxWait.Std())
	defer cancel()
	return ticket.Wait(ctx)
}

// batchLimit is a topic's max.batch.bytes.
func (s *Service) batchLimit(topic string) int64 {
	if t, ok := s.replicas.Cluster().Topic(topic); ok {
		return t.Config.MaxBatchBytes
	}
	return topicconfig.Default().MaxBatchBytes // deleted since the look-up: the append will say so
}

func (s *Service) bufferFull() error {
	return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "broker",
		"bytes of batches that wait to be written", s.cfg.AppendBufferBytes.Bytes(), soonRetry)
}

func appendResponse(p Partition, r replica.AppendResult) *brokerv1.AppendResponse {
	resp := &brokerv1.AppendResponse{
		TopicId: p.TopicID(), BaseOffset: r.Base, EndOffset: r.End,
		Leadership: leadershipToProto(r.Leadership), Levels: levelsToProto(r.Levels), Duplicate: r.Duplicate,
	}
	if !r.AppendTime.IsZero() {
		resp.AppendTime = timestamppb.New(r.AppendTime)
	}
	return resp
}
