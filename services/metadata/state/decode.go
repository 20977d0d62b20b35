package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/topicconfig"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Decode reads a snapshot to the reader's end and returns its state, which then
// goes on with the entry at [State.EndOffset]. It is all or nothing: what is
// damaged, cut short, followed by anything, or not as [State.Encode] writes it
// is a [*SnapshotError]; a state of a higher feature level is that with an
// [*UnknownEventError] as its cause. Memory follows the bytes read, not the
// counts in them.
func Decode(r io.Reader) (*State, error) {
	d := &decoder{in: r, hash: sha256.New(), s: New()}
	if err := d.state(); err != nil {
		return nil, err
	}
	return d.s, nil
}

// decoder reads frames one at a time. Its reading methods return zero values
// once something is wrong; err says what.
type decoder struct {
	in   io.Reader
	hash hash.Hash
	s    *State

	position int64 // behind the frame in buf
	began    int64 // of the frame in buf
	head     [frameHeader]byte
	buf      []byte // payload
	at       int    // next byte in buf
	n        counts
	err      error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = &SnapshotError{Position: d.began, Reason: fmt.Sprintf(format, args...)}
	}
}

// read fills p from the reader.
func (d *decoder) read(p []byte) bool {
	if d.err != nil {
		return false
	}
	n, err := io.ReadFull(d.in, p)
	d.position += int64(n)
	d.hash.Write(p[:n])
	switch {
	case err == nil:
		return true
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		d.fail("it ends at byte %d", d.position)
	default:
		d.err = &SnapshotError{Position: d.began, Reason: "read", Cause: err}
	}
	return false
}

func (d *decoder) state() error {
	var head [snapshotHeader]byte
	if d.read(head[:]) {
		switch version := binary.BigEndian.Uint16(head[len(snapshotMagic):]); {
		case !bytes.HasPrefix(head[:], []byte(snapshotMagic)):
			d.fail("it does not begin as a metadata snapshot")
		case version != snapshotVersion:
			d.fail("format version %d, %d is known", version, snapshotVersion)
		case !bytes.Equal(head[len(snapshotMagic)+2:], make([]byte, snapshotHeader-len(snapshotMagic)-2)):
			d.fail("reserved bytes are set")
		}
	}
	s := d.s
	d.begin()
	s.end, s.lastEpoch = d.num(), d.num()
	s.clusterID = d.text()
	s.incarnation, s.featureLevel = d.num32(), d.num32()
	s.controller = controller{epoch: d.num() - 1, id: d.int32(), address: d.text()}
	s.producers = d.num()
	brokers, rlms, objects, topics := d.num(), d.num(), d.num(), d.num()
	d.checkScalars()
	for i, id := int64(0), int32(0); i < brokers && d.err == nil; i++ {
		id = d.broker(id)
	}
	for i, id := int64(0), int32(0); i < rlms && d.err == nil; i++ {
		id = d.rlm(id)
	}
	for i := int64(0); i < objects && d.err == nil; i++ {
		d.object()
	}
	for i, created := int64(0), int64(-1); i < topics && d.err == nil; i++ {
		created = d.topic(created)
	}
	for i := range s.objects.slots {
		if s.objects.slots[i].refs == 0 {
			d.fail("a combined object without ranges, committed at %d", s.objects.slots[i].committedAt)
			break
		}
	}
	d.finish()
	return d.err
}

func (d *decoder) checkScalars() {
	s := d.s
	switch {
	case d.err != nil:
	case s.featureLevel > FeatureLevel:
		d.err = &SnapshotError{Position: d.began, Reason: "its state is of a later version",
			Cause: &UnknownEventError{Offset: s.end, Index: -1, FeatureLevel: s.featureLevel}}
	case s.end == 0, s.featureLevel == 0, s.lastEpoch >= s.end, s.controller.epoch >= s.end:
		d.fail("end %d, feature level %d, controller epochs %d and %d", s.end, s.featureLevel, s.lastEpoch, s.controller.epoch)
	case checkNewCluster(s.clusterID, s.incarnation) != nil:
		d.fail("cluster %q, incarnation %08x", s.clusterID, s.incarnation)
	case s.producers < 1 || s.producers > maxProducerCounter:
		d.fail("producer counter %d", s.producers)
	}
}

func (d *decoder) broker(before int32) int32 {
	d.begin()
	b := &broker{id: d.above(before), epoch: d.offset()}
	flags := d.flags(flagOnline | flagLogsIntact)
	b.online, b.logsIntact = flags&flagOnline != 0, flags&flagLogsIntact != 0
	b.address, b.zone, b.directoryID = d.text(), d.text(), d.text()
	d.n.brokers++
	d.s.brokers[b.id] = b
	return b.id
}

