// Package bucket looks at the bucket before a remote-log manager uses it: that
// it can be reached, that it is the cluster's, and that none of its settings
// deletes, or keeps, objects behind the cluster's back.
//
// Its functions may be called concurrently; every wait is bounded.
package bucket
