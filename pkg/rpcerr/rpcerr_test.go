package rpcerr_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// wire sends err through a status and its bytes, as gRPC does.
func wire(t *testing.T, err error) error {
	t.Helper()
	st, _ := rpcerr.ToStatus(err)
	data, merr := proto.Marshal(st.Proto())
	require.NoError(t, merr)
	back := st.Proto()
	proto.Reset(back)
	require.NoError(t, proto.Unmarshal(data, back))
	return status.FromProto(back).Err()
}

func TestConstructorsAndTheWire(t *testing.T) {
	tests := []struct {
		err    *rpcerr.Error
		code   codes.Code
		reason string
		meta   map[string]string
		react  rpcerr.Reaction
		wrote  bool // may have been executed
	}{
		{rpcerr.InvalidField("name", "must not be empty"), codes.InvalidArgument, "INVALID_FIELD", nil, rpcerr.Fail, false},
		{rpcerr.CorruptBatch("batches[0]", "wrong CRC"), codes.InvalidArgument, "CORRUPT_BATCH", nil, rpcerr.Fail, false},
		{rpcerr.BatchTooLarge("batches[0]", 10, 5), codes.InvalidArgument, "BATCH_TOO_LARGE", map[string]string{"size": "10", "limit": "5"}, rpcerr.Fail, false},
		{rpcerr.Unsupported("batches[0]", "transactions"), codes.InvalidArgument, "UNSUPPORTED", map[string]string{"feature": "transactions"}, rpcerr.Fail, false},
		{rpcerr.UnknownTopicOrPartition("t-0"), codes.NotFound, "UNKNOWN_TOPIC_OR_PARTITION", nil, rpcerr.Fail, false},
		{rpcerr.TopicExists("t", "id1"), codes.AlreadyExists, "TOPIC_EXISTS", map[string]string{"topic_id": "id1"}, rpcerr.Fail, false},
		{rpcerr.NotLeader("t-0", rpcerr.Leader{ID: 3, Address: "b:1", Epoch: 7}), codes.Aborted, "NOT_LEADER", map[string]string{"leader_id": "3", "leader_address": "b:1", "leader_epoch": "7"}, rpcerr.Resolve, false},
		{rpcerr.NotLeader("t-0", rpcerr.Leader{}), codes.Aborted, "NOT_LEADER", nil, rpcerr.Resolve, false},
		{rpcerr.NotController("m:1"), codes.Aborted, "NOT_CONTROLLER", map[string]string{"controller_address": "m:1"}, rpcerr.Resolve, false},
		{rpcerr.FencedLeaderEpoch("t-0", 3, 5), codes.FailedPrecondition, "FENCED_LEADER_EPOCH", map[string]string{"stated": "3", "leader_epoch": "5"}, rpcerr.Fail, false},
		{rpcerr.UnknownLeaderEpoch("t-0", 9, 5, time.Second), codes.Unavailable, "UNKNOWN_LEADER_EPOCH", map[string]string{"stated": "9", "leader_epoch": "5"}, rpcerr.Retry, false},
		{rpcerr.IllegalTransition("t-0", "open", "a fence"), codes.FailedPrecondition, "ILLEGAL_TRANSITION", map[string]string{"state": "open"}, rpcerr.Fail, false},
		{rpcerr.Mismatch(errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, "cluster id", "a", "b"), codes.FailedPrecondition, "CLUSTER_MISMATCH", map[string]string{"expected": "a", "actual": "b"}, rpcerr.Fail, false},
		{rpcerr.Conflict("topic t"), codes.Aborted, "CONFLICT", nil, rpcerr.Resolve, false},
		{rpcerr.OffsetOutOfRange("t-0", 99, 5, 8, 9), codes.OutOfRange, "OFFSET_OUT_OF_RANGE", map[string]string{"log_start": "5", "high_watermark": "8", "log_end": "9"}, rpcerr.Fail, false},
		{rpcerr.MetadataOffsetOutOfRange(99, 5, 9), codes.OutOfRange, "METADATA_OFFSET_OUT_OF_RANGE", map[string]string{"log_start": "5", "log_end": "9"}, rpcerr.Fail, false},
		{rpcerr.LogTruncated("t-0", 42), codes.OutOfRange, "LOG_TRUNCATED", map[string]string{"fork_point": "42"}, rpcerr.Fail, false},
		{rpcerr.Expired("t-0", 3, 5), codes.OutOfRange, "EXPIRED", map[string]string{"log_start": "5"}, rpcerr.Fail, false},
		{rpcerr.LevelUnreachable("t", "MIRRORED", "LEADER, OBJECT"), codes.FailedPrecondition, "LEVEL_UNREACHABLE", map[string]string{"level": "MIRRORED", "levels": "LEADER, OBJECT"}, rpcerr.Fail, false},
		{rpcerr.SequenceGap("t-0", -1, -1, 7), codes.FailedPrecondition, "SEQUENCE_GAP", map[string]string{"last_sequence": "-1", "last_offset": "-1", "epoch_start": "7"}, rpcerr.Fail, false},
		{rpcerr.ProducerFenced("t-0", 4, 10), codes.FailedPrecondition, "PRODUCER_FENCED", map[string]string{"last_sequence": "4", "last_offset": "10"}, rpcerr.Fail, false},
		{rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_BACKLOG_FULL, "t-0", "bytes not uploaded", 7, time.Second), codes.ResourceExhausted, "BACKLOG_FULL", map[string]string{"limit": "7"}, rpcerr.Retry, false},
		{rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_RECOVERING, time.Second, "recovering"), codes.Unavailable, "RECOVERING", nil, rpcerr.Retry, false},
		{rpcerr.Draining(), codes.Unavailable, "DRAINING", nil, rpcerr.Retry, true},
		{rpcerr.OutcomeUnknown("t-0", 5, 8, 1<<31-1, 3, "LEADER"), codes.Unavailable, "OUTCOME_UNKNOWN", map[string]string{"base_offset": "5", "end_offset": "8", "incarnation": "2147483647", "leader_epoch": "3", "levels": "LEADER"}, rpcerr.Settle, true},
		{rpcerr.ChainMismatch("t-0", 5, [16]byte{0xab}, [16]byte{0xcd}), codes.Aborted, "CHAIN_MISMATCH", map[string]string{"offset": "5", "expected": "ab" + strings.Repeat("0", 30), "actual": "cd" + strings.Repeat("0", 30)}, rpcerr.Resolve, false},
		{rpcerr.DataDamaged("seg1", 5, 10, 3), codes.DataLoss, "DATA_DAMAGED", map[string]string{"where": "seg1", "offset": "5", "position": "10", "length": "3"}, rpcerr.Fail, false},
		{rpcerr.Internal(errors.New("secret detail")), codes.Internal, "INTERNAL", nil, rpcerr.Fail, true},
	}
	for _, tt := range tests {
		t.Run(tt.reason, func(t *testing.T) {
			var err error = tt.err
			got, ok := rpcerr.From(wire(t, fmt.Errorf("handler: %w", err)))
			require.True(t, ok)
			assert.Equal(t, tt.code, got.Code)
			assert.Equal(t, tt.reason, rpcerr.ReasonName(got.Reason))
			assert.Equal(t, tt.meta, nilIfEmpty(got.Metadata))
			assert.Equal(t, tt.err.Message, got.Message)
			assert.Equal(t, tt.err.RetryDelay, got.RetryDelay)
			assert.Equal(t, tt.err.Violations, got.Violations)
			assert.Equal(t, tt.err.Preconditions, got.Preconditions)
			assert.Equal(t, tt.err.Resource, got.Resource)
			assert.Equal(t, tt.err.Quotas, got.Quotas)
			assert.Equal(t, tt.react, rpcerr.React(got), "reaction")
			assert.Equal(t, tt.wrote, rpcerr.Executed(got), "executed")
			// The kinds of detail that belong to a code are never missing.
			switch got.Code {
			case codes.InvalidArgument:
				assert.NotEmpty(t, got.Violations)
			case codes.FailedPrecondition:
				assert.NotEmpty(t, got.Preconditions)
			case codes.NotFound, codes.AlreadyExists:
				assert.NotNil(t, got.Resource)
			case codes.ResourceExhausted:
				assert.NotEmpty(t, got.Quotas)
				assert.Positive(t, got.RetryDelay)
			case codes.Unavailable:
				if got.Reason != errorsv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN {
					assert.Positive(t, got.RetryDelay)
				}
			}
		})
	}
}

