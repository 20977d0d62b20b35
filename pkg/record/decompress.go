package record

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// DefaultDecompressLimit is how many bytes of records [Batch.Records] and a
// [Reader] made with limit 0 take out of one batch at most.
const DefaultDecompressLimit = MaxBatchSize

// Decompress puts the decompressed src into dst, whose content is overwritten
// and whose capacity is used, and returns it. More than limit bytes are refused
// with [ErrTooLarge]. Sizes that src merely claims are believed only as far as
// its bytes could really expand to, and memory otherwise grows with what comes
// out, by doubling; a zstd stream without a stated size may unfold to 8 MiB
// before a lower limit stops it. With [CodecNone] it returns src itself. Snappy may be framed as Kafka's Java clients do, or raw.
// Safe for concurrent use.
func Decompress(dst []byte, c Codec, src []byte, limit int) ([]byte, error) {
	dst = dst[:0]
	switch c {
	case CodecNone:
		if len(src) > limit {
			return nil, tooLarge(len(src), limit)
		}
		return src, nil
	case CodecGzip:
		return gunzip(dst, src, limit)
	case CodecSnappy:
		return unsnappy(dst, src, limit)
	case CodecLZ4:
		return unlz4(dst, src, limit)
	case CodecZstd:
		return unzstd(dst, src, limit)
	}
	return nil, fail(ErrUnsupported, FieldAttributes, "unknown codec", int64(c), int64(CodecZstd))
}

func tooLarge(got, limit int) error {
	return fail(ErrTooLarge, FieldRecords, "decompressed records above the limit", int64(got), int64(limit))
}

func undecodable(c Codec, src []byte, cause error) error {
	e := fail(ErrCorrupt, FieldRecords, "not decodable as "+c.String(), int64(len(src)), 0)
	e.Cause = cause
	return e
}

type (
	gzipReader struct {
		r   gzip.Reader
		src bytes.Reader
	}
	lz4Reader struct {
		r   *lz4.Reader
		src bytes.Reader
	}
	zstdReader struct {
		r    *zstd.Decoder
		most uint64 // its present limit
	}
)

var (
	gzipReaders = sync.Pool{New: func() any { return new(gzipReader) }}
	lz4Readers  = sync.Pool{New: func() any { return &lz4Reader{r: lz4.NewReader(nil)} }}

	// One goroutine's worth of state each, and no goroutine of their own, so
	// that the collector may drop them.
	zstdDecoders = sync.Pool{New: func() any {
		r, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true))
		if err != nil {
			panic(err) // constant options of the pinned version
		}
		return &zstdReader{r: r}
	}}
)

func gunzip(dst, src []byte, limit int) ([]byte, error) {
	z := gzipReaders.Get().(*gzipReader)
	defer gzipReaders.Put(z)
	z.src.Reset(src)
	defer z.src.Reset(nil)
	if err := z.r.Reset(&z.src); err != nil {
		return nil, undecodable(CodecGzip, src, err)
	}
	return readBounded(dst, &z.r, CodecGzip, src, limit)
}

func unlz4(dst, src []byte, limit int) ([]byte, error) {
	if !bytes.HasPrefix(src, []byte("\x04\x22\x4d\x18")) {
		return nil, undecodable(CodecLZ4, src, errors.New("no lz4 frame"))
	}
	z := lz4Readers.Get().(*lz4Reader)
	defer lz4Readers.Put(z)
	z.src.Reset(src)
	defer z.src.Reset(nil)
	z.r.Reset(&z.src)
	return readBounded(dst, z.r, CodecLZ4, src, limit)
}

// readBounded reads r to its end into dst, growing it by doubling.
func readBounded(dst []byte, r io.Reader, c Codec, src []byte, limit int) ([]byte, error) {
	dst = roomFor(dst, src, limit)
	var probe [1]byte
	for {
		room := dst[len(dst):min(cap(dst), limit)]
		full := len(room) == 0
		if full && len(dst) < limit {
			dst = grow(dst, limit)
			continue
		}
		if full {
			room = probe[:] // at the limit: only an end may follow
		}
		n, err := r.Read(room)
		if full && n > 0 {
			return nil, tooLarge(limit+n, limit)
		}
		dst = dst[:len(dst)+n]
		if errors.Is(err, io.EOF) {
			return dst, nil
		}
		if err != nil {
			return nil, undecodable(c, src, err)
		}
	}
}

// roomFor gives dst a capacity to begin with that src earns by its own size.
func roomFor(dst, src []byte, limit int) []byte {
	return slices.Grow(dst, min(4*len(src)+512, limit))
}

// grow doubles dst's capacity, up to limit.
func grow(dst []byte, limit int) []byte {
	bigger := make([]byte, len(dst), min(max(2*cap(dst), 512), limit))
	copy(bigger, dst)
	return bigger
}

