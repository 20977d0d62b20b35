package api

import (
	"bytes"
	"context"
	"encoding/binary"
	"hash/crc32"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
	"github.com/braidlog/braid/services/broker/partition"
)

// recrc makes a changed batch's CRC fit again.
func recrc(b []byte) []byte {
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

func change(b []byte, fn func([]byte)) []byte { fn(b); return b }

func TestAppendStoresRecordsAndTellsTheLevelsReached(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		resp, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{
			Topic: "orders", Level: logv1.Level_LEVEL_OBJECT,
			Records: []*brokerv1.Record{
				{Key: []byte("a"), Value: []byte{}, Headers: []*brokerv1.Header{{Key: "h", Value: []byte("1")}, {Key: "h"}}},
				{Value: []byte("second"), TimestampMs: 42},
			},
		})
		require.NoError(t, err)
		require.Equal(t, topicID, resp.GetTopicId())
		require.EqualValues(t, 0, resp.GetBaseOffset())
		require.EqualValues(t, 2, resp.GetEndOffset())
		require.Equal(t, []logv1.Level{logv1.Level_LEVEL_LEADER, logv1.Level_LEVEL_OBJECT}, resp.GetLevels())
		require.EqualValues(t, incarnation, resp.GetLeadership().GetIncarnation())
		require.EqualValues(t, 4, resp.GetLeadership().GetLeaderEpoch())
		require.False(t, resp.GetDuplicate())
		require.NotNil(t, resp.GetAppendTime())

		var got []record.Record
		for r, err := range w.brokers[1].orders.batches[0].Records() {
			require.NoError(t, err)
			got = append(got, r.Clone())
		}
		require.Len(t, got, 2)
		require.Equal(t, time.Now().UnixMilli(), got[0].Timestamp, "0 is the broker's time")
		require.EqualValues(t, 42, got[1].Timestamp)
		require.NotNil(t, got[0].Value, "an empty value is not an absent one")
		require.Nil(t, got[1].Key)
		require.Len(t, got[0].Headers, 2)
		require.Nil(t, got[0].Headers[1].Value)
	})
}

func TestRawBatchesAreStoredAsTheyAre(t *testing.T) {
	runPlain(t, 1, 1, func(t *testing.T, w *world) {
		for _, codec := range []record.Codec{record.CodecNone, record.CodecGzip, record.CodecSnappy, record.CodecLZ4, record.CodecZstd} {
			sent := batch(t, codec, 3, 100, func(b *record.Builder) { b.SetProducer(int64(incarnation)<<32|9, 1, 7) })
			resp, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Batches: sent})
			require.NoError(t, err, codec)
			stored := w.brokers[1].orders.batches[len(w.brokers[1].orders.batches)-1]
			require.Equal(t, resp.GetBaseOffset(), stored.BaseOffset())
			require.Equal(t, record.Batch(sent).CRC(), stored.CRC())
			require.Equal(t, sent[16:], []byte(stored[16:]), "everything but base offset and leader epoch")
		}
	})
}

