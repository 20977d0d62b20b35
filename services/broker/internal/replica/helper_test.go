package replica_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// scene is a network of hand-played peers inside one bubble.
type scene struct {
	t      testing.TB
	world  *world
	bucket *bucket

	mu        sync.Mutex
	listeners map[string]*bufconn.Listener
	servers   map[string]*grpc.Server
}

func newScene(t testing.TB, partitions int) *scene {
	s := &scene{t: t, world: newWorld(partitions), bucket: newBucket(), listeners: map[string]*bufconn.Listener{}, servers: map[string]*grpc.Server{}}
	s.world.elect = 1
	s.serve("meta:1", s.world.register)
	return s
}

func (s *scene) serve(address string, register func(*grpc.Server)) {
	l := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.MaxRecvMsgSize(16 << 20))
	register(server)
	s.mu.Lock()
	s.listeners[address], s.servers[address] = l, server
	s.mu.Unlock()
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	s.t.Cleanup(func() { server.Stop(); <-done })
}

// silence ends what is served at an address.
func (s *scene) silence(address string) {
	s.mu.Lock()
	server := s.servers[address]
	delete(s.listeners, address)
	delete(s.servers, address)
	s.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

func (s *scene) dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20), grpc.MaxCallSendMsgSize(16<<20)),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			s.mu.Lock()
			l := s.listeners[address]
			s.mu.Unlock()
			if l == nil {
				return nil, fmt.Errorf("nobody listens at %s", address)
			}
			return l.DialContext(ctx)
		}))
}

// rlm starts a remote-log manager and opens its epoch.
func (s *scene) rlm(id int32, zone string) *rlm {
	r := newRLM(s.world, s.bucket, id)
	address := fmt.Sprintf("rlm:%d", id)
	s.serve(address, func(g *grpc.Server) { registerRLM(g, r) })
	r.epoch = s.world.addRLM(id, address, zone)
	return r
}

// broker is one life of a broker.
type broker struct {
	t    testing.TB
	m    *replica.Manager
	meta *metaclient.Client
	end  context.CancelFunc
	done chan error
	// silence ends what is served at the broker's address.
	silence func()
}

func (s *scene) broker(id int32, fs vfs.FS, change ...func(*replica.Config)) *broker {
	s.t.Helper()
	meta, err := metaclient.New(metaclient.Options{Addresses: []string{"meta:1"}, Dial: s.dial, Logger: testLogger(s.t)})
	require.NoError(s.t, err)
	cfg := replica.DefaultConfig()
	cfg.BrokerID, cfg.AdvertiseAddress, cfg.Zone, cfg.DataDir = id, fmt.Sprintf("broker:%d", id), "a", "data"
	for _, fn := range change {
		fn(&cfg)
	}
	m, err := replica.NewManager(cfg, replica.Deps{FS: fs, Metadata: meta, DialRemoteLog: s.dial, DialBroker: s.dial, Logger: testLogger(s.t)})
	require.NoError(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	b := &broker{t: s.t, m: m, meta: meta, end: cancel, done: make(chan error, 1)}
	address := fmt.Sprintf("broker:%d", id)
	s.serve(address, func(g *grpc.Server) { brokerv1.RegisterReplicaServiceServer(g, replica.NewPeerService(m)) })
	b.silence = func() { s.silence(address) }
	go func() { b.done <- m.Run(ctx) }()
	s.t.Cleanup(func() { b.stop() })
	return b
}

// stop ends the broker without draining; logs are closed cleanly.
func (b *broker) stop() {
	b.t.Helper()
	b.end()
	if b.silence != nil {
		b.silence()
		b.silence = nil
	}
	if b.done != nil {
		require.NoError(b.t, <-b.done)
		b.done = nil
		require.NoError(b.t, b.meta.Close())
	}
}

// leading waits until the broker takes appends for a partition.
func (b *broker) leading(index int32) *replica.Partition {
	b.t.Helper()
	var p *replica.Partition
	until(b.t, "leading", func() bool {
		var err error
		p, err = b.m.Lookup(topicName, index)
		return err == nil && p.Offsets().Leading
	})
	return p
}

// following waits until the broker has copied a partition up to end.
func (b *broker) following(index int32, end int64) *replica.Partition {
	b.t.Helper()
	var p *replica.Partition
	until(b.t, "following", func() bool {
		var err error
		p, err = b.m.Lookup(topicName, index)
		if err != nil {
			return false
		}
		x := p.Explain()
		return x.State == partition.Fetching && x.Offsets.LogEnd >= end
	})
	return p
}

// until waits for a condition in virtual time.
func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for range 6000 {
		if cond() {
			return
		}
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
	}
	t.Fatalf("not within a virtual minute: %s", what)
}

func testLogger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// batch builds a batch of n records that carry a tag.
func batch(t testing.TB, tag string, n int) []byte {
	t.Helper()
	b := record.NewBuilder(record.CodecNone)
	return fill(t, b, tag, n)
}

func fill(t testing.TB, b *record.Builder, tag string, n int) []byte {
	for i := range n {
		require.NoError(t, b.Append(record.Record{Timestamp: time.Now().UnixMilli(), Value: fmt.Appendf(nil, "%s-%d", tag, i)}))
	}
	out, _, err := b.Build(nil)
	require.NoError(t, err)
	return out
}

const producerA = int64(incarnation)<<32 | 9

// sequenced builds a batch of an idempotent producer.
func sequenced(t testing.TB, producer int64, epoch int16, sequence int32, n int) []byte {
	t.Helper()
	b := record.NewBuilder(record.CodecNone)
	b.SetProducer(producer, epoch, sequence)
	return fill(t, b, fmt.Sprintf("p%d/%d", producer&0xffff, sequence), n)
}

// add appends and waits for the level.
func add(t testing.TB, p *replica.Partition, batches []byte, level partition.Level) (replica.AppendResult, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	ticket, err := p.Submit(ctx, replica.AppendInput{Batches: batches, Level: level})
	if err != nil {
		return replica.AppendResult{}, err
	}
	return ticket.Wait(ctx)
}

func mustAdd(t testing.TB, p *replica.Partition, batches []byte, level partition.Level) replica.AppendResult {
	t.Helper()
	res, err := add(t, p, batches, level)
	require.NoError(t, err)
	return res
}

// values reads everything visible.
func values(t testing.TB, p *replica.Partition) []string {
	t.Helper()
	var out []string
	next := p.Offsets().LogStart
	for {
		got, err := p.Read(t.Context(), next, 1<<20, nil)
		require.NoError(t, err)
		if got.Next == next {
			return out
		}
		require.Equal(t, next, got.Base)
		for b, err := range record.Batches(got.Batches) {
			require.NoError(t, err)
			require.NoError(t, b.Validate())
			for r, err := range b.Records() {
				require.NoError(t, err)
				out = append(out, string(r.Value))
			}
		}
		next = got.Next
	}
}

func bubble(t *testing.T, fn func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, fn)
}
