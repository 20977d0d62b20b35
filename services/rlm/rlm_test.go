package rlm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/rlm"
	"github.com/braidlog/braid/services/rlm/rlmtest"
)

const (
	accepted  = metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
	already   = metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED
	notJudged = metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED
)

// bucketFor is a bucket that belongs to the cluster.
func bucketFor(t *testing.T) *memstore.Store {
	t.Helper()
	s := memstore.New(memstore.Options{})
	rlmtest.Mark(t, s, clusterID, walobjecttest.Incarnation)
	return s
}

func begin(t *testing.T, change func(*rlmtest.Options)) (*rlmtest.Instance, *metadataStub, *memstore.Store) {
	t.Helper()
	m, s := startMetadata(t), bucketFor(t)
	o := rlmtest.Options{Metadata: []string{m.address}, Bucket: s}
	if change != nil {
		change(&o)
	}
	i := rlmtest.Start(t, o)
	i.WaitRegistered(0)
	return i, m, s
}

// sender is a broker's stream.
type sender struct {
	t      *testing.T
	stream grpc.BidiStreamingClient[remotelogv1.AppendWalRequest, remotelogv1.AppendWalResponse]
	ready  *remotelogv1.AppendWalReady
}

func initial() *remotelogv1.AppendWalInit {
	return &remotelogv1.AppendWalInit{ClusterId: clusterID, Incarnation: walobjecttest.Incarnation, BrokerId: 1, BrokerEpoch: 77}
}

func dial(t *testing.T, conn grpc.ClientConnInterface, init *remotelogv1.AppendWalInit) (*sender, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	stream, err := remotelogv1.NewRemoteLogServiceClient(conn).AppendWal(ctx)
	require.NoError(t, err)
	req := &remotelogv1.AppendWalRequest{}
	if init != nil {
		req.Kind = &remotelogv1.AppendWalRequest_Init{Init: init}
	}
	if err := stream.Send(req); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	r, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	require.NotNil(t, r.GetReady(), "first comes ready")
	return &sender{t, stream, r.GetReady()}, nil
}

func (s *sender) send(r *remotelogv1.WalRange) {
	s.t.Helper()
	require.NoError(s.t, s.stream.Send(&remotelogv1.AppendWalRequest{Kind: &remotelogv1.AppendWalRequest_Range{Range: r}}))
}

func (s *sender) verdict() *remotelogv1.WalVerdict {
	s.t.Helper()
	r, err := s.stream.Recv()
	require.NoError(s.t, err)
	require.NotNil(s.t, r.GetVerdict())
	return r.GetVerdict()
}

func next(p *walobjecttest.Partition, run int64, size int) *remotelogv1.WalRange {
	d, data := p.Append(2, 2, size)
	return &remotelogv1.WalRange{Range: d, Run: run, Data: data, Producers: []*logv1.ProducerSummary{{ProducerId: int64(d.GetEndOffset())}}}
}

func readWal(t *testing.T, conn grpc.ClientConnInterface, ref *logv1.ObjectRef, pos, n int64) ([]byte, error) {
	t.Helper()
	stream, err := remotelogv1.NewRemoteLogServiceClient(conn).ReadWal(t.Context(), &remotelogv1.ReadWalRequest{
		ClusterId: clusterID, Object: ref, Position: pos, LengthBytes: n,
	})
	require.NoError(t, err)
	var got []byte
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return got, nil
		}
		if err != nil {
			return got, err
		}
		require.LessOrEqual(t, len(r.GetData()), 1<<20)
		got = append(got, r.GetData()...)
	}
}

