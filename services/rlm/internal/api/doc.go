// Package api serves braid.remotelog.v1: it validates requests, calls the
// combiner and the fetcher, and maps their errors. It decides nothing.
//
// A Server is safe for concurrent use.
package api
