// Package telemetry builds a process's logger, traces and metrics, and the
// private HTTP server that shows them.
//
// [New] returns a [Telemetry] with everything injected and nothing global, so
// two instances live in one process: a slog logger whose handler adds trace_id
// and span_id to records logged within a span (use the …Context calls), an
// OpenTelemetry tracer provider (exporting over OTLP/gRPC when an endpoint is
// configured, recording nothing otherwise), and a meter provider whose only
// reader is a Prometheus exporter on a registry of its own. Only a main calls
// [Telemetry.InstallGlobals], for libraries that know no injection.
//
// [Telemetry.Server] serves /metrics, /debug/pprof/, /debug/config (the
// configuration with its secrets starred) and /debug/log-level (GET shows it,
// PUT changes it) on a private address; it is not for the public.
//
// A Telemetry is safe for concurrent use. [Telemetry.Shutdown] flushes and
// must be called last, with a context that isn't cancelled yet.
package telemetry
