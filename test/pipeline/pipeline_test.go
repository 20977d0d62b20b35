package pipeline

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/test/cluster"
)

const (
	topic    = "orders"
	total    = 3000 // records, whose values are their offsets
	perBatch = 10
	inFlight = 5 // batches: what a partition remembers of a producer
)

// pause is between two attempts.
func pause(ctx context.Context) { _ = backoff.Sleep(ctx, 20*time.Millisecond) }

// A producer keeps five batches under way through a broker that need not lead, a
// follower reads behind it through any broker; the leader is killed in between,
// twice. Everything is stored once, in order, at the offsets acked.
func TestAPipelineAndAFollowerSurviveTheDeathOfLeaders(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Brokers: 3})
	c.CreateTopic(topic, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 2*cluster.Patience)
	defer cancel()
	var logs []brokerv1.LogServiceClient
	for _, m := range c.Members(cluster.RoleBroker) {
		logs = append(logs, c.Log(m))
	}
	var acked atomic.Int64
	done := make(chan error, 2)
	go func() { done <- produce(ctx, logs, &acked) }()
	go func() { done <- follow(ctx, logs) }()
	for _, at := range []int64{800, 1900} {
		c.Eventually(fmt.Sprintf("%d records acked", at), func() bool { return acked.Load() >= at || ctx.Err() != nil })
		leader, _ := c.Leader(topic, 0)
		leader.Restart()
	}
	for range 2 {
		require.NoError(t, <-done)
	}
}

// produce sends all records and checks every answer. Where a pipeline ended it
// goes on behind the last answer: what was stored already is answered again.
func produce(ctx context.Context, logs []brokerv1.LogServiceClient, acked *atomic.Int64) error {
	var id *brokerv1.InitProducerResponse
	for i := 0; id == nil; i++ {
		var err error
		if id, err = logs[i%len(logs)].InitProducer(ctx, &brokerv1.InitProducerRequest{}); err != nil {
			if rpcerr.React(err) == rpcerr.Fail {
				return err
			}
			pause(ctx)
		}
	}
	for i := 0; acked.Load() < total; i++ {
		err := pipe(ctx, logs[i%len(logs)], id, acked)
		if err != nil && rpcerr.React(err) == rpcerr.Fail {
			return fmt.Errorf("produce at %d: %w", acked.Load(), err)
		}
		pause(ctx)
	}
	return nil
}

// pipe is one stream.
func pipe(ctx context.Context, log brokerv1.LogServiceClient, id *brokerv1.InitProducerResponse, acked *atomic.Int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := log.Produce(ctx)
	if err != nil {
		return err
	}
	slots := make(chan struct{}, inFlight)
	sent := make(chan struct{})
	defer func() { cancel(); <-sent }()
	go func() {
		defer close(sent)
		b := record.NewBuilder(record.CodecNone)
		for n, next := int64(1), acked.Load(); next < total; n, next = n+1, next+perBatch {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return
			}
			raw, err := batch(b, id, next)
			if err != nil || stream.Send(&brokerv1.ProduceRequest{Request: n, Topic: topic, Batches: raw, Level: logv1.Level_LEVEL_OBJECT}) != nil {
				return // Recv tells
			}
		}
		_ = stream.CloseSend()
	}()
	for {
		m, err := stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if base := m.GetResult().GetBaseOffset(); base != acked.Load() {
			return fmt.Errorf("stored at %d instead of %d", base, acked.Load())
		}
		acked.Add(perBatch)
		<-slots
	}
}

func batch(b *record.Builder, id *brokerv1.InitProducerResponse, next int64) ([]byte, error) {
	b.Reset()
	b.SetProducer(id.GetProducerId(), int16(id.GetProducerEpoch()), int32(next))
	for i := range int64(perBatch) {
		if err := b.Append(record.Record{Timestamp: 1000 + next, Value: strconv.AppendInt(nil, next+i, 10)}); err != nil {
			return nil, err
		}
	}
	raw, _, err := b.Build(nil)
	return raw, err
}

// follow reads all records, stating what it saw last, and checks their order.
func follow(ctx context.Context, logs []brokerv1.LogServiceClient) error {
	next := int64(0)
	var last *logv1.Leadership
	for i := 1; ; i++ {
		req := &brokerv1.ReadRequest{Topic: topic, Follow: true, Start: &brokerv1.ReadRequest_Offset{Offset: next}, LastLeadership: last}
		stream, err := logs[i%len(logs)].Read(ctx, req)
		for err == nil && next < total {
			var m *brokerv1.ReadResponse
			if m, err = stream.Recv(); err != nil {
				break
			}
			for _, r := range m.GetRecords().GetRecords() {
				if value := string(r.GetRecord().GetValue()); r.GetOffset() != next || value != strconv.FormatInt(next, 10) {
					return fmt.Errorf("record %s at offset %d, wanted %d", value, r.GetOffset(), next)
				}
				next, last = next+1, r.GetLeadership()
			}
		}
		if next == total {
			return nil
		}
		if rpcerr.React(err) == rpcerr.Fail {
			return fmt.Errorf("follow at %d: %w", next, err)
		}
		pause(ctx)
	}
}
