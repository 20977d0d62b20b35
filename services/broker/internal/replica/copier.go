package replica

import (
	"container/heap"
	"context"
	"sync"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/internal/remote"
)

// How much a broker copies from the bucket at once, for all the partitions that
// it follows.
const (
	copyBytes   = 32 << 20 // being fetched, or waiting to be written
	copyObjects = 16       // objects read from
	copyRanges  = 32       // ranges read
	// copyBuffer is the largest buffer that is kept for another range: a range
	// that is larger than the usual ones is rare.
	copyBuffer = 2 << 20
)

// source names the remote-log manager's life that wrote an object: its objects
// have an order.
type source struct {
	incarnation uint32
	epoch       int64
}

// object names an object.
type object struct {
	source
	sequence int64
	attempt  int32
}

func objectOf(r *remote.Range) object {
	return object{source: source{r.Incarnation, r.RLMEpoch}, sequence: r.Sequence, attempt: r.Attempt}
}

// copyJob is the next range that a partition lacks.
type copyJob struct {
	p       *Partition
	attempt int64
	known   int // Partition.hydrations when it was made
	rg      remote.Located
	lineage lineage.Lineage
	ctx     context.Context //nolint:containedctx // ends with the fence that the job serves
}

// copier fetches committed ranges for the partitions that this broker follows.
//
// Each partition asks for one range at a time. Of all that is asked for the
// oldest object goes first, so that partitions which are behind stay close
// together and the remote-log manager finds the objects they share in its cache:
// one GET for all of them. Managers take turns, since only the objects of one
// have an order. A partition in trouble is not in the queue.
//
// It is safe for concurrent use.
type copier struct {
	m *Manager

	mu      sync.Mutex // guards all below
	queues  map[source]*jobHeap
	turns   []source // those with jobs, the next one first
	reading map[object]int
	ranges  int   // being fetched
	bytes   int64 // being fetched, or fetched and not written
	buffers [][]byte
}

func newCopier(m *Manager) *copier {
	return &copier{m: m, queues: map[source]*jobHeap{}, reading: map[object]int{}}
}

// add queues a job; its partition hears of it with [Partition.copied].
func (c *copier) add(j *copyJob) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := source{j.rg.Incarnation, j.rg.RLMEpoch}
	q := c.queues[s]
	if q == nil {
		q = &jobHeap{}
		c.queues[s] = q
		c.turns = append(c.turns, s)
	}
	heap.Push(q, j)
	c.dispatch()
}

// release gives back what a fetched range held.
func (c *copier) release(size int64, buf []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bytes -= size
	if cap(buf) > 0 && cap(buf) <= copyBuffer && len(c.buffers) < copyRanges {
		c.buffers = append(c.buffers, buf[:0])
	}
	c.dispatch()
}

// dispatch starts what the limits allow; mu is held.
func (c *copier) dispatch() {
	for tries := len(c.turns); tries > 0 && c.ranges < copyRanges; tries-- {
		s := c.turns[0]
		c.turns = append(c.turns[:0], c.turns[1:]...)
		q := c.queues[s]
		j := (*q)[0]
		o := objectOf(&j.rg.Range)
		if c.reading[o] == 0 && len(c.reading) >= copyObjects || c.bytes > 0 && c.bytes+j.rg.Length > copyBytes {
			c.turns = append(c.turns, s)
			continue
		}
		heap.Pop(q)
		if q.Len() > 0 {
			c.turns = append(c.turns, s)
			tries = len(c.turns) + 1
		} else {
			delete(c.queues, s)
		}
		c.reading[o]++
		c.ranges++
		c.bytes += j.rg.Length
		var buf []byte
		if n := len(c.buffers); n > 0 {
			buf, c.buffers = c.buffers[n-1], c.buffers[:n-1]
		}
		if !c.m.spawn(func() { c.run(j, o, buf) }) {
			return // the broker is stopping
		}
	}
}

// run fetches one range.
func (c *copier) run(j *copyJob, o object, buf []byte) {
	data, err := c.m.remote.Copy(j.ctx, j.rg, j.lineage, buf)
	c.mu.Lock()
	c.ranges--
	if c.reading[o]--; c.reading[o] == 0 {
		delete(c.reading, o)
	}
	c.mu.Unlock()
	if err != nil {
		c.release(j.rg.Length, buf)
		data = nil
	} else {
		c.m.metrics.copied(len(data))
	}
	// The bytes are given back once they are written.
	j.p.post(copied{job: j, data: data, err: err})
}

// jobHeap holds jobs of one source, the oldest object first.
type jobHeap []*copyJob

func (h jobHeap) Len() int { return len(h) }

func (h jobHeap) Less(i, k int) bool {
	a, b := &h[i].rg.Range, &h[k].rg.Range
	if a.Sequence != b.Sequence {
		return a.Sequence < b.Sequence
	}
	return a.Position < b.Position
}

func (h jobHeap) Swap(i, k int) { h[i], h[k] = h[k], h[i] }

func (h *jobHeap) Push(x any) { *h = append(*h, x.(*copyJob)) } //nolint:forcetypeassert // ours

func (h *jobHeap) Pop() any {
	old := *h
	n := len(old) - 1
	j := old[n]
	old[n] = nil
	*h = old[:n]
	return j
}
