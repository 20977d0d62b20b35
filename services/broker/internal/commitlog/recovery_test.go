package commitlog_test

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"runtime"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

// Field report B015.
func TestTornTailIsTrimmedAndTheLogGoesOnBehindIt(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 3, 20)
	size := l.Size()
	patch(t, fs, logPath(fs, 0), size, want[0][:17])

	l, report := openLog(t, fs, commitlog.Options{})
	require.Nil(t, report.Damage)
	require.NotNil(t, report.Trimmed)
	require.Equal(t, size, report.Trimmed.Position)
	require.Equal(t, size+17, report.Trimmed.EndPosition)
	require.EqualValues(t, 9, report.End)
	require.EqualValues(t, -1, report.Trimmed.ValidBehind)
	require.True(t, report.Intact())
	want = append(want, appendN(t, l, 5, 20)...)

	l, report = openLog(t, fs, commitlog.Options{})
	require.Nil(t, report.Trimmed)
	requireBatches(t, want, readAll(t, l, 0, 100))
}

// Field report B013: garbage that claims two gigabytes.
func TestGarbageLengthInTheTailNeedsNoMemory(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 3, 20)
	for _, claim := range []uint32{1<<31 - 1, 1<<31 - 13, 1 << 30, 50 << 20, 1 << 16, 0, 1 << 31} {
		head := slices.Clone(batch(t, 9, 1, 1, 1, 0)[:record.HeaderSize])
		binary.BigEndian.PutUint32(head[8:], claim)
		patch(t, fs, logPath(fs, 0), l.Size(), append(head, make([]byte, 5000)...))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		reopened, report := openLog(t, fs, commitlog.Options{})
		runtime.ReadMemStats(&after)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(8<<20), "claim %d", claim)
		require.NotNil(t, report.Trimmed)
		requireBatches(t, want, readAll(t, reopened, 0, 100))
	}
}

// Field report B013, second half: the same inside of the synced area.
func TestDamageBelowTheRecoveryPointIsReportedAndNothingIsCut(t *testing.T) {
	fs := newFS(t)
	opts := commitlog.Options{SegmentBytes: 1000, IndexInterval: 200}
	l := newLog(t, fs, opts)
	want := appendN(t, l, 18, 30)
	require.NoError(t, l.Sync())
	want = append(want, appendN(t, l, 2, 30)...)

	names, err := fs.List(testDir)
	require.NoError(t, err)
	before := map[string][]byte{}
	// The last synced batch, wherever it lies.
	c, err := l.Read(nil, commitlog.ReadRequest{Offset: 51, MaxBytes: 1})
	require.NoError(t, err)
	damaged := false
	for _, n := range names {
		path := fs.PathJoin(testDir, n)
		data := fileBytes(t, fs, path)
		if i := indexOf(data, c.Bytes); i >= 0 {
			patch(t, fs, path, int64(i)+8, []byte{0x7f, 0xff, 0xff, 0xff})
			damaged = true
		}
		before[n] = fileBytes(t, fs, path)
	}
	require.True(t, damaged)

	for range 2 {
		l, report := openLog(t, fs, opts)
		require.NotNil(t, report.Damage)
		require.False(t, report.Intact())
		require.EqualValues(t, 51, report.Damage.From)
		require.EqualValues(t, 54, report.Damage.To)
		require.EqualValues(t, 51, l.End())
		requireBatches(t, want[:17], readAll(t, l, 0, 500))
		var d *commitlog.DamagedError
		_, err = l.Read(nil, commitlog.ReadRequest{Offset: 51, MaxBytes: 1})
		require.ErrorAs(t, err, &d)
		require.ErrorIs(t, err, commitlog.ErrCorrupt)
		_, err = l.Append(want[17], commitlog.Position{Offset: 51}, testNow)
		require.ErrorAs(t, err, &d)
		require.NoError(t, l.Close())
		for n, data := range before {
			require.Equal(t, data, fileBytes(t, fs, fs.PathJoin(testDir, n)), n)
		}
	}
	// Not even a clean mark makes the damage disappear.
	opts.Trusted = true
	l, report := openLog(t, fs, opts)
	require.NotNil(t, report.Damage)
	require.NoError(t, l.TruncateTo(51))
	require.Nil(t, l.Damage())
	for _, b := range want[17:] {
		_, err = l.Append(b, commitlog.Position{Offset: b.BaseOffset()}, testNow)
		require.NoError(t, err)
	}
	requireBatches(t, want, readAll(t, l, 0, 500))
	require.NoError(t, l.Close())
	l, report = openLog(t, fs, opts)
	require.Nil(t, report.Damage)
	requireBatches(t, want, readAll(t, l, 0, 500))
}

