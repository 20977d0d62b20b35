package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

func demoInput(n int) []demoRecord {
	var out []demoRecord
	for i := range n {
		out = append(out, demoRecord{key: fmt.Appendf(nil, "k%d", i%7), value: fmt.Appendf(nil, "v%d", i/2)})
	}
	return out
}

func TestTheComparisonFindsWhatIsWrong(t *testing.T) {
	sent := demoInput(100) // some contents occur twice, under other keys
	require.Equal(t, comparison{read: 100}, compare(sent, sent))

	// Partitions in any order, keys among each other too.
	byKey := slices.Clone(sent)
	slices.SortStableFunc(byKey, func(a, b demoRecord) int { return strings.Compare(string(b.key), string(a.key)) })
	require.Equal(t, comparison{read: 100}, compare(sent, byKey))

	require.Equal(t, comparison{read: 99, lost: 1}, compare(sent, slices.Delete(slices.Clone(sent), 40, 41)))
	require.Equal(t, comparison{read: 101, duplicated: 1}, compare(sent, slices.Insert(slices.Clone(sent), 60, sent[40])))

	swapped := slices.Clone(sent)
	swapped[10], swapped[17] = swapped[17], swapped[10] // of one key
	require.Equal(t, comparison{read: 100, reordered: 1}, compare(sent, swapped))

	changed := slices.Clone(sent)
	changed[3].value = []byte("another")
	require.Equal(t, comparison{read: 100, lost: 1, duplicated: 1}, compare(sent, changed))

	other := slices.Clone(sent)
	other[3].key = []byte("another")
	require.Equal(t, comparison{read: 100, lost: 1, duplicated: 1}, compare(sent, other))
	require.Equal(t, comparison{lost: 100}, compare(sent, nil))
}

func TestTheDemoFailsUnlessEverythingHolds(t *testing.T) {
	good := demoResult{Records: 10, Acked: 10, Read: 10, FailoverMS: 5, PartitionsPerObject: 1.5, Levels: map[string]int{"OBJECT": 10}}
	require.Empty(t, good.problems())
	for name, spoil := range map[string]func(*demoResult){
		"lost":       func(r *demoResult) { r.Lost = 1 },
		"duplicated": func(r *demoResult) { r.Duplicated = 1 },
		"reordered":  func(r *demoResult) { r.Reordered = 1 },
		"were acked": func(r *demoResult) { r.Acked = 9 },
		"OBJECT":     func(r *demoResult) { r.Levels = map[string]int{"OBJECT": 9, "LEADER": 10} },
		"read":       func(r *demoResult) { r.Read = 9 },
		"took over":  func(r *demoResult) { r.FailoverMS = 0 },
		"partitions": func(r *demoResult) { r.PartitionsPerObject = 1 },
		"no records": func(r *demoResult) { *r = demoResult{PartitionsPerObject: 2, FailoverMS: 1} },
	} {
		bad := good
		spoil(&bad)
		require.Len(t, bad.problems(), 1, name)
		require.Contains(t, bad.problems()[0], name)
	}
}

func TestTheResultHasExactlyItsFields(t *testing.T) {
	data, err := json.Marshal(demoResult{})
	require.NoError(t, err)
	var fields map[string]any
	require.NoError(t, json.Unmarshal(data, &fields))
	var names []string
	for name := range fields {
		names = append(names, name)
	}
	require.ElementsMatch(t, []string{
		"records", "acked", "read", "lost", "duplicated", "reordered", "failover_ms", "objects", "bytes_per_object",
		"partitions_per_object", "ack_p50_ms", "ack_p99_ms", "levels",
	}, names)
}

func TestTheCensusCountsObjectsNotRanges(t *testing.T) {
	var c objectCensus
	for _, x := range []struct {
		partition int32
		object    string
	}{{0, "a"}, {0, "a"}, {1, "a"}, {1, "b"}} {
		c.add(x.partition, &metadatav1.SegmentRange{ObjectName: x.object, ObjectSizeBytes: 100, LengthBytes: 10})
	}
	bytes, partitions := c.perObject()
	require.Equal(t, 4, c.ranges)
	require.EqualValues(t, 40, c.bytes)
	require.InDelta(t, 100, bytes, 0)
	require.InDelta(t, 1.5, partitions, 0)
}

func TestQuantiles(t *testing.T) {
	var l latencies
	require.Zero(t, l.ms(0.5))
	order := rand.New(rand.NewPCG(1, 2)).Perm(100)
	for _, i := range order {
		l.add(time.Duration(i+1) * time.Millisecond)
	}
	require.InDelta(t, 50, l.ms(0.5), 0)
	require.InDelta(t, 99, l.ms(0.99), 0)
	require.InDelta(t, 100, l.ms(1), 0)
	require.InDelta(t, 1, l.ms(0), 0)
}

func TestDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes and waits for a session to expire")
	}
	code, stdout, stderr := braid(t, "", "demo", "--json", "--load", "3s")
	require.Equal(t, exitOK, code, "%s\n%s", stdout, stderr)
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	var result demoResult
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &result))
	require.Equal(t, 1707, result.Acked)
	require.Empty(t, result.problems())
}
