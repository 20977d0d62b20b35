package metadata_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/embetcd"
	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/metadata/metadatatest"
	"github.com/braidlog/braid/services/metadata/state"
)

// following is a client that finds the controller and repeats what may be
// repeated.
func following(t *testing.T, cluster *metadatatest.Cluster) clients {
	t.Helper()
	m, err := metaclient.New(metaclient.Options{
		Addresses: cluster.Addresses(),
		Dial: func(address string) (*grpc.ClientConn, error) {
			return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		},
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Close() })
	c := m.Controller()
	return clients{
		metadatav1.NewTopicServiceClient(c), metadatav1.NewClusterServiceClient(c),
		metadatav1.NewSegmentServiceClient(c), metadatav1.NewSnapshotServiceClient(c),
	}
}

// replay reads the whole log from a replica and applies it: a gap, a double
// entry or a range that does not follow would be an error of the state.
func replay(t *testing.T, ctx context.Context, r *metadatatest.Replica, end int64) *state.State { //nolint:revive // t first in tests
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := of(r).WatchMetadata(ctx, &metadatav1.WatchMetadataRequest{
		From: &metadatav1.MetadataPosition{}, Filter: metadatav1.MetadataFilter_METADATA_FILTER_ALL,
	})
	require.NoError(t, err)
	st := state.New()
	for st.EndOffset() < end {
		m, err := stream.Recv()
		require.NoError(t, err)
		if e := m.GetEntry(); e != nil {
			require.NoError(t, st.Apply(e))
		}
	}
	return st
}

// writers commit ranges, each to a topic and under a remote-log manager of its
// own, and require that each is accepted exactly once.
func writers(t *testing.T, ctx context.Context, c clients, n, ranges int, committed *atomic.Int64) { //nolint:revive // t first in tests
	t.Helper()
	registerBroker(t, ctx, c, 1)
	var wg sync.WaitGroup
	for i := range n {
		rlm := registerRLM(t, ctx, c, int32(i+1))
		l := open(t, ctx, c, createTopic(t, ctx, c, fmt.Sprintf("t%d", i), 1), 0)
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range ranges {
				resp, err := c.CommitCombinedSegment(ctx, l.request(rlm, int32(i+1), 0))
				if !assert.NoError(t, err) {
					return
				}
				if !assert.Equal(t, metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED, resp.GetVerdicts()[0].GetOutcome()) {
					return
				}
				committed.Add(1)
			}
		}()
	}
	wg.Wait()
}

func longSessions(c *metadata.Config) { c.SessionTimeout = config.Duration(time.Minute) }

// Controllers are deposed in the middle of commits, in every way there is; every
// command has one entry and one verdict.
func TestControllersChangeInTheMiddleOfCommits(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Replicas: 2, Change: longSessions})
	const topics, ranges = 4, 60
	var committed atomic.Int64
	stop := make(chan struct{})
	var deposed int
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		etcd := cluster.Replicas()[0].Etcd
		for step := int64(1); ; step++ {
			for committed.Load() < step*topics*ranges/8 {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
			}
			keys, err := etcd.Get(ctx, "/braid/leader/", clientv3.WithFirstCreate()...)
			if err != nil || len(keys.Kvs) == 0 {
				continue
			}
			leader := keys.Kvs[0]
			if step%2 == 0 {
				_, err = etcd.Delete(ctx, string(leader.Key))
			} else {
				_, err = etcd.Revoke(ctx, clientv3.LeaseID(leader.Lease))
			}
			if err == nil {
				deposed++
			}
		}
	}()
	writers(t, ctx, following(t, cluster), topics, ranges, &committed)
	close(stop)
	wg.Wait()
	require.EqualValues(t, topics*ranges, committed.Load())
	assert.GreaterOrEqual(t, deposed, 4)

	end := cluster.Controller()
	info, err := of(end).GetCluster(ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	var digests [][32]byte
	for _, r := range cluster.Replicas() {
		require.NoError(t, of(r).waitFor(ctx, of(end)))
		st := replay(t, ctx, r, info.GetMetadataOffset())
		assert.EqualValues(t, topics*ranges, st.RangeCount())
		digests = append(digests, st.Digest())
	}
	assert.Equal(t, digests[0], digests[1])
}

