//go:build unix

package torture_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/client"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/test/torture"
)

var (
	rounds = flag.Int("rounds", 3, "how many faults to go through; 0 = none")
	seed   = flag.Uint64("seed", 0, "seed of the faults; 0 draws one and prints it")
	rate   = flag.Float64("rate", 300, "records a second that are sent to be acked at OBJECT")
	keep   = flag.Bool("keep", false, "keep the directory of a run that succeeded")
)

const (
	topicObject, topicLeader = "torture-object", "torture-leader"
	// patience bounds waits for what has no bound of its own.
	patience = time.Minute
)

// fault is a card of the deck.
type fault struct {
	role  string
	id    int // of the instance; 0 = the controller
	kill  bool
	pause time.Duration // with kill: none
}

// deck is nine faults in random order: each role is killed, paused within the session
// timeout and paused for at least the session timeout. Half of what hits the metadata
// service is meant for its controller.
func deck(r *rand.Rand) []fault {
	var out []fault
	between := func(low, high time.Duration) time.Duration { return low + time.Duration(r.Int64N(int64(high-low))) }
	for _, x := range []struct {
		role  string
		count int
	}{{"broker", brokers}, {"rlm", rlms}, {"metadata", replicas}} {
		for _, f := range []fault{
			{kill: true},
			{pause: between(500*time.Millisecond, torture.SessionTimeout)},
			{pause: between(torture.SessionTimeout, 8*time.Second)},
		} {
			f.role, f.id = x.role, 1+r.IntN(x.count)
			if x.role == "metadata" && r.IntN(2) == 0 {
				f.id = 0
			}
			out = append(out, f)
		}
	}
	r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// outcome is what came of a round.
type outcome struct {
	kind     string
	fromHit  time.Duration // from the signal until every partition accepted
	fromEnd  time.Duration // from SIGCONT, for a pause; else as fromHit
	slowest  time.Duration // the slowest OBJECT ack of the round
	allAlive time.Duration // from the end of the fault until every process served
}

// run is one torture.
type run struct {
	t       *testing.T
	dir     string
	rand    *rand.Rand
	events  *journal
	dev     *dev
	admin   *client.Admin
	client  *client.Client
	load    *load
	begun   time.Time
	results []outcome
}

func TestEveryAckedRecordIsReadOnceWhileProcessesAreKilledAndPaused(t *testing.T) {
	if *rounds <= 0 || testing.Short() {
		t.Skip("no rounds wanted")
	}
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d -rounds=%d", *seed, *rounds)
	ctx := t.Context()
	if at, ok := t.Deadline(); ok {
		bounded, cancel := context.WithDeadline(ctx, at.Add(-30*time.Second)) // time to clean up
		defer cancel()
		ctx = bounded
	}
	binary := buildBraid(ctx, t)
	dir, err := os.MkdirTemp("", "braid-torture-") //nolint:usetesting // kept for the reader when the test fails
	require.NoError(t, err)
	t.Cleanup(func() { // the last: everything has ended
		if t.Failed() || *keep {
			t.Logf("seed %d: ledger, events and the cluster with its logs are in %s", *seed, dir)
			return
		}
		assert.NoError(t, os.RemoveAll(dir))
	})
	x := &run{t: t, dir: dir, rand: rand.New(rand.NewPCG(*seed, 0)), events: newJournal(t, dir)}
	x.events.add("begin", "seed", *seed, "rounds", *rounds, "rate", *rate)
	x.start(ctx, binary)
	var cards []fault
	for n := 1; n <= *rounds; n++ {
		if len(cards) == 0 {
			cards = deck(x.rand)
		}
		if !x.round(ctx, n, cards[0]) {
			break
		}
		cards = cards[1:]
	}
	x.finish(ctx)
	t.Log("\n" + x.table())
}

// start starts the cluster and the load, and waits until all partitions have accepted.
func (x *run) start(ctx context.Context, binary string) {
	t := x.t
	x.dev = startDev(ctx, t, binary, filepath.Join(x.dir, "cluster"), x.events)
	admin, err := client.DialAdmin(x.dev.addresses(t, "metadata"), client.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { admin.Close() })
	x.admin = admin
	for _, topic := range []*metadatav1.CreateTopicRequest{
		{Name: topicObject, PartitionCount: 12, ReplicationFactor: brokers, Configs: map[string]string{"min.ack.level": "OBJECT"}},
		{Name: topicLeader, PartitionCount: 4, ReplicationFactor: brokers, Configs: map[string]string{"min.ack.level": "LEADER"}},
	} {
		_, err := admin.Topics().CreateTopic(ctx, topic)
		require.NoError(t, err)
	}
	x.load = &load{t: t, brokers: x.dev.addresses(t, "broker")}
	x.client = x.load.dial()
	x.begun = time.Now()
	x.load.add(ctx, topicObject, client.LevelObject)
	x.load.add(ctx, topicObject, client.LevelObject)
	x.load.add(ctx, topicLeader, client.LevelObject)
	x.load.add(ctx, topicLeader, client.LevelLeader)
	x.load.start([]float64{*rate * 3 / 8, *rate * 3 / 8, *rate / 4, *rate / 10})
	require.True(t, await(ctx, patience, func() bool {
		_, missing := x.load.accepted(x.begun)
		return len(missing) == 0
	}), "the partitions did not accept records at first")
}

// await polls until a condition holds; false when it does not within a bound.
func await(ctx context.Context, bound time.Duration, holds func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return holds()
		}
	}
	return true
}

