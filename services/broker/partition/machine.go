package partition

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
)

// State is what a partition is on this broker.
type State uint8

// The states, see braid.broker.v1.ReplicaState.
const (
	// Idle: nothing is known of the partition's metadata.
	Idle State = iota + 1
	// Fencing: elected, the log is not looked at yet.
	Fencing
	// Recovering: the log is being reconciled, or the opening is asked for.
	Recovering
	// Active: leads and takes appends.
	Active
	// Resigning: found itself unable to go on, has asked for an election, takes nothing.
	Resigning
	// Offline: the local log can't be used.
	Offline
	// Truncating: follows, and waits for the leader's opening or for its log to be cut to the common branch.
	Truncating
	// Fetching: follows the committed ranges on the present branch.
	Fetching
)

// String returns the state's stable name.
func (s State) String() string {
	switch s {
	case Idle:
		return "IDLE"
	case Fencing:
		return "FENCING"
	case Recovering:
		return "RECOVERING"
	case Active:
		return "ACTIVE"
	case Resigning:
		return "RESIGNING"
	case Offline:
		return "OFFLINE"
	case Truncating:
		return "TRUNCATING"
	case Fetching:
		return "FETCHING"
	default:
		return "UNSPECIFIED"
	}
}

// Machine is the state of one partition on one broker. The zero Machine is not usable, see New.
type Machine struct {
	self        int32
	brokerEpoch int64

	known   bool // a view was received
	removed bool
	view    View
	log     LogFacts

	state  State
	reason string // why Resigning or Offline, or what is waited for
	// attempt numbers reconciliations, so that an answer to an older one is ignored.
	attempt        int64
	openSent       bool
	producersReady bool

	run     int64
	sent    int64 // end of the last range handed to the feed, exclusive
	borders []border
	pending *pendingEnd
	// committed is, on an active leader, the object end that it has found to hold its own bytes, and its hash. The view
	// may be ahead of it; what the metadata says is never forgotten, or the next reconciliation would go by old news.
	committed     int64
	committedHash chainhash.Hash

	// Bytes appended since the activation (with the kept tail), handed to the feed, and committed.
	appendedBytes, sentBytes, committedBytes int64

	// sessionEnds is when the broker's session runs out, counted from the sending of the last confirmed heartbeat.
	sessionEnds time.Duration
}

// border is an end of a range that was sent: a fact of this leader's own log, valid in every run, since a leader never
// truncates inside an open epoch.
type border struct {
	end   int64
	hash  chainhash.Hash
	bytes int64 // sentBytes there
}

// pendingEnd is an object end that is not adopted before the local log was found to hold the same bytes.
type pendingEnd struct {
	end  int64
	hash chainhash.Hash
	feed bool
}

// New returns the machine of a partition whose local log is as given, on broker self. It leads nothing until it is
// told so.
func New(self int32, brokerEpoch int64, log LogFacts) *Machine {
	return &Machine{self: self, brokerEpoch: brokerEpoch, log: log, state: Idle}
}

// State returns the present state and, for Resigning and Offline, the reason.
func (m *Machine) State() (State, string) { return m.state, m.reason }

// View returns the metadata view and whether there is one. On an active leader its object end and hash are those that
// the leader has found to be its own, which may be behind what the metadata says.
func (m *Machine) View() (View, bool) {
	v := m.view
	if m.state == Active {
		v.ObjectEnd, v.ObjectHash = m.committed, m.committedHash
	}
	return v, m.known
}

// Log returns the facts of the local log.
func (m *Machine) Log() LogFacts { return m.log }

// HighWatermark is the end of what readers may see, exclusive. It is known once a view is.
func (m *Machine) HighWatermark() (int64, bool) {
	v, known := m.View()
	return v.ObjectEnd, known
}

// ProducersReady reports whether appends with a producer id may be judged.
func (m *Machine) ProducersReady() bool { return m.state == Active && m.producersReady }

// Run returns the number of the present sending run.
func (m *Machine) Run() int64 { return m.run }

