package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

const (
	topic       = "quakes"
	incarnation = 7
)

// cluster is hand-played brokers over one log per partition: what a client sees
// of a cluster, with faults put in by the test.
type cluster struct {
	t *testing.T

	mu        sync.Mutex
	brokers   map[string]*broker
	addresses []string
	leader    string // of every partition; "" for none
	told      string // the leader that DescribeTopic names
	epoch     int32
	maxBatch  int64
	logs      []*plog
	nextID    int64
	produced  int // requests that reached a leader
	// before and after are asked about each batch that reaches the leader,
	// before and after it is stored.
	before, after func(n int, b record.Batch) error
	await         func(*brokerv1.AwaitDurabilityRequest) error
	readFault     func(n int, req *brokerv1.ReadRequest) error
	reads         []*brokerv1.ReadRequest
	describe      func() error
	// paused brokers take connections and calls and say nothing, until their
	// channel is closed.
	paused map[string]chan struct{}
}

type plog struct {
	batches []record.Batch
	lineage []*logv1.LineageEntry
}

func (l *plog) end() int64 {
	if len(l.batches) == 0 {
		return 0
	}
	return l.batches[len(l.batches)-1].EndOffset()
}

type broker struct {
	brokerv1.UnimplementedLogServiceServer
	c        *cluster
	address  string
	listener *bufconn.Listener
	server   *grpc.Server
	done     chan struct{}
}

func newCluster(t *testing.T, partitions int, addresses ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, brokers: map[string]*broker{}, addresses: addresses, epoch: 1, leader: addresses[0], told: addresses[0], maxBatch: 1 << 20}
	for range partitions {
		c.logs = append(c.logs, &plog{lineage: []*logv1.LineageEntry{{Leadership: c.leadership(), StartOffset: 0}}})
	}
	for _, a := range addresses {
		b := &broker{c: c, address: a, listener: bufconn.Listen(1 << 16), server: grpc.NewServer(), done: make(chan struct{})}
		brokerv1.RegisterLogServiceServer(b.server, b)
		go func() { defer close(b.done); _ = b.server.Serve(b.listener) }()
		c.brokers[a] = b
	}
	return c
}

func (c *cluster) close() {
	for _, b := range c.brokers {
		b.server.Stop()
		<-b.done
	}
}

// kill ends a broker as SIGKILL would.
func (c *cluster) kill(address string) {
	b := c.brokers[address]
	b.server.Stop()
	<-b.done
}

// elect makes a broker the leader, cutting the logs at cut when it is not
// negative.
func (c *cluster) elect(address string, cut int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leader, c.told = address, address
	c.epoch++
	for _, l := range c.logs {
		if cut >= 0 && cut < len(l.batches) {
			l.batches = l.batches[:cut]
		}
		entry := &logv1.LineageEntry{Leadership: c.leadership(), StartOffset: l.end()}
		for len(l.lineage) > 0 && l.lineage[len(l.lineage)-1].GetStartOffset() >= l.end() {
			l.lineage = l.lineage[:len(l.lineage)-1]
		}
		l.lineage = append(l.lineage, entry)
	}
}

func (c *cluster) leadership() *logv1.Leadership {
	return &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: c.epoch}
}

func (c *cluster) client(bootstrap ...string) *client.Client {
	if len(bootstrap) == 0 {
		bootstrap = c.addresses[:1]
	}
	cl, err := client.Dial(client.Options{
		Brokers: bootstrap,
		Dialer: func(ctx context.Context, address string) (net.Conn, error) {
			b, ok := c.brokers[address]
			if !ok {
				return nil, errors.New("no such host")
			}
			return b.listener.DialContext(ctx)
		},
	})
	require.NoError(c.t, err)
	return cl
}

// pause makes a broker silent, as SIGSTOP does, and returns its end.
func (c *cluster) pause(address string) (resume func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := make(chan struct{})
	if c.paused == nil {
		c.paused = map[string]chan struct{}{}
	}
	c.paused[address] = ch
	return sync.OnceFunc(func() { close(ch) })
}