func TestRangesGoInAndComeBack(t *testing.T) {
	i, m, _ := begin(t, nil)
	conn := i.Conn()
	s, err := dial(t, conn, initial())
	require.NoError(t, err)
	require.EqualValues(t, 1, s.ready.GetRlmId())
	require.EqualValues(t, 40, s.ready.GetRlmEpoch())
	require.Positive(t, s.ready.GetPartitionCreditBytes())

	sent := map[string]*remotelogv1.WalRange{}
	for part := range int32(20) {
		p := walobjecttest.NewPartition(5, part)
		for range 3 {
			r := next(p, 1, 2000)
			sent[fmt.Sprint(part, r.GetRange().GetBaseOffset())] = r
			s.send(r)
		}
	}
	objects := map[string]*logv1.ObjectRef{}
	for range 60 {
		v := s.verdict()
		require.Equal(t, accepted, v.GetVerdict().GetOutcome())
		require.GreaterOrEqual(t, v.GetMetadataOffset(), int64(41))
		objects[walobject.Name(clusterID, v.GetObject())] = v.GetObject()
	}
	require.Less(t, len(objects), 60, "ranges share objects")

	client := remotelogv1.NewRemoteLogServiceClient(conn)
	for _, c := range m.commits() {
		for _, d := range c.GetRanges() {
			r := sent[fmt.Sprint(d.GetPartition().GetPartition(), d.GetBaseOffset())]
			got, err := readWal(t, conn, c.GetObject(), d.GetPosition(), d.GetLengthBytes())
			require.NoError(t, err)
			require.Equal(t, r.GetData(), got)
			footers, err := client.ReadRangeFooters(t.Context(), &remotelogv1.ReadRangeFootersRequest{
				ClusterId: clusterID, Partition: d.GetPartition(),
				Ranges: []*remotelogv1.RangeLocation{{Object: c.GetObject(), ObjectSizeBytes: c.GetSizeBytes(), BaseOffset: d.GetBaseOffset()}},
			})
			require.NoError(t, err)
			require.True(t, proto.Equal(d, footers.GetFooters()[0].GetRange()))
			require.True(t, proto.Equal(r.GetProducers()[0], footers.GetFooters()[0].GetProducers()[0]))
		}
	}
	require.NoError(t, s.stream.CloseSend())
	_, err = s.stream.Recv()
	require.ErrorIs(t, err, io.EOF, "a sender that is done gets a clean end")
}

func TestManyReadersOfAZoneCostOneGetPerObject(t *testing.T) {
	faults := decorate.NewInjector()
	i, m, _ := begin(t, func(o *rlmtest.Options) { o.Bucket = faults.Decorate(o.Bucket) })
	s, err := dial(t, i.Conn(), initial())
	require.NoError(t, err)
	p := walobjecttest.NewPartition(5, 0)
	s.send(next(p, 1, 60_000))
	s.verdict()
	c := m.commits()[0]
	before := faults.Calls(objstore.OpRead)
	var wg sync.WaitGroup
	for range 8 {
		conn := i.Conn()
		wg.Go(func() {
			d := c.GetRanges()[0]
			for range 5 {
				if got, err := readWal(t, conn, c.GetObject(), d.GetPosition(), d.GetLengthBytes()); err != nil || walobject.VerifyRange(d, got) != nil {
					t.Errorf("read: %v", err)
				}
			}
		})
	}
	wg.Wait()
	require.Equal(t, 1, faults.Calls(objstore.OpRead)-before)
}

