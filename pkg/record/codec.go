package record

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// Codec is how a batch's records are compressed, as the attributes number it.
type Codec uint8

// The codecs of Kafka's format.
const (
	CodecNone   Codec = 0
	CodecGzip   Codec = 1
	CodecSnappy Codec = 2
	CodecLZ4    Codec = 3
	CodecZstd   Codec = 4
)

var codecNames = [...]string{CodecNone: "none", CodecGzip: "gzip", CodecSnappy: "snappy", CodecLZ4: "lz4", CodecZstd: "zstd"}

// Valid says whether c is one of the codecs above.
func (c Codec) Valid() bool { return c <= CodecZstd }

// String is the codec's name in configuration and logs.
func (c Codec) String() string {
	if c.Valid() {
		return codecNames[c]
	}
	return fmt.Sprintf("codec(%d)", uint8(c))
}

// ParseCodec is the inverse of [Codec.String].
func ParseCodec(name string) (Codec, error) {
	if i := slices.Index(codecNames[:], name); i >= 0 {
		return Codec(i), nil
	}
	return 0, fmt.Errorf("record: no codec %q, only %q", name, codecNames)
}

// Compress appends src, compressed, to dst: gzip at its default level; snappy
// in the xerial framing that Kafka's Java clients write (blocks of 32 KiB); an
// lz4 frame of independent 64 KiB blocks; one zstd frame. Safe for concurrent
// use.
func Compress(dst []byte, c Codec, src []byte) ([]byte, error) {
	switch c {
	case CodecNone:
		return append(dst, src...), nil
	case CodecGzip:
		z := gzipWriters.Get().(*gzipWriter)
		defer gzipWriters.Put(z)
		z.out.b = dst
		z.w.Reset(&z.out)
		return z.out.finish(z.w, src)
	case CodecSnappy:
		return appendXerial(dst, src), nil
	case CodecLZ4:
		z := lz4Writers.Get().(*lz4Writer)
		defer lz4Writers.Put(z)
		z.out.b = dst
		z.w.Reset(&z.out)
		return z.out.finish(z.w, src)
	case CodecZstd:
		z := zstdEncoders.Get().(*zstd.Encoder)
		defer zstdEncoders.Put(z)
		return z.EncodeAll(src, dst), nil
	}
	return nil, fail(ErrUnsupported, FieldAttributes, "unknown codec", int64(c), int64(CodecZstd))
}

// The pooled compressors keep their tables between batches, never the batch.
type (
	gzipWriter struct {
		w   *gzip.Writer
		out appender
	}
	lz4Writer struct {
		w   *lz4.Writer
		out appender
	}
)

var (
	gzipWriters = sync.Pool{New: func() any { return &gzipWriter{w: gzip.NewWriter(nil)} }}
	lz4Writers  = sync.Pool{New: func() any {
		w := lz4.NewWriter(nil)
		err := w.Apply(lz4.BlockSizeOption(lz4.Block64Kb), lz4.ChecksumOption(false), lz4.ConcurrencyOption(1))
		if err != nil {
			panic(err) // constant options of the pinned version
		}
		return &lz4Writer{w: w}
	}}
	zstdEncoders = sync.Pool{New: func() any {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
		if err != nil {
			panic(err) // constant options of the pinned version
		}
		return e
	}}
)

// appender is an io.Writer onto a slice.
type appender struct{ b []byte }

func (a *appender) Write(p []byte) (int, error) {
	a.b = append(a.b, p...)
	return len(p), nil
}

// finish writes src through w, which writes to a, and takes the result out.
func (a *appender) finish(w interface {
	Write(p []byte) (int, error)
	Close() error
}, src []byte) ([]byte, error) {
	_, err := w.Write(src)
	if cerr := w.Close(); err == nil {
		err = cerr
	}
	out := a.b
	a.b = nil
	if err != nil {
		return nil, fmt.Errorf("record: compress: %w", err)
	}
	return out, nil
}

// Xerial framing: a header of magic, version and compatible version, then
// blocks, each a big-endian length and a raw snappy block.
const (
	xerialMagic  = "\x82SNAPPY\x00"
	xerialHeader = xerialMagic + "\x00\x00\x00\x01\x00\x00\x00\x01"
	xerialBlock  = 32 << 10
)

func appendXerial(dst, src []byte) []byte {
	dst = append(dst, xerialHeader...)
	for len(src) > 0 {
		n := min(xerialBlock, len(src))
		at := len(dst) + 4
		dst = slices.Grow(dst, 4+snappy.MaxEncodedLen(n))
		block := snappy.Encode(dst[at:cap(dst)], src[:n]) // encodes in place, given the room
		dst = binary.BigEndian.AppendUint32(dst, uint32(len(block)))
		dst = dst[:at+len(block)]
		src = src[n:]
	}
	return dst
}
