package controller

import (
	"cmp"
	"slices"
	"time"
)

// Role tells the two kinds of members apart, whose ids are independent.
type Role uint8

// The roles.
const (
	Broker Role = iota + 1
	RemoteLogManager
)

// String returns "broker" or "rlm".
func (r Role) String() string {
	switch r {
	case Broker:
		return "broker"
	case RemoteLogManager:
		return "rlm"
	default:
		return "unknown"
	}
}

// Member is one registration: a member under the epoch it got.
type Member struct {
	Role  Role
	ID    int32
	Epoch int64
}

// sessions says until when each registered member is taken for alive. It is
// pure: time comes as a monotonic reading since any fixed moment, the same
// moment for all calls. The caller serializes calls.
type sessions struct {
	timeout time.Duration
	live    map[sessionKey]*session
}

type sessionKey struct {
	role Role
	id   int32
}

type session struct {
	epoch    int64
	deadline time.Duration
}

func newSessions(timeout time.Duration) *sessions {
	return &sessions{timeout: timeout, live: make(map[sessionKey]*session)}
}

// grant gives the member one full timeout from now: at its registration, and
// for everybody when a controller takes over (it knows of no earlier
// heartbeat). An older epoch of the member ends.
func (s *sessions) grant(m Member, now time.Duration) {
	s.live[sessionKey{m.Role, m.ID}] = &session{epoch: m.Epoch, deadline: now + s.timeout}
}

// heartbeat renews the session and returns true, unless it has ended or
// belongs to another epoch. A deadline that has passed ends the session even if
// nobody called expire yet.
func (s *sessions) heartbeat(m Member, now time.Duration) bool {
	got := s.live[sessionKey{m.Role, m.ID}]
	if got == nil || got.epoch != m.Epoch || got.deadline <= now {
		return false
	}
	got.deadline = now + s.timeout
	return true
}

// end forgets the member's session, if it is of this epoch.
func (s *sessions) end(m Member) {
	key := sessionKey{m.Role, m.ID}
	if got := s.live[key]; got != nil && got.epoch == m.Epoch {
		delete(s.live, key)
	}
}

// expire removes and returns the members whose deadline has passed, in order of
// role and id.
func (s *sessions) expire(now time.Duration) []Member {
	var out []Member
	for key, got := range s.live {
		if got.deadline <= now {
			out = append(out, Member{Role: key.role, ID: key.id, Epoch: got.epoch})
			delete(s.live, key)
		}
	}
	slices.SortFunc(out, func(a, b Member) int { return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.ID, b.ID)) })
	return out
}

// next is when the first session will end; false without sessions.
func (s *sessions) next() (time.Duration, bool) {
	var first time.Duration
	found := false
	for _, got := range s.live {
		if !found || got.deadline < first {
			first, found = got.deadline, true
		}
	}
	return first, found
}
