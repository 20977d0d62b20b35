package planner

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

var seedFlag = flag.Uint64("seed", 0, "replay one random history")

// world is a plain model of everything around a planner: leaders that send
// their logs, a bucket that loses answers, and a metadata service that judges.
type world struct {
	t    *testing.T
	rnd  *rand.Rand
	cfg  Config
	p    *Planner
	now  time.Duration
	log  []string
	calm bool // no more faults

	// Metadata.
	epoch    int64
	open     bool
	lastSeq  int64
	ends     []int64 // object end of each partition
	memory   map[Attempt][]*metadatav1.RangeVerdict
	accepted map[int32]map[int64]bool // partition -> offsets accepted

	// Leaders, one per partition.
	leaders []*leader
	nextID  StreamID

	// Running work.
	puts    []Upload
	ended   map[Attempt]bool
	commits []Attempt
	seen    map[Attempt][]Range // every upload asked for
	judged  map[Object]bool
}

type leader struct {
	partition int32
	stream    StreamID
	run       int64
	leo       int64 // end of its log
	sent      int64 // end of what was sent in this run
	end       int64 // object end as it knows it
	waiting   []Range
}

func newWorld(t *testing.T, seed uint64) *world {
	rnd := rand.New(rand.NewPCG(seed, 7))
	cfg := Config{
		InFlight: 1 + rnd.IntN(3), Linger: time.Duration(rnd.IntN(20)) * ms,
		MaxBytes: int64(20 + rnd.IntN(200)), MaxRanges: 1 + rnd.IntN(10),
	}
	if rnd.IntN(2) == 0 {
		cfg.HedgeMin, cfg.HedgeCold = 5*ms, 30*ms
	}
	w := &world{
		t: t, rnd: rnd, cfg: cfg, p: New(cfg),
		memory: map[Attempt][]*metadatav1.RangeVerdict{}, accepted: map[int32]map[int64]bool{},
		ended: map[Attempt]bool{}, seen: map[Attempt][]Range{}, judged: map[Object]bool{}, nextID: 1,
	}
	for i := range int32(2 + rnd.IntN(5)) {
		w.leaders = append(w.leaders, &leader{partition: i})
		w.ends = append(w.ends, 0)
		w.accepted[i] = map[int64]bool{}
		w.connect(w.leaders[i])
	}
	w.register()
	return w
}

func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	for _, l := range w.log[max(0, len(w.log)-60):] {
		w.t.Log(l)
	}
	w.t.Fatalf(format, args...)
}

func (w *world) note(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%v ", w.now)+fmt.Sprintf(format, args...))
}

func (w *world) connect(l *leader) {
	if l.stream != 0 {
		w.apply(w.p.StreamClosed(w.now, l.stream))
	}
	l.stream = w.nextID
	w.nextID++
	w.p.StreamOpened(l.stream)
	l.waiting = nil
	w.restart(l)
}

// restart begins a new run at the object end.
func (w *world) restart(l *leader) {
	l.run++
	l.end = w.ends[l.partition]
	l.sent = l.end
	l.leo = max(l.leo, l.end)
}

func (w *world) register() {
	w.epoch++
	w.open, w.lastSeq = true, 0
	w.note("registered %d", w.epoch)
	w.apply(w.p.Registered(w.now, w.epoch))
}

// send offers the leader's next range.
func (w *world) send(l *leader) {
	if l.sent == l.leo {
		l.leo += 1 + int64(w.rnd.IntN(4))
	}
	n := 1 + w.rnd.Int64N(l.leo-l.sent)
	r := Range{Partition: Key{1, "t", l.partition}, Run: l.run, Base: l.sent, End: l.sent + n, Bytes: 5 + w.rnd.Int64N(30)}
	if !w.calm && w.rnd.IntN(40) == 0 {
		r.Bytes = w.cfg.MaxBytes * 2
	}
	l.sent += n
	l.waiting = append(l.waiting, r)
	w.note("offer p%d run %d [%d,%d) %dB", l.partition, l.run, r.Base, r.End, r.Bytes)
	w.apply(w.p.Offer(w.now, l.stream, r, nil))
}

