// Package gcs is an object store in Google Cloud Storage, on the official
// client library's JSON API.
//
// # Guarantees
//
// A create is one multipart request with the precondition "does not exist" and
// the body's CRC32C, which the service checks before it stores anything; the
// answer's size and CRC32C are compared once more here. The content streams
// from the body's own slices; nothing as large as a chunk is buffered.
//
// Every call is one attempt with a deadline: a fixed time plus the bytes
// divided by the slowest rate that still counts as progress; a stream whose
// peer falls silent fails after the stall time. The client library's own
// retries are off: it never repeats a one-request upload anyway, and one layer
// should do it, with one budget (package decorate). One exception is left to
// the library: a read whose connection breaks is resumed inside the attempt,
// from the byte reached, with the generation pinned.
//
// # Failures
//
// Both ways in which the service reports a failed precondition, HTTP 412 and
// the gRPC status FAILED_PRECONDITION, give the same error. A 404 of an object
// can only be told from a 404 of its bucket by the service's words; creates
// don't depend on them, as a create-only upload finds nothing missing but the
// bucket.
//
// # Concurrency
//
// A [Store] is safe for concurrent use. Closing it ends idle connections; calls
// still running end by their contexts.
package gcs
