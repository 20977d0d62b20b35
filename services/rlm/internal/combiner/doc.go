// Package combiner braids the ranges that brokers send into combined objects,
// uploads them and has them committed. It is the shell around package planner,
// which decides; this package verifies, buffers, uploads, commits and answers.
//
// # Guarantees
//
// A range is uploaded only if every byte of it was verified on arrival, down to
// the chain hash at its end. An object is committed only if the store's answer
// to its upload shows its size and checksum. A commit without a verdict is
// repeated, the same command, to whoever is controller, until there is one.
// Every range appended to an open stream is answered once, in the order of its
// partition.
//
// # Limits
//
// Buffered bytes are bounded over all streams: past the bound [Stream.Append]
// waits, which stops its caller from reading, and buffers are freed when their
// PUT has ended or their range was refused, neither of which waits for a reader.
// A sender that exceeds its credits is told so with a [*CreditError].
//
// # Concurrency
//
// Combiner and Stream are safe for concurrent use. Goroutines are those of Run,
// one per running PUT and one per outstanding commit; all end with Run.
package combiner
