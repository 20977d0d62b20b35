package record

import (
	"encoding/binary"
	"math"
)

// Builder makes batches out of records. It is reusable: after Reset it keeps
// its buffer. Batches begin at offset 0 with leader epoch -1; the leader that
// takes one sets both.
type Builder struct {
	codec      Codec
	producerID int64
	epoch      int16
	sequence   int32
	flags      int16

	records           []byte // encoded records, not compressed
	count             int32
	baseTime, maxTime int64
	appendTime        int64
	compressed        []byte
}

// NewBuilder returns a builder for batches without a producer.
func NewBuilder(codec Codec) *Builder {
	b := &Builder{codec: codec}
	b.ClearProducer()
	return b
}

// SetCodec changes the codec of the batches built from now on.
func (b *Builder) SetCodec(codec Codec) { b.codec = codec }

// SetProducer marks the next batch as sent by an idempotent producer, its first
// record having the given sequence.
func (b *Builder) SetProducer(id int64, epoch int16, baseSequence int32) {
	b.producerID, b.epoch, b.sequence = id, epoch, baseSequence
}

// ClearProducer makes batches without a producer again.
func (b *Builder) ClearProducer() { b.producerID, b.epoch, b.sequence = NoProducer, -1, -1 }

// SetTransactional says that the batch belongs to a transaction. Braid's
// brokers refuse such batches, and control batches, on produce.
func (b *Builder) SetTransactional(on bool) { b.setFlag(attrTransactional, on) }

// SetControl says that the records are control records instead of data.
func (b *Builder) SetControl(on bool) { b.setFlag(attrControl, on) }

// SetLogAppendTime gives every record of the batches built from now on the
// broker's time, in milliseconds, instead of its own; a negative ms ends that.
func (b *Builder) SetLogAppendTime(ms int64) {
	b.setFlag(attrLogAppendTime, ms >= 0)
	b.appendTime = ms
}

func (b *Builder) setFlag(bit int16, on bool) {
	b.flags &^= bit
	if on {
		b.flags |= bit
	}
}

// Reset drops the records added so far. Codec, producer and flags stay.
func (b *Builder) Reset() { b.records, b.count = b.records[:0], 0 }

// Len is the number of records added since Reset.
func (b *Builder) Len() int { return int(b.count) }

// Size is the size in bytes that the batch would have without compression.
func (b *Builder) Size() int { return HeaderSize + len(b.records) }

// Append adds a record, copying its bytes. OffsetDelta is ignored: records get
// consecutive offsets in the order of Append. It fails with [ErrTooLarge],
// leaving the batch as it was, if the batch would pass [MaxBatchSize] or the
// record has more than [MaxHeaders], and with [ErrCorrupt] for a header without a key or a timestamp more than 63 bits
// away from the first record's.
func (b *Builder) Append(r Record) error {
	base := b.baseTime
	if b.count == 0 {
		base = r.Timestamp
	}
	timeDelta := r.Timestamp - base
	if (r.Timestamp < base) != (timeDelta < 0) {
		return b.fail(ErrCorrupt, FieldTimestampDelta, "overflows", r.Timestamp, base)
	}
	if n := len(r.Headers); n > MaxHeaders {
		return b.fail(ErrTooLarge, FieldHeaders, "too many", int64(n), MaxHeaders)
	}
	size, err := b.bodySize(r, timeDelta)
	if err != nil {
		return err
	}
	if total := int64(b.Size()) + int64(varintSize(size)) + size; total > MaxBatchSize || b.count == math.MaxInt32 {
		return b.fail(ErrTooLarge, FieldRecords, "the batch would be too large", total, MaxBatchSize)
	}
	if b.count == 0 {
		b.baseTime, b.maxTime = r.Timestamp, r.Timestamp
	}
	b.maxTime = max(b.maxTime, r.Timestamp)

	out := binary.AppendVarint(b.records, size)
	out = append(out, 0) // attributes of a record: none are defined
	out = binary.AppendVarint(out, timeDelta)
	out = binary.AppendVarint(out, int64(b.count))
	out = appendBytes(out, r.Key)
	out = appendBytes(out, r.Value)
	out = binary.AppendVarint(out, int64(len(r.Headers)))
	for _, h := range r.Headers {
		out = appendBytes(out, h.Key)
		out = appendBytes(out, h.Value)
	}
	b.records = out
	b.count++
	return nil
}

