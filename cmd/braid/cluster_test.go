package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// dev runs `braid dev` in the background and returns its data directory. The
// returned function interrupts it and gives its exit code and output.
func dev(t *testing.T, dir string, args ...string) (stop func() (int, string)) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(t.Context()))
	var out, errs output
	var code int
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		code = run(ctx, &console{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}, append([]string{"dev", "--data-dir", dir}, args...))
	})
	stop = sync.OnceValues(func() (int, string) {
		cancel(errors.New("received interrupt"))
		wg.Wait()
		return code, out.String() + errs.String()
	})
	t.Cleanup(func() { stop() })
	require.Eventually(t, func() bool {
		select {
		case <-done:
			return true
		default:
		}
		return strings.Contains(out.String(), "ready")
	}, 90*time.Second, 20*time.Millisecond, "%s", errs.String())
	require.Contains(t, out.String(), "ready", errs.String())
	return stop
}

// devFails runs a `braid dev` that has to end by itself with exit code 1, and
// returns what it says.
func devFails(t *testing.T, args ...string) string {
	t.Helper()
	code, _, stderr := braid(t, "", append([]string{"dev"}, args...)...)
	require.Equal(t, exitFailed, code, stderr)
	return stderr
}

var servingPages = regexp.MustCompile(`msg="serving metrics and debug pages".* address=(127\.0\.0\.1:\d+)`)

// requireMetrics asks every role instance of a dev for its metrics.
func requireMetrics(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		log, err := os.ReadFile(filepath.Join(dir, "logs", name+".log"))
		require.NoError(t, err)
		found := servingPages.FindAllSubmatch(log, -1)
		require.NotEmpty(t, found, name)
		resp, err := (&http.Client{Timeout: 10 * time.Second}).Get("http://" + string(found[len(found)-1][1]) + "/metrics")
		require.NoError(t, err, name)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, errors.Join(err, resp.Body.Close()))
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Contains(t, string(body), "# TYPE", name)
	}
}

func lastJSON(t *testing.T, stdout string, v any) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), v), stdout)
}

// must runs a command that has to succeed and returns its output.
func must(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	code, stdout, stderr := braid(t, stdin, args...)
	require.Equal(t, exitOK, code, "%v: %s %s", args, stdout, stderr)
	return stdout
}

// fails runs a command that has to fail, saying want, and returns its output.
func fails(t *testing.T, want, stdin string, args ...string) string {
	t.Helper()
	code, stdout, stderr := braid(t, stdin, args...)
	require.Equal(t, exitFailed, code, "%v: %s", args, stdout)
	require.Contains(t, stderr, want, "%v", args)
	return stdout
}

