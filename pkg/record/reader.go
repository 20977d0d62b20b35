package record

import (
	"iter"
	"math"
)

// MaxHeaders is how many headers one record may have. A header takes two bytes
// in a batch and an entry of a slice when decoded: without a limit a record with
// nothing but headers needs over twenty times its size in memory.
const MaxHeaders = 10_000

// Header is one of a record's headers. Key is UTF-8 by convention and never
// nil; a nil Value is the format's null.
type Header struct {
	Key   []byte
	Value []byte
}

// Record is one record of a batch. A nil Key or Value is the format's null,
// which differs from an empty one.
type Record struct {
	OffsetDelta int32 // offset minus the batch's base offset
	Timestamp   int64 // milliseconds since 1970, NoTimestamp for none
	Key, Value  []byte
	Headers     []Header
}

// Clone copies the record so that it shares nothing with a [Reader].
func (r Record) Clone() Record {
	r.Key, r.Value = clone(r.Key), clone(r.Value)
	if r.Headers != nil {
		headers := make([]Header, len(r.Headers))
		for i, h := range r.Headers {
			headers[i] = Header{Key: clone(h.Key), Value: clone(h.Value)}
		}
		r.Headers = headers
	}
	return r
}

func clone(b []byte) []byte {
	if b == nil {
		return nil
	}
	return append(make([]byte, 0, len(b)), b...)
}

// Reader decodes the records of one batch after another, reusing its buffers:
// after the first batches it allocates nothing. The zero value is ready and
// has the limit [DefaultDecompressLimit].
//
//	for r.Reset(batch); r.Next(); {
//		use(r.Record())
//	}
//	if err := r.Err(); err != nil { … }
//
// A Reader checks what the records say about themselves: lengths line up,
// offset deltas run from 0 without a hole to the header's record count, and no
// byte is left over. It does not check the CRC. Memory is bounded by the limit,
// and by [MaxHeaders].
type Reader struct {
	limit int
	buf   []byte // decompressed records, unless the batch is not compressed
	rest  []byte // records not decoded yet
	rec   Record
	heads []Header
	err   error

	base, end   int64 // first offset and end, for absolute offsets
	baseTime    int64
	appendTime  bool
	maxTime     int64
	index, left int32
}

// NewReader returns a reader that takes at most limit decompressed bytes out
// of a batch; 0 means [DefaultDecompressLimit].
func NewReader(limit int) *Reader { return &Reader{limit: limit} }

// Reset turns to another batch, decompressing it. The error is also Err's, and
// Next then returns false. The batch must stay unchanged while it is read.
func (r *Reader) Reset(b Batch) error {
	r.rest, r.rec, r.err = nil, Record{}, nil
	r.index, r.left = 0, 0
	if err := b.ValidateHeader(); err != nil {
		r.err = err
		return err
	}
	limit := r.limit
	if limit <= 0 {
		limit = DefaultDecompressLimit
	}
	codec := b.Codec()
	data, err := Decompress(r.buf, codec, b.Payload(), limit)
	if err != nil {
		r.err = err
		return err
	}
	if codec != CodecNone {
		r.buf = data
	}
	r.rest = data
	r.base, r.end = b.BaseOffset(), b.EndOffset()
	r.baseTime, r.maxTime, r.appendTime = b.BaseTimestamp(), b.MaxTimestamp(), b.LogAppendTime()
	r.left = b.RecordCount()
	return nil
}

// Next decodes the next record and says whether there was one.
func (r *Reader) Next() bool {
	if r.err != nil {
		return false
	}
	if r.left == 0 {
		if len(r.rest) > 0 {
			r.err = r.fail(FieldRecords, "bytes are left over after the last record", int64(len(r.rest)), 0)
		}
		return false
	}
	if err := r.decode(); err != nil {
		r.err = err
		return false
	}
	r.index++
	r.left--
	return true
}

// Record is the record that Next decoded. Its slices alias the batch or the
// reader's buffer: they are valid until the next Reset, Headers until the next
// Next. They must not be modified.
func (r *Reader) Record() Record { return r.rec }

// Offset is the offset of the record that Next decoded.
func (r *Reader) Offset() int64 { return r.base + int64(r.rec.OffsetDelta) }

// Err is the first error since Reset, nil at a clean end.
func (r *Reader) Err() error { return r.err }

// Verify decodes all records of b and throws them away: what a broker does
// before it takes a batch from a client. Beyond what reading checks, the
// header's max timestamp must be the records' largest. It leaves the reader at
// the batch's end. The CRC is [Batch.Validate]'s.
func (r *Reader) Verify(b Batch) error {
	if err := r.Reset(b); err != nil {
		return err
	}
	largest := int64(math.MinInt64)
	for r.Next() {
		largest = max(largest, r.rec.Timestamp)
	}
	if r.err != nil {
		return r.err
	}
	if stored := b.MaxTimestamp(); stored != largest {
		r.err = fail(ErrCorrupt, FieldMaxTimestamp, "not the largest of the records", stored, largest)
	}
	return r.err
}

