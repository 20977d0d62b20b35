package api

import (
	"strings"

	"github.com/braidlog/braid/pkg/lineage"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/partition"
)

// levelName is a level in errors and metrics: its proto name without prefix.
func levelName(l partition.Level) string {
	return strings.TrimPrefix(logv1.Level(l).String(), "LEVEL_")
}

// levelNames joins levels with commas.
func levelNames(levels []partition.Level) string {
	names := make([]string, len(levels))
	for i, l := range levels {
		names[i] = levelName(l)
	}
	return strings.Join(names, ",")
}

func levelsToProto(levels []partition.Level) []logv1.Level {
	out := make([]logv1.Level, len(levels))
	for i, l := range levels {
		out[i] = logv1.Level(l)
	}
	return out
}

func leadershipToProto(l lineage.Leadership) *logv1.Leadership {
	return &logv1.Leadership{Incarnation: l.Incarnation, LeaderEpoch: l.LeaderEpoch}
}

func leadershipFromProto(l *logv1.Leadership) lineage.Leadership {
	return lineage.Leadership{Incarnation: l.GetIncarnation(), LeaderEpoch: l.GetLeaderEpoch()}
}

func lineageToProto(l lineage.Lineage) []*logv1.LineageEntry {
	out := make([]*logv1.LineageEntry, len(l))
	for i, e := range l {
		out[i] = &logv1.LineageEntry{Leadership: leadershipToProto(e.Leadership), StartOffset: e.StartOffset}
	}
	return out
}

func fenceToProto(f partition.Fence) *logv1.Fence {
	return &logv1.Fence{
		Incarnation: f.Incarnation, LeaderEpoch: f.LeaderEpoch,
		BrokerEpoch: f.BrokerEpoch, LinkGeneration: f.LinkGeneration,
	}
}
