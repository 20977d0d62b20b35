//go:build unix

package torture_test

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// slot is a partition of a topic.
type slot struct {
	topic     string
	partition int32
}

func (s slot) String() string { return fmt.Sprintf("%s/%d", s.topic, s.partition) }

func (s slot) compare(other slot) int {
	return cmp.Or(strings.Compare(s.topic, other.topic), cmp.Compare(s.partition, other.partition))
}

// entry is a record that was sent, with its answer.
type entry struct {
	id       int64
	key      string
	sent     time.Time
	answered time.Time // zero while there is no answer
	ack      client.Ack
	err      error // nil when acked
}

// mayBeStored says whether a record without an ack may be in the log.
func (e *entry) mayBeStored() bool {
	if e.answered.IsZero() {
		return true
	}
	var d *client.DeliveryError
	return errors.As(e.err, &d) && d.MaybeStored
}

// lane is what one producer sends to one partition, in order.
type lane struct {
	slot
	level client.Level

	mu      sync.Mutex // guards all below
	entries []*entry
}

func (l *lane) add(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = append(l.entries, e)
}

func (l *lane) settle(e *entry, at time.Time, ack client.Ack, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.answered, e.ack, e.err = at, ack, err
}

// accepted is when the first record that was sent after a moment was acked.
func (l *lane) accepted(after time.Time) (at time.Time, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries[l.index(after):] {
		if !e.answered.IsZero() && e.err == nil && (!ok || e.answered.Before(at)) {
			at, ok = e.answered, true
		}
	}
	return at, ok
}

// index is the first entry that was sent at or after a moment. The caller holds mu.
func (l *lane) index(after time.Time) int {
	n, _ := slices.BinarySearchFunc(l.entries, after, func(e *entry, t time.Time) int { return e.sent.Compare(t) })
	return n
}

// slowest is the longest that a record sent from a moment on waited for its answer,
// or still waits.
func (l *lane) slowest(after, now time.Time) (worst time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries[l.index(after):] {
		until := e.answered
		if until.IsZero() {
			until = now
		}
		worst = max(worst, until.Sub(e.sent))
	}
	return worst
}

// snapshot copies the entries as they are.
func (l *lane) snapshot() []entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]entry, len(l.entries))
	for i, e := range l.entries {
		out[i] = *e
	}
	return out
}

// content is the value of the record with an id: the id and 50 to 400 bytes that
// follow from it.
func content(id int64) []byte {
	r := rand.New(rand.NewPCG(uint64(id), 0x70727475))
	out := make([]byte, 8+50+r.IntN(351))
	binary.BigEndian.PutUint64(out, uint64(id))
	for i := 8; i < len(out); i++ {
		out[i] = byte(r.Uint32())
	}
	return out
}

// seen is a record that was read.
type seen struct {
	offset     int64
	id         int64 // -1 when the content is of no record
	key        string
	leadership client.Leadership
}

func seenOf(m client.Message) seen {
	s := seen{offset: m.Offset, id: -1, key: string(m.Key), leadership: m.Leadership}
	if len(m.Value) >= 8 {
		if id := int64(binary.BigEndian.Uint64(m.Value)); bytes.Equal(m.Value, content(id)) {
			s.id = id
		}
	}
	return s
}

// verdict is what came of the comparison of a ledger with what was read.
type verdict struct {
	violations []string
	read       int // records in the logs
	acked      int // records acked at OBJECT, by demand or by luck
	lost       int // records acked at less, not read
	unsure     int // records that were not acked but are there
	duplicate  int // acks that told of an earlier send
	settled    int // acks that AwaitDurability gave
}

func (v *verdict) broken(where fmt.Stringer, format string, args ...any) {
	v.violations = append(v.violations, fmt.Sprintf("%s: ", where)+fmt.Sprintf(format, args...))
}

// compare holds the ledger of a partition, all its lanes, against the whole log as it was
// read. See the package comment for the rules.
func (v *verdict) compare(where slot, lanes []ledger, log []seen) {
	sent := map[int64]*entry{}
	for _, l := range lanes {
		for i := range l.entries {
			sent[l.entries[i].id] = &l.entries[i]
		}
	}
	at := map[int64]seen{}
	lastOfKey := map[string]int64{}
	lastOf := map[client.Leadership]int64{}
	v.read += len(log)
	for i, s := range log {
		if s.offset != int64(i) {
			v.broken(where, "record %d of the log has offset %d", i, s.offset)
		}
		e := sent[s.id]
		if e == nil {
			v.broken(where, "offset %d holds what was never sent there (id %d, key %q)", s.offset, s.id, s.key)
			continue
		}
		if e.key != s.key {
			v.broken(where, "offset %d: record %d has key %q, sent with %q", s.offset, s.id, s.key, e.key)
		}
		if first, twice := at[s.id]; twice {
			v.broken(where, "record %d is at offset %d and at %d", s.id, first.offset, s.offset)
			continue
		}
		at[s.id] = s
		if last, ok := lastOfKey[s.key]; ok && last > s.id {
			v.broken(where, "offset %d: record %d of key %q comes after %d", s.offset, s.id, s.key, last)
		}
		lastOfKey[s.key] = s.id
		lastOf[s.leadership] = s.offset
	}
	for _, l := range lanes {
		v.lane(where, l, at, lastOf)
	}
}

