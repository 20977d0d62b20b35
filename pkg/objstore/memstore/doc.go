// Package memstore is an object store in memory with the exact semantics that
// package objstore describes: the reference that package objstoretest pins and
// that other implementations are compared with.
//
// It is exact where emulators are not: preconditions of deletes, generations
// that only grow, listings that start behind any name. It has no faults of its
// own; add them with package decorate. Nothing outlives the process.
//
// A [Store] is safe for concurrent use, starts no goroutine and never waits, so
// it can be used inside a synctest bubble.
package memstore
