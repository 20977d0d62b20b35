package metadatatest

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/embetcd"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/telemetry"
	"github.com/braidlog/braid/services/metadata"
)

// patience bounds every wait of this package.
const patience = 30 * time.Second

// Options configure a [Cluster]. Zero values take the defaults named.
type Options struct {
	// Replicas to start: 1.
	Replicas int
	// Store of the cluster: a new one in memory.
	Store objstore.Store
	// Etcd to use: a new one.
	Etcd *embetcd.Server
	// WrapKV is called on the requests to etcd of each replica, to inject faults.
	WrapKV func(clientv3.KV) clientv3.KV
	// WrapEtcd is called on the configuration of each replica's etcd client.
	WrapEtcd func(*clientv3.Config)
	// Change is called on the configuration of each replica. Its sessions are of
	// 5 s and its leases of 10 s: a busy machine delays a test by seconds, and only
	// tests of what runs out want it to.
	Change func(*metadata.Config)
	// Disks gives each replica a data directory that outlives it; without, a
	// replica that is started again begins with an empty disk.
	Disks bool
}

// Cluster is a set of replicas on one etcd and one bucket prefix. Its methods
// belong to the test's goroutine.
type Cluster struct {
	Etcd  *embetcd.Server
	Store objstore.Store

	tb       testing.TB
	opts     Options
	dir      string // of the data directories
	replicas []*Replica
}

// Replica is one running metadata server.
type Replica struct {
	*metadata.Server
	// Etcd is the client that this replica alone uses: closing it cuts the
	// replica off.
	Etcd *clientv3.Client

	tb     testing.TB
	conn   *grpc.ClientConn
	cancel context.CancelFunc
	done   chan struct{}
	err    error // of Run; read after done
}

// Start starts a cluster and waits until it has a controller. Everything is
// stopped at the end of the test.
func Start(tb testing.TB, opts Options) *Cluster {
	tb.Helper()
	c := &Cluster{tb: tb, opts: opts, Etcd: opts.Etcd, Store: opts.Store}
	if c.Etcd == nil {
		ctx, cancel := context.WithTimeout(tb.Context(), patience)
		defer cancel()
		var err error
		c.Etcd, err = embetcd.Start(ctx, embetcd.Options{Dir: tb.TempDir(), Fast: true, NoSync: true})
		require.NoError(tb, err)
		tb.Cleanup(c.Etcd.Close)
	}
	if opts.Disks {
		c.dir = tb.TempDir()
	}
	if c.Store == nil {
		c.Store = memstore.New(memstore.Options{})
	}
	for range max(opts.Replicas, 1) {
		c.Add()
	}
	c.Controller()
	return c
}

// Config is the configuration of the replica of the given id.
func (c *Cluster) Config(id int) metadata.Config {
	cfg := metadata.DefaultConfig()
	cfg.ID = id
	cfg.Telemetry.LogLevel = "warn"
	cfg.Telemetry.LogFormat = telemetry.Text
	cfg.Telemetry.HTTPAddress = ""
	cfg.Etcd.Endpoints = c.Etcd.Endpoints()
	cfg.Etcd.ProbeInterval = config.Duration(time.Second)
	cfg.SessionTimeout = config.Duration(5 * time.Second)
	cfg.LeaseTTL = config.Duration(10 * time.Second)
	cfg.OpenTimeout = config.Duration(5 * time.Second)
	cfg.Progress = config.Duration(50 * time.Millisecond)
	cfg.GRPC.DrainDelay = 0
	cfg.GRPC.StreamGrace = config.Duration(100 * time.Millisecond)
	cfg.GRPC.StopTimeout = config.Duration(2 * time.Second)
	if c.dir != "" {
		cfg.DataDir = c.DataDir(id)
	}
	if c.opts.Change != nil {
		c.opts.Change(&cfg)
	}
	return cfg
}

// DataDir is the data directory of the replica of the given id.
func (c *Cluster) DataDir(id int) string { return filepath.Join(c.dir, fmt.Sprintf("metadata-%d", id)) }