// ledger is a lane that rests.
type ledger struct {
	level   client.Level
	entries []entry
}

func (v *verdict) lane(where slot, l ledger, at map[int64]seen, lastOf map[client.Leadership]int64) {
	lostAt := -1 // the last entry that was lost
	unacked, first := 0, (*entry)(nil)
	for i := range l.entries {
		e := &l.entries[i]
		s, found := at[e.id]
		if e.err != nil || e.answered.IsZero() {
			switch {
			case found && e.mayBeStored():
				v.unsure++
			case found:
				v.broken(where, "record %d is at offset %d, told as not stored: %v", e.id, s.offset, e.err)
			}
			if unacked++; unacked == 1 {
				first = e
			}
			continue
		}
		if !e.ack.Levels.Has(l.level) {
			v.broken(where, "record %d asked for %v, its ack has %v", e.id, l.level, e.ack.Levels.List())
		}
		if e.ack.Duplicate {
			v.duplicate++
		}
		if e.ack.Settled {
			v.settled++
		}
		safe := e.ack.Levels.Has(client.LevelObject)
		if safe {
			v.acked++
		}
		switch {
		case !found && safe:
			v.broken(where, "LOST: record %d acked at OBJECT with offset %d by %+v (%s), sent at %s", e.id, e.ack.Offset, e.ack.Leadership, e.ack.Broker, e.sent.UTC().Format("15:04:05.000"))
		case !found:
			v.lost++
			lostAt = i
			if last, ok := lastOf[e.ack.Leadership]; ok && last >= e.ack.Offset {
				v.broken(where, "record %d acked at LEADER with offset %d is gone, but its leadership %+v wrote offset %d", e.id, e.ack.Offset, e.ack.Leadership, last)
			}
		case s.offset != e.ack.Offset:
			v.broken(where, "record %d was acked with offset %d and is at %d", e.id, e.ack.Offset, s.offset)
		case s.leadership != (client.Leadership{}) && s.leadership != e.ack.Leadership:
			v.broken(where, "record %d at offset %d was acked by %+v and written by %+v", e.id, s.offset, e.ack.Leadership, s.leadership)
		}
	}
	if unacked > 0 && l.level == client.LevelObject {
		v.broken(where, "%d records were not acked, the first is %d, sent at %s: %v", unacked, first.id, first.sent.UTC().Format("15:04:05.000"), first.err)
	}
	if lostAt < 0 {
		return
	}
	// A loss is told with the first record behind it that reached a leader, if any did.
	for i := lostAt + 1; i < len(l.entries); i++ {
		switch e := &l.entries[i]; {
		case rpcerr.Has(e.err, errorsv1.ErrorReason_ERROR_REASON_SEQUENCE_GAP):
			return
		case e.err == nil && !e.answered.IsZero():
			v.broken(where, "record %d was lost, and record %d behind it acked, without a word", l.entries[lostAt].id, e.id)
			return
		}
	}
}

// line is an entry for ledger.jsonl.
func (e *entry) line(l *lane) map[string]any {
	out := map[string]any{
		"id": e.id, "topic": l.topic, "partition": l.partition, "key": e.key, "asked": l.level.String(), "sent": e.sent.UTC().Format("15:04:05.000"),
	}
	switch {
	case e.answered.IsZero():
		out["answer"] = "none"
	case e.err != nil:
		out["error"], out["may_be_stored"] = e.err.Error(), e.mayBeStored()
	default:
		var levels []string
		for _, x := range e.ack.Levels.List() {
			levels = append(levels, x.String())
		}
		out["offset"], out["levels"], out["leader_epoch"], out["broker"] = e.ack.Offset, levels, e.ack.Leadership.LeaderEpoch, e.ack.Broker
		out["duplicate"], out["settled"] = e.ack.Duplicate, e.ack.Settled
	}
	if !e.answered.IsZero() {
		out["took"] = e.answered.Sub(e.sent).Round(time.Millisecond).String()
	}
	return out
}

func (s seen) line(where slot) map[string]any {
	return map[string]any{
		"topic": where.topic, "partition": where.partition, "offset": s.offset, "id": s.id, "key": s.key,
		"leader_epoch": s.leadership.LeaderEpoch, "incarnation": hex.EncodeToString(binary.BigEndian.AppendUint32(nil, s.leadership.Incarnation)),
	}
}