// judge is the metadata service's decision on one command.
func (w *world) judge(a Attempt) ([]*metadatav1.RangeVerdict, bool) {
	if first, ok := w.memory[a]; ok {
		return first, false
	}
	ranges := w.seen[a]
	list := make([]*metadatav1.RangeVerdict, len(ranges))
	if !w.open || a.Epoch != w.epoch || a.Sequence <= w.lastSeq {
		if w.open && a.Epoch == w.epoch {
			w.fatal("sequence %d committed behind %d", a.Sequence, w.lastSeq)
		}
		for i := range list {
			list[i] = verdict(notJudged)
		}
		return list, true
	}
	some := false
	for i, r := range ranges {
		part := r.Partition.Partition
		switch end := w.ends[part]; {
		case !w.calm && w.rnd.IntN(25) == 0:
			list[i] = verdict(metadatav1.RangeOutcome_RANGE_OUTCOME_FENCED)
		case r.Base == end:
			list[i] = verdict(accepted)
			for o := r.Base; o < r.End; o++ {
				if w.accepted[part][o] {
					w.fatal("p%d offset %d accepted twice", part, o)
				}
				w.accepted[part][o] = true
			}
			w.ends[part] = r.End
			some = true
		case r.Base > end:
			list[i] = verdict(metadatav1.RangeOutcome_RANGE_OUTCOME_GAP)
		default:
			list[i] = verdict(metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED)
		}
		list[i].ObjectEndOffset = w.ends[part]
	}
	if some {
		w.lastSeq = a.Sequence
		w.memory[a] = list
	}
	return list, false
}

// apply does what the planner asked for and checks that it may ask for it.
func (w *world) apply(e *Effects) {
	var restart []*leader
	for _, u := range e.Uploads {
		a := Attempt{u.Object, u.Attempt}
		if w.seen[a] != nil {
			w.fatal("attempt %v twice", a)
		}
		w.seen[a] = slices.Clone(u.Ranges)
		var bytes int64
		for i, r := range u.Ranges {
			bytes += r.Bytes
			if i > 0 {
				prev := u.Ranges[i-1]
				if c := prev.Partition.Compare(r.Partition); c > 0 || c == 0 && prev.End != r.Base {
					w.fatal("object %v: %v does not follow %v", a, r, prev)
				}
			}
		}
		if len(u.Ranges) == 0 || len(u.Ranges) > w.cfg.MaxRanges || bytes > w.cfg.MaxBytes && len(u.Ranges) > 1 {
			w.fatal("object %v: %d ranges, %d bytes", a, len(u.Ranges), bytes)
		}
		w.puts = append(w.puts, u)
		w.note("put %v %v", a, u.Ranges)
	}
	for _, a := range e.Commits {
		if w.judged[a.Object] {
			w.fatal("object %v committed again", a)
		}
		w.judged[a.Object] = true
		for _, c := range w.commits {
			if c.Epoch == a.Epoch {
				w.fatal("%v committed before the verdict on %v", a, c)
			}
		}
		if !w.ended[a] {
			w.fatal("%v committed and not uploaded", a)
		}
		w.commits = append(w.commits, a)
		w.note("commit %v", a)
	}
	if s := w.p.Stats(); s.Uploading > w.cfg.InFlight || s.Uncommitted > 2*w.cfg.InFlight {
		w.fatal("too much in flight: %+v", s)
	}
	for _, ans := range e.Answers {
		part := ans.Range.Partition.Partition
		l := w.leaders[part]
		if l.stream != ans.Stream {
			w.fatal("answer to a closed stream")
		}
		if len(l.waiting) == 0 || l.waiting[0] != ans.Range {
			w.fatal("p%d: answer for %v, waiting for %v", part, ans.Range, l.waiting)
		}
		l.waiting = l.waiting[1:]
		w.note("answer p%d run %d [%d,%d) %v", part, ans.Range.Run, ans.Range.Base, ans.Range.End, ans.Verdict.GetOutcome())
		if ans.Verdict.GetOutcome() == accepted {
			if !w.accepted[part][ans.Range.Base] || !w.accepted[part][ans.Range.End-1] {
				w.fatal("p%d: told accepted, was not", part)
			}
		} else if ans.Range.Run == l.run && !slices.Contains(restart, l) {
			restart = append(restart, l)
		}
	}
	reregister := e.Reregister
	for _, l := range restart {
		w.restart(l)
	}
	if reregister {
		w.register()
	}
}

