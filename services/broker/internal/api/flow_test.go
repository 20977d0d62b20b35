package api

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
)

// Field report B199: what is accepted at the front door can be read, in both
// formats, and a reader always moves.
func TestTheLargestBatchIsAcceptedAndRead(t *testing.T) {
	// The value that makes a batch of one record exactly as large as allowed.
	overhead := len(batch(t, record.CodecNone, 1, maxBatch)) - maxBatch
	largest := maxBatch - overhead
	require.Len(t, batch(t, record.CodecNone, 1, largest), maxBatch)
	run(t, 1, 1, func(c *Config) { c.ReadChunkBytes = 4 << 10 }, func(t *testing.T, w *world) {
		client := w.client(1)
		for diff, reason := range map[int]string{-1: "", 0: "", 1: "BATCH_TOO_LARGE"} {
			_, err := client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Batches: batch(t, record.CodecNone, 1, largest+diff)})
			if reason == "" {
				require.NoError(t, err)
			} else {
				refused(t, err, reason)
			}
			_, err = client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: []*brokerv1.Record{{Key: []byte("key-0"), Value: make([]byte, largest+diff), TimestampMs: 1000}}})
			if reason == "" {
				require.NoError(t, err)
			} else {
				require.Equal(t, "records[0]", violated(t, err).Field)
				refused(t, err, reason)
			}
		}
		for _, format := range []brokerv1.ReadFormat{brokerv1.ReadFormat_READ_FORMAT_RECORDS, brokerv1.ReadFormat_READ_FORMAT_BATCHES} {
			stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Format: format})
			require.NoError(t, err)
			all, err := drain(stream)
			require.ErrorIs(t, err, io.EOF)
			require.Len(t, all, 5, "a chunk smaller than a batch still holds one")
		}
	})
}

// Field report B203: a reader that does not read costs a window and a chunk.
func TestASlowReaderIsPausedAndNobodyElseIs(t *testing.T) {
	run(t, 1, 1, nil, func(t *testing.T, w *world) {
		const n, size = 600, 60_000 // 34 MiB
		var fetched atomic.Int64
		w.brokers[1].orders.fetched = &fetched
		raw := batch(t, record.CodecNone, 1, size)
		for range n {
			w.brokers[1].submit(t, append([]byte(nil), raw...))
		}
		slow, err := w.client(1).Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Follow: true})
		require.NoError(t, err)
		_, err = slow.Recv()
		require.NoError(t, err)
		synctest.Wait()
		// The stream's receive window is 4 MiB on either side of the connection.
		paused := fetched.Load()
		require.Less(t, paused, int64(10<<20))

		client := w.client(1)
		_, err = client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
		require.NoError(t, err)
		fast, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders"})
		require.NoError(t, err)
		all, err := drain(fast)
		require.ErrorIs(t, err, io.EOF)
		require.Len(t, offsets(all), n+1)

		read := 0
		for read < n+1 {
			m, err := slow.Recv()
			require.NoError(t, err)
			read += len(m.GetRecords().GetRecords())
		}
	})
}

// Field report B201: many calls and streams on one connection.
func TestManyCallsAndStreamsOnOneConnection(t *testing.T) {
	run(t, 2, 2, nil, func(t *testing.T, w *world) {
		client := w.client(1) // which forwards them all
		var wg sync.WaitGroup
		var failed atomic.Pointer[error]
		const appends, streams = 1000, 50
		for range streams {
			wg.Go(func() {
				stream, err := client.Read(t.Context(), &brokerv1.ReadRequest{Topic: "orders", Follow: true, MaxRecords: appends})
				for n := 0; err == nil; {
					var m *brokerv1.ReadResponse
					if m, err = stream.Recv(); err == nil {
						n += len(m.GetRecords().GetRecords())
					} else if n != appends {
						err = fmt.Errorf("%d records, then %w", n, err)
						failed.Store(&err)
					}
				}
			})
		}
		for range appends {
			wg.Go(func() {
				_, err := client.Append(t.Context(), &brokerv1.AppendRequest{Topic: "orders", Records: values(1)})
				if err != nil {
					failed.Store(&err)
				}
			})
		}
		wg.Wait()
		if err := failed.Load(); err != nil {
			require.NoError(t, errors.Join(*err))
		}
		require.EqualValues(t, appends, w.brokers[2].orders.Offsets().HighWatermark)
	})
}
