package producerstate

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/braidlog/braid/pkg/record"
)

// KeptBatches is the number of batches remembered per producer: what a client
// may have in flight.
const KeptBatches = 5

// DefaultMaxProducers is the bound where Options names none.
const DefaultMaxProducers = 100_000

// ErrNotContiguous marks a summary or batch that does not begin where the state
// ends, so that something in between would be missed.
var ErrNotContiguous = errors.New("producerstate: does not continue the state")

// Options are the limits of a State.
type Options struct {
	// MaxProducers bounds the producers that Check lets in; 0 means
	// DefaultMaxProducers. Replayed batches are taken beyond it, since the
	// leader's bound let them in.
	MaxProducers int
}

// Batch is what is remembered of one batch.
type Batch struct {
	// BaseSequence and LastSequence are the sequences of the first and last
	// record, both inclusive, 0 to 2^31-1.
	BaseSequence, LastSequence int32
	// BaseOffset is the first record's offset.
	BaseOffset int64
	// LastOffsetDelta is the last record's offset minus BaseOffset.
	LastOffsetDelta int32
	// Timestamp is the largest timestamp, in milliseconds since 1970.
	Timestamp int64
}

// EndOffset is the offset after the last record.
func (b Batch) EndOffset() int64 { return b.BaseOffset + int64(b.LastOffsetDelta) + 1 }

// Producer is what is known of one producer.
type Producer struct {
	ID    int64
	Epoch int16
	// Batches are the last batches of this epoch, oldest first, at least one
	// and at most KeptBatches.
	Batches []Batch
}

// Expiry says that a leader forgot a producer.
type Expiry struct {
	ProducerID int64
	// Epoch is the one it had.
	Epoch int16
	// Offset is the log end at which it was decided: what the producer stored
	// below it is forgotten.
	Offset int64
}

// Verdict says what to do with a batch that Check did not refuse.
type Verdict uint8

const (
	// Accept: the batch is the next one; append it and call Update.
	Accept Verdict = iota + 1
	// Duplicate: the batch is stored; answer with its offsets.
	Duplicate
)

