package rlmtest

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/telemetry"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/rlm"
)

// Options say what to start.
type Options struct {
	// ID is the remote-log manager's id; 0 = 1.
	ID int
	// Zone is its zone; may be empty.
	Zone string
	// Metadata are the addresses of the metadata replicas.
	Metadata []string
	// Bucket is the bare store, which must hold a cluster marker (see [Mark]).
	Bucket objstore.Store
	// WrapCommitter decorates the way commits take; may be nil.
	WrapCommitter func(rlm.Committer) rlm.Committer
	// Change alters the configuration; may be nil.
	Change func(*rlm.Config)
}

// Instance is a running remote-log manager.
type Instance struct {
	// Server is the service.
	Server *rlm.Server
	// Telemetry is its own; its registry holds the metrics.
	Telemetry *telemetry.Telemetry

	t       testing.TB
	network *network
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // of Run, once done is closed
}

// Config is the configuration that [Start] uses: defaults with short waits.
func Config(o Options) rlm.Config {
	cfg := rlm.DefaultConfig()
	cfg.ID = max(o.ID, 1)
	cfg.Zone = o.Zone
	cfg.MetadataAddresses = o.Metadata
	cfg.Store.Bucket = "test"
	cfg.Store.StartTimeout = config.Duration(10 * time.Second)
	cfg.Telemetry.HTTPAddress = ""
	cfg.Telemetry.LogLevel = "debug"
	cfg.GRPC.DrainDelay = 0
	cfg.GRPC.StreamGrace = config.Duration(time.Second)
	cfg.GRPC.StopTimeout = config.Duration(2 * time.Second)
	cfg.WAL.FlushTimeout = config.Duration(5 * time.Second)
	if o.Change != nil {
		o.Change(&cfg)
	}
	return cfg
}

// Start builds and runs a remote-log manager. It is stopped when the test ends.
func Start(t testing.TB, o Options) *Instance {
	t.Helper()
	cfg := Config(o)
	tel, err := telemetry.New(t.Context(), cfg.Telemetry, telemetry.Identity{Service: "rlm", Instance: "test", Version: "test"}, telemetry.Options{LogOutput: t.Output()})
	if err != nil {
		t.Fatalf("telemetry: %v", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	i := &Instance{t: t, Telemetry: tel, network: &network{conns: map[net.Conn]struct{}{}}, done: make(chan struct{})}
	i.Server, err = rlm.Build(t.Context(), cfg, rlm.Deps{
		Telemetry: tel, Listener: &severed{listener, i.network},
		Bucket:        severedStore(o.Bucket, i.network),
		DialMetadata:  i.network.dial,
		WrapCommitter: o.WrapCommitter,
	})
	if err != nil {
		t.Fatalf("build: %v", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	i.cancel = cancel
	go func() {
		defer close(i.done)
		i.err = i.Server.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-i.done
		stop, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
		defer cancel()
		_ = tel.Shutdown(stop)
	})
	return i
}

// Stop stops the instance in order and fails the test if that fails.
func (i *Instance) Stop() {
	i.t.Helper()
	i.cancel()
	<-i.done
	if i.err != nil {
		i.t.Errorf("stop: %v", i.err)
	}
}

// Err is what Run returned; it waits for that.
func (i *Instance) Err() error {
	<-i.done
	return i.err
}

// Kill cuts the instance off from everybody, at once and for good.
func (i *Instance) Kill() {
	i.network.cut()
	i.cancel()
}

// Addr is the instance's address.
func (i *Instance) Addr() string { return i.Server.Addr() }

// WaitRegistered waits until the instance has an epoch above the given one.
func (i *Instance) WaitRegistered(above int64) int64 {
	i.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		if epoch, ok := i.Server.Epoch(); ok && epoch > above {
			return epoch
		}
		select {
		case <-i.done:
			i.t.Fatalf("ended before it registered: %v", i.err)
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			i.t.Fatalf("not registered above epoch %d in time", above)
		}
	}
}

// Conn is a connection to the instance, closed when the test ends.
func (i *Instance) Conn() *grpc.ClientConn {
	i.t.Helper()
	conn, err := grpc.NewClient(i.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		i.t.Fatalf("dial: %v", err)
	}
	i.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Mark claims a bucket for a cluster as the metadata service does.
func Mark(t testing.TB, store objstore.Creator, clusterID string, incarnation uint32) {
	t.Helper()
	content, err := proto.Marshal(&storagev1.ClusterMarker{FormatVersion: 1, ClusterId: clusterID, Incarnation: incarnation})
	if err != nil {
		t.Fatalf("marker: %v", err)
	}
	if _, err := store.Create(t.Context(), "braid-cluster", objstore.NewParts(content)); err != nil {
		t.Fatalf("marker: %v", err)
	}
}

var errCut = errors.New("the instance was killed")

// network is what an instance talks through, so that it can be cut.
type network struct {
	mu    sync.Mutex // guards all below
	down  bool
	conns map[net.Conn]struct{}
}

func (n *network) add(c net.Conn) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, errors.Join(errCut, c.Close())
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

func (n *network) isDown() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.down
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

// severedStore fails every request of a killed instance.
func severedStore(s objstore.Store, n *network) objstore.Store {
	return decorate.Wrap(s, func(s objstore.Store) objstore.Store { return &cutStore{s, n} })
}

// cutStore guards what has effects; reads of a dead instance harm nobody.
type cutStore struct {
	objstore.Store
	n *network
}

func (s *cutStore) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	if s.n.isDown() {
		return objstore.Attrs{}, &objstore.Error{Op: objstore.OpCreate, Name: name, Kind: objstore.ErrUnavailable, Err: errCut}
	}
	return s.Store.Create(ctx, name, body)
}

func (s *cutStore) Delete(ctx context.Context, name string, generation int64) error {
	if s.n.isDown() {
		return &objstore.Error{Op: objstore.OpDelete, Name: name, Kind: objstore.ErrUnavailable, Err: errCut}
	}
	return s.Store.Delete(ctx, name, generation)
}
