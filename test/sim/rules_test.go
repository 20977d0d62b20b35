package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// This file is a plain model of elections: three brokers, one partition, contents instead of offsets, every rule a
// switch. It shows that the rules suffice and that each of them is needed; elections_test.go shows that the machines
// follow them. It goes beyond what is built: followers, cuts and the other commit rules are modelled too.

type rules struct {
	fenceOpen   bool // an opening is judged by the current fence
	exactCut    bool // the first opening after a cut starts at the cut
	quiet       bool // followers do not truncate against a leader that has not opened
	brokerEpoch bool // a broker that registers again is fenced
	truncFirst  bool // nearest reads only from replicas reconciled at the current fence
	isrEpoch    bool // the ISR is entered at or above the epoch's start

	losePages    bool // a restart may lose a suffix
	cuts         bool // operators cut
	inlineObject bool // records above the object end are sent inline on object topics
}

type commitRule int

const (
	byObject commitRule = iota
	byReplicas
	byEither
)

func (r commitRule) String() string { return [...]string{"object", "replicas", "either"}[r] }

type mrec struct{ epoch, uid int }

type mstart struct{ epoch, at int }

func startsOf(log []mrec) []mstart {
	var out []mstart
	for i, r := range log {
		if len(out) == 0 || out[len(out)-1].epoch != r.epoch {
			out = append(out, mstart{r.epoch, i})
		}
	}
	return out
}

const endless = 1 << 40

// commonEnd is the lesser end of the last epoch that both hold.
func commonEnd(a []mstart, an int, b []mstart, bn int) int {
	for i := len(a) - 1; i >= 0; i-- {
		j := slices.IndexFunc(b, func(s mstart) bool { return s.epoch == a[i].epoch })
		if j < 0 {
			continue
		}
		ae, be := an, bn
		if i+1 < len(a) {
			ae = a[i+1].at
		}
		if j+1 < len(b) {
			be = b[j+1].at
		}
		return min(ae, be)
	}
	return 0
}

func belowStart(l []mstart, at int) []mstart {
	var out []mstart
	for _, s := range l {
		if s.at < at {
			out = append(out, s)
		}
	}
	return out
}

type mbroker struct {
	log        []mrec
	up         bool
	state      byte // 'F'ollower, 'R'ecovering, 'A'ctive
	epoch      int
	sent       int
	objectEnd  int
	hw         int
	reconciled int
	registered int
	ends       [3]int // what followers reported
	known      [3]bool
}

type mrange struct {
	epoch, base int
	recs        []mrec
	prev        int
	from        int
}

type mopening struct {
	epoch, start int
	lin          []mstart
	from, reg    int
}

type mack struct{ broker, elections int }

type model struct {
	r    *rand.Rand
	rule commitRule
	on   rules

	b        [3]*mbroker
	fence    int
	leader   int // -1 for none
	opened   bool
	wal      []mrec
	lin      []mstart
	cutAt    int // -1 for none
	isr      map[int]bool
	inFlight []mrange
	openings []mopening
	bucket   bool
	uid      int
	cut      map[int]bool
	ackO     map[int]bool
	ackR     map[int]bool
	ackL     map[int]mack
	elected  []int
	bad      map[string]bool
}

func newModel(seed int64, rule commitRule, on rules) *model {
	m := &model{r: rand.New(rand.NewPCG(uint64(seed), 0)), rule: rule, on: on, leader: -1, cutAt: -1, bucket: true, bad: map[string]bool{},
		isr: map[int]bool{0: true, 1: true, 2: true}, cut: map[int]bool{}, ackO: map[int]bool{}, ackR: map[int]bool{}, ackL: map[int]mack{}}
	for i := range m.b {
		m.b[i] = &mbroker{up: true, state: 'F'}
	}
	m.elect(0)
	m.reconcile(0)
	o := m.openings[0]
	m.openings = nil
	m.open(o)
	return m
}

