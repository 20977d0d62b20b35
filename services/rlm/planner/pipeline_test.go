package planner

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// The pipeline simulation: leaders of 40 partitions make a chunk each every
// 10 ms, two remote-log managers upload, a PUT takes a lognormal time (p50
// 80 ms, p99 400 ms) and one in a thousand 2 s more, a commit takes 5 ms. Time
// is virtual. The managers are either planners, or follow one of the literal
// rules that the design started from: commit whatever is uploaded, whenever it
// is, and send a refused range again as it is, or all from the object end on.

const (
	simPartitions = 40
	simManagers   = 2
	simTick       = 10 * time.Millisecond
	simCommit     = 5 * time.Millisecond
	simLoad       = 20 * time.Second
)

type policy int

const (
	planned policy = iota
	resendOne
	resendAll
)

type result struct {
	p50, p99      time.Duration
	amplification float64 // bytes PUT per byte committed
	putsPerSecond float64
}

type simEvent struct {
	at  time.Duration
	n   int
	run func()
}
type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].n < q[j].n
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

type sim struct {
	now    time.Duration
	queue  simQueue
	n      int
	rnd    *rand.Rand
	leo    []int64
	sent   []int64
	run    []int64
	end    []int64
	made   [][]time.Duration // when each chunk was made
	lat    []time.Duration
	puts   int
	put    int64
	useful int64
}

func (s *sim) after(d time.Duration, run func()) {
	s.n++
	heap.Push(&s.queue, simEvent{s.now + d, s.n, run})
}

func (s *sim) putTime() time.Duration {
	x := 0.080 * math.Exp(0.69*s.rnd.NormFloat64())
	if s.rnd.Float64() < 0.001 {
		x += 2
	}
	return time.Duration(x * float64(time.Second))
}

// judge accepts or refuses a range as the metadata service does.
func (s *sim) judge(p int, base, end int64) metadatav1.RangeOutcome {
	switch {
	case base > s.end[p]:
		return metadatav1.RangeOutcome_RANGE_OUTCOME_GAP
	case base < s.end[p]:
		return metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED
	}
	for o := base; o < end; o++ {
		s.lat = append(s.lat, s.now-s.made[p][o])
	}
	s.useful += end - base
	s.end[p] = end
	return accepted
}

func simulate(pol policy, cfg Config, seed uint64) result {
	s := &sim{
		rnd: rand.New(rand.NewPCG(seed, 3)),
		leo: make([]int64, simPartitions), sent: make([]int64, simPartitions), run: make([]int64, simPartitions),
		end: make([]int64, simPartitions), made: make([][]time.Duration, simPartitions),
	}
	var offer func(p int, base, end int64)
	if pol == planned {
		offer = s.planned(cfg)
	} else {
		offer = s.literal(pol, cfg)
	}
	var produce func()
	produce = func() {
		for p := range simPartitions {
			s.made[p] = append(s.made[p], s.now)
			s.leo[p]++
			base := s.sent[p]
			s.sent[p] = s.leo[p]
			offer(p, base, s.leo[p])
		}
		if s.now < simLoad {
			s.after(simTick, produce)
		}
	}
	s.after(0, produce)
	for len(s.queue) > 0 {
		e := heap.Pop(&s.queue).(simEvent)
		s.now = e.at
		if s.now > simLoad+20*time.Second {
			break
		}
		e.run()
	}
	slices.Sort(s.lat)
	return result{
		p50: s.lat[len(s.lat)/2], p99: s.lat[len(s.lat)*99/100],
		amplification: float64(s.put) / float64(max(s.useful, 1)),
		putsPerSecond: float64(s.puts) / simLoad.Seconds(),
	}
}

// planned drives one planner per manager; a leader starts again at the object
// end, in a new run, when a range is refused.
func (s *sim) planned(cfg Config) func(p int, base, end int64) {
	planners := make([]*Planner, simManagers)
	wake := make([]time.Duration, simManagers)
	var apply func(m int, e *Effects)
	apply = func(m int, e *Effects) {
		p := planners[m]
		var again []int
		for _, u := range e.Uploads {
			s.puts++
			for _, r := range u.Ranges {
				s.put += r.End - r.Base
			}
			a := Attempt{u.Object, u.Attempt}
			s.after(s.putTime(), func() { apply(m, p.Uploaded(s.now, a)) })
		}
		for _, a := range e.Commits {
			o := p.object(a.Object)
			s.after(simCommit, func() {
				list := make([]*metadatav1.RangeVerdict, len(o.ranges))
				for i, r := range o.ranges {
					list[i] = verdict(s.judge(int(r.Partition.Partition), r.Base, r.End))
				}
				apply(m, p.Judged(s.now, a, list, 0, false))
			})
		}
		for _, a := range e.Answers {
			part := int(a.Range.Partition.Partition)
			if a.Verdict.GetOutcome() != accepted && a.Range.Run == s.run[part] {
				s.run[part]++
				again = append(again, part)
			}
		}
		for _, part := range again {
			s.sent[part] = s.leo[part]
			apply(m, p.Offer(s.now, 1, Range{Partition: Key{Partition: int32(part)}, Run: s.run[part], Base: s.end[part], End: s.leo[part], Bytes: s.leo[part] - s.end[part]}, nil))
		}
		if at, ok := p.Wake(); ok && (wake[m] <= s.now || at < wake[m]) {
			wake[m] = max(at, s.now)
			s.after(wake[m]-s.now, func() { apply(m, p.Tick(s.now)) })
		}
	}
	for m := range planners {
		planners[m] = New(cfg)
		planners[m].StreamOpened(1)
		apply(m, planners[m].Registered(0, 1))
	}
	return func(p int, base, end int64) {
		m := p % simManagers
		apply(m, planners[m].Offer(s.now, 1, Range{Partition: Key{Partition: int32(p)}, Run: s.run[p], Base: base, End: end, Bytes: end - base}, nil))
	}
}

// literal is the design's first draft: an object every linger while fewer than
// InFlight are in upload, committed as soon as it is uploaded.
func (s *sim) literal(pol policy, cfg Config) func(p int, base, end int64) {
	type span struct {
		p         int
		base, end int64
	}
	queued := make([][]span, simManagers)
	inFlight := make([]int, simManagers)
	enqueue := func(p int, base, end int64) {
		queued[p%simManagers] = append(queued[p%simManagers], span{p, base, end})
	}
	var cut func(m int)
	cut = func(m int) {
		if s.now < simLoad+20*time.Second {
			s.after(cfg.Linger, func() { cut(m) })
		}
		if inFlight[m] >= cfg.InFlight || len(queued[m]) == 0 {
			return
		}
		spans := queued[m]
		queued[m] = nil
		slices.SortFunc(spans, func(a, b span) int {
			if a.p != b.p {
				return a.p - b.p
			}
			return int(a.base - b.base)
		})
		var merged []span
		for _, x := range spans {
			if n := len(merged); n > 0 && merged[n-1].p == x.p && x.base <= merged[n-1].end {
				merged[n-1].end = max(merged[n-1].end, x.end)
				continue
			}
			merged = append(merged, x)
		}
		inFlight[m]++
		s.puts++
		for _, x := range merged {
			s.put += x.end - x.base
		}
		s.after(s.putTime(), func() {
			inFlight[m]--
			s.after(simCommit, func() {
				for _, x := range merged {
					switch o := s.judge(x.p, x.base, x.end); {
					case o == accepted, x.end <= s.end[x.p]:
					case pol == resendOne && x.base > s.end[x.p]:
						enqueue(x.p, x.base, x.end)
					default:
						s.sent[x.p] = s.leo[x.p]
						enqueue(x.p, s.end[x.p], s.leo[x.p])
					}
				}
			})
		})
	}
	for m := range simManagers {
		cut(m)
	}
	return enqueue
}

func TestPipelineInOrderBeatsTheLiteralRules(t *testing.T) {
	const seed = 20260101
	base := Config{InFlight: 2, Linger: 10 * time.Millisecond, MaxBytes: 1 << 40, MaxRanges: 4096}
	hedged := base
	hedged.HedgeMin, hedged.HedgeCold = 50*time.Millisecond, 250*time.Millisecond
	deep := base
	deep.InFlight = 16

	show := func(name string, r result) result {
		t.Logf("%-34s p50 %6.0f ms  p99 %6.0f ms  bytes PUT/committed %5.2f  PUT/s %4.0f",
			name, r.p50.Seconds()*1e3, r.p99.Seconds()*1e3, r.amplification, r.putsPerSecond)
		return r
	}
	t.Logf("seed %d", seed)
	good := show("in order, 2 in flight, hedged", simulate(planned, hedged, seed))
	plain := show("in order, 2 in flight", simulate(planned, base, seed))
	one := show("literal, refused range again, 16", simulate(resendOne, deep, seed))
	all := show("literal, from the object end, 16", simulate(resendAll, deep, seed))
	two := show("literal, refused range again, 2", simulate(resendOne, base, seed))
	if testing.Verbose() { // the figures in the package comment
		tuning(hedged, func(name string, c Config) { show(name, simulate(planned, c, seed)) })
	}

	require.Less(t, good.p50, 200*time.Millisecond)
	require.Less(t, good.p99, 600*time.Millisecond)
	require.Less(t, good.amplification, 1.15, "hedges repeat a twentieth of the PUTs, refusals nothing")
	require.InDelta(t, 1, plain.amplification, 1e-9, "in order nothing is refused, so nothing is uploaded twice")
	require.Greater(t, one.p50, 4*good.p50)
	require.Greater(t, one.amplification, 5.0)
	require.Greater(t, all.amplification, 3.0)
	require.Greater(t, two.amplification, plain.amplification)
	require.Greater(t, one.p99, 2*good.p99)
}

// tuning shows what linger and the bound on uncommitted objects do.
func tuning(base Config, show func(name string, c Config)) {
	for _, linger := range []time.Duration{0, 5, 25, 50, 100} {
		c := base
		c.Linger = linger * time.Millisecond
		show("in order, hedged, linger "+c.Linger.String(), c)
	}
	for _, n := range []int{2, 3, 6, 16} {
		c := base
		c.Uncommitted = n
		show("in order, hedged, uncommitted "+strconv.Itoa(n), c)
	}
}
