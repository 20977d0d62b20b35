package record_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/invariant"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
)

// twoEpochs has epoch 4 for [100, 110) and epoch 6 from 110 on.
var twoEpochs = lineage.Lineage{
	{Leadership: lineage.Leadership{Incarnation: 1, LeaderEpoch: 4}, StartOffset: 100},
	{Leadership: lineage.Leadership{Incarnation: 1, LeaderEpoch: 6}, StartOffset: 110},
}

// run is four batches of five records at [100, 120), as the lineage has them.
func run(t testing.TB) (buf []byte, ends []int) {
	for i := range 4 {
		b := build(t, codecs[i], sample())
		b.SetBaseOffset(100 + int64(i)*5)
		b.SetLeaderEpoch(int32(4 + i/2*2))
		buf = append(buf, b...)
		ends = append(ends, len(buf))
	}
	return buf, ends
}

func TestCheckerTakesARunInAnyPieces(t *testing.T) {
	buf, ends := run(t)
	c := record.NewChecker(100, twoEpochs)
	require.NoError(t, c.Check(buf))
	require.Equal(t, int64(120), c.End())
	require.Equal(t, int64(len(buf)), c.Size())

	c = record.NewChecker(100, twoEpochs)
	from := 0
	for _, end := range ends {
		require.NoError(t, c.Check(buf[from:end]))
		from = end
	}
	require.Equal(t, int64(120), c.End())
	c = record.NewChecker(105, nil)
	require.NoError(t, c.Check(buf[ends[0]:]), "without a lineage the epoch is not looked at")
	require.NoError(t, c.Check(nil))
}

// Every single bit of a run is covered: what the CRC does not see, base offset,
// length, epoch and magic, the other conditions do (design review F14, I14).
func TestEveryFlippedBitIsFound(t *testing.T) {
	var buf []byte
	for i := range 3 {
		b := build(t, record.CodecNone, sample()[:2])
		b.SetBaseOffset(106 + int64(i)*2)
		b.SetLeaderEpoch(int32(4 + i/2*2))
		buf = append(buf, b...)
	}
	size := len(buf) / 3
	seen := map[record.Check]int{}
	for bit := range len(buf) * 8 {
		buf[bit/8] ^= 1 << (bit % 8)
		c := record.NewChecker(106, twoEpochs)
		err := c.Check(buf)
		var e *record.CheckError
		require.ErrorAs(t, err, &e, "bit %d of byte %d", bit%8, bit/8)
		batch := bit / 8 / size
		require.Equal(t, int64(batch*size), e.Pos, "byte %d", bit/8)
		require.Equal(t, int64(106+2*batch), e.Offset)
		require.Equal(t, e.Pos, c.Size())
		require.Equal(t, e.Offset, c.End())
		seen[e.Check]++
		buf[bit/8] ^= 1 << (bit % 8)
	}
	for _, check := range []record.Check{record.CheckLength, record.CheckHeader, record.CheckBaseOffset, record.CheckEpoch, record.CheckCRC} {
		require.NotZero(t, seen[check], "%v never failed", check)
	}
}