func (m *model) elect(i int) {
	m.fence++
	m.leader, m.opened = i, false
	m.elected = append(m.elected, i)
	m.b[i].state, m.b[i].epoch, m.b[i].reconciled = 'R', m.fence, 0
}

func (m *model) reconcile(i int) {
	x := m.b[i]
	if x.state != 'R' || !x.up {
		return
	}
	c := commonEnd(startsOf(x.log), len(x.log), m.lin, endless)
	if m.on.exactCut && m.cutAt >= 0 {
		c = min(c, m.cutAt)
	}
	if c = min(c, len(x.log)); c < len(m.wal) {
		if !m.bucket {
			return
		}
		x.log = append(slices.Clone(x.log[:c]), m.wal[c:]...)
	} else {
		x.log = slices.Clone(x.log[:c])
	}
	x.reconciled, x.hw, x.known = x.epoch, 0, [3]bool{}
	m.openings = append(m.openings, mopening{x.epoch, len(x.log), startsOf(x.log), i, x.registered})
}

func (m *model) open(o mopening) {
	x := m.b[o.from]
	switch {
	case m.on.fenceOpen && o.epoch != m.fence,
		m.on.brokerEpoch && x.registered != o.reg,
		m.leader == o.from && m.opened && m.fence == o.epoch,
		o.start < len(m.wal),
		m.on.exactCut && m.cutAt >= 0 && o.start != m.cutAt:
		return
	}
	lin := belowStart(m.lin, o.start)
	if !slices.Equal(belowStart(o.lin, o.start), lin) {
		return
	}
	m.lin, m.cutAt = append(lin, mstart{o.epoch, o.start}), -1
	if m.fence == o.epoch {
		m.opened = true
	}
	if x.up && x.epoch == o.epoch && x.registered == o.reg {
		x.state, x.sent, x.objectEnd = 'A', len(m.wal), len(m.wal)
	}
}

func (m *model) advance(i int) {
	x := m.b[i]
	if x.state != 'A' || !x.up {
		return
	}
	object, replicas := min(x.objectEnd, len(x.log)), 0
	if m.leader == i && m.fence == x.epoch && len(m.isr) >= 2 {
		replicas = len(x.log)
		for f := range m.isr {
			if f != i {
				replicas = min(replicas, x.ends[f])
			}
			if f != i && !x.known[f] {
				replicas = 0
			}
		}
	}
	x.hw = max(x.hw, map[commitRule]int{byObject: object, byReplicas: replicas, byEither: max(object, replicas)}[m.rule])
	for _, r := range x.log[:object] {
		m.ackO[r.uid] = true
	}
	for _, r := range x.log[:replicas] {
		m.ackR[r.uid] = true
	}
}

func (m *model) commit(g mrange) {
	if g.epoch != m.fence || !m.opened {
		return
	}
	x := m.b[g.from]
	if end := g.base + len(g.recs); g.base != len(m.wal) {
		if end <= len(m.wal) && x.state == 'A' && x.epoch == g.epoch {
			if !slices.Equal(m.wal[g.base:end], g.recs) {
				m.bad[`"already committed under the same fence" acked other bytes`] = true
			}
			x.objectEnd = max(x.objectEnd, end)
			m.advance(g.from)
		}
		return
	}
	if g.base > 0 && m.wal[g.base-1].epoch != g.prev {
		return
	}
	m.wal = append(m.wal, g.recs...)
	for _, r := range g.recs {
		if m.cut[r.uid] {
			m.bad["cut records are back in the partition"] = true
		}
	}
	if x.state == 'A' && x.epoch == g.epoch && m.r.Float64() < .7 {
		x.objectEnd = max(x.objectEnd, len(m.wal))
		m.advance(g.from)
	}
}

func (m *model) send(i int) {
	x := m.b[i]
	if x.sent = min(x.sent, len(x.log)); x.sent == len(x.log) {
		return
	}
	g := mrange{epoch: x.epoch, base: x.sent, recs: slices.Clone(x.log[x.sent:]), from: i}
	if x.sent > 0 {
		g.prev = x.log[x.sent-1].epoch
	}
	m.inFlight = append(m.inFlight, g)
	x.sent = len(x.log)
}

