package replica_test

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/services/broker/partition"
)

func TestAppendUploadsAndAcksObject(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		p := b.leading(0)
		res := mustAdd(t, p, batch(t, "one", 3), partition.Object)
		require.EqualValues(t, 0, res.Base)
		require.EqualValues(t, 3, res.End)
		require.Contains(t, res.Levels, partition.Object)
		require.EqualValues(t, 1, res.Leadership.LeaderEpoch)
		res = mustAdd(t, p, batch(t, "two", 2), partition.Leader)
		require.EqualValues(t, 3, res.Base)
		until(t, "all committed", func() bool { return s.world.objectEnd(0) == 5 })
		until(t, "high watermark", func() bool { return p.Offsets().HighWatermark == 5 })
		require.Equal(t, []string{"one-0", "one-1", "one-2", "two-0", "two-1"}, values(t, p))
	})
}