func indexOf(data, part []byte) int {
	for i := 0; i+len(part) <= len(data); i++ {
		if string(data[i:i+len(part)]) == string(part) {
			return i
		}
	}
	return -1
}

func TestMissingSyncedBytesAreDamage(t *testing.T) {
	for name, breakIt := range map[string]func(fs *vfs.MemFS){
		"last segment":   func(fs *vfs.MemFS) { require.NoError(t, fs.Remove(lastLog(t, fs))) },
		"first segment":  func(fs *vfs.MemFS) { require.NoError(t, fs.Remove(logPath(fs, 0))) },
		"middle segment": func(fs *vfs.MemFS) { require.NoError(t, fs.Remove(logs(t, fs)[2])) },
		"emptied segment": func(fs *vfs.MemFS) {
			path := lastLog(t, fs)
			require.NoError(t, fs.Remove(path))
			patch(t, fs, path, 0, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			fs := newFS(t)
			opts := commitlog.Options{SegmentBytes: 1000, IndexInterval: 200}
			l := newLog(t, fs, opts)
			want := appendN(t, l, 20, 30)
			require.NoError(t, l.Sync())
			breakIt(fs)
			l, report := openLog(t, fs, opts)
			require.NotNil(t, report.Damage)
			require.EqualValues(t, 60, report.Damage.To)
			require.Equal(t, report.Damage.From, l.End())
			requireBatches(t, want[:l.End()/3], readAll(t, l, 0, 500))
			require.NoError(t, l.Reset(60, chainOf(want), l.Lineage()))
			require.Len(t, append(want, appendN(t, l, 1, 30)...), 21)
		})
	}
}

func logs(t *testing.T, fs *vfs.MemFS) []string {
	names, err := fs.List(testDir)
	require.NoError(t, err)
	slices.Sort(names)
	var out []string
	for _, n := range names {
		if len(n) == 24 && n[20:] == ".log" {
			out = append(out, fs.PathJoin(testDir, n))
		}
	}
	return out
}

func lastLog(t *testing.T, fs *vfs.MemFS) string { l := logs(t, fs); return l[len(l)-1] }

// Field report B011.
func TestBatchBelowThePreviousEndIsCutAndHarmsNoOtherPartition(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 200, 5)
	patch(t, fs, logPath(fs, 0), l.Size(), batch(t, l.End()-120, 1, 3, 5, 0))
	l, report := openLog(t, fs, commitlog.Options{})
	require.NotNil(t, report.Trimmed)
	require.EqualValues(t, 600, report.End)
	requireBatches(t, want, readAll(t, l, 0, 1000))
	// In synced bytes the same is damage.
	require.NoError(t, l.Sync())
	i := indexOf(fileBytes(t, fs, logPath(fs, 0)), want[100])
	patch(t, fs, logPath(fs, 0), int64(i), batch(t, 180, 1, 3, 5, want[100].BaseTimestamp())[:8])
	l, report = openLog(t, fs, commitlog.Options{})
	require.NotNil(t, report.Damage)
	require.EqualValues(t, 300, report.Damage.From)
	requireBatches(t, want[:100], readAll(t, l, 0, 1000))
}

// A whole batch exchanged for another valid one: only the chain hash tells.
func TestAnotherValidBatchInTheSyncedAreaIsDamage(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 10, 20)
	require.NoError(t, l.Sync())
	other := batch(t, want[4].BaseOffset(), 1, 3, 20, 5)
	if len(other) != len(want[4]) {
		t.Fatalf("sizes differ: %d, %d", len(other), len(want[4]))
	}
	i := indexOf(fileBytes(t, fs, logPath(fs, 0)), want[4])
	patch(t, fs, logPath(fs, 0), int64(i), other)
	l, report := openLog(t, fs, commitlog.Options{})
	require.NotNil(t, report.Damage)
	require.LessOrEqual(t, report.Damage.From, want[4].BaseOffset())
	require.EqualValues(t, 30, report.Damage.To)
	require.Empty(t, readAll(t, l, report.Damage.From, 100))
}

