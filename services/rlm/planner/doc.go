// Package planner decides what a remote-log manager uploads, commits and
// answers. It is a pure machine: events and time go in, effects come out.
//
// # The rules
//
// At most [Config.InFlight] objects are in upload. With none in flight the next
// upload starts at once; behind one it waits for [Config.Linger], for a full
// object, or for the end of the other. A PUT that takes longer than nearly all
// before it is hedged by a second attempt under a new name; a failed one is
// repeated under a new name. Objects are committed strictly in the order of
// their sequence, n+1 after n's verdict, so that ranges of one partition that
// lie in different objects never overtake one another (design review F20).
//
// An object takes the head range of every partition before the second one of
// any, in the order in which the partitions last had their turn, so nobody
// waits behind another's backlog (F22). It takes a partition from one stream only.
//
// A refused range takes with it everything queued, and everything that still
// comes, of its partition and run; each gets the same verdict. A higher run
// begins anew and drops what is queued of the lower ones. Every range offered is
// answered exactly once, in the order of its partition, unless its stream is
// closed first.
//
// When the epoch is closed, everything is answered NOT_JUDGED, but for an
// object whose commit was sent and has no verdict: that command is still
// repeated, because it may have been accepted before the epoch was closed, and
// the verdict is the metadata service's to give (F9).
//
// # Why two in flight, a linger of 10 ms, a hedge
//
// TestPipelineInOrderBeatsTheLiteralRules simulates 40 partitions on two
// managers over a store with a heavy tail (PUT p50 80 ms, p99 400 ms); go test -v
// shows all figures. In order with two in flight a record is acked after 165 ms
// (p50) and 1,872 ms (p99); the hedge makes that 148 and 394 ms for 6 % more bytes.
// Sixteen in flight, committed in the order in which they arrive: where a refused
// range is sent again as it is, 1,679 and 4,608 ms and every byte uploaded 15 times;
// where the leader sends all from the object end, 115 and 235 ms, paid with six
// times the bytes and five times the requests.
//
// The linger hardly matters for latency (0 to 100 ms: p50 147 to 153 ms); it saves
// requests, 42 PUT/s at 10 ms, 26 at 100 ms. 10 ms also costs little on a store
// that answers in 10 ms. The bound on uncommitted objects, at twice the uploads,
// costs nothing that can be measured, and ends what a stuck PUT or an absent
// controller could pile up.
//
// # Concurrency
//
// A Planner is not safe for concurrent use. Time is a monotonic duration since
// any fixed moment; it must not go back.
package planner
