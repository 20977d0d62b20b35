package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/braidlog/braid/pkg/gcsemu"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/test/cluster"
)

// brittle is a connection that is reset after so many bytes, either way.
type brittle struct {
	net.Conn
	left *atomic.Int64
}

func (b *brittle) spend(n int) bool {
	if b.left.Add(-int64(n)) >= 0 {
		return true
	}
	_ = b.Conn.(*net.TCPConn).SetLinger(0)
	_ = b.Conn.Close()
	return false
}

func (b *brittle) Read(p []byte) (int, error) {
	n, err := b.Conn.Read(p)
	if !b.spend(n) {
		return 0, net.ErrClosed
	}
	return n, err
}

func (b *brittle) Write(p []byte) (int, error) {
	if left := b.left.Load(); left < int64(len(p)) {
		_, _ = b.Conn.Write(p[:max(left, 0)])
		b.spend(len(p))
		return 0, net.ErrClosed
	}
	n, err := b.Conn.Write(p)
	b.spend(n)
	return n, err
}

// B060 of what has gone wrong elsewhere: a connection is reset at a random byte of
// the request or of the answer, and the append is sent once more.
func TestAnAppendSentAgainAfterAResetAtAnyByteHasOneOffset(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{})
	c.CreateTopic("reset", 1)
	b := c.Broker(1)
	p := newProducer(t, c, b)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	const rounds = 150
	broken, duplicates := 0, 0
	for i := range rounds {
		left := new(atomic.Int64)
		left.Store(random.Int64N(1500))
		conn, err := grpc.NewClient("passthrough:///"+b.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableRetry(),
			grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
				raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
				if err != nil {
					return nil, err
				}
				return &brittle{raw, left}, nil
			}))
		require.NoError(t, err)
		req := &brokerv1.AppendRequest{Topic: "reset", Level: levelLeader, Batches: p.batch(t, fmt.Sprintf("v-%d", i))}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		first, err := brokerv1.NewLogServiceClient(conn).Append(ctx, req)
		cancel()
		_ = conn.Close()
		if err == nil {
			require.EqualValues(t, i, first.GetBaseOffset())
			continue
		}
		broken++
		again := mustAppend(t, c, b, "reset", 0, levelLeader, req.GetBatches())
		require.EqualValues(t, i, again.GetBaseOffset())
		if again.GetDuplicate() {
			duplicates++
		}
	}
	t.Logf("%d of %d connections broke before the answer, %d appends had been stored", broken, rounds, duplicates)
	assert.Positive(t, broken)
	assert.Less(t, broken, rounds)
	c.Eventually("all is committed", func() bool { return offsets(t, c, b, "reset", 0).GetHighWatermark() == rounds })
	require.Equal(t, numbered("v", rounds), values(readAll(t, c, b, "reset", 0, 0)))
}

// A stop in order loses nothing of what was acked at LEADER, whoever leads next:
// the leader uploads its tail first.
func TestALeaderStoppedInOrderHandsOverEverythingItAcked(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2, Session: 10 * time.Second})
	c.CreateTopic("rolling", 2, "leader.return.grace", "0s")
	leader, epoch := c.Leader("rolling", 0)
	c.Faults(gcsemu.Rule{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: gcsemu.Duration(200 * time.Millisecond)}})
	var want []string
	for i := range 30 {
		mustAppend(t, c, leader, "rolling", 0, levelLeader, plain(t, fmt.Sprintf("v-%d", i)))
		want = append(want, fmt.Sprintf("v-%d", i))
	}
	began := time.Now()
	require.NoError(t, leader.Stop())
	next, _ := c.LeaderAbove("rolling", 0, epoch)
	require.NotEqual(t, leader.ID(), next.ID())
	assert.Less(t, time.Since(began), 8*time.Second, "its successor waited for the session to run out")
	require.Equal(t, want, values(readAll(t, c, next, "rolling", 0, 0)))
	c.Faults()
	mustAppend(t, c, next, "rolling", 0, levelObject, plain(t, "after"))
	leader.Start()
	c.WaitReady(leader)
	require.Equal(t, append(want, "after"), values(readAll(t, c, leader, "rolling", 0, 0)))
}

// A watcher that resumes where it was misses and repeats nothing, also when the
// replica that it watched is gone.
func TestAWatcherOfSegmentsResumesAtAnotherReplica(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Metadata: 2})
	c.CreateTopic("watched", 1)
	b := c.Broker(1)
	mustAppend(t, c, b, "watched", 0, levelObject, plain(t, "v"))
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	watch := func(m *cluster.Member, resume *metadatav1.MetadataPosition, from int64) metadatav1.SegmentService_WatchSegmentsClient {
		w, err := metadatav1.NewSegmentServiceClient(c.Conn(m)).WatchSegments(ctx)
		require.NoError(t, err)
		require.NoError(t, w.Send(&metadatav1.WatchSegmentsRequest{
			Add: []*metadatav1.WatchSegmentsPartition{{Topic: "watched", FromOffset: from}}, Resume: resume,
		}))
		return w
	}
	var at *metadatav1.MetadataPosition
	next := int64(0)
	take := func(w metadatav1.SegmentService_WatchSegmentsClient, until int64) {
		t.Helper()
		for next < until {
			m, err := w.Recv()
			require.NoError(t, err)
			ranges := m.GetReset_().GetRanges()
			switch {
			case m.GetReset_() != nil:
				at = m.GetReset_().GetPosition()
			case m.GetEvents() != nil:
				at = m.GetEvents().GetPosition()
				for _, e := range m.GetEvents().GetEvents() {
					if r := e.GetRangeCommitted(); r != nil {
						ranges = append(ranges, r)
					}
				}
			case m.GetProgress() != nil:
				at = m.GetProgress()
			default:
				require.Fail(t, "unexpected", "%v", m)
			}
			for _, r := range ranges {
				require.Equal(t, next, r.GetBaseOffset())
				next = r.GetEndOffset()
			}
		}
	}
	for round := range 3 {
		m := c.Metadata(round%2 + 1)
		w := watch(m, at, next)
		for range 3 {
			mustAppend(t, c, b, "watched", 0, levelObject, plain(t, "v"))
		}
		take(w, int64(1+(round+1)*3))
		if round == 0 {
			m.Kill()
			c.WaitController()
			m.Start()
		}
	}
}
