package integration_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/test/cluster"
)

// copyAt reads the bytes of a partition from the replica that a broker holds,
// whoever leads; an error when the broker has none that is reconciled.
func copyAt(c *cluster.Cluster, m *cluster.Member, topic string, partition int32) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	stream, err := c.Log(m).Read(direct(ctx), &brokerv1.ReadRequest{
		Topic: topic, Partition: partition, ReadPreference: brokerv1.ReadPreference_READ_PREFERENCE_NEAREST,
		Start: &brokerv1.ReadRequest_Offset{Offset: 0}, Format: brokerv1.ReadFormat_READ_FORMAT_BATCHES,
	})
	if err != nil {
		return nil, err
	}
	var out []byte
	for {
		resp, err := stream.Recv()
		if err == io.EOF { //nolint:errorlint // gRPC returns it bare
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		if s := resp.GetStart(); s != nil && int(s.GetBrokerId()) != m.ID() {
			return nil, fmt.Errorf("broker %d answers for %s", s.GetBrokerId(), m)
		}
		out = append(out, resp.GetBatches().GetBatches()...)
	}
}

// selfExplained is what a broker says of its own replica.
func selfExplained(c *cluster.Cluster, m *cluster.Member, topic string, partition int) (*brokerv1.ExplainPartitionResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return c.Log(m).ExplainPartition(direct(ctx), &brokerv1.ExplainPartitionRequest{Topic: topic, Partition: int32(partition)})
}

// waitCopied waits until a follower has copied a partition up to end.
func waitCopied(c *cluster.Cluster, m *cluster.Member, topic string, partition int, end int64) {
	c.Eventually(fmt.Sprintf("%s has copied %s/%d up to %d", m, topic, partition, end), func() bool {
		ex, err := selfExplained(c, m, topic, partition)
		return err == nil && ex.GetState() == brokerv1.ReplicaState_REPLICA_STATE_FETCHING && ex.GetLogEndOffset() >= end
	})
}

func sameCopies(t *testing.T, c *cluster.Cluster, topic string, partitions int) {
	t.Helper()
	for p := range partitions {
		var want []byte
		for i, m := range c.Members(cluster.RoleBroker) {
			got, err := copyAt(c, m, topic, int32(p))
			require.NoError(t, err)
			require.NotEmpty(t, got)
			if i > 0 {
				require.Equal(t, want, got, "%s holds other bytes of %s/%d than the first broker", m, topic, p)
			}
			want = got
		}
	}
}

func TestFollowersHoldWhatTheirLeadersHold(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 3, RLMs: 2, Zones: 2})
	c.CreateTopic("copied", 3)
	for p := range 3 {
		leader, _ := c.Leader("copied", p)
		idempotent := newProducer(t, c, leader)
		for _, v := range numbered(fmt.Sprint(p), 10) {
			mustAppend(t, c, leader, "copied", int32(p), levelObject, idempotent.batch(t, v, v+"'"))
			mustAppend(t, c, leader, "copied", int32(p), levelLeader, plain(t, strings.Repeat(v, 300)))
		}
		mustAppend(t, c, leader, "copied", int32(p), levelObject, plain(t, "last"))
		for _, m := range c.Members(cluster.RoleBroker) {
			if m != leader {
				waitCopied(c, m, "copied", p, 31)
			}
		}
	}
	sameCopies(t, c, "copied", 3)

	leader, _ := c.Leader("copied", 0)
	c.Eventually("the leader was told by both followers", func() bool {
		ex := explain(t, c, leader, "copied", 0)
		told := 0
		for _, r := range ex.GetReplicas() {
			if int(r.GetBrokerId()) != leader.ID() && r.GetState() == brokerv1.ReplicaState_REPLICA_STATE_FETCHING && r.GetLag() == 0 && r.GetLogEndOffset() == 31 {
				told++
			}
		}
		return len(ex.GetReplicas()) == 3 && told == 2
	})
	// Records through a follower, from a time on, and following.
	follower := c.Broker(leader.ID()%3 + 1)
	all, err := tryRead(c, follower, &brokerv1.ReadRequest{Topic: "copied", ReadPreference: brokerv1.ReadPreference_READ_PREFERENCE_NEAREST})
	require.NoError(t, err)
	require.Len(t, all, 31)
	dense(t, 0, all)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	stream, err := c.Log(follower).Read(direct(ctx), &brokerv1.ReadRequest{
		Topic: "copied", ReadPreference: brokerv1.ReadPreference_READ_PREFERENCE_NEAREST, Follow: true, Start: &brokerv1.ReadRequest_Offset{Offset: 31},
	})
	require.NoError(t, err)
	start, err := stream.Recv()
	require.NoError(t, err)
	require.EqualValues(t, follower.ID(), start.GetStart().GetBrokerId())
	mustAppend(t, c, leader, "copied", 0, levelObject, plain(t, "followed"))
	for {
		m, err := stream.Recv()
		require.NoError(t, err)
		if r := m.GetRecords().GetRecords(); len(r) > 0 {
			require.Equal(t, "followed", string(r[0].GetRecord().GetValue()))
			break
		}
	}
	// A replica that has nothing of its own to say sends the reader to the leader.
	_, err = tryRead(c, follower, &brokerv1.ReadRequest{Topic: "copied", Start: &brokerv1.ReadRequest_Offset{Offset: 5}})
	require.NoError(t, err)
}

