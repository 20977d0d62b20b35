package record_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
)

// FuzzBatch feeds arbitrary bytes to everything that takes them from outside.
// What is accepted must be whole, walkable, and the same for every entrance.
func FuzzBatch(f *testing.F) {
	for _, codec := range codecs {
		f.Add([]byte(build(f, codec, sample()[:4])))
	}
	buf, _ := run(f)
	f.Add(buf[:2000])
	f.Add(make([]byte, 200))
	f.Fuzz(func(t *testing.T, buf []byte) {
		n, err := record.Prefix(buf)
		require.LessOrEqual(t, n, len(buf))
		require.Equal(t, n == len(buf), err == nil)
		walked := 0
		werr := record.Walk(buf, func(b record.Batch) error {
			require.Equal(t, len(b), b.Length())
			walked += len(b)
			if b.Validate() != nil {
				return nil
			}
			require.Equal(t, b.LastOffsetDelta()+1, b.RecordCount())
			c := record.NewChecker(b.BaseOffset(), nil)
			require.NoError(t, c.Check(b), "a valid batch stands at its own place")
			require.Equal(t, b.EndOffset(), c.End())

			// Moving a batch must not touch what the CRC covers.
			moved := record.Batch(bytes.Clone(b))
			moved.SetBaseOffset(12345)
			moved.SetLeaderEpoch(6)
			require.NoError(t, moved.Validate())
			readAll(t, b)
			return nil
		})
		require.Equal(t, n, walked)
		require.Equal(t, err == nil, werr == nil)
		c := record.NewChecker(0, nil)
		_ = c.Check(buf)
		require.LessOrEqual(t, c.Size(), int64(n))
	})
}

// readAll decodes b; if it is sound, encoding it again gives the same records.
func readAll(t *testing.T, b record.Batch) {
	r := record.NewReader(1 << 20)
	again := record.NewBuilder(record.CodecNone)
	var all []record.Record
	for _ = r.Reset(b); r.Next(); {
		all = append(all, r.Record().Clone())
		if again.Append(r.Record()) != nil {
			return // times too far apart from the first record's
		}
	}
	if r.Err() != nil {
		return
	}
	require.Len(t, all, int(b.RecordCount()))
	_, copied, err := again.Build(nil)
	require.NoError(t, err)
	require.NoError(t, r.Verify(copied))
	require.Equal(t, all, collect(t, copied))
}

// FuzzRecords puts arbitrary bytes behind a header whose CRC fits: the codecs
// and the record decoder see them as they are.
func FuzzRecords(f *testing.F) {
	for _, codec := range codecs {
		b := build(f, codec, sample()[:4])
		f.Add(uint8(codec), int32(4), int64(1_790_000_000_000), []byte(b.Payload()))
	}
	f.Add(uint8(0), int32(1), int64(-1), []byte{})
	f.Fuzz(func(t *testing.T, codec uint8, count int32, base int64, payload []byte) {
		if count < 1 {
			return
		}
		b := mended(build(t, record.CodecNone, []record.Record{{}}), func(b record.Batch) record.Batch {
			b[22] = codec & 7
			putInt32(b, 23, count-1)
			putInt64(b, 27, base)
			putInt32(b, 57, count)
			return append(b[:record.HeaderSize:record.HeaderSize], payload...)
		})
		if b.Validate() == nil {
			readAll(t, b)
		}
		const limit = 1 << 16
		if out, err := record.Decompress(nil, record.Codec(codec&7), payload, limit); err == nil {
			require.LessOrEqual(t, len(out), limit)
		}
	})
}
