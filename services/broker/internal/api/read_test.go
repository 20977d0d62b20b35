package api

import (
	"context"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

func at(offset int64) *brokerv1.ReadRequest_Offset {
	return &brokerv1.ReadRequest_Offset{Offset: offset}
}

// submit appends a batch at the leader.
func (b *broker) submit(t *testing.T, raw []byte) {
	t.Helper()
	_, err := b.orders.Submit(t.Context(), replica.AppendInput{Batches: raw})
	require.NoError(t, err)
}

// got is what a stream sent, as one string per record.
func got(all []*brokerv1.ReadResponse) (out []string) {
	for _, m := range all {
		for _, r := range m.GetRecords().GetRecords() {
			out = append(out, fmt.Sprintf("%d %s=%d bytes", r.GetOffset(), r.GetRecord().GetKey(), len(r.GetRecord().GetValue())))
		}
	}
	return out
}

func TestReadBothFormatsOfAllCodecs(t *testing.T) {
	runPlain(t, 1, 1, func(t *testing.T, w *world) {
		var want []string
		var raw []byte
		for _, codec := range []record.Codec{record.CodecNone, record.CodecZstd, record.CodecNone, record.CodecGzip, record.CodecLZ4, record.CodecSnappy} {
			b := batch(t, codec, 3, 40)
			w.brokers[1].submit(t, b)
			raw = append(raw, b...)
			for i := range 3 {
				want = append(want, fmt.Sprintf("%d key-%d=40 bytes", len(want), i))
			}
		}
		client := w.client(1)
		stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		all, err := drain(stream)
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, want, got(all))
		start := all[0].GetStart()
		require.Equal(t, topicID, start.GetTopicId())
		require.EqualValues(t, 0, start.GetOffset())
		require.EqualValues(t, 18, start.GetHighWatermark())
		require.EqualValues(t, 18, all[len(all)-1].GetRecords().GetNextOffset())
		for _, m := range all[1:] {
			for _, r := range m.GetRecords().GetRecords() {
				require.EqualValues(t, 4, r.GetLeadership().GetLeaderEpoch())
				require.EqualValues(t, incarnation, r.GetLeadership().GetIncarnation())
			}
		}

		stream, err = client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Format: brokerv1.ReadFormat_READ_FORMAT_BATCHES, Start: at(4)})
		require.NoError(t, err)
		all, err = drain(stream)
		require.ErrorIs(t, err, io.EOF)
		var batches []byte
		for _, m := range all[1:] {
			batches = append(batches, m.GetBatches().GetBatches()...)
			require.Len(t, m.GetBatches().GetLineage(), 1)
		}
		first := len(batch(t, record.CodecNone, 3, 40))
		require.Equal(t, raw[first:], batches, "from the batch that holds the offset")
		require.EqualValues(t, 18, all[len(all)-1].GetBatches().GetNextOffset())
	})
}

func TestRecordsBelowTheStartAreNotSent(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].submit(t, batch(t, record.CodecLZ4, 10, 10))
		stream, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(7)})
		require.NoError(t, err)
		all, err := drain(stream)
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, []int64{7, 8, 9}, offsets(all))
		require.EqualValues(t, 7, all[0].GetStart().GetOffset())
	})
}

func TestLimitsOfAReadAreKept(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		for range 5 {
			w.brokers[1].submit(t, batch(t, record.CodecNone, 10, 100))
		}
		size := int64(len(batch(t, record.CodecNone, 10, 100)))
		client := w.client(1)
		read := func(req *brokerv1.ReadRequest) []*brokerv1.ReadResponse {
			req.Topic = "orders"
			stream, err := client.Read(t.Context(), req)
			require.NoError(t, err)
			all, err := drain(stream)
			require.ErrorIs(t, err, io.EOF)
			return all
		}
		require.Len(t, offsets(read(&brokerv1.ReadRequest{MaxRecords: 13})), 13)
		require.Len(t, offsets(read(&brokerv1.ReadRequest{MaxRecords: 13, Follow: true})), 13, "a limit ends a follower, too")
		require.Len(t, offsets(read(&brokerv1.ReadRequest{MaxBytes: 1})), 10, "at least one batch")
		require.Len(t, offsets(read(&brokerv1.ReadRequest{MaxBytes: size})), 10)
		require.Len(t, offsets(read(&brokerv1.ReadRequest{MaxBytes: size + 1})), 20)
		all := read(&brokerv1.ReadRequest{MaxRecords: 13, Format: brokerv1.ReadFormat_READ_FORMAT_BATCHES})
		require.EqualValues(t, 20, all[len(all)-1].GetBatches().GetNextOffset(), "batches are not cut")
	})
}

