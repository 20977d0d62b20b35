package state

import (
	"maps"
	"slices"
)

// Clone returns an independent copy: a controller applies its own entries to one
// before they are known to be in the log. The ranges, nearly all of a large
// state, are shared where they never change again.
func (s *State) Clone() *State {
	out := *s
	out.brokers = make(map[int32]*broker, len(s.brokers))
	for id, b := range s.brokers {
		out.brokers[id] = new(*b)
	}
	out.rlms = make(map[int32]*remoteLogManager, len(s.rlms))
	for id, r := range s.rlms {
		out.rlms[id] = new(*r) // what it remembers of commits never changes
	}
	out.topics = make(map[int64]*topic, len(s.topics))
	out.byID = make(map[string]*topic, len(s.byID))
	out.byName = make(map[string]*topic, len(s.byName))
	for offset, t := range s.topics {
		c := new(*t)
		c.overrides = maps.Clone(t.overrides)
		c.partitions = slices.Clone(t.partitions)
		for i := range c.partitions {
			p := &c.partitions[i]
			p.topic = c // replicas and lineage are replaced, never changed
			p.ranges = p.ranges.clone()
		}
		out.topics[offset] = c
		out.byID[c.id] = c
		if !c.deleted {
			out.byName[c.name] = c
		}
	}
	out.sorted = make([]*topic, len(s.sorted))
	for i, t := range s.sorted {
		out.sorted[i] = out.topics[t.creationOffset]
	}
	out.objects.slots = slices.Clone(s.objects.slots)
	out.objects.free = slices.Clone(s.objects.free)
	return &out
}
