package broker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/lifecycle"
	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/telemetry"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/api"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

const scope = "github.com/braidlog/braid/services/broker"

// Deps are what tests and compositions replace; the zero value is a process's.
type Deps struct {
	// Telemetry is used instead of one built from the configuration; the caller
	// shuts it down.
	Telemetry *telemetry.Telemetry
	// Listener is used instead of the configured address; the server owns it.
	Listener net.Listener
	// FS holds the data directory; nil is the operating system's.
	FS vfs.FS
	// Dialer replaces the TCP dialer of every connection made; nil is the
	// standard one.
	Dialer func(ctx context.Context, address string) (net.Conn, error)
	// Version is the build's.
	Version string
	// Redacted is the configuration for the private pages; may be nil.
	Redacted func() ([]byte, error)
}

// ErrAbandoned as the cause of the end of Run's context makes Run stop without
// handing anything over and without waiting for anybody: for tests that play the
// death of a process.
var ErrAbandoned = errors.New("broker: abandoned")

// Server is a broker.
type Server struct {
	cfg      Config
	log      *slog.Logger
	address  string // advertised
	listener net.Listener
	grpc     *grpcserver.Server
	private  *telemetry.Server // nil = none
	metadata *metaclient.Client
	manager  *replica.Manager
	api      *api.Service
	served   atomic.Bool    // it was SERVING once
	closers  []func() error // run last to first
}

// Build wires a broker and opens its listener. Nothing else is started and no
// other process is talked to: the caller calls Run, or Close.
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
	if s.listener = deps.Listener; s.listener == nil {
		if s.listener, err = cfg.GRPC.Listen(ctx); err != nil {
			return nil, err
		}
	}
	s.onClose(func() error { return closed(s.listener) })
	if s.address, err = cfg.advertised(s.listener.Addr()); err != nil {
		return nil, err
	}
	if err := s.work(tel, deps); err != nil {
		return nil, err
	}
	return s, nil
}

