// Package invariant holds assertions about the program's own state.
//
// Assertions are for what can only be false if our code is wrong: never for
// input, for what a peer sent or for what a disk returned (those are errors).
//
// They are compiled in with the build tag "invariants" and with the race
// detector, and compiled out otherwise; the signatures are the same either
// way, so callers need no build tags of their own. [Enabled] is a constant: an
// expensive check belongs inside "if invariant.Enabled { … }" or in [Check],
// whose function isn't called when assertions are off.
//
// A failed assertion panics with a *[Violation]. A gRPC server built by package
// grpcserver turns it into INTERNAL, logs it and counts it; anywhere else it
// ends the process, which is the right answer to a state nobody understands.
//
// All functions are safe for concurrent use and keep no state.
package invariant
