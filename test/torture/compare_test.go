//go:build unix

package torture_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// levels is an ack's set that has what is asked for.
func levels(asked client.Level) client.Levels { return 1<<client.LevelLeader | 1<<asked }

// history is a partition with ten records of two keys, all acked, and its log.
func history(asked client.Level) (ledger, []seen) {
	g := ledger{level: asked}
	var log []seen
	by := client.Leadership{Incarnation: 7, LeaderEpoch: 1}
	begin := time.Unix(1_700_000_000, 0)
	for i := range int64(10) {
		key := []string{"a", "b"}[i%2]
		g.entries = append(g.entries, entry{id: 100 + i, key: key, sent: begin, answered: begin, ack: client.Ack{Offset: i, Leadership: by, Levels: levels(asked)}})
		log = append(log, seen{offset: i, id: 100 + i, key: key, leadership: by})
	}
	return g, log
}

// A checker that finds nothing proves nothing: each kind of damage has to be told.
func TestTheComparisonTellsEveryKindOfDamage(t *testing.T) {
	where := slot{"t", 0}
	successor := client.Leadership{Incarnation: 7, LeaderEpoch: 2}
	for _, c := range []struct {
		name   string
		asked  client.Level
		damage func(*ledger, []seen) []seen
		want   string // "" = there is nothing to tell
	}{
		{"nothing", client.LevelObject, func(_ *ledger, log []seen) []seen { return log }, ""},
		{"a lost tail", client.LevelObject, func(_ *ledger, log []seen) []seen { return log[:9] }, "LOST: record 109"},
		{"a hole in the offsets", client.LevelObject, func(_ *ledger, log []seen) []seen { log[9].offset = 10; return log }, "record 9 of the log has offset 10"},
		{"a record twice", client.LevelObject, func(_ *ledger, log []seen) []seen {
			twice := log[9]
			twice.offset = 10
			return append(log, twice)
		}, "record 109 is at offset 9 and at 10"},
		{"two records of a key changed places", client.LevelObject, func(_ *ledger, log []seen) []seen {
			log[2].id, log[4].id = log[4].id, log[2].id
			return log
		}, `record 102 of key "a" comes after 104`},
		{"other content", client.LevelObject, func(_ *ledger, log []seen) []seen { log[3].id = -1; return log }, "offset 3 holds what was never sent there"},
		{"another key", client.LevelObject, func(_ *ledger, log []seen) []seen { log[3].key = "a"; return log }, `has key "a", sent with "b"`},
		{"another writer", client.LevelObject, func(_ *ledger, log []seen) []seen { log[3].leadership = successor; return log }, "was acked by"},
		{"a weaker ack", client.LevelObject, func(g *ledger, log []seen) []seen {
			g.entries[3].ack.Levels = levels(client.LevelLeader)
			return log
		}, "asked for OBJECT"},
		{"no answer", client.LevelObject, func(g *ledger, log []seen) []seen { g.entries[9].answered = time.Time{}; return log }, "1 records were not acked"},
		{"stored after all", client.LevelLeader, func(g *ledger, log []seen) []seen {
			g.entries[9].err = &client.DeliveryError{}
			return log
		}, "told as not stored"},
		{"maybe stored and there", client.LevelLeader, func(g *ledger, log []seen) []seen {
			g.entries[9].err = &client.DeliveryError{MaybeStored: true}
			return log
		}, ""},
		{"a tail acked at LEADER is lost", client.LevelLeader, func(_ *ledger, log []seen) []seen { return log[:8] }, ""},
		{"a LEADER ack lost from the middle", client.LevelLeader, func(_ *ledger, log []seen) []seen {
			log = append(log[:8], log[9])
			log[8].offset = 8
			return log
		}, "is gone, but its leadership"},
		{"a loss that is told", client.LevelLeader, func(g *ledger, log []seen) []seen {
			g.entries[9].err = rpcerr.New(codes.FailedPrecondition, errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP, "gap")
			return log[:8]
		}, ""},
		{"a loss without a word", client.LevelLeader, func(g *ledger, log []seen) []seen {
			g.entries[9].ack.Leadership, g.entries[9].ack.Offset = successor, 8
			log[9].leadership, log[9].offset = successor, 8
			return append(log[:8], log[9])
		}, "without a word"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, log := history(c.asked)
			log = c.damage(&g, log)
			v := &verdict{}
			v.compare(where, []ledger{g}, log)
			if c.want == "" {
				require.Empty(t, v.violations)
				return
			}
			require.NotEmpty(t, v.violations)
			require.Contains(t, v.violations[0], c.want)
		})
	}
}

func TestContentFollowsFromTheID(t *testing.T) {
	m := client.Message{Key: []byte("k"), Value: content(5), Offset: 3}
	require.EqualValues(t, 5, seenOf(m).id)
	m.Value[20] ^= 1
	require.EqualValues(t, -1, seenOf(m).id)
	m.Value = m.Value[:4]
	require.EqualValues(t, -1, seenOf(m).id)
}
