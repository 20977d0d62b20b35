package walobject

import (
	"encoding/binary"
	"hash/crc32"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

// ParseTrailer decodes the last [TrailerSize] bytes of an object of the given
// size. What it returns fits that size.
func ParseTrailer(b []byte, objectSize int64) (Trailer, error) {
	switch {
	case objectSize < TrailerSize:
		return Trailer{}, fail(ErrCorrupt, "trailer", "an object of %d bytes has no room for one", objectSize)
	case len(b) != TrailerSize:
		return Trailer{}, fail(ErrCorrupt, "trailer", "%d bytes given, not %d", len(b), TrailerSize)
	case string(b[posMagic:]) != magic:
		return Trailer{}, fail(ErrCorrupt, "trailer", "the object ends in %x, not in the magic", b[posMagic:])
	}
	if got, want := trailerCRC(b), binary.BigEndian.Uint32(b[posTrailerCRC:]); got != want {
		return Trailer{}, fail(ErrCorrupt, "trailer", "checksum %08x, says %08x", got, want)
	}
	if v := binary.BigEndian.Uint16(b[posVersion:]); v != FormatVersion {
		return Trailer{}, fail(ErrUnsupported, "trailer", "version %d, this program reads %d", v, FormatVersion)
	}
	if r := binary.BigEndian.Uint16(b[posReserved:]); r != 0 {
		return Trailer{}, fail(ErrCorrupt, "trailer", "reserved bytes hold %d", r)
	}
	t := Trailer{
		FooterSize:   int64(binary.BigEndian.Uint32(b[posFooterSize:])),
		FooterCRC32C: binary.BigEndian.Uint32(b[posFooterCRC:]),
	}
	data := binary.BigEndian.Uint64(b[posDataSize:])
	if t.FooterSize > MaxFooterSize || data > MaxDataSize {
		return Trailer{}, fail(ErrCorrupt, "trailer", "footer of %d bytes (limit %d), data of %d bytes (limit %d)", t.FooterSize, MaxFooterSize, data, int64(MaxDataSize))
	}
	t.DataSize = int64(data)
	if t.ObjectSize() != objectSize {
		return Trailer{}, fail(ErrCorrupt, "trailer", "describes an object of %d bytes, this one has %d", t.ObjectSize(), objectSize)
	}
	return t, nil
}

// ReadFooter decodes and checks the footer of an object from its last bytes,
// at least [TrailerSize] of them. When they hold the trailer but not the whole
// footer, the error matches [ErrShort] and its Need says how many would do.
func ReadFooter(tail []byte, objectSize int64) (*storagev1.CombinedObjectFooter, error) {
	if len(tail) < TrailerSize || int64(len(tail)) > objectSize {
		return nil, fail(ErrCorrupt, "trailer", "a tail of %d bytes of an object of %d bytes", len(tail), objectSize)
	}
	t, err := ParseTrailer(tail[len(tail)-TrailerSize:], objectSize)
	if err != nil {
		return nil, err
	}
	if int64(len(tail)) < t.Tail() {
		return nil, &Error{Kind: ErrShort, Part: "footer", Reason: "more of the object is needed", Need: t.Tail()}
	}
	end := len(tail) - TrailerSize
	return DecodeFooter(t, tail[end-int(t.FooterSize):end])
}

// DecodeFooter decodes and checks the footer that a trailer describes: its
// checksum, and that its ranges cover the object's data without gap or overlap,
// in order, each possible by itself.
func DecodeFooter(t Trailer, b []byte) (*storagev1.CombinedObjectFooter, error) {
	if int64(len(b)) != t.FooterSize {
		return nil, fail(ErrCorrupt, "footer", "%d bytes given, the trailer says %d", len(b), t.FooterSize)
	}
	if got := crc32.Checksum(b, castagnoli); got != t.FooterCRC32C {
		return nil, fail(ErrCorrupt, "footer", "checksum %08x, says %08x", got, t.FooterCRC32C)
	}
	// A checksum is no defence against malice: bound what decoding allocates.
	messages, ok := countMessages(b, (*storagev1.CombinedObjectFooter)(nil).ProtoReflect().Descriptor(), 0)
	if !ok || messages > len(b)/minMessage+minMessage {
		return nil, fail(ErrCorrupt, "footer", "not a message, or one of far too many parts")
	}
	f := new(storagev1.CombinedObjectFooter)
	if err := proto.Unmarshal(b, f); err != nil {
		return nil, wrap(ErrCorrupt, "footer", err, "not a message")
	}
	if v := f.GetFormatVersion(); v != FormatVersion {
		return nil, fail(ErrUnsupported, "footer", "version %d, this program reads %d", v, FormatVersion)
	}
	if f.GetClusterId() == "" {
		return nil, fail(ErrCorrupt, "footer", "no cluster id")
	}
	if err := CheckRef(f.GetObject()); err != nil {
		return nil, wrap(ErrCorrupt, "footer", err, "object")
	}
	if n := len(f.GetRanges()); n == 0 || n > MaxRanges {
		return nil, fail(ErrCorrupt, "footer", "%d ranges, allowed are 1..%d", n, MaxRanges)
	}
	var pos int64
	for i, r := range f.GetRanges() {
		d := r.GetRange()
		if d == nil {
			return nil, fail(ErrCorrupt, "footer", "range %d has no descriptor", i)
		}
		if err := checkDescriptor(d); err != nil {
			return nil, wrap(ErrCorrupt, "footer", err, "range %d", i)
		}
		if i > 0 && Compare(f.GetRanges()[i-1].GetRange(), d) >= 0 {
			return nil, fail(ErrCorrupt, "footer", "range %d does not follow the one before it", i)
		}
		if d.GetPosition() != pos || d.GetLengthBytes() > t.DataSize-pos {
			return nil, fail(ErrCorrupt, "footer", "range %d lies at [%d, +%d), must begin at %d and end by %d", i, d.GetPosition(), d.GetLengthBytes(), pos, t.DataSize)
		}
		pos += d.GetLengthBytes()
	}
	if pos != t.DataSize {
		return nil, fail(ErrCorrupt, "footer", "its ranges end at byte %d, the data at %d", pos, t.DataSize)
	}
	return f, nil
}

// minMessage is what an encoded message of a valid footer takes at least, on
// average, with its tag and length; a footer of empty messages takes two.
const minMessage = 4

// maxDepth is more than the footer's messages are nested.
const maxDepth = 8

// countMessages counts the messages inside an encoded one, itself included.
// ok is false when b is no message of that type.
func countMessages(b []byte, md protoreflect.MessageDescriptor, depth int) (n int, ok bool) {
	if depth > maxDepth {
		return 0, false
	}
	n = 1
	for len(b) > 0 {
		num, typ, tag := protowire.ConsumeTag(b)
		if tag < 0 {
			return 0, false
		}
		b = b[tag:]
		if typ != protowire.BytesType {
			size := protowire.ConsumeFieldValue(num, typ, b)
			if size < 0 {
				return 0, false
			}
			b = b[size:]
			continue
		}
		v, size := protowire.ConsumeBytes(b)
		if size < 0 {
			return 0, false
		}
		b = b[size:]
		if fd := md.Fields().ByNumber(num); fd != nil && fd.Message() != nil {
			inner, ok := countMessages(v, fd.Message(), depth+1)
			if !ok {
				return 0, false
			}
			n += inner
		}
	}
	return n, true
}
