// Package record reads, checks and builds Kafka record batches of version 2,
// the one format in which Braid keeps records on the wire, on disk and in the
// bucket. The layout is drawn in docs/formats/record-batch.md.
//
// # Guarantees
//
// The package is pure: no clock, no I/O, no global state besides pools of
// compressors. Nothing that a length field claims is ever allocated: memory
// grows with bytes that are really there, and decompression stops at a limit
// the caller gives. Header access, [Batch.Validate], [Walk], [Checker] and
// rewriting the base offset or the leader epoch allocate nothing; decoding
// records allocates nothing per record.
//
// A batch is Braid's only if it can be appended to a log without holes: its
// record count equals its last offset delta plus one, and its offsets are
// dense. Batches with holes, as compaction leaves them, are refused.
//
// # What the CRC covers, and what a broker may rewrite
//
// The CRC32C starts at the attributes. Base offset, length, leader epoch and
// magic lie before it, so a broker can set the base offset and the leader
// epoch without touching the rest; for the same reason a flipped bit in one of
// them passes the CRC. [Checker] therefore compares all four with what is
// known from outside: base offset = previous end, epoch = the lineage's at
// that offset, length = where the next header begins (design review F14).
//
// # Concurrency
//
// A [Batch] is a plain byte slice: any number of goroutines may read it,
// setters need exclusive access. A [Reader], [Builder] or [Checker]
// belongs to one goroutine at a time. Package functions are safe for concurrent
// use.
package record
