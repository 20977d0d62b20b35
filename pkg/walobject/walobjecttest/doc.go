// Package walobjecttest makes valid ranges for tests of whoever handles them:
// checksums, chain hashes and descriptors are computed as a broker would, so
// what a test wants wrong it has to spoil itself. The same calls make the same
// bytes.
//
// A [Partition] belongs to one goroutine. The package is imported by tests only.
package walobjecttest
