package record

import (
	"errors"
	"fmt"
)

// Sentinels; every error of this package matches exactly one of them with
// errors.Is.
var (
	// ErrShort says that the bytes at hand end before the batch does. For a
	// stream it means "read more"; for a whole file or message it is damage.
	ErrShort = errors.New("record: batch is cut short")

	// ErrCorrupt says that the bytes can't be a valid batch, or that a batch
	// does not stand where it should.
	ErrCorrupt = errors.New("record: corrupt batch")

	// ErrUnsupported says that the batch is intact but uses something this
	// package does not know: a codec, or a reserved attribute.
	ErrUnsupported = errors.New("record: unsupported batch")

	// ErrTooLarge says that a limit was reached: the size of a batch, or of
	// its records when decompressed.
	ErrTooLarge = errors.New("record: batch too large")
)

// Field names the part of a batch that an [Error] is about.
type Field uint8

// The fields of a batch, in the order of the layout, then those of a record.
const (
	FieldNone Field = iota
	FieldBaseOffset
	FieldLength
	FieldLeaderEpoch
	FieldMagic
	FieldCRC
	FieldAttributes
	FieldLastOffsetDelta
	FieldBaseTimestamp
	FieldMaxTimestamp
	FieldProducerID
	FieldProducerEpoch
	FieldBaseSequence
	FieldRecordCount
	FieldRecords
	FieldRecordLength
	FieldTimestampDelta
	FieldOffsetDelta
	FieldKey
	FieldValue
	FieldHeaders
	numFields
)

var fieldNames = [numFields]string{
	FieldNone:            "none",
	FieldBaseOffset:      "base offset",
	FieldLength:          "length",
	FieldLeaderEpoch:     "leader epoch",
	FieldMagic:           "magic",
	FieldCRC:             "crc",
	FieldAttributes:      "attributes",
	FieldLastOffsetDelta: "last offset delta",
	FieldBaseTimestamp:   "base timestamp",
	FieldMaxTimestamp:    "max timestamp",
	FieldProducerID:      "producer id",
	FieldProducerEpoch:   "producer epoch",
	FieldBaseSequence:    "base sequence",
	FieldRecordCount:     "record count",
	FieldRecords:         "records",
	FieldRecordLength:    "record length",
	FieldTimestampDelta:  "timestamp delta",
	FieldOffsetDelta:     "offset delta",
	FieldKey:             "key",
	FieldValue:           "value",
	FieldHeaders:         "headers",
}

// String is the field's name as docs/formats/record-batch.md has it.
func (f Field) String() string {
	if f < numFields {
		return fieldNames[f]
	}
	return fmt.Sprintf("field(%d)", uint8(f))
}

// Error says which field of a batch is wrong and why. It unwraps to one of
// the sentinels and, where a compressor reported it, to the cause.
type Error struct {
	Kind      error  // ErrShort, ErrCorrupt, ErrUnsupported or ErrTooLarge
	Field     Field  // the field that is wrong
	Reason    string // why, in words
	Got, Want int64  // the value found, and the one (or the limit) expected
	Pos       int    // byte position of the batch in the buffer given
	Record    int    // index of the record, -1 when it is not about one
	Cause     error  // error of the decompressor, or nil
}

// Error implements error.
func (e *Error) Error() string {
	at := ""
	if e.Pos > 0 {
		at = fmt.Sprintf(" at byte %d", e.Pos)
	}
	if e.Record >= 0 {
		at += fmt.Sprintf(" in record %d", e.Record)
	}
	s := fmt.Sprintf("%v%s: %s: %s (got %d, want %d)", e.Kind, at, e.Field, e.Reason, e.Got, e.Want)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap makes errors.Is and errors.As see the sentinel and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause != nil {
		return []error{e.Kind, e.Cause}
	}
	return []error{e.Kind}
}

// fail builds an Error about a batch's header.
func fail(kind error, f Field, reason string, got, want int64) *Error {
	return &Error{Kind: kind, Field: f, Reason: reason, Got: got, Want: want, Record: -1}
}

// at returns err with the byte position added where it has room for one.
func at(err error, pos int) error {
	var e *Error
	if errors.As(err, &e) {
		moved := *e
		moved.Pos += pos
		return &moved
	}
	return err
}
