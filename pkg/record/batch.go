package record

import (
	"encoding/binary"
	"hash/crc32"
	"math"
)

// HeaderSize is the size of a batch without its records, in bytes.
const HeaderSize = 61

// MaxBatchSize is the largest batch, header included, that this package takes
// for one, in bytes. It is a property of Braid's logs, not of Kafka's format:
// a length field above it is damage, so nobody waits for, or makes room for,
// the two gigabytes that a flipped bit announces. Topics set lower limits.
const MaxBatchSize = 64 << 20

// Magic2 is the only batch version that exists here.
const Magic2 int8 = 2

// NoTimestamp and NoProducer are what the format stores for "none".
const (
	NoTimestamp int64 = -1
	NoProducer  int64 = -1
)

// Positions of the fields in a batch, in bytes from its start.
const (
	posBaseOffset      = 0
	posLength          = 8
	posLeaderEpoch     = 12
	posMagic           = 16
	posCRC             = 17
	posAttributes      = 21
	posLastOffsetDelta = 23
	posBaseTimestamp   = 27
	posMaxTimestamp    = 35
	posProducerID      = 43
	posProducerEpoch   = 51
	posBaseSequence    = 53
	posRecordCount     = 57
)

// lengthOverhead is what the length field does not count: the base offset and
// the field itself.
const lengthOverhead = posLeaderEpoch

