package telemetry

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"

	"github.com/braidlog/braid/pkg/config"
)

// The log formats.
const (
	JSON = "json"
	Text = "text"
)

// Config is the telemetry's data. The zero value is not usable: see
// [DefaultConfig] or RegisterFlags.
type Config struct {
	// LogLevel is debug, info, warn or error.
	LogLevel string
	// LogFormat is [JSON] or [Text].
	LogFormat string
	// OTLPEndpoint is host:port of an OTLP/gRPC collector for traces; empty
	// exports none.
	OTLPEndpoint string
	// OTLPInsecure speaks plaintext to the collector.
	OTLPInsecure bool
	// TraceRatio in [0, 1] is the share of traces sampled, unless the caller
	// decided already.
	TraceRatio float64
	// HTTPAddress is host:port of the private HTTP server; empty serves none.
	HTTPAddress string
}

// DefaultConfig returns the defaults that RegisterFlags sets.
func DefaultConfig() Config {
	var c Config
	c.RegisterFlags("", flag.NewFlagSet("", flag.ContinueOnError))
	return c
}

var logLevels = []string{"debug", "info", "warn", "error"}

// RegisterFlags implements config.Section.
func (c *Config) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	config.EnumVar(fs, &c.LogLevel, key("log.level"), "info", logLevels, "least severe level that is logged")
	config.EnumVar(fs, &c.LogFormat, key("log.format"), JSON, []string{JSON, Text}, "format of log lines")
	fs.StringVar(&c.OTLPEndpoint, key("trace.otlp-endpoint"), "", "`address` (host:port) of an OTLP/gRPC collector; empty exports no traces")
	fs.BoolVar(&c.OTLPInsecure, key("trace.otlp-insecure"), false, "speak plaintext to the collector")
	fs.Float64Var(&c.TraceRatio, key("trace.ratio"), 0.01, "share of traces sampled, from 0 to 1, unless the caller decided already")
	fs.StringVar(&c.HTTPAddress, key("http.listen-address"), "127.0.0.1:0", "private `address` (host:port) for /metrics and /debug; port 0 takes a free one, empty serves none")
}

// Validate implements config.Section.
func (c *Config) Validate() error {
	var address, endpoint error
	if c.HTTPAddress != "" {
		address = config.CheckAddress("http.listen-address", c.HTTPAddress)
	}
	if c.OTLPEndpoint != "" {
		endpoint = config.CheckAddress("trace.otlp-endpoint", c.OTLPEndpoint)
	}
	_, level := parseLevel(c.LogLevel)
	return errors.Join(
		level,
		config.Check(c.LogFormat == JSON || c.LogFormat == Text, "log.format", c.LogFormat, "json or text"),
		config.Check(c.TraceRatio >= 0 && c.TraceRatio <= 1, "trace.ratio", c.TraceRatio, "from 0 to 1"),
		endpoint, address,
	)
}

func parseLevel(name string) (slog.Level, error) {
	switch name {
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, config.Invalid("log.level", name, fmt.Sprintf("one of %v", logLevels))
}

func levelName(l slog.Level) string {
	switch {
	case l <= slog.LevelDebug:
		return "debug"
	case l <= slog.LevelInfo:
		return "info"
	case l <= slog.LevelWarn:
		return "warn"
	}
	return "error"
}