func (m *model) pull(f int) {
	x := m.b[f]
	if m.leader < 0 || f == m.leader || !x.up || x.state != 'F' || !m.b[m.leader].up {
		return
	}
	y := m.b[m.leader]
	if !m.opened {
		if m.on.quiet {
			return
		}
		n := min(len(x.log), len(m.wal))
		c := commonEnd(startsOf(x.log), len(x.log), startsOf(y.log), len(y.log))
		if c < n && slices.Equal(x.log[:n], m.wal[:n]) {
			m.bad["follower cut committed bytes against an unreconciled leader"] = true
		}
		x.log = slices.Clone(x.log[:min(c, len(x.log))])
		return
	}
	if y.state != 'A' || y.epoch != m.fence {
		return
	}
	c := min(len(x.log), commonEnd(startsOf(x.log), len(x.log), m.lin, endless))
	x.log = slices.Clone(x.log[:c])
	if len(x.log) > 0 {
		c = min(c, commonEnd(startsOf(x.log), len(x.log), startsOf(y.log), len(y.log)))
		x.log = slices.Clone(x.log[:c])
	}
	x.reconciled = m.fence
	k := len(x.log) + 1 + m.r.IntN(4)
	from := m.wal
	inline := (m.rule != byObject || m.on.inlineObject) && (!m.bucket || m.r.Float64() < .5)
	if inline {
		from = y.log
	}
	if (inline || m.bucket) && len(x.log) < len(from) {
		x.log = append(x.log, from[len(x.log):min(k, len(from))]...)
	}
	if len(x.log) > len(y.log) || !slices.Equal(x.log, y.log[:len(x.log)]) {
		m.bad["follower differs from its leader"] = true
	}
	y.ends[f], y.known[f] = len(x.log), true
	m.advance(m.leader)
}

func (m *model) eligible(i int) bool { return m.rule == byObject || m.isr[i] }

func (m *model) step() {
	i := m.r.IntN(3)
	x := m.b[i]
	switch a := m.r.Float64(); {
	case a < .20:
		if x.up && x.state == 'A' {
			m.uid++
			x.log = append(x.log, mrec{x.epoch, m.uid})
			if m.leader == i && m.fence == x.epoch && m.opened {
				m.ackL[m.uid] = mack{i, len(m.elected)}
			}
		}
	case a < .32:
		if x.up && x.state == 'A' {
			m.send(i)
		}
	case a < .46:
		if len(m.inFlight) > 0 && m.bucket {
			k := m.r.IntN(len(m.inFlight))
			g := m.inFlight[k]
			if m.r.Float64() < .85 {
				m.inFlight = slices.Delete(m.inFlight, k, k+1)
			}
			m.commit(g)
		}
	case a < .50:
		if x.up && x.state == 'A' && x.epoch == m.fence {
			x.objectEnd = max(x.objectEnd, len(m.wal))
			if m.r.IntN(2) == 0 {
				x.sent = len(m.wal)
			}
			m.advance(i)
		}
	case a < .66:
		m.pull(i)
	case a < .71:
		m.reconcile(i)
	case a < .77:
		if len(m.openings) > 0 {
			k := m.r.IntN(len(m.openings))
			o := m.openings[k]
			m.openings = slices.Delete(m.openings, k, k+1)
			m.open(o)
		}
	case a < .81:
		m.die(i)
	case a < .87:
		if !x.up {
			x.up, x.state = true, 'F'
			x.registered++
		}
	case a < .93:
		var c []int
		for j := range m.b {
			if m.b[j].up && m.eligible(j) {
				c = append(c, j)
			}
		}
		if len(c) > 0 && (m.leader < 0 || !m.b[m.leader].up || m.b[m.leader].state == 'F' || m.r.Float64() < .3) {
			m.elect(c[m.r.IntN(len(c))])
		}
	case a < .945:
		for _, y := range m.b {
			if y.state != 'F' && y.epoch != m.fence {
				y.state = 'F'
			}
		}
	case a < .965:
		m.bucket = !m.bucket
	case a < .975:
		m.keepISR()
	case a < .985 && m.on.cuts:
		m.cutLog()
	default:
		if x.up && m.rule == byObject && (!m.on.truncFirst || x.reconciled == m.fence && x.state != 'R') {
			if n := min(len(x.log), len(m.wal)); !slices.Equal(x.log[:n], m.wal[:n]) {
				m.bad["nearest read below the object end returned another record"] = true
			}
		}
	}
}

