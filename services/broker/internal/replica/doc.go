// Package replica runs the partitions of a broker: it is the shell around the
// pure machine of package partition.
//
// A [Manager] keeps the broker registered, follows the metadata service and
// owns every [Partition] that this broker may hold. A partition's log is opened
// when the broker is first elected to lead it, or when there is something to
// copy; until then the partition costs a view and a list of ranges.
//
// # Appends
//
// [Partition.Submit] returns once the batches are in the leader's log, or with
// a typed error: then nothing was stored. [Ticket.Wait] waits for the level
// asked for; the only error after the append is [OutcomeUnknownError]. Appends
// that arrive while another is being written share the next write.
//
// # Followers
//
// A partition that is led elsewhere copies the committed ranges from the bucket,
// each compared with its own chain hash before it is appended. It serves
// [Nearest] reads below what it has copied, while it is reconciled with the
// present leader; tells its leader how far it is, without asking for records
// ([PeerService]); and keeps what it needs to lead. What can't be fetched is
// asked for again and never cuts the log.
//
// A broker that a partition's replica list does not name any more lets go of it,
// and keeps its directory.
//
// # Hand-over
//
// A leadership moves without loss in two cases: when the broker stops
// ([Manager.Drain]), and when the controller wishes that a replica leads which
// stands before this one. Either way appends are refused for a moment, and the
// other replica is elected only when all of them are in the bucket; a wish that
// can't be fulfilled within two seconds is dropped, and appends go on.
//
// # Concurrency
//
// All exported methods are safe for concurrent use. Each partition has a
// writer's role that one goroutine at a time holds: it steps the machine,
// writes and cuts the log and carries out effects in order. Nothing that waits for
// another process happens in that role; such work runs in goroutines of its own
// that end with the fence they serve, and answers with an event. The partition's
// mutex guards the machine, the queue and the waiters, and is not held across
// input or output.
package replica