// I14: whatever bit is flipped in a segment, it is not served.
func TestAFlippedBitInASegmentIsNeverServed(t *testing.T) {
	fs := newFS(t)
	opts := commitlog.Options{SegmentBytes: 700, IndexInterval: 150}
	l := newLog(t, fs, opts)
	want := appendN(t, l, 10, 20)
	require.NoError(t, l.Sync())
	require.NoError(t, l.Close())
	all := logs(t, fs)
	flips := 0
	for _, path := range all {
		data := fileBytes(t, fs, path)
		for at := range data {
			bit := byte(1) << (uint(at*7) % 8)
			patch(t, fs, path, int64(at), []byte{data[at] ^ bit})
			flips++
			for _, trusted := range []bool{true, false} {
				opts.Trusted = trusted
				l, report := openLog(t, fs, opts)
				served, bad := 0, 0
				for _, b := range want {
					c, err := l.Read(nil, commitlog.ReadRequest{Offset: b.BaseOffset(), MaxBytes: 1})
					if err == nil && len(c.Bytes) > 0 {
						require.Equal(t, []byte(b), c.Bytes)
						served++
						continue
					}
					require.ErrorIs(t, err, commitlog.ErrCorrupt)
					bad++
				}
				require.Positive(t, bad, "%s byte %d", path, at)
				if report.Damage == nil {
					// Only the damaged batch, and those reached only over it
					// up to the next index entry, are lost.
					require.LessOrEqual(t, bad, 4, "%s byte %d", path, at)
				}
				// A damaged log leaves no clean end behind, and a trusted one
				// finds its files as they were.
			}
			patch(t, fs, path, int64(at), data[at:at+1])
		}
	}
	require.Greater(t, flips, 1000)
}

func TestCorruptionWhileOpenNamesFileAndBytesAndSparesTheRest(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{IndexInterval: 1})
	want := appendN(t, l, 10, 20)
	i := int64(indexOf(fileBytes(t, fs, logPath(fs, 0)), want[5]))
	patch(t, fs, logPath(fs, 0), i+70, []byte{want[5][70] ^ 1})
	var c *commitlog.CorruptionError
	_, err := l.Read(nil, commitlog.ReadRequest{Offset: 16, MaxBytes: 1000})
	require.ErrorAs(t, err, &c)
	require.Equal(t, logPath(fs, 0), c.Path)
	require.Equal(t, i, c.Position)
	require.EqualValues(t, 15, c.Offset)
	requireBatches(t, want[6:], readAll(t, l, 18, 100))
	chunk, err := l.Read(nil, commitlog.ReadRequest{MaxBytes: 1 << 20})
	require.NoError(t, err)
	require.EqualValues(t, 15, chunk.End, "what lies before the damage is served")
}

// Field reports B042 and B077.
func TestMissingAndCorruptIndexesAreRebuilt(t *testing.T) {
	opts := commitlog.Options{SegmentBytes: 700, IndexInterval: 150}
	for name, harm := range map[string]func(fs *vfs.MemFS, path string){
		"missing": func(fs *vfs.MemFS, path string) { require.NoError(t, fs.Remove(path)) },
		"flipped": func(fs *vfs.MemFS, path string) {
			patch(t, fs, path, 90, []byte{fileBytes(t, fs, path)[90] ^ 4})
		},
		"cut": func(fs *vfs.MemFS, path string) {
			data := fileBytes(t, fs, path)
			require.NoError(t, fs.Remove(path))
			patch(t, fs, path, 0, data[:len(data)/2])
		},
		"of another segment": func(fs *vfs.MemFS, path string) {
			data := fileBytes(t, fs, indexPath(fs, 0))
			require.NoError(t, fs.Remove(path))
			patch(t, fs, path, 0, data)
		},
	} {
		for _, trusted := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				fs := newFS(t)
				l := newLog(t, fs, opts)
				want := appendN(t, l, 20, 20)
				require.NoError(t, l.Close())
				paths := logs(t, fs)
				path := paths[2][:len(paths[2])-4] + ".index"
				kept := fileBytes(t, fs, path)
				harm(fs, path)
				o := opts
				o.Trusted = trusted
				l, report := openLog(t, fs, o)
				require.Nil(t, report.Damage)
				require.Equal(t, []string{fs.PathBase(path)}, report.RebuiltIndexes)
				require.Equal(t, kept, fileBytes(t, fs, path))
				requireBatches(t, want, readAll(t, l, 0, 100))
			})
		}
	}
}

