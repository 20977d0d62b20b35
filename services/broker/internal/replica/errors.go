package replica

import (
	"errors"
	"fmt"
	"time"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/partition"
)

// ErrStopped is returned by calls on a broker that is stopping; nothing was
// stored (DRAINING).
var ErrStopped = errors.New("replica: the broker is stopping")

// UnknownPartitionError says that there is no such topic or partition
// (UNKNOWN_TOPIC_OR_PARTITION).
type UnknownPartitionError struct {
	Topic     string
	Partition int32 // -1 when the topic is unknown
}

func (e *UnknownPartitionError) Error() string {
	if e.Partition < 0 {
		return fmt.Sprintf("topic %s does not exist", e.Topic)
	}
	return fmt.Sprintf("topic %s has no partition %d", e.Topic, e.Partition)
}

// NotLeaderError says that this broker does not lead the partition; nothing was
// stored (NOT_LEADER).
type NotLeaderError struct {
	LeaderID int32  // 0 when there is none or it is unknown
	Address  string // of the leader, empty when unknown
	Epoch    int32  // leader epoch, 0 when unknown
}

func (e *NotLeaderError) Error() string {
	if e.LeaderID == 0 {
		return "this broker does not lead the partition, and no leader is known"
	}
	return fmt.Sprintf("this broker does not lead the partition, broker %d at %s does in epoch %d", e.LeaderID, e.Address, e.Epoch)
}

// FencedEpochError says that the append named another leader epoch than the
// current one; nothing was stored (FENCED_LEADER_EPOCH or, when the named one is
// newer, UNKNOWN_LEADER_EPOCH).
type FencedEpochError struct {
	Expected, Current int32
}

func (e *FencedEpochError) Error() string {
	return fmt.Sprintf("the leader epoch is %d, not %d", e.Current, e.Expected)
}

// RecoveringError says that this broker was elected and is not ready yet;
// nothing was stored (RECOVERING).
type RecoveringError struct {
	Reason string
	Retry  time.Duration // hint
	// Waited says that the call has waited for as long as is sensible.
	Waited bool
}

func (e *RecoveringError) Error() string { return "the leader is recovering: " + e.Reason }

// UnavailableError says that the call can't be answered now and that nothing
// was stored. Reason is the name of the ErrorReason to answer with.
type UnavailableError struct {
	Reason  UnavailableReason
	Message string
	Retry   time.Duration // hint
	Err     error         // cause, may be nil
}

// UnavailableReason says what is missing.
type UnavailableReason uint8

// The reasons, each an ErrorReason of the same name.
const (
	NotReady UnavailableReason = iota + 1
	ObjectStoreUnreachable
	MetadataUnreachable
	NoRemoteLogManager
)

// String is the name of the ErrorReason, without its prefix.
func (r UnavailableReason) String() string {
	switch r {
	case ObjectStoreUnreachable:
		return "OBJECT_STORE_UNREACHABLE"
	case MetadataUnreachable:
		return "METADATA_UNREACHABLE"
	case NoRemoteLogManager:
		return "NO_REMOTE_LOG_MANAGER"
	default:
		return "NOT_READY"
	}
}

func (e *UnavailableError) Error() string {
	if e.Err != nil {
		return e.Message + ": " + e.Err.Error()
	}
	return e.Message
}

func (e *UnavailableError) Unwrap() error { return e.Err }

// BatchTooLargeError refuses a batch above max.batch.bytes; nothing was stored
// (BATCH_TOO_LARGE).
type BatchTooLargeError struct{ Size, Limit int64 }

func (e *BatchTooLargeError) Error() string {
	return fmt.Sprintf("a batch has %d bytes, at most %d are allowed", e.Size, e.Limit)
}

// InvalidBatchError refuses batches that can't be appended as they are; nothing
// was stored (INVALID_FIELD).
type InvalidBatchError struct {
	Index  int // of the batch in the input
	Reason string
	Err    error // may be nil
}

func (e *InvalidBatchError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("batch %d %s: %v", e.Index, e.Reason, e.Err)
	}
	return fmt.Sprintf("batch %d %s", e.Index, e.Reason)
}

func (e *InvalidBatchError) Unwrap() error { return e.Err }

// LevelUnreachableError refuses a level that the topic can't reach, or that lies
// below its min.ack.level; nothing was stored (LEVEL_UNREACHABLE).
type LevelUnreachableError struct {
	Level  partition.Level
	Levels []partition.Level // that may be asked for
}

func (e *LevelUnreachableError) Error() string {
	return fmt.Sprintf("level %d can't be asked for here, only %v", e.Level, e.Levels)
}

