package fetcher

import "container/list"

// lru keeps the blocks used last, bounded by their bytes.
type lru struct {
	limit, size int64
	order       list.List // of *cached, the last used first
	byKey       map[key]*list.Element
}

type cached struct {
	key   key
	block *block
}

func (l *lru) init(limit int64) {
	l.limit, l.byKey = limit, make(map[key]*list.Element)
}

func (l *lru) get(k key) *block {
	e := l.byKey[k]
	if e == nil {
		return nil
	}
	l.order.MoveToFront(e)
	return e.Value.(*cached).block
}

// put adds a block, unless it is larger than the whole cache, and drops those
// that were not used for longest.
func (l *lru) put(k key, b *block) {
	n := b.bytes()
	if n > l.limit {
		return
	}
	if old := l.byKey[k]; old != nil {
		l.remove(old)
	}
	for l.size+n > l.limit {
		l.remove(l.order.Back())
	}
	l.byKey[k] = l.order.PushFront(&cached{k, b})
	l.size += n
}

// drop removes the block if it is the one kept.
func (l *lru) drop(k key, b *block) {
	if e := l.byKey[k]; e != nil && e.Value.(*cached).block == b {
		l.remove(e)
	}
}

func (l *lru) remove(e *list.Element) {
	c := e.Value.(*cached)
	l.order.Remove(e)
	delete(l.byKey, c.key)
	l.size -= c.block.bytes()
}
