// Package api is the metadata service's gRPC surface: handlers that check the
// form of a request, ask the controller or the applied state, and map errors
// once ([mapError]). They decide nothing.
//
// Reads are answered by every replica from what it has applied, and say as of
// which metadata offset. Writes are answered by the controller; the others
// refuse them with its address. Before the log has begun everything is refused
// as NOT_READY.
//
// Long streams end with UNAVAILABLE / DRAINING when the server drains, and with
// RESOURCE_EXHAUSTED when their client has not taken a message for too long;
// both may be resumed from the last position.
package api