func TestBadAppendsAreRefusedByNameAndNothingIsStored(t *testing.T) {
	good := func() []byte { return batch(t, record.CodecNone, 2, 50) }
	cases := []struct {
		name   string
		req    *brokerv1.AppendRequest
		reason string
		code   codes.Code
		field  string // the first violation's, if any
		facts  map[string]string
	}{
		{name: "no topic", req: &brokerv1.AppendRequest{Records: values(1)}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "topic"},
		{name: "negative partition", req: &brokerv1.AppendRequest{Topic: "orders", Partition: -1, Records: values(1)}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "partition"},
		{name: "nothing to append", req: &brokerv1.AppendRequest{Topic: "orders"}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "records"},
		{name: "both forms", req: &brokerv1.AppendRequest{Topic: "orders", Records: values(1), Batches: good()}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "batches"},
		{name: "unknown level", req: &brokerv1.AppendRequest{Topic: "orders", Records: values(1), Level: 9}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "level"},
		{name: "negative expected epoch", req: &brokerv1.AppendRequest{Topic: "orders", Records: values(1), ExpectedLeaderEpoch: -1}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "expected_leader_epoch"},
		{name: "producer beside batches", req: &brokerv1.AppendRequest{Topic: "orders", Batches: good(), Producer: &brokerv1.Producer{ProducerId: 5}}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "producer"},
		{name: "producer without id", req: &brokerv1.AppendRequest{Topic: "orders", Records: values(1), Producer: &brokerv1.Producer{}}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "producer.producer_id"},
		{name: "producer epoch too large", req: &brokerv1.AppendRequest{Topic: "orders", Records: values(1), Producer: &brokerv1.Producer{ProducerId: 5, ProducerEpoch: math.MaxInt16 + 1}}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "producer.producer_epoch"},
		{name: "negative sequence", req: &brokerv1.AppendRequest{Topic: "orders", Records: values(1), Producer: &brokerv1.Producer{ProducerId: 5, BaseSequence: -2}}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "producer.base_sequence"},
		{name: "negative timestamp", req: &brokerv1.AppendRequest{Topic: "orders", Records: []*brokerv1.Record{{}, {TimestampMs: -5}}}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "records[1].timestamp_ms"},
		{name: "unknown topic", req: &brokerv1.AppendRequest{Topic: "nope", Records: values(1)}, reason: "UNKNOWN_TOPIC_OR_PARTITION", code: codes.NotFound},
		{name: "unknown partition", req: &brokerv1.AppendRequest{Topic: "orders", Partition: 77, Records: values(1)}, reason: "UNKNOWN_TOPIC_OR_PARTITION", code: codes.NotFound},
		{name: "record too large", req: &brokerv1.AppendRequest{Topic: "orders", Records: []*brokerv1.Record{{Value: make([]byte, maxBatch)}}}, reason: "BATCH_TOO_LARGE", code: codes.InvalidArgument, field: "records[0]", facts: map[string]string{"limit": "65536"}},
		{name: "records too large together", req: &brokerv1.AppendRequest{Topic: "orders", Records: []*brokerv1.Record{{Value: make([]byte, 40000)}, {Value: make([]byte, 40000)}}}, reason: "BATCH_TOO_LARGE", code: codes.InvalidArgument, field: "records", facts: map[string]string{"limit": "65536"}},
		{name: "batch too large", req: &brokerv1.AppendRequest{Topic: "orders", Batches: append(good(), batch(t, record.CodecNone, 1, maxBatch)...)}, reason: "BATCH_TOO_LARGE", code: codes.InvalidArgument, field: "batches[1]", facts: map[string]string{"limit": "65536", "size": "65613"}},
		{name: "wrong CRC", req: &brokerv1.AppendRequest{Topic: "orders", Batches: change(good(), func(b []byte) { b[len(b)-3] ^= 1 })}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "wrong CRC in the second", req: &brokerv1.AppendRequest{Topic: "orders", Batches: append(good(), change(good(), func(b []byte) { b[70] ^= 1 })...)}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[1]"},
		{name: "cut short", req: &brokerv1.AppendRequest{Topic: "orders", Batches: good()[:100]}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "bytes behind the last batch", req: &brokerv1.AppendRequest{Topic: "orders", Batches: append(good(), 0, 0, 0)}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[1]"},
		{name: "old format", req: &brokerv1.AppendRequest{Topic: "orders", Batches: change(good(), func(b []byte) { b[16] = 1 })}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "no batch at all", req: &brokerv1.AppendRequest{Topic: "orders", Batches: []byte("hello, world, this is not a batch of records at all, is it, no it is not")}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "transaction", req: &brokerv1.AppendRequest{Topic: "orders", Batches: batch(t, record.CodecNone, 1, 10, func(b *record.Builder) {
			b.SetProducer(5, 0, 0)
			b.SetTransactional(true)
		})}, reason: "UNSUPPORTED", code: codes.InvalidArgument, field: "batches[0]", facts: map[string]string{"feature": "a transaction"}},
		{name: "control batch", req: &brokerv1.AppendRequest{Topic: "orders", Batches: batch(t, record.CodecNone, 1, 10, func(b *record.Builder) { b.SetControl(true) })}, reason: "UNSUPPORTED", code: codes.InvalidArgument, field: "batches[0]", facts: map[string]string{"feature": "a control batch"}},
		{name: "unknown codec", req: &brokerv1.AppendRequest{Topic: "orders", Batches: recrc(change(good(), func(b []byte) { b[22] = 6 }))}, reason: "UNSUPPORTED", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "records that do not decode", req: &brokerv1.AppendRequest{Topic: "orders", Batches: recrc(change(good(), func(b []byte) { b[61] = 0xff }))}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "claims another codec than it has", req: &brokerv1.AppendRequest{Topic: "orders", Batches: recrc(change(good(), func(b []byte) { b[22] = byte(record.CodecZstd) }))}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "lies about its largest timestamp", req: &brokerv1.AppendRequest{Topic: "orders", Batches: recrc(change(good(), func(b []byte) { b[42]++ }))}, reason: "CORRUPT_BATCH", code: codes.InvalidArgument, field: "batches[0]"},
		{name: "nothing but headers", req: &brokerv1.AppendRequest{Topic: "orders", Batches: headers(t, record.MaxHeaders+1)}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "batches[0], record 1"},
		{name: "too many headers", req: &brokerv1.AppendRequest{Topic: "orders", Records: []*brokerv1.Record{{Headers: make([]*brokerv1.Header, record.MaxHeaders+1)}}}, reason: "INVALID_FIELD", code: codes.InvalidArgument, field: "records[0].headers"},
		{name: "a bomb", req: &brokerv1.AppendRequest{Topic: "orders", Batches: bomb(t)}, reason: "BATCH_TOO_LARGE", code: codes.InvalidArgument, field: "batches[0]", facts: map[string]string{"limit": "12582912"}},
	}
	runPlain(t, 1, 1, func(t *testing.T, w *world) {
		client := w.client(1)
		for _, c := range cases {
			_, err := client.Append(t.Context(), c.req)
			require.Error(t, err, c.name)
			e := refusal(t, err, c.reason)
			require.Equal(t, c.code, e.Code, c.name)
			for k, v := range c.facts {
				require.Equal(t, v, e.Metadata[k], "%s: %s", c.name, k)
			}
			if c.field != "" {
				v := violated(t, err)
				require.Equal(t, c.field, v.Field, c.name)
				require.NotEmpty(t, v.Description, c.name)
			}
		}
		require.Zero(t, w.brokers[1].orders.attempted)
	})
}

// headers is a batch, whole and intact, with n empty headers in its second record;
// [record.Builder] makes none with too many.
func headers(t *testing.T, n int) []byte {
	b := record.NewBuilder(record.CodecNone)
	for range 2 {
		require.NoError(t, b.Append(record.Record{Timestamp: 1}))
	}
	out, batch, err := b.Build(nil)
	require.NoError(t, err)
	// Of the second record: attributes, time delta, offset delta, no key, no value.
	body := binary.AppendVarint([]byte{0, 0, 2, 1, 1}, int64(n))
	body = append(body, bytes.Repeat([]byte{0, 1}, n)...) // empty keys, no values
	first := batch.Payload()[:len(batch.Payload())/2]
	records := append(binary.AppendVarint(bytes.Clone(first), int64(len(body))), body...)
	packed, err := record.Compress(nil, record.CodecLZ4, records)
	require.NoError(t, err)
	out = append(out[:record.HeaderSize], packed...)
	binary.BigEndian.PutUint32(out[8:], uint32(len(out)-12))
	out[22] |= byte(record.CodecLZ4)
	binary.BigEndian.PutUint32(out[17:], record.Batch(out).ComputeCRC())
	return out
}

// bomb is a small batch that unfolds to more than is allowed.
func bomb(t *testing.T) []byte {
	b := record.NewBuilder(record.CodecZstd)
	zeros := make([]byte, 1<<20)
	for range 13 {
		require.NoError(t, b.Append(record.Record{Timestamp: 1, Value: zeros}))
	}
	out, _, err := b.Build(nil)
	require.NoError(t, err)
	require.Less(t, len(out), maxBatch)
	return out
}

func TestAllBadFieldsAreNamedAtOnce(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Partition: -3, Level: 17})
		e := refusal(t, err, "INVALID_FIELD")
		var fields []string
		for _, v := range e.Violations {
			fields = append(fields, v.Field)
		}
		require.Equal(t, []string{"topic", "partition", "level", "records"}, fields)
	})
}

