package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/services/metadata/state"
)

const dir = "/data/snapshots"

func openDisk(t testing.TB, fsys vfs.FS) *Disk {
	t.Helper()
	d, err := OpenDisk(fsys, dir)
	require.NoError(t, err)
	return d
}

func ends(list []Info) []int64 {
	out := []int64{}
	for _, i := range list {
		out = append(out, i.End)
	}
	return out
}

func contentOf(t testing.TB, d *Disk, i Info) []byte {
	t.Helper()
	b := make([]byte, i.Size)
	n, err := d.ReadAt(i, b, 0)
	require.NoError(t, err)
	require.EqualValues(t, i.Size, n)
	return b
}

func TestDiskKeepsTheNewestTwo(t *testing.T) {
	mem := vfs.NewMem()
	d := openDisk(t, mem)
	h := newHistory(t)
	var sizes []int64
	for range 4 {
		h.grow(3)
		i, err := d.Save(h.s)
		require.NoError(t, err)
		sizes = append(sizes, i.Size)
		again, err := d.Save(h.s)
		require.NoError(t, err)
		require.Equal(t, i, again, "the same once more")
	}
	require.Equal(t, []int64{14, 11}, ends(d.List(incarnation)))
	require.Empty(t, d.List(incarnation+1))
	names, err := mem.List(dir)
	require.NoError(t, err)
	require.Len(t, names, 2)
	assert.Less(t, sizes[0], sizes[3])
	for _, d := range []*Disk{d, openDisk(t, mem)} { // as after a restart
		list := d.List(incarnation)
		require.Equal(t, []int64{14, 11}, ends(list))
		s, err := d.Load(list[0])
		require.NoError(t, err)
		require.Equal(t, h.s.Digest(), s.Digest())
		whole := contentOf(t, d, list[0])
		require.Equal(t, list[0].Sum[:], whole[len(whole)-state.SnapshotSumSize:])
		one := make([]byte, 1)
		for at := range whole {
			n, err := d.ReadAt(list[0], one, int64(at))
			require.NoError(t, err)
			require.Equal(t, 1, n)
			require.Equal(t, whole[at], one[0])
		}
		n, err := d.ReadAt(list[0], one, list[0].Size)
		require.NoError(t, err)
		require.Zero(t, n)
		_, err = d.ReadAt(Info{ID: ID{Incarnation: incarnation, End: 5}}, one, 0)
		require.ErrorIs(t, err, ErrUnknown)
	}
	// Snapshots of another incarnation are nobody's here to remove.
	h2 := newHistory(t)
	require.NoError(t, mem.Rename(d.path(d.List(incarnation)[1]), mem.PathJoin(dir, "0000002a"+d.List(incarnation)[1].Name()[8:]+suffix)))
	other := openDisk(t, mem)
	require.Len(t, other.List(42), 1)
	for range 3 {
		h2.grow(20)
		_, err := other.Save(h2.s)
		require.NoError(t, err)
	}
	require.Len(t, other.List(42), 1)
}

// B128, B140: what was cut off or has rotted is not loaded; the older one is.
func TestDamagedSnapshotsAreSetAside(t *testing.T) {
	h := newHistory(t)
	h.grow(20)
	var older, newer []byte
	var infos [2]Info
	{
		d := openDisk(t, vfs.NewMem())
		var err error
		infos[0], err = d.Save(h.s)
		require.NoError(t, err)
		older = contentOf(t, d, infos[0])
		h.grow(20)
		infos[1], err = d.Save(h.s)
		require.NoError(t, err)
		newer = contentOf(t, d, infos[1])
	}
	r := rand.New(rand.NewPCG(3, 4))
	damage := map[string][]byte{"nothing in it": {}, "cut to the sum": newer[:len(newer)-state.SnapshotSumSize], "the older one's bytes": older}
	for range 25 {
		n := r.IntN(len(newer))
		damage[fmt.Sprintf("cut at %d", n)] = newer[:n]
		b := bytes.Clone(newer)
		b[n] ^= 1 << r.IntN(8)
		damage[fmt.Sprintf("byte %d flipped", n)] = b
	}
	for name, b := range damage {
		mem := vfs.NewMem()
		require.NoError(t, mem.MkdirAll(dir, 0o755))
		put := func(i Info, b []byte) {
			f, err := mem.Create(mem.PathJoin(dir, i.Name()+suffix), vfs.WriteCategoryUnspecified)
			require.NoError(t, err)
			_, err = f.Write(bytes.Clone(b))
			require.NoError(t, err)
			require.NoError(t, f.Close())
		}
		put(infos[0], older)
		put(infos[1], b)
		put(Info{ID: ID{Incarnation: incarnation, End: 99}}, nil)
		d := openDisk(t, mem)
		list := d.List(incarnation)
		require.GreaterOrEqual(t, len(list), 1, name)
		if list[0].End == infos[1].End { // its end looks well
			s, err := d.Load(list[0])
			require.ErrorAs(t, err, new(*state.SnapshotError), name)
			require.Nil(t, s, name)
			list = d.List(incarnation)
		}
		require.Equal(t, []int64{infos[0].End}, ends(list), name)
		s, err := d.Load(list[0])
		require.NoError(t, err, name)
		require.Equal(t, infos[0].End, s.EndOffset())
		_, err = mem.Stat(mem.PathJoin(dir, "damaged"+corruptSuffix))
		require.NoError(t, err, "it is kept for whoever wants to know")
		require.Equal(t, []int64{infos[0].End}, ends(openDisk(t, mem).List(incarnation)))
	}
}

