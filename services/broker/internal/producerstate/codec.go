package producerstate

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/braidlog/braid/pkg/record"
)

// FormatVersion is the version of the snapshot format written here.
const FormatVersion = 1

const (
	magic        = "BRAIDPS1"
	headerLen    = 8 + 4 + 8 + 4 + 4
	producerLen  = 8 + 2 + 1
	batchLen     = 4 + 8 + 4 + 8
	expiryLen    = 8 + 2 + 8
	checksumSize = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// FormatError says that bytes are not a snapshot, or that its content can't be.
type FormatError struct{ Reason string }

func (e *FormatError) Error() string { return "producerstate: " + e.Reason }

func formatf(format string, args ...any) error {
	return &FormatError{Reason: fmt.Sprintf(format, args...)}
}

// Append encodes the snapshot behind dst; docs/formats/local-log.md draws the
// bytes.
func (s *Snapshot) Append(dst []byte) []byte {
	start := len(dst)
	dst = append(dst, magic...)
	dst = binary.BigEndian.AppendUint32(dst, FormatVersion)
	dst = binary.BigEndian.AppendUint64(dst, uint64(s.End))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(s.Producers)))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(s.Expiries)))
	for i := range s.Producers {
		p := &s.Producers[i]
		dst = binary.BigEndian.AppendUint64(dst, uint64(p.ID))
		dst = binary.BigEndian.AppendUint16(dst, uint16(p.Epoch))
		dst = append(dst, byte(len(p.Batches)))
		for j := range p.Batches {
			b := &p.Batches[j]
			dst = binary.BigEndian.AppendUint32(dst, uint32(b.BaseSequence))
			dst = binary.BigEndian.AppendUint64(dst, uint64(b.BaseOffset))
			dst = binary.BigEndian.AppendUint32(dst, uint32(b.LastOffsetDelta))
			dst = binary.BigEndian.AppendUint64(dst, uint64(b.Timestamp))
		}
	}
	for _, e := range s.Expiries {
		dst = binary.BigEndian.AppendUint64(dst, uint64(e.ProducerID))
		dst = binary.BigEndian.AppendUint16(dst, uint16(e.Epoch))
		dst = binary.BigEndian.AppendUint64(dst, uint64(e.Offset))
	}
	return binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

// DecodeSnapshot reads what Append writes; anything else is a FormatError. It
// allocates no more than a small multiple of len(data).
func DecodeSnapshot(data []byte) (Snapshot, error) {
	var s Snapshot
	if len(data) < headerLen+checksumSize || string(data[:8]) != magic {
		return s, formatf("not a snapshot")
	}
	body := data[:len(data)-checksumSize]
	if crc32.Checksum(body, castagnoli) != binary.BigEndian.Uint32(data[len(body):]) {
		return s, formatf("checksum does not fit")
	}
	if v := binary.BigEndian.Uint32(body[8:]); v != FormatVersion {
		return s, formatf("format version %d, this program knows %d", v, FormatVersion)
	}
	s.End = int64(binary.BigEndian.Uint64(body[12:]))
	producers := int64(binary.BigEndian.Uint32(body[20:]))
	expiries := int64(binary.BigEndian.Uint32(body[24:]))
	rest := body[headerLen:]
	if producers*(producerLen+batchLen)+expiries*expiryLen > int64(len(rest)) {
		return s, formatf("%d producers and %d expiries in %d bytes", producers, expiries, len(rest))
	}
	s.Producers = make([]Producer, producers)
	for i := range s.Producers {
		if len(rest) < producerLen {
			return s, formatf("cut short")
		}
		p := &s.Producers[i]
		p.ID = int64(binary.BigEndian.Uint64(rest))
		p.Epoch = int16(binary.BigEndian.Uint16(rest[8:]))
		n := int(rest[10])
		rest = rest[producerLen:]
		if n > KeptBatches || len(rest) < n*batchLen {
			return s, formatf("producer %d has %d batches in %d bytes", p.ID, n, len(rest))
		}
		p.Batches = make([]Batch, n)
		for j := range p.Batches {
			b := &p.Batches[j]
			b.BaseSequence = int32(binary.BigEndian.Uint32(rest))
			b.BaseOffset = int64(binary.BigEndian.Uint64(rest[4:]))
			b.LastOffsetDelta = int32(binary.BigEndian.Uint32(rest[12:]))
			b.Timestamp = int64(binary.BigEndian.Uint64(rest[16:]))
			if b.BaseSequence >= 0 && b.LastOffsetDelta >= 0 {
				b.LastSequence = record.NextSequence(b.BaseSequence, b.LastOffsetDelta)
			}
			rest = rest[batchLen:]
		}
	}
	if int64(len(rest)) != expiries*expiryLen {
		return s, formatf("%d bytes for %d expiries", len(rest), expiries)
	}
	s.Expiries = make([]Expiry, expiries)
	for i := range s.Expiries {
		s.Expiries[i] = Expiry{
			ProducerID: int64(binary.BigEndian.Uint64(rest)),
			Epoch:      int16(binary.BigEndian.Uint16(rest[8:])),
			Offset:     int64(binary.BigEndian.Uint64(rest[10:])),
		}
		rest = rest[expiryLen:]
	}
	if _, err := Restore(Options{}, s); err != nil {
		return Snapshot{}, err
	}
	return s, nil
}
