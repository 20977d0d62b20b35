package controller

import (
	"sync"
	"time"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// MaxHandovers is how many leaderships one answer asks for.
const MaxHandovers = 64

// wishInterval bounds how often all partitions are looked at for a preferred
// leader.
const wishInterval = time.Second

// wishes knows since when a live replica has stood before the leader of a
// partition, by the controller's clock, and whom to ask for what. A broker that
// registers again or a new leader begins the delay anew: a leader that has just
// handed over on its way to stop is not offered the partition back. A better
// replica whose delay still runs is waited for, rather than moving a leadership
// twice. Like the elector it begins anew with every term.
//
// It is pure but for its lock: time comes as a monotonic reading.
type wishes struct {
	delay time.Duration // 0 for no wishes

	mu     sync.Mutex // guards all below; held for a pass over all partitions at most every wishInterval
	looked bool
	at     time.Duration // of the last look
	since  map[state.PartitionID]standing
	byID   map[int32][]state.Preference // what each leader is asked for, past the delay
	turn   map[int32]int                // where the next answer to each begins
}

// standing is a preference and when it was first seen.
type standing struct {
	preference state.Preference
	at         time.Duration
}

func newWishes(delay time.Duration) *wishes {
	return &wishes{delay: delay, turn: make(map[int32]int)}
}

// of returns what a broker is asked for, as far as it still holds in the state.
func (w *wishes) of(st *state.State, brokerID int32, now time.Duration) []*metadatav1.Handover {
	if w.delay == 0 {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if interval := min(wishInterval, w.delay); !w.looked || now-w.at >= interval {
		w.look(st, now)
	}
	all := w.byID[brokerID]
	var out []*metadatav1.Handover
	first := w.turn[brokerID]
	i := 0
	for ; i < len(all) && len(out) < MaxHandovers; i++ {
		if h, ok := st.Handover(all[(first+i)%len(all)]); ok {
			out = append(out, h)
		}
	}
	if len(all) > 0 {
		w.turn[brokerID] = (first + i) % len(all)
	}
	return out
}

func (w *wishes) look(st *state.State, now time.Duration) {
	since := make(map[state.PartitionID]standing, len(w.since))
	w.byID = make(map[int32][]state.Preference)
	st.Unpreferred(func(p state.Preference) bool {
		seen, known := w.since[p.Partition]
		if !known || seen.preference != p {
			seen = standing{p, now}
		}
		since[p.Partition] = seen
		if now-seen.at >= w.delay {
			w.byID[p.LeaderID] = append(w.byID[p.LeaderID], p)
		}
		return true
	})
	w.since, w.looked, w.at = since, true, now
}
