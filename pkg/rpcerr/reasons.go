package rpcerr

import (
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// Leader is what a server knows about a partition's leader. Without an Address
// the id is unknown, and so is an epoch of 0.
type Leader struct {
	ID      int32
	Address string
	Epoch   int32
}

// InvalidField reports a malformed request. More fields can be added with WithField.
func InvalidField(field, description string) *Error {
	return New(codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD, "%s: %s", field, description).
		WithField(field, description)
}

// InvalidFields reports several malformed fields; violations must not be empty.
func InvalidFields(violations []FieldViolation) *Error {
	e := InvalidField(violations[0].Field, violations[0].Description)
	if more := len(violations) - 1; more > 0 {
		e.Message += fmt.Sprintf(" (and %d more)", more)
	}
	e.Violations = violations
	return e
}

// CorruptBatch reports that the batch in field fails its checks; nothing was stored.
func CorruptBatch(field, description string) *Error {
	return New(codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_CORRUPT_BATCH, "%s: %s", field, description).
		WithField(field, description)
}

// BatchTooLarge reports that the batch in field has size bytes where limit are
// allowed.
func BatchTooLarge(field string, size, limit int64) *Error {
	text := fmt.Sprintf("has %d bytes: at most %d are allowed", size, limit)
	return New(codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "%s %s", field, text).
		With("size", size).With("limit", limit).WithField(field, text)
}

// Unsupported reports that the request asks for a feature that isn't there.
func Unsupported(field, feature string) *Error {
	text := feature + " is not supported"
	return New(codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_UNSUPPORTED, "%s: %s", field, text).
		With("feature", feature).WithField(field, text)
}

// UnknownTopicOrPartition reports that name, a topic's or a partition's, does
// not exist.
func UnknownTopicOrPartition(name string) *Error {
	return NotFound(errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION, "topic-partition", name)
}

// NotFound reports that some other thing is absent.
func NotFound(reason errorsv1.ErrorReason, kind, name string) *Error {
	return New(codes.NotFound, reason, "%s %s does not exist", kind, name).WithResource(kind, name)
}

// TopicExists reports that a topic of this name exists, with this id.
func TopicExists(name, topicID string) *Error {
	return New(codes.AlreadyExists, errorsv1.ErrorReason_ERROR_REASON_TOPIC_EXISTS, "topic %s exists already", name).
		With("topic_id", topicID).WithResource("topic", name)
}

// NotLeader reports that this broker does not lead the partition: resolve the
// leader again, then retry.
func NotLeader(partition string, leader Leader) *Error {
	e := New(codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER, "this broker does not lead %s", partition)
	if leader.Address != "" {
		e.With("leader_id", leader.ID).With("leader_address", leader.Address)
	}
	if leader.Address != "" || leader.Epoch > 0 {
		e.With("leader_epoch", leader.Epoch)
	}
	return e
}

// NotController reports that the controller is elsewhere; address is empty if
// unknown.
func NotController(address string) *Error {
	e := New(codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER, "this metadata replica is not the controller")
	if address != "" {
		e.With("controller_address", address)
	}
	return e
}

// FencedLeaderEpoch reports that the request's fence is older than the
// partition's.
func FencedLeaderEpoch(partition string, stated, current int32) *Error {
	return New(codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_FENCED_LEADER_EPOCH,
		"leader epoch %d of %s is fenced", stated, partition).
		With("stated", stated).With("leader_epoch", current).
		WithPrecondition("FENCE", partition, fmt.Sprintf("the leader epoch must be %d", current))
}

// UnknownLeaderEpoch reports that the request's leader epoch is newer than this
// server knows; it will learn.
func UnknownLeaderEpoch(partition string, stated, known int32, retry time.Duration) *Error {
	return New(codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_LEADER_EPOCH,
		"leader epoch %d of %s is not known here yet", stated, partition).
		With("stated", stated).With("leader_epoch", known).WithRetry(retry)
}

// IllegalTransition reports that the change isn't allowed in the present state
// of subject; required completes "needs …".
func IllegalTransition(subject, state, required string) *Error {
	return New(codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_ILLEGAL_TRANSITION,
		"%s is %s: this needs %s", subject, state, required).
		With("state", state).WithPrecondition("STATE", subject, "needs "+required)
}

// FailedPrecondition makes a FAILED_PRECONDITION with the given reason: for
// STALE_BROKER_EPOCH, CLUSTER_MISMATCH, INCARNATION_MISMATCH, RLM_EPOCH_CLOSED
// and the like, whose facts the caller adds.
func FailedPrecondition(reason errorsv1.ErrorReason, subject, format string, args ...any) *Error {
	e := New(codes.FailedPrecondition, reason, format, args...)
	return e.WithPrecondition(ReasonName(reason), subject, e.Message)
}

// Mismatch is a [FailedPrecondition] about two values that must be equal.
func Mismatch(reason errorsv1.ErrorReason, subject string, expected, actual any) *Error {
	return FailedPrecondition(reason, subject, "%s is %v here, not %v", subject, expected, actual).
		With("expected", expected).With("actual", actual)
}

// Conflict reports that somebody else changed subject first: read again, then
// retry.
func Conflict(subject string) *Error {
	return New(codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_CONFLICT, "%s was changed by somebody else", subject)
}

// OffsetOutOfRange reports that the offset is not one that may be asked for:
// those are logStart to logEnd, which is the next one to be written, both
// included. The high watermark is exclusive.
func OffsetOutOfRange(partition string, offset, logStart, highWatermark, logEnd int64) *Error {
	return New(codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_OFFSET_OUT_OF_RANGE,
		"offset %d of %s is outside [%d, %d]", offset, partition, logStart, logEnd).
		With("log_start", logStart).With("high_watermark", highWatermark).With("log_end", logEnd)
}

// MetadataOffsetOutOfRange reports that the metadata log holds only
// [logStart, logEnd).
func MetadataOffsetOutOfRange(offset, logStart, logEnd int64) *Error {
	return New(codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_METADATA_OFFSET_OUT_OF_RANGE,
		"metadata offset %d is outside [%d, %d)", offset, logStart, logEnd).
		With("log_start", logStart).With("log_end", logEnd)
}

// LogTruncated reports that the caller's position was cut; its branch is common
// with the log up to forkPoint, exclusive.
func LogTruncated(partition string, forkPoint int64) *Error {
	return New(codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED,
		"%s was cut: the branch read so far ends at %d", partition, forkPoint).
		With("fork_point", forkPoint)
}

// Expired reports that the offset is below the log start.
func Expired(partition string, offset, logStart int64) *Error {
	return New(codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_EXPIRED,
		"offset %d of %s has expired: the log starts at %d", offset, partition, logStart).
		With("log_start", logStart)
}

// LevelUnreachable reports that the topic can't reach level; nothing was stored.
func LevelUnreachable(topic, level, levels string) *Error {
	return FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_LEVEL_UNREACHABLE, topic,
		"level %s can't be reached on %s, only %s", level, topic, levels).
		With("level", level).With("levels", levels)
}

