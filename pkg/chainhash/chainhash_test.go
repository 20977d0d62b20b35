package chainhash_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/blake3"
	"github.com/zeebo/xxh3"

	"github.com/braidlog/braid/pkg/chainhash"
)

// pattern is the input of the vectors: byte i is i*31+7 mod 256.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*31 + 7)
	}
	return b
}

// The vectors were made with xxhsum, the reference implementation's own tool:
// they pin the hash, its byte order and the construction. They never change.
func TestFrozenVectors(t *testing.T) {
	text, err := os.ReadFile("testdata/vectors.txt")
	require.NoError(t, err)
	seen := 0
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		var prev, inner, next string
		var n int
		_, err := fmt.Sscan(line, &n, &prev, &inner, &next)
		require.NoError(t, err, line)
		got := xxh3.Hash128(pattern(n)).Bytes()
		require.Equal(t, inner, chainhash.Hash(got).String(), "XXH3-128 of %d bytes", n)
		p, err := chainhash.Parse(prev)
		require.NoError(t, err)
		require.Equal(t, next, chainhash.Next(p, pattern(n)).String(), line)
		seen++
	}
	require.GreaterOrEqual(t, seen, 8)
}

func TestZeroInputMatchesThePublishedVector(t *testing.T) {
	// The published XXH3-128 of no bytes with seed 0.
	got := xxh3.Hash128(nil).Bytes()
	require.Equal(t, "99aa06d3014798d86001c324468d497f", chainhash.Hash(got).String())
}

func TestEveryBitAndThePredecessorCount(t *testing.T) {
	batch := pattern(300)
	seen := map[chainhash.Hash]string{}
	note := func(h chainhash.Hash, what string) {
		require.NotContains(t, seen, h, "%s collides", what)
		seen[h] = what
	}
	base := chainhash.Next(chainhash.Hash{1}, batch)
	note(base, "base")
	for bit := range len(batch) * 8 {
		batch[bit/8] ^= 1 << (bit % 8)
		note(chainhash.Next(chainhash.Hash{1}, batch), "batch bit "+strconv.Itoa(bit))
		batch[bit/8] ^= 1 << (bit % 8)
	}
	for bit := range chainhash.Size * 8 {
		prev := chainhash.Hash{1}
		prev[bit/8] ^= 1 << (bit % 8)
		note(chainhash.Next(prev, batch), "prev bit "+strconv.Itoa(bit))
	}
	require.Equal(t, base, chainhash.Next(chainhash.Hash{1}, batch))
	note(chainhash.Next(chainhash.Next(chainhash.Hash{1}, batch[:150]), batch[150:]), "split in two batches")
}

func TestParseAndFromBytesTakeExactly128Bits(t *testing.T) {
	h := chainhash.Next(chainhash.Hash{}, []byte("x"))
	back, err := chainhash.Parse(h.String())
	require.NoError(t, err)
	require.Equal(t, h, back)
	back, err = chainhash.FromBytes(h.Bytes())
	require.NoError(t, err)
	require.Equal(t, h, back)
	require.False(t, h.IsZero())
	require.True(t, chainhash.Hash{}.IsZero())
	for _, bad := range [][]byte{nil, {}, make([]byte, 15), make([]byte, 17)} {
		_, err := chainhash.FromBytes(bad)
		require.ErrorIs(t, err, chainhash.ErrSize)
	}
	for _, bad := range []string{"", "00", "zz" + h.String()[2:], h.String() + "00"} {
		_, err := chainhash.Parse(bad)
		require.ErrorIs(t, err, chainhash.ErrSize)
	}
}

func TestNextAllocatesNothing(t *testing.T) {
	batch := pattern(1024)
	var h chainhash.Hash
	require.Zero(t, testing.AllocsPerRun(100, func() { h = chainhash.Next(h, batch) }))
}

// The table in docs/formats/chain-hash.md is made with
//
//	go test ./chainhash -run '^$' -bench Next -benchmem
//
// All candidates cover the predecessor and the batch's bytes, as an append does.
func BenchmarkNext(b *testing.B) {
	streaming := xxh3.New()
	sha := sha256.New()
	blake := blake3.New()
	var sum [64]byte
	candidates := []struct {
		name string
		next func(prev chainhash.Hash, batch []byte) chainhash.Hash
	}{
		{"xxh3-128-two-step", chainhash.Next},
		{"xxh3-128-streaming", func(prev chainhash.Hash, batch []byte) chainhash.Hash {
			streaming.Reset()
			_, _ = streaming.Write(prev[:])
			_, _ = streaming.Write(batch)
			return streaming.Sum128().Bytes()
		}},
		{"sha256", func(prev chainhash.Hash, batch []byte) chainhash.Hash {
			sha.Reset()
			_, _ = sha.Write(prev[:])
			_, _ = sha.Write(batch)
			return chainhash.Hash(sha.Sum(sum[:0])[:chainhash.Size])
		}},
		{"blake3", func(prev chainhash.Hash, batch []byte) chainhash.Hash {
			blake.Reset()
			_, _ = blake.Write(prev[:])
			_, _ = blake.Write(batch)
			return chainhash.Hash(blake.Sum(sum[:0])[:chainhash.Size])
		}},
	}
	for _, size := range []int{1 << 10, 16 << 10, 256 << 10} {
		batch := pattern(size)
		for _, c := range candidates {
			b.Run(fmt.Sprintf("%s/%dKiB", c.name, size>>10), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				var h chainhash.Hash
				for b.Loop() {
					h = c.next(h, batch)
				}
			})
		}
	}
}
