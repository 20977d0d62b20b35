// Package objstore names what Braid asks of an object store and what it may
// rely on, in interfaces small enough to be decorated and to be implemented
// exactly in memory.
//
// # Guarantees
//
// Objects are immutable. [Creator.Create] is create-only: it carries the
// precondition "no live object of this name", travels in one request, and of
// any number of racing creators of one name exactly one wins. A reader sees an
// object whole or not at all, and reads, attributes and listings are strongly
// consistent: what was created before a call began is seen by it, and what was
// deleted before is not.
//
// Every object has a generation, set by the store when the object is created,
// and never used twice for one name. A delete may name the generation it means.
//
// # Failures
//
// Every error of this package's implementations is an [*Error]: it matches one
// of the sentinels (ErrNotFound, ErrExists, …) with errors.Is and keeps the
// cause. A mutation that failed in a way that leaves its effect open also
// matches [ErrAmbiguous]; only looking at the store settles it. Errors of the
// caller's own context match context.Canceled or context.DeadlineExceeded and
// are never [ErrUnavailable], so that giving up is not mistaken for an outage.
//
// Implementations make one attempt per call and bound it with a deadline of
// their own. Retries, and reading back what a retried create left behind, are
// in package decorate: in one layer, with one budget.
//
// # Concurrency
//
// Every implementation is safe for concurrent use.
package objstore