// Field report B016, for the log's own positions: an index, or a clean end,
// ahead of the log is not believed.
func TestACleanEndAheadOfTheLogIsNotTrusted(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 10, 20)
	require.NoError(t, l.Close())
	data := fileBytes(t, fs, logPath(fs, 0))
	require.NoError(t, fs.Remove(logPath(fs, 0)))
	patch(t, fs, logPath(fs, 0), 0, data[:len(data)-len(want[9])])
	_, report := openLog(t, fs, commitlog.Options{Trusted: true})
	require.False(t, report.Trusted)
	require.NotNil(t, report.Damage)
	require.EqualValues(t, 27, report.Damage.From)
}

func TestADirectoryOfAnotherLifeIsRefused(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	appendN(t, l, 2, 20)
	require.NoError(t, l.Close())
	for field, change := range map[string]func(*commitlog.Identity){
		"cluster id":      func(id *commitlog.Identity) { id.ClusterID = "cluster-b" },
		"topic id":        func(id *commitlog.Identity) { id.TopicID[3]++ },
		"creation offset": func(id *commitlog.Identity) { id.CreationOffset++ },
		"partition":       func(id *commitlog.Identity) { id.Partition++ },
	} {
		id := testID
		change(&id)
		_, _, err := commitlog.Open(fs, testDir, id, commitlog.Options{})
		var mismatch *commitlog.MismatchError
		require.ErrorAs(t, err, &mismatch)
		require.Equal(t, field, mismatch.Field)
	}
	for _, name := range []string{"partition.meta", "log.checkpoint"} {
		path := fs.PathJoin(testDir, name)
		data := fileBytes(t, fs, path)
		for at := range data {
			patch(t, fs, path, int64(at), []byte{data[at] ^ 0x10})
			_, _, err := commitlog.Open(fs, testDir, testID, commitlog.Options{})
			var format *commitlog.FormatError
			require.ErrorAs(t, err, &format, "%s byte %d", name, at)
			require.Equal(t, path, format.Path)
			patch(t, fs, path, int64(at), data[at:at+1])
		}
		require.NoError(t, fs.Remove(path))
		_, _, err := commitlog.Open(fs, testDir, testID, commitlog.Options{})
		require.ErrorIs(t, err, commitlog.ErrCorrupt, "segments without %s", name)
		patch(t, fs, path, 0, data)
	}
	_, report := openLog(t, fs, commitlog.Options{})
	require.EqualValues(t, 6, report.End)
}

// Field report B014.
func TestAFailedSyncIsNeverRetried(t *testing.T) {
	mem := newFS(t)
	fail := false
	inject := errorfs.InjectorFunc(func(op errorfs.Op) error {
		if fail && (op.Kind == errorfs.OpFileSyncData || op.Kind == errorfs.OpFileSync) {
			fail = false // once; all later ones succeed
			return errorfs.ErrInjected
		}
		return nil
	})
	l, _, err := commitlog.Open(errorfs.Wrap(mem, inject), testDir, testID, commitlog.Options{Flush: commitlog.FlushAlways})
	require.NoError(t, err)
	require.NoError(t, l.AppendLineage(entry(1, 0)))
	want := appendN(t, l, 3, 20)
	fail = true
	b := batch(t, 9, 1, 3, 20, 0)
	var failed *commitlog.FailedError
	_, err = l.Append(b, commitlog.Position{Offset: 9}, testNow)
	require.ErrorAs(t, err, &failed)
	require.ErrorIs(t, err, errorfs.ErrInjected)
	for range 3 {
		_, err = l.Append(b, commitlog.Position{Offset: 9}, testNow)
		require.ErrorAs(t, err, &failed)
	}
	require.Error(t, l.Failed())
	require.EqualValues(t, 9, l.End(), "what was not synced is not visible")
	requireBatches(t, want, readAll(t, l, 0, 100))
	require.NoError(t, l.Close())
	l, report := openLog(t, mem.CrashClone(vfs.CrashCloneCfg{}), commitlog.Options{})
	require.Nil(t, report.Damage)
	requireBatches(t, want, readAll(t, l, 0, 100))
}