func TestBadCallsAreTypedErrors(t *testing.T) {
	i, m, s := begin(t, nil)
	conn := i.Conn()
	client := remotelogv1.NewRemoteLogServiceClient(conn)
	good := &logv1.ObjectRef{Incarnation: walobjecttest.Incarnation, RlmEpoch: 40, Sequence: 9, Attempt: 1}

	check := func(err error, code codes.Code, reason errorsv1.ErrorReason) {
		t.Helper()
		require.Equal(t, code, status.Code(err), "%v", err)
		require.Equal(t, reason, rpcerr.Reason(err), "%v", err)
	}
	const (
		invalid  = errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD
		cluster  = errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH
		noReason = errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED
	)
	// AppendWal.
	for name, c := range map[string]struct {
		change func(*remotelogv1.AppendWalInit)
		code   codes.Code
		reason errorsv1.ErrorReason
	}{
		"cluster":     {func(i *remotelogv1.AppendWalInit) { i.ClusterId = "other" }, codes.FailedPrecondition, cluster},
		"incarnation": {func(i *remotelogv1.AppendWalInit) { i.Incarnation++ }, codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_INCARNATION_MISMATCH},
		"broker":      {func(i *remotelogv1.AppendWalInit) { i.BrokerId = 0 }, codes.InvalidArgument, invalid},
	} {
		init := initial()
		c.change(init)
		_, err := dial(t, conn, init)
		require.Error(t, err, name)
		check(err, c.code, c.reason)
	}
	_, err := dial(t, conn, nil)
	check(err, codes.InvalidArgument, invalid)
	st, err := dial(t, conn, initial())
	require.NoError(t, err)
	require.NoError(t, st.stream.Send(&remotelogv1.AppendWalRequest{Kind: &remotelogv1.AppendWalRequest_Init{Init: initial()}}))
	_, err = st.stream.Recv()
	check(err, codes.InvalidArgument, invalid)

	// ReadWal.
	read := func(change func(*remotelogv1.ReadWalRequest)) error {
		r := &remotelogv1.ReadWalRequest{ClusterId: clusterID, Object: good, LengthBytes: 1}
		change(r)
		stream, err := client.ReadWal(t.Context(), r)
		require.NoError(t, err)
		_, err = stream.Recv()
		return err
	}
	check(read(func(*remotelogv1.ReadWalRequest) {}), codes.NotFound, noReason)
	check(read(func(r *remotelogv1.ReadWalRequest) { r.ClusterId = "" }), codes.FailedPrecondition, cluster)
	check(read(func(r *remotelogv1.ReadWalRequest) { r.Object = nil }), codes.InvalidArgument, invalid)
	check(read(func(r *remotelogv1.ReadWalRequest) { r.Position = -1 }), codes.InvalidArgument, invalid)
	check(read(func(r *remotelogv1.ReadWalRequest) { r.LengthBytes = 0 }), codes.InvalidArgument, invalid)

	// ReadRangeFooters.
	footers := func(change func(*remotelogv1.ReadRangeFootersRequest)) error {
		r := &remotelogv1.ReadRangeFootersRequest{
			ClusterId: clusterID, Partition: walobjecttest.NewPartition(5, 0).ID,
			Ranges: []*remotelogv1.RangeLocation{{Object: good, ObjectSizeBytes: 100}},
		}
		change(r)
		_, err := client.ReadRangeFooters(t.Context(), r)
		return err
	}
	check(footers(func(*remotelogv1.ReadRangeFootersRequest) {}), codes.NotFound, noReason)
	check(footers(func(r *remotelogv1.ReadRangeFootersRequest) { r.Ranges = nil }), codes.InvalidArgument, invalid)
	check(footers(func(r *remotelogv1.ReadRangeFootersRequest) { r.Partition = nil }), codes.InvalidArgument, invalid)
	check(footers(func(r *remotelogv1.ReadRangeFootersRequest) { r.Ranges[0].ObjectSizeBytes = 0 }), codes.InvalidArgument, invalid)
	check(footers(func(r *remotelogv1.ReadRangeFootersRequest) { r.ClusterId = "x" }), codes.FailedPrecondition, cluster)

	// Damage.
	st, err = dial(t, conn, initial())
	require.NoError(t, err)
	st.send(next(walobjecttest.NewPartition(5, 0), 1, 100))
	st.verdict()
	c := m.commits()[0]
	s.Tamper(walobject.Name(clusterID, c.GetObject()), func(b []byte) []byte {
		b = append([]byte(nil), b...)
		b[80] ^= 1
		return b
	})
	_, err = readWal(t, conn, c.GetObject(), 0, 10)
	check(err, codes.DataLoss, errorsv1.ErrorReason_ERROR_REASON_DATA_DAMAGED)
}

func TestSenderPastItsCreditIsEnded(t *testing.T) {
	faults := decorate.NewInjector()
	i, _, _ := begin(t, func(o *rlmtest.Options) {
		o.Bucket = faults.Decorate(o.Bucket)
		o.Change = func(c *rlm.Config) {
			c.WAL.PartitionCredit, c.WAL.StreamCredit = config.KiB, 4*config.KiB
			c.WAL.FlushTimeout = config.Duration(50 * time.Millisecond)
		}
	})
	faults.Set(decorate.Fault{Op: objstore.OpCreate, Count: -1})
	s, err := dial(t, i.Conn(), initial())
	require.NoError(t, err)
	p := walobjecttest.NewPartition(5, 0)
	s.send(next(p, 1, 2000))
	s.send(next(p, 1, 10))
	_, err = s.stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, rpcerr.Reason(err))
}

