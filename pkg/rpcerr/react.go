package rpcerr

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/backoff"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// Reaction is what a client should do about an error.
type Reaction int

// The reactions.
const (
	// Fail: repeating the same request can't help.
	Fail Reaction = iota
	// Retry: the same request may succeed later, at the same server or another.
	Retry
	// Resolve: learn again who is responsible (or what the state is), then retry.
	Resolve
	// Settle: the outcome is unknown: find out before doing anything else.
	Settle
)

// String names the reaction.
func (r Reaction) String() string {
	return [...]string{"fail", "retry", "resolve", "settle"}[r]
}

// React tells how to react to err. An error that isn't a gRPC error fails. Of
// an UNAVAILABLE without a Braid reason nobody knows whether the server
// executed the call: React answers Retry, which is right for idempotent calls
// only.
func React(err error) Reaction {
	e, ok := From(err)
	if !ok {
		return Fail
	}
	switch e.Code {
	case codes.Unavailable:
		if e.Reason == errorsv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN {
			return Settle
		}
		return Retry
	case codes.Aborted:
		return Resolve
	case codes.ResourceExhausted:
		// gRPC itself answers so to a message that is too large: only a server
		// that names a limit of time or space promises that waiting helps.
		if e.RetryDelay > 0 {
			return Retry
		}
	}
	return Fail
}

// Executed tells whether the server may have executed the call that failed
// with err. It is false only for reasons with which a server refuses before it
// changes anything.
func Executed(err error) bool {
	e, ok := From(err)
	if !ok {
		return true
	}
	switch e.Reason {
	case errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED,
		errorsv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN,
		errorsv1.ErrorReason_ERROR_REASON_INTERNAL,
		errorsv1.ErrorReason_ERROR_REASON_DRAINING: // a stream's end says nothing of the requests on it
		return true
	}
	return false
}

// Idempotent is a classifier for [backoff.Options] around calls that may be
// repeated: it retries what [React] retries or resolves, and waits as long as
// the server asks.
func Idempotent(err error) backoff.Verdict {
	switch React(err) {
	case Retry, Resolve:
		return backoff.Verdict{Retry: true, After: delay(err)}
	}
	return backoff.Verdict{}
}

func delay(err error) time.Duration {
	if e, ok := From(err); ok {
		return e.RetryDelay
	}
	return 0
}