func unzstd(dst, src []byte, limit int) ([]byte, error) {
	bound, exact, err := zstdBound(src)
	if err != nil {
		return nil, undecodable(CodecZstd, src, err)
	}
	// The decoder's own limit also refuses frames with a larger window, though
	// decoding whole frames keeps none. So it is set only where the bound does
	// not say already that the records fit (a stream of many small blocks), and
	// never below the window that every client may use.
	most := uint64(math.MaxInt32)
	if bound > int64(limit) {
		if exact {
			return nil, tooLarge(int(bound), limit)
		}
		most = uint64(max(limit, zstdWindow))
	}
	z := zstdDecoders.Get().(*zstdReader)
	defer zstdDecoders.Put(z)
	if z.most != most {
		if err := z.r.ResetWithOptions(nil, zstd.WithDecoderMaxMemory(most)); err != nil {
			return nil, undecodable(CodecZstd, src, err)
		}
		z.most = most
	}
	out, err := z.r.DecodeAll(src, dst)
	switch {
	case errors.Is(err, zstd.ErrDecoderSizeExceeded), err == nil && len(out) > limit:
		return nil, tooLarge(max(len(out), limit+1), limit)
	case err != nil:
		return nil, undecodable(CodecZstd, src, err)
	}
	return out, nil
}

const (
	zstdMaxBlock = 128 << 10 // what one block of a frame decodes to at most
	zstdWindow   = 8 << 20   // what the format asks every decoder to take
)

// zstdBound is how much src can decode to at most, told by the headers of its
// frames and blocks. A content size that the blocks can't reach is an error, so
// that no room is made for it. exact says that all frames state their size: then
// they decode to bound bytes or fail.
func zstdBound(src []byte) (bound int64, exact bool, err error) {
	exact = true
	for len(src) > 0 {
		var h zstd.Header
		if err := h.Decode(src); err != nil {
			return 0, false, err
		}
		skip := int64(h.HeaderSize)
		if h.Skippable {
			skip += int64(h.SkippableSize)
		}
		if skip <= 0 || skip > int64(len(src)) {
			return 0, false, io.ErrUnexpectedEOF
		}
		src = src[skip:]
		if h.Skippable {
			continue
		}
		frame, size, err := zstdBlocks(src)
		if err != nil {
			return 0, false, err
		}
		src = src[size:]
		if h.HasCheckSum {
			src = src[min(4, len(src)):] // the decoder notices a missing one
		}
		if h.HasFCS {
			if h.FrameContentSize > uint64(frame) {
				return 0, false, errors.New("content size above what the blocks can hold")
			}
			frame = int64(h.FrameContentSize)
		}
		exact = exact && h.HasFCS
		bound += frame
	}
	return bound, exact, nil
}

// zstdBlocks walks the blocks of one frame: what they decode to at most, and
// how many bytes they take.
func zstdBlocks(src []byte) (bound int64, size int, err error) {
	for {
		if len(src)-size < 3 {
			return 0, 0, io.ErrUnexpectedEOF
		}
		h := uint32(src[size]) | uint32(src[size+1])<<8 | uint32(src[size+2])<<16
		last, kind, n := h&1 == 1, h>>1&3, int(h>>3)
		size += 3
		switch kind {
		case 0: // raw
			bound += int64(n)
			size += n
		case 1: // one byte, repeated
			bound += int64(n)
			size++
		default: // compressed, or reserved, which the decoder refuses
			bound += zstdMaxBlock
			size += n
		}
		if size > len(src) {
			return 0, 0, io.ErrUnexpectedEOF
		}
		if last {
			return bound, size, nil
		}
	}
}

// snappyExpansion is above what a snappy block can expand to: the best tag
// makes 64 bytes out of 3.
const snappyExpansion = 22

func unsnappy(dst, src []byte, limit int) ([]byte, error) {
	if !strings.HasPrefix(string(src[:min(len(src), len(xerialMagic))]), xerialMagic) {
		return unsnappyBlock(dst, src, limit)
	}
	if len(src) < len(xerialHeader) {
		return nil, undecodable(CodecSnappy, src, io.ErrUnexpectedEOF)
	}
	for rest := src[len(xerialHeader):]; len(rest) > 0; {
		if len(rest) < 4 {
			return nil, undecodable(CodecSnappy, src, io.ErrUnexpectedEOF)
		}
		n := binary.BigEndian.Uint32(rest)
		rest = rest[4:]
		if uint64(n) > uint64(len(rest)) {
			return nil, undecodable(CodecSnappy, src, io.ErrUnexpectedEOF)
		}
		var err error
		if dst, err = unsnappyBlock(dst, rest[:n], limit); err != nil {
			return nil, err
		}
		rest = rest[n:]
	}
	return dst, nil
}

// unsnappyBlock appends one decoded raw block to dst.
func unsnappyBlock(dst, src []byte, limit int) ([]byte, error) {
	n, err := snappy.DecodedLen(src)
	if err != nil {
		return nil, undecodable(CodecSnappy, src, err)
	}
	if n > limit-len(dst) {
		return nil, tooLarge(len(dst)+n, limit)
	}
	if n > snappyExpansion*len(src) {
		return nil, undecodable(CodecSnappy, src, errors.New("claims more than its bytes can expand to"))
	}
	dst = slices.Grow(dst, n)
	out, err := snappy.Decode(dst[len(dst):len(dst)+n], src)
	if err != nil {
		return nil, undecodable(CodecSnappy, src, err)
	}
	return dst[:len(dst)+len(out)], nil
}
