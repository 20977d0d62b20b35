package lineage

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
)

// ErrInvalid is matched by every error of this package: entries that can't be
// a lineage, or one that can't follow it.
var ErrInvalid = errors.New("lineage: invalid")

// Error says which entry is wrong and why. It matches [ErrInvalid].
type Error struct {
	Index  int // of the entry
	Entry  Entry
	Reason string
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("lineage: entry %d (%v): %s", e.Index, e.Entry, e.Reason)
}

// Is makes errors.Is(err, ErrInvalid) true.
func (e *Error) Is(target error) bool { return target == ErrInvalid }

// Leadership names one writer's term, unique over all clusters and for all
// time.
type Leadership struct {
	// Incarnation of the metadata log under which the leader was elected,
	// 1 to 2^31-1, minted at random.
	Incarnation uint32
	// LeaderEpoch is the partition's epoch, 0 or more. It is what a batch's
	// header stores.
	LeaderEpoch int32
}

// String is the incarnation in hexadecimal and the epoch, as in "1f3a9c02:7".
func (l Leadership) String() string { return fmt.Sprintf("%08x:%d", l.Incarnation, l.LeaderEpoch) }

// IsZero says whether l names nobody; incarnations are never 0.
func (l Leadership) IsZero() bool { return l == Leadership{} }

// Entry says from which offset on a leadership wrote.
type Entry struct {
	Leadership
	StartOffset int64 // first offset, inclusive
}

// String is the leadership and its start, as in "1f3a9c02:7@100".
func (e Entry) String() string { return fmt.Sprintf("%v@%d", e.Leadership, e.StartOffset) }

// Lineage is the list of leaderships that wrote a log, oldest first. The nil
// Lineage is that of a log that nobody wrote. Each entry reaches to the start
// of the next one, the last one to the end of the log, which the lineage does
// not know.
//
// Start offsets and leader epochs rise strictly: a leadership that wrote
// nothing leaves its place to its successor, and whoever opens an epoch takes a
// number above the last one in the lineage, whichever cluster that came from.
type Lineage []Entry

// String lists the entries, as in "[00000001:1@0 00000001:4@17]".
func (l Lineage) String() string {
	parts := make([]string, len(l))
	for i, e := range l {
		parts[i] = e.String()
	}
	return "[" + strings.Join(parts, " ") + "]"
}

// Validate checks ranges and order. Bytes from outside go through it before
// anything else here is called; on an invalid lineage the other results mean
// nothing, but nothing panics.
func (l Lineage) Validate() error {
	for i, e := range l {
		switch {
		case e.Incarnation == 0 || e.Incarnation > math.MaxInt32:
			return &Error{Index: i, Entry: e, Reason: "the incarnation is not within 31 bits, or 0"}
		case e.LeaderEpoch < 0:
			return &Error{Index: i, Entry: e, Reason: "negative leader epoch"}
		case e.StartOffset < 0:
			return &Error{Index: i, Entry: e, Reason: "negative start offset"}
		case i > 0 && e.StartOffset <= l[i-1].StartOffset:
			return &Error{Index: i, Entry: e, Reason: fmt.Sprintf("does not start above its predecessor (%v)", l[i-1])}
		case i > 0 && e.LeaderEpoch <= l[i-1].LeaderEpoch:
			return &Error{Index: i, Entry: e, Reason: fmt.Sprintf("its epoch is not above its predecessor's (%v)", l[i-1])}
		}
	}
	return nil
}

// Last is the newest entry; ok is false on an empty lineage.
func (l Lineage) Last() (e Entry, ok bool) {
	if len(l) == 0 {
		return Entry{}, false
	}
	return l[len(l)-1], true
}

// IndexAt is the index of the entry that covers offset, -1 if the lineage
// begins above it.
func (l Lineage) IndexAt(offset int64) int {
	return sort.Search(len(l), func(i int) bool { return l[i].StartOffset > offset }) - 1
}

