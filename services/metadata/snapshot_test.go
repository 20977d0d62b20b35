package metadata_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/metadata/metadatatest"
	"github.com/braidlog/braid/services/metadata/state"
)

// often makes replicas take snapshots every few dozen entries.
func often(c *metadata.Config) {
	c.Snapshot.TailBytes = config.KiB
	c.Snapshot.Interval = config.Duration(time.Hour)
	c.Snapshot.CheckInterval = config.Duration(10 * time.Millisecond)
	c.RingEntries = 16 // old entries have to be read from etcd
}

func list(t *testing.T, ctx context.Context, c clients) *metadatav1.ListSnapshotsResponse { //nolint:revive // t first in tests
	t.Helper()
	var got *metadatav1.ListSnapshotsResponse
	var err error
	// A standby answers once it has applied the first entry.
	require.Eventually(t, func() bool {
		got, err = c.ListSnapshots(ctx, &metadatav1.ListSnapshotsRequest{})
		return !rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_NOT_READY)
	}, 10*time.Second, 5*time.Millisecond)
	require.NoError(t, err)
	return got
}

// use sends everything to a replica from now on.
func (f *fed) use(c clients) {
	f.c = c
	for _, l := range f.leaders {
		l.c = c
	}
}

// untilTrimmed commits until the log begins above an offset.
func (f *fed) untilTrimmed(t *testing.T, above int64) *metadatav1.ListSnapshotsResponse {
	t.Helper()
	for f.ctx.Err() == nil {
		if got := list(t, f.ctx, f.c); got.GetLogStartOffset() > above {
			return got
		}
		for range 10 {
			f.commit("a")
		}
	}
	require.FailNow(t, "never trimmed")
	return nil
}

// fetch reads a whole snapshot in pieces of at most step bytes.
func fetch(t *testing.T, ctx context.Context, c clients, id *metadatav1.SnapshotId, step int32) []byte { //nolint:revive // t first in tests
	t.Helper()
	var out []byte
	for {
		got, err := c.FetchSnapshot(ctx, &metadatav1.FetchSnapshotRequest{SnapshotId: id, Position: int64(len(out)), MaxBytes: step})
		require.NoError(t, err)
		require.EqualValues(t, len(out), got.GetPosition())
		require.Equal(t, objstore.CRC32C(got.GetData()), got.GetCrc32C())
		require.Equal(t, id.GetEndOffset(), got.GetSnapshotId().GetEndOffset())
		require.NotZero(t, got.GetSnapshotId().GetIncarnation())
		if step > 0 {
			require.LessOrEqual(t, len(got.GetData()), int(step))
		}
		out = append(out, got.GetData()...)
		require.Equal(t, int64(len(out)) < got.GetSizeBytes(), got.GetContinue())
		if !got.GetContinue() {
			require.EqualValues(t, len(out), got.GetSizeBytes())
			sum := sha256.Sum256(out[:len(out)-state.SnapshotSumSize])
			require.Equal(t, sum[:], got.GetSha256())
			return out
		}
	}
}

// streamError is what ends a stream.
func streamError(stream interface {
	Recv() (*metadatav1.WatchMetadataResponse, error)
}) error {
	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
}