func TestCheckerNamesTheConditionAndThePlace(t *testing.T) {
	buf, ends := run(t)
	second := ends[0]
	straddle := build(t, record.CodecNone, append(sample(), sample()...)[:7])
	straddle.SetBaseOffset(105)
	straddle.SetLeaderEpoch(4)
	for _, tt := range []struct {
		name      string
		change    func([]byte) []byte
		check     record.Check
		pos, off  int64
		got, want int64
		kind      error
	}{
		{"a gap", func(b []byte) []byte { record.Batch(b[second:]).SetBaseOffset(106); return b }, record.CheckBaseOffset, int64(second), 105, 106, 105, record.ErrCorrupt},
		{"an overlap", func(b []byte) []byte { record.Batch(b[second:]).SetBaseOffset(104); return b }, record.CheckBaseOffset, int64(second), 105, 104, 105, record.ErrCorrupt},
		{"an older epoch", func(b []byte) []byte { record.Batch(b[ends[1]:]).SetLeaderEpoch(4); return b }, record.CheckEpoch, int64(ends[1]), 110, 4, 6, record.ErrCorrupt},
		{"a newer epoch", func(b []byte) []byte { record.Batch(b[second:]).SetLeaderEpoch(6); return b }, record.CheckEpoch, int64(second), 105, 6, 4, record.ErrCorrupt},
		{"a batch over a border", func(b []byte) []byte { return append(b[:second:second], straddle...) }, record.CheckEpoch, int64(second), 105, 112, 110, record.ErrCorrupt},
		{"cut in the header", func(b []byte) []byte { return b[:second+20] }, record.CheckLength, int64(second), 105, 20, int64(ends[1] - second), record.ErrShort},
		{"cut in the records", func(b []byte) []byte { return b[:ends[1]-1] }, record.CheckLength, int64(second), 105, int64(ends[1]-second) - 1, int64(ends[1] - second), record.ErrShort},
		{"length one too long", func(b []byte) []byte {
			putInt32(b[second:], 8, int32(ends[1]-second-12+1))
			return b
		}, record.CheckCRC, int64(second), 105, 0, 0, record.ErrCorrupt},
		{"length negative", func(b []byte) []byte { putInt32(b[second:], 8, -7); return b }, record.CheckLength, int64(second), 105, 5, record.HeaderSize, record.ErrCorrupt},
		{"content", func(b []byte) []byte { b[ends[1]-1] ^= 1; return b }, record.CheckCRC, int64(second), 105, 0, 0, record.ErrCorrupt},
		{"magic", func(b []byte) []byte { b[second+16] = 0; return b }, record.CheckHeader, int64(second), 105, 0, 2, record.ErrCorrupt},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := record.NewChecker(100, twoEpochs)
			err := c.Check(tt.change(bytes.Clone(buf)))
			var e *record.CheckError
			require.ErrorAs(t, err, &e)
			require.Equal(t, tt.check, e.Check, "%v", err)
			require.Equal(t, tt.pos, e.Pos)
			require.Equal(t, tt.off, e.Offset)
			if tt.check != record.CheckCRC {
				require.Equal(t, tt.got, e.Got)
				require.Equal(t, tt.want, e.Want)
			}
			require.ErrorIs(t, err, tt.kind)
		})
	}
	c := record.NewChecker(99, twoEpochs)
	below := build(t, record.CodecNone, sample()[:1])
	below.SetBaseOffset(99)
	var e *record.CheckError
	require.ErrorAs(t, c.Next(below), &e)
	require.Equal(t, record.CheckEpoch, e.Check, "nobody wrote below the lineage")
}

func TestHotPathsAllocateNothing(t *testing.T) {
	if invariant.Enabled {
		t.Skip("counted without the race detector, under which pools drop things at random")
	}
	buf, ends := run(t)
	b := record.Batch(buf[:ends[0]])
	bl := record.NewBuilder(record.CodecNone)
	records, out := sample(), make([]byte, 0, 1<<20)
	for name, fn := range map[string]func(){
		"validate": func() { _ = b.Validate() },
		"header":   func() { _, _, _, _ = b.EndOffset(), b.Codec(), b.LastSequence(), b.HasProducer() },
		"producer": func() { _, _ = b.Producer() },
		"set":      func() { b.SetBaseOffset(100); b.SetLeaderEpoch(4) },
		"peek":     func() { _, _ = record.Peek(buf) },
		"short":    func() { _, _ = record.Peek(buf[:20]) },
		"prefix":   func() { _, _ = record.Prefix(buf) },
		"walk": func() {
			n := 0
			_ = record.Walk(buf, func(b record.Batch) error { n += len(b); return nil })
		},
		"batches": func() {
			n := 0
			for b, err := range record.Batches(buf) {
				if err != nil {
					panic("bad")
				}
				n += len(b)
			}
		},
		"check": func() {
			c := record.NewChecker(100, twoEpochs)
			if c.Check(buf) != nil {
				panic("bad")
			}
		},
		"build": func() {
			bl.Reset()
			for _, r := range records {
				_ = bl.Append(r)
			}
			_, _, _ = bl.Build(out)
		},
	} {
		limit := 0.0
		if name == "check" {
			limit = 1 // a Lineage put into the interface; a pointer or a kept one costs none
		}
		require.LessOrEqual(t, testing.AllocsPerRun(50, fn), limit, name)
	}
	for _, codec := range codecs {
		b, r := build(t, codec, sample()), record.NewReader(0)
		perBatch := testing.AllocsPerRun(50, func() {
			for _ = r.Reset(b); r.Next(); {
				_ = r.Record()
			}
			if r.Err() != nil {
				panic(r.Err())
			}
		})
		require.LessOrEqual(t, perBatch, 4.0, "%v: only what the codec itself needs", codec)
		if codec == record.CodecNone {
			require.Zero(t, perBatch)
		}
	}
}

