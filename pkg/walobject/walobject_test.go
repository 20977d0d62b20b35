package walobject_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func header() walobject.Header {
	return walobject.Header{
		ClusterID: "3c0f1d52-6b1e-4f0e-9a53-0f6d7d1c2b3a",
		Object:    &logv1.ObjectRef{Incarnation: walobjecttest.Incarnation, RlmEpoch: 41, Sequence: 7, Attempt: 1},
		RLMID:     2, AppliedMetadataOffset: 99,
		CreateTime: time.UnixMilli(1_700_000_000_123).UTC(),
	}
}

// sample is three ranges of two partitions, one of them over two epochs.
func sample() []walobject.Range {
	a, b := walobjecttest.NewPartition(5, 0), walobjecttest.NewPartition(5, 1)
	var out []walobject.Range
	add := func(d *logv1.RangeDescriptor, data []byte) {
		out = append(out, walobject.Range{Footer: &storagev1.RangeFooter{Range: d}, Data: data})
	}
	add(a.Append(2, 3, 10))
	a.Elect(2, 80)
	add(a.Append(1, 1, 5))
	b.Append(1, 1, 1) // not in the object: the range begins above 0
	d, data := b.Append(1, 2, 4)
	add(d, data)
	out[2].Footer.Producers = []*logv1.ProducerSummary{{
		ProducerId: int64(walobjecttest.Incarnation)<<32 | 9, ProducerEpoch: 1,
		Batches: []*logv1.ProducerBatch{{FirstSequence: 0, LastSequence: 1, BaseOffset: 1, EndOffset: 3, MaxTimestampMs: 1_700_000_000_000}},
	}}
	out[2].Footer.Expiries = []*logv1.ProducerExpiry{{ProducerId: int64(walobjecttest.Incarnation)<<32 | 4}}
	return out
}

func build(t testing.TB, ranges []walobject.Range) (*walobject.Object, []byte) {
	t.Helper()
	o, err := walobject.Build(header(), ranges)
	require.NoError(t, err)
	return o, bytes.Join(o.Parts, nil)
}

func TestBuiltObjectReadsBack(t *testing.T) {
	ranges := sample()
	o, content := build(t, ranges)
	require.EqualValues(t, len(content), o.Size)
	require.Equal(t, crc32.Checksum(content, castagnoli), o.CRC32C)
	require.Same(t, &ranges[0].Data[0], &o.Parts[0][0], "no copy")

	f, err := walobject.ReadFooter(content, o.Size)
	require.NoError(t, err)
	require.Len(t, f.GetRanges(), 3)
	for i, r := range f.GetRanges() {
		d := r.GetRange()
		require.True(t, proto.Equal(d, o.Ranges[i]))
		data := content[d.GetPosition() : d.GetPosition()+d.GetLengthBytes()]
		require.NoError(t, walobject.VerifyRange(d, data))
		require.NoError(t, walobject.VerifyBytes(d, data))
	}

	// A short tail says how much is needed; that much is enough.
	_, err = walobject.ReadFooter(content[len(content)-walobject.TrailerSize:], o.Size)
	require.ErrorIs(t, err, walobject.ErrShort)
	var e *walobject.Error
	require.ErrorAs(t, err, &e)
	_, err = walobject.ReadFooter(content[int64(len(content))-e.Need:], o.Size)
	require.NoError(t, err)
	_, err = walobject.ReadFooter(content[int64(len(content))-e.Need+1:], o.Size)
	require.ErrorIs(t, err, walobject.ErrShort)
}

func TestGoldenBytes(t *testing.T) {
	_, content := build(t, sample())
	const file = "testdata/object-v1.hex"
	if *rewrite {
		var b strings.Builder
		for i := 0; i < len(content); i += 32 {
			b.WriteString(hex.EncodeToString(content[i:min(i+32, len(content))]) + "\n")
		}
		require.NoError(t, os.WriteFile(file, []byte(b.String()), 0o644))
	}
	golden, err := os.ReadFile(file)
	require.NoError(t, err)
	want, err := hex.DecodeString(strings.ReplaceAll(string(golden), "\n", ""))
	require.NoError(t, err)
	require.Equal(t, want, content, "the format is frozen: objects written by earlier releases must stay readable")

	// The trailer, taken apart by hand.
	tr := content[len(content)-32:]
	require.Equal(t, "BraidWAL", string(tr[24:]))
	footerSize := int(binary.BigEndian.Uint32(tr))
	footer := content[len(content)-32-footerSize : len(content)-32]
	require.Equal(t, crc32.Checksum(footer, castagnoli), binary.BigEndian.Uint32(tr[4:]))
	require.EqualValues(t, 1, binary.BigEndian.Uint16(tr[8:]))
	require.EqualValues(t, len(content)-32-footerSize, binary.BigEndian.Uint64(tr[16:]))
}

