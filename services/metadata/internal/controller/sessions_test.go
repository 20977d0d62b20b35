package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestSessions(t *testing.T) {
	const timeout = 6 * time.Second
	b1, b2 := Member{Broker, 1, 10}, Member{Broker, 2, 11}
	r1 := Member{RemoteLogManager, 1, 12}
	at := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

	for name, run := range map[string]func(t *testing.T, s *sessions){
		"lives one timeout after its grant": func(t *testing.T, s *sessions) {
			s.grant(b1, at(1))
			assert.Empty(t, s.expire(at(6.9)))
			assert.Equal(t, []Member{b1}, s.expire(at(7)))
			assert.Empty(t, s.expire(at(8)), "told once")
		},
		"a heartbeat renews": func(t *testing.T, s *sessions) {
			s.grant(b1, at(0))
			assert.True(t, s.heartbeat(b1, at(5)))
			assert.Empty(t, s.expire(at(10.9)))
			assert.Equal(t, []Member{b1}, s.expire(at(11)))
		},
		"a late heartbeat does not revive": func(t *testing.T, s *sessions) {
			s.grant(b1, at(0))
			assert.False(t, s.heartbeat(b1, at(6)))
			assert.Equal(t, []Member{b1}, s.expire(at(6)))
			assert.False(t, s.heartbeat(b1, at(6)))
		},
		"a new epoch replaces the old": func(t *testing.T, s *sessions) {
			s.grant(b1, at(0))
			again := Member{Broker, 1, 20}
			s.grant(again, at(3))
			assert.False(t, s.heartbeat(b1, at(4)))
			s.end(b1) // the old epoch's goodbye is of no importance
			assert.True(t, s.heartbeat(again, at(4)))
			assert.Empty(t, s.expire(at(9.9)))
		},
		"roles have ids of their own": func(t *testing.T, s *sessions) {
			s.grant(b1, at(0))
			s.grant(r1, at(1))
			s.end(b1)
			assert.False(t, s.heartbeat(b1, at(1)))
			assert.True(t, s.heartbeat(r1, at(1)))
		},
		"all of one moment in order, the next deadline": func(t *testing.T, s *sessions) {
			_, ok := s.next()
			assert.False(t, ok)
			s.grant(r1, at(0))
			s.grant(b2, at(0))
			s.grant(b1, at(2))
			next, ok := s.next()
			assert.True(t, ok)
			assert.Equal(t, at(6), next)
			assert.Equal(t, []Member{b2, r1}, s.expire(at(6)))
			next, _ = s.next()
			assert.Equal(t, at(8), next)
		},
		"a new controller grants everybody the full time": func(t *testing.T, s *sessions) {
			for _, m := range []Member{b1, b2, r1} {
				s.grant(m, at(100))
			}
			assert.Empty(t, s.expire(at(105.9)))
			assert.Len(t, s.expire(at(106)), 3)
		},
	} {
		t.Run(name, func(t *testing.T) { run(t, newSessions(timeout)) })
	}
}
