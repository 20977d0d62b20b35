// Package broker is the broker service: it leads partitions, takes and serves
// records, and sends what it takes to a remote-log manager.
//
// [Config] is data; [Build] turns it into a [Server] without starting anything
// but the listener; [Server.Run] serves until its context ends and stops in order:
// NOT_SERVING, hand the partitions over, wait for load balancers, end streams,
// finish calls, close the logs. Health answers SERVING once the broker is
// registered and knows the cluster.
//
// Errors of Run that end the process: the metadata service can't be reached
// within start.timeout, another process holds the data directory, the directory
// belongs to another cluster or broker, another broker holds the id, etcd was
// rolled back, the metadata log needs a newer broker.
//
// A Server belongs to one goroutine; the services behind it are safe for
// concurrent use. Several servers can live in one process.
package broker
