package record_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
)

// allocated is how many bytes fn allocates in total.
func allocated(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Field report B013: a header that claims 2 GiB, followed by zeros.
func TestAHugeLengthAllocatesNothingHuge(t *testing.T) {
	good := build(t, record.CodecNone, sample())
	for _, claim := range []int32{math.MaxInt32, math.MaxInt32 - 11, 1 << 30, math.MinInt32, -1, -61, 0, 1, 48} {
		torn := append(bytes.Clone(good), make([]byte, 4096)...)
		copy(torn[len(good):], good[:record.HeaderSize])
		putInt32(torn[len(good):], 8, claim)
		t.Run(fmt.Sprint(claim), func(t *testing.T) {
			got := allocated(func() {
				size, err := record.Peek(torn[len(good):])
				require.ErrorIs(t, err, record.ErrCorrupt)
				require.Zero(t, size)
				n, err := record.Prefix(torn)
				require.ErrorIs(t, err, record.ErrCorrupt)
				require.Equal(t, len(good), n, "the good part is told apart from the tail")
				require.ErrorIs(t, record.Batch(torn[len(good):]).Validate(), record.ErrCorrupt)
				c := record.NewChecker(0, nil)
				require.ErrorIs(t, c.Check(torn), record.ErrCorrupt)
				require.Equal(t, int64(5), c.End())
				require.Equal(t, int64(len(good)), c.Size())
			})
			require.Less(t, got, uint64(1<<20))
		})
	}
	_, err := record.Peek(make([]byte, 4096))
	require.ErrorIs(t, err, record.ErrCorrupt, "zeros of a preallocated file are no batch")
}

func TestPeekTellsShortFromCorrupt(t *testing.T) {
	b := build(t, record.CodecNone, sample()[:1])
	for n := range len(b) {
		size, err := record.Peek(b[:n])
		require.ErrorIs(t, err, record.ErrShort, "%d bytes", n)
		if n < 17 {
			require.Zero(t, size)
		} else {
			require.Equal(t, len(b), size)
		}
	}
	size, err := record.Peek(append(bytes.Clone(b), 1, 2, 3))
	require.NoError(t, err)
	require.Equal(t, len(b), size)
	_, err = record.PeekLimit(b, len(b)-1)
	require.ErrorIs(t, err, record.ErrTooLarge)
	_, err = record.PeekLimit(b, len(b))
	require.NoError(t, err)

	large := bytes.Clone(b)
	putInt32(large, 8, record.MaxBatchSize-12)
	size, err = record.Peek(large)
	require.ErrorIs(t, err, record.ErrShort)
	require.Equal(t, record.MaxBatchSize, size)
	putInt32(large, 8, record.MaxBatchSize-11)
	_, err = record.Peek(large)
	require.ErrorIs(t, err, record.ErrCorrupt)
}

func TestWalkStopsWhereTheWholeBatchesEnd(t *testing.T) {
	one, two := build(t, record.CodecNone, sample()[:1]), build(t, record.CodecLZ4, sample())
	buf := append(bytes.Clone(one), two...)
	var got []record.Batch
	require.NoError(t, record.Walk(buf, func(b record.Batch) error { got = append(got, b); return nil }))
	require.Equal(t, []record.Batch{one, two}, got)
	require.Equal(t, len(got[0]), cap(got[0]))
	require.NoError(t, record.Walk(nil, nil))

	stop := errors.New("stop")
	require.ErrorIs(t, record.Walk(buf, func(record.Batch) error { return stop }), stop)

	for cut := 1; cut < len(buf); cut++ {
		whole := 0
		if cut >= len(one) {
			whole = len(one)
		}
		n, err := record.Prefix(buf[:cut])
		require.Equal(t, whole, n)
		if cut == whole {
			require.NoError(t, err)
			continue
		}
		var e *record.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, whole, e.Pos)
		require.ErrorIs(t, err, record.ErrShort)
		err = record.Walk(buf[:cut], func(record.Batch) error { return nil })
		require.ErrorIs(t, err, record.ErrShort)
		var last error
		count := 0
		for b, err := range record.Batches(buf[:cut]) {
			if last = err; err == nil {
				count += len(b)
			}
		}
		require.ErrorIs(t, last, record.ErrShort)
		require.Equal(t, whole, count)
	}
	bad := bytes.Clone(buf)
	bad[len(one)+16] = 1
	err := record.Walk(bad, func(record.Batch) error { return nil })
	var e *record.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, record.FieldMagic, e.Field)
	require.Equal(t, len(one), e.Pos)
	for _, err := range record.Batches(buf) {
		require.NoError(t, err)
		break
	}
}

