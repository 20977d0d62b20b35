package remote_test

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/internal/rlmpool"
)

var table = crc32.MakeTable(crc32.Castagnoli)

// manager is a hand-played remote-log manager.
type manager struct {
	remotelogv1.UnimplementedRemoteLogServiceServer
	data  []byte
	err   error
	calls atomic.Int64
}

func (m *manager) ReadWal(req *remotelogv1.ReadWalRequest, s grpc.ServerStreamingServer[remotelogv1.ReadWalResponse]) error {
	m.calls.Add(1)
	if m.err != nil {
		return m.err
	}
	data := m.data[min(int(req.GetPosition()), len(m.data)):]
	data = data[:min(int(req.GetLengthBytes()), len(data))]
	for len(data) > 0 {
		n := min(len(data), 50)
		if err := s.Send(&remotelogv1.ReadWalResponse{Data: data[:n]}); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// network starts managers r:1, r:2… in zone a and returns a reader of that zone.
func network[M remotelogv1.RemoteLogServiceServer](t *testing.T, cache int64, managers ...M) *remote.Reader {
	t.Helper()
	listeners := map[string]*bufconn.Listener{}
	img := &metadatav1.MetadataImage{Position: &metadatav1.MetadataPosition{Offset: 1}, Cluster: &metadatav1.GetClusterResponse{ClusterId: "c"}}
	for i, m := range managers {
		address := fmt.Sprintf("r:%d", i+1)
		l := bufconn.Listen(1 << 16)
		listeners[address] = l
		s := grpc.NewServer()
		remotelogv1.RegisterRemoteLogServiceServer(s, m)
		done := make(chan struct{})
		go func() { defer close(done); _ = s.Serve(l) }()
		t.Cleanup(func() { s.Stop(); <-done })
		img.Cluster.RemoteLogManagers = append(img.Cluster.RemoteLogManagers, &metadatav1.RemoteLogManager{RlmId: int32(i + 1), Address: address, Zone: "a", Open: true})
	}
	tr := cluster.NewTracker()
	_, err := tr.Reset(img)
	require.NoError(t, err)
	pool := rlmpool.New(func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) { return listeners[a].DialContext(ctx) }))
	})
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	return remote.NewReader("a", pool, tr.View, cache)
}

var who = lineage.Lineage{{Leadership: lineage.Leadership{Incarnation: 7, LeaderEpoch: 3}}}

// committed makes two batches at [10, 12) and their range at position 5 of an
// object.
func committed(t *testing.T) ([]byte, remote.Located) {
	t.Helper()
	prev := chainhash.Hash{9}
	var data []byte
	hash := prev
	for i := range 2 {
		b := record.NewBuilder(record.CodecNone)
		require.NoError(t, b.Append(record.Record{Value: fmt.Appendf(nil, "value %d", i)}))
		out, batch, err := b.Build(nil)
		require.NoError(t, err)
		batch.SetBaseOffset(int64(10 + i))
		batch.SetLeaderEpoch(3)
		hash = chainhash.Next(hash, out)
		data = append(data, out...)
	}
	object := append([]byte("12345"), data...)
	return object, remote.Located{BaseHash: prev, BaseKnown: true, Range: remote.Range{
		Base: 10, End: 12, Position: 5, Length: int64(len(data)), CRC: crc32.Checksum(data, table), EndHash: hash,
		Incarnation: 7, RLMEpoch: 1, Sequence: 1, Attempt: 1,
	}}
}

func TestRangesAreVerifiedBeforeTheyAreUsed(t *testing.T) {
	object, rg := committed(t)
	flipped := func(i int) []byte {
		out := append([]byte(nil), object...)
		out[i] ^= 1
		return out
	}
	fixed := func(data []byte) remote.Located {
		out := rg
		out.CRC = crc32.Checksum(data[5:], table)
		return out
	}
	short := rg
	short.Length += 10
	other := rg
	other.BaseHash = chainhash.Hash{1}
	longer := rg
	longer.End = 13
	tests := map[string]struct {
		object []byte
		rg     remote.Located
		epochs lineage.Lineage
		ok     bool
	}{
		"intact":                                 {object, rg, who, true},
		"a flipped bit":                          {flipped(80), rg, who, false},
		"a flipped base offset, right range CRC": {flipped(12), fixed(flipped(12)), who, false},
		"another leader epoch":                   {object, rg, lineage.Lineage{{Leadership: lineage.Leadership{Incarnation: 7, LeaderEpoch: 4}}}, false},
		"a short object":                         {object, short, who, false},
		"another history below":                  {object, other, who, false},
		"fewer offsets than committed":           {object, longer, who, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m := &manager{data: tt.object}
			r := network(t, 1<<20, m)
			data, err := r.Fetch(t.Context(), tt.rg, tt.epochs)
			if !tt.ok {
				var damage *remote.DamageError
				require.ErrorAs(t, err, &damage)
				require.NotErrorIs(t, err, remote.ErrUnavailable)
				return
			}
			require.NoError(t, err)
			require.Equal(t, object[5:], data)
			_, err = r.Fetch(t.Context(), tt.rg, tt.epochs)
			require.NoError(t, err)
			require.EqualValues(t, 1, m.calls.Load(), "verified ranges are kept")
		})
	}
}

