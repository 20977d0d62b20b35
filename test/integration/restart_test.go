package integration_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/test/cluster"
)

// What was acked at LEADER outlives any number of deaths of the leader's process,
// with the bucket up or down, as long as nobody else leads in between; and what was
// refused is not there.
func TestLEADERAcksOutliveRestartsOfTheirLeaderUnderLoad(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("lives", 1, "leader.return.grace", "1m")
	leader, epoch := c.Leader("lives", 0)
	other := c.Broker(3 - leader.ID())
	l := newLedger()
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for n := range 4 {
		at := leader
		if n == 3 {
			at = other // forwarded
		}
		c.Conn(at)
		senders.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				// Not idempotent, so that each value is sent once.
				if err := l.send(c, at, "lives", n == 0, 3*time.Second, fmt.Sprintf("%d-%d", n, i)); err != nil {
					c.Within(20*time.Millisecond, func() bool { return false }) // or refusals would be counted by the thousand
				}
			}
		})
	}
	acked := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.acked)
	}
	for life := range 6 {
		before := acked()
		c.Eventually("appends are acked", func() bool { return acked() > before+20 })
		c.BucketDown(life%2 == 0)
		before = acked()
		c.Eventually("appends are acked", func() bool { return acked() > before+20 })
		leader.Restart()
		var now *cluster.Member
		now, epoch = c.LeaderAbove("lives", 0, epoch)
		require.Equal(t, leader.ID(), now.ID())
	}
	c.BucketDown(false)
	close(stop)
	senders.Wait()
	c.WaitReady(leader)
	o := offsets(t, c, leader, "lives", 0)
	c.Eventually("all is uploaded", func() bool {
		return offsets(t, c, leader, "lives", 0).GetHighWatermark() == o.GetLogEndOffset()
	})
	l.judge(t, readAll(t, c, leader, "lives", 0, 0))
	referenced(t, c, "lives", 0, o.GetLogEndOffset())
	c.Elect("lives", 0, other)
	l.judge(t, readAll(t, c, other, "lives", 0, 0))
}
