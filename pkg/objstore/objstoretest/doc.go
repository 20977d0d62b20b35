// Package objstoretest is the contract of package objstore as one test suite
// that every implementation runs: the reference in memory, the client of Google
// Cloud Storage against the emulator, decorated stores, and, where somebody
// asks for it, a real bucket.
//
// A store that can't keep a clause skips its case by name, with the reason:
//
//	objstoretest.Run(t, open, objstoretest.Skip{"Delete/WrongGeneration": "the fake ignores it"})
//
// A skip whose name is no case fails the suite, so a mended store must drop it.
//
// The package is imported by tests only.
package objstoretest
