package client_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/client"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
)

// later calls fn after a while of the bubble's time.
func later(d time.Duration, fn func()) { time.AfterFunc(d, fn) }

func TestAFollowerLeavesAPausedLeaderWhenAnotherLeads(t *testing.T) {
	read(t, client.ReaderOptions{Follow: true}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 6)
		require.Equal(t, expected(6), next(t, r, 6))
		resume := c.pause("a:1")
		defer resume()
		start := time.Now()
		later(6*time.Second, func() {
			c.elect("b:1", -1)
			fill(t, c, 6, 3)
		})
		require.Equal(t, expected(9)[6:], next(t, r, 3))
		require.Less(t, time.Since(start), 8*time.Second)
		last := c.reads[len(c.reads)-1]
		require.EqualValues(t, 6, last.GetOffset(), "it goes on where it was")
	})
}

func TestAReaderThatBeginsAtAPausedLeaderMovesOn(t *testing.T) {
	for name, opts := range map[string]client.ReaderOptions{
		"the beginning": {},
		"the end":       {Follow: true, Start: client.FromEnd()},
	} {
		t.Run(name, func(t *testing.T) {
			read(t, opts, func(t *testing.T, c *cluster, r *client.Reader) {
				resume := c.pause("a:1")
				defer resume()
				start := time.Now()
				later(6*time.Second, func() { c.elect("b:1", -1) })
				later(9*time.Second, func() { fill(t, c, 0, 3) })
				if opts.Follow {
					require.Equal(t, expected(3), next(t, r, 3))
				} else {
					ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
					defer cancel()
					_, err := r.Next(ctx)
					require.Error(t, err)
					require.NoError(t, ctx.Err(), "it ends at the new leader")
				}
				require.Less(t, time.Since(start), 12*time.Second)
			})
		})
	}
}

// A leader that is slow, and is the leader, keeps its readers and producers for as
// long as the stall timeout says.
func TestASlowLeaderIsNotLeft(t *testing.T) {
	read(t, client.ReaderOptions{}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 3)
		resume := c.pause("a:1")
		defer resume()
		later(20*time.Second, resume)
		require.Equal(t, expected(3), next(t, r, 3))
		require.Len(t, c.reads, 1)
	})
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		resume := c.pause("a:1")
		defer resume()
		pending := send(t, p, 0, 3)
		later(20*time.Second, resume)
		for _, ack := range wait(t, pending) {
			require.Equal(t, "a:1", ack.Broker)
			require.False(t, ack.Duplicate, "it was sent once")
		}
	})
}

// An answer under the epoch that the silent leader has is old news.
func TestOnlyAHigherEpochMovesAClient(t *testing.T) {
	produce(t, 1, small, func(t *testing.T, c *cluster, p *client.Producer) {
		wait(t, send(t, p, 0, 1))
		c.mu.Lock()
		c.told = "c:1"
		c.mu.Unlock()
		resume := c.pause("a:1")
		defer resume()
		pending := send(t, p, 1, 1)
		later(15*time.Second, resume)
		require.Equal(t, "a:1", wait(t, pending)[0].Broker)
		require.Equal(t, expected(2), c.values(0))
	})
}

func TestAProducerLeavesALeaderThatIsPausedAsAWhole(t *testing.T) {
	produce(t, 3, small, func(t *testing.T, c *cluster, p *client.Producer) {
		wait(t, send(t, p, 0, 2))
		resume := c.pause("a:1")
		defer resume()
		start := time.Now()
		pending := send(t, p, 2, 4)
		other, err := p.SendTo(t.Context(), 1, client.Record{Value: []byte("x")}) // no stream there yet
		require.NoError(t, err)
		later(6*time.Second, func() { c.elect("b:1", -1) })
		for _, ack := range wait(t, append(pending, other)) {
			require.Equal(t, "b:1", ack.Broker)
		}
		require.Less(t, time.Since(start), 8*time.Second)
		require.Equal(t, expected(6), c.values(0))
	})
}

func TestSettlingLeavesAPausedLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 1, "a:1", "b:1")
		defer c.close()
		cl := c.client("a:1", "b:1")
		defer cl.Close()
		var asked int
		c.await = func(*brokerv1.AwaitDurabilityRequest) error { asked++; return nil }
		resume := c.pause("a:1")
		defer resume()
		start := time.Now()
		later(3*time.Second, func() { c.elect("b:1", -1) })
		_, err := cl.AwaitDurability(t.Context(), topic, 0, 1, client.Leadership{Incarnation: incarnation, LeaderEpoch: 1}, client.LevelObject)
		require.NoError(t, err)
		require.Equal(t, 1, asked)
		require.Less(t, time.Since(start), 10*time.Second)
	})
}