// Design review F5 and the promise of OBJECT: a caught-up follower leads with its
// copy, and answers retries with their first answers though the bucket can't be
// read.
func TestACaughtUpFollowerTakesOverWithItsCopyWhileTheBucketCannotBeRead(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("takeover", 1, "leader.return.grace", "0s")
	leader, epoch := c.Leader("takeover", 0)
	follower := c.Broker(3 - leader.ID())
	p := newProducer(t, c, leader)
	var batches [][]byte
	var firsts []*brokerv1.AppendResponse
	for _, v := range numbered("v", 5) {
		mustAppend(t, c, leader, "takeover", 0, levelLeader, plain(t, "other"))
		batches = append(batches, p.batch(t, v, v+"'"))
		firsts = append(firsts, mustAppend(t, c, leader, "takeover", 0, levelObject, batches[len(batches)-1]))
	}
	waitCopied(c, follower, "takeover", 0, 15)
	c.RLM(1).Restart() // its cache is empty
	c.WaitMembers()
	c.Faults(gcsemu.Rule{Op: gcsemu.OpRead, ObjectContains: "/wal/", Action: gcsemu.ActStatus, Status: 503})
	leader.Kill()
	next, _ := c.LeaderAbove("takeover", 0, epoch)
	require.Equal(t, follower, next)
	for i, b := range batches {
		repeat(t, c, next, "takeover", firsts[i], b)
	}
	ex := explain(t, c, next, "takeover", 0)
	require.EqualValues(t, 0, ex.GetLocalLogStartOffset(), "the copy is kept")
	require.Len(t, readAll(t, c, next, "takeover", 0, 0), 15, "from its own disk")
	resp := mustAppend(t, c, next, "takeover", 0, levelObject, p.batch(t, "more"))
	require.EqualValues(t, 15, resp.GetBaseOffset())
	c.Faults()

	leader.Start()
	c.WaitReady(leader)
	waitCopied(c, leader, "takeover", 0, 16)
	sameCopies(t, c, "takeover", 1)
}

