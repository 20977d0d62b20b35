package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
)

// errStalled says that a leader was silent for too long.
var errStalled = errors.New("the leader gave no answer in time")

// errMoved says that another broker leads while the one asked says nothing.
var errMoved = errors.New("another broker leads the partition")

const (
	// doubtAfter is how long a leader may be silent about a request before other
	// brokers are asked who leads: a process that was paused, or cut off, can't
	// say itself that it was replaced.
	doubtAfter = 2 * time.Second
	// doubtStreamAfter is the same for a stream of records. Servers say at least
	// every two seconds that an idle partition is idle, so a healthy leader is
	// not doubted.
	doubtStreamAfter = 4 * time.Second
	// doubtAgain is the pause between two rounds of asking.
	doubtAgain = time.Second
	// doubtTimeout bounds one round.
	doubtTimeout = time.Second
	// doubtBreadth is how many brokers are asked in a round: one of them may be
	// cut off together with the silent one.
	doubtBreadth = 3
)

// lead says who leads a partition, as far as known.
type lead struct {
	address string // empty for nobody
	epoch   int32  // 0 when not known
}

// watch calls moved once when the leader has been silent for after and another
// broker is known to lead under a higher epoch. A leader that is only slow is
// never left: the others name it. It returns when moved was called or ctx ends.
func (c *Client) watch(ctx context.Context, topic string, partition int32, at lead, after time.Duration, silent func() time.Duration, moved func()) {
	timer := time.NewTimer(max(0, after-silent()))
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		if left := after - silent(); left > 0 {
			timer.Reset(left)
			continue
		}
		if c.replaced(ctx, topic, partition, at) && silent() >= after {
			moved()
			return
		}
		timer.Reset(doubtAgain)
	}
}

// replaced asks brokers other than the leader whether another one leads under a
// higher epoch, and remembers what they say. Those who doubt leaders of one topic
// share the answers.
func (c *Client) replaced(ctx context.Context, topic string, partition int32, at lead) bool {
	st := c.topicState(topic)
	select {
	case st.doubting <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	defer func() { <-st.doubting }()
	elsewhere := func() bool {
		now, _, _ := st.known(partition)
		return now.address != "" && now.address != at.address && now.epoch > at.epoch
	}
	if elsewhere() {
		return true // found out by another
	}
	if time.Since(st.doubted) < doubtAgain/2 {
		return false
	}
	answers := c.askOthers(ctx, topic, at.address)
	st.doubted = time.Now()
	for _, t := range answers {
		st.adopt(t)
	}
	if len(answers) > 0 {
		c.skip(at.address) // whoever answers is the better one to ask
	}
	return elsewhere()
}

// askOthers describes a topic by several brokers at once, none of them the silent
// one. Who doesn't answer soon is left out.
func (c *Client) askOthers(ctx context.Context, topic, silent string) []*Topic {
	c.mu.Lock()
	others := slices.DeleteFunc(slices.Clone(c.addresses), func(a string) bool { return a == silent })
	c.mu.Unlock()
	rand.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	others = others[:min(len(others), doubtBreadth)]
	ctx, cancel := context.WithTimeout(ctx, doubtTimeout)
	defer cancel()
	var (
		wg  sync.WaitGroup
		mu  sync.Mutex
		out []*Topic
	)
	for _, address := range others {
		wg.Go(func() {
			service, err := c.service(address)
			if err != nil {
				return
			}
			resp, err := service.DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: topic})
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			out = append(out, topicOf(resp))
		})
	}
	wg.Wait()
	return out
}

// adopt takes over from an answer what is newer than what is known, partition by
// partition. An answer about a topic of another id is left to DescribeTopic.
func (st *topicState) adopt(topic *Topic) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.topic == nil || st.topic.ID != topic.ID {
		return
	}
	merged := *st.topic
	merged.Partitions = slices.Clone(st.topic.Partitions)
	for i, p := range topic.Partitions {
		if i >= len(merged.Partitions) {
			merged.Partitions = append(merged.Partitions, p)
			continue
		}
		if p.LeaderEpoch > merged.Partitions[i].LeaderEpoch {
			merged.Partitions[i] = p
		}
		if hint, ok := st.leaders[int32(i)]; ok && p.LeaderEpoch > hint.epoch {
			delete(st.leaders, int32(i))
		}
	}
	st.topic = &merged
}
