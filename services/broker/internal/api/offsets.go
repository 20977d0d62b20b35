package api

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// ListOffsets implements LogService.
func (s *Service) ListOffsets(ctx context.Context, req *brokerv1.ListOffsetsRequest) (resp *brokerv1.ListOffsetsResponse, err error) {
	defer func() { s.metrics.failed(ctx, "ListOffsets", err) }()
	if err := checkListOffsets(req); err != nil {
		return nil, err
	}
	t := target{req.GetTopic(), req.GetPartition()}
	p, err := s.withLeader(ctx, t, 0, func(p Partition) (err error) {
		resp, err = s.listHere(ctx, p, req)
		return err
	})
	if leader, ok := s.leaderFor(ctx, err); ok {
		return forwardUnary(ctx, s, "ListOffsets", leader, reads, queryBound, func(ctx context.Context, c brokerv1.LogServiceClient, opts ...grpc.CallOption) (*brokerv1.ListOffsetsResponse, error) {
			return c.ListOffsets(ctx, req, opts...)
		})
	}
	if err != nil {
		return nil, rpcError(t, p, err)
	}
	return resp, nil
}

func checkListOffsets(req *brokerv1.ListOffsetsRequest) error {
	var v violations
	v.target(req.GetTopic(), req.GetPartition())
	switch k := req.GetSpec().(type) {
	case *brokerv1.ListOffsetsRequest_At:
		_, known := brokerv1.OffsetSpec_name[int32(k.At)]
		v.check(known && k.At != brokerv1.OffsetSpec_OFFSET_SPEC_UNSPECIFIED, "at",
			fmt.Sprintf("%d is not a kind of offset: use OFFSET_SPEC_EARLIEST, _LATEST, _LOG_END or _MAX_TIMESTAMP", k.At))
	case *brokerv1.ListOffsetsRequest_Time:
		v.time("time", k.Time)
	default:
		v.check(false, "at", "is missing: give at, or time")
	}
	return v.err()
}

// time checks a point in time.
func (v *violations) time(field string, t *timestamppb.Timestamp) {
	v.check(t.CheckValid() == nil && t.GetSeconds() >= 0 && t.GetSeconds() <= math.MaxInt64/int64(time.Second), field,
		"is not a time from 1970 on")
}

// milliseconds is a point in time as records have it, rounded up: a record with
// that timestamp is not before the time asked for.
func milliseconds(t *timestamppb.Timestamp) int64 {
	return t.GetSeconds()*1000 + (int64(t.GetNanos())+int64(time.Millisecond)-1)/int64(time.Millisecond)
}

func (s *Service) listHere(ctx context.Context, p Partition, req *brokerv1.ListOffsetsRequest) (*brokerv1.ListOffsetsResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, queryBound)
	defer cancel()
	if req.GetConfirm() {
		if err := p.ConfirmLeadership(ctx); err != nil {
			return nil, err
		}
	}
	o := p.Offsets()
	if err := s.leads(o); err != nil {
		return nil, err
	}
	resp := &brokerv1.ListOffsetsResponse{
		Leadership: leadershipToProto(o.Fence.Leadership()), LogStartOffset: o.LogStart,
		HighWatermark: o.HighWatermark, LogEndOffset: o.LogEnd, Offset: o.HighWatermark,
	}
	byTime := func(offset, timestamp int64, found bool, err error) (*brokerv1.ListOffsetsResponse, error) {
		if err != nil {
			return nil, err
		}
		if found {
			// The high watermark may have moved on while records were searched.
			resp.Offset, resp.TimestampMs = offset, &timestamp
			resp.HighWatermark = max(resp.HighWatermark, offset+1)
			resp.LogEndOffset = max(resp.LogEndOffset, offset+1)
		}
		return resp, nil
	}
	if k, ok := req.GetSpec().(*brokerv1.ListOffsetsRequest_Time); ok {
		return byTime(p.OffsetForTime(ctx, milliseconds(k.Time)))
	}
	switch req.GetAt() {
	case brokerv1.OffsetSpec_OFFSET_SPEC_EARLIEST:
		resp.Offset = o.LogStart
	case brokerv1.OffsetSpec_OFFSET_SPEC_LOG_END:
		resp.Offset = o.LogEnd
	case brokerv1.OffsetSpec_OFFSET_SPEC_MAX_TIMESTAMP:
		return byTime(p.MaxTimestamp(ctx))
	}
	return resp, nil
}

// leads is nil when offsets are those of an open leadership of this broker:
// before that, the end of the log is not known (KIP-207).
func (s *Service) leads(o replica.Offsets) error {
	if o.Leading {
		return nil
	}
	if o.LeaderID == s.self {
		return &replica.RecoveringError{Reason: "its epoch is not open yet", Retry: soonRetry}
	}
	e := &replica.NotLeaderError{LeaderID: o.LeaderID, Epoch: o.Fence.LeaderEpoch}
	if b, ok := s.replicas.Cluster().Broker(o.LeaderID); ok && o.LeaderID != 0 {
		e.Address = b.Address
	}
	return e
}

