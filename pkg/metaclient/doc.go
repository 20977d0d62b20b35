// Package metaclient reaches the metadata service from brokers, remote-log
// managers and commands.
//
// A [Client] holds connections to the metadata replicas it was given and to
// those it was pointed at. [Client.Controller] and [Client.Any] are
// grpc.ClientConnInterface values, so the generated clients are used as they
// are:
//
//	segments := metadatav1.NewSegmentServiceClient(client.Controller())
//
// # Guarantees
//
// A unary call through Controller follows NOT_CONTROLLER hints, and tries the
// other replicas while none of them is the controller, until its context ends
// or [Options.CallTimeout] has passed. A call that the contract marks as
// idempotent is also repeated when its outcome is unknown (connection lost,
// attempt timed out); any other call is repeated only where the answer proves
// that nothing happened: it never reached a server, or the server refused it as
// not being the controller, as draining or as not ready. Every other error is
// the caller's, unchanged, for package rpcerr to read.
//
// Streams are not repeated. The error that ends one teaches the client where
// the controller is, so opening the next one goes there.
//
// [Session] keeps a member of the cluster alive: it registers, sends
// heartbeats, follows the controller, and registers again when its epoch is
// closed.
//
// # Concurrency
//
// Client and Session are safe for concurrent use. Every goroutine ends with
// Close, or with the context of the Run that started it.
package metaclient
