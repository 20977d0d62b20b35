// Package rlm is the remote-log manager: it braids the fresh records of many
// partitions into combined objects, uploads and commits them, and serves ranged
// reads of objects.
//
// [Build] validates the configuration, reaches the bucket (bounded) and wires
// the service without starting it; [Server.Run] starts everything, blocks, and
// stops in order: no new ranges, everything in flight committed and answered,
// streams ended, the epoch closed in the metadata log. Two instances live in
// one process.
//
// What must hold is in the packages: planner (what to upload, commit, answer),
// combiner (verification, buffers, uploads, commits), fetcher (reads).
package rlm
