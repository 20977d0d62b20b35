// Package lineage says who wrote which part of a log, and from that where two
// logs part.
//
// A lineage is the ordered list of leaderships that wrote a partition's log,
// each with the offset it began at. It is data: it travels with the log, a
// mirror copies it, and only an opened epoch of a writable partition adds to
// it. It is not the fence, which says who may commit.
//
// # Why the common prefix is exact
//
// A leadership, (incarnation, leader epoch), is unique over all clusters and
// for all time, has one writer and is never resumed (invariant I2), and a
// replica appends a batch only behind the predecessor that the sender names
// (I3). So an offset of a leadership has one content and one past, and all logs
// ever held anywhere are paths from the root of one tree. Two logs that contain
// the same leadership with the same start are equal below the lesser of its two
// ends; above the last such leadership they never agree again. Neither a third
// party nor a clock nor the direction of mirroring matters, and unclean
// elections only add branches. Integer epochs alone do not have this property:
// two clusters may use one number for different data (KIP-1279, field report
// B213). Where I2 was broken after all, by a disk image restored or rot, the
// lineage can't see it and package chainhash does.
//
// # Values
//
// A [Lineage] is a plain slice that the functions here never modify: they
// return new values or sub-slices without spare capacity, so a lineage may be
// shared between goroutines as long as nobody writes to its elements. All ends
// are exclusive. The package is pure.
package lineage
