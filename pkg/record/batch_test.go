package record_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
)

var codecs = []record.Codec{record.CodecNone, record.CodecGzip, record.CodecSnappy, record.CodecLZ4, record.CodecZstd}

// sample is a set of records with every shape a field can have: null, empty,
// headers, times before the first one (field report B081).
func sample() []record.Record {
	const now = 1_790_000_000_000
	return []record.Record{
		{Timestamp: now, Key: []byte("k0"), Value: []byte("the first value")},
		{Timestamp: now - 3_600_000, Key: nil, Value: []byte("an hour before")},
		{Timestamp: now - 30*86_400_000, Key: []byte{}, Value: nil},
		{Timestamp: now + 7, Key: []byte("k3"), Value: []byte{}, Headers: []record.Header{
			{Key: []byte("trace"), Value: []byte{0, 1, 2}}, {Key: []byte{}, Value: nil}, {Key: []byte("e"), Value: []byte{}},
		}},
		{Timestamp: now - 2, Key: bytes.Repeat([]byte("k"), 300), Value: bytes.Repeat([]byte("value "), 9000)},
	}
}

func build(t testing.TB, codec record.Codec, records []record.Record) record.Batch {
	t.Helper()
	bl := record.NewBuilder(codec)
	for _, r := range records {
		require.NoError(t, bl.Append(r))
	}
	_, b, err := bl.Build(nil)
	require.NoError(t, err)
	return b
}

// mended returns a copy of b after change, with length and CRC made to fit.
func mended(b record.Batch, change func(record.Batch) record.Batch) record.Batch {
	c := change(bytes.Clone(b))
	putInt32(c, 8, int32(len(c)-12))
	putInt32(c, 17, int32(c.ComputeCRC()))
	return c
}

func putInt32(b []byte, pos int, v int32) {
	b[pos], b[pos+1], b[pos+2], b[pos+3] = byte(v>>24), byte(v>>16), byte(v>>8), byte(v)
}

func putInt64(b []byte, pos int, v int64) {
	putInt32(b, pos, int32(v>>32))
	putInt32(b, pos+4, int32(v))
}

func collect(t testing.TB, b record.Batch) []record.Record {
	t.Helper()
	var out []record.Record
	for r, err := range b.Records() {
		require.NoError(t, err)
		out = append(out, r.Clone())
	}
	return out
}

func wantRecords(records []record.Record) []record.Record {
	out := make([]record.Record, len(records))
	for i, r := range records {
		r.OffsetDelta = int32(i)
		out[i] = r
	}
	return out
}

func TestRoundTripKeepsEveryShapeInEveryCodec(t *testing.T) {
	for _, codec := range codecs {
		t.Run(codec.String(), func(t *testing.T) {
			b := build(t, codec, sample())
			require.NoError(t, b.Validate())
			require.Equal(t, codec, b.Codec())
			require.Equal(t, wantRecords(sample()), collect(t, b))
			require.NoError(t, new(record.Reader).Verify(b))
			require.Equal(t, int64(1_790_000_000_007), b.MaxTimestamp(), "the largest time, not the last (B081)")
			require.Equal(t, int64(1_790_000_000_000), b.BaseTimestamp())
			require.Equal(t, int32(-1), b.LeaderEpoch())
			require.False(t, b.HasProducer())
			require.Equal(t, int32(-1), b.LastSequence())
			require.Equal(t, int64(5), b.EndOffset())
		})
	}
}

