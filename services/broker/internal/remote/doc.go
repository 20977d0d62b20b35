// Package remote reads committed records from the bucket, through a remote-log
// manager.
//
// [Ranges] is what a broker remembers of a partition's committed ranges: a
// compact, sorted list. A [Reader] fetches one range whole, from a remote-log
// manager of its own zone where there is one, and gives it out only after every
// check: length and CRC32C of the range, each batch at its place, and the chain
// hash at the range's end continued from the one at its base (invariant I14).
// Verified ranges are kept in a bounded cache.
//
// The three ways not to get bytes stay apart (invariant I11): ErrUnavailable is
// worth another try, ErrNotFound says that the object is gone, a [DamageError]
// that what came was not what was committed.
//
// Both types are safe for concurrent use.
package remote