func TestNames(t *testing.T) {
	ref := &logv1.ObjectRef{Incarnation: 0x1f3a9c02, RlmEpoch: 41, Sequence: 7, Attempt: 1}
	name := walobject.Name("cluster", ref)
	require.Equal(t, "cluster/wal/32cb471d-1f3a9c02-0000000000000029-0000000000000007-0001", name)
	require.True(t, strings.HasPrefix(name, walobject.Prefix("cluster")))
	id, back, err := walobject.ParseName(name)
	require.NoError(t, err)
	require.Equal(t, "cluster", id)
	require.True(t, proto.Equal(ref, back))
	for _, bad := range []string{
		"", "cluster", "cluster/wal/", "/wal/" + name[12:], "x/y/wal/" + name[12:], name + "0", name[:len(name)-1],
		strings.ToUpper(name), strings.Replace(name, "32cb471d", "32cb471e", 1),
		walobject.Name("cluster", &logv1.ObjectRef{Incarnation: 1, RlmEpoch: 1, Sequence: 0, Attempt: 1}),
		walobject.Name("cluster", &logv1.ObjectRef{Incarnation: 1 << 31, RlmEpoch: 1, Sequence: 1, Attempt: 1}),
		"cluster/wal/+0000000-1f3a9c02-0000000000000029-0000000000000007-0001",
	} {
		_, _, err := walobject.ParseName(bad)
		require.ErrorIs(t, err, walobject.ErrCorrupt, "%q", bad)
	}
}

func TestChecksumIsCombinedFromTheRanges(t *testing.T) {
	ranges := sample()
	o, _ := build(t, ranges)
	// A bit that flips after the range was verified is not summed anew: the
	// store will see another checksum than the one announced.
	ranges[1].Data[70] ^= 1
	o2, content := build(t, ranges)
	require.Equal(t, o.CRC32C, o2.CRC32C)
	require.NotEqual(t, crc32.Checksum(content, castagnoli), o2.CRC32C)
}

func TestBuildRefusesWhatMakesNoObject(t *testing.T) {
	cases := map[string]func(h *walobject.Header, r []walobject.Range) []walobject.Range{
		"no cluster":    func(h *walobject.Header, r []walobject.Range) []walobject.Range { h.ClusterID = ""; return r },
		"no object":     func(h *walobject.Header, r []walobject.Range) []walobject.Range { h.Object = nil; return r },
		"no sequence":   func(h *walobject.Header, r []walobject.Range) []walobject.Range { h.Object.Sequence = 0; return r },
		"attempt":       func(h *walobject.Header, r []walobject.Range) []walobject.Range { h.Object.Attempt = 1 << 16; return r },
		"no ranges":     func(_ *walobject.Header, r []walobject.Range) []walobject.Range { return nil },
		"order":         func(_ *walobject.Header, r []walobject.Range) []walobject.Range { r[0], r[1] = r[1], r[0]; return r },
		"twice":         func(_ *walobject.Header, r []walobject.Range) []walobject.Range { r[1] = r[0]; return r },
		"no descriptor": func(_ *walobject.Header, r []walobject.Range) []walobject.Range { r[0].Footer.Range = nil; return r },
		"length":        func(_ *walobject.Header, r []walobject.Range) []walobject.Range { r[0].Data = r[0].Data[1:]; return r },
		"hash": func(_ *walobject.Header, r []walobject.Range) []walobject.Range {
			r[0].Footer.Range.EndChainHash = nil
			return r
		},
		"empty": func(_ *walobject.Header, r []walobject.Range) []walobject.Range {
			r[2].Footer.Range.EndOffset = r[2].Footer.Range.BaseOffset
			return r
		},
	}
	for name, change := range cases {
		t.Run(name, func(t *testing.T) {
			h := header()
			_, err := walobject.Build(h, change(&h, sample()))
			if err == nil {
				_, err = walobject.Build(h, change(&h, sample()))
			}
			require.ErrorIs(t, err, walobject.ErrInvalid)
		})
	}
}

