// Package grpcserver is the one way to build a gRPC server in Braid.
//
// Every server has tracing and metrics (otelgrpc stats handler), reflection
// (v1), the standard health service, keep-alive policies that match the ones
// of package grpcclient, bounded message sizes, and bounded numbers of running
// calls and streams: past a bound the caller gets RESOURCE_EXHAUSTED at once
// instead of waiting without a word.
//
// Errors leave through package rpcerr. An error that no layer mapped becomes
// INTERNAL with a fixed sentence and is logged here, once, with the call's
// trace id. A panic in a handler is a broken invariant: it is logged with its
// stack, counted (rpc_server_panics_total) and becomes INTERNAL; the process
// lives on. A panic in a goroutine that a handler starts is the handler's own.
//
// # Stopping
//
// A server stops in steps, so that a service can put its own between them:
//
//  1. [Server.MarkNotServing]: health answers NOT_SERVING, watchers are told.
//     Calls are still served.
//  2. The service waits for the drain delay, so that load balancers notice.
//  3. [Server.EndStreams]: [Server.Draining] is closed. Handlers of streams
//     and of long calls select on it, say where they got to, and return
//     [rpcerr.Draining]. Health watches end the same way. A stream whose
//     handler hasn't returned after the stream grace is ended for it: the
//     client gets UNAVAILABLE with reason DRAINING, the handler's Send and Recv
//     fail and its context is cancelled. New streams are refused likewise.
//  4. [Server.Stop]: running calls finish, bounded by the stop timeout, then
//     connections are cut.
//
// [Server.Drain] does all four. All methods are safe for concurrent use and
// may be called more than once; the steps happen once.
package grpcserver
