// Package grpcclient is the one way to make a gRPC connection in Braid.
//
// A connection has tracing and metrics (otelgrpc stats handler), keep-alive
// pings that find a silent peer within Keepalive.Time + Keepalive.Timeout (15 s
// by default) and that no server of package grpcserver takes offence at, the
// same message sizes and windows as the servers, bounded reconnect delays, and
// a deadline on every unary call: one without gets the default timeout.
//
// Nothing is retried behind the caller's back: gRPC's configured retries are
// off and service configs from DNS are ignored. (gRPC still sends a call again
// when it knows that no server saw it; that is not a retry.) An UNAVAILABLE
// therefore may mean that the server executed the call. Only calls whose
// repetition is harmless may be wrapped in backoff.Retry, with
// rpcerr.Idempotent as the classifier.
//
// A target is one address, a list of addresses separated by commas of which
// any live one serves, or anything with a scheme ("dns:///brokers:9090").
//
// The functions are safe for concurrent use; a connection belongs to the
// caller, who closes it.
package grpcclient
