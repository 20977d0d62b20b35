package sim

import (
	"flag"
	"fmt"
	"slices"
	"testing"

	"github.com/braidlog/braid/services/broker/partition"
)

var (
	simRuns = flag.Int("sim.runs", 3000, "histories per variant")
	simSeed = flag.Int64("sim.seed", 1, "first seed")
)

const simSteps = 220

// run lives through one random history, heals everything and says what was wrong.
func run(seed int64, variant func(*world)) []string {
	w := newWorld(seed)
	if variant != nil {
		variant(w)
	}
	for range simSteps {
		w.random()
		if len(w.bad) > 0 {
			return w.bad
		}
	}
	w.heal()
	w.check()
	return w.bad
}

func (w *world) random() {
	h := w.hosts[1+w.r.IntN(brokers)]
	r := w.rlms[1+w.r.IntN(2)]
	switch a := w.r.Float64(); {
	case a < .20:
		if h.up {
			w.produce(h)
		}
	case a < .34:
		if h.up {
			w.send(h, r)
		}
	case a < .42:
		w.upload(r)
	case a < .54:
		w.commit(r)
	case a < .62:
		if len(w.net) > 0 {
			w.deliver(w.r.IntN(len(w.net)))
		}
	case a < .76:
		if h.up && len(h.watch) > 0 {
			ev := h.watch[0]
			h.watch = h.watch[1:]
			w.step(h, ev)
		}
	case a < .83:
		if len(w.opens) > 0 {
			w.open(w.r.IntN(len(w.opens)))
		}
	case a < .86:
		if h.up {
			w.kill(h)
		}
	case a < .91:
		if !h.up {
			w.restart(h)
		}
	case a < .945:
		p := w.partition()
		l := p.GetLeaderId()
		if h.up && (l == 0 || !w.hosts[l].up || !p.GetOpened() || w.r.IntN(4) == 0) {
			w.elect(h.id)
		}
	case a < .96:
		if h.up {
			// The stream to the rlm breaks: what is queued of this broker is lost, what is uploaded may yet commit.
			for _, x := range w.rlms[1:] {
				x.queue = slices.DeleteFunc(x.queue, func(q queued) bool { return q.from.broker == h.id })
			}
			w.net = slices.DeleteFunc(w.net, func(m message) bool { return m.to.broker == h.id })
			w.step(h, partition.FeedLost{})
		}
	case a < .97:
		// The session of an rlm expires, or its process is replaced: uploads of the old epoch may still be submitted by
		// a message that was under way.
		old := r.objects
		w.registerRLM(r)
		for _, x := range w.hosts[1:] {
			if x.up {
				w.step(x, partition.FeedLost{})
			}
		}
		if len(old) > 0 && w.r.IntN(2) == 0 {
			if ev, _, err := w.st.DecideCommit(old[0].request); err == nil {
				w.apply(ev)
			}
		}
	case a < .985:
		// A doubled message: any object is submitted again, out of turn.
		if len(r.objects) > 1 {
			if ev, _, err := w.st.DecideCommit(r.objects[0].request); err == nil {
				w.apply(ev)
			}
		}
	default:
		if h.up {
			w.resync(h)
		}
	}
	h = w.hosts[1+w.r.IntN(brokers)]
	if h.up && w.r.IntN(4) == 0 {
		w.truncate(h)
	}
	if h.up && w.r.IntN(4) == 0 {
		w.fetch(h)
	}
	if h.up && w.r.IntN(4) == 0 {
		w.read(h)
	}
}

func (w *world) kill(h *host) {
	h.up = false
	w.waiting[h.id] = nil
	w.net = slices.DeleteFunc(w.net, func(m message) bool { return m.to.broker == h.id })
}

func (w *world) restart(h *host) {
	if w.losePages && h.disk.end() > h.disk.start && w.r.IntN(2) == 0 {
		h.disk.truncate(h.disk.end() - w.r.Int64N(1+h.disk.end()-h.disk.start))
	}
	w.start(h)
}