// rawRecords makes a batch around hand-made record bytes.
func rawRecords(t testing.TB, count int32, raw []byte) record.Batch {
	good := build(t, record.CodecNone, []record.Record{{Timestamp: 5}})
	return mended(good, func(b record.Batch) record.Batch {
		putInt32(b, 23, count-1)
		putInt32(b, 57, count)
		return append(b[:record.HeaderSize:record.HeaderSize], raw...)
	})
}

func TestHostileRecordsAreRefusedByField(t *testing.T) {
	v := func(parts ...any) []byte { // ints become varints, bytes stay
		var out []byte
		for _, p := range parts {
			switch p := p.(type) {
			case int:
				out = binary.AppendVarint(out, int64(p))
			case []byte:
				out = append(out, p...)
			}
		}
		return out
	}
	wrap := func(body []byte) []byte { return append(v(len(body)), body...) }
	attrs := []byte{0}
	overlong := bytes.Repeat([]byte{0xff}, 10)
	for _, tt := range []struct {
		name  string
		count int32
		raw   []byte
		field record.Field
		index int
	}{
		{"nothing there", 1, nil, record.FieldRecordLength, 0},
		{"length negative", 1, v(-5), record.FieldRecordLength, 0},
		{"length huge", 1, v(math.MaxInt32, attrs), record.FieldRecordLength, 0},
		{"length beyond 64 bits", 1, overlong, record.FieldRecordLength, 0},
		{"length zero", 1, v(0), record.FieldRecordLength, 0},
		{"length unfinished", 1, []byte{0x80}, record.FieldRecordLength, 0},
		{"time delta missing", 1, wrap(v(attrs)), record.FieldTimestampDelta, 0},
		{"time overflows", 1, wrap(v(attrs, math.MaxInt64, 0, -1, -1, 0)), record.FieldTimestampDelta, 0},
		{"offset delta missing", 1, wrap(v(attrs, 0)), record.FieldOffsetDelta, 0},
		{"offset delta 1 first", 1, wrap(v(attrs, 0, 1, -1, -1, 0)), record.FieldOffsetDelta, 0},
		{"offset delta twice", 2, append(wrap(v(attrs, 0, 0, -1, -1, 0)), wrap(v(attrs, 0, 0, -1, -1, 0))...), record.FieldOffsetDelta, 1},
		{"key length -2", 1, wrap(v(attrs, 0, 0, -2)), record.FieldKey, 0},
		{"key length huge", 1, wrap(v(attrs, 0, 0, math.MaxInt32)), record.FieldKey, 0},
		{"value length huge", 1, wrap(v(attrs, 0, 0, -1, 1<<40)), record.FieldValue, 0},
		{"value missing", 1, wrap(v(attrs, 0, 0, -1)), record.FieldValue, 0},
		{"header count huge", 1, wrap(v(attrs, 0, 0, -1, -1, math.MaxInt32)), record.FieldHeaders, 0},
		{"header count negative", 1, wrap(v(attrs, 0, 0, -1, -1, -1)), record.FieldHeaders, 0},
		{"header without a key", 1, wrap(v(attrs, 0, 0, -1, -1, 1, -1, -1)), record.FieldHeaders, 0},
		{"header key too long", 1, wrap(v(attrs, 0, 0, -1, -1, 1, 9, -1)), record.FieldHeaders, 0},
		{"header value too long", 1, wrap(v(attrs, 0, 0, -1, -1, 1, 0, 9)), record.FieldHeaders, 0},
		{"bytes left in the record", 1, wrap(v(attrs, 0, 0, -1, -1, 0, 0)), record.FieldRecordLength, 0},
		{"bytes left in the batch", 1, append(wrap(v(attrs, 0, 0, -1, -1, 0)), 0), record.FieldRecords, 1},
		{"fewer records than counted", 2, wrap(v(attrs, 0, 0, -1, -1, 0)), record.FieldRecordLength, 1},
		{"two billion records", math.MaxInt32, wrap(v(attrs, 0, 0, -1, -1, 0)), record.FieldRecordLength, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := rawRecords(t, tt.count, tt.raw)
			require.NoError(t, b.Validate(), "the CRC of hostile bytes fits")
			var err error
			got := allocated(func() { err = new(record.Reader).Verify(b) })
			require.ErrorIs(t, err, record.ErrCorrupt)
			var e *record.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, tt.field, e.Field, "%v", err)
			require.Equal(t, tt.index, e.Record)
			require.Less(t, got, uint64(64<<10))
		})
	}
}

