package rlm

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
)

// observer counts and traces each request to the bucket.
func observer(meter metric.Meter, tracers trace.TracerProvider) (decorate.Observer, error) {
	requests, err := meter.Float64Histogram("objstore.request.duration", metric.WithUnit("s"),
		metric.WithDescription("Time of one request to the object store."),
		metric.WithExplicitBucketBoundaries(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30))
	if err != nil {
		return nil, err
	}
	moved, err := meter.Int64Counter("objstore.request.size", metric.WithUnit("By"), metric.WithDescription("Content moved to and from the object store."))
	if err != nil {
		return nil, err
	}
	tracer := tracers.Tracer("github.com/braidlog/braid/services/rlm")
	//nolint:spancheck // the span ends in the function that is returned
	return func(ctx context.Context, c decorate.Call) (context.Context, func(decorate.Result)) {
		op := attribute.String("op", c.Op.String())
		ctx, span := tracer.Start(ctx, "objstore "+c.Op.String(), trace.WithAttributes(op, attribute.String("object", c.Name)))
		return ctx, func(r decorate.Result) {
			outcome := attribute.String("outcome", outcomeOf(r.Err))
			ctx := context.WithoutCancel(ctx)
			requests.Record(ctx, r.Duration.Seconds(), metric.WithAttributes(op, outcome))
			moved.Add(ctx, r.Bytes, metric.WithAttributes(op))
			if r.Err != nil {
				span.SetStatus(codes.Error, r.Err.Error())
			}
			span.End()
		}
	}, nil
}

func outcomeOf(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case errors.Is(err, objstore.ErrNotFound):
		return "not_found"
	case errors.Is(err, objstore.ErrExists):
		return "exists"
	case errors.Is(err, objstore.ErrUnavailable):
		return "unavailable"
	}
	return "failed"
}
