package client

import (
	"fmt"
	"strings"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

// Level is a fact about the durability of a record. Levels are independent:
// none implies another.
type Level int32

// The levels. LevelDefault is none: as a request it means the topic's
// min.ack.level.
const (
	LevelDefault  = Level(logv1.Level_LEVEL_UNSPECIFIED)
	LevelLeader   = Level(logv1.Level_LEVEL_LEADER)   // in the leader's log
	LevelReplicas = Level(logv1.Level_LEVEL_REPLICAS) // in the logs of all in-sync replicas
	LevelObject   = Level(logv1.Level_LEVEL_OBJECT)   // in the bucket and committed
	LevelMirrored = Level(logv1.Level_LEVEL_MIRRORED) // committed in a mirror
)

// String is the level's name without a prefix.
func (l Level) String() string {
	if l == LevelDefault {
		return "DEFAULT"
	}
	return strings.TrimPrefix(logv1.Level(l).String(), "LEVEL_")
}

// ParseLevel reads a level's name, in any case; "" is LevelDefault.
func ParseLevel(name string) (Level, error) {
	if name == "" {
		return LevelDefault, nil
	}
	if v, ok := logv1.Level_value["LEVEL_"+strings.ToUpper(name)]; ok && v != 0 {
		return Level(v), nil
	}
	return 0, fmt.Errorf("level %q: must be LEADER, REPLICAS, OBJECT or MIRRORED", name)
}

// Levels is a set of levels.
type Levels uint8

func levelsOf(list []logv1.Level) Levels {
	var s Levels
	for _, l := range list {
		if l > 0 && l < 8 {
			s |= 1 << l
		}
	}
	return s
}

// Has says whether the set contains l.
func (s Levels) Has(l Level) bool { return l > 0 && l < 8 && s&(1<<l) != 0 }

// List is the levels in the set, in order of number.
func (s Levels) List() []Level {
	var out []Level
	for l := Level(1); l < 8; l++ {
		if s.Has(l) {
			out = append(out, l)
		}
	}
	return out
}

// Leadership names one writer's term, unique over all clusters and time.
type Leadership struct {
	Incarnation uint32
	LeaderEpoch int32
}

func leadershipOf(l *logv1.Leadership) Leadership {
	return Leadership{Incarnation: l.GetIncarnation(), LeaderEpoch: l.GetLeaderEpoch()}
}

func (l Leadership) proto() *logv1.Leadership {
	return &logv1.Leadership{Incarnation: l.Incarnation, LeaderEpoch: l.LeaderEpoch}
}