// I11: not reachable, not there and damaged are three different things.
func TestWaysNotToGetBytesStayApart(t *testing.T) {
	object, rg := committed(t)
	good := func() *manager { return &manager{data: object} }
	bad := func(c codes.Code) *manager { return &manager{err: status.Error(c, "no")} }
	tests := map[string]struct {
		managers []*manager
		want     error
		damage   bool
	}{
		"nobody":                             {nil, remote.ErrNoManager, false},
		"all down":                           {[]*manager{bad(codes.Unavailable), bad(codes.DeadlineExceeded)}, remote.ErrUnavailable, false},
		"one down":                           {[]*manager{bad(codes.Unavailable), good()}, nil, false},
		"gone":                               {[]*manager{bad(codes.NotFound), bad(codes.NotFound)}, remote.ErrNotFound, false},
		"one says damaged, the other has it": {[]*manager{bad(codes.DataLoss), good()}, nil, false},
		"both say damaged":                   {[]*manager{bad(codes.DataLoss), bad(codes.DataLoss), good()}, nil, true},
		"damaged, and nobody to ask":         {[]*manager{bad(codes.DataLoss), bad(codes.Unavailable)}, nil, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if name == "both say damaged" {
				tt.managers = tt.managers[:2]
			}
			_, err := network(t, 0, tt.managers...).Fetch(t.Context(), rg, who)
			var damage *remote.DamageError
			switch {
			case tt.damage:
				require.ErrorAs(t, err, &damage)
				require.EqualValues(t, 10, damage.Range.Base)
			case tt.want == nil:
				require.NoError(t, err)
			default:
				require.ErrorIs(t, err, tt.want)
			}
		})
	}
}

// chorus answers for footers only when several calls are there at once.
type chorus struct {
	remotelogv1.UnimplementedRemoteLogServiceServer
	singers *sync.WaitGroup
	sizes   chan int
}

func (c *chorus) ReadRangeFooters(_ context.Context, req *remotelogv1.ReadRangeFootersRequest) (*remotelogv1.ReadRangeFootersResponse, error) {
	c.sizes <- len(req.GetRanges())
	c.singers.Done()
	c.singers.Wait()
	resp := &remotelogv1.ReadRangeFootersResponse{}
	for _, l := range req.GetRanges() {
		resp.Footers = append(resp.Footers, &storagev1.RangeFooter{Range: &logv1.RangeDescriptor{BaseOffset: l.GetBaseOffset(), EndOffset: l.GetBaseOffset() + 10}})
	}
	return resp, nil
}

func TestFootersAreAskedForInSeveralCallsAtOnce(t *testing.T) {
	var singers sync.WaitGroup
	singers.Add(4)
	c := &chorus{singers: &singers, sizes: make(chan int, 4)}
	var ranges []remote.Range
	for i := range int64(250) {
		ranges = append(ranges, remote.Range{Base: 10 * i, End: 10*i + 10, ObjectSize: 1000, Incarnation: 7, RLMEpoch: 1, Sequence: i + 1, Attempt: 1})
	}
	footers, lost, err := network(t, 0, c, c).Footers(t.Context(), &logv1.TopicIdPartition{TopicId: "t"}, ranges)
	require.NoError(t, err)
	require.Empty(t, lost)
	require.Len(t, footers, len(ranges))
	for i, f := range footers {
		require.Equal(t, ranges[i].Base, f.GetRange().GetBaseOffset())
	}
	sum := 0
	for range 4 {
		n := <-c.sizes
		require.LessOrEqual(t, n, 256, "a manager takes no more")
		sum += n
	}
	require.Equal(t, len(ranges), sum)

	_, _, err = network(t, 0, &manager{}).Footers(t.Context(), &logv1.TopicIdPartition{TopicId: "t"}, ranges)
	require.ErrorIs(t, err, remote.ErrUnavailable)
}

