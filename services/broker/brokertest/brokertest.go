package brokertest

import (
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/telemetry"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker"
)

// patience bounds every wait of this package.
const patience = 30 * time.Second

// Options say what to start.
type Options struct {
	// ID is the broker's id; 0 = 1.
	ID int
	// Zone is its zone; may be empty.
	Zone string
	// Metadata are the addresses of the metadata replicas.
	Metadata []string
	// FS holds the data directory: the operating system's.
	FS vfs.FS
	// DataDir is the data directory: a new temporary one.
	DataDir string
	// Address to listen on, to start again where others look for it: a free port
	// of the loopback interface.
	Address string
	// Change alters the configuration; may be nil.
	Change func(*broker.Config)
}

// Instance is a running broker.
type Instance struct {
	// Server is the service.
	Server *broker.Server
	// Options are those it was started with, completed.
	Options Options

	t       testing.TB
	network *network
	dead    atomic.Bool // the disk fails every write
	cancel  context.CancelCauseFunc
	done    chan struct{}
	err     error // of Run, once done is closed
}

// Config is the configuration that [Start] uses: defaults with short waits.
func Config(o Options) broker.Config {
	cfg := broker.DefaultConfig()
	cfg.ID = max(o.ID, 1)
	cfg.Zone = o.Zone
	cfg.DataDir = o.DataDir
	cfg.MetadataAddresses = o.Metadata
	cfg.GRPC.ListenAddress = "127.0.0.1:0"
	if o.Address != "" {
		cfg.GRPC.ListenAddress = o.Address
	}
	cfg.StartTimeout = config.Duration(patience)
	cfg.HandoverTimeout = config.Duration(5 * time.Second)
	cfg.Telemetry.HTTPAddress = ""
	cfg.Telemetry.LogLevel = "debug"
	cfg.GRPC.DrainDelay = 0
	cfg.GRPC.StreamGrace = config.Duration(500 * time.Millisecond)
	cfg.GRPC.StopTimeout = config.Duration(2 * time.Second)
	if o.Change != nil {
		o.Change(&cfg)
	}
	return cfg
}

// Start builds and runs a broker. It doesn't wait until the broker is ready; see
// [Instance.WaitReady]. It is stopped when the test ends.
func Start(t testing.TB, o Options) *Instance {
	t.Helper()
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.DataDir == "" {
		o.DataDir = t.TempDir()
	}
	cfg := Config(o)
	tel, err := telemetry.New(t.Context(), cfg.Telemetry, telemetry.Identity{
		Service: "broker", Instance: "broker-" + strconv.Itoa(cfg.ID), Version: "test",
	}, telemetry.Options{LogOutput: t.Output()})
	if err != nil {
		t.Fatalf("telemetry: %v", err)
	}
	listener, err := cfg.GRPC.Listen(t.Context())
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	o.ID, o.Address = cfg.ID, listener.Addr().String()
	i := &Instance{t: t, Options: o, network: &network{conns: map[net.Conn]struct{}{}}, done: make(chan struct{})}
	i.Server, err = broker.Build(t.Context(), cfg, broker.Deps{
		Telemetry: tel, Listener: &severed{listener, i.network}, Dialer: i.network.dial,
		FS: errorfs.Wrap(o.FS, errorfs.InjectorFunc(i.disk)),
	})
	if err != nil {
		t.Fatalf("build: %v", err)
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(t.Context()))
	i.cancel = cancel
	go func() {
		defer close(i.done)
		i.err = i.Server.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel(context.Canceled)
		<-i.done
		stop, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
		defer cancel()
		_ = tel.Shutdown(stop)
	})
	return i
}

// disk fails what a dead process can't do any more.
func (i *Instance) disk(op errorfs.Op) error {
	if i.dead.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && op.Kind != errorfs.OpFileClose {
		return errDead
	}
	return nil
}

// Stop stops the broker in order and fails the test if that fails.
func (i *Instance) Stop() {
	i.t.Helper()
	i.cancel(context.Canceled)
	if err := i.Err(); err != nil {
		i.t.Errorf("stop: %v", err)
	}
}

// Err is what Run returned; it waits for that, bounded.
func (i *Instance) Err() error {
	i.t.Helper()
	select {
	case <-i.done:
		return i.err
	case <-time.After(2 * patience):
		i.t.Fatal("the broker does not end")
		return nil
	}
}

// Kill cuts the broker off from everybody and from its disk, at once and for
// good. It doesn't wait for what is left of it in this process; [Instance.Restart]
// does.
func (i *Instance) Kill() {
	i.dead.Store(true)
	i.network.cut()
	i.cancel(broker.ErrAbandoned)
}

// Restart starts the next life of a broker that was stopped or killed: same id,
// directory and address.
func (i *Instance) Restart() *Instance {
	i.t.Helper()
	_ = i.Err() // a dead process has no last words
	return Start(i.t, i.Options)
}

// Cut cuts the broker's network and leaves it running.
func (i *Instance) Cut() { i.network.cut() }

// Addr is the broker's address.
func (i *Instance) Addr() string { return i.Server.Addr() }

// WaitReady waits until the broker is registered and knows the cluster.
func (i *Instance) WaitReady() *Instance {
	i.t.Helper()
	select {
	case <-i.Server.Ready():
	case <-i.done:
		i.t.Fatalf("ended before it was ready: %v", i.err)
	case <-time.After(patience):
		i.t.Fatal("not ready in time")
	}
	return i
}

// Conn is a connection to the broker, closed when the test ends.
func (i *Instance) Conn() *grpc.ClientConn {
	i.t.Helper()
	conn, err := grpc.NewClient(i.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		i.t.Fatalf("dial: %v", err)
	}
	i.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Client calls the broker over a connection of its own.
func (i *Instance) Client() brokerv1.LogServiceClient {
	i.t.Helper()
	return brokerv1.NewLogServiceClient(i.Conn())
}

var errDead = errors.New("the broker was killed")

// network is what a broker talks through, so that it can be cut.
type network struct {
	mu    sync.Mutex // guards all below
	down  bool
	conns map[net.Conn]struct{}
}

func (n *network) add(c net.Conn) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, errors.Join(errDead, c.Close())
	}
	n.conns[c] = struct{}{}
	return &tracked{c, n}, nil
}

func (n *network) dial(ctx context.Context, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return n.add(c)
}

func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down = true
	for c := range n.conns {
		_ = c.Close()
	}
}

// tracked forgets a connection when it is closed.
type tracked struct {
	net.Conn
	n *network
}

func (c *tracked) Close() error {
	c.n.mu.Lock()
	delete(c.n.conns, c.Conn)
	c.n.mu.Unlock()
	return c.Conn.Close()
}

// severed is a listener whose connections can be cut.
type severed struct {
	net.Listener
	n *network
}

func (l *severed) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c, err = l.n.add(c); err == nil {
			return c, nil
		}
	}
}
