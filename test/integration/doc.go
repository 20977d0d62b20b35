// Package integration holds the tests of whole clusters: every service as it is
// wired for production, etcd and an object store inside the process, all calls
// over the network. Package cluster is what they run on.
package integration
