// Package chainhash chains the batches of a partition's log into one 128-bit
// hash per batch border. Two logs with the same hash at the same offset have
// the same bytes below it, base offsets and leader epochs included; a lineage
// finds where histories fork, the hash proves them equal and finds by bisection
// what rot or a reused epoch hides.
//
// The construction, frozen since it is stored in indexes, object footers and
// the metadata log, is
//
//	next = XXH3-128(prev || XXH3-128(batch))
//
// with seed 0 and both inner hashes in the canonical (big-endian) form, over
// the batch's bytes exactly as they are stored. docs/formats/chain-hash.md says
// why, and compares the speed with other hashes.
//
// XXH3 is not a cryptographic hash: the chain detects accidents (rot, lost
// writes, an epoch used twice, bugs), not a peer that forges bytes on purpose.
//
// The package is pure and everything in it is safe for concurrent use.
package chainhash