func TestExpiredSessionRegistersAgain(t *testing.T) {
	i, m, _ := begin(t, nil)
	s, err := dial(t, i.Conn(), initial())
	require.NoError(t, err)
	p := walobjecttest.NewPartition(5, 0)
	s.send(next(p, 1, 10))
	require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
	m.expire()
	i.WaitRegistered(40)
	run := int64(1)
	for r := next(p, run, 10); ; {
		s.send(proto.CloneOf(r))
		v := s.verdict()
		if v.GetVerdict().GetOutcome() == accepted {
			require.Greater(t, v.GetObject().GetRlmEpoch(), int64(40))
			break
		}
		require.Equal(t, notJudged, v.GetVerdict().GetOutcome())
		run++
		r.Run = run
	}
}

func TestStopFinishesWhatIsInFlightAndClosesTheEpoch(t *testing.T) {
	faults := decorate.NewInjector()
	i, m, _ := begin(t, func(o *rlmtest.Options) { o.Bucket = faults.Decorate(o.Bucket) })
	faults.Set(decorate.Fault{Op: objstore.OpCreate, Latency: 300 * time.Millisecond, NoError: true, Count: -1})
	s, err := dial(t, i.Conn(), initial())
	require.NoError(t, err)
	p := walobjecttest.NewPartition(5, 0)
	for range 4 {
		s.send(next(p, 1, 10))
	}
	require.Eventually(t, func() bool { return faults.Calls(objstore.OpCreate) > 0 }, 10*time.Second, time.Millisecond)
	stopped := make(chan struct{})
	go func() { defer close(stopped); i.Stop() }()
	n := 0
	for {
		r, err := s.stream.Recv()
		if err != nil {
			require.Equal(t, errorsv1.ErrorReason_ERROR_REASON_DRAINING, rpcerr.Reason(err), "%v", err)
			break
		}
		if r.GetVerdict().GetVerdict().GetOutcome() == accepted {
			n++
		}
	}
	<-stopped
	require.Positive(t, n, "what was taken is answered")
	m.mu.Lock()
	defer m.mu.Unlock()
	require.Equal(t, []int64{40}, m.stopped, "the epoch is closed in the log")
}

// deathAt kills an instance around a commit.
type deathAt struct {
	rlm.Committer
	before, after func()
}

func (d deathAt) Commit(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	if d.before != nil {
		d.before()
	}
	resp, err := d.Committer.Commit(ctx, r)
	if d.after != nil {
		d.after()
	}
	return resp, err
}

func TestDeathAroundTheCommitIsSafeToResend(t *testing.T) {
	for name, want := range map[string]metadatav1.RangeOutcome{"between PUT and commit": accepted, "between commit and ack": already} {
		t.Run(name, func(t *testing.T) {
			m, bucket := startMetadata(t), bucketFor(t)
			var victim *rlmtest.Instance
			kill := func() { victim.Kill() }
			victim = rlmtest.Start(t, rlmtest.Options{
				Metadata: []string{m.address}, Bucket: bucket,
				WrapCommitter: func(c rlm.Committer) rlm.Committer {
					if want == accepted {
						return deathAt{c, kill, nil}
					}
					return deathAt{c, nil, kill}
				},
				Change: func(c *rlm.Config) { c.WAL.FlushTimeout = config.Duration(50 * time.Millisecond) },
			})
			victim.WaitRegistered(0)
			s, err := dial(t, victim.Conn(), initial())
			require.NoError(t, err)
			p := walobjecttest.NewPartition(5, 0)
			r := next(p, 1, 100)
			s.send(r)
			_, err = s.stream.Recv()
			require.Equal(t, codes.Unavailable, status.Code(err), "no verdict: %v", err)
			objects, _ := bucket.Len()
			require.Equal(t, 2, objects, "the marker and the upload")
			require.Empty(t, func() []int64 { m.mu.Lock(); defer m.mu.Unlock(); return m.stopped }(), "a killed one says no goodbye")

			heir := rlmtest.Start(t, rlmtest.Options{Metadata: []string{m.address}, Bucket: bucket})
			heir.WaitRegistered(40)
			s, err = dial(t, heir.Conn(), initial())
			require.NoError(t, err)
			s.send(proto.CloneOf(r))
			require.Equal(t, want, s.verdict().GetVerdict().GetOutcome())
			r2 := next(p, 2, 100)
			s.send(r2)
			require.Equal(t, accepted, s.verdict().GetVerdict().GetOutcome())
			total := 0
			for _, c := range m.commits() {
				for _, d := range c.GetRanges() {
					total++
					got, err := readWal(t, heir.Conn(), c.GetObject(), d.GetPosition(), d.GetLengthBytes())
					require.NoError(t, err)
					require.NoError(t, walobject.VerifyRange(d, got))
				}
			}
			require.Equal(t, 2, total, "each range once")
		})
	}
}