func (w *world) step() {
	switch k := w.rnd.IntN(100); {
	case k < 35:
		l := w.leaders[w.rnd.IntN(len(w.leaders))]
		if len(l.waiting) < 12 {
			w.send(l)
		}
	case k < 60 && len(w.puts) > 0:
		i := w.rnd.IntN(len(w.puts))
		u := w.puts[i]
		w.puts = slices.Delete(w.puts, i, i+1)
		a := Attempt{u.Object, u.Attempt}
		if !w.calm && w.rnd.IntN(4) == 0 {
			w.note("put %v failed", a)
			w.apply(w.p.UploadFailed(w.now, a))
			return
		}
		w.ended[a] = true
		w.note("put %v done", a)
		w.apply(w.p.Uploaded(w.now, a))
	case k < 80 && len(w.commits) > 0:
		i := w.rnd.IntN(len(w.commits))
		a := w.commits[i]
		list, closed := w.judge(a)
		if !w.calm && w.rnd.IntN(3) == 0 {
			w.note("verdict on %v lost", a)
			return // repeated later
		}
		w.commits = slices.Delete(w.commits, i, i+1)
		w.note("verdict on %v: %v", a, list)
		w.apply(w.p.Judged(w.now, a, list, 1, closed))
	case k < 82 && !w.calm && w.open && w.rnd.IntN(3) == 0:
		w.open = false // the session expired; the rlm may learn of it late
		w.note("epoch %d closed", w.epoch)
	case k < 85 && !w.open:
		old := w.epoch
		if w.rnd.IntN(2) == 0 {
			w.apply(w.p.EpochClosed(w.now, old))
		}
		w.register()
	case k < 87 && !w.calm:
		l := w.leaders[w.rnd.IntN(len(w.leaders))]
		w.note("p%d reconnects", l.partition)
		w.connect(l)
	default:
		w.now += time.Duration(w.rnd.IntN(15)) * ms
		if at, ok := w.p.Wake(); ok && w.rnd.IntN(2) == 0 {
			w.now = max(w.now, at)
		}
		w.apply(w.p.Tick(w.now))
	}
}

// TestPlannerAgainstAPlainModel runs random histories with lost answers,
// failed PUTs, closed epochs and reconnecting leaders.
func TestPlannerAgainstAPlainModel(t *testing.T) {
	histories, steps := 120, 1000
	first := rand.Uint64()
	if *seedFlag != 0 {
		histories, first = 1, *seedFlag
	}
	t.Logf("first seed %d", first)
	for i := range uint64(histories) {
		seed := first + i
		w := newWorld(t, seed)
		w.note("seed %d", seed)
		for range steps {
			w.step()
		}
		// The faults stop: everything offered is accepted before long.
		w.calm = true
		if !w.open {
			w.apply(w.p.EpochClosed(w.now, w.epoch))
			w.register()
		}
		goal := make([]int64, len(w.leaders))
		for p, l := range w.leaders {
			goal[p] = l.leo
		}
		for n := 0; ; n++ {
			done := true
			for p, l := range w.leaders {
				done = done && w.ends[p] >= goal[p]
				if l.sent < l.leo && len(l.waiting) < 12 {
					w.send(l)
				}
			}
			if done {
				break
			}
			if n > 20000 {
				w.fatal("seed %d: stuck at %v, goal %v, stats %+v", seed, w.ends, goal, w.p.Stats())
			}
			w.step()
		}
		for p := range w.leaders {
			for o := range w.ends[p] {
				if !w.accepted[int32(p)][o] {
					w.fatal("seed %d: p%d has a hole at %d", seed, p, o)
				}
			}
		}
	}
	require.False(t, t.Failed())
}
