package api

import (
	"errors"
	"fmt"
	"time"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// Retry hints where the domain error has none.
const (
	soonRetry    = 100 * time.Millisecond
	backlogRetry = time.Second
)

// target names the partition that a call is about.
type target struct {
	topic     string
	partition int32
}

func (t target) String() string { return fmt.Sprintf("%s/%d", t.topic, t.partition) }

// rpcError turns a domain error into the one to answer with; p may be nil. It is
// the only place that knows which reason and which facts belong to which error.
// An error that it does not know stays as it is: the server logs it and answers
// INTERNAL.
func rpcError(t target, p Partition, err error) error {
	if err == nil {
		return nil
	}
	if e := (*rpcerr.Error)(nil); errors.As(err, &e) {
		return err
	}
	if e := appendError(t, err); e != nil {
		return e
	}
	if e := positionError(t, p, err); e != nil {
		return e
	}
	if e := availabilityError(t, err); e != nil {
		return e
	}
	return err
}

// appendError maps what only appends meet.
func appendError(t target, err error) *rpcerr.Error {
	var (
		broken      *replica.PipelineBrokenError
		unknown     *replica.OutcomeUnknownError
		over        *replica.FencedEpochError
		large       *replica.BatchTooLargeError
		invalid     *replica.InvalidBatchError
		unreachable *replica.LevelUnreachableError
		backlog     *replica.BacklogFullError
		busy        *replica.TooManyRequestsError
		gap         *replica.SequenceGapError
		fenced      *replica.ProducerFencedError
		producers   *replica.TooManyProducersError
	)
	switch {
	case errors.As(err, &broken) && errors.As(broken.Err, &unknown):
		// The facts are those of an earlier append: of this one nothing was stored.
		return rpcerr.NotLeader(t.String(), rpcerr.Leader{}).WithCause(err)
	case errors.As(err, &broken) && errors.As(broken.Err, &over):
		// The caller named no epoch, its stream is bound to one that is over:
		// another stream, to whoever leads now, is the remedy.
		return rpcerr.NotLeader(t.String(), rpcerr.Leader{Epoch: over.Current}).WithCause(err)
	case errors.As(err, &unknown):
		e := rpcerr.OutcomeUnknown(t.String(), unknown.Base, unknown.End,
			unknown.Leadership.Incarnation, unknown.Leadership.LeaderEpoch, levelNames(unknown.Levels))
		if unknown.Err != nil {
			e.Message += ": " + unknown.Err.Error()
		}
		return e.WithCause(err)
	case errors.As(err, &large):
		return rpcerr.BatchTooLarge("batches", large.Size, large.Limit)
	case errors.As(err, &invalid):
		return rpcerr.InvalidField(fmt.Sprintf("batches[%d]", invalid.Index), invalid.Reason)
	case errors.As(err, &unreachable):
		return rpcerr.LevelUnreachable(t.topic, levelName(unreachable.Level), levelNames(unreachable.Levels))
	case errors.As(err, &backlog):
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_BACKLOG_FULL, t.String(),
			"bytes of the "+backlog.Scope+" that are not in the bucket yet", backlog.Limit, backlogRetry).
			With("scope", backlog.Scope).With("unuploaded", backlog.Unuploaded)
	case errors.As(err, &busy):
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, t.String(),
			"requests waiting for the partition", int64(busy.Limit), limitRetry)
	case errors.As(err, &gap):
		return rpcerr.SequenceGap(t.String(), gap.LastSequence, gap.LastOffset, gap.EpochStart)
	case errors.As(err, &fenced):
		e := rpcerr.ProducerFenced(t.String(), fenced.LastSequence, fenced.LastOffset)
		if fenced.Reason != "" {
			e.Message += ": " + fenced.Reason
		}
		return e
	case errors.As(err, &producers):
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_TOO_MANY_PRODUCERS, t.String(),
			"idempotent producers", int64(producers.Limit), backlogRetry)
	}
	return nil
}

// positionError maps what is wrong with an offset. All bounds are told, since
// whoever asked outside of them wants to know where to go on.
func positionError(t target, p Partition, err error) *rpcerr.Error {
	var (
		outside   *replica.OffsetOutOfRangeError
		expired   *replica.ExpiredError
		truncated *replica.TruncatedError
		damaged   *replica.DamagedError
	)
	switch {
	case errors.As(err, &outside):
		return rpcerr.OffsetOutOfRange(t.String(), outside.Offset, outside.LogStart, outside.HighWatermark, outside.LogEnd)
	case errors.As(err, &expired):
		e := rpcerr.Expired(t.String(), expired.Offset, expired.LogStart)
		if p != nil {
			o := p.Offsets()
			e.With("high_watermark", o.HighWatermark).With("log_end", o.LogEnd)
		}
		return e
	case errors.As(err, &truncated):
		return rpcerr.LogTruncated(t.String(), truncated.ForkPoint)
	case errors.As(err, &damaged):
		return rpcerr.DataDamaged(damaged.Where, damaged.Offset, damaged.Position, damaged.Length).WithCause(err)
	}
	return nil
}

// availabilityError maps who can't answer, and why.
func availabilityError(t target, err error) *rpcerr.Error {
	var (
		missing     *replica.UnknownPartitionError
		elsewhere   *replica.NotLeaderError
		epoch       *replica.FencedEpochError
		recovering  *replica.RecoveringError
		unavailable *replica.UnavailableError
	)
	switch {
	case errors.Is(err, replica.ErrStopped):
		return rpcerr.Draining().WithCause(err)
	case errors.As(err, &missing):
		name := missing.Topic
		if missing.Partition >= 0 {
			name = target{missing.Topic, missing.Partition}.String()
		}
		return rpcerr.UnknownTopicOrPartition(name)
	case errors.As(err, &elsewhere):
		return rpcerr.NotLeader(t.String(), rpcerr.Leader{ID: elsewhere.LeaderID, Address: elsewhere.Address, Epoch: elsewhere.Epoch})
	case errors.As(err, &epoch):
		if epoch.Expected > epoch.Current {
			return rpcerr.UnknownLeaderEpoch(t.String(), epoch.Expected, epoch.Current, soonRetry)
		}
		return rpcerr.FencedLeaderEpoch(t.String(), epoch.Expected, epoch.Current)
	case errors.As(err, &recovering):
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_RECOVERING, orSoon(recovering.Retry), "%s: %s", t, recovering.Error())
	case errors.As(err, &unavailable):
		// The reasons are named alike, so that replica needs no wire type.
		return rpcerr.Unavailable(rpcerr.ParseReason(unavailable.Reason.String()), orSoon(unavailable.Retry), "%s: %s", t, unavailable.Message).WithCause(err)
	}
	return nil
}

func orSoon(d time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return soonRetry
}

// batchError maps what package record says of batch i of a request.
func batchError(field string, err error) error {
	text := err.Error()
	var e *record.Error
	if !errors.As(err, &e) {
		return rpcerr.CorruptBatch(field, text)
	}
	switch {
	case errors.Is(err, record.ErrUnsupported):
		return rpcerr.Unsupported(field, fmt.Sprintf("%s %d of a record batch", e.Field, e.Got)).WithCause(err)
	case errors.Is(err, record.ErrTooLarge):
		return rpcerr.BatchTooLarge(field, e.Got, e.Want).WithCause(err)
	}
	return rpcerr.CorruptBatch(field, text).WithCause(err)
}