// Unsent returns the offsets of the log that wait to be sent, [from, to), and whether there are any.
func (m *Machine) Unsent() (from, to int64, ok bool) {
	if m.state != Active || m.sent >= m.log.End {
		return 0, 0, false
	}
	return m.sent, m.log.End, true
}

// Sent records that the range from the last one sent to end was handed to the feed under the present run: hash is the
// chain hash at end, size the range's length in bytes.
func (m *Machine) Sent(end int64, hash chainhash.Hash, size int64) {
	m.sent, m.sentBytes = end, m.sentBytes+size
	i := len(m.borders)
	for i > 0 && m.borders[i-1].end > end {
		i--
	}
	if i == 0 || m.borders[i-1].end < end {
		m.borders = slices.Insert(m.borders, i, border{end: end, hash: hash, bytes: m.sentBytes})
	}
}

// Unuploaded returns the bytes of the log above the object end. It never understates.
func (m *Machine) Unuploaded() int64 { return m.appendedBytes - m.committedBytes }

// ConfirmSession records that a heartbeat sent at sentAt was confirmed; the session lasts timeout from then.
func (m *Machine) ConfirmSession(sentAt, timeout time.Duration) {
	if e := sentAt + timeout; e > m.sessionEnds {
		m.sessionEnds = e
	}
}

// SessionLive reports whether LEADER acks may be given at now.
func (m *Machine) SessionLive(now time.Duration) bool { return now < m.sessionEnds }

// Admit says where the next append goes and under which epoch. It fails unless the partition is Active.
func (m *Machine) Admit() (base int64, epoch lineage.Leadership, err error) {
	if m.state != Active {
		return 0, lineage.Leadership{}, &NotActiveError{State: m.state, Reason: m.reason, Leader: m.view.Leader, Self: m.self, Known: m.known, Removed: m.removed}
	}
	return m.log.End, m.view.Fence.Leadership(), nil
}

// Appended records that size bytes were appended and the log now ends at end.
func (m *Machine) Appended(end, size int64) { m.log.End, m.appendedBytes = end, m.appendedBytes+size }

// NotActiveError says why an append is not taken. Nothing was stored.
type NotActiveError struct {
	State   State
	Reason  string
	Leader  int32
	Self    int32
	Known   bool
	Removed bool
}

// Error implements error.
func (e *NotActiveError) Error() string {
	if e.Reason != "" {
		return fmt.Sprintf("partition is %s here: %s", e.State, e.Reason)
	}
	return fmt.Sprintf("partition is %s here, leader is broker %d", e.State, e.Leader)
}

// Step applies one event and returns what has to be done, in order.
func (m *Machine) Step(ev Event) []Effect {
	if m.removed {
		return nil
	}
	switch e := ev.(type) {
	case Registered:
		m.brokerEpoch = e.BrokerEpoch
		return m.considered(m.depose("the broker registered again"))
	case ViewReset:
		return m.reset(e.View)
	case FenceRaised:
		return m.fenceRaised(e)
	case EpochOpened:
		return m.epochOpened(e)
	case RangeCommitted:
		return m.rangeCommitted(e)
	case Removed:
		reason := cmp.Or(e.Reason, "the topic was deleted")
		fx := m.depose(reason)
		m.removed, m.reason = true, reason
		return append(fx, Forget{})
	case Reconciled:
		return m.reconciled(e)
	case Hashed:
		return m.hashed(e)
	case Cut:
		return m.cut(e)
	case Diverged:
		return m.diverged(e)
	case LogFailed:
		return m.logFailed(e)
	case OpenAnswered:
		return m.openAnswered(e)
	case ProducersRecovered:
		if m.state == Active && e.Fence == m.view.Fence {
			m.producersReady = true
		}
		return nil
	case VerdictGiven:
		return m.verdict(e.Verdict)
	case FeedLost:
		if m.state != Active {
			return nil
		}
		return m.feed(nil)
	default:
		panic(fmt.Sprintf("partition: unknown event %T", ev))
	}
}