func TestLargeRunsAreSentInSmallMessages(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.ReadChunkBytes = 4 << 20 }, func(t *testing.T, w *world) {
		for range 40 {
			w.brokers[1].submit(t, batch(t, record.CodecNone, 1, 60_000))
		}
		for range 20 {
			w.brokers[1].submit(t, batch(t, record.CodecLZ4, 500, 1))
		}
		stream, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		all, err := drain(stream)
		require.ErrorIs(t, err, io.EOF)
		require.Len(t, offsets(all), 40+20*500)
		next := int64(0)
		for _, m := range all[1:] {
			r := m.GetRecords()
			require.LessOrEqual(t, len(r.GetRecords()), recordsPerMessage)
			size := 0
			for _, x := range r.GetRecords() {
				require.Equal(t, next, x.GetOffset())
				next++
				size += len(x.GetRecord().GetValue())
			}
			require.LessOrEqual(t, size, bytesPerMessage)
			require.Equal(t, next, r.GetNextOffset())
		}
	})
}

func TestAReadToTheEndStopsWhereTheEndWas(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		all, err := drain(stream)
		require.ErrorIs(t, err, io.EOF)
		require.Len(t, all, 1, "an empty partition has a beginning")

		w.brokers[1].orders.objects = false
		w.brokers[1].seed(t, 5)
		w.brokers[1].orders.commit(3)
		stream, err = client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		all, err = drain(stream)
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, []int64{0, 1, 2}, offsets(all), "nothing at or above the high watermark")
	})
}

func TestAFollowerGetsWhatComesAndHearsFromAnIdlePartition(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].seed(t, 1)
		stream, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Follow: true})
		require.NoError(t, err)
		for _, want := range []string{"start", "records"} {
			m, err := stream.Recv()
			require.NoError(t, err)
			require.NotNil(t, map[string]any{"start": m.GetStart(), "records": m.GetRecords()}[want])
		}
		start := time.Now()
		for range 3 {
			m, err := stream.Recv()
			require.NoError(t, err)
			require.EqualValues(t, 1, m.GetProgress().GetNextOffset())
			require.EqualValues(t, 1, m.GetProgress().GetHighWatermark())
		}
		require.Equal(t, 6*time.Second, time.Since(start), "every two seconds")
		w.brokers[1].seed(t, 1)
		m, err := stream.Recv()
		require.NoError(t, err)
		require.EqualValues(t, 1, m.GetRecords().GetRecords()[0].GetOffset())
	})
}

// Field reports B192 and B193: the reader is told where it is and can go on.
func TestADrainEndsReadersBetweenTwoMessages(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		w.brokers[1].seed(t, 2)
		var streams []interface {
			Recv() (*brokerv1.ReadResponse, error)
		}
		for range 100 {
			stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Follow: true})
			require.NoError(t, err)
			streams = append(streams, stream)
		}
		synctest.Wait()
		start := time.Now()
		w.brokers[1].server.EndStreams()
		for _, stream := range streams {
			next := int64(0)
			for {
				m, err := stream.Recv()
				if err != nil {
					require.Equal(t, codes.Unavailable, refusal(t, err, "DRAINING").Code)
					break
				}
				if r := m.GetRecords(); r != nil {
					next = r.GetNextOffset()
				}
			}
			require.EqualValues(t, 2, next)
		}
		require.Zero(t, time.Since(start), "at once")
	})
}