func TestSnapshotsAreTakenTheLogIsTrimmedAndReadersComeBack(t *testing.T) {
	w := &witness{}
	f := feed(t, metadatatest.Options{Change: often, Disks: true, WrapKV: func(kv clientv3.KV) clientv3.KV {
		return &recordedKV{KV: kv, w: w}
	}}, "a")
	f.untilTrimmed(t, 60)
	got := f.untilTrimmed(t, 120)
	require.Len(t, got.GetSnapshots(), 2)
	require.GreaterOrEqual(t, got.GetSnapshots()[0].GetSnapshotId().GetEndOffset(), got.GetLogStartOffset(), "I10")

	// etcd holds nothing below the start, the bucket two objects.
	require.Eventually(t, func() bool {
		start := list(t, f.ctx, f.c).GetLogStartOffset()
		keys, err := clientOf(t, f).Get(f.ctx, "/braid/log/", clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(1))
		require.NoError(t, err)
		page, _, err := f.cluster.Store.ListPage(f.ctx, f.cluster.Controller().ClusterID()+"/meta/", "", 10)
		require.NoError(t, err)
		return string(keys.Kvs[0].Key) == fmt.Sprintf("/braid/log/%020d", start) && len(page) == 2
	}, 20*time.Second, 10*time.Millisecond)

	// In steps of 64 KiB, of one byte, and as the server likes.
	snapshots := list(t, f.ctx, f.c).GetSnapshots()
	for _, s := range snapshots {
		whole := fetch(t, f.ctx, f.c, s.GetSnapshotId(), 64<<10)
		require.Len(t, whole, int(s.GetSizeBytes()))
		st, err := state.Decode(bytes.NewReader(whole))
		require.NoError(t, err)
		end := s.GetSnapshotId().GetEndOffset()
		require.Equal(t, w.state(t, end).Digest(), st.Digest())
		require.Equal(t, whole, fetch(t, f.ctx, f.c, s.GetSnapshotId(), 1))
		require.Equal(t, whole, fetch(t, f.ctx, f.c, &metadatav1.SnapshotId{EndOffset: end, ControllerEpoch: s.GetSnapshotId().GetControllerEpoch()}, 0))
	}

	// A reader below the start is told of a snapshot, replaces its state by it, and
	// reads on; from the older one too.
	f.commit("a")
	watch := func(from *metadatav1.MetadataPosition, filter metadatav1.MetadataFilter) metadatav1.SnapshotService_WatchMetadataClient {
		stream, err := f.c.WatchMetadata(f.ctx, &metadatav1.WatchMetadataRequest{From: from, Filter: filter})
		require.NoError(t, err)
		return stream
	}
	begun := w.state(t, 5).Position()
	var told *metadatav1.SnapshotId
	for _, from := range []*metadatav1.MetadataPosition{{}, begun} {
		refused := refusal(t, streamError(watch(from, metadatav1.MetadataFilter_METADATA_FILTER_ALL)),
			errorsv1.ErrorReason_ERROR_REASON_METADATA_OFFSET_OUT_OF_RANGE)
		require.Equal(t, codes.OutOfRange, refused.Code)
		told = &metadatav1.SnapshotId{}
		told.EndOffset, _ = refused.Int("snapshot_end_offset")
		told.ControllerEpoch, _ = refused.Int("snapshot_controller_epoch")
		inc, _ := refused.Int("incarnation")
		told.Incarnation = uint32(inc)
		start, _ := refused.Int("log_start")
		require.Positive(t, start)
		require.GreaterOrEqual(t, told.GetEndOffset(), start)
	}
	info, err := f.c.GetCluster(f.ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	want := w.state(t, info.GetMetadataOffset()).Digest()
	for _, id := range append([]*metadatav1.SnapshotId{told}, snapshots[0].GetSnapshotId()) {
		st, err := state.Decode(bytes.NewReader(fetch(t, f.ctx, f.c, id, 0)))
		require.NoError(t, err)
		stream := watch(st.Position(), metadatav1.MetadataFilter_METADATA_FILTER_ALL)
		for st.EndOffset() < info.GetMetadataOffset() {
			m, err := stream.Recv()
			require.NoError(t, err)
			require.Nil(t, m.GetReset_())
			if e := m.GetEntry(); e != nil {
				require.NoError(t, st.Apply(e), "no event missed, none doubled")
			}
		}
		require.Equal(t, want, st.Digest())
	}
	// One that needs no ranges is reset in band, as before; so is one of segments.
	for _, from := range []*metadatav1.MetadataPosition{{}, begun} {
		m, err := watch(from, metadatav1.MetadataFilter_METADATA_FILTER_MEMBERSHIP).Recv()
		require.NoError(t, err)
		require.NotNil(t, m.GetReset_())
	}
	segments, err := f.c.WatchSegments(f.ctx)
	require.NoError(t, err)
	request := add("a")
	request.Resume = begun
	require.NoError(t, segments.Send(request))
	m := newMirror(t, segments)
	m.until("reset", func() bool { return m.resets == 1 })
	assert.Equal(t, f.leaders["a"].end, m.ends["a/0"])
}

func clientOf(t *testing.T, f *fed) *clientv3.Client {
	t.Helper()
	return f.cluster.Controller().Etcd
}

// B139.
func TestFetchSnapshotRefusesWhatIsNotThere(t *testing.T) {
	f := feed(t, metadatatest.Options{Change: often, Disks: true}, "a")
	f.untilTrimmed(t, 0)
	s := list(t, f.ctx, f.c).GetSnapshots()[0]
	id, size := s.GetSnapshotId(), s.GetSizeBytes()
	other := func(change func(*metadatav1.SnapshotId)) *metadatav1.SnapshotId {
		out := proto.Clone(id).(*metadatav1.SnapshotId)
		change(out)
		return out
	}
	for name, try := range map[string]struct {
		request *metadatav1.FetchSnapshotRequest
		code    codes.Code
		reason  errorsv1.ErrorReason
	}{
		"no id":              {&metadatav1.FetchSnapshotRequest{}, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		"negative position":  {&metadatav1.FetchSnapshotRequest{SnapshotId: id, Position: -1}, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		"negative max bytes": {&metadatav1.FetchSnapshotRequest{SnapshotId: id, MaxBytes: -1}, codes.InvalidArgument, errorsv1.ErrorReason_ERROR_REASON_INVALID_FIELD},
		"behind the end":     {&metadatav1.FetchSnapshotRequest{SnapshotId: id, Position: size + 1}, codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_POSITION_OUT_OF_RANGE},
		"far behind the end": {&metadatav1.FetchSnapshotRequest{SnapshotId: id, Position: 1 << 62}, codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_POSITION_OUT_OF_RANGE},
		"another end": {&metadatav1.FetchSnapshotRequest{SnapshotId: other(func(i *metadatav1.SnapshotId) { i.EndOffset++ })},
			codes.NotFound, errorsv1.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND},
		"another epoch": {&metadatav1.FetchSnapshotRequest{SnapshotId: other(func(i *metadatav1.SnapshotId) { i.ControllerEpoch++ })},
			codes.NotFound, errorsv1.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND},
		"another incarnation": {&metadatav1.FetchSnapshotRequest{SnapshotId: other(func(i *metadatav1.SnapshotId) { i.Incarnation++ })},
			codes.NotFound, errorsv1.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND},
	} {
		_, err := f.c.FetchSnapshot(f.ctx, try.request)
		require.Equal(t, try.code, refusal(t, err, try.reason).Code, name)
	}
	got, err := f.c.FetchSnapshot(f.ctx, &metadatav1.FetchSnapshotRequest{SnapshotId: id, Position: size})
	require.NoError(t, err)
	assert.Empty(t, got.GetData())
	assert.False(t, got.GetContinue(), "empty and complete")
	assert.Equal(t, size, got.GetSizeBytes())

	// An interrupted fetch goes on where it was, also at a replica that was started
	// again meanwhile.
	first, err := f.c.FetchSnapshot(f.ctx, &metadatav1.FetchSnapshotRequest{SnapshotId: id, MaxBytes: 100})
	require.NoError(t, err)
	require.NoError(t, f.cluster.Controller().Stop())
	f.cluster.Restart(f.cluster.Replicas()[0])
	f.use(of(f.cluster.Controller()))
	rest, err := f.c.FetchSnapshot(f.ctx, &metadatav1.FetchSnapshotRequest{SnapshotId: id, Position: 100})
	require.NoError(t, err)
	require.Equal(t, first.GetSha256(), rest.GetSha256())
	_, err = state.Decode(io.MultiReader(bytes.NewReader(first.GetData()), bytes.NewReader(rest.GetData())))
	require.NoError(t, err)
}

// same requires that two replicas tell the same.
func same(t *testing.T, ctx context.Context, a, b clients) { //nolint:revive // t first in tests
	t.Helper()
	require.NoError(t, b.waitFor(ctx, a))
	require.NoError(t, a.waitFor(ctx, b))
	for _, ask := range []func(clients) (proto.Message, error){
		func(c clients) (proto.Message, error) { return c.GetCluster(ctx, &metadatav1.GetClusterRequest{}) },
		func(c clients) (proto.Message, error) { return c.ListTopics(ctx, &metadatav1.ListTopicsRequest{}) },
		func(c clients) (proto.Message, error) {
			return c.GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: "a"}})
		},
		func(c clients) (proto.Message, error) {
			return c.ListSegments(ctx, &metadatav1.ListSegmentsRequest{Topic: "a", PageSize: 10_000})
		},
	} {
		want, err := ask(a)
		require.NoError(t, err)
		got, err := ask(b)
		require.NoError(t, err)
		require.True(t, proto.Equal(want, got), "%v\n%v", want, got)
	}
}

