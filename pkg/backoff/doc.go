// Package backoff retries what is safe to repeat.
//
// It has two halves. [Policy.Delay] is a pure function from attempt number and
// a random number to a delay; state machines use it directly. [Retry] is the
// loop around it: it ends with the caller's context, after a number of
// attempts, after an elapsed time, or when a shared [Budget] is used up,
// whichever comes first, and every wait is jittered so that callers who failed
// together don't return together.
//
// Guarantees: Retry never sleeps past its context's deadline only to find it
// gone, it never repeats an error that [Permanent] marked or that the
// classifier refuses, and the error it returns wraps the last attempt's error.
// Whether a call may be repeated at all is the caller's decision: an attempt
// whose outcome is unknown is not a failed attempt.
//
// Randomness is injected, so a test can be exact. Policy values are immutable
// and safe for concurrent use, so is Budget; a Retry call belongs to its
// goroutine.
package backoff
