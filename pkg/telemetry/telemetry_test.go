package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/slogtest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/telemetry"
)

func build(t *testing.T, change func(*telemetry.Config), opts telemetry.Options) *telemetry.Telemetry {
	t.Helper()
	cfg := telemetry.DefaultConfig()
	cfg.TraceRatio = 1
	if change != nil {
		change(&cfg)
	}
	if opts.LogOutput == nil {
		opts.LogOutput = t.Output()
	}
	tel, err := telemetry.New(t.Context(), cfg, telemetry.Identity{Service: "broker", Instance: "broker-1", Version: "v0"}, opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tel.Shutdown(context.WithoutCancel(t.Context())) })
	return tel
}

func get(t *testing.T, h http.Handler, method, path, body string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

func TestTwoInstancesKeepTheirMetricsApart(t *testing.T) {
	var pages []string
	for _, n := range []int64{3, 5} {
		tel := build(t, nil, telemetry.Options{})
		counter, err := tel.MeterProvider.Meter("x").Int64Counter("appended_records")
		require.NoError(t, err)
		counter.Add(t.Context(), n)
		_, page := get(t, tel.Handler(nil), "GET", "/metrics", "")
		pages = append(pages, page)
	}
	assert.Contains(t, pages[0], "\nappended_records_total 3\n")
	assert.Contains(t, pages[1], "\nappended_records_total 5\n")
	assert.Contains(t, pages[0], "go_goroutines ")
	assert.Contains(t, pages[0], `service_instance_id="broker-1"`)
}

func TestCallDurationsHaveFineBuckets(t *testing.T) {
	tel := build(t, nil, telemetry.Options{})
	h, err := tel.MeterProvider.Meter("x").Float64Histogram("rpc.server.call.duration", metric.WithUnit("s"))
	require.NoError(t, err)
	h.Record(t.Context(), 0.0002)
	_, page := get(t, tel.Handler(nil), "GET", "/metrics", "")
	assert.Contains(t, page, `rpc_server_call_duration_seconds_bucket{le="0.00025"} 1`)
}

func TestLogLinesCarryTraceIDs(t *testing.T) {
	for _, group := range []bool{false, true} {
		var out bytes.Buffer
		tel := build(t, nil, telemetry.Options{LogOutput: &out, SpanProcessors: []sdktrace.SpanProcessor{tracetest.NewSpanRecorder()}})
		ctx, span := tel.TracerProvider.Tracer("x").Start(t.Context(), "append")
		log := tel.Logger.With("component", "log")
		if group {
			log = log.WithGroup("g").With("b", 2)
		}
		log.InfoContext(ctx, "appended", "offset", 7)
		span.End()
		var line map[string]any
		require.NoError(t, json.Unmarshal(out.Bytes(), &line))
		assert.Equal(t, span.SpanContext().TraceID().String(), line["trace_id"])
		assert.Equal(t, span.SpanContext().SpanID().String(), line["span_id"])
		assert.Equal(t, "broker", line["service"])
		assert.Equal(t, "log", line["component"])
		if group {
			assert.Equal(t, map[string]any{"b": 2.0, "offset": 7.0}, line["g"])
		} else {
			assert.InEpsilon(t, 7.0, line["offset"], 0)
		}
	}
}

func TestHandlerKeepsSlogsRules(t *testing.T) {
	var out bytes.Buffer
	slogtest.Run(t, func(*testing.T) slog.Handler {
		out.Reset()
		return telemetry.NewLogger(&out, telemetry.JSON, slog.LevelInfo).Handler()
	}, func(t *testing.T) map[string]any {
		var line map[string]any
		require.NoError(t, json.Unmarshal(out.Bytes(), &line))
		return line
	})
}

func TestLogLevelChangesAtRunTime(t *testing.T) {
	var out bytes.Buffer
	tel := build(t, func(c *telemetry.Config) { c.LogFormat = telemetry.Text }, telemetry.Options{LogOutput: &out})
	h := tel.Handler(nil)
	_, body := get(t, h, "GET", "/debug/log-level", "")
	assert.Equal(t, "info\n", body)
	tel.Logger.Debug("hidden")
	code, _ := get(t, h, "PUT", "/debug/log-level", "debug\n")
	assert.Equal(t, http.StatusOK, code)
	tel.Logger.Debug("shown")
	assert.NotContains(t, out.String(), "hidden")
	assert.Contains(t, out.String(), "msg=shown")
	for _, bad := range []string{"loud", strings.Repeat("x", 1000)} {
		code, body = get(t, h, "PUT", "/debug/log-level", bad)
		assert.Equal(t, http.StatusBadRequest, code)
		assert.Contains(t, body, "debug")
	}
}

func TestDebugPages(t *testing.T) {
	tel := build(t, nil, telemetry.Options{})
	h := tel.Handler(func() ([]byte, error) { return []byte("auth: {token: '********'}\n"), nil })
	code, body := get(t, h, "GET", "/debug/config", "")
	assert.Equal(t, http.StatusOK, code)
	assert.Equal(t, "auth: {token: '********'}\n", body)
	code, body = get(t, h, "GET", "/debug/pprof/goroutine?debug=1", "")
	assert.Equal(t, http.StatusOK, code)
	assert.Contains(t, body, "goroutine profile")
	code, body = get(t, tel.Handler(func() ([]byte, error) { return nil, errors.New("secret") }), "GET", "/debug/config", "")
	assert.Equal(t, http.StatusInternalServerError, code)
	assert.NotContains(t, body, "secret")
	code, _ = get(t, tel.Handler(nil), "GET", "/debug/config", "")
	assert.Equal(t, http.StatusNotFound, code)
}

func TestPrivateServerServesAndStops(t *testing.T) {
	tel := build(t, nil, telemetry.Options{})
	s, err := tel.Server(t.Context(), nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	client := &http.Client{Timeout: 10 * time.Second}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.Address()+"/metrics", nil)
	require.NoError(t, err)
	resp, err := client.Do(req)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Contains(t, string(body), "target_info")
	cancel()
	require.NoError(t, <-done)

	off := build(t, func(c *telemetry.Config) { c.HTTPAddress = "" }, telemetry.Options{})
	none, err := off.Server(t.Context(), nil)
	require.NoError(t, err)
	assert.Nil(t, none)

	unused, err := tel.Server(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, unused.Close())
	_, err = net.DialTimeout("tcp", unused.Address(), time.Second) // shows that nobody listens
	require.Error(t, err)
}

// collector takes exported spans.
type collector struct {
	collectorv1.UnimplementedTraceServiceServer
	mu    sync.Mutex // guards names
	names []string
}

func (c *collector) Export(_ context.Context, req *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range req.GetResourceSpans() {
		for _, ss := range rs.GetScopeSpans() {
			for _, span := range ss.GetSpans() {
				c.names = append(c.names, span.GetName())
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

func TestSpansReachTheCollectorOnShutdown(t *testing.T) {
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server, got := grpc.NewServer(), new(collector)
	collectorv1.RegisterTraceServiceServer(server, got)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	defer func() {
		server.Stop()
		assert.NoError(t, <-served)
	}()

	tel := build(t, func(c *telemetry.Config) { c.OTLPEndpoint, c.OTLPInsecure = l.Addr().String(), true }, telemetry.Options{})
	_, span := tel.TracerProvider.Tracer("x").Start(t.Context(), "upload")
	span.End()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, tel.Shutdown(ctx))
	got.mu.Lock()
	defer got.mu.Unlock()
	assert.Equal(t, []string{"upload"}, got.names)
}

func TestNoEndpointRecordsNoSpans(t *testing.T) {
	tel := build(t, nil, telemetry.Options{})
	_, span := tel.TracerProvider.Tracer("x").Start(t.Context(), "x")
	defer span.End()
	assert.False(t, span.IsRecording())
}

func TestBadConfigNamesItsFields(t *testing.T) {
	cfg := telemetry.Config{LogLevel: "loud", LogFormat: "xml", TraceRatio: 2, HTTPAddress: "x", OTLPEndpoint: "http://x"}
	err := cfg.Validate()
	require.ErrorIs(t, err, config.ErrInvalid)
	for _, field := range []string{"log.level", "log.format", "trace.ratio", "http.listen-address", "trace.otlp-endpoint"} {
		require.ErrorContains(t, err, field+":")
	}
	_, err = telemetry.New(t.Context(), cfg, telemetry.Identity{}, telemetry.Options{})
	require.Error(t, err)
	good := telemetry.DefaultConfig()
	require.NoError(t, good.Validate())
}
