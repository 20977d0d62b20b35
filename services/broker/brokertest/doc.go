// Package brokertest starts brokers in the process of a test.
//
// An [Instance] can be stopped as an operator would, or killed: its network and
// its disk are cut at once and for good, so that nothing it still does reaches
// anybody, as after the death of its process. What it had written by then is
// there for the next one on the same directory, as with a page cache.
package brokertest