// Build builds a replica that is not run.
func (c *Cluster) Build(ctx context.Context, cfg metadata.Config, etcd *clientv3.Client) (*metadata.Server, error) {
	tel, err := telemetry.New(ctx, cfg.Telemetry, telemetry.Identity{Service: "metadata"}, telemetry.Options{LogOutput: c.tb.Output()})
	require.NoError(c.tb, err)
	return metadata.Build(ctx, cfg, metadata.Deps{Telemetry: tel, Store: c.Store, Etcd: etcd})
}

// Add starts another replica.
func (c *Cluster) Add() *Replica {
	c.tb.Helper()
	r := c.start(len(c.replicas) + 1)
	c.replicas = append(c.replicas, r)
	return r
}

// Restart starts a replica that has ended again, under its id and with its data
// directory.
func (c *Cluster) Restart(old *Replica) *Replica {
	c.tb.Helper()
	_ = old.Wait()
	at := slices.Index(c.replicas, old)
	r := c.start(at + 1)
	c.replicas[at] = r
	return r
}

func (c *Cluster) start(id int) *Replica {
	c.tb.Helper()
	client := clientv3.Config{
		Endpoints: c.Etcd.Endpoints(), Logger: zap.NewNop(), DialKeepAliveTime: time.Second, DialKeepAliveTimeout: time.Second,
	}
	if c.opts.WrapEtcd != nil {
		c.opts.WrapEtcd(&client)
	}
	etcd, err := clientv3.New(client)
	require.NoError(c.tb, err)
	if c.opts.WrapKV != nil {
		etcd.KV = c.opts.WrapKV(etcd.KV)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.tb.Context()))
	server, err := c.Build(ctx, c.Config(id), etcd)
	if err != nil {
		cancel()
		_ = etcd.Close()
	}
	require.NoError(c.tb, err)
	r := &Replica{Server: server, Etcd: etcd, tb: c.tb, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.err = server.Run(ctx)
	}()
	c.tb.Cleanup(func() {
		_ = r.Stop() // a test that cares has asked itself
		if r.conn != nil {
			_ = r.conn.Close()
		}
		_ = etcd.Close()
	})
	return r
}

// Replicas returns all replicas, stopped ones too, in the order of their ids.
func (c *Cluster) Replicas() []*Replica { return append([]*Replica(nil), c.replicas...) }

// Addresses are those of all replicas.
func (c *Cluster) Addresses() []string {
	out := make([]string, len(c.replicas))
	for i, r := range c.replicas {
		out[i] = r.Addr()
	}
	return out
}

// Controller waits until one of the replicas leads, and returns it.
func (c *Cluster) Controller() *Replica {
	c.tb.Helper()
	var found *Replica
	require.Eventually(c.tb, func() bool {
		for _, r := range c.replicas {
			if _, ok := r.Leading(); ok && r.Running() {
				found = r
				return true
			}
		}
		return false
	}, patience, 5*time.Millisecond, "no controller")
	return found
}

// Conn is a connection to the replica, for the generated clients.
func (r *Replica) Conn() *grpc.ClientConn {
	r.tb.Helper()
	if r.conn == nil {
		conn, err := grpc.NewClient(r.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(r.tb, err)
		r.conn = conn
	}
	return r.conn
}

// Running says whether the replica has not ended.
func (r *Replica) Running() bool {
	select {
	case <-r.done:
		return false
	default:
		return true
	}
}

// Stop stops the replica as a signal would and returns Run's error.
func (r *Replica) Stop() error {
	r.cancel()
	return r.Wait()
}

// Wait waits until the replica has ended by itself and returns Run's error.
func (r *Replica) Wait() error {
	r.tb.Helper()
	select {
	case <-r.done:
		return r.err
	case <-time.After(patience):
		r.tb.Fatalf("the replica at %s does not end", r.Addr())
		return nil
	}
}
