package replica

import (
	"fmt"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/braidlog/braid/pkg/record"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/producerstate"
)

// How often a range's footer holds the whole producer state, so that recovery
// reads few footers.
const (
	completeRanges = 256
	completeBytes  = 16 << 20
)

// ledger keeps what a leader knows of its partition's producers at three places
// of the log: at its end, where appends are judged; at the object end, from
// where sending may begin again; and where the feed stands, since a range's
// footer tells the state at the range's end.
type ledger struct {
	head      *producerstate.State
	committed *producerstate.State
	cursor    *producerstate.State // nil until the run's first range

	// tail are the producers' batches in [committed end, log end).
	tail []record.ProducerBatch

	lastExpire time.Duration
	// Since the last range whose footer holds the whole state.
	opened bool // such a range was cut in the present run
	ranges int
	bytes  int64
}

// newLedger takes the state at the object end and the producers' batches above
// it, up to end.
func newLedger(opts producerstate.Options, at producerstate.Snapshot, tail []record.ProducerBatch, end int64, now time.Duration) (*ledger, error) {
	committed, err := producerstate.Restore(opts, at)
	if err != nil {
		return nil, err
	}
	head, err := producerstate.Restore(opts, at)
	if err != nil {
		return nil, err
	}
	if err := head.Replay(slices.Values(tail), nil, end); err != nil {
		return nil, err
	}
	head.Touch(now)
	return &ledger{head: head, committed: committed, tail: tail, lastExpire: now}, nil
}

// appended takes in a batch that is about to be written: should the write fail,
// the log is out of use and the ledger with it.
func (l *ledger) appended(b record.ProducerBatch, now time.Duration) {
	if err := l.head.Update(b, now); err != nil {
		panic(fmt.Sprintf("replica: the writer's own batch does not continue the producer state: %v", err))
	}
	l.tail = append(l.tail, b)
}

// expirePace is how often expiry looks for idle producers.
const expirePace = 10 * time.Second

// expire forgets idle producers at the end of the log.
func (l *ledger) expire(now, ttl time.Duration) {
	if now-l.lastExpire < min(expirePace, ttl) {
		return
	}
	l.lastExpire = now
	l.head.Expire(now, ttl)
}

// restart says that sending begins again at the object end.
func (l *ledger) restart() { l.cursor, l.opened = nil, false }

// between are the producers' batches in [base, end).
func (l *ledger) between(base, end int64) iter.Seq[record.ProducerBatch] {
	return func(yield func(record.ProducerBatch) bool) {
		i, _ := slices.BinarySearchFunc(l.tail, base, func(b record.ProducerBatch, o int64) int {
			if b.BaseOffset < o {
				return -1
			}
			return 1
		})
		for ; i < len(l.tail) && l.tail[i].EndOffset <= end; i++ {
			if !yield(l.tail[i]) {
				return
			}
		}
	}
}

// committedTo moves the committed state to a higher object end.
func (l *ledger) committedTo(end int64) error {
	from := l.committed.End()
	if end <= from {
		return nil
	}
	if err := l.committed.Replay(l.between(from, end), l.head.Expiries(from, end), end); err != nil {
		return fmt.Errorf("advance the producer state: %w", err)
	}
	l.committed.ForgetExpiries(math.MaxInt64)
	n := 0
	for n < len(l.tail) && l.tail[n].EndOffset <= end {
		n++
	}
	l.tail = l.tail[n:]
	if len(l.tail) == 0 {
		l.tail = nil
	}
	l.head.ForgetExpiries(end)
	return nil
}

