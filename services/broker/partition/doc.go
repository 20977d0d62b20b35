// Package partition is the pure machine of one partition on one broker: who leads, what the leader does with its log
// between being elected and being opened, how far the log is committed, what may be acked, and from where ranges are
// sent to the remote-log manager.
//
// The machine takes events and time as arguments and returns effects. It does no I/O, starts nothing and keeps no
// clock, so that a test can run many thousands of failures a second against it. It is not safe for concurrent use:
// one goroutine owns it.
//
// # An election, seen from the leader
//
// The metadata service raises the partition's fence and names a leader (FENCING). From then on nobody's ranges are
// accepted until the leader opens its epoch, so the object end stands still. The leader reconciles its log with the
// committed ranges by lineage, never by length (RECOVERING): what lies off the partition's lineage goes; a log that
// does not reach the object end, or that holds other bytes there, starts again at the object end, and older records
// are read from the bucket; under a free start the leader keeps its own tail above the object end where the tail
// continues the lineage, under an exact start it cuts it. Then it asks to open its epoch at its end. Nothing is
// appended before that was accepted (ACTIVE).
//
// # What an ack rests on
//
// Under the commit rule "object" the high watermark is the object end. A verdict moves it. After a refusal the leader
// acks exactly what lies below the object end and below the start of the first lineage entry above its own epoch.
// A refused range counts as committed only when the leader's own chain hash at the object end is the partition's.
package partition