// certain guards an error that says for ever what became of records. A leader that
// was deposed and does not know it yet would take a position on the new branch for
// one that was cut, or is out of range: before this broker says so the controller
// has to confirm that it still leads under the fence the error was found under
// (design review H8, invariant I11).
func (s *Service) certain(ctx context.Context, p Partition, fence partition.Fence, err error) error {
	var (
		truncated *replica.TruncatedError
		outside   *replica.OffsetOutOfRangeError
	)
	if !errors.As(err, &truncated) && !errors.As(err, &outside) {
		return err
	}
	ctx, cancel := answerWithin(ctx, confirmTimeout)
	defer cancel()
	if unconfirmed := p.ConfirmLeadership(ctx); unconfirmed != nil {
		return unconfirmed
	}
	if p.Offsets().Fence != fence {
		return &replica.RecoveringError{Reason: "its leadership has just changed", Retry: soonRetry}
	}
	return err
}

// confirmTimeout bounds the question to the controller.
const confirmTimeout = 5 * time.Second

// newer refuses a leadership that this broker has not heard of yet: it can't
// say anything about that one's records.
func newer(o replica.Offsets, l lineage.Leadership) error {
	if l.Incarnation == o.Fence.Incarnation && l.LeaderEpoch > o.Fence.LeaderEpoch {
		return &replica.FencedEpochError{Expected: l.LeaderEpoch, Current: o.Fence.LeaderEpoch}
	}
	return nil
}

// AwaitDurability implements LogService.
func (s *Service) AwaitDurability(ctx context.Context, req *brokerv1.AwaitDurabilityRequest) (resp *brokerv1.AwaitDurabilityResponse, err error) {
	defer func() { s.metrics.failed(ctx, "AwaitDurability", err) }()
	if err := checkAwait(req); err != nil {
		return nil, err
	}
	t := target{req.GetTopic(), req.GetPartition()}
	p, err := s.replicas.Lookup(t.topic, t.partition)
	if err == nil {
		resp, err = s.awaitHere(ctx, t, p, req)
	}
	if leader, ok := s.leaderFor(ctx, err); ok {
		return forwardUnary(ctx, s, "AwaitDurability", leader, reads, s.cfg.AwaitMaxWait.Std(), func(ctx context.Context, c brokerv1.LogServiceClient, opts ...grpc.CallOption) (*brokerv1.AwaitDurabilityResponse, error) {
			return c.AwaitDurability(ctx, req, opts...)
		})
	}
	if err != nil {
		return nil, rpcError(t, p, err)
	}
	return resp, nil
}

func checkAwait(req *brokerv1.AwaitDurabilityRequest) error {
	var v violations
	v.target(req.GetTopic(), req.GetPartition())
	v.check(req.GetEndOffset() > 0, "end_offset", fmt.Sprintf("is %d: give the end offset from the ack or from OUTCOME_UNKNOWN", req.GetEndOffset()))
	l := req.GetLeadership()
	v.check(l.GetIncarnation() != 0, "leadership", "is missing: give the leadership from the ack or from OUTCOME_UNKNOWN")
	v.check(l.GetLeaderEpoch() >= 0, "leadership.leader_epoch", fmt.Sprintf("is %d: epochs are not negative", l.GetLeaderEpoch()))
	v.level(req.GetLevel())
	v.check(req.GetLevel() != logv1.Level_LEVEL_UNSPECIFIED, "level", "is missing: name the level to wait for")
	return v.err()
}

func (s *Service) awaitHere(ctx context.Context, t target, p Partition, req *brokerv1.AwaitDurabilityRequest) (*brokerv1.AwaitDurabilityResponse, error) {
	if err := s.waits.enter(); err != nil {
		return nil, err
	}
	defer s.waits.leave()
	s.metrics.awaits.Add(ctx, 1)
	defer s.metrics.awaits.Add(ctx, -1)

	o := p.Offsets()
	if err := newer(o, leadershipFromProto(req.GetLeadership())); err != nil {
		return nil, err
	}
	drained, stop := s.drainContext(ctx)
	defer stop()
	wait, cancel := answerWithin(drained, s.cfg.AwaitMaxWait.Std())
	defer cancel()
	levels, err := p.Await(wait, req.GetEndOffset(), leadershipFromProto(req.GetLeadership()), partition.Level(req.GetLevel()))
	if err == nil {
		return &brokerv1.AwaitDurabilityResponse{Levels: levelsToProto(levels)}, nil
	}
	switch {
	case wait.Err() == nil:
		return nil, s.certain(ctx, p, o.Fence, err) // its own answer
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(context.Cause(drained), errDraining):
		return nil, rpcerr.Draining()
	}
	return nil, rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soonRetry,
		"%s has not reached level %s up to offset %d yet: wait again", t, levelName(partition.Level(req.GetLevel())), req.GetEndOffset()).WithCause(err)
}
