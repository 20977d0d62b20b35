package integration_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/gcsemu"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/test/cluster"
)

var (
	chaosSeed  = flag.Uint64("seed", 0, "seed of the random failures; 0 draws one and prints it")
	chaosSteps = flag.Int("steps", 10, "how many random failures to go through")
)

// chaos draws failures. What it draws follows from the seed; what comes of it
// depends on the machine.
type chaos struct {
	t    *testing.T
	c    *cluster.Cluster
	rand *rand.Rand
	log  []string
}

func (x *chaos) member(role cluster.Role) *cluster.Member {
	all := x.c.Members(role)
	return all[x.rand.IntN(len(all))]
}

// pause lets the load run on: until so many more records were acked, or for a
// bound when nothing moves.
func (x *chaos) pause(acked *atomic.Int64, n int64) {
	from := acked.Load()
	x.c.Within(2*time.Second, func() bool { return acked.Load() >= from+n })
}

func (x *chaos) step(acked *atomic.Int64) {
	n := int64(20 + x.rand.IntN(200))
	kind := x.rand.IntN(9)
	note := func(format string, args ...any) {
		x.log = append(x.log, fmt.Sprintf(format, args...))
		x.t.Logf("%s: %s", time.Now().UTC().Format("15:04:05.000"), x.log[len(x.log)-1])
	}
	switch kind {
	case 0, 1:
		m := x.member(cluster.RoleBroker)
		note("kill %s", m)
		m.Kill()
		x.pause(acked, n)
		m.Start()
	case 2:
		m := x.member(cluster.RoleBroker)
		note("stop %s", m)
		assert.NoError(x.t, m.Stop())
		x.pause(acked, n)
		m.Start()
	case 3:
		m := x.member(cluster.RoleBroker)
		note("isolate %s", m)
		m.Isolate()
		x.pause(acked, n)
		m.Reconnect()
	case 4:
		m := x.member(cluster.RoleRLM)
		note("kill %s", m)
		m.Kill()
		x.pause(acked, n)
		x.c.WaitController() // a start needs the metadata log's marker only, but say what is meant
		m.Start()
	case 5:
		m := x.member(cluster.RoleMetadata)
		note("kill %s", m)
		m.Kill()
		x.pause(acked, n)
		m.Start()
	case 6:
		note("stop etcd")
		x.c.StopEtcd()
		x.pause(acked, n)
		x.c.StartEtcd()
		// Replicas that gave up meanwhile are started again, as a supervisor does.
		for _, m := range x.c.Members(cluster.RoleMetadata) {
			if !m.Running() {
				note("%s had ended: %v", m, m.Wait())
				m.Start()
			}
		}
	case 7:
		note("faults of the bucket")
		x.c.Faults(
			gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActStatusAfter, Probability: 0.1},
			gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActCutAfter, Probability: 0.1},
			gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActLate, Late: gcsemu.Duration(100 * time.Millisecond), Probability: 0.1},
			gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActStatus, Probability: 0.2},
			gcsemu.Rule{Op: gcsemu.OpRead, Action: gcsemu.ActCutBody, Bytes: 30, Probability: 0.2},
			gcsemu.Rule{Op: gcsemu.OpCreate, Latency: gcsemu.Latency{Base: gcsemu.Duration(5 * time.Millisecond), Tail: gcsemu.Duration(300 * time.Millisecond), TailProbability: 0.1}},
		)
		x.pause(acked, n)
		x.c.Faults()
	case 8:
		m, p := x.member(cluster.RoleBroker), x.rand.IntN(4)
		note("elect %s for %d", m, p)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := x.c.Admin().Cluster().ElectLeader(ctx, &metadatav1.ElectLeaderRequest{Topic: "chaos", Partition: int32(p), BrokerId: int32(m.ID())})
		if err != nil {
			note("not elected: %v", err)
		}
		x.pause(acked, n)
	}
}