// Field report B103: an object that is empty or full of zeros is told as
// damage, at once, whatever it claims to be.
func TestDamagedObjectsAreTold(t *testing.T) {
	_, content := build(t, sample())
	for _, n := range []int{0, 1, 31, 32, 33, 1000} {
		_, err := walobject.ReadFooter(make([]byte, n), int64(n))
		require.ErrorIs(t, err, walobject.ErrCorrupt, "%d zeros", n)
	}
	for i := range content {
		broken := bytes.Clone(content)
		broken[i] ^= 0x10
		f, err := walobject.ReadFooter(broken, int64(len(broken)))
		if err != nil {
			require.True(t, errors.Is(err, walobject.ErrCorrupt) || errors.Is(err, walobject.ErrUnsupported), "%v", err)
			continue
		}
		// The flip is in the data: the range that holds it shows.
		bad := 0
		for _, r := range f.GetRanges() {
			d := r.GetRange()
			if walobject.VerifyBytes(d, broken[d.GetPosition():d.GetPosition()+d.GetLengthBytes()]) != nil {
				bad++
			}
		}
		require.Equal(t, 1, bad, "byte %d: it costs one range, not its neighbours", i)
	}
	for n := range len(content) {
		_, err := walobject.ReadFooter(content[:n], int64(n))
		require.ErrorIs(t, err, walobject.ErrCorrupt, "cut to %d", n)
	}
}

// sealed frames a footer with a valid trailer.
func sealed(footer []byte, data uint64) []byte {
	tr := make([]byte, 32)
	binary.BigEndian.PutUint32(tr, uint32(len(footer)))
	binary.BigEndian.PutUint32(tr[4:], crc32.Checksum(footer, castagnoli))
	binary.BigEndian.PutUint16(tr[8:], 1)
	binary.BigEndian.PutUint64(tr[16:], data)
	copy(tr[24:], "BraidWAL")
	sum := crc32.Update(crc32.Checksum(tr[:12], castagnoli), castagnoli, tr[16:])
	binary.BigEndian.PutUint32(tr[12:], sum)
	return append(bytes.Clone(footer), tr...)
}