// A leader that is cut off past its session and replaced: what it still had on its
// way is refused, its tail is never read, and when it is back it follows and names
// the new leader.
func TestALeaderPausedPastItsSessionIsReplacedAndFollowsWhenItIsBack(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("paused", 1, "leader.return.grace", "0s")
	leader, epoch := c.Leader("paused", 0)
	other := c.Broker(3 - leader.ID())
	mustAppend(t, c, leader, "paused", 0, levelObject, plain(t, "before"))
	waitCopied(c, other, "paused", 0, 1)
	c.BucketDown(true)
	// The remote-log manager has it, and can't store it yet.
	tail := mustAppend(t, c, leader, "paused", 0, levelLeader, plain(t, "tail-0", "tail-1"))
	waiting := goAppend(c, leader, "paused", 0, levelObject, 30*time.Second, plain(t, "waits"))
	c.Eventually("the tail is on its way", func() bool { return explain(t, c, leader, "paused", 0).GetUnuploadedBytes() > 0 })
	leader.Isolate()
	next, _ := c.LeaderAbove("paused", 0, epoch)
	require.Equal(t, other, next)
	c.BucketDown(false)
	_, err := waiting.wait(t)
	require.Error(t, err)
	mustAppend(t, c, next, "paused", 0, levelObject, plain(t, "after"))
	leader.Reconnect()
	want := []string{"before", "after"}
	c.Eventually("the old leader follows", func() bool {
		// Whatever it serves until then is right.
		if got, err := copyAt(c, leader, "paused", 0); err == nil {
			require.NotContains(t, string(got), "tail")
			require.NotContains(t, string(got), "waits")
		}
		ex, err := selfExplained(c, leader, "paused", 0)
		return err == nil && ex.GetState() == brokerv1.ReplicaState_REPLICA_STATE_FETCHING && ex.GetLogEndOffset() == 2
	})
	sameCopies(t, c, "paused", 1)
	require.Equal(t, want, values(readAll(t, c, leader, "paused", 0, 0)))
	_, err = c.Log(leader).Append(direct(bounded(t, 5*time.Second)), &brokerv1.AppendRequest{Topic: "paused", Batches: plain(t, "x")})
	moved := refused(t, err, codes.Aborted, errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER)
	require.Equal(t, next.Address(), moved.Metadata["leader_address"])
	_, err = c.Log(leader).AwaitDurability(bounded(t, 20*time.Second), &brokerv1.AwaitDurabilityRequest{
		Topic: "paused", EndOffset: tail.GetEndOffset(), Leadership: tail.GetLeadership(), Level: levelObject,
	})
	cut := refused(t, err, codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED)
	require.Equal(t, "1", cut.Metadata["fork_point"])
	referenced(t, c, "paused", 0, 2)
}

// A follower of many partitions reads each object once, through the one
// remote-log manager of its zone.
func TestAFollowerOfFiftyPartitionsCostsOneGETForEachObject(t *testing.T) {
	t.Parallel()
	const partitions, rounds = 50, 6
	c := cluster.Start(t, cluster.Options{Brokers: 2, RLMs: 2, Zones: 2})
	c.CreateTopic("many", partitions)
	require.NoError(t, c.Broker(2).Stop())
	c.WaitLed("many")
	c.Faults(gcsemu.Rule{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: gcsemu.Duration(50 * time.Millisecond)}})
	for round := range rounds {
		var wg sync.WaitGroup
		for p := range partitions {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				_, err := c.Log(c.Broker(1)).Append(ctx, &brokerv1.AppendRequest{
					Topic: "many", Partition: int32(p), Level: levelObject, Records: []*brokerv1.Record{{Value: fmt.Appendf(nil, "%d-%d", p, round)}},
				})
				assert.NoError(t, err)
			})
		}
		wg.Wait()
	}
	c.Faults()
	objects := map[string]bool{}
	for p := range partitions {
		for n := range referenced(t, c, "many", p, rounds) {
			objects[n] = true
		}
	}
	require.Less(t, len(objects), partitions*rounds/2, "objects are shared")
	c.Bucket.ResetStats()
	c.Broker(2).Start()
	c.WaitReady(c.Broker(2))
	for p := range partitions {
		waitCopied(c, c.Broker(2), "many", p, rounds)
	}
	gets := int64(0)
	for n := range objects {
		r := c.Bucket.Requests(gcsemu.OpRead, n)
		assert.LessOrEqual(t, r, int64(1), "object %s was read %d times", n, r)
		gets += r
	}
	t.Logf("%d ranges of %d partitions in %d objects: %d GETs", partitions*rounds, partitions, len(objects), gets)
	require.EqualValues(t, len(objects), gets)
	sameCopies(t, c, "many", partitions)
}

