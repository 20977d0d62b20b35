// Package client is the Go client of Braid: a producer, a reader and topic
// administration.
//
// A [Client] knows the cluster's brokers from a few addresses to begin with,
// finds the leader of each partition and goes there itself (it forbids brokers
// to forward), and learns of a change of leader from refusals.
//
// # Producing
//
// A [Producer] sends records of one topic. Records with a key go to the
// partition that Kafka's clients would choose (murmur2), so that tools agree;
// records without one fill a batch of one partition after the other. Each
// partition has batches in flight on one stream, in order, at most
// [ProducerOptions.MaxInFlight]. Every record gets an answer through its
// [Pending]: an [Ack] with offset, leadership, levels reached and latency, or an
// error. Nothing is dropped silently:
//
//   - What a server refused without storing it, and what got lost with a
//     connection, is sent again: batches carry producer id and sequence, so a
//     repeat gets the first answer (invariant I7).
//   - OUTCOME_UNKNOWN is settled with AwaitDurability: the level was reached,
//     or the records were cut and are sent again.
//   - SEQUENCE_GAP (records acked at a weaker level were lost), PRODUCER_FENCED
//     and refusals that repeating can't mend fail the batch and everything
//     behind it in the partition, and the partition takes no more records, until
//     [Producer.Resume] says that the caller knows.
//
// # Reading
//
// A [Reader] delivers the records of one partition in order. It checks each
// batch (CRC32C, offsets without a hole) before a record leaves it, survives
// a change of leader by going on at the next offset, and names the leadership of
// the last record it saw, so that a cut below it is told as LOG_TRUNCATED.
//
// # Silent leaders
//
// A leader that was paused or cut off can't say that it was replaced. After two
// seconds without an answer (four on a stream of records, on which servers are
// heard at least every two) up to three other brokers are asked who leads, again
// every second. Only another leader under a higher epoch is followed: a leader
// that is slow keeps its clients until the stall timeout.
//
// # Errors
//
// Errors of servers are read with package rpcerr: reason, facts and how to react.
//
// # Concurrency
//
// Client, Producer and Admin are safe for concurrent use; a Reader belongs to
// one goroutine. The caller closes what it made, producers and readers before
// their client.
package client