// A replica is away while the log is trimmed, and topics are deleted (B132); its
// disk is old, empty, or damaged in any way (B128, B140); it comes back from its
// disk, a peer, or the bucket, with exactly the state of the others, or not at
// all (B134).
func TestAReplicaComesBackBehindTheTrim(t *testing.T) {
	f := feed(t, metadatatest.Options{Replicas: 2, Change: often, Disks: true}, "a", "b")
	leading := f.cluster.Controller()
	id := 1
	if f.cluster.Replicas()[0] == leading {
		id = 2
	}
	away := f.cluster.Replicas()[id-1]
	for len(list(t, f.ctx, of(away)).GetSnapshots()) < 2 {
		f.commit("b")
	}
	end := list(t, f.ctx, of(away)).GetLogEndOffset()
	require.NoError(t, away.Stop())
	_, err := f.c.DeleteTopic(f.ctx, &metadatav1.DeleteTopicRequest{Name: "b"})
	require.NoError(t, err)
	f.untilTrimmed(t, end)

	dir := filepath.Join(f.cluster.DataDir(id), "snapshots")
	files := func() []string {
		names, err := filepath.Glob(filepath.Join(dir, "*.snapshot"))
		require.NoError(t, err)
		return names
	}
	edit := func(fn func(b []byte) []byte) {
		for _, name := range files() {
			b, err := os.ReadFile(name)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(name, fn(b), 0o600))
		}
	}
	r := rand.New(rand.NewPCG(8, 8))
	type step struct {
		name   string
		before func()
	}
	steps := []step{
		{"with old snapshots", func() {}},
		{"with current ones", func() {}},
		{"with an empty disk", func() { require.NoError(t, os.RemoveAll(dir)) }},
		{"with bits flipped", func() {
			edit(func(b []byte) []byte { b[r.IntN(len(b))] ^= 0x10; return b })
		}},
		{"with nothing in the files", func() { edit(func([]byte) []byte { return nil }) }},
		{"with a file under another's name", func() {
			names := files()
			b, err := os.ReadFile(names[0])
			require.NoError(t, err)
			for _, n := range names[1:] {
				require.NoError(t, os.WriteFile(n, b, 0o600))
			}
		}},
	}
	for range 4 {
		steps = append(steps, step{"cut short", func() { edit(func(b []byte) []byte { return b[:r.IntN(len(b))] }) }})
	}
	for _, s := range steps {
		s.before()
		away = f.cluster.Restart(away)
		same(t, f.ctx, f.c, of(away))
		got := list(t, f.ctx, of(away))
		require.NotEmpty(t, got.GetSnapshots(), s.name)
		require.GreaterOrEqual(t, got.GetSnapshots()[0].GetSnapshotId().GetEndOffset(), got.GetLogStartOffset(), s.name)
		_, err := of(away).GetTopic(f.ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: "b"}})
		requireReason(t, err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION)
		require.NoError(t, away.Stop(), s.name)
	}

	// Nobody else is alive: the bucket has them.
	require.NoError(t, leading.Stop())
	require.NoError(t, os.RemoveAll(dir))
	away = f.cluster.Restart(away)
	f.use(of(f.cluster.Controller()))
	f.commit("a")
	segments, err := f.c.ListSegments(f.ctx, &metadatav1.ListSegmentsRequest{Topic: "a", PageSize: 10_000})
	require.NoError(t, err)
	require.Equal(t, f.leaders["a"].end, segments.GetObjectEndOffset())
	require.Len(t, segments.GetRanges(), int(f.leaders["a"].end/10))
	require.NoError(t, away.Stop())

	// A damaged one in the bucket is passed over for the other; where none is sound
	// the replica refuses to serve.
	damaged := 0
	for a, err := range objstore.List(f.ctx, f.cluster.Store, away.ClusterID()+"/meta/", "") {
		require.NoError(t, err)
		require.NoError(t, f.cluster.Store.Delete(f.ctx, a.Name, objstore.AnyGeneration))
		_, err = f.cluster.Store.Create(f.ctx, a.Name, objstore.NewParts([]byte("no snapshot")))
		require.NoError(t, err)
		damaged++
	}
	require.NoError(t, os.RemoveAll(dir))
	_, err = f.cluster.Build(f.ctx, f.cluster.Config(id), nil)
	require.ErrorContains(t, err, "no sound snapshot")
	assert.GreaterOrEqual(t, damaged, 2, "the two newest are kept, older ones go a moment later")
}

