// Package fetcher reads combined objects for others: ranged reads out of a
// cache of blocks, one GET per block however many ask for it, and the footers
// of ranges.
//
// # Guarantees
//
// A block as large as an object normally is (8 MiB) is fetched with one GET,
// shared by all who wait for it; one who gives up does not end it for the
// others. When a block is a whole object, every range in it is verified against
// the object's footer before a byte is served; a block that fails is fetched
// once more, and damage that stays is an error only to those who read the
// damaged range ([ErrDamaged]); after two seconds it is looked at again.
//
// Footers are kept by themselves, as their bytes with an index of ranges: after a
// broker was lost thousands of partitions look into the footer of one object, and
// each costs a search and the decoding of its own part.
//
// An object that is absent ([ErrNotFound]) is told from a store that cannot say
// so now ([ErrUnavailable]): the latter never becomes the former.
//
// # Limits
//
// The caches of blocks and of footers are bounded in bytes; so is the memory for
// fetching and decoding footers, and so is what readers hold on to while they send
// it on, per peer and in total. Past those a read fails with a [*LimitError]
// and can be resumed where it stopped. Every GET has a deadline.
//
// # Concurrency
//
// A Fetcher is safe for concurrent use. Its goroutines are the running GETs,
// which Close ends and waits for.
package fetcher
