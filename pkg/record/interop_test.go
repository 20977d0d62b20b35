package record_test

import (
	"bytes"
	"encoding/hex"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/snappy/xerial"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/braidlog/braid/pkg/record"
)

// franzDecode reads a run of batches as a franz-go consumer does, CRC and
// codec included.
func franzDecode(t testing.TB, raw []byte) []*kgo.Record {
	t.Helper()
	part := kmsg.NewFetchResponseTopicPartition()
	part.RecordBatches = raw
	fp, _ := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{Topic: "t"}, &part, kgo.DefaultDecompressor(), nil)
	require.NoError(t, fp.Err)
	return fp.Records
}

func sameAsFranz(t testing.TB, want []record.Record, base int64, got []*kgo.Record) {
	t.Helper()
	require.Len(t, got, len(want))
	for i, w := range want {
		g := got[i]
		require.Equal(t, base+int64(i), g.Offset)
		require.Equal(t, time.UnixMilli(w.Timestamp).UTC(), g.Timestamp.UTC())
		require.Equal(t, w.Key, g.Key)
		require.Equal(t, w.Value, g.Value)
		require.Len(t, g.Headers, len(w.Headers))
		for j, h := range w.Headers {
			require.Equal(t, string(h.Key), g.Headers[j].Key)
			require.Equal(t, h.Value, g.Headers[j].Value)
		}
	}
}

func TestFranzGoReadsOurBatches(t *testing.T) {
	for _, codec := range codecs {
		t.Run(codec.String(), func(t *testing.T) {
			first, second := build(t, codec, sample()), build(t, codec, sample()[:2])
			first.SetBaseOffset(40)
			second.SetBaseOffset(45)
			first.SetLeaderEpoch(3)
			second.SetLeaderEpoch(4)
			got := franzDecode(t, append(bytes.Clone(first), second...))
			require.Len(t, got, 7)
			sameAsFranz(t, sample(), 40, got[:5])
			sameAsFranz(t, sample()[:2], 45, got[5:])
			require.Equal(t, int32(3), got[0].LeaderEpoch)
			require.Equal(t, int32(4), got[6].LeaderEpoch)

			var kb kmsg.RecordBatch
			require.NoError(t, kb.ReadFrom(first))
			require.Equal(t, first.MaxTimestamp(), kb.MaxTimestamp)
			require.Equal(t, first.RecordCount(), kb.NumRecords)
			require.Equal(t, first.CRC(), uint32(kb.CRC))
			require.Equal(t, first.Attributes(), kb.Attributes)
		})
	}
}

// encodeFranz builds a batch with franz-go's schema types and compressor.
func encodeFranz(t testing.TB, codec kgo.CompressionCodec, records []record.Record) record.Batch {
	t.Helper()
	var raw []byte
	base, largest := records[0].Timestamp, records[0].Timestamp
	for i, r := range records {
		kr := kmsg.Record{TimestampDelta64: r.Timestamp - base, OffsetDelta: int32(i), Key: r.Key, Value: r.Value}
		for _, h := range r.Headers {
			kr.Headers = append(kr.Headers, kmsg.Header{Key: string(h.Key), Value: h.Value})
		}
		body := kr.AppendTo(nil) // its length field is 0, one byte
		kr.Length = int32(len(body) - 1)
		raw = kr.AppendTo(raw)
		largest = max(largest, r.Timestamp)
	}
	payload, used := raw, kgo.CodecNone
	compressor, err := kgo.DefaultCompressor(codec)
	require.NoError(t, err)
	if compressor != nil {
		payload, used = compressor.Compress(new(bytes.Buffer), raw)
		payload = bytes.Clone(payload)
	}
	kb := kmsg.RecordBatch{
		FirstOffset: 7, Length: int32(record.HeaderSize - 12 + len(payload)), PartitionLeaderEpoch: 2, Magic: 2,
		Attributes: int16(used), LastOffsetDelta: int32(len(records) - 1), FirstTimestamp: base, MaxTimestamp: largest,
		ProducerID: 77, ProducerEpoch: 1, FirstSequence: 500, NumRecords: int32(len(records)), Records: payload,
	}
	out := kb.AppendTo(nil)
	kb.CRC = int32(crc32.Checksum(out[21:], crc32.MakeTable(crc32.Castagnoli)))
	return kb.AppendTo(nil)
}

func TestWeReadFranzGosBatches(t *testing.T) {
	for _, codec := range []kgo.CompressionCodec{
		kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression(),
	} {
		b := encodeFranz(t, codec, sample())
		t.Run(b.Codec().String(), func(t *testing.T) {
			require.NoError(t, b.Validate())
			require.NoError(t, new(record.Reader).Verify(b))
			require.Equal(t, wantRecords(sample()), collect(t, b))
			require.Equal(t, int64(7), b.BaseOffset())
			require.Equal(t, int64(77), b.ProducerID())
			require.Equal(t, int16(1), b.ProducerEpoch())
			require.Equal(t, int32(504), b.LastSequence())
		})
	}
	ours := build(t, record.CodecNone, sample())
	theirs := encodeFranz(t, kgo.NoCompression(), sample())
	require.Equal(t, []byte(ours.Payload()), []byte(theirs.Payload()), "uncompressed records are the same bytes")
}

// The franz-go-*.hex files are what a franz-go v1.22.3 producer sent for the
// sample records, taken off the wire; its snappy is raw, not framed.
func TestBatchesOffTheWireOfARealClient(t *testing.T) {
	for _, codec := range codecs {
		t.Run(codec.String(), func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("testdata", "golden", "franz-go-"+codec.String()+".hex"))
			require.NoError(t, err)
			raw, err := hex.DecodeString(strings.TrimSpace(string(text)))
			require.NoError(t, err)
			b := record.Batch(raw)
			require.NoError(t, b.Validate())
			require.Equal(t, codec, b.Codec())
			require.NoError(t, new(record.Reader).Verify(b))
			require.Equal(t, wantRecords(sample()), collect(t, b))
			require.Equal(t, int32(-1), b.LeaderEpoch())
			p, ok := b.Producer()
			require.True(t, ok)
			require.Equal(t, int32(4), p.LastSequence)
		})
	}
}

func TestSnappyIsReadFramedAndRaw(t *testing.T) {
	var src []byte
	for i := range 9000 {
		src = append(src, "some text "...)
		src = append(src, byte(i), byte(i>>8))
	}
	const limit = 1 << 20
	for name, packed := range map[string][]byte{
		"raw":                snappy.Encode(nil, src),
		"framed by us":       must(record.Compress(nil, record.CodecSnappy, src)),
		"framed by a second": xerial.EncodeBetter(nil, src),
	} {
		got, err := record.Decompress(nil, record.CodecSnappy, packed, limit)
		require.NoError(t, err, name)
		require.True(t, bytes.Equal(src, got), name)
		got, err = xerial.Decode(packed)
		require.NoError(t, err, name)
		require.True(t, bytes.Equal(src, got), name)
	}
	packed := must(record.Compress(nil, record.CodecSnappy, src))
	require.Equal(t, "\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01", string(packed[:16]))
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}
