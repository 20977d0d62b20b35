package remote

import (
	"container/list"
	"sync"
)

// cacheKey names the bytes of a range: objects never change.
type cacheKey struct {
	incarnation uint32
	attempt     int32
	epoch, seq  int64
	position    int64
}

func (r *Range) key() cacheKey {
	return cacheKey{incarnation: r.Incarnation, attempt: r.Attempt, epoch: r.RLMEpoch, seq: r.Sequence, position: r.Position}
}

// cache holds verified ranges, least recently used out first.
type cache struct {
	limit int64

	mu    sync.Mutex // guards all below
	size  int64
	order *list.List // of *cached, newest in front
	byKey map[cacheKey]*list.Element
}

type cached struct {
	key  cacheKey
	data []byte
}

func newCache(limit int64) *cache {
	return &cache{limit: limit, order: list.New(), byKey: map[cacheKey]*list.Element{}}
}

// get returns bytes that must not be changed.
func (c *cache) get(k cacheKey) ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.byKey[k]
	if e == nil {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).data, true
}

func (c *cache) put(k cacheKey, data []byte) {
	if int64(len(data)) > c.limit {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byKey[k] != nil {
		return
	}
	c.byKey[k] = c.order.PushFront(&cached{key: k, data: data})
	c.size += int64(len(data))
	for c.size > c.limit {
		e := c.order.Back()
		old := e.Value.(*cached)
		c.order.Remove(e)
		delete(c.byKey, old.key)
		c.size -= int64(len(old.data))
	}
}
