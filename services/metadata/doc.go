// Package metadata is the metadata service: the truth about topics, leaders and
// committed ranges, as one log in etcd.
//
// [Build] connects to etcd and the object store, reads the log, behind a snapshot
// where it was trimmed, and fails with an error that names what is missing; it
// starts nothing. [Server.Run] follows
// the log, campaigns for the controller's role and serves gRPC until its
// context ends; then it resigns first, drains and stops. Any number of replicas
// may run, in one process too; one of them is the controller.
//
// Each replica keeps snapshots of the state in its data directory and gives them
// out; the controller also keeps them in the bucket and trims the log behind
// them. A cluster that has begun needs its bucket for that alone, so a replica
// starts and leads without it.
//
// A replica that meets what it must not serve from (an etcd that was rolled
// back or exchanged, a damaged log, events it does not know, a bucket prefix of
// another cluster) ends with an error instead of going on.
package metadata
