package walfeed_test

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/rlmpool"
	"github.com/braidlog/braid/services/broker/internal/walfeed"
)

// source is a partition that holds ranges of given sizes.
type source struct {
	key cluster.Key

	mu       sync.Mutex
	run      int64
	next     int
	sizes    []int
	verdicts []int64
	lost     int
}

func (s *source) FeedKey() cluster.Key { return s.key }

func (s *source) NextRange(buf []byte, limit int, strict bool) (*remotelogv1.WalRange, bool, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == len(s.sizes) {
		return nil, false, false
	}
	size := s.sizes[s.next]
	if strict && size > limit {
		return nil, false, true
	}
	base := int64(s.next)
	s.next++
	if cap(buf) < size {
		buf = make([]byte, size)
	}
	return &remotelogv1.WalRange{Run: s.run, Data: buf[:size], Range: &logv1.RangeDescriptor{
		Partition:  &logv1.TopicIdPartition{TopicCreationOffset: s.key.CreationOffset, Partition: s.key.Partition},
		BaseOffset: base, EndOffset: base + 1,
	}}, true, false
}

func (s *source) Verdict(v *remotelogv1.WalVerdict) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.verdicts = append(s.verdicts, v.GetBaseOffset())
}

func (s *source) Lost() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost++
	s.run++
	s.next = len(s.verdicts)
}

func (s *source) answered() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.verdicts)
}

func (s *source) losses() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// server is a hand-played remote-log manager that answers on demand.
type server struct {
	remotelogv1.UnimplementedRemoteLogServiceServer
	credit, streamCredit int64

	mu      sync.Mutex
	hold    bool
	held    []*remotelogv1.WalRange
	order   []int32 // partitions, as ranges came
	inits   []*remotelogv1.AppendWalInit
	streams []grpc.BidiStreamingServer[remotelogv1.AppendWalRequest, remotelogv1.AppendWalResponse]
	end     []context.CancelFunc
}

func (s *server) AppendWal(g grpc.BidiStreamingServer[remotelogv1.AppendWalRequest, remotelogv1.AppendWalResponse]) error {
	first, err := g.Recv()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(g.Context())
	defer cancel()
	s.mu.Lock()
	s.inits = append(s.inits, first.GetInit())
	s.streams = append(s.streams, g)
	s.end = append(s.end, cancel)
	s.held = nil
	err = g.Send(&remotelogv1.AppendWalResponse{Kind: &remotelogv1.AppendWalResponse_Ready{Ready: &remotelogv1.AppendWalReady{
		RlmId: 1, PartitionCreditBytes: s.credit, StreamCreditBytes: s.streamCredit,
	}}})
	s.mu.Unlock()
	if err != nil {
		return err
	}
	go func() {
		for {
			m, err := g.Recv()
			if err != nil {
				cancel()
				return
			}
			s.mu.Lock()
			s.order = append(s.order, m.GetRange().GetRange().GetPartition().GetPartition())
			s.held = append(s.held, m.GetRange())
			if !s.hold {
				s.answer(1)
			}
			s.mu.Unlock()
		}
	}()
	<-ctx.Done()
	return context.Canceled
}

// answer gives verdicts on the n oldest ranges; mu is held.
func (s *server) answer(n int) {
	for _, r := range s.held[:n] {
		_ = s.streams[len(s.streams)-1].Send(&remotelogv1.AppendWalResponse{Kind: &remotelogv1.AppendWalResponse_Verdict{Verdict: &remotelogv1.WalVerdict{
			Partition: r.GetRange().GetPartition(), Run: r.GetRun(), BaseOffset: r.GetRange().GetBaseOffset(), EndOffset: r.GetRange().GetEndOffset(),
			Verdict: &metadatav1.RangeVerdict{Outcome: metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED},
		}}})
	}
	s.held = s.held[n:]
}

func (s *server) outstanding() (bytes int64, ranges int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.held {
		bytes += int64(len(r.GetData()))
	}
	return bytes, len(s.held)
}

func (s *server) partitions() []int32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.order)
}

func (s *server) introductions() []*remotelogv1.AppendWalInit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.inits)
}

type rig struct {
	feed  *walfeed.Feed
	epoch atomic.Int64
}

func start(t *testing.T, s *server) *rig {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	g := grpc.NewServer()
	remotelogv1.RegisterRemoteLogServiceServer(g, s)
	served := make(chan struct{})
	go func() { defer close(served); _ = g.Serve(l) }()
	tr := cluster.NewTracker()
	_, err := tr.Reset(&metadatav1.MetadataImage{Position: &metadatav1.MetadataPosition{Offset: 1}, Cluster: &metadatav1.GetClusterResponse{
		ClusterId: "c", RemoteLogManagers: []*metadatav1.RemoteLogManager{{RlmId: 1, Address: "r:1", Zone: "a", Open: true}},
	}})
	require.NoError(t, err)
	pool := rlmpool.New(func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	})
	r := &rig{}
	r.epoch.Store(5)
	r.feed = walfeed.New(walfeed.Options{
		Zone: "a", ZonePatience: time.Second, VerdictTimeout: 10 * time.Second, Pool: pool, View: tr.View,
		Identity: func() (walfeed.Identity, bool) {
			return walfeed.Identity{ClusterID: "c", BrokerID: 1, BrokerEpoch: r.epoch.Load()}, true
		},
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() { defer close(done); _ = r.feed.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
		require.NoError(t, pool.Close())
		g.Stop()
		<-served
	})
	return r
}