func TestAStoppedControllerHandsOverAtOnce(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Replicas: 2, Change: func(c *metadata.Config) {
		longSessions(c)
		c.LeaseTTL = config.Duration(30 * time.Second) // waiting for it would end the test
	}})
	first := cluster.Controller()
	c := of(first)
	registerBroker(t, ctx, c, 1)
	began := time.Now()
	require.NoError(t, first.Stop())
	second := cluster.Controller()
	require.NotSame(t, first, second)
	assert.Less(t, time.Since(began), 15*time.Second)
	createTopic(t, ctx, of(second), "t", 1)
}

// The log's answers get lost, at random: nobody notices.
func TestLostAnswersOfEtcd(t *testing.T) {
	ctx := bounded(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var lost atomic.Int64
	cluster := metadatatest.Start(t, metadatatest.Options{Change: longSessions, WrapKV: func(kv clientv3.KV) clientv3.KV {
		return &lossy{KV: kv, rand: rand.New(rand.NewPCG(seed, 1)), lost: &lost}
	}})
	var committed atomic.Int64
	writers(t, ctx, following(t, cluster), 3, 40, &committed)
	require.EqualValues(t, 120, committed.Load())
	assert.Positive(t, lost.Load())
	info, err := of(cluster.Controller()).GetCluster(ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	st := replay(t, ctx, cluster.Controller(), info.GetMetadataOffset())
	assert.EqualValues(t, 120, st.RangeCount())
}

// lossy loses a quarter of the answers to transactions with conditions, after or
// instead of their execution.
type lossy struct {
	clientv3.KV
	mu   sync.Mutex // guards rand
	rand *rand.Rand
	lost *atomic.Int64
}

func (l *lossy) Txn(ctx context.Context) clientv3.Txn { return &lossyTxn{Txn: l.KV.Txn(ctx), l: l} }

type lossyTxn struct {
	clientv3.Txn
	l           *lossy
	conditional bool
}

func (t *lossyTxn) If(cs ...clientv3.Cmp) clientv3.Txn {
	t.Txn, t.conditional = t.Txn.If(cs...), true
	return t
}
func (t *lossyTxn) Then(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Then(ops...); return t }
func (t *lossyTxn) Else(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(ops...); return t }
func (t *lossyTxn) Commit() (*clientv3.TxnResponse, error) {
	if !t.conditional {
		return t.Txn.Commit()
	}
	t.l.mu.Lock()
	dice := t.l.rand.IntN(8)
	t.l.mu.Unlock()
	switch dice {
	case 0: // the request is lost
	case 1: // the answer is lost
		if resp, err := t.Txn.Commit(); err != nil {
			return resp, err
		}
	default:
		return t.Txn.Commit()
	}
	t.l.lost.Add(1)
	return nil, status.Error(codes.Unavailable, "connection lost")
}

func TestOnlyTheControllerWrites(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Replicas: 2, Change: longSessions})
	controller := cluster.Controller()
	for _, r := range cluster.Replicas() {
		if r == controller {
			continue
		}
		c := of(r)
		require.NoError(t, c.waitFor(ctx, of(controller)))
		_, err := c.RegisterBroker(ctx, &metadatav1.RegisterBrokerRequest{BrokerId: 1, Address: "h:1", DirectoryId: directory(1)})
		got := refusal(t, err, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER)
		assert.Equal(t, controller.Addr(), got.Metadata["controller_address"])
		stream, err := c.BrokerSession(ctx)
		require.NoError(t, err)
		require.NoError(t, stream.Send(&metadatav1.BrokerSessionRequest{BrokerId: 1, BrokerEpoch: 1, Heartbeat: 1}))
		_, err = stream.Recv()
		requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER)
	}
}

