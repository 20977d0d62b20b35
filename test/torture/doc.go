// Package torture holds one test: a cluster of OS processes, as `braid dev
// --processes` runs it, is tortured while programs write and read, and a ledger of
// every answer is held against what is read.
//
// # A round
//
// After a moment of calm a process is drawn: a broker, a remote-log manager or a
// metadata replica. It gets SIGKILL (and is started again a second later), or
// SIGSTOP and, after 0.5 to 8 s, SIGCONT. Nine rounds go once through each role
// with a kill, a pause within the session timeout and a pause of at least the
// session timeout, in an order and against instances that follow from the seed; half of
// the faults of the metadata service aim at whoever is the controller.
// The next round begins when every process serves again.
//
// # What has to hold
//
// Recovery: a partition accepts writes again when a producer has its OBJECT ack for
// a record that it sent after a moment. Two moments are measured, the signal that
// began the fault, however long the pause, and SIGCONT (for a kill both are the
// same): from each of them every partition has to accept within [Bound]. Nor may
// the OBJECT ack of any record that is sent in the round take longer than that.
//
// Truth: every record that was acked at OBJECT is read at the offset of its ack,
// with its content and the leadership of its ack, once; no record is read twice or
// was never sent; what a client said is not stored is not there; records of a key are in
// order; an ack names the level that was asked for; offsets have no holes. It is
// held while the cluster is tortured, by readers that follow, and at the end, by
// readers that begin anew; both must have read the same. Producers that ask for OBJECT
// get no error at all. An ack at LEADER may be lost with its leader's log, but only
// together with all that this leadership wrote behind it, and the producer is told.
//
// Processes: none ends that wasn't killed, and none logs a panic.
//
// # Running it
//
// A run of three rounds is part of the tests, and not of go test -short; `make torture` runs 20, with ARGS for
// flags: -rounds, -seed, -rate (records a second), -keep. The seed fixes what is
// drawn, not what comes of it. After a failure the directory of the run stays and its
// name is printed: events.jsonl (faults, starts and ends, recoveries), ledger.jsonl
// (every record with its answer), read.jsonl (what was read at the end),
// violations.txt, and the cluster's data directory with the logs of all processes.
package torture

import "time"

// SessionTimeout is the session timeout of `braid dev`.
const SessionTimeout = 3 * time.Second

// Bound is how long after a fault, and after its end, a partition may refuse or
// delay writes.
const Bound = SessionTimeout + 10*time.Second
