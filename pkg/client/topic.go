package client

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
)

// Topic is what a client has to know of a topic.
type Topic struct {
	// ID is the topic's id, a UUID.
	ID string
	// Name is its name.
	Name string
	// Partitions are in order of index.
	Partitions []Partition
	// MinAckLevel is the level that an append waits for when it names none.
	MinAckLevel Level
	// MaxBatchBytes is the largest record batch taken.
	MaxBatchBytes int64
}

// CheckLevel says whether acks at the level can be had; LevelDefault can always.
// An error has the reason LEVEL_UNREACHABLE, as the topic's leaders would say it.
func (t *Topic) CheckLevel(level Level) error {
	switch {
	case level == LevelDefault, level == LevelObject, level == LevelLeader && t.MinAckLevel != LevelObject:
		return nil
	case t.MinAckLevel == LevelObject:
		return rpcerr.LevelUnreachable(t.Name, level.String(), LevelObject.String())
	}
	return rpcerr.LevelUnreachable(t.Name, level.String(), LevelLeader.String()+","+LevelObject.String())
}

// CheckPartition says whether the topic has the partition.
func (t *Topic) CheckPartition(partition int) error {
	if partition < 0 || partition >= len(t.Partitions) {
		return fmt.Errorf("topic %s has no partition %d, only 0 to %d", t.Name, partition, len(t.Partitions)-1)
	}
	return nil
}

// CheckRecord says whether a producer of the topic would take the record; an
// error is a *RecordTooLargeError.
func (t *Topic) CheckRecord(r *Record) error {
	limit := t.MaxBatchBytes
	if limit <= 0 {
		limit = record.MaxBatchSize
	}
	if size := int64(r.size()) + record.HeaderSize; size > limit {
		return &RecordTooLargeError{Size: size, Limit: limit, What: "topic " + t.Name + " (max.batch.bytes)"}
	}
	return nil
}

// UnknownTopicError says that no broker asked knows the topic.
type UnknownTopicError struct {
	Name string
	// Err is what the last broker answered.
	Err error
}

func (e *UnknownTopicError) Error() string { return fmt.Sprintf("topic %q does not exist", e.Name) }
func (e *UnknownTopicError) Unwrap() error { return e.Err }

// Partition says who leads a partition.
type Partition struct {
	Index int32
	// LeaderID is the elected broker, 0 for none.
	LeaderID int32
	// LeaderAddress is where it is, empty when there is none.
	LeaderAddress string
	// LeaderEpoch is the partition's leader epoch.
	LeaderEpoch int32
	// Opened says whether the leader has opened its epoch.
	Opened bool
}

// refreshPause is the least time between two questions about one topic: many
// partitions lose their leader at once.
const refreshPause = 40 * time.Millisecond

// topicState is what the client remembers of a topic.
type topicState struct {
	// asking is held while a broker is asked, so that those who need the
	// same answer wait for one question.
	asking sync.Mutex
	// doubting, of capacity 1, is held while several brokers are asked about a
	// silent leader; it guards doubted, the time when that was done last.
	doubting chan struct{}
	doubted  time.Time

	mu      sync.Mutex // guards all below
	topic   *Topic     // immutable once here; nil before the first answer
	asked   time.Time
	leaders map[int32]lead // by partition, from hints newer than topic
}

func (c *Client) topicState(name string) *topicState {
	c.mu.Lock()
	defer c.mu.Unlock()
	st, ok := c.topics[name]
	if !ok {
		st = &topicState{leaders: map[int32]lead{}, doubting: make(chan struct{}, 1)}
		c.topics[name] = st
	}
	return st
}

// DescribeTopic asks any broker for a topic's partitions and leaders. A topic
// that is not known is asked for again for Options.TopicPatience; then the error
// is an *UnknownTopicError.
func (c *Client) DescribeTopic(ctx context.Context, name string) (*Topic, error) {
	patience := time.Now().Add(c.opts.TopicPatience)
	for attempt := 1; ; attempt++ {
		topic, err := c.describeTopic(ctx, name)
		if err == nil {
			c.topicState(name).put(topic, time.Now())
			return topic, nil
		}
		if !rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION) {
			return nil, err
		}
		if time.Now().After(patience) {
			return nil, &UnknownTopicError{Name: name, Err: err}
		}
		if werr := backoff.Sleep(ctx, c.retryDelay(attempt, err)); werr != nil {
			return nil, fmt.Errorf("%w; last: %w", werr, err)
		}
	}
}

func (c *Client) describeTopic(ctx context.Context, name string) (*Topic, error) {
	var resp *brokerv1.DescribeTopicResponse
	err := c.ask(ctx, func(ctx context.Context, s brokerv1.LogServiceClient) (err error) {
		resp, err = s.DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: name})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("describe topic %s: %w", name, err)
	}
	return topicOf(resp), nil
}

func topicOf(resp *brokerv1.DescribeTopicResponse) *Topic {
	out := &Topic{
		ID: resp.GetTopicId(), Name: resp.GetName(),
		MinAckLevel: Level(resp.GetMinAckLevel()), MaxBatchBytes: resp.GetMaxBatchBytes(),
		Partitions: make([]Partition, len(resp.GetPartitions())),
	}
	for i, p := range resp.GetPartitions() {
		out.Partitions[i] = Partition{
			Index: p.GetPartition(), LeaderID: p.GetLeaderId(), LeaderAddress: p.GetLeaderAddress(),
			LeaderEpoch: p.GetLeaderEpoch(), Opened: p.GetOpened(),
		}
	}
	return out
}

func (st *topicState) put(topic *Topic, now time.Time) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.topic, st.asked = topic, now
	clear(st.leaders)
}

// hint remembers a leader from a refusal.
func (st *topicState) hint(partition int32, at lead) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.leaders[partition] = at
}

func (st *topicState) known(partition int32) (at lead, topic *Topic, asked time.Time) {
	st.mu.Lock()
	defer st.mu.Unlock()
	at = st.leaders[partition]
	if at.address == "" && st.topic != nil && int(partition) < len(st.topic.Partitions) {
		p := &st.topic.Partitions[partition]
		at = lead{address: p.LeaderAddress, epoch: p.LeaderEpoch}
	}
	return at, st.topic, st.asked
}

// leader is a partition's leader, with an empty address when there is none now.
// With fresh, brokers are asked unless that happened a moment ago.
func (c *Client) leader(ctx context.Context, name string, partition int32, fresh bool) (lead, error) {
	st := c.topicState(name)
	at, topic, asked := st.known(partition)
	if !fresh && at.address != "" {
		return at, nil
	}
	if topic == nil || time.Since(asked) >= refreshPause {
		st.asking.Lock()
		if _, _, again := st.known(partition); again.Equal(asked) {
			if _, err := c.DescribeTopic(ctx, name); err != nil {
				st.asking.Unlock()
				return lead{}, err
			}
		}
		st.asking.Unlock()
	}
	at, topic, _ = st.known(partition)
	if partition < 0 || int(partition) >= len(topic.Partitions) {
		return lead{}, rpcerr.UnknownTopicOrPartition(fmt.Sprintf("%s/%d", name, partition))
	}
	return at, nil
}