func nilIfEmpty(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	return m
}

func TestEveryReasonHasAName(t *testing.T) {
	for n := range errorsv1.ErrorReason_name {
		r := errorsv1.ErrorReason(n)
		assert.Equal(t, r, rpcerr.ParseReason(rpcerr.ReasonName(r)))
		assert.False(t, strings.HasPrefix(rpcerr.ReasonName(r), "ERROR_REASON"))
	}
	assert.Equal(t, errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED, rpcerr.ParseReason("SOMETHING_NEW"))
}

func TestUnmappedErrorsTellTheClientNothing(t *testing.T) {
	original := errors.New("open /data/secret: permission denied")
	st, mapped := rpcerr.ToStatus(original)
	assert.False(t, mapped)
	assert.Equal(t, codes.Internal, st.Code())
	assert.NotContains(t, st.String()+fmt.Sprint(st.Proto()), "secret")
	// The cause stays visible to this process only.
	require.ErrorIs(t, rpcerr.Internal(original), original)
}

func TestContextErrorsPassThrough(t *testing.T) {
	for err, code := range map[error]codes.Code{context.Canceled: codes.Canceled, context.DeadlineExceeded: codes.DeadlineExceeded} {
		st, mapped := rpcerr.ToStatus(fmt.Errorf("read: %w", err))
		assert.True(t, mapped)
		assert.Equal(t, code, st.Code())
		back, ok := rpcerr.From(wire(t, err))
		require.True(t, ok)
		require.ErrorIs(t, back, err)
		assert.Equal(t, rpcerr.Fail, rpcerr.React(back))
		local, ok := rpcerr.From(err)
		require.True(t, ok)
		assert.Equal(t, code, local.Code)
	}
}

