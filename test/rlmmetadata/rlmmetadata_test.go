package rlmmetadata_test

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/metaclient"
	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/metadata/metadatatest"
	"github.com/braidlog/braid/services/rlm"
	"github.com/braidlog/braid/services/rlm/rlmtest"
)

const patience = 30 * time.Second

const (
	accepted  = metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
	already   = metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED
	notJudged = metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED
	mismatch  = metadatav1.RangeOutcome_RANGE_OUTCOME_CHAIN_MISMATCH
)

// leader is a broker played by hand: registered, kept alive, leading every
// partition of one topic.
type leader struct {
	t       *testing.T
	cluster *metadatatest.Cluster
	client  *metaclient.Client
	reg     metaclient.Registration
	topic   *metadatav1.Topic
	logs    []*walobjecttest.Partition
}

func newLeader(t *testing.T, c *metadatatest.Cluster, partitions int32) *leader {
	t.Helper()
	client, err := metaclient.New(metaclient.Options{Addresses: c.Addresses(), Dial: func(a string) (*grpc.ClientConn, error) {
		return grpc.NewClient(a, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	l := &leader{t: t, cluster: c, client: client}
	registered := make(chan metaclient.Registration, 10)
	s, err := client.NewSession(metaclient.SessionOptions{
		Role: metaclient.BrokerRole(func() *metadatav1.RegisterBrokerRequest {
			return &metadatav1.RegisterBrokerRequest{BrokerId: 1, Address: "127.0.0.1:1", DirectoryId: "0b2f7f0e-70f3-4d05-8c29-6a1f4a1d0001"}
		}, func() int64 { return 0 }),
		OnRegistered: func(r metaclient.Registration) { registered <- r },
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	select {
	case l.reg = <-registered:
	case <-time.After(patience):
		t.Fatal("not registered in time")
	}
	topics := metadatav1.NewTopicServiceClient(client.Controller())
	created, err := topics.CreateTopic(l.bounded(), &metadatav1.CreateTopicRequest{Name: "harbour", PartitionCount: partitions})
	require.NoError(t, err)
	l.topic = created.GetTopic()
	for _, p := range l.topic.GetPartitions() {
		require.EqualValues(t, 1, p.GetLeaderId())
		log := &walobjecttest.Partition{
			ID:      &logv1.TopicIdPartition{TopicId: l.topic.GetTopicId(), TopicCreationOffset: l.topic.GetCreationOffset(), Partition: p.GetPartition()},
			Fence:   p.GetFence(),
			Lineage: []*logv1.LineageEntry{{Leadership: &logv1.Leadership{Incarnation: p.GetFence().GetIncarnation(), LeaderEpoch: p.GetFence().GetLeaderEpoch()}}},
		}
		_, err := metadatav1.NewClusterServiceClient(client.Controller()).OpenEpoch(l.bounded(), &metadatav1.OpenEpochRequest{
			Partition: log.ID, Fence: log.Fence, ObjectEndChainHash: log.Hash.Bytes(),
		})
		require.NoError(t, err)
		l.logs = append(l.logs, log)
	}
	return l
}

func (l *leader) bounded() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	l.t.Cleanup(cancel)
	return ctx
}

// stream is the leader's stream to one remote-log manager.
type stream struct {
	t *testing.T
	s grpc.BidiStreamingClient[remotelogv1.AppendWalRequest, remotelogv1.AppendWalResponse]
}

func (l *leader) connect(i *rlmtest.Instance) *stream {
	l.t.Helper()
	s, err := remotelogv1.NewRemoteLogServiceClient(i.Conn()).AppendWal(l.bounded())
	require.NoError(l.t, err)
	require.NoError(l.t, s.Send(&remotelogv1.AppendWalRequest{Kind: &remotelogv1.AppendWalRequest_Init{Init: &remotelogv1.AppendWalInit{
		ClusterId: l.reg.ClusterID, Incarnation: l.reg.Incarnation, BrokerId: 1, BrokerEpoch: l.reg.Epoch,
	}}}))
	r, err := s.Recv()
	require.NoError(l.t, err)
	require.NotNil(l.t, r.GetReady())
	return &stream{l.t, s}
}

func (s *stream) send(r *remotelogv1.WalRange) {
	s.t.Helper()
	require.NoError(s.t, s.s.Send(&remotelogv1.AppendWalRequest{Kind: &remotelogv1.AppendWalRequest_Range{Range: r}}))
}

func (s *stream) verdict() *remotelogv1.WalVerdict {
	s.t.Helper()
	r, err := s.s.Recv()
	require.NoError(s.t, err)
	return r.GetVerdict()
}

func (l *leader) next(partition int, run int64) *remotelogv1.WalRange {
	d, data := l.logs[partition].Append(2, 3, 50)
	return &remotelogv1.WalRange{Range: d, Run: run, Data: data}
}

// verify reads every committed range back through a remote-log manager, along
// the chain from the log's start to its end.
func (l *leader) verify(i *rlmtest.Instance) (ranges int) {
	l.t.Helper()
	conn := i.Conn()
	for part, log := range l.logs {
		list, err := metadatav1.NewSegmentServiceClient(l.client.Any()).ListSegments(l.bounded(), &metadatav1.ListSegmentsRequest{Topic: "harbour", Partition: int32(part)})
		require.NoError(l.t, err)
		end := int64(0)
		for _, r := range list.GetRanges() {
			require.Equal(l.t, end, r.GetBaseOffset())
			end = r.GetEndOffset()
			require.Equal(l.t, walobject.Name(l.reg.ClusterID, r.GetObject()), r.GetObjectName())
			s, err := remotelogv1.NewRemoteLogServiceClient(conn).ReadWal(l.bounded(), &remotelogv1.ReadWalRequest{
				ClusterId: l.reg.ClusterID, Object: r.GetObject(), Position: r.GetPosition(), LengthBytes: r.GetLengthBytes(),
			})
			require.NoError(l.t, err)
			var data []byte
			for {
				m, err := s.Recv()
				if errors.Is(err, io.EOF) {
					break
				}
				require.NoError(l.t, err)
				data = append(data, m.GetData()...)
			}
			footers, err := remotelogv1.NewRemoteLogServiceClient(conn).ReadRangeFooters(l.bounded(), &remotelogv1.ReadRangeFootersRequest{
				ClusterId: l.reg.ClusterID, Partition: log.ID,
				Ranges: []*remotelogv1.RangeLocation{{Object: r.GetObject(), ObjectSizeBytes: r.GetObjectSizeBytes(), BaseOffset: r.GetBaseOffset()}},
			})
			require.NoError(l.t, err)
			d := footers.GetFooters()[0].GetRange()
			require.NoError(l.t, walobject.VerifyRange(d, data))
			require.Equal(l.t, r.GetEndChainHash(), d.GetEndChainHash())
			ranges++
		}
		require.Equal(l.t, end, list.GetObjectEndOffset())
	}
	return ranges
}

func start(t *testing.T, c *metadatatest.Cluster, o rlmtest.Options) *rlmtest.Instance {
	t.Helper()
	o.Metadata, o.Bucket = c.Addresses(), c.Store
	i := rlmtest.Start(t, o)
	i.WaitRegistered(0)
	return i
}

func TestRangesAreJudgedByTheRealService(t *testing.T) {
	c := metadatatest.Start(t, metadatatest.Options{})
	l := newLeader(t, c, 12)
	i := start(t, c, rlmtest.Options{})
	s := l.connect(i)
	for range 5 {
		for p := range l.logs {
			s.send(l.next(p, 1))
		}
	}
	for range 60 {
		require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
	}
	// What a leader with other bytes would send. It is well formed.
	other := walobjecttest.Partition{ID: l.logs[0].ID, Fence: l.logs[0].Fence, Lineage: l.logs[0].Lineage, End: l.logs[0].End}
	d, data := other.Append(1, 1, 9)
	s.send(&remotelogv1.WalRange{Range: d, Run: 2, Data: data})
	v := s.verdict().GetVerdict()
	require.Equal(t, mismatch, v.GetOutcome())
	require.Equal(t, l.logs[0].End, v.GetObjectEndOffset())
	require.Equal(t, l.logs[0].Hash.Bytes(), v.GetObjectEndChainHash())
	// And the right ones still go on.
	s.send(l.next(0, 3))
	require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
	require.Equal(t, 61, l.verify(i))
}

// deathAt kills an instance around its n-th commit.
type deathAt struct {
	rlm.Committer
	n             atomic.Int32
	at            int32
	before, after func()
}

func (d *deathAt) Commit(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	if d.n.Add(1) != d.at {
		return d.Committer.Commit(ctx, r)
	}
	if d.before != nil {
		d.before()
	}
	resp, err := d.Committer.Commit(ctx, r)
	if d.after != nil {
		d.after()
	}
	return resp, err
}

func TestDeathAroundTheCommit(t *testing.T) {
	for name, want := range map[string]metadatav1.RangeOutcome{"between PUT and commit": accepted, "between commit and ack": already} {
		t.Run(name, func(t *testing.T) {
			c := metadatatest.Start(t, metadatatest.Options{})
			l := newLeader(t, c, 3)
			var victim *rlmtest.Instance
			d := &deathAt{at: 2}
			kill := func() { victim.Kill() }
			if want == accepted {
				d.before = kill
			} else {
				d.after = kill
			}
			victim = start(t, c, rlmtest.Options{
				WrapCommitter: func(next rlm.Committer) rlm.Committer { d.Committer = next; return d },
				Change:        func(c *rlm.Config) { c.WAL.FlushTimeout = config.Duration(20 * time.Millisecond) },
			})
			s := l.connect(victim)
			s.send(l.next(0, 1))
			require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
			lost := l.next(0, 1)
			s.send(lost)
			_, err := s.s.Recv()
			require.Equal(t, codes.Unavailable, status.Code(err), "no verdict: %v", err)

			heir := start(t, c, rlmtest.Options{ID: 2})
			s = l.connect(heir)
			s.send(proto.CloneOf(lost))
			require.Equal(t, want, s.verdict().GetVerdict().GetOutcome())
			s.send(l.next(0, 2))
			require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
			require.Equal(t, 3, l.verify(heir))
		})
	}
}

func TestExpiredEpochIsClosedAndANewOneServes(t *testing.T) {
	c := metadatatest.Start(t, metadatatest.Options{})
	l := newLeader(t, c, 1)
	i := start(t, c, rlmtest.Options{})
	s := l.connect(i)
	s.send(l.next(0, 1))
	require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
	old, _ := i.Server.Epoch()
	_, err := metadatav1.NewClusterServiceClient(l.client.Controller()).CloseRemoteLogManager(l.bounded(), &metadatav1.CloseRemoteLogManagerRequest{RlmId: 1, RlmEpoch: old})
	require.NoError(t, err)
	run, r := int64(1), l.next(0, 1)
	for {
		s.send(proto.CloneOf(r))
		v := s.verdict()
		if v.GetVerdict().GetOutcome() == accepted {
			require.Greater(t, v.GetObject().GetRlmEpoch(), old)
			break
		}
		require.Equal(t, notJudged, v.GetVerdict().GetOutcome())
		run++
		r.Run = run
	}
	require.Equal(t, 2, l.verify(i))
}

func TestChangeOfControllerCostsNoRange(t *testing.T) {
	c := metadatatest.Start(t, metadatatest.Options{Replicas: 2})
	l := newLeader(t, c, 2)
	i := start(t, c, rlmtest.Options{})
	epoch, _ := i.Server.Epoch()
	s := l.connect(i)
	const n, window = 60, 6
	for k := range window {
		s.send(l.next(k%2, 1))
	}
	for k := range n {
		if k == 20 {
			require.NoError(t, c.Controller().Stop())
		}
		if k+window < n {
			s.send(l.next(k%2, 1))
		}
		require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
	}
	now, _ := i.Server.Epoch()
	require.Equal(t, epoch, now, "the epoch outlives its controller")
	require.Equal(t, n, l.verify(i))
}

func TestStoppedInstanceLeavesNoOpenEpoch(t *testing.T) {
	c := metadatatest.Start(t, metadatatest.Options{})
	l := newLeader(t, c, 1)
	i := start(t, c, rlmtest.Options{})
	s := l.connect(i)
	s.send(l.next(0, 1))
	require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
	i.Stop()
	got, err := metadatav1.NewClusterServiceClient(l.client.Controller()).GetCluster(l.bounded(), &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	require.Len(t, got.GetRemoteLogManagers(), 1)
	require.False(t, got.GetRemoteLogManagers()[0].GetOpen())
	require.EqualValues(t, 1, got.GetRemoteLogManagers()[0].GetLastAcceptedSequence())
}