// SequenceGap reports that the batch doesn't follow what is stored of its producer.
// lastSequence and lastOffset are -1 if nothing is.
func SequenceGap(partition string, lastSequence int32, lastOffset, epochStart int64) *Error {
	return FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP, partition,
		"the last sequence stored in %s is %d", partition, lastSequence).
		With("last_sequence", lastSequence).With("last_offset", lastOffset).With("epoch_start", epochStart)
}

// ProducerFenced reports that this producer id or epoch may not write here any
// more.
func ProducerFenced(partition string, lastSequence int32, lastOffset int64) *Error {
	return FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_PRODUCER_FENCED, partition,
		"the producer may not write to %s any more", partition).
		With("last_sequence", lastSequence).With("last_offset", lastOffset)
}

// Exhausted makes a RESOURCE_EXHAUSTED: for LIMIT_EXCEEDED, BACKLOG_FULL and
// TOO_MANY_PRODUCERS. limit is in the unit that what names.
func Exhausted(reason errorsv1.ErrorReason, subject, what string, limit int64, retry time.Duration) *Error {
	text := fmt.Sprintf("%s: the limit is %d", what, limit)
	return New(codes.ResourceExhausted, reason, "%s: %s", subject, text).
		With("limit", limit).WithRetry(retry).WithQuota(subject, text)
}

// Unavailable makes an UNAVAILABLE that changed nothing: for NOT_READY,
// RECOVERING, OBJECT_STORE_UNREACHABLE, METADATA_UNREACHABLE and
// NO_REMOTE_LOG_MANAGER.
func Unavailable(reason errorsv1.ErrorReason, retry time.Duration, format string, args ...any) *Error {
	return New(codes.Unavailable, reason, format, args...).WithRetry(retry)
}

// Draining reports that the server is stopping: go elsewhere.
func Draining() *Error {
	return Unavailable(errorsv1.ErrorReason_ERROR_REASON_DRAINING, time.Second, "the server is shutting down")
}

// OutcomeUnknown reports that the append of [base, end) failed after it was in
// the leader's log; AwaitDurability settles it. levels are those reached so far.
func OutcomeUnknown(partition string, base, end int64, incarnation uint32, leaderEpoch int32, levels string) *Error {
	return New(codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN,
		"[%d, %d) of %s is in the leader's log but not yet as durable as asked for", base, end, partition).
		With("base_offset", base).With("end_offset", end).
		With("incarnation", incarnation).With("leader_epoch", leaderEpoch).With("levels", levels)
}

// ChainMismatch reports that a peer holds other bytes below offset. Hashes are printed in
// hexadecimal.
func ChainMismatch(partition string, offset int64, expected, actual [16]byte) *Error {
	return New(codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_CHAIN_MISMATCH,
		"the logs of %s differ below %d", partition, offset).
		With("offset", offset).With("expected", fmt.Sprintf("%x", expected)).With("actual", fmt.Sprintf("%x", actual))
}

// DataDamaged reports that stored bytes are damaged. where is an object or a file; the
// damage is in the length bytes from position, at or after the record offset. A length
// of 0 says that where itself is missing.
func DataDamaged(where string, offset, position, length int64) *Error {
	if length == 0 {
		return New(codes.DataLoss, errorsv1.ErrorReason_ERROR_REASON_DATA_DAMAGED, "%s is missing", where).
			With("where", where).With("offset", offset).With("position", position).With("length", length)
	}
	return New(codes.DataLoss, errorsv1.ErrorReason_ERROR_REASON_DATA_DAMAGED,
		"%s is damaged in bytes [%d, %d)", where, position, position+length).
		With("where", where).With("offset", offset).With("position", position).With("length", length)
}

// Internal reports a defect. The client learns only a fixed sentence; err stays here.
func Internal(err error) *Error {
	return New(codes.Internal, errorsv1.ErrorReason_ERROR_REASON_INTERNAL, internalMessage).WithCause(err)
}