func TestOffsetsOutsideOfTheLogAreAnsweredWithItsBounds(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].seed(t, 20)
		w.brokers[1].orders.set(func() { w.brokers[1].orders.start = 10 })
		client := w.client(1)
		read := func(req *brokerv1.ReadRequest) error {
			req.Topic = "orders"
			stream, err := client.Read(t.Context(), req)
			require.NoError(t, err)
			_, err = drain(stream)
			return err
		}
		e := refusal(t, read(&brokerv1.ReadRequest{Start: at(9)}), "EXPIRED")
		require.Equal(t, codes.OutOfRange, e.Code)
		require.Equal(t, map[string]string{"log_start": "10", "high_watermark": "20", "log_end": "20"}, e.Metadata)
		e = refusal(t, read(&brokerv1.ReadRequest{Start: at(21)}), "OFFSET_OUT_OF_RANGE")
		require.Equal(t, codes.OutOfRange, e.Code)
		require.Equal(t, map[string]string{"log_start": "10", "high_watermark": "20", "log_end": "20"}, e.Metadata)
		require.ErrorIs(t, read(&brokerv1.ReadRequest{Start: at(20)}), io.EOF, "the end is a fine place to begin")
		require.ErrorIs(t, read(&brokerv1.ReadRequest{}), io.EOF)
	})
}

// Design review H8: another broker may have shown more already.
func TestAnOffsetAboveTheHighWatermarkWaitsAndIsNeverOutOfRange(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		p.objects = false
		w.brokers[1].seed(t, 12)
		p.commit(10)
		client := w.client(1)
		start := time.Now()
		stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(12)})
		require.NoError(t, err)
		_, err = drain(stream)
		require.Equal(t, codes.Unavailable, refusal(t, err, "NOT_READY").Code)
		require.Equal(t, 5*time.Second, time.Since(start))

		time.AfterFunc(time.Second, func() { p.commit(12) })
		stream, err = client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(12)})
		require.NoError(t, err)
		_, err = drain(stream)
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestAReaderIsToldOfACut(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		p := w.brokers[1].orders
		w.brokers[1].seed(t, 20)
		before := lineage.Leadership{Incarnation: incarnation, LeaderEpoch: 2}
		p.lineage = lineage.Lineage{{Leadership: before}, {Leadership: leads, StartOffset: 10}}
		client := w.client(1)
		for range 2 { // as often as one asks: nothing is remembered
			stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(15), LastLeadership: leadershipToProto(before)})
			require.NoError(t, err)
			_, err = drain(stream)
			e := refusal(t, err, "LOG_TRUNCATED")
			require.Equal(t, codes.OutOfRange, e.Code)
			require.Equal(t, "10", e.Metadata["fork_point"])
		}
		stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(10), LastLeadership: leadershipToProto(before)})
		require.NoError(t, err)
		all, err := drain(stream)
		require.ErrorIs(t, err, io.EOF)
		require.Len(t, offsets(all), 10)

		stream, err = client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: at(8)})
		require.NoError(t, err)
		all, err = drain(stream)
		require.ErrorIs(t, err, io.EOF)
		for _, m := range all {
			for _, r := range m.GetRecords().GetRecords() {
				want := before.LeaderEpoch
				if r.GetOffset() >= 10 {
					want = leads.LeaderEpoch
				}
				require.Equal(t, want, r.GetLeadership().GetLeaderEpoch(), "offset %d", r.GetOffset())
			}
		}
	})
}

func TestReadFromATime(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].submit(t, batch(t, record.CodecNone, 10, 1)) // 1000 to 1009 ms
		client := w.client(1)
		for want, from := range map[int64]time.Time{0: time.UnixMilli(5), 3: time.UnixMilli(1003), 4: time.UnixMilli(1003).Add(time.Nanosecond), 10: time.UnixMilli(5000)} {
			stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Start: &brokerv1.ReadRequest_Time{Time: timestamppb.New(from)}})
			require.NoError(t, err)
			all, err := drain(stream)
			require.ErrorIs(t, err, io.EOF)
			require.Equal(t, want, all[0].GetStart().GetOffset())
		}
	})
}

