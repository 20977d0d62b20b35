//go:build unix

package torture_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/test/torture"
)

// source is a producer with its records: keys of its own, two for each partition, in
// turn.
type source struct {
	producer *client.Producer
	level    client.Level
	keys     []string
	lanes    []*lane // one for each partition
	answers  []chan waiting
}

type waiting struct {
	e *entry
	p client.Pending
}

// load is everything that writes and reads while the cluster is tortured.
type load struct {
	t       *testing.T
	brokers []string
	ids     atomic.Int64
	sources []*source
	follows map[slot]*follower

	sending   context.CancelFunc
	senders   sync.WaitGroup
	answering sync.WaitGroup
	reading   context.CancelFunc
	readers   sync.WaitGroup
}

func (l *load) dial() *client.Client {
	c, err := client.Dial(client.Options{Brokers: l.brokers})
	require.NoError(l.t, err)
	l.t.Cleanup(func() { c.Close() })
	return c
}

// add makes a producer on a client of its own.
func (l *load) add(ctx context.Context, topic string, level client.Level) {
	p, err := l.dial().NewProducer(ctx, client.ProducerOptions{Topic: topic, Level: level})
	require.NoError(l.t, err)
	l.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		p.Close(ctx)
	})
	s := &source{producer: p, level: level}
	for i := range p.Topic().Partitions {
		s.lanes = append(s.lanes, &lane{slot: slot{topic, int32(i)}, level: level})
		s.answers = append(s.answers, make(chan waiting, 1<<16))
	}
	of := make([]int, len(s.lanes))
	for n := 0; len(s.keys) < 2*len(s.lanes); n++ {
		key := fmt.Sprintf("%d-%d", len(l.sources), n)
		if at := p.PartitionFor([]byte(key)); of[at] < 2 {
			of[at]++
			s.keys = append(s.keys, key)
		}
	}
	l.sources = append(l.sources, s)
}

// start lets every producer send, rate records a second, and readers follow.
func (l *load) start(rates []float64) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(l.t.Context()))
	l.sending = cancel
	for i, s := range l.sources {
		for n := range s.lanes {
			l.answering.Go(func() { s.collect(n) })
		}
		l.senders.Go(func() { l.send(ctx, s, rates[i]) })
	}
	reading, stop := context.WithCancel(context.WithoutCancel(l.t.Context()))
	l.reading = stop
	l.follows = map[slot]*follower{}
	c := l.dial()
	for _, s := range l.sources {
		for _, at := range s.lanes {
			if l.follows[at.slot] == nil {
				f := &follower{}
				l.follows[at.slot] = f
				l.readers.Go(func() { f.follow(reading, c, at.slot) })
			}
		}
	}
	l.t.Cleanup(func() { // of a test that failed in between
		l.sending()
		l.senders.Wait()
		l.reading()
		l.readers.Wait()
	})
}

// send sends at a rate until ctx ends. A producer that asks for less than OBJECT goes
// on after a loss that it was told of; another one doesn't expect any.
func (l *load) send(ctx context.Context, s *source, rate float64) {
	defer func() {
		for _, c := range s.answers {
			close(c)
		}
	}()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	begin := time.Now()
	for n := 0; ; {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for due := int(now.Sub(begin).Seconds() * rate); n < due && ctx.Err() == nil; n++ {
				l.sendOne(ctx, s, s.keys[n%len(s.keys)])
			}
		}
	}
}

// sendOne sends a record, also when ctx ends meanwhile: waiting for room in the buffer is
// bounded by the producer's delivery timeout.
func (l *load) sendOne(ctx context.Context, s *source, key string) {
	at := s.producer.PartitionFor([]byte(key))
	e := &entry{id: l.ids.Add(1), key: key, sent: time.Now()}
	s.lanes[at].add(e)
	p, err := s.producer.Send(context.WithoutCancel(ctx), client.Record{Key: []byte(key), Value: content(e.id)})
	if err == nil {
		s.answers[at] <- waiting{e, p}
		return
	}
	s.lanes[at].settle(e, time.Now(), client.Ack{}, err)
	if s.level != client.LevelObject && ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(ctx, torture.Bound)
		defer cancel()
		_ = s.producer.Resume(ctx, at) // the next record tells
	}
}

// collect notes the answers of a lane.
func (s *source) collect(n int) {
	for w := range s.answers[n] {
		<-w.p.Done() // the producer answers within its delivery timeout, or when it is closed
		ack, err := w.p.Wait(context.Background())
		s.lanes[n].settle(w.e, w.p.AnsweredAt(), ack, err)
	}
}

// stop ends the sending and waits for the last answers.
func (l *load) stop(ctx context.Context) error {
	l.sending()
	l.senders.Wait()
	var errs []error
	for _, s := range l.sources {
		errs = append(errs, s.producer.Close(ctx))
	}
	l.answering.Wait()
	return errors.Join(errs...)
}

// objectLanes calls fn for the lanes that ask for OBJECT.
func (l *load) objectLanes(fn func(*lane)) {
	for _, s := range l.sources {
		if s.level == client.LevelObject {
			for _, x := range s.lanes {
				fn(x)
			}
		}
	}
}

// accepted is when the last of all partitions acked a record at OBJECT that was sent after
// a moment; and which partitions have not.
func (l *load) accepted(after time.Time) (last time.Time, missing []string) {
	first := map[slot]time.Time{}
	l.objectLanes(func(x *lane) {
		if _, known := first[x.slot]; !known {
			first[x.slot] = time.Time{}
		}
		at, ok := x.accepted(after)
		if have := first[x.slot]; ok && (have.IsZero() || at.Before(have)) {
			first[x.slot] = at
		}
	})
	for where, at := range first {
		if at.IsZero() {
			missing = append(missing, where.String())
		}
		if at.After(last) {
			last = at
		}
	}
	slices.Sort(missing)
	return last, missing
}

func (l *load) slowest(after, now time.Time) (worst time.Duration) {
	l.objectLanes(func(x *lane) { worst = max(worst, x.slowest(after, now)) })
	return worst
}

// unread is empty when the followers have read what was acked at OBJECT before a moment, each
// at its offset; it names one record for each partition where they have not.
func (l *load) unread(before time.Time) (missing []string) {
	l.objectLanes(func(x *lane) {
		log := l.follows[x.slot].snapshot()
		for _, e := range x.snapshot() {
			if e.err != nil || e.answered.IsZero() || !e.answered.Before(before) {
				continue
			}
			if e.ack.Offset >= int64(len(log)) || log[e.ack.Offset].id != e.id {
				missing = append(missing, fmt.Sprintf("%s: record %d, acked with offset %d; the reader is at %d", x.slot, e.id, e.ack.Offset, len(log)))
				return
			}
		}
	})
	return missing
}

// follower reads a partition while it is written.
type follower struct {
	mu  sync.Mutex // guards all below
	log []seen
	err error
}

func (f *follower) snapshot() []seen {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log[:len(f.log):len(f.log)] // only ever appended to
}

func (f *follower) follow(ctx context.Context, c *client.Client, at slot) {
	err := read(ctx, c, at, true, func(s seen) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.log = append(f.log, s)
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() == nil {
		f.err = err
	}
}

// read reads a partition from its start, to its end or on and on.
func read(ctx context.Context, c *client.Client, at slot, follow bool, fn func(seen)) (err error) {
	r, err := c.NewReader(client.ReaderOptions{Topic: at.topic, Partition: at.partition, Follow: follow})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	for {
		m, err := r.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		fn(seenOf(m))
	}
}