// Build appends the finished batch to dst and returns both, and the batch
// alone, which aliases out. The builder keeps its records until Reset. It
// fails with [ErrCorrupt] on a batch without records, or if a producer was set
// without epoch or sequence.
func (b *Builder) Build(dst []byte) (out []byte, batch Batch, err error) {
	if b.count == 0 {
		return dst, nil, b.fail(ErrCorrupt, FieldRecordCount, "no records", 0, 1)
	}
	payload := b.records
	if b.codec != CodecNone {
		if b.compressed, err = Compress(b.compressed[:0], b.codec, b.records); err != nil {
			return dst, nil, err
		}
		payload = b.compressed
	}
	size := HeaderSize + len(payload)
	if size > MaxBatchSize {
		return dst, nil, b.fail(ErrTooLarge, FieldRecords, "compression made the batch too large", int64(size), MaxBatchSize)
	}
	maxTime := b.maxTime
	if b.flags&attrLogAppendTime != 0 {
		maxTime = b.appendTime
	}
	var h [HeaderSize]byte
	be := binary.BigEndian
	be.PutUint32(h[posLength:], uint32(size-lengthOverhead))
	be.PutUint32(h[posLeaderEpoch:], math.MaxUint32) // -1: no leader yet
	h[posMagic] = byte(Magic2)
	be.PutUint16(h[posAttributes:], uint16(b.flags)|uint16(b.codec))
	be.PutUint32(h[posLastOffsetDelta:], uint32(b.count-1))
	be.PutUint64(h[posBaseTimestamp:], uint64(b.baseTime))
	be.PutUint64(h[posMaxTimestamp:], uint64(maxTime))
	be.PutUint64(h[posProducerID:], uint64(b.producerID))
	be.PutUint16(h[posProducerEpoch:], uint16(b.epoch))
	be.PutUint32(h[posBaseSequence:], uint32(b.sequence))
	be.PutUint32(h[posRecordCount:], uint32(b.count))

	start := len(dst)
	out = append(dst, h[:]...)
	out = append(out, payload...)
	batch = Batch(out[start:len(out):len(out)])
	be.PutUint32(batch[posCRC:], batch.ComputeCRC())
	if err := batch.ValidateHeader(); err != nil {
		return dst, nil, err
	}
	return out, batch, nil
}

func (b *Builder) fail(kind error, f Field, reason string, got, want int64) error {
	return &Error{Kind: kind, Field: f, Reason: reason, Got: got, Want: want, Record: int(b.count)}
}

// bodySize is what the record's length field will say.
func (b *Builder) bodySize(r Record, timeDelta int64) (int64, error) {
	size := int64(1 + varintSize(timeDelta) + varintSize(int64(b.count)) + varintSize(int64(len(r.Headers))))
	size += bytesSize(r.Key) + bytesSize(r.Value)
	for _, h := range r.Headers {
		if h.Key == nil {
			return 0, b.fail(ErrCorrupt, FieldHeaders, "a header without a key", 0, 0)
		}
		size += bytesSize(h.Key) + bytesSize(h.Value)
	}
	return size, nil
}

func bytesSize(v []byte) int64 {
	if v == nil {
		return 1
	}
	return int64(varintSize(int64(len(v))) + len(v))
}

func varintSize(v int64) int {
	u := uint64(v)<<1 ^ uint64(v>>63)
	n := 1
	for ; u >= 0x80; u >>= 7 {
		n++
	}
	return n
}

func appendBytes(dst, v []byte) []byte {
	if v == nil {
		return binary.AppendVarint(dst, -1)
	}
	return append(binary.AppendVarint(dst, int64(len(v))), v...)
}
