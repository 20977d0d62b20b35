// Package watch holds what this replica has applied of the metadata log, and
// fans it out.
//
// The [Hub] has the applied state, for queries, and the newest entries in a
// ring of bounded size. Entries are published in order, by whoever has them
// first: the controller right behind its commit, or the one watch on etcd;
// what was published before is skipped.
//
// Subscribers pull: each has a position in the log and reads the ring at the
// speed of its own connection, so a slow one costs no memory (I13). One that
// falls out of the ring is told so ([ErrSlow]) and may resume. [Hub.Segments]
// serves the events of a changing set of partitions, [Hub.Metadata] whole
// entries. Positions on a stream never go back, and everything below a position
// that was sent has been sent.
//
// A state from a snapshot takes the place of the whole state ([Hub.Install]):
// what lies below its end the hub does not know, and asks the log in etcd. Where
// that is trimmed, streams begin again with a reset, or end with the log's error
// if no reset has what they want.
//
// A Hub is safe for concurrent use; a stream belongs to its goroutine.
package watch