func sized(partition int32, sizes ...int) *source {
	return &source{key: cluster.Key{CreationOffset: 3, Partition: partition}, run: 1, sizes: sizes}
}

func repeat(n, size int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = size
	}
	return out
}

func settle() { time.Sleep(time.Second) } //nolint:forbidigo // virtual time inside a bubble

func TestSourcesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{credit: 1 << 20, streamCredit: 1 << 20, hold: true}
		r := start(t, s)
		greedy, small := sized(0, repeat(50, 1000)...), sized(1, repeat(3, 1000)...)
		r.feed.Wake(greedy)
		r.feed.Wake(small)
		settle()
		require.Equal(t, []int32{0, 1, 0, 1, 0, 1, 0}, s.partitions()[:7])
		s.mu.Lock()
		s.hold = false
		s.answer(len(s.held))
		s.mu.Unlock()
		settle()
		require.Equal(t, 50, greedy.answered())
		require.Equal(t, 3, small.answered())
		require.Zero(t, r.feed.Status().OutstandingBytes)
	})
}

// Design review F22: bytes in flight stay within both credits, and one partition
// that has used up its own does not stop the others.
func TestCreditsBoundWhatIsOutstanding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{credit: 3000, streamCredit: 5000, hold: true}
		r := start(t, s)
		greedy, other := sized(0, repeat(50, 1000)...), sized(1, repeat(50, 1000)...)
		r.feed.Wake(greedy)
		settle()
		bytes, _ := s.outstanding()
		require.EqualValues(t, 3000, bytes)
		r.feed.Wake(other)
		settle()
		bytes, _ = s.outstanding()
		require.EqualValues(t, 5000, bytes)
		require.EqualValues(t, 5000, r.feed.Status().OutstandingBytes)
		for range 95 {
			s.mu.Lock()
			s.answer(1)
			s.mu.Unlock()
			time.Sleep(10 * time.Millisecond) //nolint:forbidigo // virtual time inside a bubble
			bytes, _ := s.outstanding()
			require.LessOrEqual(t, bytes, int64(5000))
		}
		s.mu.Lock()
		s.answer(len(s.held))
		s.mu.Unlock()
		settle()
		require.Equal(t, 50, greedy.answered())
		require.Equal(t, 50, other.answered())
		require.Zero(t, greedy.losses())
	})
}

// A range larger than any credit goes when nothing else is outstanding.
func TestLargeRangeGoesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{credit: 3000, streamCredit: 5000, hold: true}
		r := start(t, s)
		small, large := sized(0, 1000), sized(1, 8000, 1000)
		r.feed.Wake(small)
		settle()
		r.feed.Wake(large)
		settle()
		_, n := s.outstanding()
		require.Equal(t, 1, n)
		s.mu.Lock()
		s.answer(1)
		s.mu.Unlock()
		settle()
		bytes, n := s.outstanding()
		require.Equal(t, 1, n)
		require.EqualValues(t, 8000, bytes)
		s.mu.Lock()
		s.hold = false
		s.answer(1)
		s.mu.Unlock()
		settle()
		require.Equal(t, 2, large.answered())
	})
}

func TestOnlySourcesWithUnansweredRangesAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{credit: 1 << 20, streamCredit: 1 << 20}
		r := start(t, s)
		idle, busy := sized(0, 1000), sized(1, repeat(3, 1000)...)
		r.feed.Wake(idle)
		settle()
		require.Equal(t, 1, idle.answered())
		s.mu.Lock()
		s.hold = true
		s.mu.Unlock()
		r.feed.Wake(busy)
		settle()
		s.mu.Lock()
		s.hold = false
		s.end[0]()
		s.mu.Unlock()
		settle()
		require.Zero(t, idle.losses())
		require.Equal(t, 1, busy.losses())
		r.feed.Wake(busy)
		time.Sleep(5 * time.Second) //nolint:forbidigo // virtual time inside a bubble
		require.Equal(t, 3, busy.answered())
		require.Len(t, s.introductions(), 2)
	})
}

func TestNewRegistrationOpensAnotherStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{credit: 1 << 20, streamCredit: 1 << 20}
		r := start(t, s)
		one := sized(0, repeat(2, 1000)...)
		one.sizes = one.sizes[:1]
		r.feed.Wake(one)
		settle()
		r.epoch.Store(6)
		settle()
		one.mu.Lock()
		one.sizes = repeat(2, 1000)
		one.mu.Unlock()
		r.feed.Wake(one)
		settle()
		require.Equal(t, 2, one.answered())
		require.Len(t, s.introductions(), 2)
		require.EqualValues(t, 6, s.introductions()[1].GetBrokerEpoch())
	})
}
