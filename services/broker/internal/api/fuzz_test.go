package api

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// encoder is a stream that encodes what is sent, as gRPC does.
type encoder struct {
	grpc.ServerStreamingServer[brokerv1.ReadResponse]
	records int
	err     error
}

func (e *encoder) Context() context.Context { return context.Background() }

func (e *encoder) Send(m *brokerv1.ReadResponse) error {
	e.records += len(m.GetRecords().GetRecords())
	raw, err := proto.Marshal(m)
	if err == nil && len(raw) > 16<<20 {
		err = context.DeadlineExceeded
	}
	e.err = err
	return err
}

// FuzzCheckBatches holds the promise that a batch taken can be read: all its
// records are sent, as valid messages of bounded size.
func FuzzCheckBatches(f *testing.F) {
	for _, codec := range []record.Codec{record.CodecNone, record.CodecGzip, record.CodecSnappy, record.CodecLZ4, record.CodecZstd} {
		f.Add(batch(f, codec, 3, 20))
		f.Add(append(batch(f, codec, 1, 5), batch(f, codec, 2, 0)...))
	}
	w := newWorld(f, 1, 1, nil)
	f.Cleanup(w.close)
	s := w.brokers[1].service
	f.Fuzz(func(t *testing.T, raw []byte) {
		// Most mutations break the CRC, which says nothing about the rest.
		for rest := raw; len(rest) >= record.HeaderSize; {
			size, err := record.Peek(rest)
			if err != nil {
				break
			}
			recrc(rest[:size])
			rest = rest[size:]
		}
		facts, err := s.checkBatches(raw, 1<<20)
		if err != nil {
			return
		}
		base := int64(0)
		for b, err := range record.Batches(raw) {
			require.NoError(t, err)
			b.SetBaseOffset(base)
			base = b.EndOffset()
		}
		require.Equal(t, facts.records, base)
		e := new(encoder)
		out := &recordOutput{s: s, t: target{"orders", 0}}
		sent, next, err := out.send(e, replica.Fetched{Batches: raw, HighWatermark: base, Lineage: lineage.Lineage{{Leadership: leads}}}, 0, 1<<62)
		require.NoError(t, err)
		require.NoError(t, e.err)
		require.Equal(t, facts.records, sent)
		require.Equal(t, base, next)
		require.EqualValues(t, facts.records, e.records)
	})
}