func TestBadReadsAreRefusedByField(t *testing.T) {
	cases := map[string]*brokerv1.ReadRequest{
		"topic":           {},
		"partition":       {Topic: "orders", Partition: -1},
		"offset":          {Topic: "orders", Start: at(-1)},
		"time":            {Topic: "orders", Start: &brokerv1.ReadRequest_Time{Time: &timestamppb.Timestamp{Seconds: -4}}},
		"last_leadership": {Topic: "orders", LastLeadership: &logv1.Leadership{Incarnation: 4}},
		"max_bytes":       {Topic: "orders", MaxBytes: -1},
		"max_records":     {Topic: "orders", MaxRecords: -1},
		"read_preference": {Topic: "orders", ReadPreference: 9},
		"format":          {Topic: "orders", Format: 9},
	}
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		client := w.client(1)
		for field, req := range cases {
			stream, err := client.Read(t.Context(), req)
			require.NoError(t, err)
			_, err = drain(stream)
			refused(t, err, "INVALID_FIELD")
			require.Equal(t, field, violated(t, err).Field)
		}
		for _, req := range []*brokerv1.ReadRequest{{Topic: "no"}, {Topic: "orders", Partition: 5}} {
			stream, err := client.Read(t.Context(), req)
			require.NoError(t, err)
			_, err = drain(stream)
			require.Equal(t, codes.NotFound, refusal(t, err, "UNKNOWN_TOPIC_OR_PARTITION").Code)
		}
	})
}

func TestDamageIsDataLossAndUnavailableStaysUnavailable(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		w.brokers[1].seed(t, 2)
		client := w.client(1)
		for reason, err := range map[string]error{
			"DATA_DAMAGED":             &replica.DamagedError{Where: "object x", Offset: 1, Position: 5, Length: 6, Err: io.ErrUnexpectedEOF},
			"OBJECT_STORE_UNREACHABLE": &replica.UnavailableError{Reason: replica.ObjectStoreUnreachable, Message: "down"},
			"RECOVERING":               &replica.RecoveringError{Reason: "reconciling"},
			"NOT_LEADER":               &replica.NotLeaderError{LeaderID: 3},
		} {
			w.brokers[1].orders.set(func() { w.brokers[1].orders.readErr = err })
			stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
			require.NoError(t, err)
			_, err = drain(stream)
			refused(t, err, reason)
		}
	})
}

func TestReadStreamsAreBounded(t *testing.T) {
	run(t, 1, 1, func(c *Config) { c.ReadMaxStreams = 2 }, func(t *testing.T, w *world) {
		client := w.client(1)
		ctx, cancel := context.WithCancel(t.Context())
		for range 2 {
			stream, err := client.Read(ctx, &brokerv1.ReadRequest{Topic: "orders", Follow: true})
			require.NoError(t, err)
			_, err = stream.Recv()
			require.NoError(t, err)
		}
		stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		_, err = drain(stream)
		e := refusal(t, err, "LIMIT_EXCEEDED")
		require.Equal(t, "2", e.Metadata["limit"])
		_, err = client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		require.NoError(t, err, "appends still work (field report B205)")
		cancel()
		synctest.Wait()
		stream, err = client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		_, err = drain(stream)
		require.ErrorIs(t, err, io.EOF)
	})
}

func TestKeysThatAreNoTextCanBeRead(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		b := record.NewBuilder(record.CodecNone)
		require.NoError(t, b.Append(record.Record{Timestamp: 1, Headers: []record.Header{{Key: []byte("a\xff"), Value: []byte{0xff}}}}))
		raw, _, err := b.Build(nil)
		require.NoError(t, err)
		w.brokers[1].submit(t, raw)
		stream, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		all, err := drain(stream)
		require.ErrorIs(t, err, io.EOF)
		h := all[1].GetRecords().GetRecords()[0].GetRecord().GetHeaders()[0]
		require.Equal(t, "a\uFFFD", h.GetKey())
		require.Equal(t, []byte{0xff}, h.GetValue())
	})
}
