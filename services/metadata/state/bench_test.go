package state_test

import (
	"bytes"
	"io"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// load commits objects of one range for each of the given partitions, again and
// again.
type load struct {
	*machine
	ranges []*logv1.RangeDescriptor
	rlm    int32
	epoch  int64
	next   int64
}

func newLoad(t testing.TB, partitions int32) *load {
	m := newMachine(t, 3, 1)
	topic := m.createTopic("quakes", topicID, partitions)
	l := &load{machine: m, rlm: 1}
	info, _ := m.s.RemoteLogManager(1)
	l.epoch = info.GetRlmEpoch()
	for i := range partitions {
		id := state.PartitionID{TopicCreationOffset: topic.TopicCreationOffset, Partition: i}
		m.openAt(id, 0)
		d := m.descriptor(id, 10, int64(i)*100)
		d.Fence, d.Predecessor = proto.Clone(d.Fence).(*logv1.Fence), nil
		l.ranges = append(l.ranges, d)
	}
	m.log = nil
	return l
}

// advance makes the next command: every partition's next ten records. Hashes do
// not change, which the state can't know.
func (l *load) advance(first bool) *metadatav1.CommitCombinedSegmentRequest {
	l.next++
	for _, d := range l.ranges {
		if !first {
			d.BaseOffset, d.EndOffset, d.BaseChainHash = d.EndOffset, d.EndOffset+10, d.EndChainHash
			d.Predecessor = d.Lineage[0].Leadership
		}
	}
	return &metadatav1.CommitCombinedSegmentRequest{
		ClusterId: clusterID, RlmId: l.rlm, SizeBytes: 1 << 24, Crc32C: 1, Ranges: l.ranges,
		Object: &logv1.ObjectRef{Incarnation: incarnation, RlmEpoch: l.epoch, Sequence: l.next, Attempt: 1},
	}
}

func (l *load) decide(t testing.TB, cmd *metadatav1.CommitCombinedSegmentRequest) *metadatav1.Entry {
	events, response, err := l.s.DecideCommit(cmd)
	if err != nil || len(events) != len(l.ranges)+1 {
		t.Fatal(err, response)
	}
	return &metadatav1.Entry{Offset: l.s.EndOffset(), Incarnation: incarnation, FeatureLevel: state.FeatureLevel, Events: events}
}

// BenchmarkCommit is one combined object of 200 ranges.
func BenchmarkCommit(b *testing.B) {
	const ranges = 200
	b.Run("decide", func(b *testing.B) {
		l := newLoad(b, ranges)
		cmd := l.advance(true)
		b.ReportAllocs()
		for b.Loop() {
			l.decide(b, cmd)
		}
	})
	b.Run("decide+apply", func(b *testing.B) {
		l := newLoad(b, ranges)
		b.ReportAllocs()
		for first := true; b.Loop(); first = false {
			if err := l.s.Apply(l.decide(b, l.advance(first))); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(b.N*ranges)/b.Elapsed().Seconds(), "ranges/s")
	})
	b.Run("decide+marshal+unmarshal+apply", func(b *testing.B) {
		l := newLoad(b, ranges)
		b.ReportAllocs()
		size := 0
		for first := true; b.Loop(); first = false {
			bytes, err := proto.Marshal(l.decide(b, l.advance(first)))
			if err != nil {
				b.Fatal(err)
			}
			size = len(bytes)
			e := &metadatav1.Entry{}
			if err := proto.Unmarshal(bytes, e); err != nil {
				b.Fatal(err)
			}
			if err := l.s.Apply(e); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(size)/ranges, "entry-B/range")
	})
}

func BenchmarkRangeLookup(b *testing.B) {
	l := newLoad(b, 1)
	for i := range 10_000 {
		require.NoError(b, l.s.Apply(l.decide(b, l.advance(i == 0))))
	}
	id, err := l.s.FindPartition("quakes", 0)
	require.NoError(b, err)
	b.ReportAllocs()
	offset := int64(0)
	for b.Loop() {
		offset = (offset + 77_777) % 100_000
		if r, _ := l.s.Ranges(id, offset, 1); len(r) != 1 || r[0].GetBaseOffset() > offset || r[0].GetEndOffset() <= offset {
			b.Fatal(r)
		}
	}
}

// fill applies commits until the state holds n ranges.
func (l *load) fill(t testing.TB, n int64) {
	for first := true; l.s.RangeCount() < n; first = false {
		require.NoError(t, l.s.Apply(l.decide(t, l.advance(first))))
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A metadata replica holds up to two million ranges (metadata.max.live.ranges):
// what one costs decides how large it is.
func TestARangeCostsFewBytes(t *testing.T) {
	const ranges = 200_000
	l := newLoad(t, 1_000)
	before := heap()
	l.fill(t, ranges)
	perRange := float64(heap()-before) / ranges
	t.Logf("%.1f bytes per range with 200 ranges a partition and 1,000 ranges an object", perRange)
	require.Less(t, perRange, 80.0)

	before = heap()
	clone := l.s.Clone()
	perRange = float64(heap()-before) / ranges
	t.Logf("%.1f bytes per range for a clone", perRange)
	require.Less(t, perRange, 25.0)
	require.Equal(t, l.s.RangeCount(), clone.RangeCount())
	runtime.KeepAlive(l)
}

func BenchmarkClone(b *testing.B) {
	l := newLoad(b, 1_000)
	l.fill(b, 200_000)
	b.ReportAllocs()
	for b.Loop() {
		l.s.Clone()
	}
}

func BenchmarkUndecided(b *testing.B) {
	l := newLoad(b, 4_000)
	for b.Loop() {
		l.s.Undecided(func(state.PartitionID) bool { b.Fatal("all are open"); return false })
	}
}

// million is a state of a million ranges in 1,000 partitions, 200 to an object.
func million(b *testing.B) *state.State {
	const partitions, groups = 1_000, 5
	l := newLoad(b, partitions)
	all := l.ranges
	for round := range 1_000_000 / partitions {
		for g := range groups {
			l.ranges = all[g*partitions/groups : (g+1)*partitions/groups]
			if err := l.s.Apply(l.decide(b, l.advance(round == 0))); err != nil {
				b.Fatal(err)
			}
		}
	}
	return l.s
}

// BenchmarkSnapshot writes and reads the snapshot of a million ranges. Hashes of
// real ranges differ, which the format's size does not depend on.
func BenchmarkSnapshot(b *testing.B) {
	s := million(b)
	var buf bytes.Buffer
	e, err := s.Encode(&buf)
	if err != nil {
		b.Fatal(err)
	}
	perRange := float64(e.Size) / float64(s.RangeCount())
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		b.SetBytes(e.Size)
		for b.Loop() {
			if _, err := s.Encode(io.Discard); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(perRange, "B/range")
	})
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		b.SetBytes(e.Size)
		for b.Loop() {
			if _, err := state.Decode(bytes.NewReader(buf.Bytes())); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("clone", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s.Clone()
		}
	})
}