func TestHostileFootersAreRefused(t *testing.T) {
	_, content := build(t, sample())
	good, err := walobject.ReadFooter(content, int64(len(content)))
	require.NoError(t, err)
	cases := map[string]func(f *storagev1.CombinedObjectFooter){
		"gap":           func(f *storagev1.CombinedObjectFooter) { f.Ranges[1].Range.Position++ },
		"overlap":       func(f *storagev1.CombinedObjectFooter) { f.Ranges[1].Range.Position-- },
		"beyond data":   func(f *storagev1.CombinedObjectFooter) { f.Ranges[2].Range.LengthBytes = 1 << 62 },
		"negative":      func(f *storagev1.CombinedObjectFooter) { f.Ranges[0].Range.LengthBytes = -1 },
		"no ranges":     func(f *storagev1.CombinedObjectFooter) { f.Ranges = nil },
		"order":         func(f *storagev1.CombinedObjectFooter) { f.Ranges[0].Range.Partition.Partition = 9 },
		"no object":     func(f *storagev1.CombinedObjectFooter) { f.Object = nil },
		"no cluster":    func(f *storagev1.CombinedObjectFooter) { f.ClusterId = "" },
		"no descriptor": func(f *storagev1.CombinedObjectFooter) { f.Ranges[0].Range = nil },
		"too many": func(f *storagev1.CombinedObjectFooter) {
			for range walobject.MaxRanges {
				f.Ranges = append(f.Ranges, f.Ranges[0])
			}
		},
	}
	data := uint64(0)
	for _, r := range good.GetRanges() {
		data += uint64(r.GetRange().GetLengthBytes())
	}
	for name, change := range cases {
		f := proto.CloneOf(good)
		change(f)
		b, err := proto.Marshal(f)
		require.NoError(t, err)
		obj := append(make([]byte, data), sealed(b, data)...)
		_, err = walobject.ReadFooter(obj, int64(len(obj)))
		require.ErrorIs(t, err, walobject.ErrCorrupt, name)
	}

	newer := proto.CloneOf(good)
	newer.FormatVersion = 2
	b, err := proto.Marshal(newer)
	require.NoError(t, err)
	obj := append(make([]byte, data), sealed(b, data)...)
	_, err = walobject.ReadFooter(obj, int64(len(obj)))
	require.ErrorIs(t, err, walobject.ErrUnsupported)

	// Four million empty ranges in eight megabytes: refused before they are decoded.
	bomb := sealed(bytes.Repeat([]byte{6<<3 | 2, 0}, 4<<20), 0)
	allocated := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			if _, err := walobject.ReadFooter(bomb, int64(len(bomb))); !errors.Is(err, walobject.ErrCorrupt) {
				b.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	require.Less(t, allocated, int64(64<<10))

	// Lengths that lie are refused by the trailer alone.
	for _, at := range []int{0, 16} {
		lie := sealed(nil, 0)
		for i := range 4 {
			lie[at+i] = 0xff
		}
		sum := crc32.Update(crc32.Checksum(lie[:12], castagnoli), castagnoli, lie[16:])
		binary.BigEndian.PutUint32(lie[12:], sum)
		_, err := walobject.ReadFooter(lie, int64(len(lie)))
		require.ErrorIs(t, err, walobject.ErrCorrupt)
	}
}

// Field report B099: offsets and spans beyond 32 bits stay what they are.
func TestLargeOffsetsAreKept(t *testing.T) {
	p := walobjecttest.NewPartition(1<<40, 3)
	p.End = 1 << 52
	p.Lineage = nil
	p.Elect(1<<30, 1<<41)
	d, data := p.Append(3, 2, 8)
	o, content := build(t, []walobject.Range{{Footer: &storagev1.RangeFooter{Range: d}, Data: data}})
	f, err := walobject.ReadFooter(content, o.Size)
	require.NoError(t, err)
	require.EqualValues(t, 1<<52, f.GetRanges()[0].GetRange().GetBaseOffset())
	require.EqualValues(t, 1<<52+6, f.GetRanges()[0].GetRange().GetEndOffset())
	require.NoError(t, walobject.VerifyRange(d, data))
}

func TestVerifyRangeFindsEveryLie(t *testing.T) {
	fresh := func() (*logv1.RangeDescriptor, []byte) {
		p := walobjecttest.NewPartition(5, 0)
		p.Append(1, 4, 3)
		d, data := p.Append(3, 2, 20)
		return d, data
	}
	d, data := fresh()
	require.NoError(t, walobject.VerifyRange(d, data))

	lies := map[string]func(d *logv1.RangeDescriptor){
		"base":         func(d *logv1.RangeDescriptor) { d.BaseOffset++ },
		"end":          func(d *logv1.RangeDescriptor) { d.EndOffset++ },
		"crc":          func(d *logv1.RangeDescriptor) { d.Crc32C++ },
		"length":       func(d *logv1.RangeDescriptor) { d.LengthBytes++ },
		"batches":      func(d *logv1.RangeDescriptor) { d.BatchCount++ },
		"timestamp":    func(d *logv1.RangeDescriptor) { d.MaxTimestampMs++ },
		"no fence":     func(d *logv1.RangeDescriptor) { d.Fence = nil },
		"fence below":  func(d *logv1.RangeDescriptor) { d.Fence.LeaderEpoch = 0 },
		"epoch start":  func(d *logv1.RangeDescriptor) { d.EpochStart = 1 },
		"epoch":        func(d *logv1.RangeDescriptor) { d.Lineage[0].Leadership.LeaderEpoch = 0 },
		"incarnation":  func(d *logv1.RangeDescriptor) { d.Lineage[0].Leadership.Incarnation = 1 << 31 },
		"starts above": func(d *logv1.RangeDescriptor) { d.Lineage[0].StartOffset = d.BaseOffset + 1 },
		"predecessor":  func(d *logv1.RangeDescriptor) { d.Predecessor.LeaderEpoch++ },
		"none":         func(d *logv1.RangeDescriptor) { d.Predecessor = nil },
		"no lineage":   func(d *logv1.RangeDescriptor) { d.Lineage = nil },
		"short hash":   func(d *logv1.RangeDescriptor) { d.BaseChainHash = d.BaseChainHash[:15] },
		"second epoch": func(d *logv1.RangeDescriptor) {
			d.Lineage = append(d.Lineage, &logv1.LineageEntry{Leadership: &logv1.Leadership{Incarnation: 1, LeaderEpoch: 2}, StartOffset: d.BaseOffset + 2})
		},
	}
	for name, lie := range lies {
		d, data := fresh()
		lie(d)
		require.ErrorIs(t, walobject.VerifyRange(d, data), walobject.ErrMalformed, name)
	}
	for _, hash := range []func(d *logv1.RangeDescriptor) []byte{
		func(d *logv1.RangeDescriptor) []byte { return d.BaseChainHash },
		func(d *logv1.RangeDescriptor) []byte { return d.EndChainHash },
	} {
		d, data := fresh()
		hash(d)[3] ^= 1
		require.ErrorIs(t, walobject.VerifyRange(d, data), walobject.ErrChain)
	}
	// Design review F14: a bit in a field that the batch's CRC does not cover.
	// The range's own checksum is made to fit, as a faulty sender would.
	for bit := range len(data) * 8 {
		d, data := fresh()
		data[bit/8] ^= 1 << (bit % 8)
		d.Crc32C = crc32.Checksum(data, castagnoli)
		require.Error(t, walobject.VerifyRange(d, data), "bit %d", bit)
		if bit > 100*8 {
			break
		}
	}
	// A range over a border of epochs.
	p := walobjecttest.NewPartition(1, 1)
	base, baseHash := p.End, p.Hash
	d1, one := p.Append(1, 2, 3)
	p.Elect(4, 9)
	d2, two := p.Append(2, 1, 3)
	both := p.Describe(base, p.End, baseHash, p.Hash, append(bytes.Clone(one), two...), 3, max(d1.GetMaxTimestampMs(), d2.GetMaxTimestampMs()))
	require.Len(t, both.GetLineage(), 2)
	require.NoError(t, walobject.VerifyRange(both, append(bytes.Clone(one), two...)))
}

func TestCombinedChecksumOfRandomParts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range 50 {
		var ranges []walobject.Range
		for i := range 1 + rnd.IntN(20) {
			p := walobjecttest.NewPartition(int64(i), 0)
			d, data := p.Append(1+rnd.IntN(3), 1+rnd.IntN(3), rnd.IntN(3000))
			ranges = append(ranges, walobject.Range{Footer: &storagev1.RangeFooter{Range: d}, Data: data})
		}
		o, content := build(t, ranges)
		require.Equal(t, crc32.Checksum(content, castagnoli), o.CRC32C)
	}
}

