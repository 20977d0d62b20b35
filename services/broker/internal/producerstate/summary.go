package producerstate

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/braidlog/braid/pkg/record"
)

// Summary is what a range of the log did to producer state: the content of an
// object's footer for that range.
type Summary struct {
	// Base and End are the range [Base, End).
	Base, End int64
	// Producers are those that wrote in the range and are known at its end, by
	// id, each as it is at the end; all that are known, if Complete is set.
	Producers []Producer
	// Expiries are those recorded in the range.
	Expiries []Expiry
	// Complete says that Producers is the whole state at End.
	Complete bool
}

// Summary tells what happened since an offset at or below the end. Since later
// batches push out earlier ones, a range is summarized by a State that ends with
// it: who cuts ranges behind the leader's appends keeps a State of its own,
// brings it to the end of each range by Replay and takes the summary then.
func (s *State) Summary(since int64) Summary {
	out := Summary{Base: since, End: s.end, Expiries: s.Expiries(since, s.end)}
	for _, p := range s.byID {
		if p.last().BaseOffset >= since {
			out.Producers = append(out.Producers, p.export())
		}
	}
	sortProducers(out.Producers)
	return out
}

// Merge takes in the summary of the range that begins where the state ends. A
// complete one replaces the state, wherever that ended.
func (s *State) Merge(sum Summary) error {
	if sum.Base != s.end && !sum.Complete {
		return fmt.Errorf("%w: summary [%d, %d), state ends at %d", ErrNotContiguous, sum.Base, sum.End, s.end)
	}
	if err := validate(sum.Producers, sum.Base, sum.End); err != nil {
		return err
	}
	if sum.Complete {
		s.missed = 0
		for s.root.next != &s.root {
			s.remove(s.root.next)
		}
	}
	for _, e := range sum.Expiries {
		if p := s.byID[e.ProducerID]; p != nil {
			s.remove(p)
		}
	}
	for i := range sum.Producers {
		if p := s.byID[sum.Producers[i].ID]; p != nil {
			s.remove(p)
		}
		s.load(&sum.Producers[i])
	}
	s.end = sum.End
	return nil
}

// load adds a producer that is not known.
func (s *State) load(p *Producer) {
	e := &producer{id: p.ID, epoch: p.Epoch, n: int8(len(p.Batches))}
	copy(e.batches[:], p.Batches)
	s.byID[p.ID] = e
	s.pushBack(e)
}

func (p *producer) export() Producer {
	return Producer{ID: p.id, Epoch: p.epoch, Batches: slices.Clone(p.batches[:p.n])}
}

func sortProducers(all []Producer) {
	slices.SortFunc(all, func(a, b Producer) int { return cmp.Compare(a.ID, b.ID) })
}

// Snapshot is the whole state at a log offset.
type Snapshot struct {
	// End is the offset up to which it covers the log.
	End int64
	// Producers are all that are known, by id.
	Producers []Producer
	// Expiries are those that were recorded and not forgotten, by offset.
	Expiries []Expiry
	// Missed is State.Missed. It is not part of the encoding: a state that missed
	// something is not to be saved.
	Missed int64
}

// Snapshot copies the whole state.
func (s *State) Snapshot() Snapshot {
	return Snapshot{End: s.end, Producers: s.producers(), Expiries: slices.Clone(s.expiries), Missed: s.missed}
}

// producers lists all producers by id.
func (s *State) producers() []Producer {
	out := make([]Producer, 0, len(s.byID))
	for _, p := range s.byID {
		out = append(out, p.export())
	}
	sortProducers(out)
	return out
}

// Restore makes the state of a snapshot.
func Restore(opts Options, from Snapshot) (*State, error) {
	if err := validate(from.Producers, 0, from.End); err != nil {
		return nil, err
	}
	for i, e := range from.Expiries {
		if e.ProducerID < 0 || e.Epoch < 0 || e.Offset < 0 || e.Offset > from.End || i > 0 && e.Offset < from.Expiries[i-1].Offset {
			return nil, formatf("impossible expiry of producer %d at %d", e.ProducerID, e.Offset)
		}
	}
	s := New(opts, from.End)
	for i := range from.Producers {
		s.load(&from.Producers[i])
	}
	s.expiries, s.missed = slices.Clone(from.Expiries), from.Missed
	return s, nil
}

// validate refuses producers that no state can have at end.
func validate(producers []Producer, base, end int64) error {
	if base < 0 || end < base {
		return formatf("impossible range [%d, %d)", base, end)
	}
	for i := range producers {
		p := &producers[i]
		if i > 0 && p.ID <= producers[i-1].ID || p.ID < 0 {
			return formatf("producer ids are not in order at %d", p.ID)
		}
		if p.Epoch < 0 || len(p.Batches) == 0 || len(p.Batches) > KeptBatches {
			return formatf("producer %d has epoch %d and %d batches", p.ID, p.Epoch, len(p.Batches))
		}
		next := int64(0)
		for j, b := range p.Batches {
			if b.BaseSequence < 0 || b.LastOffsetDelta < 0 || b.BaseOffset < next || b.EndOffset() > end || b.EndOffset() <= b.BaseOffset ||
				b.LastSequence != record.NextSequence(b.BaseSequence, b.LastOffsetDelta) {
				return formatf("producer %d has an impossible batch at offset %d", p.ID, b.BaseOffset)
			}
			if j > 0 && b.BaseSequence != record.NextSequence(p.Batches[j-1].LastSequence, 1) {
				return formatf("producer %d has a gap at sequence %d", p.ID, b.BaseSequence)
			}
			next = b.EndOffset()
		}
	}
	return nil
}
