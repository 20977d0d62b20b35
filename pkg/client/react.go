package client

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// reaction is what a producer does about an error.
type reaction int

const (
	// giveUp: repeating can't help; the caller is told.
	giveUp reaction = iota
	// resend: the same batches, with their sequences, to the same leader or
	// whoever leads then.
	resend
	// resolve: find the leader anew first, then resend.
	resolve
	// settle: ask with AwaitDurability what became of the batch.
	settle
)

func (r reaction) String() string { return [...]string{"give up", "resend", "resolve", "settle"}[r] }

// reactToProduce is the table of an idempotent producer: all its repetitions
// carry producer id and sequence, so what may have been stored may be sent again.
func reactToProduce(err error) reaction {
	if errors.Is(err, ErrClosed) {
		return giveUp
	}
	if errors.Is(err, io.EOF) || errors.Is(err, errStalled) || errors.Is(err, errMoved) {
		return resolve
	}
	e, ok := rpcerr.From(err)
	if !ok {
		return giveUp
	}
	switch e.Reason {
	case errorsv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN:
		return settle
	case errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER, errorsv1.ErrorReason_ERROR_REASON_DRAINING,
		errorsv1.ErrorReason_ERROR_REASON_CONFLICT, errorsv1.ErrorReason_ERROR_REASON_CHAIN_MISMATCH:
		return resolve
	case errorsv1.ErrorReason_ERROR_REASON_BACKLOG_FULL, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED:
		return resend // nothing was stored, and waiting is what helps
	case errorsv1.ErrorReason_ERROR_REASON_TOO_MANY_PRODUCERS:
		return giveUp // a matter of hours or of an operator
	case errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED:
		switch e.Code {
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted:
			return resolve // the connection or the server went away
		}
		return giveUp
	}
	switch rpcerr.React(err) {
	case rpcerr.Retry:
		return resend
	case rpcerr.Resolve:
		return resolve
	case rpcerr.Settle:
		return settle
	}
	return giveUp
}

// reactToRead is the table of a reader: true means go on at the next offset,
// after looking for the leader again.
func reactToRead(err error) bool {
	if errors.Is(err, errStalled) || errors.Is(err, errMoved) {
		return true
	}
	if errors.Is(err, ErrClosed) {
		return false
	}
	e, ok := rpcerr.From(err)
	if !ok {
		return false
	}
	if e.Reason == errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED && (e.Code == codes.DeadlineExceeded || e.Code == codes.Canceled) {
		return true
	}
	r := rpcerr.React(err)
	return r == rpcerr.Retry || r == rpcerr.Resolve
}

// askAgain tells whether another broker, or the same one later, may answer a
// question that this one did not.
func askAgain(err error) bool { return errors.Is(err, context.DeadlineExceeded) || reactToRead(err) }

// hintOf is the leader that a refusal names.
func hintOf(e *rpcerr.Error) lead {
	epoch, _ := e.Int("leader_epoch") // 0 is not known
	return lead{address: e.Metadata["leader_address"], epoch: int32(epoch)}
}