func TestForeignErrors(t *testing.T) {
	_, ok := rpcerr.From(nil)
	assert.False(t, ok)
	_, ok = rpcerr.From(errors.New("disk"))
	assert.False(t, ok)
	assert.Equal(t, rpcerr.Fail, rpcerr.React(errors.New("disk")))

	e, ok := rpcerr.From(fmt.Errorf("dial: %w", status.Error(codes.Unavailable, "connection refused")))
	require.True(t, ok)
	assert.Equal(t, errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED, e.Reason)
	assert.Equal(t, rpcerr.Retry, rpcerr.React(e))
	assert.True(t, rpcerr.Executed(e), "a bare UNAVAILABLE doesn't say that the call wasn't executed (B064)")

	// gRPC's own answer to an oversized message must not be retried.
	assert.Equal(t, rpcerr.Fail, rpcerr.React(status.Error(codes.ResourceExhausted, "received message larger than max")))

	other, err := status.New(codes.Aborted, "x").WithDetails(&errdetails.ErrorInfo{Reason: "NOT_LEADER", Domain: "other.example"})
	require.NoError(t, err)
	e, _ = rpcerr.From(other.Err())
	assert.Equal(t, errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED, e.Reason, "only our domain's reasons count")
	st, mapped := rpcerr.ToStatus(other.Err())
	assert.True(t, mapped)
	assert.Equal(t, codes.Aborted, st.Code())
}

func TestErrorsStaySmall(t *testing.T) {
	huge := strings.Repeat("é", 100_000)
	e := rpcerr.InvalidField("name", huge).With("value", huge+"\xff").WithResource("topic", huge)
	for i := range 1000 {
		e.WithField(fmt.Sprint(i), huge).With(fmt.Sprint(i), "x")
	}
	data, err := proto.Marshal(e.GRPCStatus().Proto())
	require.NoError(t, err)
	assert.Less(t, len(data), 64<<10)
	back, ok := rpcerr.From(wire(t, e))
	require.True(t, ok)
	assert.LessOrEqual(t, len(back.Message), rpcerr.MaxText)
	assert.True(t, utf8.ValidString(back.Message))
}

func TestInvalidUTF8Survives(t *testing.T) {
	back, ok := rpcerr.From(wire(t, rpcerr.InvalidField("name", "bad \xff byte").With("k", "\xfe")))
	require.True(t, ok)
	assert.Equal(t, "name: bad \uFFFD byte", back.Message)
}

func TestAnErrorIsNeverOK(t *testing.T) {
	assert.Equal(t, codes.Internal, (&rpcerr.Error{}).GRPCStatus().Code())
	st, mapped := rpcerr.ToStatus(nil)
	assert.True(t, mapped)
	assert.Equal(t, codes.OK, st.Code())
}

func TestFactsAndClassifier(t *testing.T) {
	back, _ := rpcerr.From(wire(t, rpcerr.OffsetOutOfRange("t-0", 99, 5, 8, 9)))
	n, ok := back.Int("log_end")
	assert.True(t, ok)
	assert.Equal(t, int64(9), n)
	_, ok = back.Int("nothing")
	assert.False(t, ok)
	assert.True(t, rpcerr.Has(back, errorsv1.ErrorReason_ERROR_REASON_OFFSET_OUT_OF_RANGE))

	v := rpcerr.Idempotent(wire(t, rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, 3*time.Second, "x")))
	assert.True(t, v.Retry)
	assert.Equal(t, 3*time.Second, v.After)
	assert.False(t, rpcerr.Idempotent(wire(t, rpcerr.OutcomeUnknown("t-0", 1, 2, 3, 4, "LEADER"))).Retry)

	multi := rpcerr.InvalidFields([]rpcerr.FieldViolation{{Field: "a", Description: "x"}, {Field: "b", Description: "y"}})
	assert.Equal(t, "a: x (and 1 more)", multi.Message)
	assert.Len(t, multi.Violations, 2)
}

// What people read: the end of the log may be asked for, and what is missing has
// no bytes.
func TestTextsOfPositions(t *testing.T) {
	require.Contains(t, rpcerr.OffsetOutOfRange("t-0", 99, 5, 8, 9).Error(), "offset 99 of t-0 is outside [5, 9]")
	require.Contains(t, rpcerr.DataDamaged("object c/wal/x", 5, 10, 3).Error(), "object c/wal/x is damaged in bytes [10, 13)")
	require.Contains(t, rpcerr.DataDamaged("object c/wal/x", 5, 0, 0).Error(), "object c/wal/x is missing")
}
