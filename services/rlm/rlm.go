package rlm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/lifecycle"
	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/gcs"
	"github.com/braidlog/braid/pkg/telemetry"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/rlm/internal/api"
	"github.com/braidlog/braid/services/rlm/internal/bucket"
	"github.com/braidlog/braid/services/rlm/internal/combiner"
	"github.com/braidlog/braid/services/rlm/internal/fetcher"
)

// Deps are what tests and compositions replace; the zero value is a process's.
type Deps struct {
	// Telemetry is used instead of one built from the configuration; the
	// caller shuts it down.
	Telemetry *telemetry.Telemetry
	// Listener is used instead of the configured address; the server owns it.
	Listener net.Listener
	// Bucket is used instead of the configured one: the bare store, without
	// prefix and retries, which are added. The caller closes it.
	Bucket objstore.Store
	// DialMetadata replaces the TCP dialer towards the metadata service; nil is
	// the standard one.
	DialMetadata func(ctx context.Context, address string) (net.Conn, error)
	// WrapCommitter decorates the way commits take, for tests of what happens
	// around them; nil changes nothing.
	WrapCommitter func(Committer) Committer
	// Version is the build's.
	Version string
	// Redacted is the configuration for the private pages; may be nil.
	Redacted func() ([]byte, error)
}

// Committer sends commits to the metadata service.
type Committer interface {
	// Commit sends one command and returns its verdict; an error means that
	// there is none.
	Commit(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error)
}

// Server is a remote-log manager.
type Server struct {
	cfg      Config
	log      *slog.Logger
	listener net.Listener
	grpc     *grpcserver.Server
	private  *telemetry.Server // nil = none
	metadata *metaclient.Client
	session  *metaclient.Session
	combiner *combiner.Combiner
	fetcher  *fetcher.Fetcher
	cluster  string
	seen     metadataEnd    // of the metadata log
	closers  []func() error // run last to first
}

// Build wires a remote-log manager. It waits, bounded by store.start-timeout,
// for the bucket and for the marker that says whose it is. Nothing is started:
// the caller calls Run, or Close.
func Build(ctx context.Context, cfg Config, deps Deps) (_ *Server, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	tel, err := s.telemetry(ctx, deps)
	if err != nil {
		return nil, err
	}
	s.log = tel.Logger
	meter := tel.MeterProvider.Meter("github.com/braidlog/braid/services/rlm")

	store, err := s.store(ctx, deps, meter, tel.TracerProvider)
	if err != nil {
		return nil, err
	}
	marker, err := bucket.Check(ctx, store, bucket.Place{
		Bucket: cfg.Store.Bucket, Endpoint: cfg.Store.Endpoint, Prefix: cfg.Store.Prefix, Timeout: cfg.Store.StartTimeout.Std(),
	}, s.log)
	if err != nil {
		return nil, err
	}
	s.cluster = marker.ClusterID

	if s.listener = deps.Listener; s.listener == nil {
		if s.listener, err = cfg.GRPC.Listen(ctx); err != nil {
			return nil, err
		}
	}
	s.onClose(func() error { return closed(s.listener) })
	address, err := cfg.advertised(s.listener.Addr())
	if err != nil {
		return nil, err
	}
	if err := s.connect(address, tel, deps); err != nil {
		return nil, err
	}
	if err := s.work(store, meter, deps); err != nil {
		return nil, err
	}
	s.grpc, err = grpcserver.New(cfg.GRPC, grpcserver.Deps{Logger: s.log, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider})
	if err != nil {
		return nil, err
	}
	api.New(api.Config{
		RLMID: int32(cfg.ID), ClusterID: s.cluster,
		PartitionCreditBytes: cfg.WAL.PartitionCredit.Bytes(), StreamCreditBytes: cfg.WAL.StreamCredit.Bytes(),
		InitTimeout: 10 * time.Second, SendTimeout: cfg.Cache.SendTimeout.Std(),
		MaxResponseBytes: int(cfg.GRPC.MaxSendMessage) - 64<<10,
	}, api.Deps{Combiner: s.combiner, Fetcher: s.fetcher, Draining: s.grpc.Draining(), Logger: s.log}).Register(s.grpc)
	return s, nil
}