// mine reports whether the present fence was given to this broker's present registration.
func (m *Machine) mine() bool {
	return m.known && m.view.Leader == m.self && m.view.Fence.BrokerEpoch == m.brokerEpoch
}

// depose leaves leadership, if there is any.
func (m *Machine) depose(reason string) []Effect {
	if m.state == Offline {
		return nil
	}
	was := m.state
	m.leave(Idle, "")
	if was == Active {
		return []Effect{Deposed{Reason: reason, Kept: m.committed}}
	}
	return nil
}

// leave changes to a state without leadership and forgets what only a leader needs.
func (m *Machine) leave(s State, reason string) {
	m.state, m.reason, m.openSent, m.producersReady = s, reason, false, false
	m.pending, m.borders = nil, m.borders[:0]
	m.attempt++
}

// considered begins to recover when the fence is this broker's.
func (m *Machine) considered(fx []Effect) []Effect {
	if m.state == Offline {
		return fx
	}
	if !m.mine() {
		return m.follow(fx)
	}
	if m.view.Opened {
		// The fence was opened by this registration, but this machine does not lead under it: an epoch is never
		// resumed, so ask for another.
		m.state, m.reason = Resigning, "the epoch was opened before this log was loaded"
		return append(fx, RequestElection{Fence: m.view.Fence, Reason: m.reason})
	}
	m.state, m.reason = Fencing, ""
	return append(fx, m.reconcile()...)
}

// stale reports whether v is older than what is known: fences only rise, and within a fence the object end only rises.
// Where both are the same an opening is not taken back.
func (m *Machine) stale(v View) bool {
	if !m.known || v.Fence.Incarnation != m.view.Fence.Incarnation {
		return false
	}
	if newer(m.view.Fence, v.Fence) {
		return true
	}
	if v.Fence != m.view.Fence || v.ObjectEnd > m.view.ObjectEnd {
		// A view that knows of more committed records is newer even where it calls the epoch not open: that is what it is
		// once the leader has registered again.
		return false
	}
	return v.ObjectEnd < m.view.ObjectEnd || m.view.Opened && !v.Opened
}

func (m *Machine) reset(v View) []Effect {
	if m.stale(v) {
		return nil
	}
	if m.known && v.Fence == m.view.Fence && v.Leader == m.view.Leader {
		switch {
		case m.state == Active:
			m.view.LogStart = v.LogStart
			return m.adopt(v.ObjectEnd, v.ObjectHash, false)
		case m.state == Fencing || m.state == Recovering:
			if v.Opened {
				return m.epochOpened(EpochOpened{Fence: v.Fence, Start: v.EpochStart, Lineage: v.Lineage})
			}
			return nil
		case m.state == Resigning:
			m.view = v
			return nil
		case m.state == Fetching:
			// The same branch: what was cut stays cut, what is new is fetched.
			m.view = v
			return []Effect{Fetch{Attempt: m.attempt}}
		}
	}
	fx := m.depose("the partition's metadata changed")
	m.known, m.view = true, v
	return m.considered(fx)
}

func (m *Machine) fenceRaised(e FenceRaised) []Effect {
	if !m.known || !newer(e.Fence, m.view.Fence) {
		return nil
	}
	fx := m.depose("another election")
	m.view.Fence, m.view.Leader, m.view.Opened, m.view.Exact = e.Fence, e.Leader, false, e.Exact
	return m.considered(fx)
}

func newer(a, b Fence) bool {
	if a.Incarnation != b.Incarnation {
		return true // the shell only passes on what its own registration's incarnation says
	}
	if a.LeaderEpoch != b.LeaderEpoch {
		return a.LeaderEpoch > b.LeaderEpoch
	}
	return a.BrokerEpoch > b.BrokerEpoch
}

