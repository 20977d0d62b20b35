package gcsemu

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// Action is what a rule does to the requests it hits.
type Action string

// The actions. "Before" and "after" mean before and after the request took
// effect in the store.
const (
	// ActNone only adds the rule's latency.
	ActNone Action = ""
	// ActStatus answers Rule.Status; nothing happened.
	ActStatus Action = "status"
	// ActStatusAfter lets the request take effect, then answers Rule.Status.
	ActStatusAfter Action = "status_after"
	// ActCutBefore breaks the connection; nothing happened.
	ActCutBefore Action = "cut_before"
	// ActCutAfter lets the request take effect and breaks the connection
	// instead of answering.
	ActCutAfter Action = "cut_after"
	// ActHang takes the request and never answers; nothing happened.
	ActHang Action = "hang"
	// ActHangAfter lets the request take effect and never answers.
	ActHangAfter Action = "hang_after"
	// ActLate breaks the connection at once, and the request takes effect
	// Rule.Late afterwards.
	ActLate Action = "late"
	// ActCutBody sends Rule.Bytes of the response's body, then breaks the
	// connection.
	ActCutBody Action = "cut_body"
	// ActStallBody sends Rule.Bytes of the response's body, then nothing more.
	ActStallBody Action = "stall_body"
	// ActFlip flips the lowest bit of byte Rule.Bytes of the response's body.
	ActFlip Action = "flip"
	// ActTruncate stores only the first Rule.Bytes of a one-request upload, as
	// if no more had been sent, and reports success.
	ActTruncate Action = "truncate"
)

// Duration is a time.Duration that is written as "150ms" in JSON.
type Duration time.Duration

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return err
	}
	*d = Duration(v)
	return nil
}

// Latency is a distribution: Base, plus evenly up to Jitter, plus Tail with
// probability TailProbability.
type Latency struct {
	Base            Duration `json:"base,omitempty"`
	Jitter          Duration `json:"jitter,omitempty"`
	Tail            Duration `json:"tail,omitempty"`
	TailProbability float64  `json:"tail_probability,omitempty"`
}

// Rule is one fault. Which requests it hits: those of its Op whose object has
// the prefix and contains the text, after the first Skip of them, every
// Every-th, at most Count times, with the given probability; zero values don't
// restrict. Rules are tried in order; the latencies of all that hit add up, and
// the first that has an action decides what happens.
type Rule struct {
	// Name is for people.
	Name string `json:"name,omitempty"`
	// Op is the kind of request; empty means all of them.
	Op Op `json:"op,omitempty"`
	// ObjectPrefix and ObjectContains select by the object's name within its
	// bucket.
	ObjectPrefix   string `json:"object_prefix,omitempty"`
	ObjectContains string `json:"object_contains,omitempty"`

	Skip        int     `json:"skip,omitempty"`
	Every       int     `json:"every,omitempty"`
	Count       int     `json:"count,omitempty"`
	Probability float64 `json:"probability,omitempty"` // 0 means always

	// Latency delays the request before anything happens.
	Latency Latency `json:"latency,omitzero"`
	Action  Action  `json:"action,omitempty"`
	// Status is the HTTP status of ActStatus and ActStatusAfter; 0 means 503.
	Status int `json:"status,omitempty"`
	// Bytes is the position or length that ActCutBody, ActStallBody, ActFlip
	// and ActTruncate use.
	Bytes int64 `json:"bytes,omitempty"`
	// Late is ActLate's delay.
	Late Duration `json:"late,omitempty"`

	// Hits counts the requests hit so far. It is ignored on input.
	Hits int `json:"hits,omitempty"`
}

func (r Rule) validate() error {
	var errs []error
	switch r.Op {
	case "", OpCreate, OpRead, OpAttrs, OpList, OpDelete, OpBucket, OpOther:
	default:
		errs = append(errs, fmt.Errorf("unknown op %q", r.Op))
	}
	switch r.Action {
	case ActNone, ActStatus, ActStatusAfter, ActCutBefore, ActCutAfter, ActHang, ActHangAfter,
		ActLate, ActCutBody, ActStallBody, ActFlip, ActTruncate:
	default:
		errs = append(errs, fmt.Errorf("unknown action %q", r.Action))
	}
	if r.Skip < 0 || r.Every < 0 || r.Count < 0 || r.Bytes < 0 {
		errs = append(errs, errors.New("skip, every, count and bytes can't be negative"))
	}
	if r.Probability < 0 || r.Probability > 1 || r.Latency.TailProbability < 0 || r.Latency.TailProbability > 1 {
		errs = append(errs, errors.New("a probability lies between 0 and 1"))
	}
	if r.Latency.Base < 0 || r.Latency.Jitter < 0 || r.Latency.Tail < 0 || r.Late < 0 {
		errs = append(errs, errors.New("a delay can't be negative"))
	}
	if r.Status != 0 && (r.Status < 400 || r.Status > 599) {
		errs = append(errs, fmt.Errorf("status %d is no error", r.Status))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("fault rule %q: %w", r.Name, err)
	}
	return nil
}