func (d *decoder) rlm(before int32) int32 {
	d.begin()
	r := &remoteLogManager{id: d.above(before), epoch: d.offset()}
	flags := d.flags(flagOpen | flagLast | flagPrevious)
	r.open = flags&flagOpen != 0
	r.address, r.zone = d.text(), d.text()
	if flags&flagLast != 0 {
		r.last = d.commit()
	}
	if flags&flagPrevious != 0 {
		r.previous = d.commit()
	}
	if r.last != nil && r.last.epoch != r.epoch {
		d.fail("rlm %d of epoch %d: its last command is of epoch %d", r.id, r.epoch, r.last.epoch)
	}
	d.n.rlms++
	d.s.rlms[r.id] = r
	return r.id
}

func (d *decoder) commit() *commitMemory {
	m := &commitMemory{offset: d.offset(), epoch: d.offset(), sequence: d.num(), attempt: d.int32(), size: d.num(), crc32c: d.fixed32()}
	n := d.num()
	if n < 1 || n > MaxRanges {
		d.fail("a command of %d ranges", n)
		return m
	}
	m.outcomes = bytes.Clone(d.bytes(int(n)))
	for _, o := range m.outcomes {
		if o == 0 || metadatav1.RangeOutcome(o) > maxOutcome {
			d.fail("outcome %d", o)
		}
	}
	return m
}

func (d *decoder) object() {
	d.begin()
	slots := d.s.objects.slots
	before := objectRecord{committedAt: -1}
	if n := len(slots); n > 0 {
		before = slots[n-1]
	}
	delta := d.num()
	o := objectRecord{
		committedAt: before.committedAt + delta, rlmEpoch: before.rlmEpoch + d.delta(), sequence: before.sequence + d.delta(),
		attempt: d.int32(), incarnation: d.num32() ^ d.s.incarnation, rlmID: d.int32(), size: d.num(), crc32c: d.fixed32(),
	}
	if delta == 0 || o.committedAt < 0 || o.committedAt >= d.s.end || o.rlmEpoch < 0 || o.rlmEpoch >= d.s.end || o.sequence < 1 || o.size < 1 ||
		len(slots) >= math.MaxInt32 {
		d.fail("a combined object of %d bytes committed at %d, epoch %d, sequence %d", o.size, o.committedAt, o.rlmEpoch, o.sequence)
	}
	d.n.objects++
	d.s.objects.slots = append(slots, o)
}

func (d *decoder) topic(before int64) int64 {
	d.begin()
	delta := d.num()
	t := &topic{creationOffset: before + delta}
	t.deleted = d.flags(flagDeleted)&flagDeleted != 0
	t.id, t.name = d.text(), d.text()
	overrides := d.num()
	if !t.deleted {
		t.overrides = map[string]string{}
	} else if overrides > 0 {
		d.fail("settings of a deleted topic")
	}
	for i, last := int64(0), ""; i < overrides && d.err == nil; i++ {
		name, value := d.text(), d.text()
		if name <= last {
			d.fail("setting %q behind %q", name, last)
		}
		t.overrides[name], last = value, name
	}
	partitions := d.num()
	s := d.s
	var err error
	if t.config, err = topicconfig.Parse(t.overrides); t.deleted {
		t.config, err = topicconfig.Config{}, nil
	}
	switch {
	case d.err != nil:
		return 0
	case delta == 0 || t.creationOffset < 0 || t.creationOffset >= s.end:
		d.fail("a topic created at %d", t.creationOffset)
	case t.id == "" || s.byID[t.id] != nil:
		d.fail("topic id %q is empty or there twice", t.id)
	case topicconfig.ValidateName(t.name) != nil || !t.deleted && s.byName[t.name] != nil:
		d.fail("topic name %q is none or there twice", t.name)
	case err != nil:
		d.fail("topic %q: %v", t.name, err)
	case partitions < 1 || partitions > MaxPartitions:
		d.fail("topic %q with %d partitions", t.name, partitions)
	}
	if d.err != nil {
		return 0
	}
	t.partitions = make([]partition, partitions)
	d.n.topics++
	s.topics[t.creationOffset], s.byID[t.id] = t, t
	if !t.deleted {
		s.byName[t.name] = t
		s.sorted = append(s.sorted, t)
	}
	for i := range t.partitions {
		if d.partition(t, int32(i)); d.err != nil {
			return 0
		}
	}
	return t.creationOffset
}