// Bits of the attributes.
const (
	attrCodecMask     = 0x07
	attrLogAppendTime = 0x08
	attrTransactional = 0x10
	attrControl       = 0x20
	attrKnown         = attrCodecMask | attrLogAppendTime | attrTransactional | attrControl
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Batch is one whole record batch, as on the wire. Its methods read the
// header in place; they panic if the slice is shorter than [HeaderSize], which
// [Peek], [Walk] and [Batch.Validate] rule out. All methods but the setters are
// safe for concurrent use.
type Batch []byte

// BaseOffset is the offset of the first record.
func (b Batch) BaseOffset() int64 { return int64(binary.BigEndian.Uint64(b[posBaseOffset:])) }

// Length is the size of the whole batch in bytes, as its length field says. It
// may differ from len(b) until [Batch.Validate] has compared them, and is
// negative or huge in a damaged batch.
func (b Batch) Length() int {
	return int(int32(binary.BigEndian.Uint32(b[posLength:]))) + lengthOverhead
}

// LeaderEpoch is the epoch of the leader that assigned the offsets, -1 in a
// batch that no leader has taken yet.
func (b Batch) LeaderEpoch() int32 { return int32(binary.BigEndian.Uint32(b[posLeaderEpoch:])) }

// Magic is the version of the format, 2.
func (b Batch) Magic() int8 { return int8(b[posMagic]) }

// CRC is the stored CRC32C of everything from the attributes on.
func (b Batch) CRC() uint32 { return binary.BigEndian.Uint32(b[posCRC:]) }

// Attributes are codec and flags, undecoded.
func (b Batch) Attributes() int16 { return int16(binary.BigEndian.Uint16(b[posAttributes:])) }

// LastOffsetDelta is the offset of the last record minus the base offset.
func (b Batch) LastOffsetDelta() int32 {
	return int32(binary.BigEndian.Uint32(b[posLastOffsetDelta:]))
}

// LastOffset is the offset of the last record (inclusive).
func (b Batch) LastOffset() int64 { return b.BaseOffset() + int64(b.LastOffsetDelta()) }

// EndOffset is the offset after the last record (exclusive).
func (b Batch) EndOffset() int64 { return b.LastOffset() + 1 }

// BaseTimestamp is the time that the records' timestamps are relative to, in
// milliseconds since 1970; records may lie before it.
func (b Batch) BaseTimestamp() int64 {
	return int64(binary.BigEndian.Uint64(b[posBaseTimestamp:]))
}

// MaxTimestamp is the largest timestamp of the records, in milliseconds since
// 1970: the largest, not the last (field report B081).
func (b Batch) MaxTimestamp() int64 { return int64(binary.BigEndian.Uint64(b[posMaxTimestamp:])) }

// ProducerID is the idempotent producer's id, or [NoProducer].
func (b Batch) ProducerID() int64 { return int64(binary.BigEndian.Uint64(b[posProducerID:])) }

// ProducerEpoch is the epoch of the producer id.
func (b Batch) ProducerEpoch() int16 { return int16(binary.BigEndian.Uint16(b[posProducerEpoch:])) }

// BaseSequence is the producer's sequence number of the first record.
func (b Batch) BaseSequence() int32 { return int32(binary.BigEndian.Uint32(b[posBaseSequence:])) }

// LastSequence is the producer's sequence number of the last record, wrapped
// after 2^31-1, or -1 where there is no sequence.
func (b Batch) LastSequence() int32 {
	base := b.BaseSequence()
	if base < 0 {
		return -1
	}
	return NextSequence(base, b.LastOffsetDelta())
}

// RecordCount is the number of records.
func (b Batch) RecordCount() int32 { return int32(binary.BigEndian.Uint32(b[posRecordCount:])) }

// Codec is how the records are compressed.
func (b Batch) Codec() Codec { return Codec(b[posAttributes+1] & attrCodecMask) }

// IsTransactional says whether the batch belongs to a transaction.
func (b Batch) IsTransactional() bool { return b[posAttributes+1]&attrTransactional != 0 }

// IsControl says whether the batch holds control records instead of data.
func (b Batch) IsControl() bool { return b[posAttributes+1]&attrControl != 0 }

// HasProducer says whether an idempotent producer wrote the batch.
func (b Batch) HasProducer() bool { return b.ProducerID() >= 0 }

// LogAppendTime says that every record carries [Batch.MaxTimestamp], set by
// the broker, instead of a time of its own.
func (b Batch) LogAppendTime() bool { return b[posAttributes+1]&attrLogAppendTime != 0 }

// Payload is the part behind the header: the records, compressed or not. It
// aliases b.
func (b Batch) Payload() []byte { return b[HeaderSize:] }

// SetBaseOffset moves the batch to another offset. The CRC stays valid, since
// it does not cover the field.
func (b Batch) SetBaseOffset(offset int64) {
	binary.BigEndian.PutUint64(b[posBaseOffset:], uint64(offset))
}

// SetLeaderEpoch states which leader assigned the offsets. The CRC stays
// valid, since it does not cover the field.
func (b Batch) SetLeaderEpoch(epoch int32) {
	binary.BigEndian.PutUint32(b[posLeaderEpoch:], uint32(epoch))
}

// ComputeCRC is the CRC32C that the batch should carry. It reads all of b.
func (b Batch) ComputeCRC() uint32 { return crc32.Checksum(b[posAttributes:], castagnoli) }

// Validate says whether b is exactly one whole, intact batch: the header makes
// sense by itself ([Batch.ValidateHeader]), the length is that of b, and the
// CRC fits. Whether it stands at its place is [Checker]'s question, whether its
// records can be decoded is [Reader.Verify]'s. It allocates only for an error,
// which is an *[Error].
func (b Batch) Validate() error {
	if err := b.ValidateHeader(); err != nil {
		return err
	}
	if size := b.Length(); size != len(b) {
		if size > len(b) {
			return fail(ErrShort, FieldLength, "the bytes end before the batch", int64(len(b)), int64(size))
		}
		return fail(ErrCorrupt, FieldLength, "bytes follow the batch", int64(len(b)), int64(size))
	}
	if got, want := b.ComputeCRC(), b.CRC(); got != want {
		return fail(ErrCorrupt, FieldCRC, "the content has another checksum", int64(got), int64(want))
	}
	return nil
}

// ValidateHeader says whether the first [HeaderSize] bytes of b are a header
// that makes sense by itself. It looks at nothing behind them, so b may be the
// header alone. Without the CRC, bits that the CRC covers may still be wrong.
func (b Batch) ValidateHeader() error {
	if len(b) < HeaderSize {
		return fail(ErrShort, FieldLength, "the bytes end inside the header", int64(len(b)), HeaderSize)
	}
	if err := checkSize(b, MaxBatchSize); err != nil {
		return err
	}
	if m := b.Magic(); m != Magic2 {
		return fail(ErrCorrupt, FieldMagic, "not a batch of version 2", int64(m), int64(Magic2))
	}
	base, delta, count := b.BaseOffset(), b.LastOffsetDelta(), b.RecordCount()
	if base < 0 {
		return fail(ErrCorrupt, FieldBaseOffset, "negative", base, 0)
	}
	if delta < 0 {
		return fail(ErrCorrupt, FieldLastOffsetDelta, "negative", int64(delta), 0)
	}
	if base > math.MaxInt64-1-int64(delta) {
		return fail(ErrCorrupt, FieldBaseOffset, "the end offset does not fit 63 bits", base, math.MaxInt64-1-int64(delta))
	}
	if int64(count) != int64(delta)+1 {
		return fail(ErrCorrupt, FieldRecordCount, "not the last offset delta plus one", int64(count), int64(delta)+1)
	}
	if b.LeaderEpoch() < -1 {
		return fail(ErrCorrupt, FieldLeaderEpoch, "below -1", int64(b.LeaderEpoch()), -1)
	}
	if a := b.Attributes(); a&^attrKnown != 0 {
		return fail(ErrUnsupported, FieldAttributes, "reserved bits are set", int64(uint16(a)), int64(a&attrKnown))
	}
	if c := b.Codec(); !c.Valid() {
		return fail(ErrUnsupported, FieldAttributes, "unknown codec", int64(c), int64(CodecZstd))
	}
	return b.validateProducer()
}

// validateProducer checks that a producer id comes with an epoch and, unless
// it is a marker, with a sequence. Without an id the other two mean nothing;
// clients store -1 or 0 there, and both are let through.
func (b Batch) validateProducer() error {
	id := b.ProducerID()
	if id < NoProducer {
		return fail(ErrCorrupt, FieldProducerID, "below -1", id, NoProducer)
	}
	if id == NoProducer {
		return nil
	}
	if e := b.ProducerEpoch(); e < 0 {
		return fail(ErrCorrupt, FieldProducerEpoch, "a producer id without an epoch", int64(e), 0)
	}
	if s := b.BaseSequence(); s < 0 && !b.IsControl() {
		return fail(ErrCorrupt, FieldBaseSequence, "a producer id without a sequence", int64(s), 0)
	}
	return nil
}

// checkSize judges the length field of a batch of which at least 12 bytes are
// there.
func checkSize(b Batch, limit int) error {
	size := b.Length()
	if size < HeaderSize {
		return fail(ErrCorrupt, FieldLength, "shorter than a header", int64(size), HeaderSize)
	}
	if size > limit {
		if size <= MaxBatchSize {
			return fail(ErrTooLarge, FieldLength, "above the caller's limit", int64(size), int64(limit))
		}
		return fail(ErrCorrupt, FieldLength, "above the largest batch there is", int64(size), MaxBatchSize)
	}
	return nil
}
