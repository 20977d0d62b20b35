package integration_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/test/cluster"
)

// ledger keeps what was told about records sent once each, so that what is read
// can be judged: acked ones are there, refused ones are not, others are there at
// most once.
type ledger struct {
	mu      sync.Mutex // guards all below
	acked   map[string]int64
	refused map[string]bool
	unknown map[string]bool
}

func newLedger() *ledger {
	return &ledger{acked: map[string]int64{}, refused: map[string]bool{}, unknown: map[string]bool{}}
}

// send appends one record and notes the answer.
func (l *ledger) send(c *cluster.Cluster, m *cluster.Member, topic string, object bool, bound time.Duration, value string) error {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	level := levelLeader
	if object {
		level = levelObject
	}
	resp, err := c.Log(m).Append(ctx, &brokerv1.AppendRequest{
		Topic: topic, Level: level, Records: []*brokerv1.Record{{Key: []byte("k"), Value: []byte(value)}},
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.acked[value] = resp.GetBaseOffset()
	case rpcerr.Executed(err):
		l.unknown[value] = true
	default:
		l.refused[value] = true
	}
	return err
}

// judge compares the ledger with what was read.
func (l *ledger) judge(t *testing.T, all []got) {
	t.Helper()
	dense(t, 0, all)
	l.mu.Lock()
	defer l.mu.Unlock()
	seen := map[string]int64{}
	for _, g := range all {
		_, twice := seen[g.value]
		assert.False(t, twice, "%s is there twice", g.value)
		seen[g.value] = g.offset
		assert.False(t, l.refused[g.value], "%s was refused and is there", g.value)
	}
	for v, offset := range l.acked {
		at, ok := seen[v]
		if assert.True(t, ok, "%s was acked and is lost", v) {
			assert.Equal(t, offset, at, "%s is not where its ack said", v)
		}
	}
	t.Logf("%d acked, %d unknown, %d refused, %d read", len(l.acked), len(l.unknown), len(l.refused), len(all))
}

func TestEtcdMayStopForAWhile(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("etcd", 1)
	leader, _ := c.Leader("etcd", 0)
	before := c.WaitController()
	l := newLedger()
	require.NoError(t, l.send(c, leader, "etcd", true, 20*time.Second, "before"))

	c.StopEtcd()
	// An append at OBJECT waits, and tells how far it came when it may not wait
	// longer.
	err := l.send(c, leader, "etcd", true, time.Second, "unknown")
	require.Error(t, err)
	waiting := goAppend(c, leader, "etcd", 0, levelObject, cluster.Patience, plain(t, "waiting"))
	c.Eventually("the record is in the leader's log", func() bool { return offsets(t, c, leader, "etcd", 0).GetLogEndOffset() == 3 })
	// LEADER acks stop with the session.
	c.Eventually("LEADER acks stop", func() bool {
		err := l.send(c, leader, "etcd", false, 5*time.Second, fmt.Sprintf("leader-%d", len(l.acked)+len(l.refused)))
		if err == nil {
			return false
		}
		_ = refused(t, err, codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_METADATA_UNREACHABLE)
		return true
	})
	assert.Contains(t, codesOf(explain(t, c, leader, "etcd", 0)), "SESSION_LOST")
	// What was committed is readable all the time.
	require.Equal(t, []string{"before"}, values(readAll(t, c, leader, "etcd", 0, 0)))
	select {
	case <-waiting.done:
		t.Fatalf("answered without etcd: %v %v", waiting.resp, waiting.err)
	default:
	}

	c.StartEtcd()
	resp, err := waiting.wait(t)
	require.NoError(t, err)
	l.acked["waiting"] = resp.GetBaseOffset()
	c.WaitLed("etcd")
	leader, _ = c.Leader("etcd", 0)
	require.GreaterOrEqual(t, c.WaitController(), before)
	c.Eventually("LEADER acks are given again", func() bool {
		return l.send(c, leader, "etcd", false, 5*time.Second, fmt.Sprintf("again-%d", len(l.acked)+len(l.refused))) == nil
	})
	require.NoError(t, l.send(c, leader, "etcd", true, 20*time.Second, "after"))
	l.judge(t, readAll(t, c, leader, "etcd", 0, 0))
	referenced(t, c, "etcd", 0, offsets(t, c, leader, "etcd", 0).GetLogEndOffset())
}

func TestAMetadataReplicaMayDieWhileBrokersGoOn(t *testing.T) {
	t.Parallel()
	for _, replicas := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			t.Parallel()
			c := cluster.Start(t, cluster.Options{Brokers: 2, Metadata: replicas, Session: 6 * time.Second})
			c.CreateTopic("meta", 2)
			leader, epoch := c.Leader("meta", 0)
			l := newLedger()
			require.NoError(t, l.send(c, leader, "meta", true, 20*time.Second, "before"))
			for round, kill := range []bool{true, false} {
				before := c.WaitController()
				controller := c.Metadata(1)
				for _, m := range c.Members(cluster.RoleMetadata) {
					if _, ok := m.MetadataServer().Leading(); ok {
						controller = m
					}
				}
				if kill {
					controller.Kill()
				} else {
					require.NoError(t, controller.Stop())
				}
				// Nobody decides now, and what needs no decision goes on.
				require.NoError(t, l.send(c, leader, "meta", false, 5*time.Second, fmt.Sprintf("leader-%d", round)))
				readAll(t, c, leader, "meta", 0, 0)
				sent := make(chan error, 1)
				go func() { sent <- l.send(c, leader, "meta", true, 30*time.Second, fmt.Sprintf("object-%d", round)) }()
				if replicas == 1 {
					c.Eventually("the append waits", func() bool {
						return explain(t, c, leader, "meta", 0).GetUnuploadedBytes() > 0
					})
					controller.Start()
				}
				require.NoError(t, <-sent)
				if replicas > 1 {
					controller.Start()
				}
				c.Eventually("a controller of a later epoch", func() bool { return c.WaitController() > before })
				c.WaitMembers()
				c.WaitLed("meta")
				now, e := c.Leader("meta", 0)
				assert.Equal(t, leader, now)
				assert.Equal(t, epoch, e, "a leader that was alive all the time was replaced")
			}
			require.NoError(t, l.send(c, leader, "meta", true, 20*time.Second, "after"))
			l.judge(t, readAll(t, c, leader, "meta", 0, 0))
			c.CreateTopic("new", 1)
			resp, err := c.Admin().Cluster().GetCluster(bounded(t, 20*time.Second), &metadatav1.GetClusterRequest{})
			require.NoError(t, err)
			assert.Equal(t, c.WaitController(), resp.GetControllerEpoch())
		})
	}
}

func TestBucketFaultsLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	ms := func(n int) gcsemu.Duration { return gcsemu.Duration(time.Duration(n) * time.Millisecond) }
	for i, tc := range []struct {
		name  string
		rules []gcsemu.Rule
	}{
		{"slow", []gcsemu.Rule{{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: ms(50), Tail: ms(600), TailProbability: 0.3}}}},
		{"503 now and then", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActStatus, Status: 503, Probability: 0.5}}},
		{"429 in a row", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActStatus, Status: 429, Count: 8}}},
		{"503 after the object was stored", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActStatusAfter, Status: 503, Probability: 0.5}}},
		{"connections cut before the answer to a stored object", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActCutAfter, Probability: 0.5}}},
		{"connections cut before anything", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActCutBefore, Probability: 0.5}}},
		{"objects that are stored long after the connection broke", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActLate, Late: ms(150), Probability: 0.5}}},
		{"an answer that never comes", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActHangAfter, Count: 1}, {Op: gcsemu.OpCreate, Action: gcsemu.ActHang, Count: 1}}},
		{"uploads that are stored in part", []gcsemu.Rule{{Op: gcsemu.OpCreate, Action: gcsemu.ActTruncate, Bytes: 40, Probability: 0.4}}},
	} {
		topic := fmt.Sprintf("faults-%d", i)
		t.Run(tc.name, func(t *testing.T) {
			c.CreateTopic(topic, 1)
			leader, _ := c.Leader(topic, 0)
			mustAppend(t, c, leader, topic, 0, levelObject, plain(t, "before"))
			c.Faults(tc.rules...)
			p := newProducer(t, c, leader)
			var wg sync.WaitGroup
			type sent struct {
				batch []byte
				resp  *brokerv1.AppendResponse
			}
			var idempotent []sent
			wg.Go(func() {
				for i := range 15 {
					batch := p.batch(t, fmt.Sprintf("p-%d", i))
					resp, err := appendBatches(t, c, leader, topic, 0, levelObject, batch)
					if !assert.NoError(t, err) {
						return
					}
					idempotent = append(idempotent, sent{batch, resp})
				}
			})
			l := newLedger()
			l.acked["before"] = 0
			for i := range 15 {
				require.NoError(t, l.send(c, leader, topic, i%3 > 0, 40*time.Second, fmt.Sprintf("v-%d", i)))
			}
			wg.Wait()
			hits := 0
			for _, r := range c.Bucket.Rules() {
				hits += r.Hits
			}
			assert.Positive(t, hits, "no fault was hit")
			c.Faults()
			for i, s := range idempotent {
				l.acked[fmt.Sprintf("p-%d", i)] = s.resp.GetBaseOffset()
			}
			c.Eventually("all is uploaded", func() bool { return offsets(t, c, leader, topic, 0).GetHighWatermark() == 31 })
			referenced(t, c, topic, 0, 31)
			l.judge(t, readAll(t, c, leader, topic, 0, 0))
			// What is in the bucket is what was acked, for a broker that has only that.
			other := c.Broker(3 - leader.ID())
			c.Elect(topic, 0, other)
			l.judge(t, readAll(t, c, other, topic, 0, 0))
			last := idempotent[len(idempotent)-1]
			repeat(t, c, other, topic, last.resp, last.batch)
		})
	}
}

