// Package state is the metadata state machine: what the metadata log means.
//
// # Two halves
//
// [State.Apply] folds an entry of the log into the state. The state is a pure
// function of the entries: replicas that applied the same entries are equal
// ([State.Digest]), and a controller that takes over knows what its predecessor
// knew. Apply trusts nobody: an entry that does not follow, that holds an event
// this version does not know, or whose events contradict the state is an error,
// and the state refuses everything from then on. It never skips.
//
// The deciders (Decide…) judge commands. They never change the state: they
// return the events that make the command true, or a typed error, or, for
// CommitCombinedSegment, a verdict on each range. Their events are meant to
// become the entry at [State.EndOffset] of the very state that decided;
// decide, apply, decide the next. No events and no error means that the command
// is true already.
//
// # What it keeps
//
// I5: a partition's committed ranges are contiguous, do not overlap, and follow
// one lineage and one hash chain. I6: a combined object's accepted ranges are
// one entry, and each object is submitted once. I2: a leader epoch is opened at
// most once, under the broker epoch it was given with.
//
// Four numbers are offsets of entries in the log, so they are unique and rise:
// the controller epoch (its ControllerElected), the broker epoch
// (BrokerRegistered), the rlm epoch (RemoteLogManagerRegistered) and a topic's
// creation offset (TopicCreated).
//
// # Purity and concurrency
//
// The package has no clock, no randomness and no I/O; time arrives as durations
// in [ElectionFacts], ids as arguments. A State is not safe for concurrent use:
// any number of readers (queries and deciders) may run together, Apply runs
// alone. Whatever queries return is the caller's to keep and to change.
package state
