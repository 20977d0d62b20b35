package state

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"maps"
	"slices"
)

// Digest is a SHA-256 over everything that the state means, in one order: two
// states that applied the same entries have the same digest, however they came
// to be. It costs a pass over all ranges.
func (s *State) Digest() [sha256.Size]byte {
	d := digest{h: sha256.New()}
	d.text(s.clusterID)
	d.ints(s.end, s.lastEpoch, int64(s.incarnation), int64(s.featureLevel), s.controller.epoch, int64(s.controller.id), s.producers)
	d.text(s.controller.address)
	d.ints(int64(len(s.brokers)))
	for _, id := range sortedIDs(s.brokers) {
		b := s.brokers[id]
		d.ints(int64(b.id), b.epoch)
		d.flags(b.online, b.logsIntact)
		d.text(b.address, b.zone, b.directoryID)
	}
	d.ints(int64(len(s.rlms)))
	for _, id := range sortedIDs(s.rlms) {
		r := s.rlms[id]
		d.ints(int64(r.id), r.epoch)
		d.flags(r.open, r.last != nil, r.previous != nil)
		d.text(r.address, r.zone)
		d.commit(r.last)
		d.commit(r.previous)
	}
	d.ints(int64(len(s.topics)))
	for _, offset := range slices.Sorted(maps.Keys(s.topics)) {
		d.topic(s, s.topics[offset])
	}
	d.ints(s.rangeCount, int64(s.objects.live()))
	return [sha256.Size]byte(d.h.Sum(nil))
}

type digest struct {
	h   hash.Hash
	buf [8]byte
}

func (d *digest) ints(values ...int64) {
	for _, v := range values {
		binary.BigEndian.PutUint64(d.buf[:], uint64(v))
		d.h.Write(d.buf[:])
	}
}

func (d *digest) text(values ...string) {
	for _, v := range values {
		d.ints(int64(len(v)))
		d.h.Write([]byte(v))
	}
}

func (d *digest) flags(values ...bool) {
	bits := int64(0)
	for i, v := range values {
		if v {
			bits |= 1 << i
		}
	}
	d.ints(bits)
}

func (d *digest) commit(m *commitMemory) {
	if m == nil {
		return
	}
	d.ints(m.offset, m.epoch, m.sequence, int64(m.attempt), int64(m.crc32c), m.size)
	d.text(string(m.outcomes))
}

func (d *digest) topic(s *State, t *topic) {
	d.text(t.id, t.name)
	d.ints(t.creationOffset, int64(len(t.overrides)))
	for _, name := range slices.Sorted(maps.Keys(t.overrides)) {
		d.text(name, t.overrides[name])
	}
	d.flags(t.deleted)
	d.ints(int64(len(t.partitions)))
	for i := range t.partitions {
		d.partition(s, &t.partitions[i])
	}
}

func (d *digest) partition(s *State, p *partition) {
	d.flags(p.opened, p.exact)
	d.ints(int64(len(p.replicas)))
	for _, id := range p.replicas {
		d.ints(int64(id))
	}
	d.ints(int64(p.leaderEpoch), int64(p.leaderID), p.brokerEpoch, p.fencedAt, p.epochStart, p.openedAt, int64(p.openedBy),
		p.logStart, p.objectEnd, p.bytes)
	d.text(p.reason, string(p.hash[:]))
	d.ints(int64(len(p.lineage)))
	for _, e := range p.lineage {
		d.ints(int64(e.Incarnation), int64(e.LeaderEpoch), e.StartOffset)
	}
	d.ints(int64(p.ranges.count), p.ranges.start)
	d.h.Write(p.ranges.startHash[:])
	for i := range p.ranges.count {
		r := p.ranges.at(i)
		o := s.objects.of(r)
		d.ints(r.end, r.maxTimestamp, r.position, int64(r.length), int64(r.crc32c), int64(r.leaderEpoch), int64(r.object&1))
		d.h.Write(r.hash[:])
		d.ints(o.rlmEpoch, o.sequence, int64(o.attempt), int64(o.incarnation), int64(o.rlmID), o.size, int64(o.crc32c), o.committedAt)
	}
}
