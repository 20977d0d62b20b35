package state_test

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// fuzzed is a state with a bit of everything.
func fuzzed(t testing.TB) (*machine, []state.PartitionID) {
	m, ids := opened(t, 2)
	m.commit(m.command(1, 1, m.descriptor(ids[0], 10, 0), m.descriptor(ids[1], 7, 100)))
	m.elect(ids[1], 3)
	return m, ids
}

// Whatever stands in an entry, Apply does not panic, says what is wrong in a
// typed error, and stops.
func FuzzApply(f *testing.F) {
	m, ids := fuzzed(f)
	commit, _, err := m.s.DecideCommit(m.command(2, 4, m.descriptor(ids[0], 20, 0)))
	if err != nil {
		f.Fatal(err)
	}
	opening, _, err := m.s.DecideOpenEpoch(m.openRequest(ids[1]))
	if err != nil {
		f.Fatal(err)
	}
	for _, events := range [][]*metadatav1.Event{commit, opening, nil} {
		b, _ := proto.Marshal(m.entry(events))
		f.Add(b)
	}
	for _, b := range m.log {
		e := &metadatav1.Entry{}
		if err := proto.Unmarshal(b, e); err != nil {
			f.Fatal(err)
		}
		b, _ = proto.Marshal(m.entry(e.GetEvents()))
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e := &metadatav1.Entry{}
		if proto.Unmarshal(b, e) != nil {
			return
		}
		e.Offset = m.s.EndOffset()
		s := m.s.Clone()
		err := s.Apply(e)
		if err != nil {
			if !errors.As(err, new(*state.BadEntryError)) && !errors.As(err, new(*state.UnknownEventError)) {
				t.Fatalf("untyped %v", err)
			}
			if again := s.Apply(m.entry(nil)); !errors.Is(again, err) {
				t.Fatalf("went on after %v: %v", err, again)
			}
			return
		}
		s.SegmentEvents(e)
		s.Image(1)
		again := m.s.Clone()
		if err := again.Apply(e); err != nil || again.Digest() != s.Digest() {
			t.Fatalf("not a function of the entry: %v", err)
		}
	})
}

// Whatever stands in a command, it is judged without a panic, and what is
// decided can be applied.
func FuzzDecideCommit(f *testing.F) {
	m, ids := fuzzed(f)
	first := m.descriptor(ids[0], 20, 0)
	for _, ranges := range [][]*logv1.RangeDescriptor{{first}, {first, behind(first, 30)}, {m.descriptor(ids[1], 20, 0)}} {
		b, _ := proto.Marshal(m.command(1, 2, ranges...))
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		cmd := &metadatav1.CommitCombinedSegmentRequest{}
		if proto.Unmarshal(b, cmd) != nil {
			return
		}
		events, r, err := m.s.DecideCommit(cmd)
		if err != nil {
			return
		}
		if len(r.GetVerdicts()) != len(cmd.GetRanges()) {
			t.Fatalf("%d verdicts for %d ranges", len(r.GetVerdicts()), len(cmd.GetRanges()))
		}
		if len(events) > 0 {
			if err := m.s.Clone().Apply(m.entry(events)); err != nil {
				t.Fatal(err)
			}
		}
	})
}