// telemetry takes the given one or builds its own, and opens its private pages.
func (s *Server) telemetry(ctx context.Context, deps Deps) (*telemetry.Telemetry, error) {
	tel := deps.Telemetry
	if tel == nil {
		var err error
		tel, err = telemetry.New(ctx, s.cfg.Telemetry, telemetry.Identity{
			Service: "rlm", Instance: "rlm-" + strconv.Itoa(s.cfg.ID), Version: deps.Version, Zone: s.cfg.Zone,
		}, telemetry.Options{})
		if err != nil {
			return nil, err
		}
		s.onClose(func() error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			return tel.Shutdown(ctx)
		})
	}
	private, err := tel.Server(ctx, deps.Redacted)
	if err != nil {
		return nil, err
	}
	if s.private = private; private != nil {
		s.onClose(private.Close)
	}
	return tel, nil
}

// store opens the bucket and decorates it.
func (s *Server) store(ctx context.Context, deps Deps, meter metric.Meter, tracers trace.TracerProvider) (objstore.Store, error) {
	bare := deps.Bucket
	if bare == nil {
		cfg := gcs.DefaultConfig(s.cfg.Store.Bucket)
		cfg.Endpoint = s.cfg.Store.Endpoint
		opened, err := gcs.Open(ctx, cfg)
		if err != nil {
			return nil, err
		}
		s.onClose(opened.Close)
		bare = opened
	}
	observe, err := observer(meter, tracers)
	if err != nil {
		return nil, err
	}
	return decorate.Wrap(bare,
		decorate.Retry(decorate.RetryOptions{
			Policy:      backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second, Multiplier: 2, Jitter: 0.5},
			MaxAttempts: 4, Budget: backoff.NewBudget(0.5, 32),
			OnRetry: s.logRetry,
		}),
		decorate.Observe(observe),
		decorate.Limit(decorate.Limits{Creates: s.cfg.Store.MaxWrites, Reads: s.cfg.Store.MaxReads, Others: s.cfg.Store.MaxReads}),
		decorate.Prefix(s.cfg.Store.Prefix),
	), nil
}

func (s *Server) logRetry(op objstore.Op, name string, attempt int, delay time.Duration, err error) {
	s.log.Warn("object store request failed, retrying", "component", "objstore", "op", op.String(), "object", name, "attempt", attempt, "delay", delay, "err", err)
}

// connect makes the metadata client and the session.
func (s *Server) connect(address string, tel *telemetry.Telemetry, deps Deps) (err error) {
	s.metadata, err = metaclient.New(metaclient.Options{
		Addresses: s.cfg.MetadataAddresses, Logger: s.log,
		Dial: func(a string) (*grpc.ClientConn, error) {
			return grpcclient.Dial(a, s.cfg.Client, grpcclient.Deps{
				Logger: s.log, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider, Dialer: deps.DialMetadata,
			})
		},
	})
	if err != nil {
		return err
	}
	s.onClose(s.metadata.Close)
	request := &metadatav1.RegisterRemoteLogManagerRequest{
		RlmId: int32(s.cfg.ID), Address: address, Zone: s.cfg.Zone, ClusterId: s.cluster,
	}
	s.session, err = s.metadata.NewSession(metaclient.SessionOptions{
		Role:   metaclient.RemoteLogManagerRole(func() *metadatav1.RegisterRemoteLogManagerRequest { return request }),
		Logger: s.log,
		OnRegistered: func(r metaclient.Registration) {
			s.seen.raise(r.MetadataEnd)
			s.combiner.Registered(combiner.Identity{ClusterID: r.ClusterID, Incarnation: r.Incarnation, Epoch: r.Epoch})
			s.grpc.MarkServing() // ready once brokers can be served; kept through later registrations
		},
		OnConfirmed: func(c metaclient.Confirmation) { s.seen.raise(c.MetadataEnd) },
		OnLost:      func(epoch int64, _ error) { s.combiner.EpochClosed(epoch) },
	})
	return err
}