func TestHeaderFieldsAreWhereTheFormatHasThem(t *testing.T) {
	bl := record.NewBuilder(record.CodecNone)
	bl.SetProducer(0x0102030405060708, 0x0A0B, 0x0C0D0E0F)
	bl.SetTransactional(true)
	bl.SetControl(true)
	require.NoError(t, bl.Append(record.Record{Timestamp: 0x1112131415161718, Value: []byte("v")}))
	require.NoError(t, bl.Append(record.Record{Timestamp: 0x1112131415161719}))
	_, b, err := bl.Build([]byte("before"))
	require.NoError(t, err)
	b.SetBaseOffset(0x2122232425262728)
	b.SetLeaderEpoch(0x31323334)
	require.NoError(t, b.Validate(), "base offset and leader epoch lie outside the CRC")
	want := strings.Join([]string{
		"2122232425262728", fmt.Sprintf("%08x", len(b)-12), "31323334", "02", fmt.Sprintf("%08x", b.CRC()),
		"0030", "00000001", "1112131415161718", "1112131415161719", "0102030405060708", "0a0b", "0c0d0e0f", "00000002",
	}, "")
	require.Equal(t, want, hex.EncodeToString(b[:record.HeaderSize]))
	require.Equal(t, int64(0x2122232425262729), b.LastOffset())
	require.Equal(t, int32(0x0C0D0E10), b.LastSequence())
	require.True(t, b.IsControl() && b.IsTransactional() && b.HasProducer() && !b.LogAppendTime())
	require.Equal(t, len(b), b.Length())
	require.Equal(t, record.Magic2, b.Magic())
}

func TestLogAppendTimeReplacesTheRecordsTimes(t *testing.T) {
	bl := record.NewBuilder(record.CodecZstd)
	bl.SetLogAppendTime(500)
	require.NoError(t, bl.Append(record.Record{Timestamp: 1}))
	require.NoError(t, bl.Append(record.Record{Timestamp: 900}))
	_, b, err := bl.Build(nil)
	require.NoError(t, err)
	require.True(t, b.LogAppendTime())
	require.Equal(t, int64(500), b.MaxTimestamp())
	for _, r := range collect(t, b) {
		require.Equal(t, int64(500), r.Timestamp)
	}
	require.NoError(t, new(record.Reader).Verify(b))
}

// The golden files are frozen: a batch written by one release is read by all
// later ones. Decoding is pinned for all codecs, encoding for those whose
// bytes do not depend on the compressor's release.
func TestGoldenBatches(t *testing.T) {
	for _, codec := range codecs {
		t.Run(codec.String(), func(t *testing.T) {
			path := filepath.Join("testdata", "golden", codec.String()+".hex")
			b := build(t, codec, sample())
			b.SetBaseOffset(1_000_000)
			b.SetLeaderEpoch(7)
			if os.Getenv("UPDATE_GOLDEN") != "" {
				require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
				require.NoError(t, os.WriteFile(path, []byte(hex.EncodeToString(b)+"\n"), 0o644))
			}
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			golden, err := hex.DecodeString(strings.TrimSpace(string(text)))
			require.NoError(t, err)
			stored := record.Batch(golden)
			require.NoError(t, stored.Validate())
			require.Equal(t, int64(1_000_000), stored.BaseOffset())
			require.Equal(t, int32(7), stored.LeaderEpoch())
			require.Equal(t, wantRecords(sample()), collect(t, stored))
			if codec == record.CodecNone {
				require.Equal(t, golden, []byte(b), "the encoding must not change")
			}
		})
	}
}