func FuzzReadFooter(f *testing.F) {
	_, content := build(f, sample())
	f.Add(content, int64(len(content)))
	f.Add(make([]byte, 64), int64(64))
	f.Add(sealed([]byte{6<<3 | 2, 0}, 0), int64(34))
	f.Fuzz(func(t *testing.T, tail []byte, size int64) {
		footer, err := walobject.ReadFooter(tail, size)
		if err == nil {
			var data int64
			for _, r := range footer.GetRanges() {
				data += r.GetRange().GetLengthBytes()
			}
			require.Less(t, data, size)
			return
		}
		var e *walobject.Error
		require.ErrorAs(t, err, &e)
	})
}

// FuzzDecodeFooter gets past the checksums, so the fuzzer reaches the message.
func FuzzDecodeFooter(f *testing.F) {
	o, content := build(f, sample())
	f.Add(content[int64(len(content))-32-o.FooterSize:len(content)-32], uint32(o.Size))
	f.Fuzz(func(t *testing.T, footer []byte, data uint32) {
		tr := walobject.Trailer{FooterSize: int64(len(footer)), FooterCRC32C: crc32.Checksum(footer, castagnoli), DataSize: int64(data)}
		if _, err := walobject.DecodeFooter(tr, footer); err != nil {
			var e *walobject.Error
			require.ErrorAs(t, err, &e)
		}
	})
}

func FuzzVerifyRange(f *testing.F) {
	p := walobjecttest.NewPartition(5, 0)
	d, data := p.Append(2, 2, 10)
	encoded, err := proto.Marshal(d)
	require.NoError(f, err)
	f.Add(encoded, data)
	f.Fuzz(func(_ *testing.T, encoded, data []byte) {
		d := new(logv1.RangeDescriptor)
		if proto.Unmarshal(encoded, d) == nil {
			_ = walobject.VerifyRange(d, data) // must not panic
		}
	})
}

func FuzzParseName(f *testing.F) {
	f.Add(walobject.Name("c", &logv1.ObjectRef{Incarnation: 1, RlmEpoch: 2, Sequence: 3, Attempt: 4}))
	f.Fuzz(func(t *testing.T, name string) {
		id, ref, err := walobject.ParseName(name)
		if err == nil {
			require.Equal(t, name, walobject.Name(id, ref))
		}
	})
}

// BenchmarkBuild200 is the shape that a busy remote-log manager cuts.
func BenchmarkBuild200(b *testing.B) {
	ranges := make([]walobject.Range, 200)
	for i := range ranges {
		p := walobjecttest.NewPartition(int64(i), 0)
		d, data := p.Append(1, 16, 1000)
		ranges[i] = walobject.Range{Footer: &storagev1.RangeFooter{Range: d}, Data: data}
	}
	o, _ := build(b, ranges)
	b.SetBytes(o.Size)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := walobject.Build(header(), ranges); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkVerifyRange16KiB(b *testing.B) {
	p := walobjecttest.NewPartition(1, 0)
	d, data := p.Append(1, 16, 1000)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if err := walobject.VerifyRange(d, data); err != nil {
			b.Fatal(err)
		}
	}
}
