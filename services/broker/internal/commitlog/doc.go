// Package commitlog keeps the local log of one partition: a directory with
// segment files of record batches, their indexes and a checkpoint.
//
// # What is kept
//
// A partition directory is named "<topic uuid>-<partition>" and holds
//
//	partition.meta          identity, written once; a directory of another
//	                        cluster or of another life of the topic is refused
//	log.checkpoint          log start, first segment and its chain hash,
//	                        recovery point and its chain hash, lineage, and an
//	                        unfinished truncation or reset
//	<20 digits>.log         record batches exactly as they are on the wire
//	<20 digits>.index       offsets, times and chain hashes of that segment;
//	                        derived, rebuilt whenever it is not what the
//	                        segment says
//	<segment>.cut-<offset>  bytes that were cut out of that segment although
//	                        there was more to them than being torn, the first
//	                        of them expected at that offset; for people, never
//	                        read back, never removed, at most 256 MiB in all
//
// docs/formats/local-log.md draws the bytes.
//
// # Guarantees
//
//   - Bytes leave the log only after every batch was checked: its CRC fits, its
//     base offset is the previous end, its leader epoch is the lineage's at that
//     offset and its length ends where the next batch begins (invariant I14).
//   - The first failed write or sync ends the log's life as a writer: the page
//     cache can no longer be trusted to hold what a second sync would report as
//     written. Every later write returns a FailedError; reads of what was
//     published before go on.
//   - Open trims a torn tail above the recovery point and says so. Damage below
//     the recovery point, that is in bytes once synced, is reported and nothing
//     is cut: the log opens read-only below the damage until the caller
//     truncates, resets or salvages it. Whatever of a log is cut and may be worth
//     something is put aside first and reported (Cut).
//   - TruncateTo, Reset, AdvanceStart and every change of the lineage are
//     durable on return. Each has one commit point, the atomic replacement of
//     the checkpoint; a crash at any line is finished or undone by Open.
//
// # Concurrency
//
// Append, AppendDeferred, Flush, TruncateTo, Reset, Salvage, AdvanceStart, the changes
// of the lineage and Close are serialized by the log; a partition is expected
// to have one writer. Sync may run beside them, so that flushing old bytes does
// not hold up appends. Reads (Read, ChainAt, OffsetForTime and the getters) take
// no lock that is held across input or output and see an immutable snapshot; a
// read that meets a truncation is repeated on the new state.
//
// All file access goes through vfs.FS, so that tests can lose un-synced bytes
// and fail any operation.
package commitlog
