package partition

import (
	"math"

	"github.com/braidlog/braid/pkg/lineage"
)

// A replica that does not lead follows the committed ranges (architecture §2.7, §5). It truncates by the opening of the
// leader's epoch, not by an answer of a leader that has not opened, and serves nothing before that: between an election
// and its opening nobody knows which branch survives.

// follow brings a replica that does not lead towards the partition's present branch.
func (m *Machine) follow(fx []Effect) []Effect {
	if m.state == Offline || !m.known {
		return fx
	}
	m.state, m.reason = Truncating, ""
	m.attempt++
	if m.view.Leader == m.self {
		// Our own fence of an earlier registration: void, whatever it opened.
		m.reason = "this broker registered again and waits for an election"
		return fx
	}
	if !m.view.Opened {
		m.reason = "the elected leader has not opened its epoch"
		return fx
	}
	v := &m.view
	common := lineage.CommonPrefix(m.log.Lineage, m.log.End, v.Lineage, math.MaxInt64)
	if common < m.log.Start || m.log.End < v.LogStart {
		return append(fx, m.restart())
	}
	return append(fx, Truncate{Attempt: m.attempt, At: common})
}

// restart begins the replica's log again, empty, at the object end; older records are read from the bucket.
func (m *Machine) restart() Effect {
	v := &m.view
	return Truncate{Attempt: m.attempt, Reset: true, At: v.ObjectEnd, Hash: v.ObjectHash, Lineage: below(v.Lineage, v.ObjectEnd)}
}

// cut ends Truncating.
func (m *Machine) cut(e Cut) []Effect {
	if e.Attempt != m.attempt || m.state != Truncating {
		return nil
	}
	m.log = e.Log
	m.state, m.reason = Fetching, ""
	return []Effect{Fetch{Attempt: m.attempt}}
}

// diverged answers a fetch that found other bytes below the replica's end than are committed: the lineage is the same,
// the bytes are not. The committed ones win.
func (m *Machine) diverged(e Diverged) []Effect {
	if e.Attempt != m.attempt || m.state != Fetching {
		return nil
	}
	m.state, m.reason = Truncating, "the committed bytes differ from this replica's log"
	m.attempt++
	return []Effect{m.restart()}
}

// Current reports whether an order to change the log, Reconcile or Truncate, still stands. Such an order destroys: it
// must be carried out only while it stands, and no event may be applied between the question and the end of the act.
func (m *Machine) Current(attempt int64) bool {
	return attempt == m.attempt && (m.state == Truncating || m.state == Recovering)
}

// Wanted returns the committed offsets that a following replica lacks, [from, to), and the attempt that a fetch of them
// belongs to.
func (m *Machine) Wanted() (from, to, attempt int64, ok bool) {
	if m.state != Fetching || m.log.End >= m.view.ObjectEnd {
		return 0, 0, 0, false
	}
	return m.log.End, m.view.ObjectEnd, m.attempt, true
}

// Replicated records that a fetch of the given attempt was appended: the log now ends at end with lineage l. It returns
// false when the attempt is over; then nothing may have been appended.
func (m *Machine) Replicated(attempt, end int64, l lineage.Lineage) bool {
	if attempt != m.attempt || m.state != Fetching {
		return false
	}
	m.log.End, m.log.Lineage = end, l
	return true
}

// Serves returns the offset below which this replica may answer reads from what it knows, and whether it may at all: a
// leader below the object end, a follower that is reconciled at the present fence below both its end and the object
// end (H8).
func (m *Machine) Serves() (limit int64, ok bool) {
	switch m.state {
	case Active:
		return m.committed, true
	case Fetching:
		return min(m.log.End, m.view.ObjectEnd), true
	default:
		return 0, false
	}
}
