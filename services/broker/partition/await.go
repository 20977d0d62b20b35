package partition

import (
	"time"

	"github.com/braidlog/braid/pkg/lineage"
)

// Level is one fact about durability, see braid.log.v1.Level. The values are those of the wire.
type Level uint8

// The levels.
const (
	Leader   Level = 1
	Replicas Level = 2
	Object   Level = 3
	Mirrored Level = 4
)

// Standing says what is known of records that some leadership appended.
type Standing uint8

// The standings.
const (
	// Held: the log holds them; Levels says how safely.
	Held Standing = iota + 1
	// Truncated: they are not on the surviving branch, which left theirs at the fork point.
	Truncated
	// Expired: they are below the log start.
	Expired
	// Unsettled: this broker does not lead, or has not opened: ask again.
	Unsettled
	// Beyond: this leadership has not written that far.
	Beyond
)

// Judge says what became of the records below end that leadership l appended. fork is the fork point of Truncated.
func (m *Machine) Judge(end int64, l lineage.Leadership) (s Standing, fork int64) {
	if m.state != Active {
		return Unsettled, 0
	}
	if end <= m.view.LogStart {
		return Expired, 0
	}
	cur := m.view.Lineage
	for i, e := range cur {
		if e.Leadership != l {
			continue
		}
		if i+1 < len(cur) {
			if next := cur[i+1].StartOffset; end > next {
				return Truncated, next
			}
			return Held, 0
		}
		if end > m.log.End {
			return Beyond, 0
		}
		return Held, 0
	}
	// The leadership left no record on this branch: it forked where the first later one begins.
	for _, e := range cur {
		if e.Incarnation == l.Incarnation && e.LeaderEpoch > l.LeaderEpoch {
			return Truncated, e.StartOffset
		}
	}
	return Truncated, m.committed
}

// Levels appends to dst the levels that everything below end has reached at now. end is at or below the log end.
func (m *Machine) Levels(dst []Level, end int64, now time.Duration) []Level {
	if m.state != Active {
		return dst
	}
	if end <= m.log.End && m.SessionLive(now) {
		dst = append(dst, Leader)
	}
	if end <= m.committed {
		dst = append(dst, Object)
	}
	return dst
}
