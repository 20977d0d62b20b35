package metadata

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/uuid"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/lifecycle"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/gcs"
	"github.com/braidlog/braid/pkg/telemetry"
	"github.com/braidlog/braid/services/metadata/internal/api"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/internal/snapshot"
	"github.com/braidlog/braid/services/metadata/internal/watch"
	"github.com/braidlog/braid/services/metadata/state"
)

// Deps are the live things a server needs. Only Telemetry is required; what is
// given here instead of being made from the configuration stays the caller's to
// close.
type Deps struct {
	// Telemetry gives the logger and the providers.
	Telemetry *telemetry.Telemetry
	// Redacted returns the configuration without secrets for /debug/config; nil
	// serves none.
	Redacted func() ([]byte, error)
	// Listener to serve gRPC on; the server closes it. nil listens as configured.
	Listener net.Listener
	// Etcd is a client of etcd; nil connects as configured.
	Etcd *clientv3.Client
	// Store is the object store, with names below the configured prefix; nil
	// opens the configured bucket.
	Store objstore.Store
	// FS holds the data directory; nil is the operating system's.
	FS vfs.FS
	// Dial replaces the TCP dialer of connections to other replicas, for tests;
	// nil is the standard one.
	Dial func(ctx context.Context, address string) (net.Conn, error)
}

// Server is one replica.
type Server struct {
	cfg        Config
	log        *slog.Logger
	address    string
	listener   net.Listener
	grpc       *grpcserver.Server
	http       *telemetry.Server
	metalog    *metalog.Log
	store      objstore.Store
	storeAway  bool // it did not answer at start
	tail       metalog.Tail
	hub        *watch.Hub
	disk       *snapshot.Disk
	restorer   *snapshot.Restorer
	keeper     *snapshot.Keeper
	controller *controller.Controller
	closers    []func() error // of what is ours, newest last
}

// Build validates, connects and reads the metadata log. The caller calls Run or
// Close.
func Build(ctx context.Context, cfg Config, deps Deps) (_ *Server, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Telemetry == nil {
		return nil, errors.New("metadata: Deps.Telemetry is required")
	}
	s := &Server{cfg: cfg, log: deps.Telemetry.Logger.With("component", "metadata")}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if err := s.listen(ctx, deps.Listener); err != nil {
		return nil, err
	}
	metrics, err := controller.NewMetrics(deps.Telemetry.MeterProvider.Meter(scope))
	if err != nil {
		return nil, fmt.Errorf("build the metrics: %w", err)
	}
	snapshots, err := snapshot.NewMetrics(deps.Telemetry.MeterProvider.Meter(scope))
	if err != nil {
		return nil, fmt.Errorf("build the metrics: %w", err)
	}
	if err := s.openDisk(deps.FS); err != nil {
		return nil, err
	}
	client, err := s.connect(ctx, deps.Etcd)
	if err != nil {
		return nil, err
	}
	s.metalog = metalog.New(client, client, metalog.Options{
		Prefix: cfg.Etcd.Prefix, AttemptTimeout: cfg.Etcd.RequestTimeout.Std(), ProbeInterval: cfg.Etcd.ProbeInterval.Std(),
		Logger: s.log.With("component", "metalog"), OnError: metrics.EtcdError,
	})
	if s.store, err = s.open(ctx, deps.Store); err != nil {
		return nil, err
	}
	s.hub = watch.NewHub(watch.Options{MaxEntries: cfg.RingEntries, MaxBytes: int(cfg.RingBytes)})
	s.restorer = &snapshot.Restorer{
		Log: s.metalog, Disk: s.disk, Peers: s.peers(deps), Logger: s.log.With("component", "snapshot"),
	}
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	s.controller = controller.New(controller.Config{
		MetadataID: int32(cfg.ID), Address: s.address, LeaseTTL: cfg.LeaseTTL.Std(),
		SessionTimeout: cfg.SessionTimeout.Std(), OpenTimeout: cfg.OpenTimeout.Std(),
		ReplaceTimeout: cfg.ReplaceTimeout.Std(), RebalanceDelay: cfg.RebalanceDelay.Std(),
		Space: controller.SpaceConfig{
			QuotaBytes: int64(cfg.Etcd.Quota.Bytes), Interval: cfg.Etcd.Quota.Interval.Std(),
			Data: cfg.Etcd.Quota.DataPercent, Topic: cfg.Etcd.Quota.TopicPercent, Vital: cfg.Etcd.Quota.VitalPercent,
		},
	}, controller.Deps{
		Client: client, Log: s.metalog, Hub: s.hub, Store: s.store, NewIdentity: newIdentity, WriteID: writeID,
		CheckLog: s.checkBucket,
		Logger:   deps.Telemetry.Logger, Metrics: metrics,
	})
	s.keeper = snapshot.NewKeeper(snapshot.KeeperConfig{
		TailBytes: int64(cfg.Snapshot.TailBytes), Interval: cfg.Snapshot.Interval.Std(), Check: cfg.Snapshot.CheckInterval.Std(),
	}, snapshot.Deps{
		Applied: s.hub, Log: s.metalog, Disk: s.disk, Store: s.store, Leadership: s.controller.Leadership,
		Logger: s.log.With("component", "snapshot"), Metrics: snapshots,
	})
	s.grpc, err = grpcserver.New(cfg.GRPC, grpcserver.Deps{
		Logger: deps.Telemetry.Logger, TracerProvider: deps.Telemetry.TracerProvider, MeterProvider: deps.Telemetry.MeterProvider,
	})
	if err != nil {
		return nil, err
	}
	api.New(api.Config{
		Address: s.address, SessionTimeout: cfg.SessionTimeout.Std(), Progress: cfg.Progress.Std(), Stall: cfg.Stall.Std(),
	}, api.Deps{
		Hub: s.hub, Controller: s.controller, Log: s.metalog, Snapshots: s.keeper, NewTopicID: uuid.NewString, Draining: s.grpc.Draining(),
	}).Register(s.grpc)
	if s.http, err = deps.Telemetry.Server(ctx, deps.Redacted); err != nil {
		return nil, err
	}
	if s.http != nil {
		s.closers = append(s.closers, s.http.Close)
	}
	unregister, err := s.observe(deps.Telemetry.MeterProvider.Meter(scope))
	if err != nil {
		return nil, fmt.Errorf("build the metrics: %w", err)
	}
	s.closers = append(s.closers, unregister)
	return s, nil
}