func (d *decoder) partition(t *topic, index int32) {
	d.begin()
	p := &t.partitions[index]
	p.topic, p.index = t, index
	flags := d.flags(flagOpened | flagExact)
	p.opened, p.exact = flags&flagOpened != 0, flags&flagExact != 0
	for n := d.num(); n > 0 && d.err == nil; n-- {
		p.replicas = append(p.replicas, d.int32())
	}
	p.leaderEpoch, p.leaderID, p.brokerEpoch, p.fencedAt = d.int32(), d.int32(), d.offset(), d.offset()
	p.reason = internReason(d.text())
	p.epochStart, p.openedAt, p.openedBy, p.logStart = d.num(), d.num()-1, d.int32(), d.num()
	for n := d.num(); n > 0 && d.err == nil; n-- {
		p.lineage = append(p.lineage, lineage.Entry{
			Leadership:  lineage.Leadership{Incarnation: d.num32() ^ d.s.incarnation, LeaderEpoch: d.int32()},
			StartOffset: d.num(),
		})
	}
	p.ranges.start = d.num()
	copy(p.ranges.startHash[:], d.bytes(len(p.ranges.startHash)))
	count := d.num()
	d.n.partitions++
	switch {
	case d.err != nil:
		return
	case t.deleted:
		if len(p.replicas) > 0 || len(p.lineage) > 0 || count > 0 || p.opened || p.openedAt >= 0 {
			d.fail("partition %d of the deleted topic %q is more than a tombstone", index, t.name)
		}
	case d.s.checkReplicas(p.replicas) != nil:
		d.fail("%v: %v", p, d.s.checkReplicas(p.replicas))
	case p.lineage.Validate() != nil:
		d.fail("%v: %v", p, p.lineage.Validate())
	case p.openedAt >= d.s.end:
		d.fail("%v: opened at %d", p, p.openedAt)
	}
	p.objectEnd, p.hash = p.ranges.start, p.ranges.startHash
	d.ranges(p, count)
}

func (d *decoder) ranges(p *partition, count int64) {
	before := rangeRecord{end: p.ranges.start}
	for ; count > 0 && d.err == nil; count-- {
		d.begin()
		delta := d.num()
		r := rangeRecord{end: before.end + delta, maxTimestamp: before.maxTimestamp + d.delta(), position: d.num()}
		length := d.num()
		leaderEpoch := int64(before.leaderEpoch) + d.delta()
		object := d.uvarint()
		index := int64(before.object>>1) + unzigzag(object>>1)
		r.length, r.leaderEpoch, r.crc32c = uint32(length), int32(leaderEpoch), d.fixed32()
		copy(r.hash[:], d.bytes(len(r.hash)))
		switch {
		case d.err != nil:
			return
		case delta == 0 || r.end < 0 || leaderEpoch < 0 || leaderEpoch > math.MaxInt32:
			d.fail("%v: a range up to %d of leader epoch %d", p, r.end, leaderEpoch)
			return
		case index < 0 || index >= int64(len(d.s.objects.slots)):
			d.fail("%v: a range in object %d of %d", p, index, len(d.s.objects.slots))
			return
		}
		o := &d.s.objects.slots[index]
		if !inObject(r.position, length, o.size) {
			d.fail("%v: bytes [%d, +%d) of %d", p, r.position, length, o.size)
			return
		}
		o.refs++
		r.object = uint32(index)<<1 | uint32(object&1)
		p.ranges.append(r)
		p.objectEnd, p.hash = r.end, r.hash
		p.bytes += length
		d.s.rangeCount++
		d.n.ranges++
		before = r
	}
}

// finish reads the end frame and the sum, and looks for anything behind them.
func (d *decoder) finish() {
	if d.err == nil && d.at != len(d.buf) {
		d.fail("bytes behind the last record")
	}
	d.next(frameEnd)
	for i, n := range d.n.each() {
		got := d.uvarint()
		if i == 0 {
			got++ // the end frame itself is counted by now
		}
		if d.err == nil && got != *n {
			d.fail("its end counts %d where there are %d (count %d)", got, *n, i)
		}
	}
	if d.err == nil && d.at != len(d.buf) {
		d.fail("bytes behind the counts")
	}
	if d.err != nil {
		return
	}
	want := d.hash.Sum(nil)
	got := make([]byte, SnapshotSumSize)
	if d.began = d.position; d.read(got) && !bytes.Equal(got, want) {
		d.fail("SHA-256 %x, the bytes have %x", got, want)
	}
	if d.err != nil {
		return
	}
	var more [1]byte
	switch n, err := io.ReadFull(d.in, more[:]); {
	case n > 0:
		d.fail("bytes behind its end")
	case !errors.Is(err, io.EOF):
		d.err = &SnapshotError{Position: d.began, Reason: "read", Cause: err}
	}
	// In the snapshot they are in the order of their creation.
	slices.SortFunc(d.s.sorted, func(a, b *topic) int { return strings.Compare(a.name, b.name) })
}