// A replica that is cut off from etcd while the log is trimmed and compacted
// notices by itself, without a restart.
func TestARunningReplicaThatWasCutOffCatchesUp(t *testing.T) {
	var relays []*relay
	f := feed(t, metadatatest.Options{Replicas: 2, Disks: true, Change: func(c *metadata.Config) {
		often(c)
		c.LeaseTTL = config.Duration(time.Second)
	}, WrapEtcd: func(c *clientv3.Config) {
		r := newRelay(t, strings.TrimPrefix(c.Endpoints[0], "http://"))
		relays = append(relays, r)
		c.Endpoints = []string{"http://" + r.address()}
	}}, "a")
	leading := f.cluster.Controller()
	at := 0
	if f.cluster.Replicas()[0] == leading {
		at = 1
	}
	other := f.cluster.Replicas()[at]
	require.NoError(t, of(other).waitFor(f.ctx, f.c))
	end := list(t, f.ctx, of(other)).GetLogEndOffset()
	// It follows a stream meanwhile, which must not skip anything silently.
	stream, err := of(other).WatchMetadata(f.ctx, &metadatav1.WatchMetadataRequest{
		From: &metadatav1.MetadataPosition{}, Filter: metadatav1.MetadataFilter_METADATA_FILTER_ALL,
	})
	require.NoError(t, err)
	relays[at].cut()
	f.untilTrimmed(t, end+100)
	require.Less(t, list(t, f.ctx, of(other)).GetLogEndOffset(), end+100)
	relays[at].heal()
	same(t, f.ctx, f.c, of(other))
	require.True(t, other.Running())
	got := list(t, f.ctx, of(other))
	require.GreaterOrEqual(t, got.GetSnapshots()[0].GetSnapshotId().GetEndOffset(), got.GetLogStartOffset())
	next := int64(0)
	for err == nil {
		var m *metadatav1.WatchMetadataResponse
		if m, err = stream.Recv(); err == nil && m.GetEntry() != nil {
			require.Equal(t, next, m.GetEntry().GetOffset())
			next++
		}
	}
	reason := rpcerr.Reason(err)
	require.Contains(t, []errorsv1.ErrorReason{
		errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, errorsv1.ErrorReason_ERROR_REASON_METADATA_OFFSET_OUT_OF_RANGE,
	}, reason, "%v", err)
}