// A whole cluster in this process, driven by the commands alone, stopped and
// started again.
func TestTheCommandsAgainstACluster(t *testing.T) {
	dir := t.TempDir()
	stop := dev(t, dir, "--brokers", "2", "--zones", "2")
	before, err := readEndpoints(filepath.Join(dir, endpointsFile))
	require.NoError(t, err)
	require.Len(t, before.Broker, 2)
	t.Setenv("BRAID_DATA_DIR", dir)

	t.Run("every role serves metrics", func(t *testing.T) {
		requireMetrics(t, dir, "metadata-1", "rlm-1", "broker-1", "broker-2")
	})
	t.Run("a second dev on the directory is refused", func(t *testing.T) {
		code, _, stderr := braid(t, "", "dev", "--data-dir", dir)
		require.Equal(t, exitFailed, code)
		require.Contains(t, stderr, fmt.Sprintf("in use by another braid dev (pid %d)", os.Getpid()))
	})
	t.Run("topics", func(t *testing.T) {
		var topic topicInfo
		lastJSON(t, must(t, "", "topic", "create", "quakes", "--partitions", "4", "--config", "min.ack.level=OBJECT", "--json"), &topic)
		require.Len(t, topic.Partitions, 4)
		for _, p := range topic.Partitions {
			require.True(t, p.Opened)
		}
		fails(t, "TOPIC_EXISTS", "", "topic", "create", "quakes")
		fails(t, "min.ack.lvl", "", "topic", "create", "other", "--config", "min.ack.lvl=OBJECT")
		fails(t, "bad name", "", "topic", "create", "bad name")
		for _, args := range [][]string{
			{"topic", "describe", "absent"}, {"topic", "set", "absent", "--config", "max.batch.bytes=512KiB"}, {"topic", "delete", "absent"},
			{"explain", "absent"}, {"consume", "absent"}, {"produce", "absent"}, {"segments", "absent"},
		} {
			fails(t, `topic "absent" does not exist (UNKNOWN_TOPIC_OR_PARTITION)`, "x\n", args...)
		}
		require.Contains(t, must(t, "", "topic", "list"), "quakes")
		must(t, "", "topic", "create", "doomed", "--metadata", before.Metadata[0].Address)
		must(t, "", "topic", "delete", "doomed", "--brokers", before.Broker[0].Address)
		fails(t, "UNKNOWN_TOPIC_OR_PARTITION", "", "topic", "describe", "doomed")
		require.Contains(t, must(t, "", "topic", "set", "quakes", "--config", "max.batch.bytes=512KiB"), "max.batch.bytes")
		require.NotContains(t, must(t, "", "topic", "set", "quakes", "--unset", "max.batch.bytes"), "max.batch.bytes")
		var reassigned partitionInfo
		same := strings.Trim(strings.ReplaceAll(fmt.Sprint(topic.Partitions[1].Replicas), " ", ","), "[]")
		lastJSON(t, must(t, "", "topic", "reassign", "quakes", "--partition", "1", "--to", same, "--json"), &reassigned)
		require.Equal(t, topic.Partitions[1].Replicas, reassigned.Replicas)
		fails(t, "broker_ids", "", "topic", "reassign", "quakes", "--to", "1,9")
	})
	t.Run("produce and consume", func(t *testing.T) {
		var sum produceSummary
		lastJSON(t, must(t, "", "produce", "--topic", "quakes", "--file", "../../testdata/earthquakes.jsonl", "--format", "jsonl", "--key", "net", "--json"), &sum)
		require.EqualValues(t, 1707, sum.Acked)
		require.EqualValues(t, 1707, sum.Levels["OBJECT"])
		var read consumeSummary
		stdout := must(t, "", "consume", "--topic", "quakes", "--from-beginning", "--json")
		lastJSON(t, stdout, &read)
		require.EqualValues(t, 1707, read.Records)
		var got []demoRecord
		for _, line := range strings.Split(strings.TrimSpace(stdout), "\n")[:1707] {
			var rec consumedRecord
			require.NoError(t, json.Unmarshal([]byte(line), &rec))
			got = append(got, demoRecord{key: []byte(*rec.Key), value: []byte(*rec.Value)})
		}
		sent, err := demoRecords(earthquakes, "net")
		require.NoError(t, err)
		require.Equal(t, comparison{read: 1707}, compare(sent, got))

		require.Equal(t, 3, strings.Count(must(t, "", "consume", "quakes", "--max-messages", "3"), "\n"))
		one := must(t, "", "consume", "quakes", "--partition", "0", "--offset", "5", "--max-messages", "1", "--format", "jsonl")
		require.Contains(t, one, `"partition":0,"offset":5,`)
		require.Empty(t, must(t, "", "consume", "quakes", "--from-time", time.Now().Add(time.Hour).Format(time.RFC3339)))
		fails(t, "OFFSET_OUT_OF_RANGE", "", "consume", "quakes", "--partition", "0", "--offset", "1000000")
		fails(t, "only 0 to 3", "", "consume", "quakes", "--partition", "4")
		fails(t, "UNKNOWN_TOPIC_OR_PARTITION", "", "consume", "absent")
	})
	t.Run("bad input is not half-produced silently", func(t *testing.T) {
		must(t, "", "topic", "create", "careful")
		bad := filepath.Join(t.TempDir(), "bad.jsonl")
		require.NoError(t, os.WriteFile(bad, []byte("{\"k\":1}\n{\"k\":2}\n{\"k\"\n"), 0o600))
		require.Empty(t, fails(t, "line 3: is not JSON", "", "produce", "careful", "--file", bad, "--format", "jsonl"))
		require.Empty(t, must(t, "", "consume", "careful"), "a file is checked before anything is sent")

		var sum produceSummary
		stdout := fails(t, "line 3: is not JSON", "{\"k\":1}\n{\"k\":2}\n{\"k\"\n{}\n", "produce", "careful", "--format", "jsonl", "--level", "OBJECT", "--json")
		lastJSON(t, stdout, &sum)
		require.EqualValues(t, 2, sum.Acked)
		require.Equal(t, 3, sum.Line)
		require.Equal(t, "{\"k\":1}\n{\"k\":2}\n", must(t, "", "consume", "careful"))

		large := filepath.Join(t.TempDir(), "large")
		require.NoError(t, os.WriteFile(large, []byte("a\nb\n"+strings.Repeat("x", 2<<20)+"\n"), 0o600))
		require.Empty(t, fails(t, "line 3: the record takes", "", "produce", "careful", "--file", large))
		require.Empty(t, fails(t, "topic careful has no partition 1, only 0 to 0", "x\n", "produce", "careful", "--partition", "1"))
		require.Empty(t, fails(t, "has no partition -2", "x\n", "produce", "careful", "--partition", "-2"))
		require.Equal(t, 2, strings.Count(must(t, "", "consume", "careful"), "\n"), "nothing was added")

		fails(t, "max.batch.bytes", strings.Repeat("x", 2<<20), "produce", "careful")
		require.Empty(t, fails(t, "LEVEL_UNREACHABLE", "x\n", "produce", "careful", "--level", "MIRRORED"))
		require.Empty(t, fails(t, "LEVEL_UNREACHABLE", "x\n", "produce", "quakes", "--level", "LEADER"))
	})
	t.Run("segments and explain", func(t *testing.T) {
		var sum segmentsSummary
		lastJSON(t, must(t, "", "segments", "quakes", "--json"), &sum)
		require.Positive(t, sum.Objects)
		require.Equal(t, 4, sum.Partitions)
		require.Contains(t, must(t, "", "segments", "quakes"), "partitions per object")
		var line explainLine
		lastJSON(t, must(t, "", "explain", "quakes", "--partition", "1", "--json"), &line)
		require.Equal(t, "ACTIVE", line.State)
		require.Contains(t, must(t, "", "explain", "quakes"), "HEALTHY")
	})
	t.Run("following ends well when interrupted", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		var out, errs output
		done := make(chan int, 1)
		go func() {
			done <- run(ctx, &console{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}, []string{"consume", "careful", "--follow", "--from-beginning", "--json"})
		}()
		require.Eventually(t, func() bool { return strings.Count(out.String(), "\n") == 2 }, 20*time.Second, 10*time.Millisecond)
		must(t, "later\n", "produce", "careful")
		require.Eventually(t, func() bool { return strings.Contains(out.String(), "later") }, 20*time.Second, 10*time.Millisecond)
		cancel(errors.New("received interrupt"))
		require.Equal(t, exitOK, <-done, errs.String())
		var sum consumeSummary
		lastJSON(t, out.String(), &sum)
		require.EqualValues(t, 3, sum.Records)
	})

	code, text := stop()
	require.Equal(t, exitOK, code, text)

	t.Run("with fewer members it does not start", func(t *testing.T) {
		text := devFails(t, "--data-dir", dir, "--brokers", "1")
		require.Contains(t, text, "2 brokers, 1 remote-log manager, 1 metadata replica in 2 zones")
		require.Contains(t, text, "can't go on with 1 broker, 1 remote-log manager")
	})
	t.Run("started again it continues where it was", func(t *testing.T) {
		stop := dev(t, dir)
		after, err := readEndpoints(filepath.Join(dir, endpointsFile))
		require.NoError(t, err)
		require.Equal(t, before, after, "the same shape, ports and process")
		require.Equal(t, 1707, strings.Count(must(t, "", "consume", "quakes"), "\n"))
		must(t, "more\n", "produce", "quakes")
		require.Equal(t, 1708, strings.Count(must(t, "", "consume", "quakes"), "\n"))
		code, text := stop()
		require.Equal(t, exitOK, code, text)
	})
	t.Run("it may grow", func(t *testing.T) {
		stop := dev(t, dir, "--brokers", "3", "--rlms", "2", "--zones", "3")
		require.Equal(t, 1708, strings.Count(must(t, "", "consume", "quakes"), "\n"))
		code, text := stop()
		require.Equal(t, exitOK, code, text)
		require.Contains(t, devFails(t, "--data-dir", dir, "--rlms", "1"), "3 brokers, 2 remote-log managers")
	})
	t.Run("a member of another cluster is named at once", func(t *testing.T) {
		for _, store := range []string{"etcd", "objects"} {
			require.NoError(t, os.RemoveAll(filepath.Join(dir, store)))
		}
		for _, how := range []string{"--processes=true", "--processes=false"} {
			start := time.Now()
			text := devFails(t, "--data-dir", dir, how)
			require.Regexp(t, `broker [123].*: .*belongs to another owner: cluster id is`, text, how)
			require.Less(t, time.Since(start), readyTimeout/2, how)
		}
	})
}