// listen opens the listener and settles the address that others are told.
func (s *Server) listen(ctx context.Context, given net.Listener) (err error) {
	if s.listener = given; given == nil {
		if s.listener, err = s.cfg.GRPC.Listen(ctx); err != nil {
			return err
		}
	}
	s.closers = append(s.closers, func() error {
		if err := s.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	if s.address = s.cfg.AdvertiseAddress; s.address == "" {
		s.address = s.listener.Addr().String()
	}
	return nil
}

// connect makes the etcd client, if none is given, and waits until etcd answers.
func (s *Server) connect(ctx context.Context, given *clientv3.Client) (*clientv3.Client, error) {
	client := given
	if client == nil {
		var err error
		client, err = clientv3.New(clientv3.Config{
			Endpoints:   s.cfg.Etcd.Endpoints,
			DialTimeout: s.cfg.Etcd.RequestTimeout.Std(),
			// A member that vanished without a word is noticed within seconds.
			DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
			Logger: zap.NewNop(), // what matters comes back as an error and is logged once
		})
		if err != nil {
			return nil, fmt.Errorf("etcd at %s: %w", s.cfg.Etcd.Endpoints, err)
		}
		s.closers = append(s.closers, client.Close)
	}
	if err := metalog.WaitReachable(ctx, client, client.Endpoints(), s.cfg.Etcd.StartTimeout.Std()); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return client, nil
}

// open makes the object store, if none is given, and checks that it answers. A
// log that has begun goes on without it: elections need no bucket.
func (s *Server) open(ctx context.Context, given objstore.Store) (objstore.Store, error) {
	store, where := given, "the given object store"
	if store == nil {
		cfg := gcs.DefaultConfig(s.cfg.Store.Bucket)
		cfg.Endpoint = s.cfg.Store.Endpoint
		if cfg.Bucket == "" {
			return nil, errors.New("store.bucket is empty: name the bucket of the cluster")
		}
		where = "bucket " + cfg.Bucket
		if cfg.Endpoint != "" {
			where += " at " + cfg.Endpoint
		}
		bucket, err := gcs.Open(ctx, cfg)
		if err != nil {
			return nil, fmt.Errorf("object store, %s: %w", where, err)
		}
		s.closers = append(s.closers, bucket.Close)
		store = decorate.Wrap(bucket,
			decorate.Retry(decorate.RetryOptions{MaxElapsed: s.cfg.Store.StartTimeout.Std()}),
			decorate.Prefix(s.cfg.Store.Prefix),
		)
	}
	err := waitStore(ctx, store, s.cfg.Store.StartTimeout.Std())
	if errors.Is(err, ErrStoreUnreachable) {
		if tail, unknown := s.metalog.Tail(ctx); unknown == nil && tail.End > 0 {
			s.log.WarnContext(ctx, "the object store does not answer, going on without it", "store", where, "err", err)
			s.storeAway = true
			return store, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", where, err)
	}
	return store, nil
}

// ErrStoreUnreachable is the error of a start without the object store, while
// the cluster's log has not begun.
var ErrStoreUnreachable = errors.New("object store unreachable")

// waitStore asks the object store until it answers, at most for limit.
func waitStore(ctx context.Context, store objstore.Reader, limit time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// Not retried are answers that no waiting changes, such as a foreign marker.
	passing := func(err error) backoff.Verdict { return backoff.Verdict{Retry: objstore.Retryable(err)} }
	pause := backoff.Policy{Initial: 50 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: 0.5}
	err := backoff.Retry(bounded, backoff.Options{Policy: pause, Classify: passing}, func(ctx context.Context, _ int) error {
		_, err := controller.ReadMarker(ctx, store)
		return err
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case bounded.Err() != nil, errors.Is(err, backoff.ErrExhausted):
		return fmt.Errorf("%w: no answer within %v: %w", ErrStoreUnreachable, limit, err)
	}
	return err
}

// Run serves until ctx ends or the replica must not go on. Call it once.
func (s *Server) Run(ctx context.Context) error {
	g := lifecycle.NewGroup(s.log)
	g.Go("grpc", func(context.Context) error { return s.grpc.Serve(s.listener) })
	g.Go("log", s.follow)
	g.Go("controller", s.controller.Run)
	g.Go("snapshots", s.keeper.Run)
	tasks := []string{"log", "snapshots"}
	if s.http != nil {
		g.Go("http", s.http.Run)
		tasks = append(tasks, "http")
	}
	g.Go("health", func(ctx context.Context) error {
		s.grpc.MarkServing()
		s.log.InfoContext(ctx, "serving", "address", s.Addr(), "advertised", s.address, "metadata_id", s.cfg.ID)
		return nil
	})
	g.OnStop("not serving", time.Second, func(context.Context) error { s.grpc.MarkNotServing(); return nil })
	g.StopTasks("resign", s.cfg.LeaseTTL.Std()+6*time.Second, "controller")
	g.Wait("drain", s.cfg.GRPC.DrainDelay.Std())
	g.OnStop("end streams", time.Second, func(context.Context) error { s.grpc.EndStreams(); return nil })
	g.OnStop("grpc", s.cfg.GRPC.StopBound(), s.grpc.Stop)
	g.StopTasks("log", 5*time.Second, tasks...)
	g.OnStop("connections", 10*time.Second, func(context.Context) error { return s.Close() })
	return g.Run(ctx)
}

// Close frees what Build opened, for a server that is not run.
func (s *Server) Close() error {
	var errs []error
	for i := len(s.closers) - 1; i >= 0; i-- {
		errs = append(errs, s.closers[i]())
	}
	s.closers = nil
	return errors.Join(errs...)
}

// Addr is the bound address of the gRPC server.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// MetricsAddr is the bound address of /metrics; empty without one.
func (s *Server) MetricsAddr() string {
	if s.http == nil {
		return ""
	}
	return s.http.Address()
}

// ClusterID is the cluster's id, empty until its log has begun.
func (s *Server) ClusterID() (id string) {
	s.hub.Read(func(st *state.State) { id = st.ClusterID() })
	return id
}

// Leading says whether this replica is the controller, and its epoch.
func (s *Server) Leading() (epoch int64, ok bool) { return s.controller.Leading() }

// newIdentity makes the identity of a cluster that begins. crypto/rand never
// fails.
func newIdentity() controller.Identity {
	var b [4]byte
	for {
		_, _ = rand.Read(b[:])
		if n := binary.BigEndian.Uint32(b[:]) & math.MaxInt32; n != 0 {
			return controller.Identity{ClusterID: uuid.NewString(), Incarnation: n}
		}
	}
}

func writeID() []byte {
	b := make([]byte, 16)
	_, _ = rand.Read(b)
	return b
}