// Controllers change all the time while the log is fed and trimmed (B136): it
// stays short, and a replica that begins with a snapshot has the state of the
// whole log.
func TestControllersChangeWhileTheLogIsTrimmed(t *testing.T) {
	w := &witness{}
	f := feed(t, metadatatest.Options{Replicas: 3, Change: often, Disks: true, WrapKV: func(kv clientv3.KV) clientv3.KV {
		return &recordedKV{KV: kv, w: w}
	}}, "a")
	for round := range 6 {
		start := list(t, f.ctx, f.c).GetLogStartOffset()
		f.untilTrimmed(t, start)
		old := f.cluster.Controller()
		require.NoError(t, old.Stop(), "round %d", round)
		f.use(of(f.cluster.Controller()))
		f.commit("a")
		f.cluster.Restart(old)
	}
	info, err := f.c.GetCluster(f.ctx, &metadatav1.GetClusterRequest{})
	require.NoError(t, err)
	got := list(t, f.ctx, f.c)
	require.Less(t, info.GetMetadataOffset()-got.GetLogStartOffset(), info.GetMetadataOffset()*2/3, "the log stays short")
	fresh := f.cluster.Add()
	same(t, f.ctx, f.c, of(fresh))
	snapshots := list(t, f.ctx, of(fresh)).GetSnapshots()
	require.NotEmpty(t, snapshots)
	st, err := state.Decode(bytes.NewReader(fetch(t, f.ctx, of(fresh), snapshots[0].GetSnapshotId(), 0)))
	require.NoError(t, err)
	require.Equal(t, w.state(t, st.EndOffset()).Digest(), st.Digest())
}