// LeadershipAt is who wrote the record at offset, should the log reach that
// far; ok is false if the lineage begins above it.
func (l Lineage) LeadershipAt(offset int64) (who Leadership, ok bool) {
	i := l.IndexAt(offset)
	if i < 0 {
		return Leadership{}, false
	}
	return l[i].Leadership, true
}

// EpochAt is the leader epoch that batches at offset carry and the offset up
// to which they do (exclusive, math.MaxInt64 for the newest entry). It makes a
// Lineage what record.Checker looks epochs up in.
func (l Lineage) EpochAt(offset int64) (epoch int32, end int64, ok bool) {
	i := l.IndexAt(offset)
	if i < 0 {
		return 0, 0, false
	}
	return l[i].LeaderEpoch, l.EndOf(i), true
}

// EndOf is the offset at which entry i ends: the start of the next one, or
// math.MaxInt64 for the newest, which ends with the log.
func (l Lineage) EndOf(i int) int64 {
	if i+1 < len(l) {
		return l[i+1].StartOffset
	}
	return math.MaxInt64
}

// Append returns the lineage with e behind it. The same entry again changes
// nothing. At the start of the last entry, which then wrote nothing, e takes its
// place. Anything else that would not rise is an *[Error] and nothing is
// returned. l is not modified.
func (l Lineage) Append(e Entry) (Lineage, error) {
	last, ok := l.Last()
	if ok && last == e {
		return l, nil
	}
	keep := len(l)
	if ok && last.StartOffset == e.StartOffset && last.LeaderEpoch < e.LeaderEpoch {
		keep--
	}
	next := append(slices.Clip(l[:keep]), e)
	if err := next[max(keep-1, 0):].Validate(); err != nil {
		return nil, &Error{Index: keep, Entry: e, Reason: "can't follow " + l.String() + ": " + err.(*Error).Reason} //nolint:errorlint // Validate returns no other
	}
	return next, nil
}

// DropAt returns the entries that start below offset: the lineage of the log
// after it was truncated to that end. Entries above are dropped also where the
// log ended below them already (KAFKA-10706).
func (l Lineage) DropAt(offset int64) Lineage {
	n := l.IndexAt(offset-1) + 1
	return l[:n:n]
}

// TrimBelow returns the lineage of a log that now starts at offset: entries
// that end at or below it are dropped. The one that covers offset keeps its own
// start, since that is part of who it is. The newest entry always stays.
func (l Lineage) TrimBelow(offset int64) Lineage {
	return slices.Clip(l[max(l.IndexAt(offset), 0):])
}

// Slice returns the entries that wrote in [base, end), with their own starts,
// so the first may start below base. It is empty if base >= end. Where the
// lineage begins above base the first entry returned does too, which
// [Lineage.Covers] tells.
func (l Lineage) Slice(base, end int64) Lineage {
	if base >= end {
		return nil
	}
	lo := max(l.IndexAt(base), 0)
	hi := l.IndexAt(end-1) + 1
	if lo >= hi {
		return nil
	}
	return l[lo:hi:hi]
}

// Covers says whether the lineage tells for every offset from base on who
// wrote it.
func (l Lineage) Covers(base int64) bool { return len(l) > 0 && l[0].StartOffset <= base }

// Predecessor is who wrote the record before base: what a batch at base, or a
// range that begins there, names so that it is appended to nothing else (I3).
// ok is false at the start of the lineage.
func (l Lineage) Predecessor(base int64) (who Leadership, ok bool) {
	return l.LeadershipAt(base - 1)
}

// EqualBelow says whether a and b have the same entries below offset. Lineages
// that were trimmed at different log starts differ; [EqualIn] compares a part.
func EqualBelow(a, b Lineage, offset int64) bool {
	return slices.Equal(a.DropAt(offset), b.DropAt(offset))
}

// EqualIn says whether the same leaderships, with the same starts, wrote
// [base, end) in both and both cover all of it. An empty range is equal.
func EqualIn(a, b Lineage, base, end int64) bool {
	if base >= end {
		return true
	}
	return a.Covers(base) && b.Covers(base) && slices.Equal(a.Slice(base, end), b.Slice(base, end))
}