// BacklogFullError refuses an append because too much of the log is not in the
// bucket yet; nothing was stored (BACKLOG_FULL).
type BacklogFullError struct {
	Scope             string // "partition" or "broker"
	Limit, Unuploaded int64  // bytes
}

func (e *BacklogFullError) Error() string {
	return fmt.Sprintf("%d bytes of the %s are not in the bucket yet, the limit is %d", e.Unuploaded, e.Scope, e.Limit)
}

// TooManyRequestsError refuses an append or a wait because the partition's
// queue is full; nothing was stored (LIMIT_EXCEEDED).
type TooManyRequestsError struct{ Limit int }

func (e *TooManyRequestsError) Error() string {
	return fmt.Sprintf("%d requests wait for this partition already", e.Limit)
}

// PipelineBrokenError refuses an append because an earlier one of the same
// pipeline was refused, or because the leadership that the pipeline is bound to
// is over; nothing was stored.
type PipelineBrokenError struct {
	Err error // what ended the pipeline
}

func (e *PipelineBrokenError) Error() string { return "the pipeline ended before: " + e.Err.Error() }

func (e *PipelineBrokenError) Unwrap() error { return e.Err }

// SequenceGapError says that a sequence is missing between the batch and what is
// stored of its producer; nothing was stored (SEQUENCE_GAP).
type SequenceGapError struct {
	LastSequence int32 // -1 when nothing is stored
	LastOffset   int64 // of the last record stored, -1 when nothing is
	EpochStart   int64 // first offset of the open leadership
}

func (e *SequenceGapError) Error() string {
	return fmt.Sprintf("the last sequence stored of the producer is %d at offset %d", e.LastSequence, e.LastOffset)
}

// ProducerFencedError says that the producer's id or epoch may not write here
// any more; nothing was stored (PRODUCER_FENCED).
type ProducerFencedError struct {
	LastSequence int32 // -1 when nothing is stored
	LastOffset   int64 // of the last record stored, -1 when nothing is
	Reason       string
}

func (e *ProducerFencedError) Error() string { return "the producer may not write here: " + e.Reason }

// TooManyProducersError says that the partition keeps as many producers as it
// may; nothing was stored (TOO_MANY_PRODUCERS).
type TooManyProducersError struct{ Limit int }

func (e *TooManyProducersError) Error() string {
	return fmt.Sprintf("the partition has state of %d producers already", e.Limit)
}

// OutcomeUnknownError says that the records are in the leader's log but the
// level asked for was not reached: AwaitDurability settles it (OUTCOME_UNKNOWN).
// The same error tells that the local write itself failed.
type OutcomeUnknownError struct {
	Base, End  int64
	Leadership lineage.Leadership
	Levels     []partition.Level // reached so far
	Err        error             // why waiting ended
}

func (e *OutcomeUnknownError) Error() string {
	return fmt.Sprintf("[%d, %d) is appended but not as durable as asked for: %v", e.Base, e.End, e.Err)
}

func (e *OutcomeUnknownError) Unwrap() error { return e.Err }

// OffsetOutOfRangeError says that an offset is not in the log
// (OFFSET_OUT_OF_RANGE).
type OffsetOutOfRangeError struct {
	Offset, LogStart, HighWatermark, LogEnd int64
}

func (e *OffsetOutOfRangeError) Error() string {
	return fmt.Sprintf("offset %d is outside of [%d, %d], the last of which is the next to be written", e.Offset, e.LogStart, e.LogEnd)
}

// TruncatedError says that records were cut: their branch is common up to the
// fork point, exclusive (LOG_TRUNCATED).
type TruncatedError struct{ ForkPoint int64 }

func (e *TruncatedError) Error() string {
	return fmt.Sprintf("the log was cut, the branch is common up to %d", e.ForkPoint)
}

// ExpiredError says that records lie below the log start (EXPIRED).
type ExpiredError struct{ Offset, LogStart int64 }

func (e *ExpiredError) Error() string {
	return fmt.Sprintf("offset %d has expired, the log starts at %d", e.Offset, e.LogStart)
}

// DamagedError says that no intact copy of committed bytes could be found
// (DATA_DAMAGED).
type DamagedError struct {
	Where  string // file or object
	Offset int64
	// Position and Length are the damaged bytes; a Length of 0 says that the
	// whole is missing.
	Position, Length int64
	Err              error
}

func (e *DamagedError) Error() string {
	if e.Length == 0 {
		return fmt.Sprintf("%s is missing, it held offset %d: %v", e.Where, e.Offset, e.Err)
	}
	return fmt.Sprintf("%s is damaged at offset %d, bytes [%d, %d): %v", e.Where, e.Offset, e.Position, e.Position+e.Length, e.Err)
}

func (e *DamagedError) Unwrap() error { return e.Err }