// F12: etcd was restored from a backup. A snapshot on the disk or in the bucket
// that the log does not lead to stops the replica, also once the log has grown
// past it.
func TestAReplicaRefusesARolledBackEtcd(t *testing.T) {
	f := feed(t, metadatatest.Options{Change: often, Disks: true}, "a")
	got := f.untilTrimmed(t, 0)
	newest := got.GetSnapshots()[0].GetSnapshotId()
	require.Eventually(t, func() bool {
		for a, err := range objstore.List(f.ctx, f.cluster.Store, f.cluster.Controller().ClusterID()+"/meta/", "") {
			require.NoError(t, err)
			if strings.Contains(a.Name, fmt.Sprintf("%020d", newest.GetEndOffset())) {
				return true
			}
		}
		return false
	}, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, f.cluster.Controller().Stop())
	etcd := clientOfStopped(t, f)
	back := newest.GetEndOffset() - 3
	for o := back; o < newest.GetEndOffset()+1_000; o++ {
		_, err := etcd.Delete(f.ctx, fmt.Sprintf("/braid/log/%020d", o))
		require.NoError(t, err)
	}
	_, err := etcd.Put(f.ctx, "/braid/end", fmt.Sprint(back))
	require.NoError(t, err)
	refuse := func(what string) {
		t.Helper()
		_, err := f.cluster.Build(f.ctx, f.cluster.Config(1), nil)
		require.ErrorContains(t, err, "rolled back", what)
		dir := filepath.Join(f.cluster.DataDir(1), "snapshots")
		aside := dir + ".aside"
		require.NoError(t, os.Rename(dir, aside))
		_, err = f.cluster.Build(f.ctx, f.cluster.Config(1), nil)
		require.ErrorContains(t, err, "rolled back", what+", without the disk")
		require.NoError(t, os.RemoveAll(dir))
		require.NoError(t, os.Rename(aside, dir))
	}
	refuse("the log is shorter")
	// Another controller has written past the snapshot's end.
	for o := back; o < newest.GetEndOffset()+5; o++ {
		b, err := proto.Marshal(&metadatav1.Entry{
			Offset: o, Incarnation: newest.GetIncarnation(), ControllerEpoch: back, FeatureLevel: 1, WriteId: []byte("x"),
			Events: []*metadatav1.Event{{Kind: &metadatav1.Event_ControllerElected{ControllerElected: &metadatav1.ControllerElected{MetadataId: 9}}}},
		})
		require.NoError(t, err)
		_, err = etcd.Put(f.ctx, fmt.Sprintf("/braid/log/%020d", o), string(b))
		require.NoError(t, err)
	}
	_, err = etcd.Put(f.ctx, "/braid/end", fmt.Sprint(newest.GetEndOffset()+5))
	require.NoError(t, err)
	refuse("the log is another one")
}