// pass lets time pass; the load goes on.
func pass(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// describe tells what a process does right now.
func (x *run) describe(ctx context.Context, i instance) (what string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	switch i.Role {
	case "metadata":
		if c, err := x.client.DescribeCluster(ctx); err == nil && c.Controller == i.Address {
			return "controller"
		}
		return "standby"
	case "broker":
		led := 0
		for _, name := range []string{topicObject, topicLeader} {
			topic, err := x.client.DescribeTopic(ctx, name)
			if err != nil {
				return "?"
			}
			for _, p := range topic.Partitions {
				if int(p.LeaderID) == i.ID {
					led++
				}
			}
		}
		return fmt.Sprintf("leads %d partitions", led)
	default:
		return ""
	}
}

// victim is the process that a fault hits.
func (x *run) victim(ctx context.Context, f fault) (instance, error) {
	if f.id > 0 {
		return x.dev.find(f.role, f.id)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := x.client.DescribeCluster(ctx)
	if err != nil {
		return instance{}, err
	}
	return x.dev.at(c.Controller)
}

// round goes through one fault. False ends the test: the cluster is not what it should be.
func (x *run) round(ctx context.Context, n int, f fault) bool {
	t := x.t
	pass(ctx, time.Second+time.Duration(x.rand.Int64N(int64(2*time.Second)))) // calm
	victim, err := x.victim(ctx, f)
	require.NoError(t, err)
	what := x.describe(ctx, victim)
	o := outcome{kind: f.role}
	if f.role == "metadata" {
		o.kind = what
	}
	var hit, end time.Time
	if f.kill {
		o.kind += ", SIGKILL"
		hit, err = x.dev.signal(victim.PID, syscall.SIGKILL)
		require.NoError(t, err)
		end = hit
	} else {
		if f.pause < torture.SessionTimeout {
			o.kind += ", pause within the session"
		} else {
			o.kind += ", pause beyond the session"
		}
		hit, err = x.dev.signal(victim.PID, syscall.SIGSTOP)
		require.NoError(t, err)
		pass(ctx, f.pause)
		end, err = x.dev.signal(victim.PID, syscall.SIGCONT) // always: a stopped process can't be stopped in order
		require.NoError(t, err)
	}
	x.events.add("fault", "round", n, "kind", o.kind, "victim", victim.String(), "pid", victim.PID, "what", what, "hit", hit.UTC().Format("15:04:05.000"), "pause", f.pause)

	ok := x.recovered(ctx, n, hit, end, &o)
	whole := await(ctx, patience, func() bool { err = x.dev.whole(ctx, x.admin, victim); return err == nil })
	o.allAlive = time.Since(end)
	if !whole {
		t.Errorf("round %d: the cluster is not whole %v after the fault: %v", n, o.allAlive, err)
		ok = false
	}
	o.slowest = x.load.slowest(hit, time.Now())
	if o.slowest > torture.Bound {
		t.Errorf("round %d: an OBJECT ack took %v, bound %v", n, o.slowest, torture.Bound)
	}
	var unread []string
	now := time.Now()
	if !await(ctx, torture.Bound, func() bool { unread = x.load.unread(now); return len(unread) == 0 }) {
		t.Errorf("round %d: not read %v after its ack: %s", n, torture.Bound, strings.Join(unread, "; "))
		ok = false
	}
	x.results = append(x.results, o)
	x.events.add("recovered", "round", n, "from_signal", o.fromHit, "from_end", o.fromEnd, "slowest_ack", o.slowest, "all_serving", o.allAlive)
	t.Logf("round %2d: %-38s %-11s %-21s pause %-6v accepts after %v (%v from the end of the fault), slowest ack %v, whole after %v", n, o.kind, victim, what,
		short(f.pause), short(o.fromHit), short(o.fromEnd), short(o.slowest), short(o.allAlive))
	return ok && ctx.Err() == nil
}

// recovered waits until every partition accepts, counted from both moments.
func (x *run) recovered(ctx context.Context, n int, hit, end time.Time, o *outcome) bool {
	ok := true
	for _, m := range []struct {
		name string
		from time.Time
		took *time.Duration
	}{{"the signal", hit, &o.fromHit}, {"the end of the fault", end, &o.fromEnd}} {
		var at time.Time
		var missing []string
		if !await(ctx, patience, func() bool { at, missing = x.load.accepted(m.from); return len(missing) == 0 }) {
			at, ok = time.Now(), false
		}
		if *m.took = at.Sub(m.from); *m.took > torture.Bound {
			x.t.Errorf("round %d: accepted again %v after %s, bound %v; still missing: %v", n, *m.took, m.name, torture.Bound, missing)
		}
	}
	return ok
}

func short(d time.Duration) string { return d.Round(10 * time.Millisecond).String() }

// finish ends the load, reads everything again, compares, and stops the cluster.
func (x *run) finish(ctx context.Context) {
	t := x.t
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	took := time.Since(x.begun)
	if err := x.load.stop(bounded); err != nil {
		t.Errorf("the last answers did not come: %v", err)
	}
	logs := map[slot][]seen{}
	c := x.load.dial()
	for at := range x.load.follows {
		var log []seen
		if err := read(bounded, c, at, false, func(s seen) { log = append(log, s) }); err != nil {
			t.Errorf("read %s at the end: %v", at, err)
		}
		logs[at] = log
	}
	v := &verdict{}
	x.followed(ctx, v, logs)
	lanes := map[slot][]ledger{}
	sent := 0
	for _, s := range x.load.sources {
		for _, l := range s.lanes {
			g := ledger{level: l.level, entries: l.snapshot()}
			sent += len(g.entries)
			lanes[l.slot] = append(lanes[l.slot], g)
		}
	}
	for _, at := range slices.SortedFunc(maps.Keys(logs), slot.compare) {
		v.compare(at, lanes[at], logs[at])
	}
	summary := fmt.Sprintf("%d records sent in %v, %d acked at OBJECT, %d read; of those acked at LEADER %d were lost with their leader's tail; %d without an ack are there; "+
		"%d acks of a repeated send, %d settled later; violations: %d", sent, short(took), v.acked, v.read, v.lost, v.unsure, v.duplicate, v.settled, len(v.violations))
	x.events.add("end", "summary", summary)
	t.Log(summary)
	bounded, cancel = context.WithTimeout(ctx, patience)
	defer cancel()
	if err := x.dev.stop(bounded); err != nil {
		t.Errorf("stop: %v", err)
	}
	x.dev.mu.Lock()
	v.violations = append(v.violations, x.dev.unexpected...)
	x.dev.mu.Unlock()
	panics, err := x.dev.panics()
	require.NoError(t, err)
	v.violations = append(v.violations, panics...)
	for i, line := range v.violations {
		if i == 30 {
			t.Errorf("… and %d more in violations.txt", len(v.violations)-i)
			break
		}
		t.Error(line)
	}
	if t.Failed() || *keep {
		require.NoError(t, x.write(v, logs))
	}
}

// followed holds the readers that followed against what was read at the end.
func (x *run) followed(ctx context.Context, v *verdict, logs map[slot][]seen) {
	for at, f := range x.load.follows {
		log := logs[at]
		await(ctx, torture.Bound, func() bool { return len(f.snapshot()) >= len(log) })
		got := f.snapshot()
		f.mu.Lock()
		if f.err != nil {
			v.broken(at, "the reader that followed ended after %d records: %v", len(f.log), f.err)
		}
		f.mu.Unlock()
		if len(got) != len(log) {
			v.broken(at, "the reader that followed has %d records, the one at the end %d", len(got), len(log))
		}
		for i := range min(len(got), len(log)) {
			if got[i] != log[i] {
				v.broken(at, "the reader that followed got %+v, the one at the end %+v", got[i], log[i])
				break
			}
		}
	}
	x.load.reading()
	x.load.readers.Wait()
}

// write keeps the history.
func (x *run) write(v *verdict, logs map[slot][]seen) error {
	var errs []error
	file := func(name string, fn func(add func(any))) {
		f, err := os.Create(filepath.Join(x.dir, name))
		if err != nil {
			errs = append(errs, err)
			return
		}
		out := json.NewEncoder(f)
		fn(func(line any) { errs = append(errs, out.Encode(line)) })
		errs = append(errs, f.Close())
	}
	file("ledger.jsonl", func(add func(any)) {
		for _, s := range x.load.sources {
			for _, l := range s.lanes {
				for _, e := range l.snapshot() {
					add(e.line(l))
				}
			}
		}
	})
	file("read.jsonl", func(add func(any)) {
		for _, at := range slices.SortedFunc(maps.Keys(logs), slot.compare) {
			for _, s := range logs[at] {
				add(s.line(at))
			}
		}
	})
	errs = append(errs, os.WriteFile(filepath.Join(x.dir, "violations.txt"), []byte(strings.Join(v.violations, "\n")+"\n"), 0o644))
	return errors.Join(errs...)
}

// table is the report: for each kind of fault how long it took until every partition
// accepted again.
func (x *run) table() string {
	kinds := map[string][]outcome{}
	for _, o := range x.results {
		kinds[o.kind] = append(kinds[o.kind], o)
	}
	var out strings.Builder
	fmt.Fprintf(&out, "until every partition accepted an OBJECT write again, bound %v; min / median / max\n", torture.Bound)
	fmt.Fprintf(&out, "%-38s %6s  %-24s %-24s %11s %11s\n", "fault", "rounds", "from the signal", "from its end", "slowest ack", "all serving")
	row := func(name string, all []outcome) {
		of := func(f func(outcome) time.Duration) string {
			var d []time.Duration
			for _, o := range all {
				d = append(d, f(o))
			}
			slices.Sort(d)
			return fmt.Sprintf("%.2f / %.2f / %.2f s", d[0].Seconds(), d[len(d)/2].Seconds(), d[len(d)-1].Seconds())
		}
		worst := func(f func(outcome) time.Duration) string {
			var d time.Duration
			for _, o := range all {
				d = max(d, f(o))
			}
			return fmt.Sprintf("%.2f s", d.Seconds())
		}
		fmt.Fprintf(&out, "%-38s %6d  %-24s %-24s %11s %11s\n", name, len(all), of(func(o outcome) time.Duration { return o.fromHit }), of(func(o outcome) time.Duration { return o.fromEnd }),
			worst(func(o outcome) time.Duration { return o.slowest }), worst(func(o outcome) time.Duration { return o.allAlive }))
	}
	var names []string
	for k := range kinds {
		names = append(names, k)
	}
	slices.Sort(names)
	for _, k := range names {
		row(k, kinds[k])
	}
	if len(x.results) > 0 {
		row("all", x.results)
	}
	return out.String()
}
