package client_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// fill stores n values in batches of three.
func fill(t *testing.T, c *cluster, from, n int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.logs[0]
	b := record.NewBuilder(record.CodecNone)
	for i := 0; i < n; i += 3 {
		b.Reset()
		for j := i; j < min(i+3, n); j++ {
			require.NoError(t, b.Append(record.Record{Timestamp: 1000 + int64(j), Value: fmt.Appendf(nil, "v%d", from+j)}))
		}
		_, batch, err := b.Build(nil)
		require.NoError(t, err)
		batch.SetBaseOffset(l.end())
		batch.SetLeaderEpoch(c.epoch)
		l.batches = append(l.batches, batch)
	}
}

func read(t *testing.T, opts client.ReaderOptions, fn func(*testing.T, *cluster, *client.Reader)) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 1, "a:1", "b:1")
		defer c.close()
		cl := c.client("a:1", "b:1")
		defer cl.Close()
		opts.Topic = topic
		r, err := cl.NewReader(opts)
		require.NoError(t, err)
		defer r.Close()
		fn(t, c, r)
	})
}

// next reads n values.
func next(t *testing.T, r *client.Reader, n int) []string {
	t.Helper()
	var out []string
	for range n {
		m, err := r.Next(t.Context())
		require.NoError(t, err)
		out = append(out, string(m.Value))
	}
	return out
}

func TestReadToTheEnd(t *testing.T) {
	read(t, client.ReaderOptions{}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 10)
		require.Equal(t, expected(10), next(t, r, 10))
		_, err := r.Next(t.Context())
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestReadFromTheMiddleOfABatch(t *testing.T) {
	read(t, client.ReaderOptions{Start: client.FromOffset(4)}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 10)
		m, err := r.Next(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 4, m.Offset)
		require.Equal(t, "v4", string(m.Value))
		require.Equal(t, client.Leadership{Incarnation: incarnation, LeaderEpoch: 1}, m.Leadership)
		require.Equal(t, time.UnixMilli(1004), m.Timestamp)
	})
}

func TestReadFromTheEndFollows(t *testing.T) {
	read(t, client.ReaderOptions{Start: client.FromEnd(), Follow: true}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 4)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := r.Next(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		fill(t, c, 4, 2)
		require.Equal(t, []string{"v4", "v5"}, next(t, r, 2))
	})
}

func TestAReaderGoesOnAtTheNextOffsetAfterAChangeOfLeader(t *testing.T) {
	read(t, client.ReaderOptions{Follow: true}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 6)
		require.Equal(t, expected(4), next(t, r, 4)) // in the middle of a batch
		c.kill("a:1")
		c.elect("b:1", -1)
		fill(t, c, 6, 6)
		require.Equal(t, expected(12)[4:], next(t, r, 8))
		last := c.reads[len(c.reads)-1]
		require.EqualValues(t, 6, last.GetOffset(), "what was received whole is not asked for again")
		require.EqualValues(t, 1, last.GetLastLeadership().GetLeaderEpoch())
		require.EqualValues(t, incarnation, last.GetLastLeadership().GetIncarnation())
	})
}

func TestAReaderSurvivesRefusalsThatPass(t *testing.T) {
	read(t, client.ReaderOptions{}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 30)
		calls := 0
		c.readFault = func(int, *brokerv1.ReadRequest) error {
			calls++
			switch {
			case calls%4 == 1:
				return rpcerr.Draining()
			case calls%4 == 3:
				return unavailable(errorsv1.ErrorReason_ERROR_REASON_RECOVERING)
			}
			return nil
		}
		require.Equal(t, expected(30), next(t, r, 30))
	})
}

func TestTruncationIsTold(t *testing.T) {
	read(t, client.ReaderOptions{Follow: true}, func(t *testing.T, c *cluster, r *client.Reader) {
		fill(t, c, 0, 3)
		next(t, r, 3)
		c.mu.Lock()
		c.readFault = func(n int, req *brokerv1.ReadRequest) error {
			if n > 1 {
				assert.NotNil(t, req.GetLastLeadership())
				return rpcerr.LogTruncated(topic, 1)
			}
			return rpcerr.Draining()
		}
		c.mu.Unlock()
		_, err := r.Next(t.Context())
		require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED), "%v", err)
		e, _ := rpcerr.From(err)
		point, _ := e.Int("fork_point")
		require.EqualValues(t, 1, point)
		_, again := r.Next(t.Context())
		require.Equal(t, err, again)
	})
}

func TestDamageIsFoundBeforeARecordLeaves(t *testing.T) {
	for name, damage := range map[string]func(l *plog){
		"a flipped bit": func(l *plog) { l.batches[1][record.HeaderSize+3] ^= 1 },
		"a wrong epoch": func(l *plog) { l.batches[1].SetLeaderEpoch(9) },
		"a hole":        func(l *plog) { l.batches[1].SetBaseOffset(4) },
	} {
		t.Run(name, func(t *testing.T) {
			read(t, client.ReaderOptions{}, func(t *testing.T, c *cluster, r *client.Reader) {
				fill(t, c, 0, 9)
				damage(c.logs[0])
				require.Equal(t, expected(3), next(t, r, 3))
				_, err := r.Next(t.Context())
				require.ErrorIs(t, err, record.ErrCorrupt)
			})
		})
	}
}

func TestPatienceEnds(t *testing.T) {
	read(t, client.ReaderOptions{Patience: 10 * time.Second}, func(t *testing.T, c *cluster, r *client.Reader) {
		c.elect("", -1)
		start := time.Now()
		_, err := r.Next(t.Context())
		require.ErrorContains(t, err, "nobody answered for 10s")
		require.Less(t, time.Since(start), 15*time.Second)
	})
}

func TestOffsets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 1, "a:1", "b:1")
		defer c.close()
		cl := c.client()
		defer cl.Close()
		fill(t, c, 0, 5)
		c.elect("b:1", -1)
		got, err := cl.PartitionOffsets(t.Context(), topic, 0)
		require.NoError(t, err)
		require.EqualValues(t, 5, got.HighWatermark)
	})
}