// Whatever dies, is cut off or fails, in whatever order: every record that was
// acked at OBJECT is there exactly once where its ack said, in the order of its
// key, and no reader ever saw anything else than what stays.
func TestRandomDeathsAndFaultsUnderLoadLoseDoubleReorderAndChangeNothing(t *testing.T) {
	t.Parallel()
	seed := *chaosSeed
	if s, err := strconv.ParseUint(os.Getenv("BRAID_CHAOS_SEED"), 10, 64); err == nil && seed == 0 {
		seed = s
	}
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d (-seed)", seed)
	const partitions, producers, keys = 4, 3, 5
	c := cluster.Start(t, cluster.Options{Brokers: 3, RLMs: 2, Metadata: 2, Session: 1500 * time.Millisecond})
	c.CreateTopic("chaos", partitions, "min.ack.level", "OBJECT")

	var acked atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	type sent struct {
		ack client.Ack
		err error
	}
	results := make([]map[int]sent, producers)
	for n := range producers {
		results[n] = map[int]sent{}
		cl := c.Client()
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			p, err := cl.NewProducer(ctx, client.ProducerOptions{Topic: "chaos", Level: client.LevelObject, BatchBytes: 512, Linger: -1})
			if !assert.NoError(t, err) {
				return
			}
			defer func() { _ = p.Close(ctx) }()
			var pending []client.Pending
			first := 0
			settle := func() {
				ack, err := pending[0].Wait(ctx)
				results[n][first] = sent{ack, err}
				assert.NoError(t, err, "record %d/%d", n, first)
				if err == nil {
					acked.Add(1)
				}
				pending = pending[1:]
				first++
			}
			for i := 0; ; i++ {
				select {
				case <-stop:
					for len(pending) > 0 {
						settle()
					}
					return
				default:
				}
				q, err := p.Send(ctx, client.Record{Key: fmt.Appendf(nil, "%d-%d", n, i%keys), Value: fmt.Appendf(nil, "%d/%d", n, i)})
				if !assert.NoError(t, err) {
					return
				}
				if pending = append(pending, q); len(pending) == 40 {
					settle()
				}
			}
		})
	}
	// Readers that follow all the time.
	seen := make([][]string, partitions)
	var followers sync.WaitGroup
	follow, unfollow := context.WithCancel(t.Context())
	defer unfollow()
	for p := range partitions {
		cl := c.Client()
		followers.Go(func() {
			r, err := cl.NewReader(client.ReaderOptions{Topic: "chaos", Partition: int32(p), Follow: true})
			if !assert.NoError(t, err) {
				return
			}
			defer func() { _ = r.Close() }()
			for {
				m, err := r.Next(follow)
				if err != nil {
					if !errors.Is(err, context.Canceled) {
						assert.NoError(t, err, "a follower of partition %d", p)
					}
					return
				}
				if !assert.Equal(t, int64(len(seen[p])), m.Offset) {
					return
				}
				seen[p] = append(seen[p], string(m.Value))
			}
		})
	}

	x := &chaos{t: t, c: c, rand: rand.New(rand.NewPCG(seed, 0))}
	x.pause(&acked, 100)
	for range *chaosSteps {
		x.step(&acked)
		if t.Failed() {
			break
		}
	}
	close(stop)
	wg.Wait()
	c.WaitMembers()
	c.WaitLed("chaos")

	found := map[string]int64{}
	where := map[string]int{}
	lastOf := map[string]int{}
	var all [][]got
	for p := range partitions {
		leader, _ := c.Leader("chaos", p)
		list := readAll(t, c, leader, "chaos", int32(p), 0)
		all = append(all, list)
		dense(t, 0, list)
		for _, g := range list {
			_, twice := found[g.value]
			assert.False(t, twice, "%s is there twice", g.value)
			found[g.value], where[g.value] = g.offset, p
			var n, i int
			_, err := fmt.Sscanf(g.value, "%d/%d", &n, &i)
			require.NoError(t, err)
			if before, ok := lastOf[g.key]; ok {
				assert.Greater(t, i, before, "key %s is out of order", g.key)
			}
			lastOf[g.key] = i
		}
		referenced(t, c, "chaos", p, int64(len(list)))
	}
	total := 0
	for n := range results {
		for i, s := range results[n] {
			v := fmt.Sprintf("%d/%d", n, i)
			offset, ok := found[v]
			if s.err != nil {
				continue
			}
			total++
			if assert.True(t, ok, "%s was acked and is lost", v) {
				assert.Equal(t, s.ack.Offset, offset, "%s", v)
				assert.EqualValues(t, s.ack.Partition, where[v], "%s", v)
			}
		}
	}
	unfollow()
	followers.Wait()
	for p := range partitions {
		n := min(len(seen[p]), len(all[p]))
		assert.Equal(t, values(all[p])[:n], seen[p][:n], "what a follower of partition %d saw was changed", p)
	}
	assert.Len(t, found, total)
	t.Logf("%d records acked through %v", total, slices.Clip(x.log))
}