func TestRefusalsOfThePartitionCarryTheirFacts(t *testing.T) {
	cases := []struct {
		err    error
		reason string
		code   codes.Code
		facts  map[string]string
		retry  bool
	}{
		{&replica.FencedEpochError{Expected: 3, Current: 4}, "FENCED_LEADER_EPOCH", codes.FailedPrecondition, map[string]string{"leader_epoch": "4"}, false},
		{&replica.FencedEpochError{Expected: 5, Current: 4}, "UNKNOWN_LEADER_EPOCH", codes.Unavailable, map[string]string{"leader_epoch": "4"}, true},
		{&replica.LevelUnreachableError{Level: partition.Mirrored, Levels: []partition.Level{partition.Leader, partition.Object}}, "LEVEL_UNREACHABLE", codes.FailedPrecondition, map[string]string{"level": "MIRRORED", "levels": "LEADER,OBJECT"}, false},
		{&replica.BacklogFullError{Scope: "broker", Limit: 10, Unuploaded: 9}, "BACKLOG_FULL", codes.ResourceExhausted, map[string]string{"scope": "broker", "limit": "10", "unuploaded": "9"}, true},
		{&replica.TooManyRequestsError{Limit: 3}, "LIMIT_EXCEEDED", codes.ResourceExhausted, map[string]string{"limit": "3"}, true},
		{&replica.SequenceGapError{LastSequence: 6, LastOffset: 11, EpochStart: 8}, "SEQUENCE_GAP", codes.FailedPrecondition, map[string]string{"last_sequence": "6", "last_offset": "11", "epoch_start": "8"}, false},
		{&replica.ProducerFencedError{LastSequence: 6, LastOffset: 11, Reason: "old tag"}, "PRODUCER_FENCED", codes.FailedPrecondition, map[string]string{"last_sequence": "6", "last_offset": "11"}, false},
		{&replica.TooManyProducersError{Limit: 5}, "TOO_MANY_PRODUCERS", codes.ResourceExhausted, map[string]string{"limit": "5"}, true},
		{&replica.BatchTooLargeError{Size: 20, Limit: 10}, "BATCH_TOO_LARGE", codes.InvalidArgument, map[string]string{"size": "20", "limit": "10"}, false},
		{&replica.InvalidBatchError{Index: 2, Reason: "is of another producer"}, "INVALID_FIELD", codes.InvalidArgument, nil, false},
		{&replica.RecoveringError{Reason: "reconciling"}, "RECOVERING", codes.Unavailable, nil, true},
		{&replica.UnavailableError{Reason: replica.MetadataUnreachable, Message: "no session"}, "METADATA_UNREACHABLE", codes.Unavailable, nil, true},
		{&replica.UnavailableError{Reason: replica.NoRemoteLogManager, Message: "none"}, "NO_REMOTE_LOG_MANAGER", codes.Unavailable, nil, true},
		{&replica.UnavailableError{Reason: replica.ObjectStoreUnreachable, Message: "bucket"}, "OBJECT_STORE_UNREACHABLE", codes.Unavailable, nil, true},
		{&replica.UnavailableError{Reason: replica.NotReady, Message: "not yet"}, "NOT_READY", codes.Unavailable, nil, true},
		{replica.ErrStopped, "DRAINING", codes.Unavailable, nil, true},
		{&replica.PipelineBrokenError{Err: &replica.OutcomeUnknownError{Base: 1, End: 2}}, "NOT_LEADER", codes.Aborted, nil, false},
		{&replica.PipelineBrokenError{Err: &replica.FencedEpochError{Expected: 3, Current: 4}}, "NOT_LEADER", codes.Aborted, map[string]string{"leader_epoch": "4"}, false},
		{&replica.OutcomeUnknownError{Base: 10, End: 12, Leadership: leads, Levels: []partition.Level{partition.Leader}}, "OUTCOME_UNKNOWN", codes.Unavailable,
			map[string]string{"base_offset": "10", "end_offset": "12", "incarnation": "523934722", "leader_epoch": "4", "levels": "LEADER"}, false},
	}
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		for _, c := range cases {
			w.brokers[1].orders.refuse = func(replica.AppendInput) error { return c.err }
			_, err := client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
			e := refusal(t, err, c.reason)
			require.Equal(t, c.code, e.Code, "%v", err)
			for k, v := range c.facts {
				require.Equal(t, v, e.Metadata[k], "%s of %v", k, err)
			}
			require.Equal(t, c.retry, e.RetryDelay > 0, "%v", err)
		}
	})
}

