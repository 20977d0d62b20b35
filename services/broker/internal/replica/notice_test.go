package replica_test

import (
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// Whoever waits for a leader hears of every change on the way to one: from the
// first word of the cluster to the open epoch, without asking in between.
func TestAllChangesOnTheWayToALeaderAreTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := newScene(t, 1)
		s.rlm(1, "a")
		b := s.broker(1, vfs.NewMem())
		began := time.Now()
		var p *replica.Partition
		wait := func(changed <-chan struct{}) {
			select {
			case <-changed:
			case <-time.After(time.Minute):
				t.Fatal("nothing was told")
			}
		}
		for {
			changed := b.m.Changed()
			var err error
			if p, err = b.m.Lookup(topicName, 0); err == nil {
				break
			}
			wait(changed)
		}
		for {
			changed := p.Changed()
			if p.Offsets().Leading {
				break
			}
			wait(changed)
		}
		require.Less(t, time.Since(began), 10*time.Second)
		// At OBJECT: the first heartbeat may not be answered yet.
		_, err := p.Submit(t.Context(), replica.AppendInput{Batches: batch(t, "first", 1), Level: partition.Object})
		require.NoError(t, err)
	})
}