// Field report B009.
func TestACrashWhileLoadingIsNotTakenForACleanStop(t *testing.T) {
	fs := newFS(t)
	owner := commitlog.Owner{ClusterID: "cluster-a", BrokerID: 1}
	d, err := commitlog.OpenDataDir(fs, "/data", owner, "boot-1")
	require.NoError(t, err)
	require.Equal(t, commitlog.Start{Created: true}, d.Start())
	l, _, err := d.OpenLog(testID, commitlog.Options{})
	require.NoError(t, err)
	require.NoError(t, l.AppendLineage(entry(1, 0)))
	want := appendN(t, l, 4, 20)
	require.NoError(t, l.Close())
	require.NoError(t, d.Close(true))

	d, err = commitlog.OpenDataDir(fs, "/data", owner, "boot-1")
	require.NoError(t, err)
	require.Equal(t, commitlog.Start{Clean: true, SameBoot: true}, d.Start())
	crashed := fs.CrashClone(vfs.CrashCloneCfg{}) // killed while loading
	path := logPath(crashed, 0)
	patch(t, crashed, path, int64(len(fileBytes(t, crashed, path))), []byte("thirteen junk"))

	d, err = commitlog.OpenDataDir(crashed, "/data", owner, "boot-2")
	require.NoError(t, err)
	require.Equal(t, commitlog.Start{}, d.Start())
	l, report, err := d.OpenLog(testID, commitlog.Options{})
	require.NoError(t, err)
	require.False(t, report.Trusted)
	require.EqualValues(t, 13, report.Trimmed.EndPosition-report.Trimmed.Position)
	want = append(want, appendN(t, l, 1, 20)...)
	requireBatches(t, want, readAll(t, l, 0, 100))
}

// Field report B019.
func TestADataDirectoryInUseIsRefusedByName(t *testing.T) {
	for name, fs := range map[string]vfs.FS{"mem": newFS(t), "disk": vfs.Default} {
		t.Run(name, func(t *testing.T) {
			dir := "/data"
			if fs == vfs.Default {
				dir = t.TempDir()
			}
			owner := commitlog.Owner{ClusterID: "c", BrokerID: 4}
			d, err := commitlog.OpenDataDir(fs, dir, owner, "")
			require.NoError(t, err)
			before, err := fs.List(dir)
			require.NoError(t, err)
			_, err = commitlog.OpenDataDir(fs, dir, owner, "")
			var locked *commitlog.LockedError
			require.ErrorAs(t, err, &locked)
			require.Equal(t, dir, locked.Dir)
			require.ErrorContains(t, err, dir)
			after, err := fs.List(dir)
			require.NoError(t, err)
			require.ElementsMatch(t, before, after)
			require.NoError(t, d.Close(false))
			_, err = d.PartitionPath, d.Close(true)
			require.ErrorIs(t, err, commitlog.ErrClosed)

			var mismatch *commitlog.MismatchError
			_, err = commitlog.OpenDataDir(fs, dir, commitlog.Owner{ClusterID: "d", BrokerID: 4}, "")
			require.ErrorAs(t, err, &mismatch)
			_, err = commitlog.OpenDataDir(fs, dir, commitlog.Owner{ClusterID: "c", BrokerID: 5}, "")
			require.ErrorAs(t, err, &mismatch)
			d, err = commitlog.OpenDataDir(fs, dir, owner, "")
			require.NoError(t, err)
			require.False(t, d.Start().Clean)
			require.NoError(t, d.Close(true))
			d, err = commitlog.OpenDataDir(fs, dir, owner, "")
			require.NoError(t, err)
			require.True(t, d.Start().Clean)
			require.False(t, d.Start().SameBoot, "an unknown boot id proves nothing")
			require.NoError(t, d.Close(false))
		})
	}
}

