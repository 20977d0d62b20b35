// Package decorate adds behaviour to any object store: a name prefix, retries,
// a limit on calls in flight, observation, faults for tests.
//
// Each decorator is an objstore.Store around another; the order is the caller's
// and visible in one place:
//
//	store := decorate.Wrap(bucket,
//		decorate.Observe(operations), // outermost: what the caller sees
//		decorate.Retry(retryOptions),
//		decorate.Observe(attempts),   // each attempt
//		decorate.Limit(limits),       // inside Retry, so waiting for a retry holds no slot
//		decorate.Prefix("cluster-1"),
//	)
//
// [Retry] is the only place in the module that repeats object-store requests. It
// settles what a repeated create met: see there.
//
// All decorators are safe for concurrent use if the store below is, and start
// no goroutine.
package decorate
