package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// latencyBuckets resolve what a log is asked for: a tenth of a millisecond to
// half a minute, in seconds. The default buckets begin at 5 ms.
var latencyBuckets = []float64{
	0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
}

// cardinalityLimit bounds the attribute sets of one instrument.
const cardinalityLimit = 2000

// Identity says who speaks.
type Identity struct {
	// Service is the role: broker, rlm, metadata…
	Service string
	// Instance tells instances of the role apart, for instance "broker-1".
	Instance string
	// Version is the build's.
	Version string
	// Zone is the availability zone; may be empty.
	Zone string
}

// Options are what tests replace; the zero value is the process's.
type Options struct {
	// LogOutput takes the log; nil means os.Stderr.
	LogOutput io.Writer
	// SpanProcessors see every span beside the exporter, for tests.
	SpanProcessors []sdktrace.SpanProcessor
	// Views are added to the package's own.
	Views []sdkmetric.View
}

// Telemetry is a process's (or an instance's) logger and providers.
type Telemetry struct {
	// Logger carries the identity.
	Logger *slog.Logger
	// Level is the logger's and may be set at run time.
	Level *slog.LevelVar
	// TracerProvider and MeterProvider are never nil.
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
	// Registry holds the metrics that /metrics shows.
	Registry *prometheus.Registry

	cfg      Config
	shutdown []func(context.Context) error
}

// New builds the telemetry. It connects to nothing: an exporter connects in
// the background.
func New(ctx context.Context, cfg Config, id Identity, opts Options) (*Telemetry, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	t := &Telemetry{Level: new(slog.LevelVar), Registry: prometheus.NewRegistry(), cfg: cfg}
	level, err := parseLevel(cfg.LogLevel)
	if err != nil {
		return nil, err
	}
	t.Level.Set(level)
	output := opts.LogOutput
	if output == nil {
		output = os.Stderr
	}
	t.Logger = NewLogger(output, cfg.LogFormat, t.Level).With("service", id.Service, "instance", id.Instance)

	res := newResource(id)
	if err := t.buildMetrics(res, opts.Views); err != nil {
		return nil, err
	}
	if err := t.buildTraces(ctx, res, opts.SpanProcessors); err != nil {
		return nil, errors.Join(err, t.Shutdown(context.WithoutCancel(ctx)))
	}
	return t, nil
}

func newResource(id Identity) *resource.Resource {
	attrs := []attribute.KeyValue{
		attribute.String("service.namespace", "braid"),
		attribute.String("service.name", id.Service),
		attribute.String("service.instance.id", id.Instance),
		attribute.String("service.version", id.Version),
	}
	if id.Zone != "" {
		attrs = append(attrs, attribute.String("cloud.availability_zone", id.Zone))
	}
	return resource.NewSchemaless(attrs...)
}

func (t *Telemetry) buildMetrics(res *resource.Resource, views []sdkmetric.View) error {
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := t.Registry.Register(c); err != nil {
			return fmt.Errorf("register a runtime collector: %w", err)
		}
	}
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(t.Registry), otelprometheus.WithoutScopeInfo())
	if err != nil {
		return fmt.Errorf("build the Prometheus exporter: %w", err)
	}
	all := append([]sdkmetric.View{
		sdkmetric.NewView(
			sdkmetric.Instrument{Name: "rpc.*.call.duration"},
			sdkmetric.Stream{Aggregation: sdkmetric.AggregationExplicitBucketHistogram{Boundaries: latencyBuckets}},
		),
	}, views...)
	provider := sdkmetric.NewMeterProvider(
		sdkmetric.WithResource(res),
		sdkmetric.WithReader(exporter),
		sdkmetric.WithView(all...),
		sdkmetric.WithCardinalityLimit(cardinalityLimit),
	)
	t.MeterProvider = provider
	t.shutdown = append(t.shutdown, provider.Shutdown)
	return nil
}

func (t *Telemetry) buildTraces(ctx context.Context, res *resource.Resource, processors []sdktrace.SpanProcessor) error {
	if t.cfg.OTLPEndpoint == "" && len(processors) == 0 {
		t.TracerProvider = noop.NewTracerProvider()
		return nil
	}
	opts := []sdktrace.TracerProviderOption{
		sdktrace.WithResource(res),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(t.cfg.TraceRatio))),
	}
	if t.cfg.OTLPEndpoint != "" {
		exporterOpts := []otlptracegrpc.Option{otlptracegrpc.WithEndpoint(t.cfg.OTLPEndpoint)}
		if t.cfg.OTLPInsecure {
			exporterOpts = append(exporterOpts, otlptracegrpc.WithInsecure())
		}
		exporter, err := otlptracegrpc.New(ctx, exporterOpts...)
		if err != nil {
			return fmt.Errorf("build the OTLP exporter: %w", err)
		}
		opts = append(opts, sdktrace.WithBatcher(exporter))
	}
	for _, p := range processors {
		opts = append(opts, sdktrace.WithSpanProcessor(p))
	}
	provider := sdktrace.NewTracerProvider(opts...)
	t.TracerProvider = provider
	t.shutdown = append(t.shutdown, provider.Shutdown)
	return nil
}

// InstallGlobals makes this telemetry the process's default, for libraries
// that know no injection. Only a main calls it.
func (t *Telemetry) InstallGlobals() {
	slog.SetDefault(t.Logger)
	otel.SetTracerProvider(t.TracerProvider)
	otel.SetMeterProvider(t.MeterProvider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	log := t.Logger.With("component", "otel")
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("telemetry failed", "err", err)
	}))
}

// Shutdown flushes what is pending within ctx and stops the exporters.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	var errs []error
	for i := len(t.shutdown) - 1; i >= 0; i-- {
		errs = append(errs, t.shutdown[i](ctx))
	}
	t.shutdown = nil
	return errors.Join(errs...)
}