// Field report B007.
func TestUnknownPartitionsAreListedAndNeverRemoved(t *testing.T) {
	fs := newFS(t)
	owner := commitlog.Owner{ClusterID: "cluster-a", BrokerID: 1}
	d, err := commitlog.OpenDataDir(fs, "/data", owner, "b")
	require.NoError(t, err)
	for p := range int32(3) {
		id := testID
		id.Partition = p
		l, _, err := d.OpenLog(id, commitlog.Options{})
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
	require.NoError(t, fs.MkdirAll("/data/lost+found", 0o755))
	require.NoError(t, d.RemovePartition(testTopic, 1))
	require.NoError(t, d.RemovePartition(testTopic, 1), "absent is success")
	// A removal that a crash cut short after its decision.
	require.NoError(t, fs.Rename(d.PartitionPath(testTopic, 2), d.PartitionPath(testTopic, 2)+".removed"))
	require.NoError(t, d.Close(true))
	d, err = commitlog.OpenDataDir(fs, "/data", owner, "b")
	require.NoError(t, err)
	found, strangers, err := d.Partitions()
	require.NoError(t, err)
	require.Equal(t, []commitlog.PartitionDir{{TopicID: testTopic, Partition: 0}}, found)
	require.Equal(t, []string{"lost+found"}, strangers)
	names, err := fs.List("/data")
	require.NoError(t, err)
	require.NotContains(t, names, commitlog.PartitionDirName(testTopic, 2)+".removed")
	id, err := commitlog.KernelBootID(fs)
	require.NoError(t, err)
	require.Empty(t, id)
	id, err = commitlog.KernelBootID(vfs.Default)
	require.NoError(t, err)
	if runtime.GOOS == "linux" {
		require.Len(t, id, 36)
	}
}

func TestAFailedReadIsNotTakenForDamage(t *testing.T) {
	mem := newFS(t)
	l := newLog(t, mem, commitlog.Options{})
	want := appendN(t, l, 3, 20)
	require.NoError(t, l.Sync())
	errDisk := errors.New("disk is tired")
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileReadAt && op.Path == logPath(mem, 0) {
			return errDisk
		}
		return nil
	}))
	_, _, err := commitlog.Open(fs, testDir, testID, commitlog.Options{})
	require.ErrorIs(t, err, errDisk)
	require.NotErrorIs(t, err, commitlog.ErrCorrupt)
	l, report := openLog(t, mem, commitlog.Options{})
	require.Nil(t, report.Damage)
	requireBatches(t, want, readAll(t, l, 0, 100))
}

// Field report B016.
func TestSnapshotsAboveTheLogEndAreRemoved(t *testing.T) {
	mem := newFS(t)
	l := newLog(t, mem, commitlog.Options{})
	appendN(t, l, 3, 20)
	require.NoError(t, l.Sync())
	require.NoError(t, l.SaveSnapshot(0, []byte("a")))
	require.NoError(t, l.SaveSnapshot(6, []byte("b")))
	require.NoError(t, l.SaveSnapshot(9, []byte("c")))
	appendN(t, l, 2, 20)
	require.NoError(t, l.SaveSnapshot(15, []byte("d")))
	offsets, err := l.SnapshotOffsets()
	require.NoError(t, err)
	require.Equal(t, []int64{15, 9}, offsets)
	var out *commitlog.OutOfRangeError
	require.ErrorAs(t, l.SaveSnapshot(16, nil), &out)

	l, report := openLog(t, mem.CrashClone(vfs.CrashCloneCfg{}), commitlog.Options{})
	require.EqualValues(t, 9, report.End)
	require.Equal(t, []string{"00000000000000000015.producers"}, report.Removed)
	data, err := l.LoadSnapshot(9)
	require.NoError(t, err)
	require.Equal(t, "c", string(data))
	_, err = l.LoadSnapshot(15)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, l.TruncateTo(6))
	offsets, err = l.SnapshotOffsets()
	require.NoError(t, err)
	require.NotContains(t, offsets, int64(9))
}

func TestAValidBatchBehindTheTornOneIsReported(t *testing.T) {
	fs := newFS(t)
	l := newLog(t, fs, commitlog.Options{})
	want := appendN(t, l, 5, 20)
	size := 0
	for _, b := range want[:3] {
		size += len(b)
	}
	patch(t, fs, logPath(fs, 0), int64(size)+80, []byte{want[3][80] ^ 1})
	_, report := openLog(t, fs, commitlog.Options{})
	require.EqualValues(t, 9, report.End)
	require.EqualValues(t, size+len(want[3]), report.Trimmed.ValidBehind)
	require.False(t, report.Intact())
}
