package gcs

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"testing"
	"time"

	"cloud.google.com/go/storage"
	"github.com/stretchr/testify/require"
	"google.golang.org/api/googleapi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/objstore"
)

// HTTP and gRPC report the same failures differently.
func TestClassify(t *testing.T) {
	http := func(code int, message string, reasons ...string) error {
		e := &googleapi.Error{Code: code, Message: message}
		for _, r := range reasons {
			e.Errors = append(e.Errors, googleapi.ErrorItem{Reason: r})
		}
		return fmt.Errorf("wrapped: %w", e)
	}
	grpc := func(c codes.Code, message string) error { return status.Error(c, message) }
	for _, c := range []struct {
		err     error
		kind    error
		refused bool
	}{
		{http(412, ""), objstore.ErrPrecondition, true},
		{grpc(codes.FailedPrecondition, ""), objstore.ErrPrecondition, true},
		{grpc(codes.AlreadyExists, ""), objstore.ErrPrecondition, true},
		{http(404, "No such object: b/o"), objstore.ErrNotFound, true},
		{http(404, "The specified bucket does not exist."), objstore.ErrBucketNotFound, true},
		{grpc(codes.NotFound, ""), objstore.ErrNotFound, true},
		{grpc(codes.NotFound, "The specified bucket does not exist."), objstore.ErrBucketNotFound, true},
		{fmt.Errorf("%w: x", storage.ErrObjectNotExist), objstore.ErrNotFound, true},
		{fmt.Errorf("%w: x", storage.ErrBucketNotExist), objstore.ErrBucketNotFound, true},
		{fmt.Errorf("%w: %w", storage.ErrObjectNotExist, http(404, "The specified bucket does not exist.")), objstore.ErrBucketNotFound, true},
		{http(416, ""), objstore.ErrRange, true},
		{grpc(codes.OutOfRange, ""), objstore.ErrRange, true},
		{http(400, "Provided CRC32C \"a\" doesn't match calculated CRC32C \"b\"."), objstore.ErrCorrupt, true},
		{http(400, "Invalid argument"), objstore.ErrInvalid, true},
		{http(401, ""), objstore.ErrDenied, true},
		{http(403, "", "forbidden"), objstore.ErrDenied, true},
		{http(403, "", "rateLimitExceeded"), objstore.ErrUnavailable, true},
		{grpc(codes.PermissionDenied, ""), objstore.ErrDenied, true},
		{http(429, ""), objstore.ErrUnavailable, true},
		{grpc(codes.ResourceExhausted, ""), objstore.ErrUnavailable, true},
		{http(408, ""), objstore.ErrUnavailable, false},
		{http(500, ""), objstore.ErrUnavailable, false},
		{http(503, ""), objstore.ErrUnavailable, false},
		{http(501, ""), objstore.ErrInvalid, true},
		{http(418, ""), objstore.ErrInvalid, true},
		{grpc(codes.Unavailable, ""), objstore.ErrUnavailable, false},
		{grpc(codes.Internal, ""), objstore.ErrUnavailable, false},
		{grpc(codes.InvalidArgument, ""), objstore.ErrInvalid, true},
		{grpc(codes.DataLoss, ""), objstore.ErrCorrupt, false},
		{errors.New("storage: bad CRC on read: got 1, want 2"), objstore.ErrCorrupt, false},
		{&url.Error{Op: "Post", Err: &net.OpError{Op: "dial", Err: io.EOF}}, objstore.ErrUnavailable, true},
		{&url.Error{Op: "Post", Err: &net.OpError{Op: "read", Err: io.EOF}}, objstore.ErrUnavailable, false},
		{io.ErrUnexpectedEOF, objstore.ErrUnavailable, false},
	} {
		got := classify(c.err)
		require.Equal(t, c.kind, got.kind, "%v", c.err)
		require.Equal(t, c.refused, got.refused, "%v", c.err)
	}
}

func TestCreateNamesExistingObjectAndMissingBucket(t *testing.T) {
	ctx := t.Context()
	for _, c := range []struct{ err, kind error }{
		{&googleapi.Error{Code: 412}, objstore.ErrExists},
		{status.Error(codes.FailedPrecondition, ""), objstore.ErrExists},
		{&googleapi.Error{Code: 404}, objstore.ErrBucketNotFound},
		{status.Error(codes.NotFound, ""), objstore.ErrBucketNotFound},
	} {
		err := createError(ctx, ctx, "a", c.err)
		require.ErrorIs(t, err, c.kind)
		require.NotErrorIs(t, err, objstore.ErrAmbiguous)
	}
}

func TestAttemptTimeoutGrowsWithTheBytes(t *testing.T) {
	cfg := DefaultConfig("b")
	cfg.AttemptTimeout, cfg.MinThroughput = time.Second, 1000
	for size, want := range map[int64]time.Duration{
		0: time.Second, 500: 1500 * time.Millisecond, 2000: 3 * time.Second, 1 << 62: time.Second + time.Hour,
	} {
		require.Equal(t, want, cfg.attemptTimeout(size))
	}
}

func TestConfigReportsAllProblems(t *testing.T) {
	require.NoError(t, DefaultConfig("b").Validate())
	err := Config{Endpoint: "127.0.0.1:80"}.Validate()
	for _, text := range []string{"bucket", "endpoint", "attempt timeout", "throughput", "stall", "idle"} {
		require.ErrorContains(t, err, text)
	}
	_, err = Open(t.Context(), Config{})
	require.ErrorContains(t, err, "bucket is empty")
}
