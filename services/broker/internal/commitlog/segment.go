package commitlog

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// segmentName is the file name of the segment that begins at base.
func segmentName(base int64, suffix string) string {
	return fmt.Sprintf("%020d%s", base, suffix)
}

// parseSegmentName reads what segmentName writes.
func parseSegmentName(name, suffix string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok || len(digits) != 20 {
		return 0, false
	}
	base, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || base < 0 || segmentName(base, suffix) != name {
		return 0, false
	}
	return base, true
}

// segment is one open segment file. The writer adds to it; readers see the
// bytes below size.
type segment struct {
	path string
	base border
	file vfs.File
	idx  *index
	// size is the number of bytes readers may see. It is raised before the
	// log's end is, so whoever has read an end finds its bytes below size.
	size atomic.Int64
	// maxTime is the largest timestamp below size.
	maxTime atomic.Int64
	// end is where the segment ends; set when it is rolled, unused before.
	end border
	// since is the time of the first append after the segment was created or
	// opened; the age for rolling counts from it. Writer only.
	since time.Time
	// dirty says that bytes were written after the last sync. Guarded by Log.mu.
	dirty bool
	// rewrite is the position from which on recovery writes the bytes again.
	rewrite int64
	// refs counts the log's own reference and one per running read. The file is
	// closed with the last, so a segment may be dropped under a reader.
	refs atomic.Int64
}

func newSegment(path string, base border, file vfs.File, entries []indexEntry) *segment {
	s := &segment{path: path, base: base, file: file, idx: newIndex(entries)}
	s.maxTime.Store(noTimestamp)
	s.refs.Store(1)
	return s
}

// acquire takes a reference; false means that the segment is gone and the
// caller must look at a newer view.
func (s *segment) acquire() bool {
	for {
		n := s.refs.Load()
		if n == 0 {
			return false
		}
		if s.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// release gives a reference back.
func (s *segment) release() error {
	if s.refs.Add(-1) > 0 {
		return nil
	}
	if err := s.file.Close(); err != nil {
		return fmt.Errorf("close %s: %w", s.path, err)
	}
	return nil
}

// indexContent is what the segment's index file should hold, with end as the
// segment's end.
func (s *segment) indexContent(end border) indexFile {
	return indexFile{base: s.base, end: end, size: s.size.Load(), maxTime: s.maxTime.Load(), entries: s.idx.snapshot()}
}

// errStopScan ends a scan early without being an error.
var errStopScan = errors.New("stop")