func TestStartSaysWhatIsWrongWithTheBucket(t *testing.T) {
	build := func(t *testing.T, store objstore.Store) error {
		t.Helper()
		cfg := rlmtest.Config(rlmtest.Options{Metadata: []string{"127.0.0.1:1"}, Bucket: store})
		cfg.Store.Bucket, cfg.Store.Endpoint, cfg.Store.Prefix = "harbour", "http://127.0.0.1:9", ""
		cfg.Store.StartTimeout = config.Duration(200 * time.Millisecond)
		s, err := rlm.Build(t.Context(), cfg, rlm.Deps{Bucket: store})
		if err == nil {
			require.NoError(t, s.Close())
		}
		return err
	}
	faulty := func(f decorate.Fault) objstore.Store {
		i := decorate.NewInjector()
		i.Set(f)
		return i.Decorate(bucketFor(t))
	}
	with := func(change func(*objstore.BucketSettings)) objstore.Store {
		s := bucketFor(t)
		b, err := s.BucketSettings(t.Context())
		require.NoError(t, err)
		change(&b)
		s.SetBucketSettings(b)
		return s
	}
	for name, c := range map[string]struct {
		store objstore.Store
		words []string
	}{
		"unreachable": {faulty(decorate.Fault{Op: objstore.OpBucketInfo, Count: -1}), []string{"harbour", "http://127.0.0.1:9", "unreachable"}},
		"no bucket":   {faulty(decorate.Fault{Op: objstore.OpBucketInfo, Err: &objstore.Error{Op: objstore.OpBucketInfo, Kind: objstore.ErrBucketNotFound}}), []string{"harbour", "bucket not found"}},
		"no marker":   {memstore.New(memstore.Options{}), []string{"harbour", "no cluster marker"}},
		"lifecycle":   {with(func(b *objstore.BucketSettings) { b.Lifecycle = []objstore.LifecycleRule{{Action: "Delete"}} }), []string{"unfit", "lifecycle"}},
		"retention":   {with(func(b *objstore.BucketSettings) { b.Retention = time.Hour; b.RetentionLocked = true }), []string{"unfit", "retention"}},
		"foreign": {func() objstore.Store {
			s := memstore.New(memstore.Options{})
			_, err := s.Create(t.Context(), "braid-cluster", objstore.NewParts([]byte("hello")))
			require.NoError(t, err)
			return s
		}(), []string{"can't be read as a cluster marker"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := build(t, c.store)
			require.Error(t, err)
			for _, w := range c.words {
				require.ErrorContains(t, err, w)
			}
		})
	}
	require.NoError(t, build(t, with(func(b *objstore.BucketSettings) { b.SoftDelete = time.Hour; b.Versioning = true })), "warned of, not refused")
}

func TestBucketOfAnotherClusterEndsTheService(t *testing.T) {
	m := startMetadata(t)
	s := memstore.New(memstore.Options{})
	rlmtest.Mark(t, s, "another-cluster", 5)
	i := rlmtest.Start(t, rlmtest.Options{Metadata: []string{m.address}, Bucket: s})
	err := i.Err()
	require.Equal(t, errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, rpcerr.Reason(err), "%v", err)
}

func TestUnregisteredInstanceIsNotReady(t *testing.T) {
	m := startMetadata(t)
	m.refuse = rpcerr.NotController("")
	i := rlmtest.Start(t, rlmtest.Options{Metadata: []string{m.address}, Bucket: bucketFor(t), Change: func(c *rlm.Config) { c.WAL.FlushTimeout = config.Duration(50 * time.Millisecond) }})
	_, err := dial(t, i.Conn(), initial())
	require.Equal(t, errorsv1.ErrorReason_ERROR_REASON_NOT_READY, rpcerr.Reason(err), "%v", err)
	h, err := healthv1.NewHealthClient(i.Conn()).Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, h.GetStatus())
	m.mu.Lock()
	m.refuse = nil
	m.mu.Unlock()
	i.WaitRegistered(0)
	require.Eventually(t, func() bool {
		h, err := healthv1.NewHealthClient(i.Conn()).Check(t.Context(), &healthv1.HealthCheckRequest{})
		return err == nil && h.GetStatus() == healthv1.HealthCheckResponse_SERVING
	}, 10*time.Second, 5*time.Millisecond)
}