// A controller that etcd does not answer any more confirms no heartbeat beyond a
// third of its lease, gives no verdict, and is replaced; nobody's session ends
// by that.
func TestAControllerCutOffFromEtcd(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Replicas: 2, Change: func(c *metadata.Config) {
		c.LeaseTTL = config.Duration(3 * time.Second)
		c.SessionTimeout = config.Duration(4 * time.Second)
	}})
	old := cluster.Controller()
	c := of(old)
	broker := registerBroker(t, ctx, c, 1)
	stream, err := c.BrokerSession(ctx)
	require.NoError(t, err)
	beat := func(n int64) error {
		if err := stream.Send(&metadatav1.BrokerSessionRequest{BrokerId: 1, BrokerEpoch: broker.GetBrokerEpoch(), Heartbeat: n}); err != nil {
			return err
		}
		_, err := stream.Recv()
		return err
	}
	require.NoError(t, beat(1))
	require.NoError(t, old.Etcd.Close())
	cut := time.Now()
	last := cut
	var refusal error
	for n := int64(2); refusal == nil; n++ {
		sent := time.Now()
		if refusal = beat(n); refusal == nil {
			last = sent
		}
	}
	reason := rpcerr.Reason(refusal)
	assert.Contains(t, []errorsv1.ErrorReason{
		errorsv1.ErrorReason_ERROR_REASON_NOT_READY, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER,
	}, reason, "%v", refusal)
	assert.Less(t, last.Sub(cut), 2*time.Second, "a third of the lease, and some slack")
	_, err = c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "t", PartitionCount: 1})
	require.Error(t, err)

	var second clients
	for _, r := range cluster.Replicas() {
		if r != old {
			second = of(r)
			require.Eventually(t, func() bool { _, ok := r.Leading(); return ok }, 30*time.Second, 5*time.Millisecond)
		}
	}
	// The broker goes on under the new controller, with the epoch that it has.
	stream, err = second.BrokerSession(ctx)
	require.NoError(t, err)
	require.NoError(t, beat(1))
	info, err := second.GetCluster(ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	assert.True(t, info.GetBrokers()[0].GetOnline())
	assert.Equal(t, broker.GetBrokerEpoch(), info.GetBrokers()[0].GetBrokerEpoch())
}

func TestAClusterRestarts(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Change: longSessions})
	c := of(cluster.Controller())
	registerBroker(t, ctx, c, 1)
	topic := createTopic(t, ctx, c, "t", 1)
	id := cluster.Controller().ClusterID()
	require.NoError(t, cluster.Replicas()[0].Stop())
	again := cluster.Add()
	require.Same(t, again, cluster.Controller())
	assert.Equal(t, id, again.ClusterID())
	got, err := of(again).GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_TopicId{TopicId: topic.GetTopicId()}})
	require.NoError(t, err)
	assert.Equal(t, topic.GetCreationOffset(), got.GetTopic().GetCreationOffset())
}

// Another cluster's etcd on the same bucket prefix: refused, and nothing written.
func TestASecondClusterOnTheSameBucketPrefixIsRefused(t *testing.T) {
	ctx := bounded(t)
	store := memstore.New(memstore.Options{})
	first := metadatatest.Start(t, metadatatest.Options{Store: store})
	// Even while the first has nothing but its marker there.
	early := metadatatest.Start(t, metadatatest.Options{})
	other := early.Config(9)
	other.Etcd.Prefix = "/other/"
	early.Store = store
	_, err := early.Build(ctx, other, nil)
	require.ErrorContains(t, err, "claimed by cluster "+first.Controller().ClusterID())
	_, err = store.Create(ctx, first.Controller().ClusterID()+"/wal/object", objstore.NewParts([]byte("x")))
	require.NoError(t, err)
	second := metadatatest.Start(t, metadatatest.Options{})
	foreign := second.Config(9)
	foreign.Etcd.Prefix = "/other/"
	second.Store = store
	_, err = second.Build(ctx, foreign, nil)
	require.ErrorContains(t, err, "bucket prefix is not this cluster's")
	require.ErrorContains(t, err, first.Controller().ClusterID())
	// A log that has begun, with a bucket that is another's or empty.
	begun := second.Config(9)
	_, err = second.Build(ctx, begun, nil)
	require.ErrorContains(t, err, "bucket prefix is not this cluster's")
	second.Store = memstore.New(memstore.Options{})
	_, err = second.Build(ctx, begun, nil)
	require.ErrorContains(t, err, "no marker")
	n, _ := store.Len()
	assert.Equal(t, 2, n)
}

func TestStartSaysWhatIsMissing(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{})
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nobody := "http://" + l.Addr().String()
	require.NoError(t, l.Close())

	cfg := cluster.Config(9)
	cfg.Etcd.Endpoints = config.Strings{nobody}
	cfg.Etcd.StartTimeout = config.Duration(300 * time.Millisecond)
	began := time.Now()
	_, err = cluster.Build(ctx, cfg, nil)
	require.ErrorContains(t, err, nobody)
	require.ErrorContains(t, err, "etcd unreachable")
	assert.Less(t, time.Since(began), 10*time.Second)

	cfg = cluster.Config(9)
	cluster.Store = nil
	_, err = cluster.Build(ctx, cfg, nil)
	require.ErrorContains(t, err, "store.bucket is empty")
	cfg.Store.Bucket, cfg.Store.Endpoint = "b", nobody
	cfg.Store.StartTimeout = config.Duration(300 * time.Millisecond)
	cfg.Etcd.Prefix = "/fresh/" // a cluster that has begun goes on without its bucket
	_, err = cluster.Build(ctx, cfg, nil)
	require.ErrorContains(t, err, nobody)
	require.ErrorIs(t, err, metadata.ErrStoreUnreachable)

	cfg = cluster.Config(0)
	cfg.LeaseTTL = config.Duration(1500 * time.Millisecond)
	_, err = cluster.Build(ctx, cfg, nil)
	require.ErrorContains(t, err, "id")
	require.ErrorContains(t, err, "controller.lease-ttl")
}

