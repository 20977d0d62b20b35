package backoff_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/backoff"
)

func TestDelay(t *testing.T) {
	p := backoff.Policy{Initial: 100 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: 0.5}
	tests := []struct {
		p       backoff.Policy
		attempt int
		r       float64
		want    time.Duration
	}{
		{p, 1, 1, 100 * time.Millisecond},
		{p, 1, 0, 50 * time.Millisecond},
		{p, 2, 1, 200 * time.Millisecond},
		{p, 3, 0.5, 300 * time.Millisecond},
		{p, 5, 1, time.Second},
		{p, math.MaxInt, 1, time.Second},
		{p, 0, 1, 100 * time.Millisecond},
		{backoff.Policy{}, 3, 1, 0},
		{backoff.Policy{Initial: time.Second}, 9, 0, time.Second},
		{backoff.Policy{Initial: time.Minute, Max: time.Second}, 1, 1, time.Second},
		{backoff.Policy{Initial: time.Second, Jitter: 7}, 1, 0, 0},
	}
	for _, tt := range tests {
		assert.Equal(t, tt.want, tt.p.Delay(tt.attempt, tt.r), "%+v", tt)
	}
}

func FuzzDelayStaysInRange(f *testing.F) {
	f.Add(int64(1), int64(10), 2.0, 0.5, 3, 0.3)
	f.Add(int64(math.MaxInt64), int64(0), math.Inf(1), 1.0, math.MaxInt, 1.0)
	f.Fuzz(func(t *testing.T, initial, limit int64, multiplier, jitter float64, attempt int, r float64) {
		if math.IsNaN(multiplier) || math.IsNaN(jitter) || math.IsNaN(r) {
			return
		}
		p := backoff.Policy{Initial: time.Duration(initial), Max: time.Duration(limit), Multiplier: multiplier, Jitter: jitter}
		if multiplier < 1.001 {
			attempt %= 1000 // the loop ends at the cap, which slow growth may never reach
		}
		d := p.Delay(attempt, r)
		if d < 0 || (limit > 0 && d > time.Duration(limit)) {
			t.Fatalf("%+v: delay %v", p, d)
		}
	})
}

var errFlaky = errors.New("flaky")

func noJitter() float64 { return 1 }

func TestRetryWaitsAsThePolicySays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var at []time.Duration
		err := backoff.Retry(t.Context(), backoff.Options{
			Policy: backoff.Policy{Initial: time.Second, Multiplier: 2, Max: 3 * time.Second},
			Rand:   noJitter,
		}, func(context.Context, int) error {
			at = append(at, time.Since(start))
			if len(at) < 5 {
				return errFlaky
			}
			return nil
		})
		require.NoError(t, err)
		assert.Equal(t, []time.Duration{0, time.Second, 3 * time.Second, 6 * time.Second, 9 * time.Second}, at)
	})
}

func TestRetryLimits(t *testing.T) {
	slow := backoff.Policy{Initial: time.Second}
	tests := map[string]struct {
		opts     backoff.Options
		timeout  time.Duration
		attempts int
		limit    string
	}{
		"attempts": {backoff.Options{Policy: slow, MaxAttempts: 3}, 0, 3, "attempts"},
		"elapsed":  {backoff.Options{Policy: slow, MaxElapsed: 2500 * time.Millisecond}, 0, 3, "elapsed time"},
		"budget":   {backoff.Options{Policy: slow, Budget: backoff.NewBudget(0.1, 2)}, 0, 3, "budget"},
		"deadline": {backoff.Options{Policy: slow}, 1500 * time.Millisecond, 2, "deadline"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if tt.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.timeout)
					defer cancel()
				}
				calls := 0
				err := backoff.Retry(ctx, tt.opts, func(context.Context, int) error { calls++; return errFlaky })
				var exhausted *backoff.ExhaustedError
				require.ErrorAs(t, err, &exhausted)
				require.ErrorIs(t, err, backoff.ErrExhausted)
				require.ErrorIs(t, err, errFlaky)
				assert.Equal(t, tt.limit, exhausted.Limit)
				assert.Equal(t, tt.attempts, exhausted.Attempts)
				assert.Equal(t, tt.attempts, calls)
				require.NoError(t, ctx.Err(), "gave up before the deadline, not at it")
			})
		})
	}
}

func TestRetryStopsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("shutting down")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(1500*time.Millisecond, func() { cancel(cause) })
		start := time.Now()
		err := backoff.Retry(ctx, backoff.Options{Policy: backoff.Policy{Initial: time.Second}}, func(context.Context, int) error { return errFlaky })
		require.ErrorIs(t, err, cause)
		require.ErrorIs(t, err, errFlaky)
		assert.Equal(t, 1500*time.Millisecond, time.Since(start))

		calls := 0
		err = backoff.Retry(ctx, backoff.Options{}, func(context.Context, int) error { calls++; return nil })
		require.ErrorIs(t, err, cause)
		assert.Zero(t, calls, "an ended context starts no attempt")
	})
}

func TestPermanentErrorsAreNotRetried(t *testing.T) {
	calls := 0
	err := backoff.Retry(t.Context(), backoff.Options{}, func(context.Context, int) error {
		calls++
		return backoff.Permanent(errFlaky)
	})
	assert.Equal(t, errFlaky, err, "the mark is gone")
	assert.Equal(t, 1, calls)
	assert.NoError(t, backoff.Permanent(nil))
}

func TestClassifierDecidesAndDelays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, calls := time.Now(), 0
		var told []time.Duration
		err := backoff.Retry(t.Context(), backoff.Options{
			Policy:   backoff.Policy{Initial: time.Millisecond},
			Classify: func(error) backoff.Verdict { return backoff.Verdict{Retry: calls < 3, After: time.Minute} },
			OnRetry:  func(_ int, d time.Duration, _ error) { told = append(told, d) },
		}, func(context.Context, int) error { calls++; return errFlaky })
		assert.Equal(t, errFlaky, err)
		assert.Equal(t, 2*time.Minute, time.Since(start))
		assert.Equal(t, []time.Duration{time.Minute, time.Minute}, told)
	})
}

func TestAttemptTimeoutBoundsEachAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		err := backoff.Retry(t.Context(), backoff.Options{
			Policy: backoff.Policy{Initial: time.Second}, MaxAttempts: 2, AttemptTimeout: 10 * time.Second,
		}, func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() })
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, backoff.ErrExhausted)
		assert.Equal(t, 21*time.Second, time.Since(start))
	})
}

func TestBudgetBoundsRetriesToAFraction(t *testing.T) {
	b := backoff.NewBudget(0.1, 5)
	retries := 0
	for range 1000 {
		b.Earn()
		for b.Spend() {
			retries++
		}
	}
	assert.InDelta(t, 105, retries, 2)
}
