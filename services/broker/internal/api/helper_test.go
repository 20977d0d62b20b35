package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"

	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/telemetry"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

const (
	incarnation = 0x1f3a9c02
	topicID     = "6f1c0f3e-5a47-4f5e-9d43-1f6d9f4c2a10"
	maxBatch    = 64 << 10 // max.batch.bytes of the topic "orders"
)

var leads = lineage.Leadership{Incarnation: incarnation, LeaderEpoch: 4}

// fakePartition is a partition in memory. The fields above mu are set by tests
// before it is used.
type fakePartition struct {
	mu        sync.Mutex
	batches   []record.Batch
	start     int64
	end, hw   int64
	objects   bool // appends reach OBJECT at once
	lineage   lineage.Lineage
	leader    int32
	self      int32
	refuse    func(replica.AppendInput) error // before the append
	readErr   error
	awaitErr  error
	confirm   error
	changed   chan struct{}
	broken    map[*replica.Pipeline]error
	attempted int
	fetched   *atomic.Int64 // bytes read, when set
	explain   replica.Explanation
	near      Source // what its replica here serves; nil for nothing
}

func newFakePartition(self, leader int32) *fakePartition {
	return &fakePartition{
		self: self, leader: leader, objects: true, changed: make(chan struct{}), broken: map[*replica.Pipeline]error{},
		lineage: lineage.Lineage{{Leadership: leads}},
		explain: replica.Explanation{TopicID: topicID, BrokerID: self, State: partition.Active, Findings: []replica.Finding{{Code: "HEALTHY", Summary: "All is well."}}},
	}
}

func (p *fakePartition) set(fn func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fn()
	p.tell()
}

// tell says that something changed; mu is held.
func (p *fakePartition) tell() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *fakePartition) commit(hw int64) { p.set(func() { p.hw = hw }) }

