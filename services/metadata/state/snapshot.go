package state

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
)

// The snapshot format, drawn in docs/formats/metadata-snapshot.md: a header,
// frames of records, each with its checksum, an end frame with counts, and a
// SHA-256 over all of it. Equal states have equal bytes, and a decoder accepts
// only the bytes that an encoder writes.
const (
	snapshotMagic   = "BRAIDMDS"
	snapshotVersion = 1
	snapshotHeader  = 16 // magic, version u16, zeros

	frameHeader  = 12       // kind, zeros, payload length u32, CRC32C u32
	frameTarget  = 64 << 10 // a frame ends with the first record that reaches this
	frameLargest = 16 << 20 // no record is larger than this by far

	frameRecords = 1
	frameEnd     = 2
)

// SnapshotSumSize is the size of the SHA-256 that ends a snapshot.
const SnapshotSumSize = sha256.Size

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// SnapshotError is a snapshot that can't be read: damaged, cut short, not
// canonical, or of a state that this version does not understand. Nothing of it
// may be used.
type SnapshotError struct {
	Position int64 // of the frame, in bytes
	Reason   string
	Cause    error // of the reader; nil if the bytes themselves are wrong
}

func (e *SnapshotError) Error() string {
	text := fmt.Sprintf("metadata snapshot, frame at byte %d: %s", e.Position, e.Reason)
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text
}

// Unwrap returns the reader's error.
func (e *SnapshotError) Unwrap() error { return e.Cause }

// Encoded tells what was written.
type Encoded struct {
	Size int64
	// Sum is the SHA-256 of all bytes but the last 32, which are Sum itself.
	Sum [SnapshotSumSize]byte
}

// counts are what the end frame says of a snapshot.
type counts struct {
	frames, brokers, rlms, objects, topics, partitions, ranges uint64
}

func (c *counts) each() [7]*uint64 {
	return [...]*uint64{&c.frames, &c.brokers, &c.rlms, &c.objects, &c.topics, &c.partitions, &c.ranges}
}

// frameSum is the checksum of a frame: its index is in it, so that frames can't
// be swapped, doubled or left out.
func frameSum(index uint64, header, payload []byte) uint32 {
	var at [8]byte
	binary.BigEndian.PutUint64(at[:], index)
	sum := crc32.Update(0, castagnoli, at[:])
	sum = crc32.Update(sum, castagnoli, header[:8])
	return crc32.Update(sum, castagnoli, payload)
}

// Flags of records.
const (
	flagOnline     = 1 << 0 // broker
	flagLogsIntact = 1 << 1

	flagOpen     = 1 << 0 // remote-log manager
	flagLast     = 1 << 1
	flagPrevious = 1 << 2

	flagDeleted = 1 << 0 // topic

	flagOpened = 1 << 0 // partition
	flagExact  = 1 << 1
)

func zigzag(v int64) uint64   { return uint64(v<<1) ^ uint64(v>>63) }
func unzigzag(u uint64) int64 { return int64(u>>1) ^ -int64(u&1) }

// summed is a writer that counts and hashes what passes.
type summed struct {
	w    io.Writer
	hash hash.Hash
	size int64
}

func (s *summed) Write(p []byte) (int, error) {
	s.hash.Write(p) // first: some writers may change what they are given
	n, err := s.w.Write(p)
	s.size += int64(n)
	return n, err
}
