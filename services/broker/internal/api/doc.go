// Package api serves braid.broker.v1.LogService: it checks requests, hands them
// to the partitions of package replica, or forwards them once to the leader, and
// turns domain errors into statuses. It decides nothing about a log.
//
// # Who answers
//
// A call is tried here first. When this broker turns out not to lead the
// partition, nothing was stored, and the call goes to the leader with the header
// braid-forwarded: 1, unless it came with that header or with
// braid-no-forward: 1: then the answer is NOT_LEADER with the leader's address.
// So a call takes at most one hop, whatever two brokers believe of each other
// (design review F25). Streams are forwarded as a whole, decided by their first
// request; one that loses its leader later ends with NOT_LEADER. ExplainPartition
// is answered here when the leader does not answer.
//
// A forwarded append whose connection breaks may have been stored: its error is
// OUTCOME_UNKNOWN without offsets. Only a failure to connect at all, or a refusal
// by the leader, says that nothing was stored.
//
// # What is checked before an append
//
// The broker that leads checks every batch: structure and CRC, codec, no
// transaction, no control batch, the topic's max.batch.bytes, and that all its
// records decode to what the header says, within [Config].MaxDecodedBytes. A batch
// that passed this can be read by everybody who can read the partition at all; one
// that did not would stop every reader of records at its offset for ever. The last
// check is one pass over the records: it allocates nothing per record, and costs
// about as much as the CRC for records of 1 KiB and 0.1 to 0.2 µs per record for
// small ones (BenchmarkCheck, on a busy 2.8 GHz Xeon): a core checks some 600 MB/s
// of 100-byte records, more than gRPC delivers to it. Compressed batches cost
// their decompression.
//
// # What is said for ever
//
// LOG_TRUNCATED and OFFSET_OUT_OF_RANGE make a client give up records. A leader
// that was deposed and does not know it yet could say so of records that its
// successor holds; so the controller has to confirm the leadership first, and a
// leadership newer than the one known here is answered UNKNOWN_LEADER_EPOCH.
//
// # Bounds
//
// Streams, waiters, forwarded calls and the bytes of batches that wait to be
// written have limits; past them callers get RESOURCE_EXHAUSTED, except that a
// Produce stream is simply not read on. Every wait has an end: an append answers
// OUTCOME_UNKNOWN shortly before its caller's deadline, so that the caller learns
// the offsets, and after [Config].AppendMaxWait at the latest.
//
// # Concurrency
//
// A [Service] is safe for concurrent use. A Produce stream has two goroutines
// besides its handler; they end with the stream.
package api