// librarian answers for footers, but not for some sequences.
type librarian struct {
	remotelogv1.UnimplementedRemoteLogServiceServer
	bad   map[int64]codes.Code
	calls atomic.Int64
}

func (l *librarian) ReadRangeFooters(_ context.Context, req *remotelogv1.ReadRangeFootersRequest) (*remotelogv1.ReadRangeFootersResponse, error) {
	l.calls.Add(1)
	resp := &remotelogv1.ReadRangeFootersResponse{}
	for _, r := range req.GetRanges() {
		if c, ok := l.bad[r.GetObject().GetSequence()]; ok {
			return nil, status.Error(c, "no")
		}
		resp.Footers = append(resp.Footers, &storagev1.RangeFooter{Range: &logv1.RangeDescriptor{BaseOffset: r.GetBaseOffset(), EndOffset: r.GetBaseOffset() + 10}})
	}
	return resp, nil
}

// A lost object costs its own ranges; a store that can't be asked loses nothing.
func TestLostFootersAreToldApart(t *testing.T) {
	var ranges []remote.Range
	for i := range int64(250) {
		ranges = append(ranges, remote.Range{Base: 10 * i, End: 10*i + 10, ObjectSize: 1000, Incarnation: 7, RLMEpoch: 1, Sequence: i + 1, Attempt: 1})
	}
	l := &librarian{bad: map[int64]codes.Code{3: codes.NotFound, 100: codes.DataLoss, 101: codes.NotFound, 250: codes.DataLoss}}
	footers, lost, err := network(t, 0, l).Footers(t.Context(), &logv1.TopicIdPartition{TopicId: "t"}, ranges)
	require.NoError(t, err)
	var at []int
	for _, loss := range lost {
		at = append(at, loss.Index)
		require.Nil(t, footers[loss.Index])
		var damage *remote.DamageError
		if errors.As(loss.Err, &damage) {
			require.Equal(t, ranges[loss.Index], damage.Range)
			require.Contains(t, loss.Err.Error(), ranges[loss.Index].ObjectName("c"))
		} else {
			require.ErrorIs(t, loss.Err, remote.ErrNotFound)
		}
	}
	require.Equal(t, []int{2, 99, 100, 249}, at)
	for i, f := range footers {
		if f != nil {
			require.Equal(t, ranges[i].Base, f.GetRange().GetBaseOffset())
		}
	}
	t.Logf("%d calls for 250 ranges, 4 of them lost", l.calls.Load())
	require.Less(t, l.calls.Load(), int64(60))

	l.bad[120] = codes.Unavailable
	_, _, err = network(t, 0, l).Footers(t.Context(), &logv1.TopicIdPartition{TopicId: "t"}, ranges)
	require.ErrorIs(t, err, remote.ErrUnavailable)
}

func TestRangeList(t *testing.T) {
	var l remote.Ranges
	_, ok := l.At(0)
	require.False(t, ok)
	for i := range 5 {
		require.NoError(t, l.Append(remote.Range{Base: int64(10 * i), End: int64(10*i + 10), MaxTimestamp: []int64{5, 3, 9, 9, 1}[i], ProducersComplete: i == 2, EndHash: chainhash.Hash{byte(i + 1)}}))
	}
	require.NoError(t, l.Append(remote.Range{Base: 40, End: 50}), "known already")
	require.Error(t, l.Append(remote.Range{Base: 60, End: 70}), "a hole")
	at, ok := l.At(10)
	require.True(t, ok)
	require.EqualValues(t, 10, at.Base)
	require.Equal(t, chainhash.Hash{1}, at.BaseHash)
	require.True(t, at.BaseKnown)
	_, ok = l.At(50)
	require.False(t, ok)
	bases := func(list []remote.Range) (out []int64) {
		for _, r := range list {
			out = append(out, r.Base)
		}
		return out
	}
	require.Equal(t, []int64{20, 30, 40}, bases(l.SinceComplete(50)))
	require.Equal(t, []int64{20}, bases(l.SinceComplete(30)))
	require.Equal(t, []int64{0, 10}, bases(l.SinceComplete(20)), "none is complete: all")
	first, ok := l.FirstSince(0, 6)
	require.True(t, ok)
	require.EqualValues(t, 20, first.Base)
	_, ok = l.FirstSince(0, 10)
	require.False(t, ok)
	latest, _ := l.Latest()
	require.EqualValues(t, 20, latest.Base)
	l.Replace([]remote.Range{{Base: 7, End: 9}})
	at, _ = l.At(7)
	require.False(t, at.BaseKnown, "what lies below is not known")
}