func (m *model) die(i int) {
	x := m.b[i]
	if !x.up {
		return
	}
	x.up = false
	if m.r.IntN(2) == 0 && x.state == 'A' && !m.on.brokerEpoch && m.leader == i {
		// A fast restart that nobody noticed: it goes on in its epoch.
		if m.on.losePages && m.r.IntN(2) == 0 && len(x.log) > len(m.wal) {
			x.log = slices.Clone(x.log[:len(m.wal)+m.r.IntN(len(x.log)-len(m.wal)+1)])
		}
		x.up, x.sent, x.objectEnd, x.known = true, len(m.wal), len(m.wal), [3]bool{}
		return
	}
	x.state = 'F'
}

func (m *model) keepISR() {
	if m.leader < 0 || !m.b[m.leader].up || m.b[m.leader].state != 'A' || m.b[m.leader].epoch != m.fence {
		return
	}
	y := m.b[m.leader]
	for f := range m.b {
		if f != m.leader && m.isr[f] && !m.b[f].up && len(m.isr) > 2 {
			delete(m.isr, f)
		}
		least := max(y.hw, len(m.wal))
		if m.on.isrEpoch {
			least = max(least, m.lin[len(m.lin)-1].at)
		}
		if !m.isr[f] && m.b[f].up && y.known[f] && y.ends[f] >= least {
			m.isr[f] = true
		}
	}
}

func (m *model) cutLog() {
	if len(m.wal) <= 2 {
		return
	}
	lo := max(0, len(m.wal)-5)
	c := lo + m.r.IntN(len(m.wal)-lo)
	for _, r := range m.wal[c:] {
		m.cut[r.uid] = true
	}
	m.wal, m.lin = slices.Clone(m.wal[:c]), belowStart(m.lin, c)
	m.fence++
	m.opened, m.cutAt = false, c
	if m.leader >= 0 && m.b[m.leader].up {
		m.b[m.leader].state, m.b[m.leader].epoch = 'R', m.fence
		m.elected = append(m.elected, m.leader)
	} else {
		m.leader = -1
	}
}

func (m *model) openAll() {
	for _, o := range m.openings {
		m.open(o)
	}
	m.openings = nil
}

