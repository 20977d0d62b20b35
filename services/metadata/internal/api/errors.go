package api

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/topicconfig"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/internal/watch"
	"github.com/braidlog/braid/services/metadata/state"
)

// soon is the retry hint for what passes by itself within moments.
const soon = 100 * time.Millisecond

// mapError is the one place where errors of this service become answers.
func (s *Server) mapError(err error) error {
	if err == nil {
		return nil
	}
	if mapped := new(rpcerr.Error); errors.As(err, &mapped) {
		return err
	}
	if mapped := s.mapController(err); mapped != nil {
		return mapped.WithCause(err)
	}
	if mapped := mapState(err); mapped != nil {
		return mapped.WithCause(err)
	}
	return err // a context's error, or a defect: the server's edge knows
}

func (s *Server) mapController(err error) *rpcerr.Error {
	var (
		full    *controller.SpaceError
		trimmed *metalog.TrimmedError
	)
	switch {
	case errors.As(err, &full):
		return rpcerr.New(codes.ResourceExhausted, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "%s", full.Error()).
			WithRetry(time.Second).WithQuota("etcd", full.Error()).
			With("class", full.Class).With("in_use", full.InUse).With("limit", full.Quota/100*int64(full.StopAtPercent)).With("quota", full.Quota)
	case errors.As(err, &trimmed):
		return s.mapTrimmed(trimmed)
	case errors.Is(err, controller.ErrNotController):
		e := rpcerr.NotController(s.controllerHint())
		if why := s.deps.Controller.Trouble(); why != nil {
			e.With("trouble", why) // for the one who wonders why nobody leads
		}
		return e
	case errors.Is(err, controller.ErrNotConfirmed):
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soon,
			"the controller's leadership is not confirmed by etcd at the moment")
	case errors.Is(err, controller.ErrOutcomeUnknown):
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE, soon,
			"the command may have been executed: etcd gave no answer; an idempotent command can be repeated")
	case errors.Is(err, metalog.ErrRefused):
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE, time.Second,
			"etcd refuses to write; nothing was changed")
	case errors.Is(err, metalog.ErrUnreachable):
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE, time.Second, "etcd does not answer")
	case errors.Is(err, controller.ErrQueueFull):
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "controller", "commands waiting", controller.QueueLength, soon)
	case errors.Is(err, controller.ErrTooLarge):
		return rpcerr.InvalidField("request", fmt.Sprintf("its effect does not fit in a metadata entry of %d bytes: ask for less at once", metalog.MaxGroupBytes)).
			With("limit", metalog.MaxGroupBytes)
	case errors.Is(err, watch.ErrSlow):
		start, end, _ := s.deps.Hub.Ring()
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "subscriber", "entries behind", end-start, soon)
	case errors.Is(err, watch.ErrResumeLate):
		return rpcerr.InvalidField("resume", err.Error())
	}
	return nil
}

