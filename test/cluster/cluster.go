package cluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/embetcd"
	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/rlm"
)

// Patience bounds every wait of this package.
const Patience = 45 * time.Second

// BucketName is the bucket that clusters use.
const BucketName = "braid-test"

// Options say what to start. Zero values take the defaults named.
type Options struct {
	// Metadata, RLMs and Brokers are how many of each: 1, 1 and 1. A negative
	// number is none.
	Metadata, RLMs, Brokers int
	// Zones spreads rlms and brokers over so many zones, "z1" and on: 1.
	Zones int
	// Session is the session timeout of brokers and remote-log managers: 3 s.
	Session time.Duration
	// LogLevel of every member: warn.
	LogLevel string
	// ChangeMetadata, ChangeRLM and ChangeBroker alter a member's configuration
	// before each of its lives.
	ChangeMetadata func(*metadata.Config)
	ChangeRLM      func(*rlm.Config)
	ChangeBroker   func(*broker.Config)
	// WrapCommitter decorates the way that the commits of the rlm with the given
	// id take.
	WrapCommitter func(id int, c rlm.Committer) rlm.Committer
}

// TB is what a cluster needs of the test that it runs in; a testing.TB has it.
type TB interface {
	Helper()
	Cleanup(fn func())
	TempDir() string
	Output() io.Writer
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Cluster is a running cluster. See the package comment.
type Cluster struct {
	// Bucket is the object store, for its faults and counters.
	Bucket *gcsemu.Server

	tb   TB
	opts Options
	dir  string

	mu         sync.Mutex // guards all below
	etcd       *embetcd.Server
	bucketDown bool
	members    []*Member
	conns      map[string]*grpc.ClientConn
	admin      *client.Admin
}

// Start starts a cluster and waits until every broker takes part in it.
// Everything ends with the test.
func Start(tb TB, opts Options) *Cluster {
	tb.Helper()
	count := func(n *int) {
		if *n == 0 {
			*n = 1
		}
		*n = max(*n, 0)
	}
	count(&opts.Metadata)
	count(&opts.RLMs)
	count(&opts.Brokers)
	count(&opts.Zones)
	if opts.Session == 0 {
		opts.Session = 3 * time.Second
	}
	if opts.LogLevel == "" {
		opts.LogLevel = "warn"
	}
	if l := os.Getenv("BRAID_TEST_LOG"); l != "" {
		opts.LogLevel = l
	}
	c := &Cluster{tb: tb, opts: opts, dir: tb.TempDir(), conns: map[string]*grpc.ClientConn{}}
	var err error
	c.Bucket, err = gcsemu.Start(gcsemu.Options{StorageRoot: filepath.Join(c.dir, "bucket"), Buckets: []string{BucketName}})
	c.must(err, "start the object store")
	tb.Cleanup(func() { _ = c.Bucket.Close() })
	c.StartEtcd()
	tb.Cleanup(c.StopEtcd)
	tb.Cleanup(c.end)

	for i := range opts.Metadata {
		c.add(RoleMetadata, i+1).Start()
	}
	if opts.Metadata > 0 {
		c.WaitController()
	}
	for i := range opts.RLMs {
		c.add(RoleRLM, i+1).Start()
	}
	for i := range opts.Brokers {
		c.add(RoleBroker, i+1).Start()
	}
	c.WaitMembers()
	return c
}

// end stops all members, those that still run by killing them: what a test
// leaves running is not worth an orderly stop.
func (c *Cluster) end() {
	for _, conn := range c.conns {
		_ = conn.Close()
	}
	if c.admin != nil {
		_ = c.admin.Close()
	}
	for _, m := range c.members {
		m.end()
	}
	for _, m := range c.members {
		m.join()
	}
}

func (c *Cluster) must(err error, doing string) {
	c.tb.Helper()
	if err != nil {
		c.tb.Fatalf("%s: %v", doing, err)
	}
}

// add makes a member that does not run yet.
func (c *Cluster) add(role Role, id int) *Member {
	c.tb.Helper()
	f, err := newFront()
	c.must(err, "listen")
	m := &Member{c: c, role: role, id: id, front: f, dir: filepath.Join(c.dir, fmt.Sprintf("%s-%d", role, id))}
	c.members = append(c.members, m)
	return m
}

// Add starts one more member of a role and returns it.
func (c *Cluster) Add(role Role) *Member {
	c.tb.Helper()
	m := c.add(role, len(c.Members(role))+1)
	m.Start()
	return m
}

// AddDown makes one more member of a role that does not run yet.
func (c *Cluster) AddDown(role Role) *Member {
	c.tb.Helper()
	return c.add(role, len(c.Members(role))+1)
}

// Members lists the members of a role in order of id.
func (c *Cluster) Members(role Role) []*Member {
	var out []*Member
	for _, m := range c.members {
		if m.role == role {
			out = append(out, m)
		}
	}
	return out
}

func (c *Cluster) member(role Role, id int) *Member {
	c.tb.Helper()
	for _, m := range c.members {
		if m.role == role && m.id == id {
			return m
		}
	}
	c.tb.Fatalf("there is no %s %d", role, id)
	return nil
}

// Metadata is the metadata replica with the given id, from 1.
func (c *Cluster) Metadata(id int) *Member { c.tb.Helper(); return c.member(RoleMetadata, id) }

// RLM is the remote-log manager with the given id, from 1.
func (c *Cluster) RLM(id int) *Member { c.tb.Helper(); return c.member(RoleRLM, id) }

// Broker is the broker with the given id, from 1.
func (c *Cluster) Broker(id int) *Member { c.tb.Helper(); return c.member(RoleBroker, id) }

// Addresses are those of all members of a role.
func (c *Cluster) Addresses(role Role) []string {
	var out []string
	for _, m := range c.Members(role) {
		out = append(out, m.Address())
	}
	return out
}

// zone of the n-th member of a role.
func (c *Cluster) zone(id int) string { return fmt.Sprintf("z%d", (id-1)%c.opts.Zones+1) }

// StartEtcd starts etcd, again on the data that it had.
func (c *Cluster) StartEtcd() {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	s, err := embetcd.Start(ctx, embetcd.Options{Dir: filepath.Join(c.dir, "etcd"), Fast: true, NoSync: true})
	c.must(err, "start etcd")
	c.mu.Lock()
	c.etcd = s
	c.mu.Unlock()
}

// StopEtcd stops etcd. Stopping it twice is harmless.
func (c *Cluster) StopEtcd() {
	c.mu.Lock()
	s := c.etcd
	c.etcd = nil
	c.mu.Unlock()
	if s != nil {
		s.Close()
	}
}

// etcdAddress is where etcd is now; empty is nowhere.
func (c *Cluster) etcdAddress() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.etcd == nil {
		return ""
	}
	const scheme = "http://"
	return c.etcd.Endpoints()[0][len(scheme):]
}