func TestAFullBacklogRefusesAppendsOfEveryLevelBeforeTheyAreStored(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{})
	c.CreateTopic("full", 1, "wal.max.unuploaded.bytes", "1MiB")
	b := c.Broker(1)
	mustAppend(t, c, b, "full", 0, levelObject, plain(t, "before"))
	c.BucketDown(true)
	value := string(make([]byte, 64<<10))
	var err error
	stored := int64(1)
	for range 20 {
		var resp *brokerv1.AppendResponse
		if resp, err = appendBatches(t, c, b, "full", 0, levelLeader, plain(t, value)); err != nil {
			break
		}
		stored = resp.GetEndOffset()
	}
	e := refused(t, err, codes.ResourceExhausted, errorsv1.ErrorReason_ERROR_REASON_BACKLOG_FULL)
	assert.Equal(t, "partition", e.Metadata["scope"])
	assert.Equal(t, "1048576", e.Metadata["limit"])
	assert.NotEmpty(t, e.Metadata["unuploaded"])
	assert.Positive(t, e.RetryDelay)
	assert.NotEmpty(t, e.Quotas)
	assert.Greater(t, stored, int64(10))
	for _, level := range []string{"LEADER", "OBJECT", "default"} {
		req := &brokerv1.AppendRequest{Topic: "full", Batches: plain(t, value)}
		switch level {
		case "LEADER":
			req.Level = levelLeader
		case "OBJECT":
			req.Level = levelObject
		}
		_, err := c.Log(b).Append(bounded(t, 20*time.Second), req)
		_ = refused(t, err, codes.ResourceExhausted, errorsv1.ErrorReason_ERROR_REASON_BACKLOG_FULL)
	}
	assert.Equal(t, stored, offsets(t, c, b, "full", 0).GetLogEndOffset(), "something was stored")
	assert.NotContains(t, codesOf(explain(t, c, b, "full", 0)), "HEALTHY")
	c.BucketDown(false)
	c.Eventually("appends are taken again", func() bool {
		_, err := appendBatches(t, c, b, "full", 0, levelObject, plain(t, "after"))
		return err == nil
	})
	all := readAll(t, c, b, "full", 0, 0)
	require.Len(t, all, int(stored)+1)
	assert.Equal(t, "after", all[stored].value)
	referenced(t, c, "full", 0, stored+1)
}