func TestVerifyComparesTheMaxTimestamp(t *testing.T) { // B081
	for _, wrong := range []int64{0, 1_790_000_000_000, math.MaxInt64} {
		b := mended(build(t, record.CodecZstd, sample()), func(b record.Batch) record.Batch { putInt64(b, 35, wrong); return b })
		require.NoError(t, b.Validate())
		err := new(record.Reader).Verify(b)
		var e *record.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, record.FieldMaxTimestamp, e.Field)
		require.Equal(t, int64(1_790_000_000_007), e.Want)
	}
}

func TestDecompressionStopsAtTheLimit(t *testing.T) {
	const size = 8 << 20
	zeros := make([]byte, size)
	for _, codec := range codecs {
		t.Run(codec.String(), func(t *testing.T) {
			packed := must(record.Compress(nil, codec, zeros))
			got, err := record.Decompress(nil, codec, packed, size)
			require.NoError(t, err, "exactly the limit passes")
			require.True(t, bytes.Equal(zeros, got))
			_, err = record.Decompress(nil, codec, packed, size-1)
			require.ErrorIs(t, err, record.ErrTooLarge)
			const limit = 64 << 10
			used := allocated(func() { _, err = record.Decompress(nil, codec, packed, limit) })
			require.ErrorIs(t, err, record.ErrTooLarge)
			require.Less(t, used, uint64(6<<20), "a bomb costs the limit and the codec's own buffers, not what it unfolds to")
			if codec == record.CodecNone {
				return
			}
			buf := make([]byte, 10, 16)
			got, err = record.Decompress(buf, codec, packed, size)
			require.NoError(t, err)
			require.Len(t, got, size, "what was in dst is overwritten")
		})
	}
	_, err := record.Decompress(nil, record.Codec(6), nil, 10)
	require.ErrorIs(t, err, record.ErrUnsupported)
	_, err = record.Compress(nil, record.Codec(6), nil)
	require.ErrorIs(t, err, record.ErrUnsupported)
}

