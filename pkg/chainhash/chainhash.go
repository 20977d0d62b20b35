package chainhash

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Size is the size of a [Hash] in bytes.
const Size = 16

// ErrSize is returned for bytes or text that can't be a [Hash].
var ErrSize = errors.New("chainhash: not a 128-bit hash")

// Hash is the chain hash at a batch border, in canonical form: the high 64
// bits, then the low 64 bits, each big-endian. The zero Hash is that of a log
// at its start, before its first batch, whatever offset that has.
type Hash [Size]byte

// Next is the hash at the end of batch in a log whose hash at the batch's base
// is prev. batch is one whole stored batch, with its final base offset and
// leader epoch; it is read once, not copied and not kept. Next allocates
// nothing.
func Next(prev Hash, batch []byte) Hash {
	var link [2 * Size]byte
	copy(link[:Size], prev[:])
	put(link[Size:], xxh3.Hash128(batch))
	var next Hash
	put(next[:], xxh3.Hash128(link[:]))
	return next
}

func put(dst []byte, h xxh3.Uint128) {
	binary.BigEndian.PutUint64(dst, h.Hi)
	binary.BigEndian.PutUint64(dst[8:], h.Lo)
}

// FromBytes reads the 16 bytes that a Hash is stored as. It fails with
// [ErrSize] on any other length: an absent hash must not pass for the zero one.
func FromBytes(b []byte) (Hash, error) {
	if len(b) != Size {
		return Hash{}, fmt.Errorf("%w: %d bytes", ErrSize, len(b))
	}
	return Hash(b), nil
}

// Parse is the inverse of [Hash.String].
func Parse(s string) (Hash, error) {
	b, err := hex.DecodeString(s)
	if err != nil {
		return Hash{}, fmt.Errorf("%w: %w", ErrSize, err)
	}
	return FromBytes(b)
}

// Bytes is the stored form of h, in a new slice.
func (h Hash) Bytes() []byte { return h[:] }

// IsZero says whether h is the hash of an empty log.
func (h Hash) IsZero() bool { return h == Hash{} }

// String is h as 32 hexadecimal digits in stored order.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }
