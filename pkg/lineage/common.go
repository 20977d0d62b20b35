package lineage

// Common is what two logs share.
type Common struct {
	// Offset is the end (exclusive) of what both have in common, 0 if nothing.
	Offset int64
	// Last is the newest entry that both contain: the one Offset lies in, or
	// at whose start it lies. It is zero where none is shared.
	Last Entry
	// Found says that an entry is shared. Without one the logs are either
	// empty or of different histories, and must not be reconciled by
	// themselves.
	Found bool
}

// CommonPrefix is the offset (exclusive) up to which two logs are the same:
// the lesser end of the last leadership that both contain with the same start,
// 0 where there is none. aEnd and bEnd are the ends of the logs; a party whose
// end does not matter gives math.MaxInt64. See the package comment for why it
// is exact. It allocates nothing and is linear in both lineages.
func CommonPrefix(a Lineage, aEnd int64, b Lineage, bEnd int64) int64 {
	return FindCommon(a, aEnd, b, bEnd).Offset
}

// FindCommon is [CommonPrefix] with the entry that was found.
func FindCommon(a Lineage, aEnd int64, b Lineage, bEnd int64) Common {
	for i, j := len(a)-1, len(b)-1; i >= 0 && j >= 0; {
		switch {
		case a[i] == b[j]:
			// An entry may start above a log's end where the log was cut but
			// its lineage not yet: the end still holds.
			return Common{
				Offset: min(a.EndOf(i), aEnd, b.EndOf(j), bEnd),
				Last:   a[i],
				Found:  true,
			}
		case a[i].StartOffset > b[j].StartOffset:
			i--
		case a[i].StartOffset < b[j].StartOffset:
			j--
		default:
			// Two writers from one offset on: neither can be in the other.
			i--
			j--
		}
	}
	return Common{}
}

// ForkPoint answers a reader that has read up to offset and says who wrote the
// record before it. cut is false if that is what the log holds there, or if the
// lineage begins at or above offset and can't tell. Otherwise the reader's
// record is not in this log, and point is the offset (exclusive, at most
// offset) up to which it may have read the same: the end of that leadership
// here or, where it is unknown here, of the newest one with a lower epoch. The
// reader's branch may have parted below point; who needs the exact offset
// compares whole lineages with [CommonPrefix].
func (l Lineage) ForkPoint(last Leadership, offset int64) (point int64, cut bool) {
	who, ok := l.Predecessor(offset)
	if !ok || who == last {
		return offset, false
	}
	floor := l[0].StartOffset
	for i, e := range l {
		if e.LeaderEpoch > last.LeaderEpoch || (e.LeaderEpoch == last.LeaderEpoch && e.Leadership != last) {
			break
		}
		floor = l.EndOf(i)
	}
	return min(floor, offset), true
}