// work makes the combiner and the fetcher.
func (s *Server) work(store objstore.Store, meter metric.Meter, deps Deps) (err error) {
	var commits Committer = committer{metadatav1.NewSegmentServiceClient(s.metadata.Controller()), &s.seen}
	if deps.WrapCommitter != nil {
		commits = deps.WrapCommitter(commits)
	}
	s.combiner, err = combiner.New(s.cfg.combiner(), combiner.Deps{
		Store: store, Committer: commits,
		OnUnusable: s.session.Invalidate, MetadataEnd: s.seen.Load,
		Logger: s.log, Meter: meter,
	})
	if err != nil {
		return err
	}
	s.fetcher, err = fetcher.New(s.cfg.fetcher(), store, s.log, meter)
	if err != nil {
		return err
	}
	s.onClose(func() error { s.fetcher.Close(); return nil })
	return nil
}

// metadataEnd is the highest metadata offset (exclusive) heard of.
type metadataEnd struct{ atomic.Int64 }

func (m *metadataEnd) raise(end int64) {
	for {
		old := m.Load()
		if end <= old || m.CompareAndSwap(old, end) {
			return
		}
	}
}

// committer sends commits through the generated client.
type committer struct {
	segments metadatav1.SegmentServiceClient
	seen     *metadataEnd
}

func (c committer) Commit(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	resp, err := c.segments.CommitCombinedSegment(ctx, r)
	if err == nil {
		c.seen.raise(resp.GetMetadataOffset() + 1)
	}
	return resp, err
}

// Addr is the address listened on.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// PrivateAddr is the address of /metrics and the debug pages, "" when not served.
func (s *Server) PrivateAddr() string {
	if s.private == nil {
		return ""
	}
	return s.private.Address()
}

// ClusterID is the cluster that the bucket belongs to.
func (s *Server) ClusterID() string { return s.cluster }

// Epoch is the present rlm epoch; false while not registered.
func (s *Server) Epoch() (int64, bool) {
	id, ok := s.combiner.Identity()
	return id.Epoch, ok
}

// sessionBound bounds the wait for the end of the session at a stop.
const sessionBound = 5 * time.Second

// Run serves until ctx ends, then stops in order. Call it once; it closes what
// Build opened.
func (s *Server) Run(ctx context.Context) error {
	g := lifecycle.NewGroup(s.log)
	g.Go("grpc", func(context.Context) error { return s.grpc.Serve(s.listener) })
	g.Go("combiner", s.combiner.Run)
	g.Go("session", s.session.Run)
	if s.private != nil {
		g.Go("private", s.private.Run)
	}
	g.OnStop("mark not serving", time.Second, func(context.Context) error { s.grpc.MarkNotServing(); return nil })
	g.Wait("drain delay", s.cfg.GRPC.DrainDelay.Std())
	g.OnStop("flush", s.cfg.WAL.FlushTimeout.Std(), s.combiner.Drain)
	g.OnStop("end the session", sessionBound, s.session.Stop)
	g.OnStop("stop gRPC", s.cfg.GRPC.StopBound(), s.grpc.Stop)
	g.StopTasks("stop workers", 5*time.Second, "combiner", "session", "grpc")

	s.log.InfoContext(ctx, "remote-log manager running", "address", s.Addr(), "cluster_id", s.cluster)
	return errors.Join(g.Run(ctx), s.Close())
}

// Close frees what Build opened. It is for a server that was never run; Run
// does it itself.
func (s *Server) Close() error {
	var err error
	for i := len(s.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, s.closers[i]())
	}
	s.closers = nil
	return err
}

func (s *Server) onClose(fn func() error) { s.closers = append(s.closers, fn) }

// closed closes what may be closed already.
func closed(c io.Closer) error {
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}
