package combiner_test

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/rlm/internal/combiner"
	"github.com/braidlog/braid/services/rlm/planner"
)

const clusterID = "3c0f1d52-6b1e-4f0e-9a53-0f6d7d1c2b3a"

// judge is a plain metadata service: it accepts what continues a partition.
type judge struct {
	mu       sync.Mutex
	epoch    int64
	last     int64
	ends     map[string]int64
	commits  []*metadatav1.CommitCombinedSegmentRequest // each command that arrived
	accepted []*metadatav1.CommitCombinedSegmentRequest
	memory   map[string]*metadatav1.CommitCombinedSegmentResponse
	// before and after are called around the decision; an error takes the
	// answer away.
	before, after func(r *metadatav1.CommitCombinedSegmentRequest) error
}

func newJudge(epoch int64) *judge {
	return &judge{epoch: epoch, ends: map[string]int64{}, memory: map[string]*metadatav1.CommitCombinedSegmentResponse{}}
}

func (j *judge) Commit(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	j.mu.Lock()
	j.commits = append(j.commits, proto.CloneOf(r))
	before, after := j.before, j.after
	j.mu.Unlock()
	if before != nil {
		if err := before(r); err != nil {
			return nil, err
		}
	}
	resp := j.decide(r)
	if after != nil {
		if err := after(r); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return resp, nil
}

func (j *judge) decide(r *metadatav1.CommitCombinedSegmentRequest) *metadatav1.CommitCombinedSegmentResponse {
	j.mu.Lock()
	defer j.mu.Unlock()
	name := walobject.Name(clusterID, r.GetObject())
	if first := j.memory[name]; first != nil {
		return first
	}
	resp := &metadatav1.CommitCombinedSegmentResponse{MetadataOffset: -1}
	if r.GetObject().GetRlmEpoch() != j.epoch || r.GetObject().GetSequence() <= j.last {
		resp.RlmEpochClosed = r.GetObject().GetRlmEpoch() != j.epoch
		for range r.GetRanges() {
			resp.Verdicts = append(resp.Verdicts, &metadatav1.RangeVerdict{Outcome: metadatav1.RangeOutcome_RANGE_OUTCOME_NOT_JUDGED})
		}
		return resp
	}
	for _, d := range r.GetRanges() {
		v := &metadatav1.RangeVerdict{}
		key := d.GetPartition().String()
		switch end := j.ends[key]; {
		case d.GetBaseOffset() == end:
			v.Outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED
			j.ends[key] = d.GetEndOffset()
			resp.MetadataOffset = 100 + r.GetObject().GetSequence()
		case d.GetBaseOffset() > end:
			v.Outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_GAP
		default:
			v.Outcome = metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED
		}
		v.ObjectEndOffset = j.ends[key]
		resp.Verdicts = append(resp.Verdicts, v)
	}
	if resp.GetMetadataOffset() >= 0 {
		j.last = r.GetObject().GetSequence()
		j.memory[name] = resp
		j.accepted = append(j.accepted, proto.CloneOf(r))
	}
	return resp
}

func (j *judge) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.epoch, j.last = j.epoch+1, 0
}

// fixture runs a combiner in the calling bubble.
type fixture struct {
	t        *testing.T
	judge    *judge
	store    *memstore.Store
	faults   *decorate.Injector
	c        *combiner.Combiner
	unusable chan int64
	cancel   context.CancelFunc
	done     chan error
}

func config() combiner.Config {
	return combiner.Config{
		RLMID: 3, Plan: planner.Config{InFlight: 2, Linger: 10 * time.Millisecond, MaxBytes: 1 << 20, MaxRanges: 100},
		BufferBytes: 8 << 20, PartitionCreditBytes: 1 << 20, StreamCreditBytes: 4 << 20, PutTimeout: 10 * time.Second,
	}
}

// start runs a combiner over memstore; wrap decorates the bare store.
func start(t *testing.T, change func(*combiner.Config), wrap func(objstore.Store) objstore.Store) *fixture {
	t.Helper()
	f := &fixture{t: t, judge: newJudge(41), store: memstore.New(memstore.Options{}), faults: decorate.NewInjector()}
	f.begin(change, wrap)
	return f
}

// again starts another instance over the same bucket and metadata.
func (f *fixture) again() *fixture {
	g := &fixture{t: f.t, judge: f.judge, store: f.store, faults: f.faults}
	g.begin(nil, nil)
	return g
}

