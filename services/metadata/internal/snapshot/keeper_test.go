package snapshot

import (
	"context"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/state"
)

// kept is a keeper in a world of its own, stepped by hand.
type kept struct {
	*Keeper
	h     *history
	store *memstore.Store
	now   time.Time
}

var cfg = KeeperConfig{TailBytes: 1000, Interval: 10 * time.Minute, Check: time.Second}

func newKept(t testing.TB, h *history, store Store, fsys vfs.FS) *kept {
	k := &kept{h: h, now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	if store == nil {
		k.store = memstore.New(memstore.Options{})
		store = k.store
	}
	k.Keeper = NewKeeper(cfg, Deps{
		Applied: h, Log: h, Disk: openDisk(t, fsys), Store: store, Leadership: h.Leadership, Logger: quiet(),
	})
	k.begin(k.now)
	k.lastTime = k.now // the files' times are of another clock
	return k
}

func (k *kept) tick(t testing.TB, d time.Duration) {
	k.now = k.now.Add(d)
	k.step(t.Context(), k.now)
}

func (k *kept) onDisk() []int64 { return ends(k.deps.Disk.List(incarnation)) }

func inBucket(t testing.TB, store Store) []int64 {
	t.Helper()
	list, err := NewBucket(store, clusterID).List(t.Context(), incarnation)
	require.NoError(t, err)
	out := []int64{}
	for _, s := range list {
		out = append(out, s.End)
	}
	return out
}

func TestWhenASnapshotIsTaken(t *testing.T) {
	h := newHistory(t)
	k := newKept(t, h, nil, vfs.NewMem())
	k.tick(t, time.Second)
	assert.Empty(t, k.onDisk(), "two small entries")
	k.tick(t, 10*time.Minute)
	assert.Equal(t, []int64{2}, k.onDisk(), "but they are old")
	k.tick(t, 9*time.Minute)
	assert.Equal(t, []int64{2}, k.onDisk(), "nothing new")
	for h.bytes < 900 {
		h.grow(1)
	}
	k.tick(t, time.Second)
	assert.Equal(t, []int64{2}, k.onDisk())
	h.grow(10)
	k.tick(t, time.Second)
	assert.Len(t, k.onDisk(), 2, "more than the least")
	// A tail has to outgrow the last snapshot, or a large state would be written
	// again and again.
	for k.last.Size < 10*cfg.TailBytes {
		h.grow(100)
		k.tick(t, time.Second)
	}
	last, at := k.last, h.bytes
	for h.bytes-at <= last.Size-200 {
		h.grow(1)
		k.tick(t, time.Millisecond)
		require.Equal(t, last.End, k.last.End)
	}
	h.grow(5)
	k.tick(t, time.Second)
	assert.Greater(t, k.last.End, last.End)
	assert.Empty(t, inBucket(t, k.store), "it does not lead")
}

// B135 (KAFKA-13968): a backlog at start makes one snapshot, not one an entry.
func TestABacklogMakesOneSnapshot(t *testing.T) {
	h := newHistory(t)
	h.grow(3000)
	k := newKept(t, h, nil, vfs.NewMem())
	taken := map[int64]bool{}
	for range 300 { // 5 minutes of ten entries a second
		h.grow(10)
		k.tick(t, time.Second)
		if k.last.End > 0 {
			taken[k.last.End] = true
		}
	}
	assert.LessOrEqual(t, len(taken), 2)
	assert.NotEmpty(t, taken)
}

// B136 (KAFKA-14300): when a snapshot is due does not depend on who leads, and
// whoever leads trims.
func TestManyControllersTrimAllTheSame(t *testing.T) {
	h := newHistory(t)
	store := memstore.New(memstore.Options{})
	replicas := []*kept{newKept(t, h, store, vfs.NewMem()), newKept(t, h, store, vfs.NewMem()), newKept(t, h, store, vfs.NewMem())}
	taken := 0
	for second := range 900 {
		leader := second / 20 % len(replicas)
		if second%20 == 0 {
			h.elect()
		}
		h.grow(2)
		for i, k := range replicas {
			h.leads = i == leader
			before := k.last.End
			k.tick(t, time.Second)
			if k.last.End != before {
				taken++
			}
		}
		if second > 120 {
			require.Less(t, int64(len(h.log))-h.start.Offset, int64(2200), "second %d: the log grows", second)
		}
		require.LessOrEqual(t, len(inBucket(t, store)), Keep+1)
	}
	assert.Greater(t, taken, 6)
	assert.Less(t, taken, 60)
	assert.Positive(t, h.start.Offset)
}

func TestTheControllerStoresAndTrimsBehindTheOlderOne(t *testing.T) {
	h := newHistory(t)
	h.leads = true
	k := newKept(t, h, nil, vfs.NewMem())
	h.grow(50)
	k.tick(t, time.Second)
	require.Equal(t, []int64{52}, inBucket(t, k.store))
	assert.Zero(t, h.trims, "one snapshot is none to trim behind")
	h.grow(100)
	k.tick(t, time.Second)
	require.Equal(t, []int64{152, 52}, inBucket(t, k.store))
	assert.EqualValues(t, 52, h.start.Offset)
	assert.EqualValues(t, 52, h.compacted)
	assert.EqualValues(t, 52, k.LogStart())
	h.elect()
	h.grow(300)
	k.tick(t, time.Second)
	require.Equal(t, []int64{453, 152}, inBucket(t, k.store), "what is below the start went")
	assert.EqualValues(t, 152, h.start.Offset)
	trims := h.trims
	k.tick(t, time.Second)
	assert.Equal(t, trims, h.trims, "nothing to do")

	// Another replica leads next. It has nothing newer, and trims nothing.
	other := newKept(t, h, k.store, vfs.NewMem())
	other.tick(t, time.Second)
	require.Equal(t, []int64{453, 152}, inBucket(t, k.store))
	h.grow(600)
	other.tick(t, time.Second)
	require.Equal(t, []int64{1053, 453}, inBucket(t, k.store))
	assert.Equal(t, metalog.Start{Offset: 453, ControllerEpoch: 152}, h.start)
}

// Each step of storing and trimming may be the last of a controller. The log is
// never trimmed above the older of two snapshots that are there, and another
// controller does the rest.
func TestAControllerDiesBetweenAnyTwoSteps(t *testing.T) {
	for _, when := range []decorate.When{decorate.Before, decorate.After} {
		for n := 1; ; n++ {
			h := newHistory(t)
			h.leads = true
			mem := memstore.New(memstore.Options{})
			k := newKept(t, h, mem, vfs.NewMem())
			for _, size := range []int{50, 100} {
				h.grow(size)
				k.tick(t, time.Second)
			}
			injector := decorate.NewInjector(decorate.Fault{Nth: n, Count: -1, When: when})
			k.deps.Store = injector.Decorate(mem)
			h.grow(300)
			k.tick(t, time.Second)
			done := k.Trouble() == nil

			have := inBucket(t, mem)
			require.GreaterOrEqual(t, len(have), Keep)
			require.LessOrEqual(t, h.start.Offset, have[1], "%v step %d", when, n)
			for _, i := range []int{0, 1} { // both are whole
				list, err := NewBucket(mem, clusterID).List(t.Context(), incarnation)
				require.NoError(t, err)
				r, err := mem.OpenRange(t.Context(), clusterID+"/meta/"+list[i].Name(), 0, objstore.ToEnd)
				require.NoError(t, err)
				_, err = state.Decode(r)
				require.NoError(t, err)
			}
			h.elect()
			next := newKept(t, h, mem, vfs.NewMem())
			h.grow(600)
			next.tick(t, time.Second)
			require.NoError(t, next.Trouble())
			have = inBucket(t, mem)
			require.Len(t, have, Keep)
			require.Equal(t, have[1], h.start.Offset)
			if done {
				require.Greater(t, n, 3)
				break
			}
		}
	}
}

// A bucket that is away stops the trim and nothing else.
func TestWithoutTheBucketOnlyTheLogGrows(t *testing.T) {
	h := newHistory(t)
	h.leads = true
	mem := memstore.New(memstore.Options{})
	k := newKept(t, h, mem, vfs.NewMem())
	k.deps.Store = decorate.NewInjector(decorate.Fault{Count: -1}).Decorate(mem)
	for range 20 {
		h.grow(100)
		k.tick(t, 5*time.Minute)
	}
	require.ErrorIs(t, k.Trouble(), objstore.ErrUnavailable)
	assert.Len(t, k.onDisk(), 2)
	assert.Zero(t, h.start.Offset)
	k.deps.Store = mem
	k.tick(t, time.Hour)
	require.NoError(t, k.Trouble())
	assert.Len(t, inBucket(t, mem), 1)
	h.grow(2000)
	k.tick(t, time.Hour)
	assert.Positive(t, h.start.Offset)
	h.down = true // etcd
	h.grow(5000)
	end := k.last.End
	k.tick(t, time.Hour)
	assert.Equal(t, end, k.last.End)
}

func TestAnotherSnapshotOfTheNameIsNoticed(t *testing.T) {
	h := newHistory(t)
	h.leads = true
	k := newKept(t, h, nil, vfs.NewMem())
	h.grow(50)
	info, err := k.deps.Disk.Save(h.s)
	require.NoError(t, err)
	// The same bytes, put there by another replica or by a lost answer: fine.
	b := NewBucket(k.store, clusterID)
	require.NoError(t, b.Create(t.Context(), k.deps.Disk, info))
	require.NoError(t, b.Create(t.Context(), k.deps.Disk, info))
	require.Equal(t, []int64{52}, inBucket(t, k.store))

	put := func(name string, content string) {
		_, err := k.store.Create(t.Context(), clusterID+"/meta/"+name, objstore.NewParts([]byte(content)))
		require.NoError(t, err)
	}
	h.grow(100)
	info, err = k.deps.Disk.Save(h.s)
	require.NoError(t, err)
	put(info.Name(), "other bytes under the very name")
	require.ErrorIs(t, b.Create(t.Context(), k.deps.Disk, info), ErrDiffers)

	// Another sum for the same id: two replicas disagree.
	h.grow(100)
	other := Info{ID: idOf(h.s)}
	put(other.Name(), "x")
	k.tick(t, time.Second)
	require.ErrorIs(t, k.Trouble(), ErrDiffers)
	assert.Zero(t, h.trims)
}

// F12: what the log does not lead to must not be trimmed behind.
func TestNothingIsTrimmedBehindASnapshotOfAnotherLog(t *testing.T) {
	for name, id := range map[string]ID{
		"beyond the end":        {Incarnation: incarnation, End: 1 << 30, ControllerEpoch: 0},
		"of another controller": {Incarnation: incarnation, End: 40, ControllerEpoch: 30},
	} {
		h := newHistory(t)
		h.leads = true
		k := newKept(t, h, nil, vfs.NewMem())
		_, err := k.store.Create(t.Context(), clusterID+"/meta/"+Info{ID: id}.Name(), objstore.NewParts([]byte("x")))
		require.NoError(t, err)
		h.grow(50)
		k.tick(t, time.Second)
		require.ErrorIs(t, k.Trouble(), metalog.ErrRolledBack, name)
		require.ErrorIs(t, CheckBucket(t.Context(), h, NewBucket(k.store, clusterID), incarnation), metalog.ErrRolledBack, name)
		assert.Zero(t, h.trims, name)
	}
}

// A file that has rotted is not spread, and a new one takes its place.
func TestARottenFileIsNotStored(t *testing.T) {
	h := newHistory(t)
	h.leads = true
	mem := vfs.NewMem()
	k := newKept(t, h, nil, mem)
	h.grow(50)
	k.h.leads = false
	k.tick(t, time.Second)
	path := k.deps.Disk.path(k.last)
	f, err := mem.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte{0xff}, 100)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	k.h.leads = true
	k.tick(t, time.Second)
	require.ErrorAs(t, k.Trouble(), new(*state.SnapshotError))
	require.Empty(t, inBucket(t, k.store))
	k.tick(t, 11*time.Minute)
	require.NoError(t, k.Trouble())
	require.Equal(t, []int64{52}, inBucket(t, k.store))
	require.Equal(t, []int64{52}, k.onDisk())
}

func TestRunEndsWithItsContext(t *testing.T) {
	h := newHistory(t)
	k := newKept(t, h, nil, vfs.NewMem())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, k.Run(ctx))
}
