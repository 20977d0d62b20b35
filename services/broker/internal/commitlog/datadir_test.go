package commitlog_test

import (
	"bufio"
	"os"
	"os/exec"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

const holderVariable = "COMMITLOG_TEST_HOLD"

// TestHoldDataDir is the other process of the test below.
func TestHoldDataDir(t *testing.T) {
	dir := os.Getenv(holderVariable)
	if dir == "" {
		t.Skip("runs only as the other process")
	}
	d, err := commitlog.OpenDataDir(vfs.Default, dir, commitlog.Owner{ClusterID: "c"}, "")
	require.NoError(t, err)
	_, err = os.Stdout.WriteString("held\n")
	require.NoError(t, err)
	_, err = bufio.NewReader(os.Stdin).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, d.Close(true))
}

// Field report B019.
func TestASecondProcessIsRefused(t *testing.T) {
	dir := t.TempDir()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestHoldDataDir$")
	cmd.Env = append(os.Environ(), holderVariable+"="+dir)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "held\n", line)

	before, err := os.ReadDir(dir)
	require.NoError(t, err)
	_, err = commitlog.OpenDataDir(vfs.Default, dir, commitlog.Owner{ClusterID: "c"}, "")
	var locked *commitlog.LockedError
	require.ErrorAs(t, err, &locked)
	require.ErrorContains(t, err, dir)
	require.ErrorContains(t, err, "another process")
	after, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, after, len(before))

	_, err = in.Write([]byte("\n"))
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())
	d, err := commitlog.OpenDataDir(vfs.Default, dir, commitlog.Owner{ClusterID: "c"}, "")
	require.NoError(t, err)
	require.True(t, d.Start().Clean)
	require.NoError(t, d.Close(false))
}

func TestAPartitionThatCanNotBeOpenedIsPutAsideWhole(t *testing.T) {
	fs := newFS(t)
	d, err := commitlog.OpenDataDir(fs, "/data", commitlog.Owner{ClusterID: testID.ClusterID}, "")
	require.NoError(t, err)
	l, _, err := d.OpenLog(testID, commitlog.Options{})
	require.NoError(t, err)
	require.NoError(t, l.AppendLineage(entry(1, 0)))
	appendN(t, l, 2, 20)
	require.NoError(t, l.Close())
	kept := fileBytes(t, fs, logPath(fs, 0))
	patch(t, fs, fs.PathJoin(testDir, "log.checkpoint"), 30, []byte{0xee})
	_, _, err = d.OpenLog(testID, commitlog.Options{})
	require.ErrorIs(t, err, commitlog.ErrCorrupt)
	for range 2 {
		aside, err := d.QuarantinePartition(testTopic, testID.Partition)
		require.NoError(t, err)
		l, report, err := d.OpenLog(testID, commitlog.Options{})
		require.NoError(t, err)
		require.True(t, report.Created)
		require.NoError(t, l.Close())
		_, strangers, err := d.Partitions()
		require.NoError(t, err)
		require.Contains(t, strangers, fs.PathBase(aside))
	}
	require.Equal(t, kept, fileBytes(t, fs, fs.PathJoin(testDir+".damaged-0", "00000000000000000000.log")))
}

// A data directory may lose power at any operation: what it says of the last
// run is never more than what was written.
func TestACleanMarkIsNeverFoundAfterACrash(t *testing.T) {
	for n := 1; n < 60; n++ {
		mem := newFS(t)
		owner := commitlog.Owner{ClusterID: "c", BrokerID: 1}
		d, err := commitlog.OpenDataDir(mem, "/data", owner, "a")
		require.NoError(t, err)
		require.NoError(t, d.Close(true))
		r := rng(uint64(n))
		c := &crasher{fs: mem, left: n, cfg: vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: r}}
		opened := false
		d, err = commitlog.OpenDataDir(errorfs.Wrap(mem, c), "/data", owner, "a")
		if c.clone == nil {
			opened = true
			c.clone = mem.CrashClone(c.cfg)
		}
		require.NoError(t, err)
		require.True(t, d.Start().Clean)
		d, err = commitlog.OpenDataDir(c.clone, "/data", owner, "b")
		require.NoError(t, err)
		if opened {
			require.False(t, d.Start().Clean, "operation %d", n)
		}
		require.False(t, d.Start().SameBoot)
	}
}
