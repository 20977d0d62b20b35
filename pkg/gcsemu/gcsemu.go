package gcsemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

// Options configures a [Server].
type Options struct {
	// Listen is the TCP address to listen on; empty means 127.0.0.1 and a free port.
	Listen string
	// StorageRoot is the directory that keeps the objects. It is created if
	// absent; it must be empty or have been used by this package before. Empty
	// means a temporary directory that Close removes.
	StorageRoot string
	// Buckets are created if they don't exist yet.
	Buckets []string
	// Seed makes the random part of faults and latencies repeatable.
	Seed uint64
	// Rules are the faults to begin with.
	Rules []Rule
	// AdminFromAnywhere opens the paths below /_braid/ to all peers. Set it
	// only on a network that is private to a test.
	AdminFromAnywhere bool
}

// Server is a running emulator. Start it with [Start]; the caller closes it.
type Server struct {
	root       string
	removeRoot bool
	unlock     func() error
	listener   net.Listener
	http       *http.Server
	handler    *handler
	served     chan error

	closeOnce sync.Once
	closeErr  error
}

// Start opens the storage directory and serves it until Close.
func Start(opts Options) (_ *Server, err error) {
	faults, err := newFaults(opts.Seed, opts.Rules)
	if err != nil {
		return nil, fmt.Errorf("start emulator: %w", err)
	}
	s := &Server{root: opts.StorageRoot, served: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start emulator: %w", err), s.release())
		}
	}()
	if s.root == "" {
		if s.root, err = os.MkdirTemp("", "gcsemu-"); err != nil {
			return nil, err
		}
		s.removeRoot = true
	}
	if s.unlock, err = claim(s.root); err != nil {
		return nil, err
	}
	listen := opts.Listen
	if listen == "" {
		listen = "127.0.0.1:0"
	}
	if s.listener, err = net.Listen("tcp", listen); err != nil {
		return nil, err
	}
	fake, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		StorageRoot: s.root,
		Scheme:      "http",
		NoListener:  true,
		ExternalURL: "http://" + s.listener.Addr().String(),
		PublicHost:  s.listener.Addr().String(),
	})
	if err != nil {
		return nil, err
	}
	removed, err := sweep(s.root, func(bucket, object string) bool {
		o, err := fake.GetObjectStreaming(bucket, object)
		_ = o.Close()
		return err == nil
	})
	if err != nil {
		return nil, err
	}
	for _, b := range opts.Buckets {
		// The library's own way to create a bucket panics on failure; this
		// request is the same call with an error.
		if err := createBucket(fake.HTTPHandler(), b); err != nil {
			return nil, err
		}
	}
	s.handler = newHandler(fake, faults, opts.AdminFromAnywhere)
	s.handler.stats.swept = int64(removed)
	s.http = &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       2 * time.Minute,
	}
	go func() { s.served <- s.http.Serve(s.listener) }()
	return s, nil
}

// Endpoint is the base URL that clients use, without a trailing slash: the
// Endpoint of the gcs package's configuration, or the value of the environment
// variable STORAGE_EMULATOR_HOST for Google's own clients.
func (s *Server) Endpoint() string { return "http://" + s.listener.Addr().String() }

// Addr is the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// StorageRoot is the directory that keeps the objects.
func (s *Server) StorageRoot() string { return s.root }

// Close stops listening, waits up to five seconds for calls in flight, breaks
// the others off, applies or drops delayed effects and unlocks the directory.
// Further calls return the first one's result.
func (s *Server) Close() error {
	s.closeOnce.Do(func() {
		s.handler.stop() // ends waits that faults began, so that calls can end
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		err := s.http.Shutdown(ctx)
		if err != nil {
			err = s.http.Close()
		}
		if serr := <-s.served; !errors.Is(serr, http.ErrServerClosed) {
			err = errors.Join(err, serr)
		}
		s.handler.late.Wait()
		s.closeErr = errors.Join(err, s.release())
	})
	return s.closeErr
}

// release gives back what Start took before it served.
func (s *Server) release() error {
	var errs []error
	if s.listener != nil {
		if err := s.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if s.unlock != nil {
		errs = append(errs, s.unlock())
	}
	if s.removeRoot {
		errs = append(errs, os.RemoveAll(s.root))
	}
	return errors.Join(errs...)
}

// SetRules replaces all fault rules. It changes nothing if one is invalid.
func (s *Server) SetRules(rules ...Rule) error { return s.handler.faults.set(rules) }

// AddRule appends a fault rule.
func (s *Server) AddRule(rule Rule) error { return s.handler.faults.add(rule) }

// Rules returns the rules with their hits so far, in order.
func (s *Server) Rules() []Rule { return s.handler.faults.snapshot() }

// Stats returns the counters.
func (s *Server) Stats() Stats { return s.handler.stats.snapshot() }

// ResetStats sets the counters to zero.
func (s *Server) ResetStats() { s.handler.stats.reset() }

// Requests returns how many requests of op named the object, faults included.
func (s *Server) Requests(op Op, object string) int64 {
	return s.handler.stats.requests(op, object)
}

// SetBucketFields lays fields over the bucket resource that the server answers,
// in the JSON API's words, for instance
//
//	{"softDeletePolicy": {"retentionDurationSeconds": "604800"}}
//
// They are reported, not obeyed. Nil takes them away.
func (s *Server) SetBucketFields(bucket string, fields map[string]any) {
	s.handler.setBucketFields(bucket, fields)
}