func TestConfigurationNamesEveryProblem(t *testing.T) {
	var c rlm.Config
	err := c.Validate()
	for _, key := range []string{"id", "metadata.addresses", "store.bucket", "wal.inflight", "wal.buffer", "cache.size", "grpc.stop-timeout"} {
		require.ErrorContains(t, err, key)
	}
	good := rlmtest.Config(rlmtest.Options{Metadata: []string{"127.0.0.1:1"}})
	require.NoError(t, good.Validate())
}

func TestMetricsTellWhatMatters(t *testing.T) {
	i, m, _ := begin(t, nil)
	s, err := dial(t, i.Conn(), initial())
	require.NoError(t, err)
	s.send(next(walobjecttest.NewPartition(5, 0), 1, 100))
	s.verdict()
	c := m.commits()[0]
	_, err = readWal(t, i.Conn(), c.GetObject(), 0, 10)
	require.NoError(t, err)
	families, err := i.Telemetry.Registry.Gather()
	require.NoError(t, err)
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}
	for _, want := range []string{
		"rlm_wal_queue_size_bytes", "rlm_wal_queue_ranges", "rlm_wal_buffer_size_bytes", "rlm_wal_uploads", "rlm_wal_uncommitted", "rlm_wal_streams",
		"rlm_wal_put_duration_seconds", "rlm_wal_commit_duration_seconds", "rlm_wal_object_size_bytes", "rlm_wal_object_ranges", "rlm_wal_object_partitions",
		"rlm_wal_verdicts_total", "rlm_cache_blocks_total", "rlm_cache_get_duration_seconds", "rlm_cache_size_bytes", "rlm_cache_pinned_bytes",
		"objstore_request_duration_seconds", "rpc_server_call_duration_seconds",
	} {
		require.Contains(t, names, want)
	}
}

// Design review F22: a reader that does not read is ended, and resumes where it
// stopped.
func TestReaderThatDoesNotReadIsEndedAndResumes(t *testing.T) {
	i, m, _ := begin(t, func(o *rlmtest.Options) {
		o.Change = func(c *rlm.Config) { c.Cache.SendTimeout = config.Duration(200 * time.Millisecond) }
	})
	conn := i.Conn()
	s, err := dial(t, conn, initial())
	require.NoError(t, err)
	s.send(next(walobjecttest.NewPartition(5, 0), 1, 1_000_000)) // 4 MB
	s.verdict()
	c := m.commits()[0]
	d := c.GetRanges()[0]
	stream, err := remotelogv1.NewRemoteLogServiceClient(conn).ReadWal(t.Context(), &remotelogv1.ReadWalRequest{
		ClusterId: clusterID, Object: c.GetObject(), Position: d.GetPosition(), LengthBytes: d.GetLengthBytes(),
	})
	require.NoError(t, err)
	// Nothing is received until the server has given up: its next reader gets
	// through meanwhile, and the stalled one has its status waiting.
	ended := i.Telemetry.Registry
	require.Eventually(t, func() bool {
		families, err := ended.Gather()
		if err != nil {
			return false
		}
		for _, f := range families {
			if f.GetName() != "rpc_server_call_duration_seconds" {
				continue
			}
			for _, x := range f.GetMetric() {
				for _, l := range x.GetLabel() {
					if l.GetValue() == "RESOURCE_EXHAUSTED" {
						return true
					}
				}
			}
		}
		return false
	}, 10*time.Second, 10*time.Millisecond)
	var got []byte
	for {
		r, err := stream.Recv()
		if err != nil {
			require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
			require.Equal(t, errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, rpcerr.Reason(err))
			break
		}
		got = append(got, r.GetData()...)
	}
	require.Less(t, int64(len(got)), d.GetLengthBytes())
	rest, err := readWal(t, conn, c.GetObject(), d.GetPosition()+int64(len(got)), d.GetLengthBytes()-int64(len(got)))
	require.NoError(t, err)
	require.NoError(t, walobject.VerifyRange(d, append(got, rest...)))
}
