package integration_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/test/cluster"
)

// A leader that died is replaced, comes back, catches up, and is handed the
// leadership again under load: no ack is lost with that, at LEADER neither.
func TestLeadershipReturnsToThePreferredBrokerWithoutALostAck(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2, ChangeMetadata: func(cfg *metadata.Config) {
		cfg.RebalanceDelay = config.Duration(500 * time.Millisecond)
	}})
	created := c.CreateTopic("returns", 1, "leader.return.grace", "0s")
	preferred := c.Broker(int(created.GetPartitions()[0].GetReplicaIds()[0]))
	other := c.Broker(3 - preferred.ID())
	leader, epoch := c.Leader("returns", 0)
	require.Equal(t, preferred, leader)
	// What is acked at LEADER only may go with a leader that dies.
	mustAppend(t, c, leader, "returns", 0, levelObject, plain(t, "before"))
	waitCopied(c, other, "returns", 0, 1)
	leader.Kill()
	leader, epoch = c.LeaderAbove("returns", 0, epoch)
	require.Equal(t, other, leader)

	l := newLedger()
	l.acked["before"] = 0
	stop := make(chan struct{})
	var senders sync.WaitGroup
	c.Conn(other)
	longest := make([]time.Duration, 4)
	for n := range longest {
		senders.Go(func() {
			last := time.Now()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				// Forwarded from the moment on that the other one leads.
				if err := l.send(c, other, "returns", n == 0, 10*time.Second, fmt.Sprintf("%d-%d", n, i)); err != nil {
					c.Within(20*time.Millisecond, func() bool { return false })
					continue
				}
				longest[n], last = max(longest[n], time.Since(last)), time.Now()
			}
		})
	}
	acked := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.acked)
	}
	c.Eventually("appends are acked", func() bool { return acked() > 50 })
	preferred.Start()
	var next int32
	for {
		leader, next = c.LeaderAbove("returns", 0, epoch)
		if leader == preferred {
			break
		}
		epoch = next
	}
	before := acked()
	c.Eventually("appends are acked by it", func() bool { return acked() > before+50 })
	close(stop)
	senders.Wait()
	t.Logf("longest pauses %v", longest)
	mustAppend(t, c, preferred, "returns", 0, levelObject, plain(t, "end"))
	l.acked["end"] = offsets(t, c, preferred, "returns", 0).GetHighWatermark() - 1
	l.judge(t, readAll(t, c, preferred, "returns", 0, 0))
	waitCopied(c, other, "returns", 0, l.acked["end"]+1)
	sameCopies(t, c, "returns", 1)
	_, now := c.Leader("returns", 0)
	require.Equal(t, next, now, "it stays")
	referenced(t, c, "returns", 0, l.acked["end"]+1)
}
