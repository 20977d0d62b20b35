package planner

import (
	"slices"
	"time"
)

// sampled is how many of the last PUTs are remembered; below minSampled of
// them nothing is concluded.
const (
	sampled    = 128
	minSampled = 20
)

// durations remembers how long the last PUTs took.
type durations struct {
	ring [sampled]time.Duration
	n    int // seen
	p95  time.Duration
}

func (d *durations) add(t time.Duration) {
	d.ring[d.n%sampled] = t
	d.n++
	if d.n < minSampled {
		return
	}
	sorted := d.ring
	known := sorted[:min(d.n, sampled)]
	slices.Sort(known)
	d.p95 = known[len(known)*95/100]
}

// slow is the age at which a PUT counts as slow; cold while too few were seen.
func (d *durations) slow(cold time.Duration) time.Duration {
	if d.n < minSampled {
		return cold
	}
	return d.p95
}
