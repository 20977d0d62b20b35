package telemetry

import (
	"context"
	"io"
	"log/slog"

	"go.opentelemetry.io/otel/trace"
)

// NewLogger returns a logger with trace and span ids, for programs and tests
// that need nothing else of this package. level may be changed at run time.
func NewLogger(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	var handler slog.Handler = slog.NewJSONHandler(w, opts)
	if format == Text {
		handler = slog.NewTextHandler(w, opts)
	}
	return slog.New(&traceHandler{base: handler})
}

// traceHandler adds the ids of the context's span. They belong to the top
// level of a record, so groups that are open on the logger are applied to the
// record's own attributes here instead of to the inner handler.
type traceHandler struct {
	base   slog.Handler // outside every group
	groups []group
}

// group is a WithGroup and the attributes added inside it.
type group struct {
	name  string
	attrs []slog.Attr
}

// Enabled implements slog.Handler.
func (h *traceHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.base.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (h *traceHandler) Handle(ctx context.Context, record slog.Record) error {
	if len(h.groups) > 0 {
		record = h.nest(record)
	}
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		if len(h.groups) == 0 {
			record = record.Clone() // adding must not touch the caller's
		}
		record.AddAttrs(
			slog.String("trace_id", span.TraceID().String()),
			slog.String("span_id", span.SpanID().String()),
		)
	}
	return h.base.Handle(ctx, record)
}

// nest moves the record's attributes into the open groups.
func (h *traceHandler) nest(record slog.Record) slog.Record {
	out := slog.NewRecord(record.Time, record.Level, record.Message, record.PC)
	var attrs []slog.Attr
	record.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, a)
		return true
	})
	for i := len(h.groups) - 1; i >= 0; i-- {
		g := h.groups[i]
		all := append(append([]slog.Attr(nil), g.attrs...), attrs...)
		attrs = []slog.Attr{{Key: g.name, Value: slog.GroupValue(all...)}}
	}
	out.AddAttrs(attrs...)
	return out
}

// WithAttrs implements slog.Handler.
func (h *traceHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	if len(attrs) == 0 {
		return h
	}
	if len(h.groups) == 0 {
		return &traceHandler{base: h.base.WithAttrs(attrs)}
	}
	groups := append([]group(nil), h.groups...)
	last := &groups[len(groups)-1]
	last.attrs = append(append([]slog.Attr(nil), last.attrs...), attrs...)
	return &traceHandler{h.base, groups}
}

// WithGroup implements slog.Handler.
func (h *traceHandler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return &traceHandler{h.base, append(append([]group(nil), h.groups...), group{name: name})}
}