func mapState(err error) *rpcerr.Error { //nolint:gocyclo // a table
	var (
		field       *state.FieldError
		topic       *state.UnknownTopicError
		partition   *state.UnknownPartitionError
		exists      *state.TopicExistsError
		cluster     *state.ClusterMismatchError
		incarnation *state.IncarnationMismatchError
		rolledBack  *state.RolledBackError
		inUse       *state.BrokerIDInUseError
		staleBroker *state.StaleBrokerEpochError
		closedRLM   *state.RLMEpochClosedError
		fenced      *state.FencedError
		objectEnd   *state.ObjectEndError
		chain       *state.ChainMismatchError
		transition  *state.TransitionError
		conflict    *state.ConflictError
		nobody      *state.NoCandidateError
		exhausted   *state.ExhaustedError
		name        *topicconfig.NameError
		setting     *topicconfig.Error
	)
	switch {
	case errors.As(err, &field):
		return rpcerr.InvalidField(field.Field, field.Problem)
	case errors.As(err, &topic):
		return rpcerr.UnknownTopicOrPartition(topic.Topic)
	case errors.As(err, &partition):
		return rpcerr.UnknownTopicOrPartition(partition.Error())
	case errors.As(err, &exists):
		return rpcerr.TopicExists(exists.Name, exists.TopicID)
	case errors.As(err, &cluster):
		return rpcerr.Mismatch(errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, "cluster id", cluster.Want, cluster.Got)
	case errors.As(err, &incarnation):
		return rpcerr.Mismatch(errorsv1.ErrorReason_ERROR_REASON_INCARNATION_MISMATCH, "incarnation", incarnation.Want, incarnation.Got)
	case errors.As(err, &rolledBack):
		return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_METADATA_ROLLED_BACK, "metadata log", "%s", rolledBack.Error()).
			With("seen", rolledBack.Seen).With("log_end", rolledBack.LogEnd)
	case errors.As(err, &inUse):
		return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_BROKER_ID_IN_USE, "broker id", "%s", inUse.Error()).
			With("address", inUse.Address)
	case errors.As(err, &staleBroker):
		return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH, "broker epoch", "%s", staleBroker.Error()).
			With("broker_epoch", staleBroker.Current)
	case errors.As(err, &closedRLM):
		return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_RLM_EPOCH_CLOSED, "rlm epoch", "%s", closedRLM.Error())
	case errors.As(err, &fenced):
		p := fenced.Partition
		return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_FENCED_LEADER_EPOCH, "fence", "%s", fenced.Error()).
			With("leader_epoch", p.GetFence().GetLeaderEpoch()).With("leader_id", p.GetLeaderId()).
			With("broker_epoch", p.GetFence().GetBrokerEpoch())
	case errors.As(err, &objectEnd):
		return rpcerr.New(codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_CONFLICT, "%s", objectEnd.Error()).
			With("object_end_offset", objectEnd.ObjectEnd)
	case errors.As(err, &chain):
		return rpcerr.ChainMismatch("the partition", chain.Offset, chain.Want, chain.Got)
	case errors.As(err, &transition):
		return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_ILLEGAL_TRANSITION, transition.Subject, "%s", transition.Error())
	case errors.As(err, &conflict):
		return rpcerr.New(codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_CONFLICT, "%s", conflict.Error())
	case errors.As(err, &nobody):
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, time.Second, "%s", noCandidate(nobody))
	case errors.As(err, &exhausted):
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "metadata log", exhausted.Error(), 0, 0)
	case errors.As(err, &name):
		return rpcerr.InvalidField("name", name.Error())
	case errors.As(err, &setting):
		return mapSettings(err)
	}
	return nil
}

func noCandidate(e *state.NoCandidateError) string {
	if len(e.Replicas) == 0 {
		return "no broker is registered yet"
	}
	return e.Error()
}

// mapSettings tells of every topic setting that is wrong. If all of them are
// settings with one value so far, they are features that are not there.
func mapSettings(err error) *rpcerr.Error {
	single := make(map[string]bool)
	for _, d := range topicconfig.Describe() {
		single[d.Name] = d.Allowed == d.Default
	}
	var violations []rpcerr.FieldViolation
	unsupported := true
	for _, e := range leaves(err) {
		var setting *topicconfig.Error
		if !errors.As(e, &setting) {
			continue
		}
		unsupported = unsupported && single[setting.Name]
		violations = append(violations, rpcerr.FieldViolation{
			Field: `configs["` + setting.Name + `"]`, Description: setting.Error(),
		})
	}
	if unsupported {
		e := rpcerr.Unsupported(violations[0].Field, violations[0].Description)
		e.Violations = violations
		return e
	}
	return rpcerr.InvalidFields(violations)
}

func leaves(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var out []error
		for _, e := range joined.Unwrap() {
			out = append(out, leaves(e)...)
		}
		return out
	}
	return []error{err}
}

// memberGone is the answer to a heartbeat of a session that is over.
func memberGone(m controller.Member) error {
	if m.Role == controller.Broker {
		return &state.StaleBrokerEpochError{BrokerID: m.ID, Named: m.Epoch, Current: -1}
	}
	return &state.RLMEpochClosedError{RLMID: m.ID, RLMEpoch: m.Epoch}
}

// ended is why a context ended, as an error that the server's edge knows.
func ended(ctx context.Context) error { return ctx.Err() }
