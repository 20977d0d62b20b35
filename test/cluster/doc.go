// Package cluster runs a whole cluster inside the process of a test: an embedded
// etcd, the object store emulator, and any number of metadata replicas,
// remote-log managers and brokers, each wired by its own service's Config, Build
// and Run, on loopback addresses and in directories of the test.
//
// # What a member is
//
// A [Member] has an identity, an address and, if it is a broker, a data
// directory; these stay the same over all of its lives. [Member.Stop] ends it as
// a signal would. [Member.Kill] ends it as SIGKILL would: at that moment every
// connection it has is reset, nothing it still sends arrives, nothing it still
// writes reaches its disk, and its directory's lock is free, though its goroutines
// need a while to notice; the next life may begin at once. What was written before
// stays, as in the page cache of a machine that goes on. [Member.Isolate] cuts a
// member off without ending it.
//
// # What a member is reached by
//
// Every connection passes the harness: into a member through a listener that it
// keeps, out of it through the dialers that services take, and to etcd and the
// bucket through a relay of the member's own. So one member can be cut off from
// everything, and etcd ([Cluster.StopEtcd]) or the bucket ([Cluster.BucketDown])
// from everybody. The bucket is used through the real client, and faults of single
// requests are rules of the emulator ([Cluster.Bucket]).
//
// # Concurrency
//
// The methods belong to the goroutine of the test, except for connections, which
// any goroutine may use. Nothing here waits without a bound: [Patience].
package cluster