// EtcdEndpoint is where etcd is now, for clients of the test's own.
func (c *Cluster) EtcdEndpoint() string { return c.etcdAddress() }

// BucketDown cuts everybody off from the object store, or lets them reach it
// again. Connections that exist are reset by rules of the emulator, new ones are
// refused.
func (c *Cluster) BucketDown(down bool) {
	c.tb.Helper()
	c.mu.Lock()
	c.bucketDown = down
	c.mu.Unlock()
	var rules []gcsemu.Rule
	if down {
		rules = []gcsemu.Rule{{Name: "bucket down", Action: gcsemu.ActCutBefore}}
	}
	c.must(c.Bucket.SetRules(rules...), "set the bucket's rules")
}

// Faults replaces the rules of the object store.
func (c *Cluster) Faults(rules ...gcsemu.Rule) {
	c.tb.Helper()
	c.must(c.Bucket.SetRules(rules...), "set the bucket's rules")
}

func (c *Cluster) bucketAddress() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bucketDown {
		return ""
	}
	return c.Bucket.Addr().String()
}

// Eventually waits until ok returns true.
func (c *Cluster) Eventually(what string, ok func() bool) {
	c.tb.Helper()
	if !c.Within(Patience, ok) {
		c.tb.Fatalf("not within %s: %s", Patience, what)
	}
}

// Within reports whether ok becomes true in time.
func (c *Cluster) Within(bound time.Duration, ok func() bool) bool {
	deadline := time.NewTimer(bound)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok() {
			return true
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return ok()
		}
	}
}

// Conn is a connection to a member, kept until the test ends and made again by
// itself. It does not go through the member's own network: a member that is down
// refuses it.
func (c *Cluster) Conn(m *Member) *grpc.ClientConn {
	c.tb.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if conn := c.conns[m.Address()]; conn != nil {
		return conn
	}
	conn, err := grpc.NewClient(m.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(fastReconnect), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(32<<20), grpc.MaxCallSendMsgSize(32<<20)))
	c.must(err, "dial")
	c.conns[m.Address()] = conn
	return conn
}
