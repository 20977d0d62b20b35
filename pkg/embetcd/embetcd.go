package embetcd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"sync"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// StartTimeout bounds [Start] when its context has no earlier deadline. A
// healthy member is ready within a second.
const StartTimeout = 30 * time.Second

// Options says how to run the server. Only Dir is required.
type Options struct {
	// Dir is the data directory; it is created. Exactly one server at a time
	// may use it.
	Dir string
	// ClientURL is where clients are served: "http://127.0.0.1:0" when empty, or
	// for instance "unix:///run/braid/etcd.sock" (no more than about 100 bytes
	// of path). Port 0 takes a free one; see [Server.Endpoints].
	ClientURL string
	// Fast shortens etcd's ticks from 100 ms to 10 ms: ready in some tens of
	// milliseconds instead of up to a second, and a smallest lease of 1 s
	// instead of 2 s. For tests and development on one machine.
	Fast bool
	// NoSync leaves out fsync: a crash of the machine (not of the process) may
	// lose committed data. For tests.
	NoSync bool
	// QuotaBytes is the size at which etcd takes no more writes; 0 is etcd's
	// own default.
	QuotaBytes int64
	// Logger receives etcd's own warnings and errors; nil discards them.
	Logger *slog.Logger
}

// Server is a running member.
type Server struct {
	etcd      *embed.Etcd
	endpoints []string
	closed    sync.Once
}

// Start runs a member on opts.Dir and returns once it serves clients. ctx
// bounds the start only, not the server's life. The caller calls
// [Server.Close].
func Start(ctx context.Context, opts Options) (*Server, error) {
	cfg, err := configure(opts)
	if err != nil {
		return nil, err
	}
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, fmt.Errorf("start the embedded etcd on %s: %w", opts.Dir, err)
	}
	timer := time.NewTimer(StartTimeout)
	defer timer.Stop()
	select {
	case <-etcd.Server.ReadyNotify():
	case err = <-etcd.Err():
	case <-etcd.Server.StopNotify():
		err = errors.New("it stopped")
	case <-timer.C:
		err = fmt.Errorf("not ready after %v", StartTimeout)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		etcd.Close()
		return nil, fmt.Errorf("start the embedded etcd on %s: %w", opts.Dir, err)
	}
	s := &Server{etcd: etcd}
	for _, l := range etcd.Clients {
		s.endpoints = append(s.endpoints, endpoint(l.Addr()))
	}
	return s, nil
}

func configure(opts Options) (*embed.Config, error) {
	if opts.Dir == "" {
		return nil, errors.New("start the embedded etcd: no data directory given")
	}
	// etcd wants the directory private and warns otherwise.
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create etcd's data directory: %w", err)
	}
	raw := opts.ClientURL
	if raw == "" {
		raw = "http://127.0.0.1:0"
	}
	client, err := url.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("etcd client URL: %w", err)
	}
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:0"}

	cfg := embed.NewConfig()
	cfg.Name = "braid"
	cfg.Dir = opts.Dir
	cfg.ListenClientUrls = []url.URL{*client}
	cfg.AdvertiseClientUrls = []url.URL{*client}
	cfg.ListenPeerUrls = []url.URL{peer}
	cfg.AdvertisePeerUrls = []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	// The cluster's id is a hash of this, so each new directory is a cluster of
	// its own; an old directory keeps the id it has.
	cfg.InitialClusterToken = rand.Text()
	cfg.UnsafeNoFsync = opts.NoSync
	cfg.QuotaBackendBytes = opts.QuotaBytes
	if opts.Fast {
		cfg.TickMs, cfg.ElectionMs = 10, 100
	}
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zapLogger(opts.Logger))
	return cfg, nil
}

// endpoint is the address in the form that etcd's client takes.
func endpoint(a net.Addr) string {
	if a.Network() == "unix" {
		return "unix://" + a.String()
	}
	return "http://" + a.String()
}

// Endpoints are the addresses for a client's configuration.
func (s *Server) Endpoints() []string { return append([]string(nil), s.endpoints...) }

// Err delivers the error that ended a listener of a running server, if any.
func (s *Server) Err() <-chan error { return s.etcd.Err() }

// Close stops the member and returns when nothing of it runs any more. Clients
// get errors. It may be called again.
func (s *Server) Close() { s.closed.Do(s.etcd.Close) }

// zapLogger forwards warnings and worse to l. A fatal message panics instead of
// leaving the process without a trace.
func zapLogger(l *slog.Logger) *zap.Logger {
	if l == nil {
		l = slog.New(slog.DiscardHandler)
	}
	return zap.New(&core{log: l.With("component", "etcd")}, zap.WithFatalHook(zapcore.WriteThenPanic))
}

// core is a zapcore.Core that writes to slog.
type core struct {
	log    *slog.Logger
	fields []zapcore.Field
}

// Enabled implements zapcore.LevelEnabler.
func (c *core) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

// With implements zapcore.Core.
func (c *core) With(f []zapcore.Field) zapcore.Core {
	return &core{log: c.log, fields: append(append([]zapcore.Field(nil), c.fields...), f...)}
}

// Check implements zapcore.Core.
func (c *core) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range c.fields {
		f.AddTo(enc)
	}
	for _, f := range fields {
		f.AddTo(enc)
	}
	attrs := make([]slog.Attr, 0, 1+len(enc.Fields))
	attrs = append(attrs, slog.String("message", e.Message))
	for k, v := range enc.Fields {
		attrs = append(attrs, slog.Any(k, v))
	}
	level := slog.LevelWarn
	if e.Level >= zapcore.ErrorLevel {
		level = slog.LevelError
	}
	c.log.LogAttrs(context.Background(), level, "etcd", attrs...)
	return nil
}

// Sync implements zapcore.Core.
func (c *core) Sync() error { return nil }
