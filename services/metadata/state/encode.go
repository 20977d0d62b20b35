package state

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
)

// Encode writes the state as a snapshot. The bytes depend on what the state
// means and on nothing else: equal states ([State.Digest]) have equal bytes. It
// needs memory for one frame and four bytes a combined object; w gets writes of
// some 64 KiB, all but the first and the last. The errors are those of w, and
// one for a state that is empty or could not apply an entry.
func (s *State) Encode(w io.Writer) (Encoded, error) {
	if s.failed != nil {
		return Encoded{}, fmt.Errorf("encode a snapshot: %w", s.failed)
	}
	if s.end == 0 {
		return Encoded{}, errors.New("encode a snapshot: the log has not begun")
	}
	e := &encoder{out: &summed{w: w, hash: sha256.New()}, s: s, buf: make([]byte, frameHeader, frameHeader+frameTarget+4<<10)}
	head := make([]byte, snapshotHeader)
	copy(head, snapshotMagic)
	binary.BigEndian.PutUint16(head[len(snapshotMagic):], snapshotVersion)
	if _, e.err = e.out.Write(head); e.err == nil {
		e.state()
	}
	if e.err != nil {
		return Encoded{}, fmt.Errorf("encode a snapshot: %w", e.err)
	}
	sum := [SnapshotSumSize]byte(e.out.hash.Sum(nil))
	if _, err := w.Write(sum[:]); err != nil {
		return Encoded{}, fmt.Errorf("encode a snapshot: %w", err)
	}
	return Encoded{Size: e.out.size + SnapshotSumSize, Sum: sum}, nil
}

// encoder builds one frame at a time. Once it has an error it does nothing.
type encoder struct {
	out     *summed
	s       *State
	buf     []byte // the frame under way, room for its header first
	n       counts
	err     error
	objects []uint32 // index in the snapshot of each slot of the object table
}

func (e *encoder) state() {
	s := e.s
	order := e.orderObjects()
	e.num(s.end, s.lastEpoch)
	e.text(s.clusterID)
	e.num(int64(s.incarnation), int64(s.featureLevel), s.controller.epoch+1, int64(s.controller.id))
	e.text(s.controller.address)
	e.num(s.producers, int64(len(s.brokers)), int64(len(s.rlms)), int64(len(order)), int64(len(s.topics)))
	e.end(nil)
	last := int32(0)
	for _, id := range sortedIDs(s.brokers) {
		e.broker(s.brokers[id], last)
		last = id
	}
	last = 0
	for _, id := range sortedIDs(s.rlms) {
		e.rlm(s.rlms[id], last)
		last = id
	}
	var before objectRecord
	before.committedAt = -1
	for _, slot := range order {
		e.object(&s.objects.slots[slot], &before)
		before = s.objects.slots[slot]
	}
	created := int64(-1)
	for _, offset := range slices.Sorted(maps.Keys(s.topics)) {
		e.topic(s.topics[offset], created)
		created = offset
	}
	if len(e.buf) > frameHeader {
		e.frame(frameRecords)
	}
	for _, n := range e.n.each() {
		e.buf = binary.AppendUvarint(e.buf, *n)
	}
	e.frame(frameEnd)
}

// orderObjects gives the live objects their places in the snapshot: in the order
// of their commits, of which an entry holds one at most.
func (e *encoder) orderObjects() []uint32 {
	slots := e.s.objects.slots
	order := make([]uint32, 0, e.s.objects.live())
	for i := range slots {
		if slots[i].refs > 0 {
			order = append(order, uint32(i))
		}
	}
	slices.SortFunc(order, func(a, b uint32) int {
		if slots[a].committedAt < slots[b].committedAt {
			return -1
		}
		return 1
	})
	e.objects = make([]uint32, len(slots))
	for index, slot := range order {
		e.objects[slot] = uint32(index)
	}
	return order
}

func (e *encoder) broker(b *broker, before int32) {
	e.num(int64(b.id-before), b.epoch)
	e.flags(bit(b.online, flagOnline) | bit(b.logsIntact, flagLogsIntact))
	e.text(b.address, b.zone, b.directoryID)
	e.end(&e.n.brokers)
}

func (e *encoder) rlm(r *remoteLogManager, before int32) {
	e.num(int64(r.id-before), r.epoch)
	e.flags(bit(r.open, flagOpen) | bit(r.last != nil, flagLast) | bit(r.previous != nil, flagPrevious))
	e.text(r.address, r.zone)
	for _, m := range [...]*commitMemory{r.last, r.previous} {
		if m != nil {
			e.num(m.offset, m.epoch, m.sequence, int64(m.attempt), m.size)
			e.buf = binary.BigEndian.AppendUint32(e.buf, m.crc32c)
			e.num(int64(len(m.outcomes)))
			e.buf = append(e.buf, m.outcomes...)
		}
	}
	e.end(&e.n.rlms)
}