func TestAnUnknownErrorTellsTheClientNothing(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].orders.refuse = func(replica.AppendInput) error { return context.Canceled }
		_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		require.Equal(t, codes.Canceled, status.Code(err))
		w.brokers[1].replicas.lookup = &record.CheckError{}
		_, err = w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		refused(t, err, "INTERNAL")
		require.NotContains(t, err.Error(), "batch")
	})
}

func TestTheCallerLearnsTheOffsetsBeforeItsDeadline(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		_, err := w.client(1).Append(ctx, &brokerv1.AppendRequest{Topic: "orders", Records: values(3), Level: logv1.Level_LEVEL_OBJECT})
		e := refusal(t, err, "OUTCOME_UNKNOWN")
		require.Equal(t, rpcerr.Settle, rpcerr.React(err))
		base, _ := e.Int("base_offset")
		end, _ := e.Int("end_offset")
		require.EqualValues(t, 0, base)
		require.EqualValues(t, 3, end)
		require.Less(t, time.Since(start), 3*time.Second)
		require.NoError(t, ctx.Err())

		// Without a deadline the server's own bound ends the wait.
		start = time.Now()
		ctx, cancel = context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err = w.client(1).Append(ctx, &brokerv1.AppendRequest{Topic: "orders", Records: values(1), Level: logv1.Level_LEVEL_OBJECT})
		refused(t, err, "OUTCOME_UNKNOWN")
		require.Equal(t, time.Minute, time.Since(start).Round(time.Second))
	})
}

