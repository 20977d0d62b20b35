package watch

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/walobject"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

var (
	// ErrSlow: the subscriber is further behind than the ring reaches. It may
	// resume, and will get a reset.
	ErrSlow = errors.New("subscriber too far behind")
	// ErrGap: entries were published that don't follow the last one.
	ErrGap = errors.New("entries missing")
)

// Options bound a [Hub]'s ring. Zero values take the defaults named.
type Options struct {
	MaxEntries int // 65,536
	MaxBytes   int // of encoded entries and events, about: 64 MiB
}

// Reader reads the log in etcd; *metalog.Log in production. What it is asked for
// below the log's start is a [*metalog.TrimmedError].
type Reader interface {
	// EpochBefore is the controller epoch of the entry before an offset.
	EpochBefore(ctx context.Context, offset int64) (int64, error)
	// Entries calls fn for every entry from the offset on, in order, until the
	// log's end. An error of fn ends it and is returned.
	Entries(ctx context.Context, from int64, fn func(*metadatav1.Entry) error) error
}

// Hub is the applied log of one replica.
type Hub struct {
	opts Options

	mu      sync.RWMutex // guards all below
	state   *state.State
	ring    []record // entries [start, start+len(ring)), the last one at state's end - 1
	start   int64
	bytes   int
	epochs  []epochMark
	base    int64         // where the state came from a snapshot; what was before is not known
	applied int64         // bytes of all entries applied
	changed chan struct{} // closed and replaced at every publication
}

// record is an entry with what it means to watchers of partitions. Nothing of
// it changes once it is in the ring.
type record struct {
	entry  *metadatav1.Entry
	events []*metadatav1.SegmentEvent
	size   int
}

// epochMark says that entries from offset on were written by the controller of
// the epoch, up to the next mark.
type epochMark struct{ offset, epoch int64 }

// NewHub returns a hub of an empty log.
func NewHub(opts Options) *Hub {
	if opts.MaxEntries <= 0 {
		opts.MaxEntries = 1 << 16
	}
	if opts.MaxBytes <= 0 {
		opts.MaxBytes = 64 << 20
	}
	return &Hub{opts: opts, state: state.New(), changed: make(chan struct{})}
}

// Publish applies the entries that were not published before. Entries that do
// not follow are ErrGap and change nothing; an entry that can't be applied ends
// this replica: the error is the state's, and every later call returns it.
// The entries must not be changed afterwards.
func (h *Hub) Publish(entries []*metadatav1.Entry) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	news := false
	for _, e := range entries {
		end := h.state.EndOffset()
		switch {
		case e.GetOffset() < end:
			continue
		case e.GetOffset() > end:
			return fmt.Errorf("%w: entry %d where %d is next", ErrGap, e.GetOffset(), end)
		}
		if err := h.state.Apply(e); err != nil {
			return fmt.Errorf("apply metadata entry %d: %w", e.GetOffset(), err)
		}
		h.push(e)
		news = true
	}
	if news {
		close(h.changed)
		h.changed = make(chan struct{})
	}
	return nil
}

// Install replaces the whole state by one from a snapshot, if that is ahead, and
// reports whether it was. Subscribers that were below are too far behind then. A
// state that refused an entry stays as it is. s is the hub's from now on.
func (h *Hub) Install(s *state.State) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.EndOffset() <= h.state.EndOffset() {
		return false
	}
	p := s.Position()
	h.state = s
	h.base = p.GetOffset()
	h.ring, h.start, h.bytes = nil, h.base, 0
	h.epochs = []epochMark{{p.GetOffset() - 1, p.GetControllerEpoch()}}
	close(h.changed)
	h.changed = make(chan struct{})
	return true
}

// Log is the end of what was applied, and how many bytes the entries applied so
// far had.
func (h *Hub) Log() (end, bytes int64) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.state.EndOffset(), h.applied
}

// Identity is the cluster's, zero before its log has begun.
func (h *Hub) Identity() (clusterID string, incarnation uint32) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.state.ClusterID(), h.state.Incarnation()
}

