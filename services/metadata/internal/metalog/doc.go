// Package metalog keeps the metadata log in etcd.
//
// The log is a dense sequence of entries. Below a key prefix, "log/<20 digits>"
// holds the entry of that offset, "end" the log's end in decimal, "claim"
// the identity that the log is to begin with, "start" where it begins now, and
// "leader/…" the election of the one replica that may append.
//
// # Writing
//
// [Log.Append] adds a group of entries in one transaction that compares the
// creation revision of the writer's leader key and the log's end. So a writer
// that lost the election can't append, however late its transaction arrives,
// and a transaction that etcd executes twice has its effect once. When the
// outcome of an attempt is unknown, the same transaction is tried again: it
// either succeeds, or its other branch reads the entry at that offset, and the
// entry's write id tells whether it is ours. Nobody gets a verdict before that
// (design review F9).
//
// # Reading
//
// [Log.Load] reads the log page by page at one revision. [Log.Follow] goes on
// from there: a watch that begins at the revision after, requires its etcd
// member to see a leader, and delivers what one transaction wrote as one group.
// Order and completeness come from the entries' own offsets, never from etcd's
// revisions: an offset seen twice is skipped, a missing one makes Follow read
// the log again, and so does a compaction below the watch. A periodic
// linearizable read of the end finds a watch that is silently stuck and an
// etcd that was rolled back.
//
// Answers of another etcd cluster, entries of another incarnation, a hole and
// an undecodable entry end the work with typed errors: nothing is skipped.
//
// # Trimming
//
// [Log.Trim] raises "start" and then deletes the entries below it, some at a
// time, each transaction guarded as an append is; [Log.Compact] frees the space.
// What of it was cut short the next trim completes. Whoever reads below the
// start gets a [*TrimmedError]: a snapshot holds what was there.
//
// A Log is safe for concurrent use.
package metalog