func TestBatchesThatWaitToBeWrittenAreBounded(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.AppendBufferBytes = 16 << 20 }, func(t *testing.T, w *world) {
		s := w.brokers[1].service
		require.True(t, s.buffered.TryAcquire(16<<20-100))
		_, err := w.client(1).Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Batches: batch(t, record.CodecNone, 1, 200)})
		e := refusal(t, err, "LIMIT_EXCEEDED")
		require.Equal(t, codes.ResourceExhausted, e.Code)
		require.Positive(t, e.RetryDelay)
		require.Zero(t, w.brokers[1].orders.attempted)

		// A pipeline is not refused: it is not read on.
		stream, err := w.client(1).Produce(t.Context())
		require.NoError(t, err)
		require.NoError(t, stream.Send(&brokerv1.ProduceRequest{Request: 1, Topic: "orders", Batches: batch(t, record.CodecNone, 1, 200)}))
		synctest.Wait()
		require.Zero(t, w.brokers[1].orders.attempted)
		s.buffered.Release(16<<20 - 100)
		_, err = stream.Recv()
		require.NoError(t, err)
		require.NoError(t, stream.CloseSend())
		_, err = stream.Recv()
		require.Error(t, err)
		synctest.Wait()
		require.True(t, s.buffered.TryAcquire(16<<20), "all was given back")
	})
}