// telemetry takes the given one or builds its own.
func (s *Server) telemetry(ctx context.Context, deps Deps) (*telemetry.Telemetry, error) {
	tel := deps.Telemetry
	if tel == nil {
		var err error
		tel, err = telemetry.New(ctx, s.cfg.Telemetry, telemetry.Identity{
			Service: "broker", Instance: "broker-" + strconv.Itoa(s.cfg.ID), Version: deps.Version, Zone: s.cfg.Zone,
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

// work makes everything between the listener and the disk.
func (s *Server) work(tel *telemetry.Telemetry, deps Deps) (err error) {
	meter := tel.MeterProvider.Meter(scope)
	dial := func(address string) (*grpc.ClientConn, error) {
		return grpcclient.Dial(address, s.cfg.Client, grpcclient.Deps{
			Logger: s.log, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider, Dialer: deps.Dialer,
		})
	}
	s.metadata, err = metaclient.New(metaclient.Options{Addresses: s.cfg.MetadataAddresses, Dial: dial, Logger: s.log})
	if err != nil {
		return err
	}
	s.onClose(s.metadata.Close)

	cfg := s.cfg.Partitions
	cfg.BrokerID, cfg.AdvertiseAddress, cfg.Zone, cfg.DataDir = int32(s.cfg.ID), s.address, s.cfg.Zone, s.cfg.DataDir
	fs := deps.FS
	if fs == nil {
		fs = vfs.Default
	}
	s.manager, err = replica.NewManager(cfg, replica.Deps{FS: fs, Metadata: s.metadata, DialRemoteLog: dial, DialBroker: dial, Logger: s.log, Meter: meter})
	if err != nil {
		return err
	}
	if err := s.observe(meter); err != nil {
		return err
	}
	s.grpc, err = grpcserver.New(s.cfg.GRPC, grpcserver.Deps{Logger: s.log, TracerProvider: tel.TracerProvider, MeterProvider: tel.MeterProvider})
	if err != nil {
		return err
	}
	s.api, err = api.New(s.cfg.API, api.Deps{
		BrokerID: int32(s.cfg.ID), Replicas: api.Local(s.manager), IDs: metadatav1.NewClusterServiceClient(s.metadata.Controller()),
		Dial: dial, Draining: s.grpc.Draining(), Logger: s.log, Meter: meter, Now: time.Now,
	})
	if err != nil {
		return err
	}
	s.onClose(s.api.Close)
	brokerv1.RegisterLogServiceServer(s.grpc, s.api)
	brokerv1.RegisterReplicaServiceServer(s.grpc, replica.NewPeerService(s.manager))
	return nil
}

// Addr is the address listened on.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// AdvertisedAddr is the address that clients and other brokers are told.
func (s *Server) AdvertisedAddr() string { return s.address }

// PrivateAddr is the address of /metrics and the debug pages, "" when not served.
func (s *Server) PrivateAddr() string {
	if s.private == nil {
		return ""
	}
	return s.private.Address()
}

// Ready is closed once the broker is registered and knows the cluster.
func (s *Server) Ready() <-chan struct{} { return s.manager.Ready() }

// Epoch is the present broker epoch; false while not registered.
func (s *Server) Epoch() (int64, bool) {
	epoch, _, ok := s.manager.Registration()
	return epoch, ok
}

// closeBound bounds the closing of the logs at a stop.
const closeBound = 15 * time.Second

// Run serves until ctx ends or the broker must not go on, then stops in order.
// Call it once; it closes what Build opened.
func (s *Server) Run(ctx context.Context) error {
	g := lifecycle.NewGroup(s.log)
	g.Go("grpc", func(context.Context) error { return s.grpc.Serve(s.listener) })
	g.Go("partitions", s.manager.Run)
	g.Go("start", s.start)
	if s.private != nil {
		g.Go("private", s.private.Run)
	}
	g.OnStop("mark not serving", time.Second, func(context.Context) error { s.grpc.MarkNotServing(); return nil })
	// Who never served, or is abandoned, has nothing to hand over.
	ifServed := func(step func(context.Context) error) func(context.Context) error {
		return func(stop context.Context) error {
			if !s.served.Load() || errors.Is(context.Cause(ctx), ErrAbandoned) {
				return nil
			}
			return step(stop)
		}
	}
	g.OnStop("hand over", s.cfg.HandoverTimeout.Std()+sessionBound, ifServed(s.handOver))
	g.OnStop("drain delay", s.cfg.GRPC.DrainDelay.Std()+time.Second, ifServed(s.drainDelay))
	g.OnStop("end streams", time.Second, func(context.Context) error { s.grpc.EndStreams(); return nil })
	g.OnStop("stop gRPC", s.cfg.GRPC.StopBound(), s.grpc.Stop)
	g.StopTasks("close logs", closeBound, "partitions", "start", "grpc")

	s.log.InfoContext(ctx, "broker starting", "address", s.Addr(), "advertised", s.address, "data_dir", s.cfg.DataDir)
	return errors.Join(g.Run(ctx), s.Close())
}

// probeTimeout bounds the last look at the metadata service before a start is
// given up.
const probeTimeout = 2 * time.Second

// start waits until the broker is a member, bounded.
func (s *Server) start(ctx context.Context) error {
	timer := time.NewTimer(s.cfg.StartTimeout.Std())
	defer timer.Stop()
	select {
	case <-s.manager.Ready():
		s.served.Store(true)
		s.grpc.MarkServing()
		epoch, _ := s.Epoch()
		s.log.InfoContext(ctx, "broker serving", "address", s.Addr(), "broker_epoch", epoch)
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
	}
	probe, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err := &StartError{Addresses: s.cfg.MetadataAddresses, Waited: s.cfg.StartTimeout.Std()}
	_, err.Err = metadatav1.NewClusterServiceClient(s.metadata.Any()).GetCluster(probe, &metadatav1.GetClusterRequest{})
	err.Reachable = err.Err == nil
	return err
}

// StartError says that the broker did not become a member of the cluster in time.
type StartError struct {
	// Addresses are the metadata replicas that were tried.
	Addresses []string
	// Waited is how long.
	Waited time.Duration
	// Reachable says that a replica answers, but nobody registers brokers.
	Reachable bool
	// Err is what the last attempt ended with, if not Reachable.
	Err error
}

// Error names the addresses.
func (e *StartError) Error() string {
	where := strings.Join(e.Addresses, ", ")
	if e.Reachable {
		return fmt.Sprintf("the metadata service at %s answers, but this broker was not registered within %s", where, e.Waited)
	}
	return fmt.Sprintf("the metadata service can't be reached within %s at %s: %v", e.Waited, where, e.Err)
}

// Unwrap gives the cause.
func (e *StartError) Unwrap() error { return e.Err }

// sessionBound is what the end of the session may take after the wait for
// uploads.
const sessionBound = 3 * time.Second

// handOver waits until what was appended is in the bucket and ends the session,
// so that others are elected before anybody misses this broker.
func (s *Server) handOver(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.HandoverTimeout.Std(), fmt.Errorf("handed over after %s", s.cfg.HandoverTimeout))
	defer cancel()
	return s.manager.Drain(ctx)
}

// drainDelay gives load balancers and clients time to notice; meanwhile calls are
// forwarded to the new leaders.
func (s *Server) drainDelay(ctx context.Context) error {
	timer := time.NewTimer(s.cfg.GRPC.DrainDelay.Std())
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close frees what Build opened. It is for a server that was never run; Run does
// it itself.
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