// CloudLatency returns rules that delay requests as a bucket in the client's
// region plausibly would: tens of milliseconds, now and then far more. It is a
// stand-in for waiting, not a measurement of any service.
func CloudLatency() []Rule {
	ms := func(n int) Duration { return Duration(time.Duration(n) * time.Millisecond) }
	return []Rule{
		{Name: "cloud create", Op: OpCreate, Latency: Latency{Base: ms(30), Jitter: ms(40), Tail: ms(300), TailProbability: 0.01}},
		{Name: "cloud read", Op: OpRead, Latency: Latency{Base: ms(15), Jitter: ms(20), Tail: ms(200), TailProbability: 0.01}},
		{Name: "cloud attrs", Op: OpAttrs, Latency: Latency{Base: ms(10), Jitter: ms(15), Tail: ms(150), TailProbability: 0.01}},
		{Name: "cloud list", Op: OpList, Latency: Latency{Base: ms(30), Jitter: ms(30), Tail: ms(300), TailProbability: 0.01}},
		{Name: "cloud delete", Op: OpDelete, Latency: Latency{Base: ms(20), Jitter: ms(20), Tail: ms(200), TailProbability: 0.01}},
	}
}

// verdict is what the rules say about one request.
type verdict struct {
	delay  time.Duration
	action Action
	rule   Rule
}

// faults is the rule set in force.
type faults struct {
	seed uint64

	mu    sync.Mutex
	rules []ruleState // guarded by mu
	rand  *rand.Rand  // guarded by mu
}

type ruleState struct {
	Rule
	seen int // requests that its selectors matched
}

func newFaults(seed uint64, rules []Rule) (*faults, error) {
	f := &faults{seed: seed, rand: rand.New(rand.NewPCG(seed, 0))}
	return f, f.set(rules)
}

func (f *faults) set(rules []Rule) error {
	states := make([]ruleState, 0, len(rules))
	for _, r := range rules {
		if err := r.validate(); err != nil {
			return err
		}
		r.Hits = 0
		states = append(states, ruleState{Rule: r})
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = states
	f.rand = rand.New(rand.NewPCG(f.seed, 0))
	return nil
}

// maxRules bounds what AddRule and the admin paths may pile up.
const maxRules = 1000

func (f *faults) add(r Rule) error {
	if err := r.validate(); err != nil {
		return err
	}
	r.Hits = 0
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.rules) >= maxRules {
		return fmt.Errorf("there are %d fault rules already", maxRules)
	}
	f.rules = append(f.rules, ruleState{Rule: r})
	return nil
}

func (f *faults) snapshot() []Rule {
	f.mu.Lock()
	defer f.mu.Unlock()
	rules := make([]Rule, 0, len(f.rules))
	for _, r := range f.rules {
		rules = append(rules, r.Rule)
	}
	return slices.Clip(rules)
}

func (f *faults) judge(op Op, object string) verdict {
	f.mu.Lock()
	defer f.mu.Unlock()
	var v verdict
	for i := range f.rules {
		r := &f.rules[i]
		if r.Op != "" && r.Op != op ||
			!strings.HasPrefix(object, r.ObjectPrefix) || !strings.Contains(object, r.ObjectContains) {
			continue
		}
		if r.Action != ActNone && v.action != ActNone {
			continue // an earlier rule decides; this one has not been reached
		}
		r.seen++
		n := r.seen - r.Skip
		if n <= 0 || r.Count > 0 && r.Hits >= r.Count ||
			r.Every > 1 && n%r.Every != 0 ||
			r.Probability > 0 && f.rand.Float64() >= r.Probability {
			continue
		}
		r.Hits++
		v.delay += f.draw(r.Latency)
		if r.Action != ActNone {
			v.action, v.rule = r.Action, r.Rule
		}
	}
	return v
}

func (f *faults) draw(l Latency) time.Duration {
	d := time.Duration(l.Base)
	if l.Jitter > 0 {
		d += time.Duration(f.rand.Int64N(int64(l.Jitter) + 1))
	}
	if l.Tail > 0 && f.rand.Float64() < l.TailProbability {
		d += time.Duration(l.Tail)
	}
	return d
}