// stand keeps a call or a stream of a paused broker waiting.
func (b *broker) stand(ctx context.Context) {
	b.c.mu.Lock()
	ch := b.c.paused[b.address]
	b.c.mu.Unlock()
	if ch != nil {
		select {
		case <-ch:
		case <-ctx.Done():
		}
	}
}

// values are the values stored in a partition, in order.
func (c *cluster) values(partition int) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, b := range c.logs[partition].batches {
		for r, err := range b.Records() {
			require.NoError(c.t, err)
			out = append(out, string(r.Value))
		}
	}
	return out
}

func (b *broker) DescribeTopic(ctx context.Context, req *brokerv1.DescribeTopicRequest) (*brokerv1.DescribeTopicResponse, error) {
	b.stand(ctx)
	c := b.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.describe != nil {
		if err := c.describe(); err != nil {
			return nil, err
		}
	}
	if req.GetTopic() != topic {
		return nil, rpcerr.UnknownTopicOrPartition(req.GetTopic())
	}
	resp := &brokerv1.DescribeTopicResponse{TopicId: "id", Name: topic, MinAckLevel: logv1.Level_LEVEL_LEADER, MaxBatchBytes: c.maxBatch}
	for i := range c.logs {
		resp.Partitions = append(resp.Partitions, &brokerv1.PartitionLeader{Partition: int32(i), LeaderId: 1, LeaderAddress: c.told, LeaderEpoch: c.epoch, Opened: true})
	}
	return resp, nil
}

func (b *broker) DescribeCluster(ctx context.Context, _ *brokerv1.DescribeClusterRequest) (*brokerv1.DescribeClusterResponse, error) {
	b.stand(ctx)
	resp := &brokerv1.DescribeClusterResponse{ClusterId: "cluster"}
	for i, a := range b.c.addresses {
		resp.Brokers = append(resp.Brokers, &brokerv1.BrokerAddress{BrokerId: int32(i + 1), Address: a, Online: true})
	}
	return resp, nil
}

func (b *broker) InitProducer(context.Context, *brokerv1.InitProducerRequest) (*brokerv1.InitProducerResponse, error) {
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	b.c.nextID++
	return &brokerv1.InitProducerResponse{ProducerId: incarnation<<32 | b.c.nextID}, nil
}

// leads refuses when another broker leads. The caller holds the cluster's mutex.
func (b *broker) leads(ctx context.Context, partition int32) error {
	md, _ := metadata.FromIncomingContext(ctx)
	if got := md.Get("braid-no-forward"); len(got) != 1 || got[0] != "1" {
		return rpcerr.InvalidField("braid-no-forward", "the client must go to the leader itself")
	}
	if b.c.leader != b.address {
		return rpcerr.NotLeader(fmt.Sprintf("%s/%d", topic, partition), rpcerr.Leader{ID: 1, Address: b.c.leader, Epoch: b.c.epoch})
	}
	return nil
}

func (b *broker) Produce(stream brokerv1.LogService_ProduceServer) error {
	for n := int64(1); ; n++ {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		if req.GetRequest() != n || (n == 1) != (req.GetTopic() == topic) {
			return rpcerr.InvalidField("request", fmt.Sprintf("is %d, not %d", req.GetRequest(), n))
		}
		result, err := b.append(stream.Context(), req)
		if err != nil {
			return err
		}
		if err := stream.Send(&brokerv1.ProduceResponse{Request: n, Result: result}); err != nil {
			return err
		}
	}
}