func (e *encoder) object(o, before *objectRecord) {
	e.num(o.committedAt - before.committedAt)
	e.delta(o.rlmEpoch-before.rlmEpoch, o.sequence-before.sequence)
	e.num(int64(o.attempt), int64(o.incarnation^e.s.incarnation), int64(o.rlmID), o.size)
	e.buf = binary.BigEndian.AppendUint32(e.buf, o.crc32c)
	e.end(&e.n.objects)
}

func (e *encoder) topic(t *topic, before int64) {
	e.num(t.creationOffset - before)
	e.flags(bit(t.deleted, flagDeleted))
	e.text(t.id, t.name)
	e.num(int64(len(t.overrides)))
	for _, name := range slices.Sorted(maps.Keys(t.overrides)) {
		e.text(name, t.overrides[name])
	}
	e.num(int64(len(t.partitions)))
	e.end(&e.n.topics)
	for i := range t.partitions {
		e.partition(&t.partitions[i])
	}
}

func (e *encoder) partition(p *partition) {
	e.flags(bit(p.opened, flagOpened) | bit(p.exact, flagExact))
	e.num(int64(len(p.replicas)))
	for _, id := range p.replicas {
		e.num(int64(id))
	}
	e.num(int64(p.leaderEpoch), int64(p.leaderID), p.brokerEpoch, p.fencedAt)
	e.text(p.reason)
	e.num(p.epochStart, p.openedAt+1, int64(p.openedBy), p.logStart, int64(len(p.lineage)))
	for _, l := range p.lineage {
		e.num(int64(l.Incarnation^e.s.incarnation), int64(l.LeaderEpoch), l.StartOffset)
	}
	e.num(p.ranges.start)
	e.buf = append(e.buf, p.ranges.startHash[:]...)
	e.num(int64(p.ranges.count))
	e.end(&e.n.partitions)
	before := rangeRecord{end: p.ranges.start}
	for _, chunk := range p.ranges.chunks {
		for i := range chunk {
			e.rangeOf(&chunk[i], &before)
			before = chunk[i]
			before.object = e.objects[before.object>>1] << 1
		}
		if e.err != nil {
			return
		}
	}
}

// rangeOf writes a range. In before the object is the index in the snapshot.
func (e *encoder) rangeOf(r, before *rangeRecord) {
	e.num(r.end - before.end)
	e.delta(r.maxTimestamp - before.maxTimestamp)
	e.num(r.position, int64(r.length))
	e.delta(int64(r.leaderEpoch) - int64(before.leaderEpoch))
	index := int64(e.objects[r.object>>1])
	e.buf = binary.AppendUvarint(e.buf, zigzag(index-int64(before.object>>1))<<1|uint64(r.object&1))
	e.buf = binary.BigEndian.AppendUint32(e.buf, r.crc32c)
	e.buf = append(e.buf, r.hash[:]...)
	e.end(&e.n.ranges)
}

// num appends numbers that are not negative.
func (e *encoder) num(values ...int64) {
	for _, v := range values {
		if v < 0 && e.err == nil {
			e.err = fmt.Errorf("a negative number, %d", v)
		}
		e.buf = binary.AppendUvarint(e.buf, uint64(v))
	}
}

func (e *encoder) delta(values ...int64) {
	for _, v := range values {
		e.buf = binary.AppendUvarint(e.buf, zigzag(v))
	}
}

func (e *encoder) text(values ...string) {
	for _, v := range values {
		e.buf = binary.AppendUvarint(e.buf, uint64(len(v)))
		e.buf = append(e.buf, v...)
	}
}

func (e *encoder) flags(bits byte) { e.buf = append(e.buf, bits) }

func bit(set bool, flag byte) byte {
	if set {
		return flag
	}
	return 0
}

// end ends a record, and the frame if it has become large enough.
func (e *encoder) end(count *uint64) {
	if count != nil {
		*count++
	}
	if len(e.buf)-frameHeader >= frameTarget {
		e.frame(frameRecords)
	}
}

func (e *encoder) frame(kind byte) {
	header, payload := e.buf[:frameHeader], e.buf[frameHeader:]
	clear(header)
	header[0] = kind
	binary.BigEndian.PutUint32(header[4:], uint32(len(payload)))
	binary.BigEndian.PutUint32(header[8:], frameSum(e.n.frames, header, payload))
	if len(payload) > frameLargest && e.err == nil {
		e.err = fmt.Errorf("a frame of %d bytes", len(payload))
	}
	if e.err == nil {
		_, e.err = e.out.Write(e.buf)
	}
	e.n.frames++
	e.buf = e.buf[:frameHeader]
}
