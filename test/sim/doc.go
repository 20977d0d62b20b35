// Package sim runs the pure machines of all roles against each other over a simulated network, bucket and disk, under
// random failures, and compares what comes out with plain contents. There is no clock and no goroutine: a run is a
// function of its seed.
package sim