func TestValidateNamesTheFieldThatIsWrong(t *testing.T) {
	good := build(t, record.CodecNone, sample()[:2])
	tests := []struct {
		name   string
		change func(record.Batch) record.Batch
		mend   bool // length and CRC made to fit again
		kind   error
		field  record.Field
	}{
		{"empty", func(b record.Batch) record.Batch { return b[:0] }, false, record.ErrShort, record.FieldLength},
		{"half a header", func(b record.Batch) record.Batch { return b[:60] }, false, record.ErrShort, record.FieldLength},
		{"last byte missing", func(b record.Batch) record.Batch { return b[:len(b)-1] }, false, record.ErrShort, record.FieldLength},
		{"a byte too many", func(b record.Batch) record.Batch { return append(b, 0) }, false, record.ErrCorrupt, record.FieldLength},
		{"length negative", func(b record.Batch) record.Batch { putInt32(b, 8, -1); return b }, false, record.ErrCorrupt, record.FieldLength},
		{"length smallest", func(b record.Batch) record.Batch { putInt32(b, 8, math.MinInt32); return b }, false, record.ErrCorrupt, record.FieldLength},
		{"length huge", func(b record.Batch) record.Batch { putInt32(b, 8, math.MaxInt32); return b }, false, record.ErrCorrupt, record.FieldLength},
		{"length below a header", func(b record.Batch) record.Batch { putInt32(b, 8, 48); return b }, false, record.ErrCorrupt, record.FieldLength},
		{"magic 1", func(b record.Batch) record.Batch { b[16] = 1; return b }, true, record.ErrCorrupt, record.FieldMagic},
		{"crc", func(b record.Batch) record.Batch { b[20] ^= 1; return b }, false, record.ErrCorrupt, record.FieldCRC},
		{"a bit of a record", func(b record.Batch) record.Batch { b[len(b)-1] ^= 0x10; return b }, false, record.ErrCorrupt, record.FieldCRC},
		{"negative base offset", func(b record.Batch) record.Batch { b.SetBaseOffset(-1); return b }, true, record.ErrCorrupt, record.FieldBaseOffset},
		{"end offset overflows", func(b record.Batch) record.Batch { b.SetBaseOffset(math.MaxInt64 - 1); return b }, true, record.ErrCorrupt, record.FieldBaseOffset},
		{"negative delta", func(b record.Batch) record.Batch { putInt32(b, 23, -1); return b }, true, record.ErrCorrupt, record.FieldLastOffsetDelta},
		{"count 0", func(b record.Batch) record.Batch { putInt32(b, 57, 0); return b }, true, record.ErrCorrupt, record.FieldRecordCount},
		{"count negative", func(b record.Batch) record.Batch { putInt32(b, 57, -5); return b }, true, record.ErrCorrupt, record.FieldRecordCount},
		{"a hole in the offsets", func(b record.Batch) record.Batch { putInt32(b, 23, 2); return b }, true, record.ErrCorrupt, record.FieldRecordCount},
		{"delta largest, count wrapped", func(b record.Batch) record.Batch {
			putInt32(b, 23, math.MaxInt32)
			putInt32(b, 57, math.MinInt32)
			return b
		}, true, record.ErrCorrupt, record.FieldRecordCount},
		{"leader epoch -2", func(b record.Batch) record.Batch { b.SetLeaderEpoch(-2); return b }, true, record.ErrCorrupt, record.FieldLeaderEpoch},
		{"codec 5", func(b record.Batch) record.Batch { b[22] = 5; return b }, true, record.ErrUnsupported, record.FieldAttributes},
		{"delete horizon", func(b record.Batch) record.Batch { b[22] |= 0x40; return b }, true, record.ErrUnsupported, record.FieldAttributes},
		{"reserved attribute", func(b record.Batch) record.Batch { b[21] |= 0x80; return b }, true, record.ErrUnsupported, record.FieldAttributes},
		{"producer id -2", func(b record.Batch) record.Batch { putInt64(b, 43, -2); return b }, true, record.ErrCorrupt, record.FieldProducerID},
		{"producer without epoch", func(b record.Batch) record.Batch { putInt64(b, 43, 9); return b }, true, record.ErrCorrupt, record.FieldProducerEpoch},
		{"producer without sequence", func(b record.Batch) record.Batch {
			putInt64(b, 43, 9)
			b[51], b[52] = 0, 0
			return b
		}, true, record.ErrCorrupt, record.FieldBaseSequence},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b record.Batch
			if tt.mend {
				b = mended(good, tt.change)
			} else {
				b = tt.change(bytes.Clone(good))
			}
			err := b.Validate()
			require.ErrorIs(t, err, tt.kind)
			var e *record.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, tt.field, e.Field, "%v", err)
			var kinds []error
			for _, kind := range []error{record.ErrShort, record.ErrCorrupt, record.ErrUnsupported, record.ErrTooLarge} {
				if errors.Is(err, kind) {
					kinds = append(kinds, kind)
				}
			}
			require.Equal(t, []error{tt.kind}, kinds, "exactly one sentinel")
		})
	}
}