// When etcd's space is used up the cause is told, nothing is half done, and reads
// go on.
func TestEtcdOutOfSpace(t *testing.T) {
	ctx := bounded(t)
	etcd, err := embetcd.Start(ctx, embetcd.Options{Dir: t.TempDir(), Fast: true, NoSync: true, QuotaBytes: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(etcd.Close)
	cluster := metadatatest.Start(t, metadatatest.Options{Etcd: etcd, Change: func(c *metadata.Config) {
		longSessions(c)
		c.Etcd.Quota.DataPercent, c.Etcd.Quota.TopicPercent, c.Etcd.Quota.VitalPercent = 100, 100, 100 // it is etcd's refusal that counts here
	}})
	r := cluster.Controller()
	c := of(r)
	registerBroker(t, ctx, c, 1)
	created := 0
	for err == nil {
		if _, err = c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: fmt.Sprintf("t%d", created), PartitionCount: 1000}); err == nil {
			created++
		}
	}
	got := refusal(t, err, errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE)
	assert.Contains(t, got.Error(), "etcd refuses to write")
	require.Eventually(t, func() bool {
		_, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: "more", PartitionCount: 1})
		if err == nil {
			created++ // a small one may still fit
		}
		got, _ := rpcerr.From(err)
		return got != nil && strings.Contains(got.Metadata["trouble"], "space exceeded")
	}, 20*time.Second, 10*time.Millisecond)
	list, err := c.ListTopics(ctx, &metadatav1.ListTopicsRequest{PageSize: 1000})
	require.NoError(t, err)
	assert.NotEmpty(t, list.GetTopics())
	info, err := c.GetCluster(ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	assert.EqualValues(t, created, info.GetTopicCount())
}

// A bootstrap may be cut short between any two of its effects: the next one takes
// it up under the same identity.
func TestABootstrapThatWasCutShort(t *testing.T) {
	ctx := bounded(t)
	store := &failingOnce{Store: memstore.New(memstore.Options{})}
	cluster := metadatatest.Start(t, metadatatest.Options{Store: store})
	id := cluster.Controller().ClusterID()
	assert.NotEmpty(t, id)
	assert.Equal(t, int64(2), store.creates.Load(), "the first attempt left the claim in etcd only")

	// The marker is there, the log is not.
	etcd := cluster.Replicas()[0].Etcd
	require.NoError(t, cluster.Replicas()[0].Stop())
	for _, key := range []string{"/braid/log/", "/braid/end"} {
		_, err := etcd.Delete(ctx, key, clientv3.WithPrefix())
		require.NoError(t, err)
	}
	again := cluster.Add()
	require.Same(t, again, cluster.Controller())
	assert.Equal(t, id, again.ClusterID())
}

// failingOnce fails the first create without an effect.
type failingOnce struct {
	*memstore.Store
	creates atomic.Int64
}

func (s *failingOnce) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	if s.creates.Add(1) == 1 {
		return objstore.Attrs{}, &objstore.Error{Name: name, Kind: objstore.ErrUnavailable}
	}
	return s.Store.Create(ctx, name, body)
}

// Whoever finds that etcd was rolled back stops, instead of serving a blend.
func TestAReplicaStopsWhenEtcdWasRolledBack(t *testing.T) {
	ctx := bounded(t)
	cluster := metadatatest.Start(t, metadatatest.Options{Replicas: 2})
	controller := cluster.Controller()
	registerBroker(t, ctx, of(controller), 1)
	etcd := cluster.Replicas()[0].Etcd
	_, err := etcd.Put(ctx, "/braid/end", "1")
	require.NoError(t, err)
	for _, r := range cluster.Replicas() {
		require.ErrorContains(t, r.Wait(), "rolled back")
	}
	require.NotErrorIs(t, ctx.Err(), context.DeadlineExceeded)
}
