// Package cluster is a broker's picture of the cluster: brokers, remote-log
// managers, topics with their settings, and the elected leader of every
// partition.
//
// A [View] is immutable. A [Tracker] makes the next one out of an image or an
// entry of the metadata log; a [Follower] keeps the newest in reach, over
// reconnects, from the membership stream of the metadata service.
//
// What the view says of leaders is good for finding the right broker to talk
// to. It decides nothing: who may append is the partition machine's matter,
// which follows the segment stream.
//
// Views may be read by any number of goroutines. A Tracker belongs to one.
package cluster