// until waits for a condition on the partition.
func (p *fakePartition) until(ctx context.Context, cond func() bool) error {
	for {
		p.mu.Lock()
		ok, ch := cond(), p.changed
		p.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

type fakeTicket struct {
	p     *fakePartition
	in    replica.AppendInput
	base  int64
	end   int64
	err   error
	level partition.Level
}

func (p *fakePartition) TopicID() string { return topicID }

func (p *fakePartition) Enqueue(_ context.Context, in replica.AppendInput) Ticket {
	t := &fakeTicket{p: p, in: in, level: cmp.Or(in.Level, partition.Leader)}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.attempted++
	if in.Pipeline != nil && p.broken[in.Pipeline] != nil {
		t.err = &replica.PipelineBrokenError{Err: p.broken[in.Pipeline]}
		return t
	}
	if p.leader != p.self {
		t.err = p.notLeader()
	} else if p.refuse != nil {
		t.err = p.refuse(in)
	}
	if t.err != nil {
		p.broken[in.Pipeline] = t.err
		return t // and nothing has changed
	}
	t.base = p.end
	for b, err := range record.Batches(in.Batches) {
		if err != nil {
			panic(err)
		}
		b.SetBaseOffset(p.end)
		b.SetLeaderEpoch(leads.LeaderEpoch)
		p.batches = append(p.batches, b)
		p.end = b.EndOffset()
	}
	t.end = p.end
	if p.objects {
		p.hw = p.end
	}
	p.tell()
	return t
}

func (p *fakePartition) Submit(ctx context.Context, in replica.AppendInput) (Ticket, error) {
	t := p.Enqueue(ctx, in)
	if err := t.Admitted(ctx); err != nil {
		return nil, err
	}
	return t, nil
}

// Nearest is the partition itself, served whoever leads, when nearest is set.
func (p *fakePartition) Nearest() (Source, bool) {
	if p.near == nil {
		return nil, false
	}
	return p.near, true
}

func (p *fakePartition) notLeader() error {
	return &replica.NotLeaderError{LeaderID: p.leader, Address: brokerAddress(p.leader), Epoch: 5}
}

func (t *fakeTicket) Admitted(context.Context) error { return t.err }

func (t *fakeTicket) Wait(ctx context.Context) (replica.AppendResult, error) {
	levels := []partition.Level{partition.Leader}
	if t.level == partition.Object {
		if err := t.p.until(ctx, func() bool { return t.p.hw >= t.end }); err != nil {
			return replica.AppendResult{}, &replica.OutcomeUnknownError{Base: t.base, End: t.end, Leadership: leads, Levels: levels, Err: err}
		}
		levels = append(levels, partition.Object)
	}
	return replica.AppendResult{Base: t.base, End: t.end, Leadership: leads, Levels: levels, AppendTime: time.Now()}, nil
}

func (p *fakePartition) Read(_ context.Context, from int64, maxBytes int, dst []byte) (replica.Fetched, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.readErr != nil {
		return replica.Fetched{}, p.readErr
	}
	if p.leader != p.self {
		return replica.Fetched{}, p.notLeader()
	}
	f := replica.Fetched{Batches: dst[:0], Base: from, Next: from, HighWatermark: p.hw, LogStart: p.start, Lineage: p.lineage}
	for _, b := range p.batches {
		if b.EndOffset() <= from || b.EndOffset() > p.hw {
			continue
		}
		if len(f.Batches) > 0 && len(f.Batches)+len(b) > maxBytes {
			break
		}
		if len(f.Batches) == 0 {
			f.Base = b.BaseOffset()
		}
		f.Batches, f.Next = append(f.Batches, b...), b.EndOffset()
	}
	if p.fetched != nil {
		p.fetched.Add(int64(len(f.Batches)))
	}
	return f, nil
}

func (p *fakePartition) WaitVisible(ctx context.Context, offset int64) error {
	return p.until(ctx, func() bool { return p.hw > offset })
}

func (p *fakePartition) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

func (p *fakePartition) CheckPosition(offset int64, last lineage.Leadership) error {
	if point, cut := p.lineage.ForkPoint(last, offset); cut {
		return &replica.TruncatedError{ForkPoint: point}
	}
	return nil
}

func (p *fakePartition) Offsets() replica.Offsets {
	p.mu.Lock()
	defer p.mu.Unlock()
	return replica.Offsets{
		LogStart: p.start, ObjectEnd: p.hw, HighWatermark: p.hw, LogEnd: p.end, Lineage: p.lineage, LeaderID: p.leader,
		Fence: partition.Fence{Incarnation: incarnation, LeaderEpoch: leads.LeaderEpoch, BrokerEpoch: 7}, Leading: p.leader == p.self,
	}
}

func (p *fakePartition) OffsetForTime(_ context.Context, ms int64) (int64, int64, bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.batches {
		for r, err := range b.Records() {
			if err == nil && r.Timestamp >= ms && b.EndOffset() <= p.hw {
				return b.BaseOffset() + int64(r.OffsetDelta), r.Timestamp, true, nil
			}
		}
	}
	return 0, 0, false, nil
}

func (p *fakePartition) MaxTimestamp(context.Context) (offset, ms int64, found bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.batches {
		if b.MaxTimestamp() > ms {
			offset, ms, found = b.LastOffset(), b.MaxTimestamp(), true
		}
	}
	return offset, ms, found, nil
}

func (p *fakePartition) Await(ctx context.Context, end int64, _ lineage.Leadership, level partition.Level) ([]partition.Level, error) {
	if p.awaitErr != nil {
		return nil, p.awaitErr
	}
	if err := p.until(ctx, func() bool { return level == partition.Leader || p.hw >= end }); err != nil {
		return nil, &replica.UnavailableError{Reason: replica.NotReady, Message: "still waiting", Err: err}
	}
	return []partition.Level{partition.Leader, partition.Object}, nil
}

func (p *fakePartition) ConfirmLeadership(context.Context) error { return p.confirm }

func (p *fakePartition) Explain() replica.Explanation {
	x := p.explain
	x.Offsets = p.Offsets()
	return x
}

// fakeReplicas is one broker's view of a cluster of three.
type fakeReplicas struct {
	mu         sync.Mutex
	view       *cluster.View
	partitions map[target]Partition
	lookup     error
	unknown    bool // not registered
	changed    chan struct{}
}

// set changes what Lookup answers.
func (r *fakeReplicas) set(fn func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fn()
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *fakeReplicas) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

func (r *fakeReplicas) Lookup(topic string, index int32) (Partition, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lookup != nil {
		return nil, r.lookup
	}
	if p := r.partitions[target{topic, index}]; p != nil {
		return p, nil
	}
	if t, ok := r.view.Topic(topic); !ok {
		return nil, &replica.UnknownPartitionError{Topic: topic, Partition: -1}
	} else if int(index) >= len(t.Partitions) {
		return nil, &replica.UnknownPartitionError{Topic: topic, Partition: index}
	}
	return nil, errors.New("the test holds no such partition")
}

func (r *fakeReplicas) Cluster() *cluster.View { return r.view }

func (r *fakeReplicas) Registration() (int64, uint32, bool) { return 7, incarnation, !r.unknown }

// fakeIDs hands out blocks of producer ids.
type fakeIDs struct {
	mu    sync.Mutex
	given int64
	calls int
	err   error
}

//nolint:revive // the generated interface's name
func (f *fakeIDs) AllocateProducerIds(_ context.Context, in *metadatav1.AllocateProducerIdsRequest, _ ...grpc.CallOption) (*metadatav1.AllocateProducerIdsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	if f.err != nil {
		return nil, f.err
	}
	first := int64(incarnation)<<32 + 1 + f.given
	f.given += int64(in.GetCount())
	return &metadatav1.AllocateProducerIdsResponse{FirstProducerId: first, Count: in.GetCount()}, nil
}

func brokerAddress(id int32) string {
	if id == 0 {
		return ""
	}
	return fmt.Sprintf("broker-%d:9090", id)
}

// broker is one service behind a real gRPC server in memory.
type broker struct {
	service  *Service
	server   *grpcserver.Server
	listener *bufconn.Listener
	replicas *fakeReplicas
	ids      *fakeIDs
	orders   *fakePartition // partition orders/0 as this broker has it
	served   chan struct{}
}

// world is a cluster of brokers whose only topic is "orders" with two partitions.
type world struct {
	t       *testing.T
	tel     *telemetry.Telemetry
	brokers map[int32]*broker
	conns   []*grpc.ClientConn
}

// run gives a test a cluster in a bubble of its own: time is virtual. leader of
// orders/0 is the broker with that id, as every broker believes.
func run(t *testing.T, brokers, leader int32, change func(*Config), test func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, brokers, leader, change)
		defer w.close()
		test(t, w)
	})
}