func clientOfStopped(t *testing.T, f *fed) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: f.cluster.Etcd.Endpoints(), Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// X2: a bucket that is away stops no start and no election of a cluster that has
// begun.
func TestAReplicaStartsWithoutTheBucket(t *testing.T) {
	mem := memstore.New(memstore.Options{})
	injector := decorate.NewInjector()
	f := feed(t, metadatatest.Options{Change: func(c *metadata.Config) {
		often(c)
		c.Store.StartTimeout = config.Duration(200 * time.Millisecond)
	}, Disks: true, Store: injector.Decorate(mem)}, "a")
	f.untilTrimmed(t, 0)
	injector.Set(decorate.Fault{Count: -1})
	require.NoError(t, f.cluster.Controller().Stop())
	f.cluster.Restart(f.cluster.Replicas()[0])
	f.use(of(f.cluster.Controller()))
	f.commit("a")
	injector.Set()
	f.untilTrimmed(t, list(t, f.ctx, f.c).GetLogStartOffset())
}

// F22: as etcd fills, commits stop first, then changes of topics, then elections;
// and when there is space again all goes on.
func TestCommandsStopAsEtcdFills(t *testing.T) {
	const quota = 8 << 20
	f := feed(t, metadatatest.Options{Change: func(c *metadata.Config) {
		c.Etcd.Quota.Bytes = quota
		c.Etcd.Quota.Interval = config.Duration(20 * time.Millisecond)
	}}, "a")
	etcd := clientOf(t, f)
	used := func() int64 {
		// A snapshot makes etcd commit what it counts only then.
		ctx, cancel := context.WithCancel(f.ctx)
		defer cancel() // or it goes on, and keeps every page that it could read
		backup, err := etcd.Snapshot(ctx)
		require.NoError(t, err)
		_, err = io.CopyN(io.Discard, backup, 1)
		require.NoError(t, err)
		require.NoError(t, backup.Close())
		s, err := etcd.Status(f.ctx, f.cluster.Etcd.Endpoints()[0])
		require.NoError(t, err)
		return s.DbSizeInUse
	}
	n := 0
	fill := func(percent int64) {
		for used() < quota*percent/100 {
			n++ // 0.4 %
			_, err := etcd.Put(f.ctx, fmt.Sprintf("/junk/%06d", n), strings.Repeat("x", 32<<10))
			require.NoError(t, err)
		}
	}
	l := f.leaders["a"]
	commands := map[string]func() error{
		"commit": func() error {
			end, hash := l.end, l.hash
			l.seq = f.seq
			if _, err := f.c.CommitCombinedSegment(f.ctx, l.request(f.rlm, 1, 0)); err != nil {
				l.end, l.hash = end, hash
				return err
			}
			f.seq++
			return nil
		},
		"topic": func() error {
			_, err := f.c.UpdateTopic(f.ctx, &metadatav1.UpdateTopicRequest{Name: "a", Set: map[string]string{"producer.expiry": fmt.Sprintf("%dm", 1+time.Now().UnixNano()%100_000/1000)}})
			return err
		},
		"elect": func() error {
			_, err := f.c.RegisterRemoteLogManager(f.ctx, &metadatav1.RegisterRemoteLogManagerRequest{RlmId: 77, Address: "127.0.0.1:1"})
			return err
		},
	}
	expect := func(stopped ...string) {
		t.Helper()
		for name, command := range commands {
			stops := false
			for _, s := range stopped {
				stops = stops || s == name
			}
			require.Eventually(t, func() bool {
				err := command()
				if !stops {
					return err == nil
				}
				got, ok := rpcerr.From(err)
				return ok && got.Code == codes.ResourceExhausted && got.Reason == errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED &&
					got.RetryDelay > 0 && got.Metadata["quota"] == fmt.Sprint(quota)
			}, 10*time.Second, 10*time.Millisecond, "%s, expected to be stopped: %v", name, stopped)
		}
	}
	expect()
	fill(62)
	expect("commit")
	fill(77)
	expect("commit", "topic")
	fill(92)
	expect("commit", "topic", "elect")
	require.True(t, f.cluster.Controller().Running())
	resp, err := etcd.Delete(f.ctx, "/junk/", clientv3.WithPrefix())
	require.NoError(t, err)
	_, err = etcd.Compact(f.ctx, resp.Header.GetRevision(), clientv3.WithCompactPhysical())
	require.NoError(t, err)
	expect()
}
