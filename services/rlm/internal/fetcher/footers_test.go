package fetcher_test

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/rlm/internal/fetcher"
)

// Thousands of partitions look into one footer: it is fetched and decoded once.
func TestOneFooterServesManyPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, func(c *fetcher.Config) { c.BlockBytes = 1 << 10 })
		defer x.f.Close()
		o := x.object(1, 700)
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: time.Second, NoError: true, Count: -1})
		var wg sync.WaitGroup
		for _, d := range o.Ranges {
			wg.Go(func() {
				footer, err := x.f.Footer(t.Context(), o.Name, o.Size)
				if err != nil {
					t.Error(err)
					return
				}
				part, err := footer.Range(d.GetPartition(), d.GetBaseOffset())
				if err != nil || !proto.Equal(part.GetRange(), d) {
					t.Errorf("%v, %v", part, err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, 2, x.faults.Calls(objstore.OpRead), "a guess and the rest")
		footer, err := x.f.Footer(t.Context(), o.Name, o.Size)
		require.NoError(t, err)
		require.Equal(t, 2, x.faults.Calls(objstore.OpRead), "kept")
		for _, none := range []*logv1.RangeDescriptor{
			{Partition: o.Ranges[3].GetPartition(), BaseOffset: o.Ranges[3].GetBaseOffset() + 1},
			{Partition: &logv1.TopicIdPartition{TopicId: "other", TopicCreationOffset: 5, Partition: 3}, BaseOffset: o.Ranges[3].GetBaseOffset()},
			{Partition: &logv1.TopicIdPartition{TopicCreationOffset: 5, Partition: 700}},
			{},
		} {
			part, err := footer.Range(none.GetPartition(), none.GetBaseOffset())
			require.NoError(t, err)
			require.Nil(t, part)
		}
	})
}

func TestTheCacheOfFootersIsBounded(t *testing.T) {
	x := start(t, func(c *fetcher.Config) { c.BlockBytes, c.FooterBytes = 1<<10, 50_000 })
	defer x.f.Close()
	first := x.object(1, 50)
	for seq := range int64(20) {
		o := first
		if seq > 0 {
			o = x.object(1+seq, 50)
		}
		_, err := x.f.Footer(t.Context(), o.Name, o.Size)
		require.NoError(t, err)
		size, count := x.f.FooterStats()
		require.LessOrEqual(t, size, int64(50_000))
		require.Positive(t, count)
	}
	before := x.faults.Calls(objstore.OpRead)
	_, err := x.f.Footer(t.Context(), first.Name, first.Size)
	require.NoError(t, err)
	require.Equal(t, before+1, x.faults.Calls(objstore.OpRead), "it had made room")
}

// However many footers are wanted at once, what fetching them takes is bounded.
func TestFootersAreFetchedWithinTheirBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// One guess of 64 KiB costs 9 times that: two fit, and the large footer takes all.
		x := start(t, func(c *fetcher.Config) {
			c.BlockBytes, c.MaxFetches, c.FooterWorkBytes, c.ReadTimeout = 1<<10, 32, 2*9*64<<10, time.Hour
		})
		defer x.f.Close()
		var objects []fetcher.Object
		for seq := range int64(20) {
			o := x.object(1+seq, 400)
			objects = append(objects, fetcher.Object{Name: o.Name, Size: o.Size})
		}
		large := x.object(99, 3000)
		objects = append(objects, fetcher.Object{Name: large.Name, Size: large.Size})
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: time.Second, NoError: true, Count: -1})
		begin := time.Now()
		var got atomic.Int64
		require.NoError(t, x.f.Footers(t.Context(), objects, func(int, *fetcher.Footer) error { got.Add(1); return nil }))
		require.EqualValues(t, len(objects), got.Load())
		require.GreaterOrEqual(t, time.Since(begin), 10*time.Second, "two at a time")
	})
}

// A damaged footer is read again past what is kept, and the answer is not kept.
func TestDamagedFootersAreReadAgain(t *testing.T) {
	for name, block := range map[string]int64{"small": 1 << 20, "large": 1 << 10} {
		t.Run(name, func(t *testing.T) {
			x := start(t, func(c *fetcher.Config) { c.BlockBytes = block })
			defer x.f.Close()
			o := x.object(1, 5)
			flip := func(content []byte) []byte {
				content = bytes.Clone(content)
				content[len(content)-60] ^= 4
				return content
			}
			require.True(t, x.store.Tamper(o.Name, flip))
			if name == "small" {
				// Damaged on the way into the cache of blocks, and whole in the store.
				_, err := x.read(o.Name, 0, 10)
				require.NoError(t, err)
				require.True(t, x.store.Tamper(o.Name, flip))
				footer, err := x.f.Footer(t.Context(), o.Name, o.Size)
				require.NoError(t, err)
				require.Equal(t, 5, footer.Len())
				return
			}
			_, err := x.f.Footer(t.Context(), o.Name, o.Size)
			var damage *fetcher.DamageError
			require.ErrorAs(t, err, &damage)
			require.Equal(t, o.Name, damage.Object)
			require.Equal(t, 2, x.faults.Calls(objstore.OpRead))
			require.True(t, x.store.Tamper(o.Name, flip))
			_, err = x.f.Footer(t.Context(), o.Name, o.Size)
			require.NoError(t, err)
		})
	}
}

// Giving up while others hold the budget is no answer about the object (I11).
func TestWaitingForTheFooterBudgetEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, func(c *fetcher.Config) { c.BlockBytes, c.FooterWorkBytes, c.ReadTimeout = 1<<10, 1, 3*time.Second })
		defer x.f.Close()
		a, b := x.object(1, 3), x.object(2, 3)
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: time.Hour, NoError: true, Count: -1})
		var wg sync.WaitGroup
		for _, name := range []string{a.Name, b.Name} {
			wg.Go(func() {
				_, err := x.f.Footer(t.Context(), name, a.Size)
				if err == nil {
					t.Error("no answer was possible")
				}
			})
		}
		wg.Wait()
		_, err := x.f.Footer(t.Context(), a.Name, a.Size)
		require.ErrorIs(t, err, fetcher.ErrUnavailable)
		require.NotErrorIs(t, err, fetcher.ErrNotFound)
	})
}
