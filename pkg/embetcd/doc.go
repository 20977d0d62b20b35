// Package embetcd runs a one-member etcd inside the process, for `braid dev`
// and for tests. It is no substitute for a real cluster: the only copy of the
// data is one directory.
//
// What a client sees is real etcd: transactions, leases, watches and
// compaction behave as in a deployment. A server started again on the same
// directory continues with the same data, whatever port it gets.
//
// Start and Close are called by one owner; the other methods are safe for
// concurrent use. Several servers may run in one process, each on a directory
// of its own.
package embetcd
