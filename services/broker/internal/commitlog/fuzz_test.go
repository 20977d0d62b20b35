package commitlog

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
)

// fixChecksum lets the fuzzer get behind a checksum.
func fixChecksum(data []byte) []byte {
	if len(data) < 4 {
		return data
	}
	data = slices.Clone(data)
	binary.BigEndian.PutUint32(data[len(data)-4:], crc32.Checksum(data[:len(data)-4], castagnoli))
	return data
}

func FuzzDecodeMeta(f *testing.F) {
	f.Add(encodeMeta(Identity{ClusterID: "c", CreationOffset: 5, Partition: 2}))
	f.Fuzz(func(t *testing.T, data []byte) {
		data = fixChecksum(data)
		id, err := decodeMeta(data)
		if err != nil {
			require.ErrorIs(t, err, ErrCorrupt)
			return
		}
		require.Equal(t, data, encodeMeta(id))
	})
}

func FuzzDecodeCheckpoint(f *testing.F) {
	c := checkpoint{
		start: 5, first: border{offset: 3}, recovery: border{offset: 9, chain: chainhash.Hash{1}}, op: opTruncate,
		pending: border{offset: 4}, pendingPosition: 70, clean: cleanEnd{offset: -1},
		lineage: lineage.Lineage{{Leadership: lineage.Leadership{Incarnation: 1, LeaderEpoch: 2}, StartOffset: 0}},
	}
	f.Add(c.encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		data = fixChecksum(data)
		c, err := decodeCheckpoint(data)
		if err != nil {
			require.ErrorIs(t, err, ErrCorrupt)
			return
		}
		require.Equal(t, data, c.encode())
	})
}

func FuzzDecodeIndex(f *testing.F) {
	x := indexFile{
		base: border{offset: 3}, end: border{offset: 30, chain: chainhash.Hash{9}}, size: 900, maxTime: 8,
		entries: []indexEntry{{offset: 3, maxTime: noTimestamp}, {offset: 20, position: 400, maxTime: 7, chain: chainhash.Hash{4}}},
	}
	f.Add(x.encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		data = fixChecksum(data)
		x, err := decodeIndex(data)
		if err != nil {
			require.ErrorIs(t, err, ErrCorrupt)
			return
		}
		require.Equal(t, data, x.encode())
		floorEntry(x.entries, x.base.offset)
	})
}

// FuzzScanSegment scans any bytes as a segment: it never gives out a batch that
// is not valid, and ends where the first invalid one begins.
func FuzzScanSegment(f *testing.F) {
	b := record.NewBuilder(record.CodecNone)
	var data []byte
	for i := range int64(4) {
		b.Reset()
		if err := b.Append(record.Record{Value: bytes.Repeat([]byte("v"), int(i)*20)}); err != nil {
			f.Fatal(err)
		}
		_, out, err := b.Build(nil)
		if err != nil {
			f.Fatal(err)
		}
		out.SetBaseOffset(i)
		out.SetLeaderEpoch(1)
		data = append(data, out...)
	}
	f.Add(data)
	f.Add(data[:len(data)-3])
	l := lineage.Lineage{{Leadership: lineage.Leadership{Incarnation: 1, LeaderEpoch: 1}}}
	f.Fuzz(func(t *testing.T, data []byte) {
		good := 0
		at, err := scanSegment(bytes.NewReader(data), "x", int64(len(data)), scanPoint{}, l, func(b record.Batch, at scanPoint) error {
			require.NoError(t, b.Validate())
			require.EqualValues(t, good, at.position)
			require.Equal(t, at.offset, b.BaseOffset())
			good += len(b)
			return nil
		})
		require.EqualValues(t, good, at.position)
		if good < len(data) {
			require.ErrorIs(t, err, ErrCorrupt)
		} else {
			require.NoError(t, err)
		}
	})
}