// healAndCheck ends the failures, lets the partition settle and compares contents.
func (m *model) healAndCheck() {
	m.bucket = true
	for _, x := range m.b {
		if !x.up {
			x.up, x.state = true, 'F'
			x.registered++
		}
		if x.state != 'F' && x.epoch != m.fence {
			x.state = 'F'
		}
	}
	m.openAll()
	for range 4 {
		if m.opened && m.leader >= 0 && m.b[m.leader].state == 'A' && m.b[m.leader].epoch == m.fence {
			break
		}
		var c []int
		for j := range m.b {
			if m.eligible(j) {
				c = append(c, j)
			}
		}
		m.elect(c[m.r.IntN(len(c))])
		m.reconcile(m.leader)
		m.openAll()
	}
	if !m.opened || m.b[m.leader].state != 'A' {
		m.bad["stuck: nobody can open an epoch"] = true
		return
	}
	y := m.b[m.leader]
	m.uid++
	y.log = append(y.log, mrec{y.epoch, m.uid})
	m.inFlight = nil
	for range 30 {
		y.sent = len(m.wal)
		m.send(m.leader)
		for _, g := range m.inFlight {
			m.commit(g)
		}
		m.inFlight = nil
		y.objectEnd = len(m.wal)
		m.advance(m.leader)
		for f := range m.b {
			m.pull(f)
		}
	}
	if !slices.Equal(m.wal, y.log) {
		m.bad["bucket and leader disagree, or upload stuck"] = true
	}
	have := map[int]bool{}
	for _, r := range y.log {
		have[r.uid] = true
	}
	for u := range m.ackO {
		if !have[u] && !m.cut[u] {
			m.bad["OBJECT-acked record lost"] = true
		}
	}
	if m.on.cuts {
		return
	}
	for u := range m.ackR {
		if !have[u] {
			m.bad["REPLICAS-acked record lost"] = true
		}
	}
	if m.on.losePages {
		return
	}
	for u, a := range m.ackL {
		if !have[u] && !slices.ContainsFunc(m.elected[a.elections:], func(e int) bool { return e != a.broker }) {
			m.bad["LEADER ack lost, same broker elected each time"] = true
		}
	}
}

func modelRun(seed int64, rule commitRule, on rules) map[string]bool {
	m := newModel(seed, rule, on)
	for range 160 {
		m.step()
	}
	m.healAndCheck()
	return m.bad
}

var allRules = rules{fenceOpen: true, exactCut: true, quiet: true, brokerEpoch: true, truncFirst: true, isrEpoch: true}

// TestRulesSuffice finds no harm with all rules, under every commit rule, with and without cuts.
func TestRulesSuffice(t *testing.T) {
	for _, rule := range []commitRule{byObject, byReplicas, byEither} {
		for _, cuts := range []bool{false, true} {
			on := allRules
			on.cuts = cuts
			for seed := *simSeed; seed < *simSeed+int64(*simRuns); seed++ {
				if bad := modelRun(seed, rule, on); len(bad) > 0 {
					t.Fatalf("rule %v, cuts %v, seed %d: %v", rule, cuts, seed, bad)
				}
			}
		}
	}
}

// TestEachRuleIsNeeded takes away one rule at a time, and all of them as an earlier draft of the design had it, and has
// to find harm.
func TestEachRuleIsNeeded(t *testing.T) {
	variant := func(f func(*rules)) rules { r := allRules; f(&r); return r }
	for _, v := range []struct {
		name string
		rule commitRule
		on   rules
	}{
		{"none of the rules, with cuts and lost pages", byObject, rules{isrEpoch: true, cuts: true, losePages: true}},
		{"openings are not fenced", byObject, variant(func(r *rules) { r.fenceOpen, r.cuts = false, true })},
		{"no exact start after a cut", byObject, variant(func(r *rules) { r.exactCut, r.cuts = false, true })},
		{"no exact start after a cut, rule replicas", byReplicas, variant(func(r *rules) { r.exactCut, r.cuts = false, true })},
		{"followers obey an unopened leader", byObject, variant(func(r *rules) { r.quiet = false })},
		{"no fence at registration, lost pages", byObject, variant(func(r *rules) { r.brokerEpoch, r.losePages = false, true })},
		{"no fence at registration, lost pages, rule either", byEither, variant(func(r *rules) { r.brokerEpoch, r.losePages = false, true })},
		{"reads before truncation", byObject, variant(func(r *rules) { r.truncFirst = false })},
		{"inline above the object end of an object topic", byObject, variant(func(r *rules) { r.inlineObject = true })},
	} {
		t.Run(v.name, func(t *testing.T) {
			found := map[string]int{}
			for seed := *simSeed; seed < *simSeed+int64(max(*simRuns, 3000)); seed++ {
				for b := range modelRun(seed, v.rule, v.on) {
					found[b]++
				}
			}
			if len(found) == 0 {
				t.Fatal("no harm found: either the rule is not needed or the model is blind")
			}
			t.Log(fmt.Sprint(found))
		})
	}
}
