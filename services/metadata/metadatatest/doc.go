// Package metadatatest runs metadata replicas in a test's process, with a real
// etcd and an object store in memory.
package metadatatest
