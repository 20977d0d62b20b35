// Package walobject is the format of combined objects: the fresh records of
// many partitions in one immutable object.
//
// An object is the bytes of its ranges, a footer that describes them, and a
// trailer of 32 bytes that finds the footer:
//
//	[range][range]…[footer: CombinedObjectFooter][trailer]
//
// docs/formats/combined-object.md draws every byte. Ranges are ordered by topic
// creation offset, partition and base offset, so that a follower of several
// partitions needs one ranged read.
//
// # Guarantees
//
// [Build] makes an object of byte slices without copying or joining them; its
// checksum is computed from those of the ranges, so bytes that change after
// they were verified make the store refuse the upload. What Build writes,
// [ReadFooter] accepts, and two builds of the same content are equal byte for
// byte.
//
// [ReadFooter], [ParseTrailer], [DecodeFooter] and [ParseName] take bytes from
// anywhere: they never panic, allocate no more than a small multiple of their
// input, and fail with an [*Error] that matches [ErrCorrupt] or
// [ErrUnsupported]. [VerifyRange] proves that a range is what its descriptor
// says, down to the chain hash at its end (design review F14, invariants I3, I14).
//
// # Concurrency
//
// The package is pure: it has no state, no clock and no I/O. Functions may be
// called concurrently; what they are given must not change meanwhile.
package walobject
