package controller

import (
	"time"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// maxElections is how many fences one entry raises at most.
const maxElections = 1_000

// elector knows since when things are as they are, which the log does not say,
// and asks the state whom to elect. It is pure, as sessions is, and begins anew
// with every term: what it has not seen counts from when it first looks.
type elector struct {
	sessionTimeout time.Duration
	openTimeout    time.Duration
	fenced         map[state.PartitionID]seenFence // of partitions that are undecided
	gone           map[int32]time.Duration         // brokers without a session, since when

	// replaceTimeout is how long a partition is left without a live replica.
	replaceTimeout time.Duration
	orphans        []state.PartitionID // by the last decide
	replaceAt      time.Duration       // not before
}

// seenFence is when a fence, told by the offset of its entry, was first seen.
type seenFence struct {
	entry int64
	at    time.Duration
}

func newElector(sessionTimeout, openTimeout, replaceTimeout time.Duration) *elector {
	return &elector{
		sessionTimeout: sessionTimeout, openTimeout: openTimeout, replaceTimeout: replaceTimeout,
		fenced: make(map[state.PartitionID]seenFence), gone: make(map[int32]time.Duration),
	}
}

// decide returns the elections due now and how long to wait before asking again
// should nothing happen before; 0 means until something does.
func (e *elector) decide(st *state.State, now time.Duration) (elections []state.Election, wait time.Duration) {
	for _, b := range st.Brokers() {
		if b.GetOnline() {
			delete(e.gone, b.GetBrokerId())
		} else if _, known := e.gone[b.GetBrokerId()]; !known {
			e.gone[b.GetBrokerId()] = now
		}
	}
	fenced := make(map[state.PartitionID]seenFence)
	e.orphans = nil
	st.Undecided(func(id state.PartitionID) bool {
		view, _ := st.View(id)
		seen, known := e.fenced[id]
		if !known || seen.entry != view.FencedAt {
			seen = seenFence{view.FencedAt, now}
		}
		fenced[id] = seen
		facts := state.ElectionFacts{
			SinceFenced: now - seen.at, SessionTimeout: e.sessionTimeout, OpenTimeout: e.openTimeout,
		}
		if since, gone := e.gone[view.LeaderID]; gone {
			facts.LeaderGone = now - since
		}
		election, needed, again := st.ChooseLeader(id, facts)
		switch {
		case needed:
			if len(elections) < maxElections {
				elections = append(elections, election)
			}
		case again > 0:
			wait = sooner(wait, again)
		case st.Orphaned(id):
			e.orphans = append(e.orphans, id)
		}
		return true
	})
	e.fenced = fenced
	return elections, wait
}

// maxReplacements is how many partitions get a new replica at once, and
// replacePause the least time between two such times: whoever takes over the
// partitions of a dead cluster gets them in portions, and brokers that come back
// meanwhile keep theirs.
const (
	maxReplacements = 200
	replacePause    = time.Second
)

// replace returns the replacements due now, of partitions that have had no live
// replica for the timeout, and how long to wait before asking again, as decide
// does. It has to be called right behind decide, on a state in which the
// elections of that may be applied. A partition is decided here only once its
// leader's grace is over, however long that is.
func (e *elector) replace(st *state.State, now time.Duration) (replacements []state.Replacement, wait time.Duration) {
	if len(e.orphans) == 0 || len(e.gone) == len(st.Brokers()) { // then a registration changes the answer
		return nil, 0
	}
	var due []state.PartitionID
	for _, id := range e.orphans {
		view, _ := st.View(id)
		since := time.Duration(0)
		for _, broker := range view.Replicas {
			since = max(since, e.gone[broker])
		}
		switch left := max(since+e.replaceTimeout, e.replaceAt) - now; {
		case left > 0:
			wait = sooner(wait, left)
		case len(due) < maxReplacements:
			due = append(due, id)
		default:
			wait = sooner(wait, replacePause)
		}
	}
	if replacements = st.ChooseReplacements(due...); len(replacements) > 0 {
		e.replaceAt = now + replacePause
	}
	return replacements, wait
}

// sooner is the shorter of two waits, where 0 is for ever.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// moves says whether an event can change what decide answers.
func moves(ev *metadatav1.Event) bool {
	switch ev.GetKind().(type) {
	case *metadatav1.Event_BrokerRegistered, *metadatav1.Event_BrokerOffline, *metadatav1.Event_TopicCreated,
		*metadatav1.Event_TopicUpdated, *metadatav1.Event_PartitionFenced, *metadatav1.Event_EpochOpened,
		*metadatav1.Event_ReplicasChanged:
		return true
	}
	return false
}
