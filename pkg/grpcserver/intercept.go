package grpcserver

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// limitRetry is what a caller past a limit is asked to wait.
const limitRetry = 250 * time.Millisecond

var errPanic = errors.New("handler panicked")

func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	if n := s.calls.Add(1); n > int64(s.cfg.MaxCalls) {
		s.calls.Add(-1)
		return nil, limitExceeded("calls", s.cfg.MaxCalls)
	}
	defer s.calls.Add(-1)
	s.handlers.enter()
	defer s.handlers.leave()
	defer func() {
		if r := recover(); r != nil {
			resp, err = nil, s.panicked(ctx, info.FullMethod, r)
		}
		if err != nil {
			resp = nil
		}
		err = s.answer(ctx, info.FullMethod, err)
	}()
	return handler(ctx, req)
}

// stream runs the handler in a goroutine of its own, so that a drain can end
// the stream although the handler is stuck in Recv or Send. Returning while
// another goroutine uses the stream is what every bidi handler with a receive
// loop does: gRPC then fails the pending Recv and Send and cancels the context.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := ss.Context()
	select {
	case <-s.draining:
		return rpcerr.Draining()
	default:
	}
	if n := s.streams.Add(1); n > int64(s.cfg.MaxStreams) {
		s.streams.Add(-1)
		return limitExceeded("streams", s.cfg.MaxStreams)
	}
	defer s.streams.Add(-1)
	result := make(chan error, 1) // one answer; the handler never waits for us
	s.handlers.enter()
	go func() {
		defer s.handlers.leave()
		result <- s.runStream(srv, ss, info, handler)
	}()
	select {
	case err := <-result:
		return s.answer(ctx, info.FullMethod, err)
	case <-s.cutoff:
	}
	select {
	case err := <-result: // the handler's own answer says more
		return s.answer(ctx, info.FullMethod, err)
	default:
		return rpcerr.Draining()
	}
}

func (s *Server) runStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = s.panicked(ss.Context(), info.FullMethod, r)
		}
	}()
	return handler(srv, ss)
}

// answer turns a handler's error into the status that the client gets.
func (s *Server) answer(ctx context.Context, method string, err error) error {
	if err == nil {
		return nil
	}
	st, mapped := rpcerr.ToStatus(err)
	if !mapped && !errors.Is(err, errPanic) { // a panic was logged already
		s.log.ErrorContext(ctx, "unmapped error of a handler", "method", method, "err", err)
	}
	return st.Err()
}

func (s *Server) panicked(ctx context.Context, method string, value any) error {
	s.panics.Add(ctx, 1, metric.WithAttributes(attribute.String("rpc.method", method)))
	s.log.ErrorContext(ctx, "panic in a handler", "method", method, "panic", fmt.Sprint(value), "stack", string(debug.Stack()))
	return errPanic
}

func limitExceeded(what string, limit int) error {
	return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "server", "concurrent "+what, int64(limit), limitRetry)
}
