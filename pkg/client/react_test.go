package client

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

const reasonPrefix = "ERROR_REASON_"

func reasonOf(t *testing.T, name string) errorsv1.ErrorReason {
	t.Helper()
	n, ok := errorsv1.ErrorReason_value[reasonPrefix+name]
	require.True(t, ok, name)
	return errorsv1.ErrorReason(n)
}

func TestEveryReasonHasItsReaction(t *testing.T) {
	table := []struct {
		reason  string
		code    codes.Code
		produce reaction
		read    bool
	}{
		{"INVALID_FIELD", codes.InvalidArgument, giveUp, false},
		{"CORRUPT_BATCH", codes.InvalidArgument, giveUp, false},
		{"BATCH_TOO_LARGE", codes.InvalidArgument, giveUp, false},
		{"UNSUPPORTED", codes.FailedPrecondition, giveUp, false},
		{"UNKNOWN_TOPIC_OR_PARTITION", codes.NotFound, giveUp, false},
		{"TOPIC_EXISTS", codes.AlreadyExists, giveUp, false},
		{"NOT_LEADER", codes.Aborted, resolve, true},
		{"FENCED_LEADER_EPOCH", codes.FailedPrecondition, giveUp, false},
		{"UNKNOWN_LEADER_EPOCH", codes.Unavailable, resend, true},
		{"STALE_BROKER_EPOCH", codes.FailedPrecondition, giveUp, false},
		{"OFFSET_OUT_OF_RANGE", codes.OutOfRange, giveUp, false},
		{"LEVEL_UNREACHABLE", codes.FailedPrecondition, giveUp, false},
		{"SEQUENCE_GAP", codes.FailedPrecondition, giveUp, false},
		{"PRODUCER_FENCED", codes.FailedPrecondition, giveUp, false},
		{"TOO_MANY_PRODUCERS", codes.ResourceExhausted, giveUp, true},
		{"OUTCOME_UNKNOWN", codes.Unavailable, settle, false},
		{"LOG_TRUNCATED", codes.OutOfRange, giveUp, false},
		{"EXPIRED", codes.OutOfRange, giveUp, false},
		{"CHAIN_MISMATCH", codes.Aborted, resolve, true},
		{"DRAINING", codes.Unavailable, resolve, true},
		{"RECOVERING", codes.Unavailable, resend, true},
		{"OBJECT_STORE_UNREACHABLE", codes.Unavailable, resend, true},
		{"METADATA_UNREACHABLE", codes.Unavailable, resend, true},
		{"NO_REMOTE_LOG_MANAGER", codes.Unavailable, resend, true},
		{"BACKLOG_FULL", codes.ResourceExhausted, resend, true},
		{"NOT_CONTROLLER", codes.Aborted, resolve, true},
		{"CLUSTER_MISMATCH", codes.FailedPrecondition, giveUp, false},
		{"INCARNATION_MISMATCH", codes.FailedPrecondition, giveUp, false},
		{"RLM_EPOCH_CLOSED", codes.FailedPrecondition, giveUp, false},
		{"STALE_SEQUENCE", codes.FailedPrecondition, giveUp, false},
		{"DATA_DAMAGED", codes.DataLoss, giveUp, false},
		{"METADATA_OFFSET_OUT_OF_RANGE", codes.OutOfRange, giveUp, false},
		{"ILLEGAL_TRANSITION", codes.FailedPrecondition, giveUp, false},
		{"CONFLICT", codes.Aborted, resolve, true},
		{"LIMIT_EXCEEDED", codes.ResourceExhausted, resend, true},
		{"BROKER_ID_IN_USE", codes.FailedPrecondition, giveUp, false},
		{"METADATA_ROLLED_BACK", codes.FailedPrecondition, giveUp, false},
		{"NOT_READY", codes.Unavailable, resend, true},
		{"INTERNAL", codes.Internal, giveUp, false},
		{"SNAPSHOT_NOT_FOUND", codes.NotFound, giveUp, false},
		{"POSITION_OUT_OF_RANGE", codes.OutOfRange, giveUp, false},
	}
	seen := map[errorsv1.ErrorReason]bool{0: true}
	for _, row := range table {
		reason := reasonOf(t, row.reason)
		seen[reason] = true
		err := rpcerr.New(row.code, reason, "test")
		if row.code == codes.ResourceExhausted {
			err = err.WithRetry(time.Second)
		}
		wire := err.GRPCStatus().Err() // as it arrives
		require.Equal(t, row.produce.String(), reactToProduce(wire).String(), row.reason)
		require.Equal(t, row.read, reactToRead(wire), row.reason)
	}
	for n := range errorsv1.ErrorReason_name {
		require.True(t, seen[errorsv1.ErrorReason(n)], "%v is not in the table", errorsv1.ErrorReason(n))
	}
}

func TestReactionsWithoutAReason(t *testing.T) {
	for code, want := range map[codes.Code]reaction{
		codes.Unavailable: resolve, codes.DeadlineExceeded: resolve, codes.Canceled: resolve, codes.Aborted: resolve,
		codes.Unimplemented: giveUp, codes.Internal: giveUp, codes.ResourceExhausted: giveUp, codes.Unknown: giveUp,
	} {
		require.Equal(t, want.String(), reactToProduce(status.Error(code, "x")).String(), code.String())
	}
	require.Equal(t, resolve, reactToProduce(io.EOF))
	require.Equal(t, resolve, reactToProduce(errStalled))
	require.Equal(t, resolve, reactToProduce(errMoved))
	require.Equal(t, giveUp, reactToProduce(ErrClosed))
	require.Equal(t, giveUp, reactToProduce(io.ErrUnexpectedEOF))
	require.True(t, askAgain(context.DeadlineExceeded))
	require.False(t, askAgain(ErrClosed))
}
