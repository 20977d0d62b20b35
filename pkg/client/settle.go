package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

// settle finds out what became of the oldest batch in flight, whose outcome is
// unknown. True means that the batch has its answer, or the lane has failed;
// false that it is to be sent again: the records were cut.
func (l *lane) settle(ctx context.Context, unknown error, deadline time.Time) bool {
	at, ok := placeOf(unknown)
	if !ok {
		return false // a repeat by sequence finds the batch as well
	}
	level := l.p.opts.Level
	if level == LevelDefault {
		level = l.p.topic.MinAckLevel
	}
	ctx, cancel := context.WithDeadlineCause(ctx, deadline, fmt.Errorf("not settled within %s: %w", l.p.opts.DeliveryTimeout, unknown))
	defer cancel()
	levels, broker, err := l.p.c.awaitDurability(ctx, l.p.opts.Topic, l.partition, at.end, at.leadership, level)
	switch {
	case err == nil:
		l.finish(Ack{Offset: at.base, Leadership: at.leadership, Levels: levels, Settled: true, Broker: broker})
		return true
	case rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_LOG_TRUNCATED):
		return false
	case ctx.Err() != nil && l.p.ctx.Err() != nil:
		return true // closing: run answers the batch
	default:
		l.fail(fmt.Errorf("%w; to settle it: %w", unknown, err))
		return true
	}
}

type place struct {
	base, end  int64
	leadership Leadership
}

// placeOf reads where the records of an OUTCOME_UNKNOWN were put.
func placeOf(err error) (place, bool) {
	e, ok := rpcerr.From(err)
	if !ok {
		return place{}, false
	}
	var vals [4]int64
	for i, key := range [...]string{"base_offset", "end_offset", "incarnation", "leader_epoch"} {
		if vals[i], ok = e.Int(key); !ok {
			return place{}, false
		}
	}
	return place{base: vals[0], end: vals[1], leadership: Leadership{Incarnation: uint32(vals[2]), LeaderEpoch: int32(vals[3])}}, true
}

// AwaitDurability waits until everything of the partition below end, appended by
// the leadership, has reached the level, and returns the levels reached. It
// follows the leader until ctx ends. LOG_TRUNCATED says that the records were
// cut, EXPIRED that they are below the log start.
func (c *Client) AwaitDurability(ctx context.Context, topic string, partition int32, end int64, by Leadership, level Level) (Levels, error) {
	levels, _, err := c.awaitDurability(ctx, topic, partition, end, by, level)
	return levels, err
}

func (c *Client) awaitDurability(ctx context.Context, topic string, partition int32, end int64, by Leadership, level Level) (Levels, string, error) {
	req := &brokerv1.AwaitDurabilityRequest{
		Topic: topic, Partition: partition, EndOffset: end, Leadership: by.proto(), Level: logv1.Level(level),
	}
	fresh := false
	for attempt := 1; ; attempt++ {
		at, err := c.leader(ctx, topic, partition, fresh)
		if err == nil && at.address != "" {
			var resp *brokerv1.AwaitDurabilityResponse
			if resp, err = c.awaitOnce(ctx, at, req); err == nil {
				return levelsOf(resp.GetLevels()), at.address, nil
			}
		}
		if ctx.Err() != nil {
			return 0, "", errors.Join(context.Cause(ctx), err)
		}
		if err != nil && !reactToRead(err) { // a question, so what goes for a read goes here
			return 0, "", err
		}
		if fresh = !errors.Is(err, errMoved); !fresh {
			continue // it is known who leads now
		}
		_ = backoff.Sleep(ctx, c.retryDelay(attempt, err)) // the next round looks at ctx
	}
}

// awaitOnce asks one leader, for a while: then it is time to ask whether it still
// leads. errMoved says that another one does already.
func (c *Client) awaitOnce(ctx context.Context, at lead, req *brokerv1.AwaitDurabilityRequest) (*brokerv1.AwaitDurabilityResponse, error) {
	service, err := c.service(at.address)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithTimeout(direct(ctx), 20*time.Second)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	var watcher sync.WaitGroup
	defer watcher.Wait()
	defer cancel(nil)
	begun := time.Now()
	watcher.Go(func() {
		c.watch(ctx, req.GetTopic(), req.GetPartition(), at, doubtAfter,
			func() time.Duration { return time.Since(begun) }, func() { cancel(errMoved) })
	})
	resp, err := service.AwaitDurability(ctx, req)
	if err != nil && errors.Is(context.Cause(ctx), errMoved) {
		err = errMoved
	}
	return resp, err
}
