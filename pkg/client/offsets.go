package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/braidlog/braid/pkg/backoff"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
)

// Offsets are the ends of a partition.
type Offsets struct {
	// LogStart is the first offset of the log.
	LogStart int64
	// HighWatermark is the end (exclusive) of what readers see.
	HighWatermark int64
	// LogEnd is the end (exclusive) of the leader's log.
	LogEnd int64
	// Leadership is who answered.
	Leadership Leadership
}

// PartitionOffsets asks a partition's leader for its offsets. It follows the
// leader until ctx ends.
func (c *Client) PartitionOffsets(ctx context.Context, topic string, partition int32) (Offsets, error) {
	var resp *brokerv1.ListOffsetsResponse
	err := c.askLeader(ctx, topic, partition, func(ctx context.Context, s brokerv1.LogServiceClient) (err error) {
		resp, err = s.ListOffsets(ctx, &brokerv1.ListOffsetsRequest{
			Topic: topic, Partition: partition,
			Spec: &brokerv1.ListOffsetsRequest_At{At: brokerv1.OffsetSpec_OFFSET_SPEC_LATEST},
		})
		return err
	})
	if err != nil {
		return Offsets{}, fmt.Errorf("offsets of %s/%d: %w", topic, partition, err)
	}
	return Offsets{
		LogStart: resp.GetLogStartOffset(), HighWatermark: resp.GetHighWatermark(), LogEnd: resp.GetLogEndOffset(),
		Leadership: leadershipOf(resp.GetLeadership()),
	}, nil
}

// Explain asks why a partition moves or does not move: its leader, or, when
// there is none or it doesn't answer, any broker.
func (c *Client) Explain(ctx context.Context, topic string, partition int32) (*brokerv1.ExplainPartitionResponse, error) {
	req := &brokerv1.ExplainPartitionRequest{Topic: topic, Partition: partition}
	at, err := c.leader(ctx, topic, partition, true)
	if err != nil {
		return nil, err
	}
	var resp *brokerv1.ExplainPartitionResponse
	call := func(ctx context.Context, s brokerv1.LogServiceClient) (err error) {
		resp, err = s.ExplainPartition(direct(ctx), req)
		return err
	}
	if at.address != "" {
		if err = c.askOne(ctx, at.address, call); err == nil {
			return resp, nil
		}
		c.skip(at.address)
	}
	if err := c.ask(ctx, call); err != nil {
		return nil, fmt.Errorf("explain %s/%d: %w", topic, partition, err)
	}
	return resp, nil
}

// askLeader calls fn with the leader of the moment until it answers. fn must be
// harmless to repeat.
func (c *Client) askLeader(ctx context.Context, topic string, partition int32, fn func(context.Context, brokerv1.LogServiceClient) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.opts.CallTimeout, fmt.Errorf("no leader answered within %s", c.opts.CallTimeout))
	defer cancel()
	fresh := false
	for attempt := 1; ; attempt++ {
		at, err := c.leader(ctx, topic, partition, fresh)
		if err == nil && at.address != "" {
			if err = c.askOne(direct(ctx), at.address, fn); err == nil {
				return nil
			}
			c.skip(at.address) // it might be silent about who leads, too
		}
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		if err != nil && !askAgain(err) {
			return err
		}
		fresh = true
		_ = backoff.Sleep(ctx, c.retryDelay(attempt, err)) // the next round looks at ctx
	}
}