func (m *Machine) epochOpened(e EpochOpened) []Effect {
	if !m.known || e.Fence != m.view.Fence {
		return nil
	}
	if m.view.Opened {
		return nil
	}
	if m.state == Recovering && m.openSent && m.mine() && e.Start == m.log.End {
		// The stream overtook the answer to our own call.
		return m.activate(e.Lineage)
	}
	m.view.Opened, m.view.EpochStart, m.view.Lineage, m.view.Exact = true, e.Start, e.Lineage, false
	if m.mine() && m.state != Offline {
		m.state, m.reason = Resigning, "the epoch was opened with another start"
		return []Effect{RequestElection{Fence: m.view.Fence, Reason: m.reason}}
	}
	return m.follow(nil)
}

func (m *Machine) rangeCommitted(e RangeCommitted) []Effect {
	if !m.known || e.End <= m.view.ObjectEnd && m.state != Active {
		return nil
	}
	if m.state == Active {
		return m.adopt(e.End, e.EndHash, false)
	}
	m.view.ObjectEnd, m.view.ObjectHash = e.End, e.EndHash
	if m.state == Fetching {
		return []Effect{Fetch{Attempt: m.attempt}}
	}
	return nil
}

// adopt takes over an object end that is at or above the known one, once this leader's own log was found to hold the
// same bytes below it. Where feed is set, ranges are sent again from there.
func (m *Machine) adopt(end int64, hash chainhash.Hash, feed bool) []Effect {
	if m.pending != nil {
		feed = feed || m.pending.feed
		if end <= m.pending.end {
			m.pending.feed = feed
			return nil
		}
	}
	if end > m.view.ObjectEnd {
		m.view.ObjectEnd, m.view.ObjectHash = end, hash
	}
	if end > m.log.End {
		return m.resign("the object end passed this leader's log under its own fence")
	}
	if end <= m.committed {
		if feed {
			return m.feed(nil)
		}
		return nil
	}
	for _, b := range m.borders {
		if b.end == end {
			if b.hash != hash {
				return m.resign("the committed bytes differ from this leader's log")
			}
			m.committedBytes = b.bytes
			return m.adopted(end, hash, feed)
		}
	}
	m.attempt++
	m.pending = &pendingEnd{end: end, hash: hash, feed: feed}
	return []Effect{CheckHash{Attempt: m.attempt, At: end}}
}

func (m *Machine) hashed(e Hashed) []Effect {
	if m.state != Active || e.Attempt != m.attempt || m.pending == nil {
		return nil
	}
	p := *m.pending
	m.pending = nil
	if e.Hash != p.hash {
		return m.resign("the committed bytes differ from this leader's log")
	}
	m.committedBytes = m.appendedBytes - e.TailBytes
	return m.adopted(p.end, p.hash, p.feed)
}

// adopted moves the object end and the cursor with it.
func (m *Machine) adopted(end int64, hash chainhash.Hash, feed bool) []Effect {
	m.committed, m.committedHash = end, hash
	n := 0
	for n < len(m.borders) && m.borders[n].end <= end {
		n++
	}
	m.borders = append(m.borders[:0], m.borders[n:]...)
	if m.pending != nil && m.pending.end <= end {
		feed = feed || m.pending.feed
		m.pending = nil
	}
	fx := []Effect{Advance{ObjectEnd: end}}
	if m.sent < end {
		m.sent, m.sentBytes = end, m.committedBytes
	}
	if feed {
		return m.feed(fx)
	}
	return fx
}

// reconcile compares the local log with the committed ranges by lineage and says what to do with it.
func (m *Machine) reconcile() []Effect {
	v := &m.view
	m.state = Recovering
	m.attempt++
	m.openSent = false
	common := lineage.CommonPrefix(m.log.Lineage, m.log.End, v.Lineage, math.MaxInt64)
	if v.Exact {
		common = min(common, v.ObjectEnd)
	}
	r := Reconcile{Attempt: m.attempt, At: common, ObjectEnd: v.ObjectEnd, Hash: v.ObjectHash, Lineage: below(v.Lineage, v.ObjectEnd)}
	if common < v.ObjectEnd || m.log.Start > v.ObjectEnd {
		// The log does not hold the object end: it starts again there, and older records are read from the bucket.
		r.Reset, r.At = true, v.ObjectEnd
	}
	return []Effect{r}
}