func (b *broker) append(ctx context.Context, req *brokerv1.ProduceRequest) (*brokerv1.AppendResponse, error) {
	c := b.c
	b.stand(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := b.leads(ctx, req.GetPartition()); err != nil {
		return nil, err
	}
	batch := record.Batch(append([]byte(nil), req.GetBatches()...))
	if err := batch.Validate(); err != nil {
		return nil, rpcerr.CorruptBatch("batches", err.Error())
	}
	c.produced++
	if c.before != nil {
		if err := c.before(c.produced, batch); err != nil {
			return nil, err
		}
	}
	l := c.logs[req.GetPartition()]
	duplicate := false
	last := int32(-1)
	for _, old := range l.batches {
		if old.ProducerID() != batch.ProducerID() {
			continue
		}
		last = old.LastSequence()
		if old.BaseSequence() == batch.BaseSequence() {
			batch, duplicate = old, true
		}
	}
	if !duplicate {
		if batch.BaseSequence() != last+1 {
			return nil, rpcerr.SequenceGap(topic, last, l.end()-1, l.end())
		}
		batch.SetBaseOffset(l.end())
		batch.SetLeaderEpoch(c.epoch)
		l.batches = append(l.batches, batch)
	}
	if c.after != nil {
		if err := c.after(c.produced, batch); err != nil {
			return nil, err
		}
	}
	return &brokerv1.AppendResponse{
		BaseOffset: batch.BaseOffset(), EndOffset: batch.EndOffset(), Duplicate: duplicate,
		Leadership: &logv1.Leadership{Incarnation: incarnation, LeaderEpoch: batch.LeaderEpoch()},
		Levels:     []logv1.Level{logv1.Level_LEVEL_LEADER, logv1.Level_LEVEL_OBJECT},
	}, nil
}

func (b *broker) AwaitDurability(ctx context.Context, req *brokerv1.AwaitDurabilityRequest) (*brokerv1.AwaitDurabilityResponse, error) {
	c := b.c
	b.stand(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := b.leads(ctx, req.GetPartition()); err != nil {
		return nil, err
	}
	if c.await != nil {
		if err := c.await(req); err != nil {
			return nil, err
		}
	}
	return &brokerv1.AwaitDurabilityResponse{Levels: []logv1.Level{logv1.Level_LEVEL_OBJECT}}, nil
}

func (b *broker) ListOffsets(ctx context.Context, req *brokerv1.ListOffsetsRequest) (*brokerv1.ListOffsetsResponse, error) {
	c := b.c
	b.stand(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := b.leads(ctx, req.GetPartition()); err != nil {
		return nil, err
	}
	end := c.logs[req.GetPartition()].end()
	return &brokerv1.ListOffsetsResponse{Offset: end, HighWatermark: end, LogEndOffset: end, Leadership: c.leadership()}, nil
}

// Read sends one batch per message, and asks readFault before each of them.
func (b *broker) Read(req *brokerv1.ReadRequest, stream brokerv1.LogService_ReadServer) error {
	c := b.c
	next := req.GetOffset()
	for first := true; ; first = false {
		b.stand(stream.Context())
		c.mu.Lock()
		if first {
			c.reads = append(c.reads, req)
		}
		err := b.leads(stream.Context(), req.GetPartition())
		if err == nil && c.readFault != nil {
			err = c.readFault(len(c.reads), req)
		}
		l := c.logs[req.GetPartition()]
		var batch record.Batch
		for _, old := range l.batches {
			if old.EndOffset() > next {
				batch = old
				break
			}
		}
		lineage, end := l.lineage, l.end()
		c.mu.Unlock()
		if err != nil {
			return err
		}
		if first {
			start := &brokerv1.ReadStart{TopicId: "id", Offset: next, HighWatermark: end}
			if err := stream.Send(&brokerv1.ReadResponse{Kind: &brokerv1.ReadResponse_Start{Start: start}}); err != nil {
				return err
			}
		}
		if batch != nil {
			next = batch.EndOffset()
			answer := &brokerv1.ReadBatches{Batches: batch, NextOffset: next, HighWatermark: end, Lineage: lineage}
			if err := stream.Send(&brokerv1.ReadResponse{Kind: &brokerv1.ReadResponse_Batches{Batches: answer}}); err != nil {
				return err
			}
			continue
		}
		if !req.GetFollow() {
			return nil
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-time.After(time.Second): // of the bubble
			if err := stream.Send(&brokerv1.ReadResponse{Kind: &brokerv1.ReadResponse_Progress{Progress: &brokerv1.ReadProgress{NextOffset: next, HighWatermark: end}}}); err != nil {
				return err
			}
		}
	}
}

func unavailable(reason errorsv1.ErrorReason) error {
	return rpcerr.Unavailable(reason, 10*time.Millisecond, "a fault of the test")
}
