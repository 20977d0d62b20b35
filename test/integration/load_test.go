package integration_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/gcsemu"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/rlm"
	"github.com/braidlog/braid/test/cluster"
)

func TestManyReadersOfOneRLMCostOneGETForEachObject(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{
		Brokers: 3,
		// So that every reader has to ask the remote-log manager.
		ChangeBroker: func(cfg *broker.Config) { cfg.Partitions.ReadCacheBytes = 0 },
	})
	c.CreateTopic("cold", 2)
	reader := c.Broker(3)
	require.NoError(t, reader.Stop())
	c.WaitLed("cold")
	var want [2][]string
	for p := range 2 {
		leader, _ := c.Leader("cold", p)
		for _, v := range numbered(fmt.Sprint(p), 12) {
			mustAppend(t, c, leader, "cold", int32(p), levelObject, plain(t, v))
			want[p] = append(want[p], v)
		}
	}
	objects := referenced(t, c, "cold", 0, 12)
	for n := range referenced(t, c, "cold", 1, 12) {
		objects[n] = true
	}
	// A leader that could copy none of it before it was elected, and a remote-log
	// manager that has none of it in memory.
	startWithoutCopies(t, c, reader, "cold", 2) // which reads footers, and is not what is counted here
	c.Bucket.ResetStats()
	c.RLM(1).Restart()
	c.WaitMembers()
	var wg sync.WaitGroup
	for i := range 16 {
		p := i % 2
		c.Log(reader)
		wg.Go(func() {
			var all []got
			// A remote-log manager that has just come is not known to all brokers yet.
			ok := c.Within(cluster.Patience, func() (done bool) {
				var err error
				all, err = tryRead(c, reader, &brokerv1.ReadRequest{Topic: "cold", Partition: int32(p)})
				return err == nil
			})
			assert.True(t, ok)
			assert.Equal(t, want[p], values(all))
		})
	}
	wg.Wait()
	gets := 0
	for n := range objects {
		r := c.Bucket.Requests(gcsemu.OpRead, n)
		assert.LessOrEqual(t, r, int64(1), "object %s was read %d times", n, r)
		gets += int(r)
	}
	t.Logf("%d objects, %d GETs", len(objects), gets)
	assert.Equal(t, len(objects), gets)
}

// load runs producers of the Go client against a topic and reads everything
// back; disturb runs in the middle.
func load(t *testing.T, c *cluster.Cluster, topic string, partitions, producers, each int, disturb func()) {
	t.Helper()
	var wg sync.WaitGroup
	half := make(chan struct{})
	var once sync.Once
	acks := make([]map[string]client.Ack, producers)
	for n := range producers {
		acks[n] = map[string]client.Ack{}
		cl := c.Client()
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 2*cluster.Patience)
			defer cancel()
			p, err := cl.NewProducer(ctx, client.ProducerOptions{Topic: topic, Level: client.LevelObject, BatchBytes: 2048})
			if !assert.NoError(t, err) {
				return
			}
			defer func() { _ = p.Close(ctx) }()
			pending := make([]client.Pending, each)
			for i := range each {
				if n == 0 && i == each/2 {
					once.Do(func() { close(half) })
				}
				key := fmt.Sprintf("key-%d-%d", n, i%17)
				pending[i], err = p.Send(ctx, client.Record{Key: []byte(key), Value: fmt.Appendf(nil, "%d/%d", n, i)})
				if !assert.NoError(t, err) {
					return
				}
			}
			for i := range pending {
				ack, err := pending[i].Wait(ctx)
				if !assert.NoError(t, err) {
					return
				}
				acks[n][fmt.Sprintf("%d/%d", n, i)] = ack
			}
		})
	}
	<-half
	if disturb != nil {
		disturb()
	}
	wg.Wait()
	require.False(t, t.Failed())

	seen := map[string]bool{}
	lastOf := map[string]int{}
	cl := c.Client()
	ctx, cancel := context.WithTimeout(t.Context(), cluster.Patience)
	defer cancel()
	for p := range partitions {
		r, err := cl.NewReader(client.ReaderOptions{Topic: topic, Partition: int32(p)})
		require.NoError(t, err)
		next := int64(0)
		for {
			m, err := r.Next(ctx)
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			require.Equal(t, next, m.Offset)
			next++
			v := string(m.Value)
			require.False(t, seen[v], "%s is there twice", v)
			seen[v] = true
			var n, i int
			_, err = fmt.Sscanf(v, "%d/%d", &n, &i)
			require.NoError(t, err)
			assert.True(t, strings.HasPrefix(string(m.Key), fmt.Sprintf("key-%d-", n)))
			ack, ok := acks[n][v]
			require.True(t, ok, "%s was not acked and is there", v)
			assert.Equal(t, m.Offset, ack.Offset)
			assert.EqualValues(t, p, ack.Partition)
			if before, ok := lastOf[string(m.Key)]; ok {
				assert.Greater(t, i, before, "key %s is out of order", m.Key)
			}
			lastOf[string(m.Key)] = i
		}
		require.NoError(t, r.Close())
		referenced(t, c, topic, p, next)
	}
	require.Len(t, seen, producers*each)
}

func TestConcurrentProducersAreReadBackExactlyOnceInTheOrderOfTheirKeys(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 3, RLMs: 2})
	c.CreateTopic("load", 12)
	load(t, c, "load", 12, 8, 600, nil)
}

func TestALoadSurvivesTheDeathOfABrokerAndOfAnRLMWithoutLossOrDouble(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{
		Brokers: 3, RLMs: 2,
		ChangeRLM: func(cfg *rlm.Config) { cfg.WAL.HedgeMin = 0 },
	})
	c.CreateTopic("killed", 6, "min.ack.level", "OBJECT")
	c.Faults(gcsemu.Rule{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: gcsemu.Duration(15e6)}})
	load(t, c, "killed", 6, 4, 400, func() {
		leader, _ := c.Leader("killed", 0)
		leader.Kill()
		c.RLM(1).Kill()
		c.WaitLed("killed")
		leader.Start()
		c.RLM(1).Start()
	})
}
