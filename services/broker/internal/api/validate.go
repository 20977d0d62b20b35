package api

import (
	"errors"
	"fmt"
	"math"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

// maxViolations is how many malformed fields one answer names.
const maxViolations = 16

// violations collects what is wrong with a request.
type violations []rpcerr.FieldViolation

func (v *violations) check(ok bool, field, description string) {
	if !ok && len(*v) < maxViolations {
		*v = append(*v, rpcerr.FieldViolation{Field: field, Description: description})
	}
}

// target checks the two fields that nearly all requests have.
func (v *violations) target(topic string, partition int32) {
	v.check(topic != "", "topic", "is missing: name a topic")
	v.check(partition >= 0, "partition", fmt.Sprintf("is %d: partitions count from 0", partition))
}

// level checks a level that may be left to the topic.
func (v *violations) level(l logv1.Level) {
	_, known := logv1.Level_name[int32(l)]
	v.check(known, "level", fmt.Sprintf("%d is not a level: use LEVEL_LEADER or LEVEL_OBJECT, or leave it to the topic", l))
}

// err is the error to answer with, nil if nothing is wrong.
func (v violations) err() error {
	if len(v) == 0 {
		return nil
	}
	return rpcerr.InvalidFields(v)
}

func checkAppend(req *brokerv1.AppendRequest) error {
	var v violations
	v.target(req.GetTopic(), req.GetPartition())
	v.level(req.GetLevel())
	structured, raw := len(req.GetRecords()) > 0, len(req.GetBatches()) > 0
	v.check(structured || raw, "records", "is empty: give one or more records, or record batches in batches")
	v.check(!structured || !raw, "batches", "is given beside records: give one of both")
	v.check(req.GetExpectedLeaderEpoch() >= 0, "expected_leader_epoch", "is negative: give the leader epoch, or 0 for any")
	if p := req.GetProducer(); p != nil {
		v.check(!raw, "producer", "is given beside batches, which carry their own: leave it out")
		v.check(p.GetProducerId() > 0, "producer.producer_id", fmt.Sprintf("is %d: use an id from InitProducer", p.GetProducerId()))
		v.check(p.GetProducerEpoch() >= 0 && p.GetProducerEpoch() <= math.MaxInt16, "producer.producer_epoch", fmt.Sprintf("is %d: use the epoch from InitProducer, 0 to %d", p.GetProducerEpoch(), math.MaxInt16))
		v.check(p.GetBaseSequence() >= 0, "producer.base_sequence", fmt.Sprintf("is %d: sequences run from 0", p.GetBaseSequence()))
	}
	for i, r := range req.GetRecords() {
		if r.GetTimestampMs() < 0 {
			v.check(false, fmt.Sprintf("records[%d].timestamp_ms", i), fmt.Sprintf("is %d: give milliseconds since 1970, or 0 for the broker's time", r.GetTimestampMs()))
		}
		if len(v) == maxViolations {
			break
		}
	}
	return v.err()
}

// checkProduce checks a request of a pipeline against the one before it; first
// is the first one, which may be req itself.
func checkProduce(first, req *brokerv1.ProduceRequest, previous int64) error {
	var v violations
	v.check(req.GetRequest() == previous+1, "request", fmt.Sprintf("is %d: number the requests of a stream from 1, rising by one; %d was expected", req.GetRequest(), previous+1))
	if req == first {
		v.target(req.GetTopic(), req.GetPartition())
	} else {
		v.check(req.GetTopic() == "" || req.GetTopic() == first.GetTopic(), "topic", "is another one: a stream is bound to one partition, open another")
		v.check(req.GetPartition() == first.GetPartition(), "partition", "is another one: a stream is bound to one partition, open another")
	}
	v.level(req.GetLevel())
	v.check(len(req.GetBatches()) > 0, "batches", "is empty: give one or more record batches")
	return v.err()
}

// facts is what was counted while batches were checked.
type facts struct {
	records int64
	bytes   int64
}

// checkBatches decides whether buf may be appended: whole batches, intact, with
// records that everybody can decode, and nothing that Braid does not do. limit is
// the topic's max.batch.bytes. It allocates nothing besides errors.
func (s *Service) checkBatches(buf []byte, limit int64) (f facts, err error) {
	r := s.readers.Get().(*record.Reader)
	defer s.readers.Put(r)
	for i, rest := 0, buf; len(rest) > 0; i++ {
		size, err := record.Peek(rest)
		if err != nil {
			return f, batchError(batchField(i), err)
		}
		b := record.Batch(rest[:size:size])
		if err := checkBatch(r, b, limit, i); err != nil {
			return f, err
		}
		f.records += int64(b.RecordCount())
		f.bytes += int64(size)
		rest = rest[size:]
	}
	return f, nil
}

func checkBatch(r *record.Reader, b record.Batch, limit int64, i int) error {
	if int64(len(b)) > limit {
		return rpcerr.BatchTooLarge(batchField(i), int64(len(b)), limit)
	}
	if err := b.Validate(); err != nil {
		return batchError(batchField(i), err)
	}
	if b.IsControl() {
		return rpcerr.Unsupported(batchField(i), "a control batch")
	}
	if b.IsTransactional() {
		return rpcerr.Unsupported(batchField(i), "a transaction")
	}
	return checkRecords(r, b, i)
}

// checkRecords decodes every record.
func checkRecords(r *record.Reader, b record.Batch, i int) error {
	err := r.Verify(b)
	if err == nil {
		return nil
	}
	var e *record.Error
	if errors.As(err, &e) {
		switch {
		case e.Field == record.FieldHeaders && errors.Is(err, record.ErrTooLarge):
			return tooManyHeaders(fmt.Sprintf("%s, record %d", batchField(i), e.Record), e.Got)
		case e.Field == record.FieldMaxTimestamp:
			return rpcerr.CorruptBatch(batchField(i), fmt.Sprintf("the largest timestamp is said to be %d, and is %d", e.Got, e.Want))
		}
	}
	return batchError(batchField(i), err)
}

// tooManyHeaders refuses what no reader of the log would take.
func tooManyHeaders(field string, n int64) error {
	return rpcerr.InvalidField(field, fmt.Sprintf("has %d headers, at most %d are allowed", n, record.MaxHeaders))
}

func batchField(i int) string { return fmt.Sprintf("batches[%d]", i) }

// buildBatch makes one batch out of the records of a request. limit is the
// topic's max.batch.bytes.
func (s *Service) buildBatch(req *brokerv1.AppendRequest, limit int64) ([]byte, error) {
	b := s.builders.Get().(*record.Builder)
	defer s.builders.Put(b)
	b.Reset()
	b.ClearProducer()
	if p := req.GetProducer(); p != nil {
		b.SetProducer(p.GetProducerId(), int16(p.GetProducerEpoch()), p.GetBaseSequence())
	}
	now := s.now().UnixMilli()
	var headers []record.Header
	for i, m := range req.GetRecords() {
		r := record.Record{Timestamp: m.GetTimestampMs(), Key: m.Key, Value: m.Value}
		if r.Timestamp == 0 {
			r.Timestamp = now
		}
		if n := len(m.GetHeaders()); n > record.MaxHeaders {
			return nil, tooManyHeaders(fmt.Sprintf("records[%d].headers", i), int64(n))
		}
		headers = headers[:0]
		for _, h := range m.GetHeaders() {
			headers = append(headers, record.Header{Key: []byte(h.GetKey()), Value: h.Value})
		}
		r.Headers = headers
		if err := b.Append(r); err != nil {
			return nil, batchError(fmt.Sprintf("records[%d]", i), err)
		}
		if size := int64(b.Size()); size > limit {
			return nil, tooManyRecords(req, i, size, limit)
		}
	}
	out, _, err := b.Build(make([]byte, 0, b.Size()))
	if err != nil {
		return nil, batchError("records", err)
	}
	return out, nil
}

// tooManyRecords says whether one record is too large or all of them together.
func tooManyRecords(req *brokerv1.AppendRequest, i int, size, limit int64) error {
	if i == 0 {
		return rpcerr.BatchTooLarge("records[0]", size, limit)
	}
	e := rpcerr.BatchTooLarge("records", size, limit)
	e.Message += fmt.Sprintf("; records[%d] of %d was the first that did not fit: send them in several requests", i, len(req.GetRecords()))
	return e
}
