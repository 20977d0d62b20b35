package api

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/topicconfig"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/internal/watch"
	"github.com/braidlog/braid/services/metadata/state"
)

func TestEveryErrorHasItsAnswer(t *testing.T) {
	s := New(Config{Address: "h:1"}, Deps{
		Hub: watch.NewHub(watch.Options{}), Controller: controller.New(controller.Config{}, controller.Deps{}),
	})
	_, settings := topicconfig.Parse(map[string]string{"flush": "x", "colour": "red"})
	_, feature := topicconfig.Parse(map[string]string{"cleanup.policy": "compact"})
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason errorsv1.ErrorReason
	}{
		{controller.ErrNotController, codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER},
		{controller.ErrNotConfirmed, codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_NOT_READY},
		{controller.ErrOutcomeUnknown, codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE},
		{controller.ErrQueueFull, codes.ResourceExhausted, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED},
		{controller.ErrTooLarge, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		{metalog.ErrRefused, codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE},
		{metalog.ErrUnreachable, codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE},
		{watch.ErrSlow, codes.ResourceExhausted, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED},
		{watch.ErrResumeLate, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		{&state.FieldError{}, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		{&state.UnknownTopicError{}, codes.NotFound, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION},
		{&state.UnknownPartitionError{}, codes.NotFound, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION},
		{&state.TopicExistsError{}, codes.AlreadyExists, errorsv1.ErrorReason_ERROR_REASON_TOPIC_EXISTS},
		{&state.ClusterMismatchError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH},
		{&state.IncarnationMismatchError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_INCARNATION_MISMATCH},
		{&state.RolledBackError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_METADATA_ROLLED_BACK},
		{&state.BrokerIDInUseError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_BROKER_ID_IN_USE},
		{&state.StaleBrokerEpochError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH},
		{&state.RLMEpochClosedError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_RLM_EPOCH_CLOSED},
		{&state.FencedError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_FENCED_LEADER_EPOCH},
		{&state.ObjectEndError{}, codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_CONFLICT},
		{&state.ChainMismatchError{}, codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_CHAIN_MISMATCH},
		{&state.TransitionError{}, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_ILLEGAL_TRANSITION},
		{&state.ConflictError{}, codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_CONFLICT},
		{&state.NoCandidateError{}, codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_NOT_READY},
		{&state.ExhaustedError{}, codes.ResourceExhausted, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED},
		{topicconfig.ValidateName(".."), codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		{settings, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		{feature, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_UNSUPPORTED},
	} {
		t.Run(fmt.Sprintf("%T %v", c.err, c.err), func(t *testing.T) {
			wrapped := fmt.Errorf("while testing: %w", c.err)
			got, ok := rpcerr.From(s.mapError(wrapped))
			require.True(t, ok)
			assert.Equal(t, c.code, got.Code)
			assert.Equal(t, c.reason, got.Reason)
			require.ErrorIs(t, got, c.err, "the original stays for the log")
		})
	}
	got, _ := rpcerr.From(s.mapError(settings))
	assert.Len(t, got.Violations, 2, "all wrong settings are named")
	require.NoError(t, s.mapError(nil))
	require.ErrorIs(t, s.mapError(context.Canceled), context.Canceled)
	defect := errors.New("defect")
	assert.Same(t, defect, s.mapError(defect))
	mapped := rpcerr.Draining()
	assert.Same(t, mapped, s.mapError(mapped))
}