// push adds an entry that was just applied to the ring.
func (h *Hub) push(e *metadatav1.Entry) {
	if n := len(h.epochs); n == 0 || h.epochs[n-1].epoch != e.GetControllerEpoch() {
		h.epochs = append(h.epochs, epochMark{e.GetOffset(), e.GetControllerEpoch()})
	}
	r := record{entry: e, events: h.state.SegmentEvents(e), size: proto.Size(e)}
	h.applied += int64(r.size)
	names := namer{clusterID: h.state.ClusterID()}
	for _, ev := range r.events {
		if committed := ev.GetRangeCommitted(); committed != nil {
			names.set(committed)
		}
	}
	r.size *= 1 + min(len(r.events), 1) // the events are about as large as the entry
	h.ring = append(h.ring, r)
	h.bytes += r.size
	for len(h.ring) > 1 && (len(h.ring) > h.opts.MaxEntries || h.bytes > h.opts.MaxBytes) {
		h.bytes -= h.ring[0].size
		h.ring[0] = record{} // the array keeps the place until append moves on
		h.ring = h.ring[1:]
		h.start++
	}
}

// namer fills in object names; neighbours are mostly of one object.
type namer struct {
	clusterID string
	last      *metadatav1.SegmentRange
}

func (n *namer) set(r *metadatav1.SegmentRange) {
	if n.last != nil && proto.Equal(n.last.GetObject(), r.GetObject()) {
		r.ObjectName = n.last.GetObjectName()
	} else {
		r.ObjectName = walobject.Name(n.clusterID, r.GetObject())
	}
	n.last = r
}

// NameObjects fills in the object names of ranges that a state returned.
func NameObjects(clusterID string, ranges []*metadatav1.SegmentRange) {
	names := namer{clusterID: clusterID}
	for _, r := range ranges {
		names.set(r)
	}
}

// Read calls fn with the applied state, which stays as it is during the call
// and must not be kept. fn must not block.
func (h *Hub) Read(fn func(*state.State)) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	fn(h.state)
}

// Clone returns a copy of the applied state.
func (h *Hub) Clone() *state.State {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.state.Clone()
}

// End is the offset of the next entry to apply.
func (h *Hub) End() int64 {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.state.EndOffset()
}

// Wait waits until everything below end has been applied, or ctx has ended.
func (h *Hub) Wait(ctx context.Context, end int64) error {
	for {
		h.mu.RLock()
		have, changed := h.state.EndOffset(), h.changed
		h.mu.RUnlock()
		if have >= end {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Ring is the extent of the entries in memory: offsets [start, end), and their
// size in bytes.
func (h *Hub) Ring() (start, end int64, bytes int) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.start, h.start + int64(len(h.ring)), h.bytes
}

// tail returns some records from the offset on, none at the end, and a channel
// that is closed when there are more.
func (h *Hub) tail(offset int64, limit int) ([]record, <-chan struct{}, error) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if offset < h.start {
		return nil, nil, fmt.Errorf("%w: at %d, the oldest entry in memory is %d", ErrSlow, offset, h.start)
	}
	at := min(int(offset-h.start), len(h.ring))
	return append([]record(nil), h.ring[at:min(at+limit, len(h.ring))]...), h.changed, nil
}

// position is the place behind the entry before offset.
func (h *Hub) position(offset int64) *metadatav1.MetadataPosition {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.positionLocked(offset)
}

func (h *Hub) positionLocked(offset int64) *metadatav1.MetadataPosition {
	return &metadatav1.MetadataPosition{
		Incarnation: h.state.Incarnation(), ControllerEpoch: h.epochBefore(offset), Offset: offset,
	}
}

// epochBefore is the controller epoch of the entry before offset, 0 at 0.
func (h *Hub) epochBefore(offset int64) int64 {
	i := sort.Search(len(h.epochs), func(i int) bool { return h.epochs[i].offset >= offset })
	if i == 0 {
		return 0
	}
	return h.epochs[i-1].epoch
}

// holds says whether the position is one of this log: it lies in the same
// incarnation, and the entry before it is by the same controller. A token of a
// rolled-back log is not (design review F12). Below the snapshot that the state
// came from nothing is held.
func (h *Hub) holds(p *metadatav1.MetadataPosition) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return p.GetOffset() >= h.base && p.GetIncarnation() == h.state.Incarnation() && p.GetOffset() >= 0 && p.GetOffset() <= h.state.EndOffset() &&
		p.GetControllerEpoch() == h.epochBefore(p.GetOffset())
}