// runPlain is run in real time, without a bubble: the pooled zstd codecs hold
// channels, and a channel of one bubble can't be used in another.
func runPlain(t *testing.T, brokers, leader int32, test func(t *testing.T, w *world)) {
	t.Helper()
	w := newWorld(t, brokers, leader, nil)
	defer w.close()
	test(t, w)
}

func newWorld(t testing.TB, brokers, leader int32, change func(*Config)) *world {
	w := &world{brokers: map[int32]*broker{}}
	w.t, _ = t.(*testing.T)
	var err error
	w.tel, err = telemetry.New(context.Background(), telemetry.DefaultConfig(), telemetry.Identity{Service: "broker", Instance: t.Name()}, telemetry.Options{LogOutput: t.Output()}) //nolint:usetesting // shared with benchmarks
	require.NoError(t, err)
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	for id := int32(1); id <= brokers; id++ {
		w.brokers[id] = w.newBroker(t, id, leader, cfg, brokers)
	}
	return w
}

func newView(t testing.TB, brokers, leader int32) *cluster.View {
	img := &metadatav1.MetadataImage{
		Position: &metadatav1.MetadataPosition{Incarnation: incarnation, Offset: 9},
		Cluster:  &metadatav1.GetClusterResponse{ClusterId: "c1", Incarnation: incarnation},
		Topics: []*metadatav1.Topic{{TopicId: topicID, Name: "orders", CreationOffset: 5, Configs: map[string]string{"max.batch.bytes": fmt.Sprint(maxBatch)},
			Partitions: []*metadatav1.Partition{
				{Partition: 0, ReplicaIds: []int32{1, 2, 3}, LeaderId: leader, Fence: &logv1.Fence{Incarnation: incarnation, LeaderEpoch: 4}},
				{Partition: 1, ReplicaIds: []int32{3}},
			}}},
	}
	for id := int32(1); id <= brokers; id++ {
		img.Cluster.Brokers = append(img.Cluster.Brokers, &metadatav1.Broker{BrokerId: id, Address: brokerAddress(id), Online: true})
	}
	if leader > brokers { // registered, but nobody answers there
		img.Cluster.Brokers = append(img.Cluster.Brokers, &metadatav1.Broker{BrokerId: leader, Address: brokerAddress(leader), Online: true})
	}
	tracker := cluster.NewTracker()
	ready, err := tracker.Reset(img)
	require.NoError(t, err)
	require.True(t, ready)
	return tracker.View()
}

