package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	readTimeout     = 10 * time.Second
	maxLevelBytes   = 64
	httpStopTimeout = 5 * time.Second
)

// Handler serves the private pages. redacted returns the configuration without
// secrets, as config.Redacted does; nil serves none. It is safe to use without
// [Telemetry.Server], for instance under httptest.
func (t *Telemetry) Handler(redacted func() ([]byte, error)) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(t.Registry, promhttp.HandlerOpts{
		Registry:            t.Registry,
		MaxRequestsInFlight: 4,
		ErrorLog:            slog.NewLogLogger(t.Logger.Handler(), slog.LevelWarn),
	}))
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/log-level", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, levelName(t.Level.Level())+"\n")
	})
	mux.HandleFunc("PUT /debug/log-level", t.putLevel)
	if redacted != nil {
		mux.HandleFunc("GET /debug/config", func(w http.ResponseWriter, r *http.Request) {
			text, err := redacted()
			if err != nil {
				t.Logger.ErrorContext(r.Context(), "cannot show the configuration", "err", err)
				http.Error(w, "the configuration can't be shown: see the log", http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/yaml")
			_, _ = w.Write(text)
		})
	}
	return mux
}

func (t *Telemetry) putLevel(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxLevelBytes))
	if err != nil {
		http.Error(w, "the body must be a level: "+strings.Join(logLevels, ", "), http.StatusBadRequest)
		return
	}
	level, err := parseLevel(strings.TrimSpace(string(body)))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	old := t.Level.Level()
	t.Level.Set(level)
	// At the new level or above, so that the change itself is on record.
	t.Logger.Log(r.Context(), max(level, slog.LevelInfo), "log level changed", "old", levelName(old), "new", levelName(level))
	_, _ = io.WriteString(w, levelName(level)+"\n")
}

// Server is the private HTTP server.
type Server struct {
	log      *slog.Logger
	listener net.Listener
	http     *http.Server
}

// Server listens on the configured address and returns the server, or nil
// without an error if none is configured. The caller calls Run or Close.
func (t *Telemetry) Server(ctx context.Context, redacted func() ([]byte, error)) (*Server, error) {
	if t.cfg.HTTPAddress == "" {
		return nil, nil // none is what was asked for
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", t.cfg.HTTPAddress)
	if err != nil {
		return nil, fmt.Errorf("listen for /metrics: %w", err)
	}
	log := t.Logger.With("component", "telemetry")
	return &Server{log: log, listener: listener, http: &http.Server{
		Handler:           t.Handler(redacted),
		ReadHeaderTimeout: readTimeout,
		ReadTimeout:       readTimeout,
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}}, nil
}

// Address is the bound host:port.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Run serves until ctx ends, then lets running requests finish for a few
// seconds and cuts them.
func (s *Server) Run(ctx context.Context) error {
	s.log.InfoContext(ctx, "serving metrics and debug pages", "address", s.Address())
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve /metrics: %w", err)
	case <-ctx.Done():
	}
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), httpStopTimeout)
	defer cancel()
	err := s.http.Shutdown(stopCtx)
	if err != nil { // a profile may run longer than we wait
		err = s.http.Close()
	}
	if served := <-served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

// Close frees the listener of a server that was never run.
func (s *Server) Close() error {
	err := s.listener.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return errors.Join(s.http.Close(), err)
}
