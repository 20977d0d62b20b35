// Package snapshot keeps snapshots of the metadata state, so that the log in
// etcd stays short and a replica starts without the whole of it.
//
// A snapshot is named by the log's incarnation, its end offset (exclusive) and
// the epoch of the controller that wrote the entry before. Its bytes are
// canonical (state.Encode), so every replica writes the same ones and its name
// can also carry the beginning of their SHA-256.
//
// [Disk] holds a replica's own two newest ones, each written aside, synced and
// renamed. [Bucket] holds the cluster's, as create-only objects. The [Keeper] of
// each replica writes to its disk when enough entries or time have passed; that
// of the controller also stores its newest one in the bucket and trims the log
// below the older of the two newest there, never before both are (I10). The
// [Restorer] gives a starting replica, or one that was away while the log was
// trimmed, its state: from the disk, a peer or the bucket, whichever has a sound
// one first. Nothing partial or damaged is ever used, and a snapshot that the
// log does not lead to shows that etcd was rolled back (design review F12).
//
// Disk, Bucket and Restorer are safe for concurrent use; a Keeper's Run is one
// goroutine, its other methods may be called from any.
package snapshot
