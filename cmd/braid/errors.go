package main

import (
	"context"
	"errors"
	"sort"
	"strings"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// explainError is an error as people want to read it: the sentence, what is
// wrong with which field, and the facts.
func explainError(err error) string {
	var absent *client.UnknownTopicError
	if errors.As(err, &absent) {
		return err.Error() + " (" + rpcerr.ReasonName(errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION) + ")"
	}
	e, ok := rpcerr.From(err)
	if !ok || e.Reason == errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return err.Error()
	}
	var b strings.Builder
	b.WriteString(strings.Replace(err.Error(), "rpc error: code = "+e.Code.String()+" desc = ", rpcerr.ReasonName(e.Reason)+": ", 1))
	for _, v := range e.Violations {
		if !strings.Contains(b.String(), v.Description) {
			b.WriteString("\n  " + v.Field + ": " + v.Description)
		}
	}
	for _, p := range e.Preconditions {
		if !strings.Contains(b.String(), p.Description) {
			b.WriteString("\n  " + p.Subject + ": " + p.Description)
		}
	}
	keys := make([]string, 0, len(e.Metadata))
	for k, v := range e.Metadata {
		if v != "" {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	for i, k := range keys {
		sep := ", "
		if i == 0 {
			sep = "\n  "
		}
		b.WriteString(sep + k + " " + e.Metadata[k])
	}
	return b.String()
}

// interrupted says that ctx was ended by a signal.
func interrupted(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded)
}

// ofTopic says of an error of the metadata service that the topic is absent, if
// that is the reason.
func ofTopic(name string, err error) error {
	if rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION) {
		return &client.UnknownTopicError{Name: name, Err: err}
	}
	return err
}