func TestClaimsOfSizesAllocateNothing(t *testing.T) {
	// A zstd frame with a single segment of 2 MiB claimed, one tiny raw block.
	frame := []byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0}
	frame = binary.LittleEndian.AppendUint32(frame, 48<<20)
	frame = append(frame, 0x09, 0, 0, 'x') // last block, raw, one byte
	snappyClaim := append(binary.AppendUvarint(nil, 48<<20), 0, 'x')
	xerial := []byte("\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
	for name, tt := range map[string]struct {
		codec record.Codec
		src   []byte
	}{
		"zstd content size":     {record.CodecZstd, frame},
		"snappy length":         {record.CodecSnappy, snappyClaim},
		"snappy length 4 GiB":   {record.CodecSnappy, append(binary.AppendUvarint(nil, math.MaxUint32), 0, 'x')},
		"framed snappy length":  {record.CodecSnappy, append(append(bytes.Clone(xerial), 0, 0, 0, byte(len(snappyClaim))), snappyClaim...)},
		"framed block 4 GiB":    {record.CodecSnappy, append(bytes.Clone(xerial), 0xff, 0xff, 0xff, 0xff)},
		"framed block cut":      {record.CodecSnappy, append(bytes.Clone(xerial), 0, 0)},
		"framed header cut":     {record.CodecSnappy, xerial[:12]},
		"gzip cut":              {record.CodecGzip, []byte{0x1f, 0x8b, 8, 0}},
		"lz4 legacy frame":      {record.CodecLZ4, []byte{0x02, 0x21, 0x4c, 0x18, 0xff, 0xff, 0xff, 0x7f}},
		"lz4 block of 2 GiB":    {record.CodecLZ4, []byte{0x04, 0x22, 0x4d, 0x18, 0x60, 0x40, 0x82, 0xff, 0xff, 0xff, 0x7f}},
		"lz4 nothing":           {record.CodecLZ4, nil},
		"snappy nothing":        {record.CodecSnappy, nil},
		"gzip nothing":          {record.CodecGzip, nil},
		"zstd cut in the magic": {record.CodecZstd, frame[:3]},
	} {
		t.Run(name, func(t *testing.T) {
			_, _ = record.Decompress(nil, tt.codec, tt.src, 1<<20) // fill the pools
			var err error
			used := allocated(func() { _, err = record.Decompress(nil, tt.codec, tt.src, record.DefaultDecompressLimit) })
			require.Error(t, err)
			require.True(t, errors.Is(err, record.ErrCorrupt) || errors.Is(err, record.ErrTooLarge), "%v", err)
			require.Less(t, used, uint64(256<<10))
		})
	}
}

func TestCutCompressedRecordsAreNoticed(t *testing.T) {
	for _, codec := range codecs[1:] {
		t.Run(codec.String(), func(t *testing.T) {
			b := build(t, codec, sample())
			for cut := 1; cut < min(64, len(b)-record.HeaderSize); cut++ {
				short := mended(b, func(b record.Batch) record.Batch { return b[:len(b)-cut] })
				require.NoError(t, short.Validate())
				require.Error(t, new(record.Reader).Verify(short), "%d bytes missing", cut)
			}
		})
	}
}

// A record made of headers takes two bytes for each in the batch, and an entry of
// 48 bytes when decoded: it is refused before any is made.
func TestARecordOfNothingButHeadersCostsLittle(t *testing.T) {
	headers := func(n int) []byte {
		body := binary.AppendVarint([]byte{0, 0, 0, 1, 1}, int64(n))
		body = append(body, bytes.Repeat([]byte{0, 1}, n)...) // empty keys, null values
		return append(binary.AppendVarint(nil, int64(len(body))), body...)
	}
	most := rawRecords(t, 1, headers(record.MaxHeaders))
	require.Len(t, collect(t, most)[0].Headers, record.MaxHeaders)
	require.NoError(t, record.NewReader(0).Verify(most))

	b := rawRecords(t, 1, headers(16<<20))
	r := record.NewReader(0)
	var err error
	used := allocated(func() { err = r.Verify(b) })
	require.ErrorIs(t, err, record.ErrTooLarge)
	var e *record.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, record.Error{Kind: record.ErrTooLarge, Field: record.FieldHeaders, Reason: "too many", Got: 16 << 20, Want: record.MaxHeaders}, *e)
	require.Less(t, used, uint64(64<<10), "the batch has 32 MiB")
	require.ErrorIs(t, r.Verify(rawRecords(t, 1, headers(record.MaxHeaders+1))), record.ErrTooLarge)

	bl := record.NewBuilder(record.CodecNone)
	require.ErrorIs(t, bl.Append(record.Record{Headers: make([]record.Header, record.MaxHeaders+1)}), record.ErrTooLarge)
	require.Zero(t, bl.Len())
}

