package backoff

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// Verdict is a classifier's answer about one error.
type Verdict struct {
	// Retry allows another attempt.
	Retry bool
	// After is the least delay before it, as a server may ask for; 0 leaves
	// the delay to the policy.
	After time.Duration
}

// Options configure one [Retry] call. The zero value retries every error that
// isn't permanent until the context ends.
type Options struct {
	// Policy gives the delays; the zero Policy means [Default].
	Policy Policy
	// MaxAttempts bounds the attempts including the first; 0 means no bound.
	MaxAttempts int
	// MaxElapsed bounds the time from the call to the start of the last
	// attempt; 0 means no bound but the context's.
	MaxElapsed time.Duration
	// AttemptTimeout bounds each attempt's context; 0 means no bound but ctx.
	AttemptTimeout time.Duration
	// Budget is shared with other calls; nil means no budget.
	Budget *Budget
	// Classify decides which errors may be retried; nil retries all but
	// permanent ones. It isn't asked about permanent errors.
	Classify func(error) Verdict
	// Rand returns a number in [0, 1); nil means math/rand/v2.
	Rand func() float64
	// OnRetry is told about each failure that will be retried, before the
	// wait: for logs and counters. It must not block.
	OnRetry func(attempt int, delay time.Duration, err error)
}

// ErrExhausted is wrapped by the error of a [Retry] that gave up on an error
// that it would have retried.
var ErrExhausted = errors.New("retries exhausted")

// ExhaustedError tells why a retry loop gave up. It wraps [ErrExhausted] and
// the last attempt's error.
type ExhaustedError struct {
	// Attempts is the number of attempts made.
	Attempts int
	// Limit names the bound that was hit: "attempts", "elapsed time",
	// "budget" or "deadline".
	Limit string
	// Err is the last attempt's error.
	Err error
}

// Error implements error.
func (e *ExhaustedError) Error() string {
	return fmt.Sprintf("%v after %d attempts (%s): %v", ErrExhausted, e.Attempts, e.Limit, e.Err)
}

// Unwrap returns [ErrExhausted] and the last error.
func (e *ExhaustedError) Unwrap() []error { return []error{ErrExhausted, e.Err} }

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent marks err as not to be retried. It returns nil for nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// Retry calls fn until it succeeds or may not be tried again. fn gets the
// attempt number, from 1, and a context that ends with ctx.
//
// It returns nil, the error of an attempt that may not be retried (without
// its permanent mark), a *[ExhaustedError], or, when ctx ended while waiting, an error
// that wraps both the context's cause and the last attempt's error.
func Retry(ctx context.Context, opts Options, fn func(ctx context.Context, attempt int) error) error {
	policy := opts.Policy
	if policy == (Policy{}) {
		policy = Default
	}
	random := opts.Rand
	if random == nil {
		random = rand.Float64
	}
	if opts.Budget != nil {
		opts.Budget.Earn()
	}
	start := time.Now()
	for attempt := 1; ; attempt++ {
		if err := context.Cause(ctx); err != nil && attempt == 1 {
			return err
		}
		err := try(ctx, opts.AttemptTimeout, attempt, fn)
		if err == nil {
			return nil
		}
		if p := (*permanentError)(nil); errors.As(err, &p) {
			if bare, ok := err.(*permanentError); ok { //nolint:errorlint // only the outermost mark is taken off
				return bare.err
			}
			return err
		}
		verdict := Verdict{Retry: true}
		if opts.Classify != nil {
			verdict = opts.Classify(err)
		}
		if !verdict.Retry {
			return err
		}
		if cause := context.Cause(ctx); cause != nil {
			return ended(cause, err)
		}
		delay := max(policy.Delay(attempt, random()), verdict.After)
		switch {
		case opts.MaxAttempts > 0 && attempt >= opts.MaxAttempts:
			return &ExhaustedError{Attempts: attempt, Limit: "attempts", Err: err}
		case opts.MaxElapsed > 0 && time.Since(start)+delay > opts.MaxElapsed:
			return &ExhaustedError{Attempts: attempt, Limit: "elapsed time", Err: err}
		}
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= delay {
			// Waiting would only turn a useful error into a late one.
			return &ExhaustedError{Attempts: attempt, Limit: "deadline", Err: err}
		}
		if opts.Budget != nil && !opts.Budget.Spend() {
			return &ExhaustedError{Attempts: attempt, Limit: "budget", Err: err}
		}
		if opts.OnRetry != nil {
			opts.OnRetry(attempt, delay, err)
		}
		if cause := Sleep(ctx, delay); cause != nil {
			return ended(cause, err)
		}
	}
}

func ended(cause, last error) error {
	if errors.Is(last, cause) {
		return last
	}
	return fmt.Errorf("%w while retrying: %w", cause, last)
}

func try(ctx context.Context, timeout time.Duration, attempt int, fn func(context.Context, int) error) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return fn(ctx, attempt)
}

// Sleep waits for d or for the end of ctx, whose cause it then returns.
func Sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
