package api

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// Bounds of one message of decoded records; a single record may be larger.
const (
	recordsPerMessage = 2000
	bytesPerMessage   = 1 << 20
	// recordOverhead is what a record costs in a message besides its bytes.
	recordOverhead = 48
	headerOverhead = 12
)

// batchOutput sends batches as stored.
type batchOutput struct{ s *Service }

// send sends all of f. limit ends it behind the batch that reaches it.
func (o *batchOutput) send(stream readStream, f replica.Fetched, _, limit int64) (records, next int64, err error) {
	size := 0
	next = f.Base
	for rest := f.Batches; len(rest) > 0 && records < limit; {
		n, err := record.Peek(rest)
		if err != nil {
			return 0, 0, fmt.Errorf("api: a fetched run is not whole batches: %w", err)
		}
		b := record.Batch(rest[:n])
		records += int64(b.RecordCount())
		next = b.EndOffset()
		size += n
		rest = rest[n:]
	}
	// gRPC has encoded the message when Send returns, and our stats handler keeps
	// nothing of it: the caller may use the buffer again.
	err = stream.Send(&brokerv1.ReadResponse{Kind: &brokerv1.ReadResponse_Batches{Batches: &brokerv1.ReadBatches{
		Batches: f.Batches[:size], NextOffset: next, HighWatermark: f.HighWatermark,
		Lineage: lineageToProto(f.Lineage.Slice(f.Base, next)),
	}}})
	if err != nil {
		return 0, 0, err
	}
	o.s.metrics.readBytes.Add(context.WithoutCancel(stream.Context()), int64(size), o.s.metrics.batches)
	return records, next, nil
}

// recordOutput sends decoded records.
type recordOutput struct {
	s      *Service
	t      target
	reader *record.Reader // held while something is sent, not while waiting

	message []*brokerv1.ReadRecord
	size    int
	// The leadership of the records before known, to look it up once per
	// leadership.
	known      int64
	leadership *logv1.Leadership
}

// send sends the records of f from the offset from on, at most limit.
func (o *recordOutput) send(stream readStream, f replica.Fetched, from, limit int64) (records, next int64, err error) {
	o.reader = o.s.readers.Get().(*record.Reader)
	defer func() { o.s.readers.Put(o.reader); o.reader = nil }()
	o.known = 0
	o.message, o.size = o.message[:0], 0
	next = from
	for rest := f.Batches; len(rest) > 0 && records < limit; {
		n, err := record.Peek(rest)
		if err != nil {
			return 0, 0, fmt.Errorf("api: a fetched run is not whole batches: %w", err)
		}
		b := record.Batch(rest[:n])
		rest = rest[n:]
		// The message's records alias the reader's buffer when the batch is
		// compressed: they go out before the next one is decoded.
		if b.Codec() != record.CodecNone {
			if err := o.flush(stream, f, next); err != nil {
				return 0, 0, err
			}
		}
		if err := o.reader.Reset(b); err != nil {
			return 0, 0, o.undecodable(b, err)
		}
		for records < limit && o.reader.Next() {
			offset := o.reader.Offset()
			if offset < from {
				continue
			}
			m, size := o.record(f.Lineage, offset, o.reader.Record())
			if len(o.message) > 0 && (o.size+size > bytesPerMessage || len(o.message) == recordsPerMessage) {
				if err := o.flush(stream, f, offset); err != nil {
					return 0, 0, err
				}
			}
			o.message, o.size = append(o.message, m), o.size+size
			records++
			next = offset + 1
		}
		if err := o.reader.Err(); err != nil {
			return 0, 0, o.undecodable(b, err)
		}
		if b.Codec() != record.CodecNone {
			if err := o.flush(stream, f, next); err != nil {
				return 0, 0, err
			}
		}
	}
	if err := o.flush(stream, f, next); err != nil {
		return 0, 0, err
	}
	o.s.metrics.readBytes.Add(context.WithoutCancel(stream.Context()), int64(len(f.Batches)), o.s.metrics.records)
	return records, next, nil
}

// record makes the wire form of a record, which aliases it, and its size.
func (o *recordOutput) record(l lineage.Lineage, offset int64, r record.Record) (*brokerv1.ReadRecord, int) {
	if offset >= o.known || o.leadership == nil {
		i := l.IndexAt(offset)
		if i >= 0 {
			o.leadership, o.known = leadershipToProto(l[i].Leadership), l.EndOf(i)
		} else {
			o.leadership, o.known = nil, offset+1 // older than the lineage tells
		}
	}
	m := &brokerv1.Record{Key: r.Key, Value: r.Value, TimestampMs: r.Timestamp}
	size := recordOverhead + len(r.Key) + len(r.Value)
	if len(r.Headers) > 0 {
		m.Headers = make([]*brokerv1.Header, len(r.Headers))
		for i, h := range r.Headers {
			m.Headers[i] = &brokerv1.Header{Key: headerKey(h.Key), Value: h.Value}
			size += headerOverhead + len(h.Key) + len(h.Value)
		}
	}
	return &brokerv1.ReadRecord{Offset: offset, Leadership: o.leadership, Record: m}, size
}

// headerKey is a key as a protobuf string. A raw batch may hold keys that are no
// UTF-8, which protobuf would refuse to send: only READ_FORMAT_BATCHES shows them
// as they are.
func headerKey(key []byte) string {
	if utf8.Valid(key) {
		return string(key)
	}
	return strings.ToValidUTF8(string(key), "\uFFFD")
}

func (o *recordOutput) flush(stream readStream, f replica.Fetched, next int64) error {
	if len(o.message) == 0 {
		return nil
	}
	err := stream.Send(&brokerv1.ReadResponse{Kind: &brokerv1.ReadResponse_Records{Records: &brokerv1.ReadRecords{
		Records: o.message, NextOffset: next, HighWatermark: f.HighWatermark,
	}}})
	clear(o.message)
	o.message, o.size = o.message[:0], 0
	return err
}

// undecodable is an error about a batch that was checked when it was appended and
// again when it was read, and that can't be decoded nevertheless.
func (o *recordOutput) undecodable(b record.Batch, err error) error {
	return &replica.DamagedError{Where: o.t.String(), Offset: b.BaseOffset(), Position: 0, Length: int64(len(b)), Err: err}
}
