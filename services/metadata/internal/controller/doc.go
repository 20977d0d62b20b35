// Package controller makes one metadata replica of many the writer of the log.
//
// # Terms
//
// [Controller.Run] campaigns in etcd, and once elected leads one term after the
// other: it catches up with the log, writes its ControllerElected entry, whose
// offset is its epoch, and then judges commands until its lease is lost, a
// write fails, another controller's entry appears, or it is told to stop; then
// it resigns. Every term starts from the committed log: nothing that a term
// only believed survives it.
//
// # One appender
//
// Commands wait in a bounded queue. One goroutine decides them, in order, on
// the speculative head (the committed state plus the group being built), writes
// the group as one transaction, publishes it, and only then answers. Commands
// that came meanwhile are the next group. So a verdict is never given before it
// is in the log, and a command never sees an effect that may vanish. A verdict
// that needs no entry is given only while the lease is confirmed (design review
// F9, H14).
//
// # Sessions and elections
//
// Heartbeats of brokers and remote-log managers renew sessions in memory; they
// are answered only while etcd confirmed the controller's lease within a third
// of its time to live, counted from when the confirmation was asked for. A new
// controller grants every registered member one full timeout, and so does one
// whose lease was unconfirmed for a while: an etcd hiccup is nobody's death
// (design review F19, H14). What expires becomes an entry; which leaders are to
// be elected is the state's decision, asked whenever an event or the clock may
// have changed its answer. Partitions that have had no live replica for long get
// a live broker as one more, in portions; leaders before which a live replica
// has stood for long are asked, in the answers to their heartbeats, to hand over
// to it, and nothing is forced.
//
// # Space
//
// The controller asks etcd how full it is, and refuses commands that need an
// entry by what they are worth: commits of ranges first, then changes of topics,
// then elections and what frees space (design review F22). Trimming is no
// command and goes on.
//
// All exported methods are safe for concurrent use.
package controller
