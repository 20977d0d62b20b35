// Package producerstate knows, for one partition, what its idempotent producers
// have stored: it says whether a batch is the next one, a repetition, or out of
// order (invariant I7).
//
// # What is kept
//
// Per producer its epoch and its last five batches, as many as a client keeps in
// flight. A repetition of any of them gets its first answer, also while that
// batch is not committed yet: the decision names its offsets, and waiting for
// their commit is the caller's part. A repetition can therefore never be told an
// offset that the log does not hold: the state only ever takes in what was
// appended, and is rolled back with the log.
//
// # Unknown producers
//
// A sequence above 0 from a producer that is not known (its state expired, or
// was cut away with the tail of the log) is a SequenceGapError with nothing
// kept, on which a client goes on with a new epoch; sequence 0 is accepted. The
// removal of old records changes nothing here: state lives by expiry alone.
//
// # Lost bytes
//
// Where a part of the log is lost for good and was all that told of some
// batches, the state goes on behind it (MissTo). What that does to a client is
// always told to it and never silent: a producer known only from the lost bytes
// is an unknown one, so a sequence above 0 is a SequenceGapError; one last seen
// below them still gets its remembered batches answered, and everything else of
// the same epoch is a SequenceGapError, because the lost bytes may hold it. Only
// sequence 0 of an unknown producer, or of a newer epoch, is taken: should it
// repeat a batch in the lost bytes, nobody can read that one any more.
//
// # Expiry
//
// Only a leader expires producers, by its own monotonic clock and since when it
// last heard of them; client timestamps have no part in it. Each expiry is
// recorded with the log end at which it was decided. Replicas apply recorded
// expiries and never use a clock, so a change of leader does not change an
// answer. An expiry at offset X removes what the producer stored below X and
// belongs to the range that contains X.
//
// # Three ways to the same state
//
// Replaying batches in order (Update), merging range summaries in order (Merge),
// and a snapshot followed by either give the same state. An update trusts the
// log: a batch that does not continue its producer's sequence was accepted by a
// leader that knew better, and replaces what is known.
//
// The package is pure: no input or output, no clock, no goroutines. A State has
// one owner and is not safe for concurrent use.
package producerstate