func (m *Machine) reconciled(e Reconciled) []Effect {
	if e.Attempt != m.attempt || m.state != Recovering {
		return nil
	}
	m.log = e.Log
	m.appendedBytes, m.sentBytes, m.committedBytes = e.TailBytes, 0, 0
	v := &m.view
	if e.Hash != v.ObjectHash {
		if m.log.Start == v.ObjectEnd && m.log.End == v.ObjectEnd {
			return m.offline(fmt.Sprintf("an empty log at %d does not take the committed chain hash", v.ObjectEnd))
		}
		// The right lineage over other bytes: rot, lost pages, or a reused epoch. The committed bytes win.
		m.attempt++
		return []Effect{Reconcile{Attempt: m.attempt, Reset: true, At: v.ObjectEnd, ObjectEnd: v.ObjectEnd, Hash: v.ObjectHash, Lineage: below(v.Lineage, v.ObjectEnd)}}
	}
	m.openSent = true
	return []Effect{Open{Fence: v.Fence, Start: m.log.End, Lineage: below(v.Lineage, m.log.End), ObjectEnd: v.ObjectEnd, Hash: e.Hash}}
}

func (m *Machine) openAnswered(e OpenAnswered) []Effect {
	if m.state != Recovering || !m.openSent || e.Fence != m.view.Fence {
		return nil
	}
	if e.Accepted {
		return m.activate(nil)
	}
	m.openSent = false
	m.state, m.reason = Resigning, "the opening was refused: "+e.Reason
	return []Effect{RequestElection{Fence: m.view.Fence, Reason: m.reason}}
}

// activate begins to lead. opened is the lineage as the metadata service stated it, nil to derive it.
func (m *Machine) activate(opened lineage.Lineage) []Effect {
	v := &m.view
	start := m.log.End
	entry := lineage.Entry{Leadership: v.Fence.Leadership(), StartOffset: start}
	if opened == nil {
		opened = append(below(v.Lineage, start), entry)
	}
	v.Lineage, v.Opened, v.EpochStart, v.Exact = opened, true, start, false
	m.log.Lineage = append(below(m.log.Lineage, start), entry)
	m.committed, m.committedHash = v.ObjectEnd, v.ObjectHash
	m.state, m.reason, m.openSent, m.producersReady = Active, "", false, false
	fx := []Effect{
		Activate{Fence: v.Fence, Entry: entry, Lineage: v.Lineage},
		Advance{ObjectEnd: v.ObjectEnd},
		RecoverProducers{Fence: v.Fence, ObjectEnd: v.ObjectEnd, End: m.log.End},
	}
	return m.feed(fx)
}

// feed starts a new sending run at the object end.
func (m *Machine) feed(fx []Effect) []Effect {
	m.run++
	m.sent, m.sentBytes = m.committed, m.committedBytes
	return append(fx, Feed{From: m.sent, Run: m.run})
}

// resign stops leading and asks for an election, under which the log is reconciled again.
func (m *Machine) resign(reason string) []Effect {
	fx := m.depose(reason)
	m.state, m.reason = Resigning, reason
	return append(fx, RequestElection{Fence: m.view.Fence, Reason: reason})
}

func (m *Machine) logFailed(e LogFailed) []Effect {
	var fx []Effect
	ask := m.mine() && m.state != Idle
	if m.state == Active {
		fx = append(fx, Deposed{Reason: e.Err.Error(), Kept: m.committed})
	}
	fx = append(fx, m.offline(e.Err.Error())...)
	if ask {
		fx = append(fx, RequestElection{Fence: m.view.Fence, Reason: m.reason})
	}
	return fx
}

func (m *Machine) offline(reason string) []Effect {
	m.leave(Offline, reason)
	return nil
}

// below returns the entries that start below end, in a slice of their own.
func below(l lineage.Lineage, end int64) lineage.Lineage {
	out := make(lineage.Lineage, 0, len(l)+1)
	for _, e := range l {
		if e.StartOffset >= end {
			break
		}
		out = append(out, e)
	}
	return out
}
