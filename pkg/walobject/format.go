package walobject

import (
	"encoding/binary"
	"hash/crc32"
)

// FormatVersion is the version that this package writes, and the only one it reads.
const FormatVersion = 1

// Limits of the format. They bound what a reader may be made to do.
const (
	// TrailerSize is the size of the trailer in bytes.
	TrailerSize = 32
	// MaxRanges is the largest number of ranges in an object.
	MaxRanges = 4096
	// MaxFooterSize is the largest footer in bytes.
	MaxFooterSize = 32 << 20
	// MaxDataSize is the largest sum of range bytes. It is far above what a
	// remote-log manager cuts; a trailer that claims more is damaged.
	MaxDataSize = 4 << 30
	// MaxAttempt is the largest attempt that a name has room for.
	MaxAttempt = 0xffff
)

// magic ends every combined object.
const magic = "BraidWAL"

// Positions in the trailer. All numbers are big-endian, as in record batches.
const (
	posFooterSize = 0  // u32
	posFooterCRC  = 4  // u32
	posVersion    = 8  // u16
	posReserved   = 10 // u16, 0
	posTrailerCRC = 12 // u32, of the other 28 bytes
	posDataSize   = 16 // u64
	posMagic      = 24 // 8 bytes
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Trailer is the decoded trailer of an object.
type Trailer struct {
	// FooterSize and FooterCRC32C describe the footer.
	FooterSize   int64
	FooterCRC32C uint32
	// DataSize is the length of the ranges together: the footer's position.
	DataSize int64
}

// Tail is how many bytes at the end of the object hold footer and trailer.
func (t Trailer) Tail() int64 { return t.FooterSize + TrailerSize }

// ObjectSize is the size of the whole object.
func (t Trailer) ObjectSize() int64 { return t.DataSize + t.Tail() }

// encode returns the trailer's bytes.
func (t Trailer) encode() [TrailerSize]byte {
	var b [TrailerSize]byte
	binary.BigEndian.PutUint32(b[posFooterSize:], uint32(t.FooterSize))
	binary.BigEndian.PutUint32(b[posFooterCRC:], t.FooterCRC32C)
	binary.BigEndian.PutUint16(b[posVersion:], FormatVersion)
	binary.BigEndian.PutUint64(b[posDataSize:], uint64(t.DataSize))
	copy(b[posMagic:], magic)
	binary.BigEndian.PutUint32(b[posTrailerCRC:], trailerCRC(b[:]))
	return b
}

// trailerCRC sums the trailer without the field that holds the sum.
func trailerCRC(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:posTrailerCRC], castagnoli), castagnoli, b[posDataSize:TrailerSize])
}

// combineCRC is the CRC32C of two runs of bytes one after the other, given the
// sum of each and the length of the second: the first sum is multiplied by
// x^(8*length) modulo the polynomial, which takes a step per bit of the length.
func combineCRC(first, second uint32, secondLen int64) uint32 {
	shift := uint32(1) << 31 // x^0; the sums are bit-reversed
	for n, k := uint64(secondLen), 3; n != 0; n, k = n>>1, k+1 {
		if n&1 != 0 {
			shift = multiply(powers[k], shift)
		}
	}
	return multiply(shift, first) ^ second
}

// powers holds x^(2^k) modulo the polynomial.
var powers = func() (t [64]uint32) {
	p := uint32(1) << 30 // x^1
	for k := range t {
		t[k] = p
		p = multiply(p, p)
	}
	return t
}()

// multiply is a*b modulo the polynomial, over GF(2), bits reversed.
func multiply(a, b uint32) (product uint32) {
	for m := uint32(1) << 31; m != 0 && a&(m|(m-1)) != 0; m >>= 1 {
		if a&m != 0 {
			product ^= b
		}
		if b&1 != 0 {
			b = b>>1 ^ crc32.Castagnoli
		} else {
			b >>= 1
		}
	}
	return product
}