// Design review F17: an object that is not found cuts nothing and holds up no
// other partition; when it is there the follower goes on.
func TestAFollowerOutlastsAnObjectThatIsNotFound(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("missing", 2)
	lead := func(p int) { require.NotZero(t, c.Elect("missing", p, c.Broker(1))) }
	lead(0)
	lead(1)
	mustAppend(t, c, c.Broker(1), "missing", 0, levelObject, plain(t, "zero"))
	waitCopied(c, c.Broker(2), "missing", 0, 1)
	require.NoError(t, c.Broker(2).Stop())
	mustAppend(t, c, c.Broker(1), "missing", 0, levelObject, plain(t, "one"))
	mustAppend(t, c, c.Broker(1), "missing", 0, levelObject, plain(t, "two"))
	mustAppend(t, c, c.Broker(1), "missing", 1, levelObject, plain(t, "other"))
	gone := c.Segments("missing", 0)[1].GetObjectName()
	c.RLM(1).Restart()
	c.WaitMembers()
	c.Faults(gcsemu.Rule{Op: gcsemu.OpRead, ObjectContains: gone, Action: gcsemu.ActStatus, Status: 404})
	c.Broker(2).Start()
	c.WaitReady(c.Broker(2))
	waitCopied(c, c.Broker(2), "missing", 1, 1)
	c.Eventually("the follower says what it misses", func() bool {
		ex, err := selfExplained(c, c.Broker(2), "missing", 0)
		if err != nil {
			return false
		}
		for _, f := range ex.GetFindings() {
			if f.GetCode() == "OBJECT_MISSING" && f.GetBlocking() {
				require.EqualValues(t, 1, ex.GetLogEndOffset(), "nothing was cut")
				return true
			}
		}
		return false
	})
	c.Eventually("and tells its leader", func() bool {
		for _, r := range explain(t, c, c.Broker(1), "missing", 0).GetReplicas() {
			if r.GetBrokerId() == 2 && r.GetLag() == 2 && strings.Contains(r.GetReason(), "not found") {
				return true
			}
		}
		return false
	})
	short, err := copyAt(c, c.Broker(2), "missing", 0)
	require.NoError(t, err)
	require.Contains(t, string(short), "zero")
	c.Faults()
	waitCopied(c, c.Broker(2), "missing", 0, 3)
	sameCopies(t, c, "missing", 2)
}

// A broker that is asked to stop hands its partitions over: nobody waits for its
// session to run out, and no LEADER ack is lost.
func TestABrokerThatStopsHandsItsPartitionsOver(t *testing.T) {
	t.Parallel()
	const partitions = 4
	c := cluster.Start(t, cluster.Options{Brokers: 3, Session: 20 * time.Second})
	c.CreateTopic("handed", partitions)
	c.Faults(gcsemu.Rule{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: gcsemu.Duration(100 * time.Millisecond)}})
	type ack struct {
		offset int64
		value  string
	}
	acked := make([][]ack, partitions)
	longest := make([]time.Duration, partitions)
	leaders := make([]int, partitions)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	stays := c.Broker(3)
	c.Log(stays)
	started := make(chan struct{}, partitions)
	for p := range partitions {
		m, _ := c.Leader("handed", p)
		leaders[p] = m.ID()
		wg.Go(func() {
			last := time.Now()
			for i := 0; ctx.Err() == nil; i++ {
				value := fmt.Sprintf("%d-%d", p, i)
				callCtx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				// Through a broker that stays: it forwards.
				resp, err := c.Log(stays).Append(callCtx, &brokerv1.AppendRequest{
					Topic: "handed", Partition: int32(p), Level: levelLeader, Records: []*brokerv1.Record{{Value: []byte(value)}},
				})
				cancel()
				if err != nil {
					select {
					case <-ctx.Done():
					case <-time.After(5 * time.Millisecond):
					}
					continue
				}
				longest[p] = max(longest[p], time.Since(last))
				last = time.Now()
				acked[p] = append(acked[p], ack{resp.GetBaseOffset(), value})
				if len(acked[p]) == 20 {
					started <- struct{}{}
				}
			}
		})
	}
	for range partitions {
		<-started
	}
	began := time.Now()
	for _, m := range []*cluster.Member{c.Broker(1), c.Broker(2)} {
		require.NoError(t, m.Stop())
	}
	took := time.Since(began)
	for p := range partitions {
		c.Eventually("the last broker leads", func() bool {
			m, _ := c.Leader("handed", p)
			return m == stays
		})
	}
	stop()
	wg.Wait()
	c.Faults()
	for p := range partitions {
		t.Logf("partition %d: %d acks, longest pause %v; both stops took %v", p, len(acked[p]), longest[p], took)
		assert.Less(t, longest[p], 10*time.Second, "as if the session had to run out")
		mustAppend(t, c, stays, "handed", int32(p), levelObject, plain(t, "end"))
		at := map[int64]string{}
		for _, g := range readAll(t, c, stays, "handed", int32(p), 0) {
			at[g.offset] = g.value
		}
		for _, a := range acked[p] {
			require.Equal(t, a.value, at[a.offset], "an acked record of partition %d is gone", p)
		}
	}
}

// Whatever leader is elected while records are written, a reader of any replica
// sees committed records only, and one record at each offset (H8).
func TestNearestReadsDuringElectionsNeverReturnAWrongRecord(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 3})
	c.CreateTopic("near", 1)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	var mu sync.Mutex
	seen := map[int64]string{}
	reads := map[int]int{}
	var acked atomic.Int64
	for _, m := range c.Members(cluster.RoleBroker) {
		c.Log(m)
		wg.Go(func() {
			for ctx.Err() == nil {
				data, err := copyAt(c, m, "near", 0)
				if err != nil {
					select {
					case <-ctx.Done():
					case <-time.After(time.Millisecond):
					}
					continue
				}
				mu.Lock()
				reads[m.ID()]++
				next := int64(0)
				err = record.Walk(data, func(b record.Batch) error {
					if b.BaseOffset() != next {
						return fmt.Errorf("%s: offset %d follows %d", m, b.BaseOffset(), next)
					}
					next = b.EndOffset()
					if was, ok := seen[b.BaseOffset()]; ok && was != string(b) {
						return fmt.Errorf("%s: offset %d has two contents", m, b.BaseOffset())
					}
					seen[b.BaseOffset()] = string(b)
					return nil
				})
				mu.Unlock()
				if !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			level := levelLeader
			if i%3 == 0 {
				level = levelObject
			}
			callCtx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			_, err := c.Log(c.Broker(1+i%3)).Append(callCtx, &brokerv1.AppendRequest{
				Topic: "near", Level: level, Records: []*brokerv1.Record{{Value: fmt.Appendf(nil, "v%d", i)}},
			})
			cancel()
			if err == nil {
				acked.Add(1)
			}
		}
	})
	for round := range 20 {
		c.Elect("near", 0, c.Broker(1+round%3))
		if before := acked.Load(); round%2 == 0 {
			c.Eventually("records are acked again", func() bool { return acked.Load() >= before+5 })
		}
	}
	stop()
	wg.Wait()
	leader, _ := c.Leader("near", 0)
	end := mustAppend(t, c, leader, "near", 0, levelObject, plain(t, "end")).GetEndOffset()
	for _, m := range c.Members(cluster.RoleBroker) {
		if m != leader {
			waitCopied(c, m, "near", 0, end)
		}
	}
	sameCopies(t, c, "near", 1)
	truth, err := copyAt(c, leader, "near", 0)
	require.NoError(t, err)
	held := map[int64]string{}
	require.NoError(t, record.Walk(truth, func(b record.Batch) error { held[b.BaseOffset()] = string(b); return nil }))
	for o, b := range seen {
		require.Equal(t, b, held[o], "a record that was read at %d is not there any more", o)
	}
	t.Logf("reads by broker: %v, batches seen: %d", reads, len(seen))
	for _, m := range c.Members(cluster.RoleBroker) {
		assert.Positive(t, reads[m.ID()])
	}
}