// heal ends all failures and lets the partition settle.
func (w *world) heal() {
	for _, h := range w.hosts[1:] {
		if !h.up {
			w.restart(h)
		}
	}
	for range 60 {
		for _, h := range w.hosts[1:] {
			for len(h.watch) > 0 {
				ev := h.watch[0]
				h.watch = h.watch[1:]
				w.step(h, ev)
			}
		}
		for len(w.opens) > 0 {
			w.open(0)
		}
		for len(w.net) > 0 {
			w.deliver(0)
		}
		p := w.partition()
		if l := p.GetLeaderId(); l == 0 || !p.GetOpened() {
			w.elect(1 + int32(w.r.IntN(brokers)))
			continue
		}
		l := w.hosts[p.GetLeaderId()]
		if s, _ := l.m.State(); s != partition.Active {
			w.elect(l.id)
			continue
		}
		if p.GetObjectEndOffset() < l.disk.end() {
			w.send(l, w.rlms[1])
		}
		for _, r := range w.rlms[1:] {
			w.upload(r)
			w.commit(r)
		}
	}
	w.settle()
}

// settle lets the followers catch up with what is committed.
func (w *world) settle() {
	for range brokers * simSteps {
		for _, h := range w.hosts[1:] {
			for len(h.watch) > 0 {
				ev := h.watch[0]
				h.watch = h.watch[1:]
				w.step(h, ev)
			}
			w.truncate(h)
			w.fetch(h)
		}
	}
}

// check compares contents, not offsets.
func (w *world) check() {
	p := w.partition()
	if !p.GetOpened() {
		w.fail("stuck: nobody can open an epoch (leader %d)", p.GetLeaderId())
		return
	}
	l := w.hosts[p.GetLeaderId()]
	if s, why := l.m.State(); s != partition.Active {
		w.fail("stuck: the leader is %v: %s", s, why)
		return
	}
	committed := w.committed().recs
	if len(w.bad) > 0 {
		return
	}
	for _, h := range w.hosts[1:] {
		if st, why := h.m.State(); h != l && (st != partition.Fetching || h.disk.end() != int64(len(committed))) {
			w.fail("follower %d is %v (%s) at %d, committed are %d", h.id, st, why, h.disk.end(), len(committed))
		}
		w.read(h)
	}
	if n := l.disk.end(); int64(len(committed)) != n {
		w.fail("upload stuck: the bucket ends at %d, the leader at %d", len(committed), n)
	}
	for i, r := range committed {
		if o := int64(i); o >= l.disk.start && o < l.disk.end() && l.disk.recs[o-l.disk.start] != r {
			w.fail("bucket and leader differ at %d", o)
			break
		}
	}
	lin := lineageOf(p.GetLineage())
	for i, r := range committed {
		if who, ok := lin.LeadershipAt(int64(i)); !ok || who != r.who {
			w.fail("the lineage says %v wrote %d, it was %v", who, i, r.who)
			break
		}
	}
	for _, a := range w.object {
		if a.offset >= int64(len(committed)) || committed[a.offset].uid != a.uid {
			w.fail("OBJECT-acked record lost: %d at %d", a.uid, a.offset)
			break
		}
	}
	if w.losePages || w.exact {
		return
	}
	have := map[int64]bool{}
	for _, r := range committed {
		have[r.uid] = true
	}
	for _, a := range w.leader {
		same := true
		for _, e := range w.elected[a.fences:] {
			same = same && e == a.broker
		}
		if same && !have[a.uid] {
			w.fail("LEADER ack lost although the same broker was elected each time")
			break
		}
	}
}

// TestElections runs the real partition machine and the real metadata state against each other.
func TestElections(t *testing.T) {
	for seed := *simSeed; seed < *simSeed+int64(*simRuns); seed++ {
		for i := range 4 {
			lose, exact := i&1 != 0, i&2 != 0
			if bad := run(seed, func(w *world) { w.losePages, w.exact = lose, exact }); len(bad) > 0 {
				t.Fatalf("seed %d, pages lost %v, exact starts %v: %v", seed, lose, exact, bad)
			}
		}
	}
}

// TestElectionRulesAreNeeded takes one rule away at a time and has to find the harm.
func TestElectionRulesAreNeeded(t *testing.T) {
	for name, variant := range map[string]func(*world){
		"acked when the object is uploaded": func(w *world) { w.ackAtPut = true },
		"the leader compares lengths":       func(w *world) { w.byLength = true },
		"reads before truncation":           func(w *world) { w.readAlways = true },
	} {
		t.Run(name, func(t *testing.T) {
			found := map[string]int{}
			for seed := *simSeed; seed < *simSeed+int64(*simRuns); seed++ {
				for _, b := range run(seed, variant) {
					found[b[:min(len(b), 24)]]++
				}
			}
			if len(found) == 0 {
				t.Fatal("no harm found: either the rule is not needed or the simulation is blind")
			}
			t.Log(fmt.Sprint(found))
		})
	}
}