func TestDevTellsOfAMemberThatCannotStart(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "broker-1"), nil, 0o600)) // where a directory has to be
	text := devFails(t, "--data-dir", dir, "--processes", "--brokers", "2")
	require.Equal(t, 3, strings.Count(text, ") ended: exit status 1"), text)
	require.Contains(t, text, "braid dev: broker 1 ended 3 times in a row, last with exit status 1: task partitions: open the data directory")
	require.NoFileExists(t, filepath.Join(dir, "dev.json"), "it was never a cluster")
	require.Contains(t, devFails(t, "--data-dir", dir, "--processes", "--no-restart"), "braid dev: broker 1 ended: exit status 1: task partitions")
	require.Contains(t, devFails(t, "--data-dir", dir), "braid dev: broker 1: task partitions: open the data directory")
	require.NoError(t, os.Remove(filepath.Join(dir, "broker-1")))
	code, out := dev(t, dir)()
	require.Equal(t, exitOK, code, out)
}

func TestDevProcessesAreStartedAgainOnTheirAddress(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	stop := dev(t, dir, "--processes", "--brokers", "2")
	t.Setenv("BRAID_DATA_DIR", dir)
	read := func() *endpoints {
		e, err := readEndpoints(filepath.Join(dir, endpointsFile))
		require.NoError(t, err)
		return e
	}
	code, stdout, stderr := braid(t, "", "topic", "create", "t", "--partitions", "4")
	require.Equal(t, exitOK, code, stdout+stderr)
	for _, role := range []string{"broker", "rlm", "metadata"} {
		before, _ := read().find(role, 1)
		require.NotEqual(t, os.Getpid(), before.PID)
		p, err := os.FindProcess(before.PID)
		require.NoError(t, err)
		require.NoError(t, p.Kill())
		require.Eventually(t, func() bool {
			now, ok := read().find(role, 1)
			return ok && now.PID != before.PID && now.Address == before.Address
		}, 30*time.Second, 20*time.Millisecond, role)
		code, stdout, stderr := braid(t, strings.Repeat("after "+role+"\n", 50), "produce", "t", "--level", "OBJECT")
		require.Equal(t, exitOK, code, stdout+stderr)
	}
	_, stdout, _ = braid(t, "", "consume", "t")
	require.Equal(t, 150, strings.Count(stdout, "\n"))
	code, text := stop()
	require.Equal(t, exitOK, code, text)
	require.Contains(t, text, "starting it again in 1s")
}
