package gcs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"

	"cloud.google.com/go/storage"
	"google.golang.org/api/googleapi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/objstore"
)

// errAttempt is the cause of an attempt's own deadline, which is kept apart
// from the caller's: the first is the store's slowness, the second is not.
var (
	errAttempt = errors.New("attempt took too long")
	errStalled = errors.New("no byte arrived in time")
)

// outcome is what an error of the client library says.
type outcome struct {
	kind error
	// refused is true if the service surely did nothing.
	refused bool
}

// classify reads an error of the client library.
func classify(err error) outcome {
	var api *googleapi.Error
	switch {
	case errors.As(err, &api):
		return classifyHTTP(api)
	case errors.Is(err, storage.ErrBucketNotExist):
		return outcome{objstore.ErrBucketNotFound, true}
	case errors.Is(err, storage.ErrObjectNotExist):
		return outcome{objstore.ErrNotFound, true}
	}
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK && s.Code() != codes.Unknown {
		return classifyGRPC(s)
	}
	// The library checks the CRC32C of whole objects it reads and has no error
	// value for it.
	if strings.Contains(err.Error(), "bad CRC on read") {
		return outcome{objstore.ErrCorrupt, false}
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return outcome{objstore.ErrUnavailable, true} // never connected
	}
	// What remains are transport errors, from anywhere in the exchange.
	return outcome{objstore.ErrUnavailable, false}
}

func classifyHTTP(err *googleapi.Error) outcome {
	switch err.Code {
	case http.StatusBadRequest:
		if mentionsChecksum(err) {
			// The content was damaged on its way; nothing was stored.
			return outcome{objstore.ErrCorrupt, true}
		}
		return outcome{objstore.ErrInvalid, true}
	case http.StatusUnauthorized:
		return outcome{objstore.ErrDenied, true}
	case http.StatusForbidden:
		for _, item := range err.Errors {
			if item.Reason == "rateLimitExceeded" || item.Reason == "userRateLimitExceeded" {
				return outcome{objstore.ErrUnavailable, true}
			}
		}
		return outcome{objstore.ErrDenied, true}
	case http.StatusNotFound:
		if strings.Contains(err.Message+err.Body, "bucket does not exist") {
			return outcome{objstore.ErrBucketNotFound, true}
		}
		return outcome{objstore.ErrNotFound, true}
	case http.StatusPreconditionFailed:
		return outcome{objstore.ErrPrecondition, true}
	case http.StatusRequestedRangeNotSatisfiable:
		return outcome{objstore.ErrRange, true}
	case http.StatusTooManyRequests, http.StatusConflict:
		return outcome{objstore.ErrUnavailable, true}
	case http.StatusRequestTimeout:
		return outcome{objstore.ErrUnavailable, false}
	case http.StatusNotImplemented:
		return outcome{objstore.ErrInvalid, true}
	}
	if err.Code >= 500 {
		return outcome{objstore.ErrUnavailable, false}
	}
	return outcome{objstore.ErrInvalid, true}
}

func mentionsChecksum(err *googleapi.Error) bool {
	text := strings.ToLower(err.Message + err.Body)
	return strings.Contains(text, "crc32c") || strings.Contains(text, "checksum") || strings.Contains(text, "md5")
}

func classifyGRPC(s *status.Status) outcome {
	switch s.Code() {
	case codes.NotFound:
		if strings.Contains(s.Message(), "bucket does not exist") {
			return outcome{objstore.ErrBucketNotFound, true}
		}
		return outcome{objstore.ErrNotFound, true}
	case codes.FailedPrecondition, codes.AlreadyExists:
		return outcome{objstore.ErrPrecondition, true}
	case codes.OutOfRange:
		return outcome{objstore.ErrRange, true}
	case codes.InvalidArgument, codes.Unimplemented:
		return outcome{objstore.ErrInvalid, true}
	case codes.PermissionDenied, codes.Unauthenticated:
		return outcome{objstore.ErrDenied, true}
	case codes.DataLoss:
		return outcome{objstore.ErrCorrupt, false}
	case codes.ResourceExhausted:
		return outcome{objstore.ErrUnavailable, true}
	default:
		return outcome{objstore.ErrUnavailable, false}
	}
}

// fail turns the error of an attempt into the error of the operation. caller is
// the caller's context, attempt the one the library was given.
func fail(caller, attempt context.Context, op objstore.Op, name string, err error) *objstore.Error {
	mutates := op == objstore.OpCreate || op == objstore.OpDelete
	if caller.Err() != nil {
		var e *objstore.Error
		errors.As(objstore.ContextError(caller, op, name), &e)
		e.Ambiguous = mutates
		return e
	}
	if attempt.Err() != nil {
		// The text of err is kept, the value is not: it matches
		// context.DeadlineExceeded, which is for the caller's own deadline.
		return &objstore.Error{
			Op: op, Name: name, Kind: objstore.ErrUnavailable, Ambiguous: mutates,
			Err: fmt.Errorf("%w: %v", context.Cause(attempt), err), //nolint:errorlint // see above
		}
	}
	o := classify(err)
	return &objstore.Error{Op: op, Name: name, Kind: o.kind, Ambiguous: mutates && !o.refused, Err: err}
}
