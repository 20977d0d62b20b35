package gcsemu

import (
	"maps"
	"sync"
)

// Op is the kind of a request. Its values are stable: rules and stats use them.
type Op string

// The kinds of requests.
const (
	OpCreate Op = "create" // any upload request
	OpRead   Op = "read"   // a GET of content
	OpAttrs  Op = "attrs"
	OpList   Op = "list"
	OpDelete Op = "delete"
	OpBucket Op = "bucket" // settings and creation of buckets
	OpOther  Op = "other"  // all else
)

// Class is what a request is priced as.
func (o Op) class() string {
	switch o {
	case OpCreate, OpList:
		return "A"
	case OpDelete:
		return "free"
	default:
		return "B"
	}
}

// maxCountedObjects bounds the memory of the counters. Requests of further
// objects are counted under the name Overflow.
const maxCountedObjects = 1 << 17

// Overflow is the name that stands for all objects past the counters' limit.
const Overflow = "…"

// Stats are counters since the start or the last reset. Requests that a fault
// answered or cut are included: a client pays for them too.
type Stats struct {
	// ClassA, ClassB and Free count requests by price: creates and lists; reads,
	// attributes and bucket settings; deletes.
	ClassA int64 `json:"class_a"`
	ClassB int64 `json:"class_b"`
	Free   int64 `json:"free"`
	// Ops counts requests by kind, Objects by kind and object name.
	Ops     map[Op]int64            `json:"ops"`
	Objects map[Op]map[string]int64 `json:"objects"`
	// BytesIn and BytesOut count the bodies of requests and responses.
	BytesIn  int64 `json:"bytes_in"`
	BytesOut int64 `json:"bytes_out"`
	// Faults counts requests that a rule's action hit.
	Faults int64 `json:"faults"`
	// Swept is the number of torn files that were removed at the start.
	Swept int64 `json:"swept"`
}

type counters struct {
	swept int64 // set before the server serves

	mu      sync.Mutex
	s       Stats // guarded by mu
	objects int   // guarded by mu; names in s.Objects
}

func newCounters() *counters {
	c := &counters{}
	c.reset()
	return c
}

func (c *counters) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s = Stats{Ops: make(map[Op]int64), Objects: make(map[Op]map[string]int64)}
	c.objects = 0
}

func (c *counters) request(op Op, object string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch op.class() {
	case "A":
		c.s.ClassA++
	case "B":
		c.s.ClassB++
	default:
		c.s.Free++
	}
	c.s.Ops[op]++
	if object == "" {
		return
	}
	byName := c.s.Objects[op]
	if byName == nil {
		byName = make(map[string]int64)
		c.s.Objects[op] = byName
	}
	if _, known := byName[object]; !known {
		if c.objects >= maxCountedObjects {
			object = Overflow
		} else {
			c.objects++
		}
	}
	byName[object]++
}

func (c *counters) bytes(in, out int64, fault bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.BytesIn += in
	c.s.BytesOut += out
	if fault {
		c.s.Faults++
	}
}

func (c *counters) requests(op Op, object string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.s.Objects[op][object]
}

func (c *counters) snapshot() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.s
	s.Swept = c.swept
	s.Ops = maps.Clone(s.Ops)
	s.Objects = make(map[Op]map[string]int64, len(c.s.Objects))
	for op, byName := range c.s.Objects {
		s.Objects[op] = maps.Clone(byName)
	}
	return s
}