// cut brings the cursor to the end of the range [base, end) of size bytes and
// returns what the range's footer says.
func (l *ledger) cut(base, end, size int64) (producerstate.Summary, error) {
	if l.cursor == nil || l.cursor.End() < base {
		// The run's first range, or the object end overtook what was sent.
		at := l.committed.Snapshot()
		if at.End > base {
			return producerstate.Summary{}, fmt.Errorf("a range at %d, below the committed producer state at %d", base, at.End)
		}
		cursor, err := producerstate.Restore(producerstate.Options{}, at)
		if err != nil {
			return producerstate.Summary{}, err
		}
		if err := cursor.Replay(l.between(at.End, base), l.head.Expiries(at.End, base), base); err != nil {
			return producerstate.Summary{}, err
		}
		l.cursor = cursor
	}
	if l.cursor.End() != base {
		return producerstate.Summary{}, fmt.Errorf("a range at %d, the producer cursor is at %d", base, l.cursor.End())
	}
	if err := l.cursor.Replay(l.between(base, end), l.head.Expiries(base, end), end); err != nil {
		return producerstate.Summary{}, err
	}
	sum := l.cursor.Summary(base)
	l.cursor.ForgetExpiries(end)
	if !l.opened || l.ranges >= completeRanges || l.bytes >= completeBytes {
		sum.Producers, sum.Complete = l.cursor.Snapshot().Producers, true
		l.opened, l.ranges, l.bytes = true, 0, 0
	}
	l.ranges++
	l.bytes += size
	return sum, nil
}

// producersToProto is a footer's spelling of producers.
func producersToProto(all []producerstate.Producer) []*logv1.ProducerSummary {
	out := make([]*logv1.ProducerSummary, 0, len(all))
	for i := range all {
		p := &all[i]
		m := &logv1.ProducerSummary{ProducerId: p.ID, ProducerEpoch: int32(p.Epoch)}
		for _, b := range p.Batches {
			m.Batches = append(m.Batches, &logv1.ProducerBatch{
				FirstSequence: b.BaseSequence, LastSequence: b.LastSequence,
				BaseOffset: b.BaseOffset, EndOffset: b.EndOffset(), MaxTimestampMs: b.Timestamp,
			})
		}
		out = append(out, m)
	}
	return out
}

func expiriesToProto(all []producerstate.Expiry) []*logv1.ProducerExpiry {
	out := make([]*logv1.ProducerExpiry, 0, len(all))
	for _, e := range all {
		out = append(out, &logv1.ProducerExpiry{ProducerId: e.ProducerID, ProducerEpoch: int32(e.Epoch)})
	}
	return out
}

// summaryFromProto reads a footer.
func summaryFromProto(d *logv1.RangeDescriptor, producers []*logv1.ProducerSummary, expiries []*logv1.ProducerExpiry) (producerstate.Summary, error) {
	sum := producerstate.Summary{Base: d.GetBaseOffset(), End: d.GetEndOffset(), Complete: d.GetProducersComplete()}
	for _, m := range producers {
		if e := m.GetProducerEpoch(); e < 0 || e > math.MaxInt16 {
			return sum, fmt.Errorf("producer %d has epoch %d", m.GetProducerId(), e)
		}
		p := producerstate.Producer{ID: m.GetProducerId(), Epoch: int16(m.GetProducerEpoch())}
		for _, b := range m.GetBatches() {
			delta := b.GetEndOffset() - b.GetBaseOffset() - 1
			if delta < 0 || delta > math.MaxInt32 {
				return sum, fmt.Errorf("producer %d has a batch [%d, %d)", p.ID, b.GetBaseOffset(), b.GetEndOffset())
			}
			p.Batches = append(p.Batches, producerstate.Batch{
				BaseSequence: b.GetFirstSequence(), LastSequence: b.GetLastSequence(),
				BaseOffset: b.GetBaseOffset(), LastOffsetDelta: int32(delta), Timestamp: b.GetMaxTimestampMs(),
			})
		}
		sum.Producers = append(sum.Producers, p)
	}
	slices.SortFunc(sum.Producers, func(a, b producerstate.Producer) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	for _, e := range expiries {
		sum.Expiries = append(sum.Expiries, producerstate.Expiry{ProducerID: e.GetProducerId(), Epoch: int16(e.GetProducerEpoch()), Offset: sum.Base})
	}
	return sum, nil
}
