// Package rpcerr turns domain errors into gRPC statuses with details, and back.
//
// An [Error] is a reason from braid.errors.v1, a code, a sentence for people
// and facts for programs. It travels as a google.rpc.Status: the reason
// (without its ERROR_REASON_ prefix) and the facts in ErrorInfo with the
// domain "braid", a retry hint in RetryInfo, and, where the kind of error has
// them, BadRequest, PreconditionFailure, ResourceInfo or QuotaFailure.
//
// A service maps its domain errors to Errors in one function; the constructors
// fix which code and which facts belong to a reason, so that all services
// agree. [Error] implements GRPCStatus, so a handler may return it as it is.
// [ToStatus] is the last resort at the edge of a server: an error that nobody
// mapped becomes INTERNAL with a fixed sentence, and the caller is told to log
// the original. A client gets the typed error back with [From].
//
// Messages and facts are cut to [MaxText] bytes, so an error never outgrows
// the header limits of a peer.
//
// An Error may be read by many goroutines; the With methods change it and
// belong to the code that made it.
package rpcerr