func (f *fixture) begin(change func(*combiner.Config), wrap func(objstore.Store) objstore.Store) {
	t := f.t
	f.unusable, f.done = make(chan int64, 100), make(chan error, 1)
	cfg := config()
	if change != nil {
		change(&cfg)
	}
	bare := f.faults.Decorate(f.store)
	if wrap != nil {
		bare = wrap(bare)
	}
	store := decorate.Retry(decorate.RetryOptions{MaxAttempts: 3, Policy: backoff.Policy{Initial: time.Millisecond, Max: time.Millisecond}})(bare)
	var err error
	f.c, err = combiner.New(cfg, combiner.Deps{
		Store: store, Committer: f.judge, OnUnusable: func(e int64) { f.unusable <- e }, MetadataEnd: func() int64 { return 7 },
		Logger: slog.New(slog.DiscardHandler), Meter: noop.NewMeterProvider().Meter(""),
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	go func() { f.done <- f.c.Run(ctx) }()
	f.register()
}

// stop ends the combiner as a process's death would: nothing is finished.
func (f *fixture) stop() {
	f.cancel()
	require.ErrorIs(f.t, <-f.done, context.Canceled)
}

func (f *fixture) register() {
	f.judge.mu.Lock()
	epoch := f.judge.epoch
	f.judge.mu.Unlock()
	f.c.Registered(combiner.Identity{ClusterID: clusterID, Incarnation: walobjecttest.Incarnation, Epoch: epoch})
}

func (f *fixture) open() *combiner.Stream {
	s, err := f.c.Open(walobjecttest.Incarnation, 77)
	require.NoError(f.t, err)
	return s
}

// next is the next range of a partition's log.
func next(p *walobjecttest.Partition, run int64, size int) *remotelogv1.WalRange {
	d, data := p.Append(1, 2, size)
	return &remotelogv1.WalRange{Range: d, Run: run, Data: data}
}

func (f *fixture) send(s *combiner.Stream, r *remotelogv1.WalRange) {
	f.t.Helper()
	require.NoError(f.t, s.Append(context.Background(), r))
}

// verdicts waits for n verdicts, in virtual time.
func (f *fixture) verdicts(s *combiner.Stream, n int) []*remotelogv1.WalVerdict {
	f.t.Helper()
	var list []*remotelogv1.WalVerdict
	deadline := time.After(10 * time.Minute)
	for len(list) < n {
		select {
		case <-s.Ready():
			list = append(list, s.Take()...)
		case <-deadline:
			require.Fail(f.t, "verdicts missing", "%d of %d came", len(list), n)
		}
	}
	require.Len(f.t, list, n)
	return list
}

// read checks that every accepted range is in the bucket as it was sent.
func (f *fixture) readBack() int {
	f.t.Helper()
	n := 0
	for _, r := range f.judge.accepted {
		content := f.content(r.GetObject())
		require.EqualValues(f.t, len(content), r.GetSizeBytes())
		require.Equal(f.t, objstore.CRC32C(content), r.GetCrc32C())
		footer, err := walobject.ReadFooter(content, int64(len(content)))
		require.NoError(f.t, err)
		require.True(f.t, proto.Equal(footer.GetObject(), r.GetObject()))
		require.EqualValues(f.t, 3, footer.GetRlmId())
		for i, d := range r.GetRanges() {
			require.True(f.t, proto.Equal(d, footer.GetRanges()[i].GetRange()))
			require.NoError(f.t, walobject.VerifyRange(d, content[d.GetPosition():d.GetPosition()+d.GetLengthBytes()]))
			n++
		}
	}
	return n
}

func (f *fixture) content(ref *logv1.ObjectRef) []byte {
	f.t.Helper()
	r, err := f.store.OpenRange(context.Background(), walobject.Name(clusterID, ref), 0, objstore.ToEnd)
	require.NoError(f.t, err)
	content, err := io.ReadAll(r)
	require.NoError(f.t, err)
	return content
}

// names are the objects in the bucket.
func (f *fixture) names() (list []string) {
	for a, err := range objstore.List(context.Background(), f.store, "", "") {
		require.NoError(f.t, err)
		list = append(list, a.Name)
	}
	return list
}

// storeFunc replaces Create.
type storeFunc struct {
	objstore.Store
	create func(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error)
}

func (s storeFunc) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	return s.create(ctx, name, body)
}

var errLost = status.Error(codes.Unavailable, "the answer was lost")

func bubble(t *testing.T, fn func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, fn)
}