func (w *world) newBroker(t testing.TB, id, leader int32, cfg Config, brokers int32) *broker {
	b := &broker{listener: bufconn.Listen(1 << 20), ids: new(fakeIDs), orders: newFakePartition(id, leader), served: make(chan struct{})}
	b.replicas = &fakeReplicas{view: newView(t, brokers, leader), partitions: map[target]Partition{{"orders", 0}: b.orders}, changed: make(chan struct{})}
	serverCfg := grpcserver.DefaultConfig()
	var err error
	b.server, err = grpcserver.New(serverCfg, grpcserver.Deps{Logger: w.tel.Logger, TracerProvider: w.tel.TracerProvider, MeterProvider: w.tel.MeterProvider})
	require.NoError(t, err)
	b.service, err = New(cfg, Deps{
		BrokerID: id, Replicas: b.replicas, IDs: b.ids, Draining: b.server.Draining(), Logger: w.tel.Logger,
		Meter: w.tel.MeterProvider.Meter("test"), Now: time.Now, Dial: w.dial,
	})
	require.NoError(t, err)
	brokerv1.RegisterLogServiceServer(b.server, b.service)
	go func() { defer close(b.served); _ = b.server.Serve(b.listener) }()
	return b
}

func (w *world) dial(address string) (*grpc.ClientConn, error) {
	cfg := grpcclient.DefaultConfig()
	return grpcclient.Dial(address, cfg, grpcclient.Deps{
		Logger: w.tel.Logger, TracerProvider: w.tel.TracerProvider, MeterProvider: w.tel.MeterProvider,
		Dialer: func(ctx context.Context, address string) (net.Conn, error) {
			for id, b := range w.brokers {
				if brokerAddress(id) == address {
					return b.listener.DialContext(ctx)
				}
			}
			return nil, errors.New("no such host")
		},
	})
}

// client calls one broker.
func (w *world) client(id int32) brokerv1.LogServiceClient {
	conn, err := w.dial(brokerAddress(id))
	if err != nil {
		panic(err)
	}
	w.conns = append(w.conns, conn)
	return brokerv1.NewLogServiceClient(conn)
}

func (w *world) close() {
	for _, c := range w.conns {
		_ = c.Close()
	}
	for _, b := range w.brokers {
		_ = b.server.Stop(context.Background())
		<-b.served
		_ = b.service.Close()
	}
	_ = w.tel.Shutdown(context.Background())
}

// refused checks an error's reason.
func refused(t *testing.T, err error, reason string) {
	t.Helper()
	_ = refusal(t, err, reason)
}

// refusal checks an error's reason and gives it back.
func refusal(t *testing.T, err error, reason string) *rpcerr.Error {
	t.Helper()
	require.Error(t, err)
	e, ok := rpcerr.From(err)
	require.True(t, ok, "%v", err)
	require.Equal(t, reason, rpcerr.ReasonName(e.Reason), "%v", err)
	return e
}

// violated is the first field that an error names.
func violated(t *testing.T, err error) rpcerr.FieldViolation {
	t.Helper()
	e, ok := rpcerr.From(err)
	require.True(t, ok, "%v", err)
	require.NotEmpty(t, e.Violations, "%v", err)
	return e.Violations[0]
}

func noForward(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, NoForwardHeader, "1")
}

// batch makes a batch of n records with values of size bytes.
func batch(t testing.TB, codec record.Codec, n, size int, change ...func(*record.Builder)) []byte {
	b := record.NewBuilder(codec)
	for _, fn := range change {
		fn(b)
	}
	value := make([]byte, size)
	for i := range value {
		value[i] = byte(i * 7)
	}
	for i := range n {
		require.NoError(t, b.Append(record.Record{Timestamp: 1000 + int64(i), Key: []byte(fmt.Sprintf("key-%d", i)), Value: value}))
	}
	out, _, err := b.Build(nil)
	require.NoError(t, err)
	return out
}

func values(n int) []*brokerv1.Record {
	var out []*brokerv1.Record
	for i := range n {
		out = append(out, &brokerv1.Record{Key: []byte("k"), Value: fmt.Appendf(nil, "value-%d", i), TimestampMs: int64(1000 + i)})
	}
	return out
}

// seed appends n records at the leader, one batch each.
func (b *broker) seed(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		_, err := b.orders.Submit(t.Context(), replica.AppendInput{Batches: batch(t, record.CodecNone, 1, 10+i)})
		require.NoError(t, err)
	}
}

// drain reads a stream to its end.
func drain(stream grpc.ServerStreamingClient[brokerv1.ReadResponse]) (all []*brokerv1.ReadResponse, err error) {
	for {
		m, err := stream.Recv()
		if err != nil {
			return all, err
		}
		all = append(all, m)
	}
}

func offsets(all []*brokerv1.ReadResponse) (out []int64) {
	for _, m := range all {
		for _, r := range m.GetRecords().GetRecords() {
			out = append(out, r.GetOffset())
		}
	}
	return out
}
