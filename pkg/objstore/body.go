package objstore

import (
	"fmt"
	"hash/crc32"
	"io"
	"slices"
)

// Body is an object's content that can be read from the start again and again:
// a retry opens it anew and never continues a reader that an earlier attempt
// consumed. Size and checksum are known before the first byte is sent.
type Body interface {
	// Size is the content's length in bytes.
	Size() int64
	// CRC32C is the Castagnoli checksum of the content.
	CRC32C() uint32
	// Open returns a reader over exactly Size bytes. Readers are independent
	// of one another and may be used concurrently.
	Open() (io.ReadCloser, error)
}

// Same reports whether the stored object holds as many bytes as body, with the
// same CRC32C. After a create whose answer was lost, that is how to tell one's
// own success from another's object.
func Same(stored Attrs, body Body) bool {
	return stored.Size == body.Size() && stored.CRC32C == body.CRC32C()
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC32C returns the Castagnoli checksum of the concatenated parts.
func CRC32C(parts ...[]byte) uint32 {
	var sum uint32
	for _, p := range parts {
		sum = crc32.Update(sum, castagnoli, p)
	}
	return sum
}

// UpdateCRC32C extends the checksum sum of some bytes by those of p.
func UpdateCRC32C(sum uint32, p []byte) uint32 {
	return crc32.Update(sum, castagnoli, p)
}

// Parts is a [Body] over byte slices that are sent one after the other without
// being joined, so an object can be built from many buffers without a copy.
// The slices belong to the body until the last Create with it has returned:
// nobody may change them meanwhile.
type Parts struct {
	parts [][]byte
	size  int64
	crc   uint32
}

// NewParts makes a body of the concatenated parts and computes its checksum.
// It keeps the slices, and a copy of the list of them.
func NewParts(parts ...[]byte) *Parts {
	return NewPartsCRC(CRC32C(parts...), parts...)
}

// NewPartsCRC is NewParts for a caller that has the checksum of the whole
// already, for instance because it summed the bytes while building the object.
func NewPartsCRC(crc uint32, parts ...[]byte) *Parts {
	b := &Parts{parts: slices.Clone(parts), crc: crc}
	for _, p := range parts {
		b.size += int64(len(p))
	}
	return b
}

// Size implements [Body].
func (b *Parts) Size() int64 { return b.size }

// CRC32C implements [Body].
func (b *Parts) CRC32C() uint32 { return b.crc }

// Open implements [Body]. It never fails.
func (b *Parts) Open() (io.ReadCloser, error) {
	return &partsReader{rest: b.parts}, nil
}

// partsReader reads the parts in order. It implements io.WriterTo, so io.Copy
// hands each part to the writer as it is.
type partsReader struct {
	rest [][]byte // parts not yet read to their end
	pos  int      // position in rest[0]
}

func (r *partsReader) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) && len(r.rest) > 0 {
		k := copy(p[n:], r.rest[0][r.pos:])
		n += k
		r.pos += k
		if r.pos == len(r.rest[0]) {
			r.rest, r.pos = r.rest[1:], 0
		}
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (r *partsReader) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for len(r.rest) > 0 {
		part := r.rest[0][r.pos:]
		n, err := w.Write(part)
		total += int64(n)
		r.pos += n
		if err != nil {
			return total, err
		}
		r.rest, r.pos = r.rest[1:], 0
	}
	return total, nil
}

func (*partsReader) Close() error { return nil }

// Section is a [Body] over a part of something that can be read at any
// position, such as a file. The source must stay open and unchanged until the
// last Create with the body has returned.
type Section struct {
	src    io.ReaderAt
	offset int64
	size   int64
	crc    uint32
}

// NewSection makes a body of the size bytes of src from offset on, whose
// checksum the caller knows.
func NewSection(src io.ReaderAt, offset, size int64, crc uint32) *Section {
	return &Section{src: src, offset: offset, size: size, crc: crc}
}

// SumSection is NewSection for a caller that does not know the checksum: it
// reads the bytes once to compute it.
func SumSection(src io.ReaderAt, offset, size int64) (*Section, error) {
	h := crc32.New(castagnoli)
	n, err := io.Copy(h, io.NewSectionReader(src, offset, size))
	if err != nil {
		return nil, fmt.Errorf("sum body: %w", err)
	}
	if n != size {
		return nil, fmt.Errorf("sum body: %w after %d of %d bytes", io.ErrUnexpectedEOF, n, size)
	}
	return NewSection(src, offset, size, h.Sum32()), nil
}

// Size implements [Body].
func (s *Section) Size() int64 { return s.size }

// CRC32C implements [Body].
func (s *Section) CRC32C() uint32 { return s.crc }

// Open implements [Body]. It never fails; reading may.
func (s *Section) Open() (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(s.src, s.offset, s.size)), nil
}