func TestNextSequenceWrapsAfter31Bits(t *testing.T) {
	for _, tt := range []struct{ seq, n, want int32 }{
		{0, 0, 0}, {0, 1, 1}, {41, 1, 42}, {math.MaxInt32, 0, math.MaxInt32}, {math.MaxInt32, 1, 0},
		{math.MaxInt32 - 1, 1, math.MaxInt32}, {math.MaxInt32 - 1, 2, 0}, {math.MaxInt32, math.MaxInt32, math.MaxInt32 - 1},
		{0, math.MaxInt32, math.MaxInt32}, {1, math.MaxInt32, 0},
	} {
		require.Equal(t, tt.want, record.NextSequence(tt.seq, tt.n), "%d + %d", tt.seq, tt.n)
	}
}

func TestProducerBatchesFollowAndRepeat(t *testing.T) {
	make1 := func(epoch int16, seq int32, n int) record.ProducerBatch {
		bl := record.NewBuilder(record.CodecNone)
		bl.SetProducer(9, epoch, seq)
		for range n {
			require.NoError(t, bl.Append(record.Record{Timestamp: 3}))
		}
		_, b, err := bl.Build(nil)
		require.NoError(t, err)
		p, ok := b.Producer()
		require.True(t, ok)
		return p
	}
	last := make1(0, math.MaxInt32-1, 3)
	require.Equal(t, int32(0), last.LastSequence, "wrapped inside the batch")
	require.True(t, make1(0, 1, 1).Follows(last))
	require.False(t, make1(0, 2, 1).Follows(last))
	require.True(t, make1(1, 0, 1).Follows(last), "a later epoch begins at 0")
	require.False(t, make1(1, 1, 1).Follows(last))
	require.True(t, make1(0, math.MaxInt32-1, 3).Repeats(last))
	require.False(t, make1(0, math.MaxInt32-1, 2).Repeats(last))
	_, ok := build(t, record.CodecNone, sample()).Producer()
	require.False(t, ok)
}

func TestCodecNames(t *testing.T) {
	for _, c := range codecs {
		back, err := record.ParseCodec(c.String())
		require.NoError(t, err)
		require.Equal(t, c, back)
	}
	_, err := record.ParseCodec("brotli")
	require.Error(t, err)
	require.Equal(t, "codec(7)", record.Codec(7).String())
}

func TestBuilderRefuses(t *testing.T) {
	bl := record.NewBuilder(record.CodecNone)
	_, _, err := bl.Build(nil)
	require.ErrorIs(t, err, record.ErrCorrupt, "no records")
	require.ErrorIs(t, bl.Append(record.Record{Headers: []record.Header{{}}}), record.ErrCorrupt)
	require.ErrorIs(t, bl.Append(record.Record{Value: make([]byte, record.MaxBatchSize)}), record.ErrTooLarge)
	require.NoError(t, bl.Append(record.Record{Timestamp: math.MaxInt64}))
	require.ErrorIs(t, bl.Append(record.Record{Timestamp: -2}), record.ErrCorrupt)
	require.Equal(t, 1, bl.Len())
	bl.SetProducer(4, -1, 0)
	_, _, err = bl.Build(nil)
	require.ErrorIs(t, err, record.ErrCorrupt)
	bl.ClearProducer()
	out, b, err := bl.Build([]byte("xx"))
	require.NoError(t, err)
	require.Equal(t, "xx"+string(b), string(out))
	require.Len(t, b, bl.Size())
	bl.Reset()
	require.Equal(t, record.HeaderSize, bl.Size())
}