// Compressors are pooled: what one batch leaves in them, errors and limits
// included, must not reach the next.
func TestCodecsAreSafeForConcurrentUse(t *testing.T) {
	var workers errgroup
	for i := range 8 {
		workers.run(func() error {
			r := record.NewReader(0)
			for round := range 20 {
				codec := codecs[(i+round)%len(codecs)]
				src := bytes.Repeat([]byte{byte(i), byte(round), 'x'}, 20_000+i)
				packed, err := record.Compress(nil, codec, src)
				if err != nil {
					return err
				}
				if _, err := record.Decompress(nil, codec, packed, 100); !errors.Is(err, record.ErrTooLarge) {
					return fmt.Errorf("%v: limit: %w", codec, err)
				}
				if _, err := record.Decompress(nil, codec, packed[:len(packed)/2], len(src)); codec != record.CodecNone && err == nil {
					return fmt.Errorf("%v: half of it decoded", codec)
				}
				out, err := record.Decompress(nil, codec, packed, len(src))
				if err != nil || !bytes.Equal(src, out) {
					return fmt.Errorf("%v: %w", codec, err)
				}
				bl := record.NewBuilder(codec)
				if err := bl.Append(record.Record{Timestamp: int64(round), Value: src}); err != nil {
					return err
				}
				_, b, err := bl.Build(nil)
				if err != nil {
					return err
				}
				if err := r.Verify(b); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, workers.wait())
}

// errgroup joins goroutines and their errors.
type errgroup struct {
	wg   sync.WaitGroup
	mu   sync.Mutex // guards errs
	errs []error
}

func (g *errgroup) run(fn func() error) {
	g.wg.Go(func() {
		err := fn()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.errs = append(g.errs, err)
	})
}

func (g *errgroup) wait() error {
	g.wg.Wait()
	return errors.Join(g.errs...)
}

// A zstd frame without a content size, as streaming clients write, and several
// frames or members in one batch.
func TestStreamedAndConcatenatedFrames(t *testing.T) {
	src := bytes.Repeat([]byte("0123456789abcdef"), 20_000)
	var streamed bytes.Buffer
	w, err := zstd.NewWriter(&streamed, zstd.WithEncoderConcurrency(1))
	require.NoError(t, err)
	for part := src; len(part) > 0; part = part[len(part)/2+1:] {
		_, err := w.Write(part[:len(part)/2+1])
		require.NoError(t, err)
		require.NoError(t, w.Flush())
	}
	require.NoError(t, w.Close())
	got, err := record.Decompress(nil, record.CodecZstd, streamed.Bytes(), len(src))
	require.NoError(t, err)
	require.True(t, bytes.Equal(src, got))
	_, err = record.Decompress(nil, record.CodecZstd, streamed.Bytes(), len(src)-1)
	require.ErrorIs(t, err, record.ErrTooLarge)

	streamed.Reset()
	w.Reset(&streamed)
	for range 256 {
		_, err := w.Write(make([]byte, 1<<20))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	used := allocated(func() { _, err = record.Decompress(nil, record.CodecZstd, streamed.Bytes(), 1<<20) })
	require.ErrorIs(t, err, record.ErrTooLarge)
	require.Less(t, used, uint64(64<<20), "256 MiB of zeros stop early")

	for _, codec := range []record.Codec{record.CodecGzip, record.CodecLZ4, record.CodecZstd} {
		packed := must(record.Compress(nil, codec, src[:1000]))
		packed = must(record.Compress(packed, codec, src[1000:]))
		got, err := record.Decompress(nil, codec, packed, len(src))
		require.NoError(t, err, codec)
		require.True(t, bytes.Equal(src, got), codec)
		_, err = record.Decompress(nil, codec, packed, len(src)-1)
		require.ErrorIs(t, err, record.ErrTooLarge, codec)
	}
}
