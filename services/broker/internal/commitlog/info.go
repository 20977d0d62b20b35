package commitlog

import (
	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
)

// SegmentInfo describes a segment, for retention and for the tier.
type SegmentInfo struct {
	// Path is the segment file, IndexPath its index, which exists only once the
	// segment is rolled.
	Path, IndexPath string
	// Base and End are the offsets [Base, End).
	Base, End int64
	// BaseChain and EndChain are the chain hashes there.
	BaseChain, EndChain chainhash.Hash
	// Bytes is the size.
	Bytes int64
	// MaxTimestamp is the largest record timestamp in milliseconds since 1970;
	// math.MinInt64 in an empty segment.
	MaxTimestamp int64
	// Active says that the segment is appended to; the others never change
	// until they are removed or cut.
	Active bool
}

// Segments describes the segments in order; the last one is the active one.
func (l *Log) Segments() []SegmentInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := l.view.Load()
	out := make([]SegmentInfo, len(v.segments))
	for i, s := range v.segments {
		end := s.end
		if i == len(v.segments)-1 {
			l.tailMu.Lock()
			end = l.tail
			l.tailMu.Unlock()
		}
		out[i] = SegmentInfo{
			Path: s.path, IndexPath: l.fs.PathJoin(l.dir, segmentName(s.base.offset, indexSuffix)),
			Base: s.base.offset, End: end.offset, BaseChain: s.base.chain, EndChain: end.chain,
			Bytes: s.size.Load(), MaxTimestamp: s.maxTime.Load(), Active: i == len(v.segments)-1,
		}
	}
	return out
}

// Identity says what the directory holds.
func (l *Log) Identity() Identity { return l.id }

// Start is the local log start: the lowest offset that may be read here.
func (l *Log) Start() int64 { return l.view.Load().start }

// End is the log end offset.
func (l *Log) End() int64 { return l.end.Load() }

// Tail is the log end with its chain hash.
func (l *Log) Tail() (end int64, chain chainhash.Hash) {
	l.tailMu.Lock()
	defer l.tailMu.Unlock()
	return l.tail.offset, l.tail.chain
}

// RecoveryPoint is the offset below which everything is known to be on disk.
func (l *Log) RecoveryPoint() int64 {
	l.checkpointMu.Lock()
	defer l.checkpointMu.Unlock()
	return l.saved.recovery.offset
}

// Lineage gives the leaderships that wrote the log; its elements must not be
// changed.
func (l *Log) Lineage() lineage.Lineage { return l.view.Load().lineage }

// Size is the number of bytes of all segments.
func (l *Log) Size() int64 {
	var n int64
	for _, s := range l.view.Load().segments {
		n += s.size.Load()
	}
	return n
}

// Damage is what recovery found damaged below the recovery point, nil if
// nothing, or once it was truncated away.
func (l *Log) Damage() *Damage {
	if d := l.view.Load().damage; d != nil {
		found := *d
		return &found
	}
	return nil
}

// Failed is the error that ended the log's life as a writer, or nil.
func (l *Log) Failed() error {
	if f := l.failure.Load(); f != nil {
		return f
	}
	return nil
}