// Records iterates over the records of b with a reader of its own, at most
// [DefaultDecompressLimit] of them. An error comes as the last pair. Records
// are valid until the iteration ends, their Headers until the next step. Loops
// over many batches use a [Reader], which keeps its buffers.
func (b Batch) Records() iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		var r Reader
		_ = r.Reset(b) // Err reports it
		for r.Next() {
			if !yield(r.rec, nil) {
				return
			}
		}
		if r.err != nil {
			yield(Record{}, r.err)
		}
	}
}

func (r *Reader) fail(f Field, reason string, got, want int64) *Error {
	return &Error{Kind: ErrCorrupt, Field: f, Reason: reason, Got: got, Want: want, Record: int(r.index)}
}

// decode reads one record from the front of rest.
func (r *Reader) decode() error {
	size, n := varint(r.rest)
	if n <= 0 {
		return r.fail(FieldRecordLength, "not a varint", int64(len(r.rest)), 0)
	}
	if size < 0 || size > int64(len(r.rest)-n) {
		return r.fail(FieldRecordLength, "not inside the batch", size, int64(len(r.rest)-n))
	}
	body := r.rest[n : n+int(size)]
	if len(body) == 0 {
		return r.fail(FieldRecordLength, "no room for a record", 0, 1)
	}
	f := fields{buf: body[1:]} // the attributes of a record carry nothing
	timeDelta, ok := f.varint()
	if !ok {
		return r.fail(FieldTimestampDelta, "not a varint", int64(len(f.buf)), 0)
	}
	delta, ok := f.varint()
	if !ok || delta != int64(r.index) {
		return r.fail(FieldOffsetDelta, "not the next one", delta, int64(r.index))
	}
	stamp := r.maxTime
	if !r.appendTime {
		stamp = r.baseTime + timeDelta
		if (stamp > r.baseTime) != (timeDelta > 0) && timeDelta != 0 {
			return r.fail(FieldTimestampDelta, "overflows", timeDelta, r.baseTime)
		}
	}
	key, ok := f.bytes()
	if !ok {
		return r.fail(FieldKey, "length not inside the record", int64(len(f.buf)), 0)
	}
	value, ok := f.bytes()
	if !ok {
		return r.fail(FieldValue, "length not inside the record", int64(len(f.buf)), 0)
	}
	heads, err := r.headers(&f)
	if err != nil {
		return err
	}
	if len(f.buf) > 0 {
		return r.fail(FieldRecordLength, "bytes are left over in the record", int64(len(f.buf)), 0)
	}
	r.rec = Record{OffsetDelta: int32(delta), Timestamp: stamp, Key: key, Value: value, Headers: heads}
	r.rest = r.rest[n+int(size):]
	return nil
}

// headers decodes a record's headers into the reader's slice, which grows with
// headers that are there, not with the count that is claimed.
func (r *Reader) headers(f *fields) ([]Header, error) {
	count, ok := f.varint()
	if !ok || count < 0 || count > int64(len(f.buf)/2) { // a header takes two bytes at least
		return nil, r.fail(FieldHeaders, "count not inside the record", count, int64(len(f.buf)/2))
	}
	if count == 0 {
		return nil, nil
	}
	if count > MaxHeaders {
		e := r.fail(FieldHeaders, "too many", count, MaxHeaders)
		e.Kind = ErrTooLarge
		return nil, e
	}
	r.heads = r.heads[:0]
	for range count {
		key, ok := f.bytes()
		if !ok || key == nil {
			return nil, r.fail(FieldHeaders, "key missing or not inside the record", int64(len(f.buf)), 0)
		}
		value, ok := f.bytes()
		if !ok {
			return nil, r.fail(FieldHeaders, "value not inside the record", int64(len(f.buf)), 0)
		}
		r.heads = append(r.heads, Header{Key: key, Value: value})
	}
	return r.heads, nil
}

// fields consumes the fields of one record.
type fields struct{ buf []byte }

func (f *fields) varint() (int64, bool) {
	v, n := varint(f.buf)
	if n <= 0 {
		return 0, false
	}
	f.buf = f.buf[n:]
	return v, true
}

// bytes takes a length and so many bytes; a length of -1 is null.
func (f *fields) bytes() ([]byte, bool) {
	n, ok := f.varint()
	switch {
	case !ok || n < -1 || n > int64(len(f.buf)):
		return nil, false
	case n == -1:
		return nil, true
	}
	v := f.buf[:n:n]
	f.buf = f.buf[n:]
	return v, true
}

// varint decodes a zigzag varint; n <= 0 where there is none.
func varint(buf []byte) (v int64, n int) {
	// One byte covers most lengths and deltas.
	if len(buf) > 0 && buf[0] < 0x80 {
		u := buf[0]
		return int64(u>>1) ^ -int64(u&1), 1
	}
	var u uint64
	for i := 0; i < len(buf) && i < 10; i++ {
		c := buf[i]
		if i == 9 && c > 1 {
			return 0, -1 // above 64 bits
		}
		u |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			return int64(u>>1) ^ -int64(u&1), i + 1
		}
	}
	return 0, 0
}
