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
}

// seenFence is when a fence, told by the offset of its entry, was first seen.
type seenFence struct {
	entry int64
	at    time.Duration
}

func newElector(sessionTimeout, openTimeout time.Duration) *elector {
	return &elector{
		sessionTimeout: sessionTimeout, openTimeout: openTimeout,
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
		case again > 0 && (wait == 0 || again < wait):
			wait = again
		}
		return true
	})
	e.fenced = fenced
	return elections, wait
}

// moves says whether an event can change what decide answers.
func moves(ev *metadatav1.Event) bool {
	switch ev.GetKind().(type) {
	case *metadatav1.Event_BrokerRegistered, *metadatav1.Event_BrokerOffline, *metadatav1.Event_TopicCreated,
		*metadatav1.Event_TopicUpdated, *metadatav1.Event_PartitionFenced, *metadatav1.Event_EpochOpened:
		return true
	}
	return false
}