func TestEmptyAndNegativeOffsets(t *testing.T) {
	c := record.NewChecker(math.MaxInt64-3, nil)
	b := build(t, record.CodecNone, sample()[:2])
	b.SetBaseOffset(math.MaxInt64 - 3)
	require.NoError(t, c.Next(b))
	require.Equal(t, int64(math.MaxInt64-1), c.End())
}

func TestCheckerNextWantsExactlyOneBatch(t *testing.T) {
	b := build(t, record.CodecNone, sample()[:2])
	for _, tt := range []struct {
		b    record.Batch
		kind error
	}{{b[:len(b)-1], record.ErrShort}, {append(bytes.Clone(b), 0), record.ErrCorrupt}, {b[:30], record.ErrShort}} {
		c := record.NewChecker(0, nil)
		err := c.Next(tt.b)
		var e *record.CheckError
		require.ErrorAs(t, err, &e)
		require.Equal(t, record.CheckLength, e.Check)
		require.ErrorIs(t, err, tt.kind)
	}
}

func TestErrorsSayWhatAndWhere(t *testing.T) {
	buf, ends := run(t)
	buf[ends[0]+16] = 1
	err := record.Walk(buf, func(record.Batch) error { return nil })
	require.ErrorContains(t, err, "corrupt batch at byte 54456: magic: not a batch of version 2 (got 1, want 2)")
	c := record.NewChecker(100, twoEpochs)
	require.ErrorContains(t, c.Check(buf), "header check failed at byte 54456, offset 105: got 1, want 2")

	bl := record.NewBuilder(record.CodecNone)
	bl.SetCodec(record.CodecGzip)
	require.NoError(t, bl.Append(record.Record{Value: []byte("v")}))
	_, b, err := bl.Build(nil)
	require.NoError(t, err)
	cut := mended(b, func(b record.Batch) record.Batch { return b[:len(b)-4] })
	r := record.NewReader(0)
	require.ErrorContains(t, r.Reset(cut), "records: not decodable as gzip")
	require.False(t, r.Next())
	b.SetBaseOffset(70)
	require.NoError(t, r.Reset(b))
	require.True(t, r.Next())
	require.Equal(t, int64(70), r.Offset())
	require.ErrorContains(t, rawErr(t), "corrupt batch in record 1: offset delta: not the next one (got 0, want 1)")
	require.Equal(t, "field(99)", record.Field(99).String())
	require.Equal(t, "check(99)", record.Check(99).String())
}

// rawErr is the error of a batch whose second record repeats an offset delta.
func rawErr(t *testing.T) error {
	one := []byte{12, 0, 0, 0, 1, 1, 0} // length 6: attributes, deltas 0 and 0, null, null, no header
	return new(record.Reader).Verify(rawRecords(t, 2, append(one, one...)))
}