// String is the verdict in words.
func (v Verdict) String() string {
	switch v {
	case Accept:
		return "accept"
	case Duplicate:
		return "duplicate"
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// Decision is the answer of Check.
type Decision struct {
	Verdict Verdict
	// BaseOffset and EndOffset are where a Duplicate is stored; zero otherwise.
	BaseOffset, EndOffset int64
}

// Kept says what is stored of a producer, for errors.
type Kept struct {
	// Known is false where nothing is kept; the other fields are -1 then.
	Known bool
	Epoch int16
	// LastSequence and LastOffset are the last stored record's (inclusive).
	LastSequence int32
	LastOffset   int64
}

var nothingKept = Kept{Epoch: -1, LastSequence: -1, LastOffset: -1}

// SequenceGapError refuses a batch that is not the next one of its producer.
// Nothing was stored. The client compares Kept with what it has answers for: a
// loss is reported, and it goes on with a new epoch from sequence 0.
type SequenceGapError struct {
	ProducerID   int64
	BaseSequence int32
	// Behind says that the sequence lies below the expected one without being
	// one of the batches remembered: it is older than those, or cut otherwise.
	Behind bool
	// Doubtful says that a part of the log behind the last batch kept could not
	// be looked at: the batch may be stored there, or be the next one.
	Doubtful bool
	Kept     Kept
}

func (e *SequenceGapError) Error() string {
	if e.Doubtful {
		return fmt.Sprintf("producerstate: sequence %d of producer %d, of which records behind sequence %d at offset %d may be lost",
			e.BaseSequence, e.ProducerID, e.Kept.LastSequence, e.Kept.LastOffset)
	}
	if !e.Kept.Known {
		return fmt.Sprintf("producerstate: sequence %d of producer %d, of which nothing is kept", e.BaseSequence, e.ProducerID)
	}
	return fmt.Sprintf("producerstate: sequence %d of producer %d, the last one kept is %d at offset %d of epoch %d",
		e.BaseSequence, e.ProducerID, e.Kept.LastSequence, e.Kept.LastOffset, e.Kept.Epoch)
}

// FencedError refuses a batch of an epoch older than one already seen.
type FencedError struct {
	ProducerID int64
	Epoch      int16
	Kept       Kept
}

func (e *FencedError) Error() string {
	return fmt.Sprintf("producerstate: producer %d is fenced: epoch %d, current is %d", e.ProducerID, e.Epoch, e.Kept.Epoch)
}

// LimitError refuses a new producer because there are too many.
type LimitError struct{ Max int }

func (e *LimitError) Error() string {
	return fmt.Sprintf("producerstate: the partition has %d producers, no more are taken", e.Max)
}

// producer is an entry of the state and an element of the list in the order of
// last use.
type producer struct {
	id         int64
	epoch      int16
	n          int8
	batches    [KeptBatches]Batch // the first n, oldest first
	seen       time.Duration
	prev, next *producer
}

func (p *producer) last() *Batch { return &p.batches[p.n-1] }

func (p *producer) kept() Kept {
	b := p.last()
	return Kept{Known: true, Epoch: p.epoch, LastSequence: b.LastSequence, LastOffset: b.EndOffset() - 1}
}

// add takes a batch in behind the others.
func (p *producer) add(b Batch) {
	if p.n == KeptBatches {
		copy(p.batches[:], p.batches[1:])
		p.n--
	}
	p.batches[p.n] = b
	p.n++
}

// State is the producer state of one partition up to a log offset.
type State struct {
	max      int
	end      int64
	byID     map[int64]*producer
	root     producer // of the list: next is used longest ago
	expiries []Expiry // by offset, not yet forgotten
	missed   int64    // end of the last part of the log that could not be looked at, 0 if none
}

// New returns the state of a log that holds nothing below end.
func New(opts Options, end int64) *State {
	s := &State{max: opts.MaxProducers, end: end, byID: map[int64]*producer{}}
	if s.max <= 0 {
		s.max = DefaultMaxProducers
	}
	s.root.prev, s.root.next = &s.root, &s.root
	return s
}

// End is the offset up to which the state covers the log.
func (s *State) End() int64 { return s.end }

// Len is the number of producers known.
func (s *State) Len() int { return len(s.byID) }

// Check judges a batch that a producer sends to the leader; its offsets are not
// looked at. It changes nothing. Refusals are SequenceGapError, FencedError and
// LimitError.
func (s *State) Check(b record.ProducerBatch) (Decision, error) {
	p := s.byID[b.ProducerID]
	if p == nil {
		if b.BaseSequence != 0 {
			return Decision{}, &SequenceGapError{ProducerID: b.ProducerID, BaseSequence: b.BaseSequence, Kept: nothingKept}
		}
		if len(s.byID) >= s.max {
			return Decision{}, &LimitError{Max: s.max}
		}
		return Decision{Verdict: Accept}, nil
	}
	if b.ProducerEpoch < p.epoch {
		return Decision{}, &FencedError{ProducerID: b.ProducerID, Epoch: b.ProducerEpoch, Kept: p.kept()}
	}
	if b.ProducerEpoch > p.epoch {
		if b.BaseSequence != 0 {
			return Decision{}, &SequenceGapError{ProducerID: b.ProducerID, BaseSequence: b.BaseSequence, Kept: p.kept()}
		}
		return Decision{Verdict: Accept}, nil
	}
	for i := range p.batches[:p.n] {
		if k := &p.batches[i]; k.BaseSequence == b.BaseSequence && k.LastSequence == b.LastSequence {
			return Decision{Verdict: Duplicate, BaseOffset: k.BaseOffset, EndOffset: k.EndOffset()}, nil
		}
	}
	if p.last().BaseOffset < s.missed {
		return Decision{}, &SequenceGapError{ProducerID: b.ProducerID, BaseSequence: b.BaseSequence, Doubtful: true, Kept: p.kept()}
	}
	expected := record.NextSequence(p.last().LastSequence, 1)
	if b.BaseSequence == expected {
		return Decision{Verdict: Accept}, nil
	}
	// Sequences are a ring of 2^31: the nearer way round says which side it is.
	ahead := uint32(b.BaseSequence-expected) & (1<<31 - 1)
	return Decision{}, &SequenceGapError{ProducerID: b.ProducerID, BaseSequence: b.BaseSequence, Behind: ahead >= 1<<30, Kept: p.kept()}
}

// Update takes a batch in that was appended, at a leader, or found in the log.
// now is the leader's monotonic time, for expiry; replicas may give 0. Batches
// come in the order of the log: one below the end is ErrNotContiguous.
func (s *State) Update(b record.ProducerBatch, now time.Duration) error {
	if b.BaseOffset < s.end || b.EndOffset <= b.BaseOffset || b.EndOffset-b.BaseOffset > 1<<31 {
		return fmt.Errorf("%w: batch [%d, %d), state ends at %d", ErrNotContiguous, b.BaseOffset, b.EndOffset, s.end)
	}
	s.put(b.ProducerID, b.ProducerEpoch, Batch{
		BaseSequence: b.BaseSequence, LastSequence: b.LastSequence,
		BaseOffset: b.BaseOffset, LastOffsetDelta: int32(b.EndOffset - b.BaseOffset - 1), Timestamp: b.MaxTimestamp,
	}, now)
	s.end = b.EndOffset
	return nil
}

// put adds a batch to a producer, or lets it replace what does not precede it.
func (s *State) put(id int64, epoch int16, b Batch, now time.Duration) {
	p := s.byID[id]
	if p == nil {
		p = &producer{id: id}
		s.byID[id] = p
	} else {
		s.unlink(p)
		if p.epoch != epoch || record.NextSequence(p.last().LastSequence, 1) != b.BaseSequence {
			p.n = 0
		}
	}
	p.epoch, p.seen = epoch, now
	p.add(b)
	s.pushBack(p)
}

func (s *State) unlink(p *producer) { p.prev.next, p.next.prev = p.next, p.prev }

func (s *State) pushBack(p *producer) {
	p.prev, p.next = s.root.prev, &s.root
	p.prev.next, s.root.prev = p, p
}

func (s *State) remove(p *producer) {
	s.unlink(p)
	delete(s.byID, p.id)
}

// AdvanceTo notes that the log up to end was looked at: batches without a
// producer move the end only. A lower end changes nothing.
func (s *State) AdvanceTo(end int64) { s.end = max(s.end, end) }

// MissTo notes that the log from the state's end up to end can't be looked at,
// ever. From then on a batch of a producer that was last seen below is a
// SequenceGapError unless it is one of those remembered: what would be the next
// one may be stored in the part that was missed. Whatever is learnt of a
// producer above end makes it certain again. A lower end changes nothing.
func (s *State) MissTo(end int64) {
	if end > s.end {
		s.end, s.missed = end, end
	}
}

// Missed is the end of the last part of the log that could not be looked at, 0
// if there is none.
func (s *State) Missed() int64 { return s.missed }

// Expire forgets the producers that were not heard of for ttl, records it at
// the current end and returns what was forgotten. Only a leader calls it.
// Expiries that were not forgotten yet are bounded by MaxProducers: past that
// producers stay until ForgetExpiries was called.
func (s *State) Expire(now, ttl time.Duration) []Expiry {
	first := len(s.expiries)
	for p := s.root.next; p != &s.root && now-p.seen >= ttl && len(s.expiries) < s.max; p = s.root.next {
		s.remove(p)
		s.expiries = append(s.expiries, Expiry{ProducerID: p.id, Epoch: p.epoch, Offset: s.end})
	}
	return slices.Clone(s.expiries[first:])
}

// Touch lets the time of every producer begin now: what a new leader does, whose
// clock says nothing about what it has read.
func (s *State) Touch(now time.Duration) {
	for p := s.root.next; p != &s.root; p = p.next {
		p.seen = now
	}
}

// Expiries are the recorded expiries of the range [base, end), by offset.
func (s *State) Expiries(base, end int64) []Expiry {
	return slices.Clone(within(s.expiries, base, end))
}

func within(all []Expiry, base, end int64) []Expiry {
	byOffset := func(e Expiry, o int64) int { return cmp.Compare(e.Offset, o) }
	lo, _ := slices.BinarySearchFunc(all, base, byOffset)
	hi, _ := slices.BinarySearchFunc(all, end, byOffset)
	return all[lo:max(lo, hi)]
}

// ForgetExpiries drops the record of expiries below an offset: they are in
// committed footers, and a roll-back goes no deeper.
func (s *State) ForgetExpiries(below int64) {
	n := len(within(s.expiries, 0, below))
	s.expiries = slices.Delete(s.expiries, 0, n)
}

// applyExpiry records an expiry and forgets what the producer stored below its
// offset.
func (s *State) applyExpiry(e Expiry) {
	known := false
	for i := len(s.expiries) - 1; i >= 0 && s.expiries[i].Offset >= e.Offset && !known; i-- {
		known = s.expiries[i] == e
	}
	if !known {
		s.expiries = append(s.expiries, e)
	}
	if p := s.byID[e.ProducerID]; p != nil && p.last().BaseOffset < e.Offset {
		s.remove(p)
	}
}

// Replay takes in a part of the log: the batches in order, up to end, and the
// expiries recorded for it (State.Expiries of the leader's state, by offset),
// which are recorded here too. It is what a follower does with appended batches,
// a leader to rebuild, and whoever cuts ranges.
func (s *State) Replay(batches iter.Seq[record.ProducerBatch], expiries []Expiry, end int64) error {
	expiries = within(expiries, s.end, end)
	for b := range batches {
		for len(expiries) > 0 && expiries[0].Offset <= b.BaseOffset {
			s.applyExpiry(expiries[0])
			expiries = expiries[1:]
		}
		if b.EndOffset > end {
			return fmt.Errorf("%w: batch [%d, %d) reaches over %d", ErrNotContiguous, b.BaseOffset, b.EndOffset, end)
		}
		if err := s.Update(b, 0); err != nil {
			return err
		}
	}
	for _, e := range expiries {
		s.applyExpiry(e)
	}
	s.AdvanceTo(end)
	return nil
}

// TruncateTo rolls the state back to the log end to. What was stored above it
// may have pushed out older batches, so the state is built again from a snapshot
// at or below it and the batches [snapshot's end, to) in order. Where nothing
// lies above to, neither is looked at.
func (s *State) TruncateTo(to int64, from Snapshot, batches iter.Seq[record.ProducerBatch]) error {
	touched := s.root.prev != &s.root && s.newest() >= to
	if n := len(s.expiries); !touched && (n == 0 || s.expiries[n-1].Offset < to) {
		s.end = min(s.end, to)
		return nil
	}
	if from.End > to {
		return fmt.Errorf("%w: snapshot at %d for a roll-back to %d", ErrNotContiguous, from.End, to)
	}
	next, err := Restore(Options{MaxProducers: s.max}, from)
	if err != nil {
		return err
	}
	// Expiries known from either side, without repetition.
	known := mergeExpiries(from.Expiries, s.expiries)
	next.expiries = nil
	if err := next.Replay(batches, known, to); err != nil {
		return err
	}
	next.expiries = slices.Clone(within(known, 0, to))
	for p := next.root.next; p != &next.root; p = p.next {
		if old := s.byID[p.id]; old != nil {
			p.seen = old.seen
		}
	}
	next.sortBySeen()
	root := &s.root
	*s = State{max: s.max, end: next.end, byID: next.byID, expiries: next.expiries, missed: s.missed}
	root.prev, root.next = root, root
	for p := next.root.next; p != &next.root; {
		after := p.next
		s.pushBack(p)
		p = after
	}
	return nil
}

// newest is the base offset of the newest batch known.
func (s *State) newest() int64 {
	newest := int64(-1)
	for p := s.root.prev; p != &s.root; p = p.prev {
		newest = max(newest, p.last().BaseOffset)
	}
	return newest
}

// sortBySeen puts the list in the order that Expire relies on.
func (s *State) sortBySeen() {
	all := make([]*producer, 0, len(s.byID))
	for p := s.root.next; p != &s.root; p = p.next {
		all = append(all, p)
	}
	slices.SortStableFunc(all, func(a, b *producer) int { return cmp.Compare(a.seen, b.seen) })
	s.root.prev, s.root.next = &s.root, &s.root
	for _, p := range all {
		s.pushBack(p)
	}
}

func mergeExpiries(a, b []Expiry) []Expiry {
	all := slices.Concat(a, b)
	slices.SortFunc(all, compareExpiries)
	return slices.Compact(all)
}

func compareExpiries(a, b Expiry) int {
	return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.ProducerID, b.ProducerID), cmp.Compare(a.Epoch, b.Epoch))
}