// A process may die at any step of writing a snapshot, with whatever part of
// what was not synced on the disk: the earlier ones are there, and the new one is
// whole or not there.
func TestAProcessDiesWhileItWritesASnapshot(t *testing.T) {
	h := newHistory(t)
	h.grow(30)
	first := h.s.Clone()
	h.grow(30)
	second := h.s.Clone()
	h.grow(30)
	died := errors.New("died")
	for _, percent := range []int{0, 50, 100} {
		finished := false
		for n := 1; !finished; n++ {
			r := rand.New(rand.NewPCG(uint64(n), uint64(percent)))
			mem := vfs.NewCrashableMem()
			d := openDisk(t, mem)
			_, err := d.Save(first)
			require.NoError(t, err)
			_, err = d.Save(second)
			require.NoError(t, err)

			var after *vfs.MemFS
			left := n
			d.fs = errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind.ReadOrWrite() != errorfs.OpIsWrite || after != nil {
					return nil
				}
				if left--; left == 0 {
					after = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: r})
					return died
				}
				return nil
			}))
			_, err = d.Save(h.s)
			if after == nil {
				require.NoError(t, err)
				finished = true
				after = mem.CrashClone(vfs.CrashCloneCfg{})
			}
			again := openDisk(t, after)
			list := again.List(incarnation)
			require.GreaterOrEqual(t, len(list), 2, "step %d", n)
			for _, i := range list {
				s, err := again.Load(i)
				require.NoError(t, err, "step %d", n)
				for _, original := range []*state.State{first, second, h.s} {
					if original.EndOffset() == s.EndOffset() {
						require.Equal(t, original.Digest(), s.Digest())
					}
				}
			}
			if finished {
				require.Equal(t, h.s.EndOffset(), list[0].End)
			}
			names, err := after.List(dir)
			require.NoError(t, err)
			require.Len(t, names, len(list), "nothing unfinished stays")
			_, err = again.Save(h.s)
			require.NoError(t, err)
		}
		t.Log(percent, "percent")
	}
}

// A write that fails leaves nothing behind and may be tried again.
func TestAFullDiskIsNoHarm(t *testing.T) {
	h := newHistory(t)
	h.grow(30)
	mem := vfs.NewMem()
	d := openDisk(t, mem)
	_, err := d.Save(h.s)
	require.NoError(t, err)
	h.grow(1)
	full := errors.New("no space left on device")
	for _, kind := range []errorfs.OpKind{errorfs.OpCreate, errorfs.OpFileWrite, errorfs.OpFileSync, errorfs.OpRename} {
		d.fs = errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind == kind {
				return full
			}
			return nil
		}))
		_, err := d.Save(h.s)
		require.ErrorIs(t, err, full)
		names, err := mem.List(dir)
		require.NoError(t, err)
		require.Len(t, names, 1)
	}
	d.fs = mem
	_, err = d.Save(h.s)
	require.NoError(t, err)
}

func TestReceiveKeepsOnlyWhatIsWholeAndOfTheID(t *testing.T) {
	h := newHistory(t)
	h.grow(30)
	source := openDisk(t, vfs.NewMem())
	info, err := source.Save(h.s)
	require.NoError(t, err)
	b := contentOf(t, source, info)
	mem := vfs.NewMem()
	d := openDisk(t, mem)
	give := func(b []byte) func(io.Writer) error {
		return func(w io.Writer) error { _, err := w.Write(bytes.Clone(b)); return err }
	}
	for _, bad := range [][]byte{nil, b[:100], b[:len(b)-1], append(bytes.Clone(b), 0)} {
		_, _, err = d.Receive(info.ID, give(bad))
		require.ErrorAs(t, err, new(*state.SnapshotError))
	}
	wrong := info.ID
	wrong.End++
	_, _, err = d.Receive(wrong, give(b))
	require.ErrorAs(t, err, new(*state.SnapshotError))
	broken := errors.New("the peer went away")
	_, _, err = d.Receive(info.ID, func(w io.Writer) error { _ = give(b[:50])(w); return broken })
	require.ErrorIs(t, err, broken)
	names, err := mem.List(dir)
	require.NoError(t, err)
	require.Empty(t, names)
	s, got, err := d.Receive(info.ID, give(b))
	require.NoError(t, err)
	require.Equal(t, info, got)
	require.Equal(t, h.s.Digest(), s.Digest())
}

func TestNames(t *testing.T) {
	i := Info{ID: ID{Incarnation: 0x1f3a9c02, End: 12345, ControllerEpoch: 12000}}
	i.Sum[0], i.Sum[7], i.Sum[8] = 0xab, 0xcd, 0xff
	assert.Equal(t, "1f3a9c02-00000000000000012345-00000000000000012000-ab000000000000cd", i.Name())
	got, ok := parseName(i.Name())
	require.True(t, ok)
	assert.Equal(t, i.ID, got.ID)
	assert.Equal(t, i.Sum[:8], got.Sum[:8])
	for _, bad := range []string{"", "x", i.Name() + "0", i.Name()[1:], "1F3A9C02" + i.Name()[8:], i.String(),
		"1f3a9c02-00000000000000000000-00000000000000000000-ab000000000000cd", "1f3a9c02-00000000000000000007-00000000000000000007-ab000000000000cd",
		"1f3a9c02-0000000000000000-123-00000000000000000007-ab000000000000cd"} {
		_, ok := parseName(bad)
		assert.False(t, ok, bad)
	}
}