// next reads a frame of the kind.
func (d *decoder) next(kind byte) {
	d.began = d.position
	if !d.read(d.head[:]) {
		return
	}
	size := binary.BigEndian.Uint32(d.head[4:])
	switch {
	case d.head[0] != kind || d.head[1] != 0 || d.head[2] != 0 || d.head[3] != 0:
		d.fail("a frame of kind % x where %d is expected", d.head[:4], kind)
		return
	case size == 0 || size > frameLargest:
		d.fail("a frame of %d bytes", size)
		return
	}
	d.payload(int(size))
	if d.err == nil && frameSum(d.n.frames, d.head[:], d.buf) != binary.BigEndian.Uint32(d.head[8:]) {
		d.fail("checksum of frame %d", d.n.frames)
	}
	d.n.frames++
	d.at = 0
}

// payload reads a frame's payload piece by piece, so that a size that lies costs
// no more memory than there are bytes.
func (d *decoder) payload(size int) {
	d.buf = d.buf[:0]
	for len(d.buf) < size && d.err == nil {
		n := min(size-len(d.buf), frameTarget+4<<10)
		have := len(d.buf)
		if cap(d.buf) < have+n {
			d.buf = append(make([]byte, 0, max(have+n, 2*cap(d.buf))), d.buf...)
		}
		d.buf = d.buf[:have+n]
		d.read(d.buf[have:])
	}
}

// begin begins a record: in the next frame if this one is full, as the encoder
// does.
func (d *decoder) begin() {
	if d.err != nil {
		return
	}
	switch full := len(d.buf) == 0 || d.at >= frameTarget; {
	case full && d.at != len(d.buf):
		d.fail("a record behind byte %d of a frame", d.at)
	case full:
		d.next(frameRecords)
	}
}

func (d *decoder) uvarint() uint64 {
	if d.err != nil {
		return 0
	}
	if d.at < len(d.buf) && d.buf[d.at] < 0x80 { // most are small
		d.at++
		return uint64(d.buf[d.at-1])
	}
	v, n := binary.Uvarint(d.buf[d.at:])
	if n <= 0 || d.buf[d.at+n-1] == 0 {
		d.fail("byte %d of the frame begins no number", d.at)
		return 0
	}
	d.at += n
	return v
}

// num reads a number that is not negative.
func (d *decoder) num() int64 {
	v := d.uvarint()
	if v > math.MaxInt64 {
		d.fail("the number %d", v)
		return 0
	}
	return int64(v)
}

// offset reads an offset of an entry of the log below its end.
func (d *decoder) offset() int64 {
	v := d.num()
	if v >= d.s.end {
		d.fail("offset %d of a log that ends at %d", v, d.s.end)
	}
	return v
}

func (d *decoder) num32() uint32 {
	v := d.uvarint()
	if v > math.MaxUint32 {
		d.fail("the number %d", v)
	}
	return uint32(v)
}

func (d *decoder) int32() int32 {
	v := d.uvarint()
	if v > math.MaxInt32 {
		d.fail("the number %d", v)
	}
	return int32(v)
}

// above reads an id that is told by its distance to the one before.
func (d *decoder) above(before int32) int32 {
	delta := d.int32()
	if delta == 0 || delta > math.MaxInt32-before {
		d.fail("id %d behind %d", int64(before)+int64(delta), before)
		return before
	}
	return before + delta
}

func (d *decoder) delta() int64 { return unzigzag(d.uvarint()) }

func (d *decoder) fixed32() uint32 {
	b := d.bytes(4)
	if b == nil {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// bytes reads n bytes, which stay in the frame; nil if something is wrong.
func (d *decoder) bytes(n int) []byte {
	if d.err != nil {
		return nil
	}
	if n > len(d.buf)-d.at {
		d.fail("%d bytes where %d are left in the frame", n, len(d.buf)-d.at)
		return nil
	}
	d.at += n
	return d.buf[d.at-n : d.at]
}

func (d *decoder) text() string {
	n := d.uvarint()
	if n > uint64(len(d.buf)-d.at) {
		d.fail("a text of %d bytes where %d are left in the frame", n, len(d.buf)-d.at)
		return ""
	}
	return string(d.bytes(int(n)))
}

func (d *decoder) flags(known byte) byte {
	b := d.bytes(1)
	if b == nil {
		return 0
	}
	if b[0]&^known != 0 {
		d.fail("flags %#x", b[0])
	}
	return b[0]
}
