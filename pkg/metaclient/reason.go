package metaclient

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// ErrNoController says that no replica that could be reached is, or knows, the
// controller. It wraps the last answer.
var ErrNoController = errors.New("metadata: no controller reachable")

// ErrClosed is returned by calls on a closed client.
var ErrClosed = errors.New("metadata client: closed")

// errNotConnected marks an attempt that found no connection and sent nothing.
var errNotConnected = errors.New("not connected")

// factControllerAddress is where a NOT_CONTROLLER answer points to.
const factControllerAddress = "controller_address"

// hint is the controller's address that the error names, "" if none.
func hint(err error) string {
	if e, ok := rpcerr.From(err); ok && e.Reason == errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER {
		return e.Metadata[factControllerAddress]
	}
	return ""
}

// outcome is what an error says about the call that ended with it.
type outcome int

const (
	// final: the server answered; repeating the call would be a new call.
	final outcome = iota
	// refused: nothing happened, another attempt or replica may do it.
	refused
	// unknown: it may have happened.
	unknown
)

// judge tells what an attempt's error means. ctx is the caller's, not the
// attempt's: an attempt that ran out of its own time is unknown, a caller's
// context that ended is final.
func judge(ctx context.Context, err error) outcome {
	if ctx.Err() != nil {
		return final
	}
	if errors.Is(err, errNotConnected) {
		return refused
	}
	switch rpcerr.Reason(err) {
	case errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER,
		errorsv1.ErrorReason_ERROR_REASON_DRAINING,
		errorsv1.ErrorReason_ERROR_REASON_NOT_READY:
		return refused
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return unknown
	}
	return final
}
