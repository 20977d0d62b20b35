package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// supervised starts processes of this test binary and passes on their events.
type supervised struct {
	*supervisor
	t      *testing.T
	dir    string
	events chan processEvent
}

func supervise(t *testing.T, restart bool) *supervised {
	events := make(chan processEvent, 100)
	s := &supervised{t: t, dir: t.TempDir(), events: events}
	s.supervisor = newSupervisor(restart, func(e processEvent) { events <- e })
	s.pause = 20 * time.Millisecond
	return s
}

func (s *supervised) child(id int, mode string) *spec {
	binary, err := os.Executable()
	require.NoError(s.t, err)
	return &spec{
		role: "broker", id: id, binary: binary, args: []string{"an", "argument"},
		env: []string{"BRAID_TEST_CHILD=" + mode}, logPath: filepath.Join(s.dir, mode+".log"),
	}
}

func (s *supervised) next() processEvent {
	s.t.Helper()
	select {
	case e := <-s.events:
		return e
	case <-time.After(20 * time.Second):
		s.t.Fatal("no event")
		panic("unreachable")
	}
}

func (s *supervised) log(mode string) string {
	data, err := os.ReadFile(filepath.Join(s.dir, mode+".log"))
	require.NoError(s.t, err)
	return string(data)
}

func (s *supervised) await(mode, text string, times int) {
	s.t.Helper()
	require.Eventually(s.t, func() bool { return strings.Count(s.log(mode), text) >= times }, 20*time.Second, 5*time.Millisecond)
}

func (s *supervised) stop(within time.Duration) []string {
	ctx, cancel := context.WithTimeout(s.t.Context(), within)
	defer cancel()
	killed := s.stopRole(ctx, "broker")
	s.close()
	return killed
}

func TestAKilledProcessIsStartedAgain(t *testing.T) {
	s := supervise(t, true)
	require.NoError(t, s.add(s.child(1, "wait")))
	first := s.next()
	require.True(t, first.started)
	pid, err := s.kill("broker", 1)
	require.NoError(t, err)
	require.Equal(t, first.pid, pid)
	ended := s.next()
	require.False(t, ended.started)
	require.True(t, ended.again)
	require.Equal(t, pid, ended.pid)
	require.Contains(t, ended.reason, "killed")
	second := s.next()
	require.True(t, second.started)
	require.NotEqual(t, pid, second.pid)
	s.await("wait", "ready", 1)
	require.Contains(t, s.log("wait"), "wait an argument")
	require.Empty(t, s.stop(20*time.Second))
	last := s.next()
	require.False(t, last.again)
	require.Equal(t, second.pid, last.pid)
}

func TestAProcessThatEndsByItselfIsStartedAgainAndAgain(t *testing.T) {
	s := supervise(t, true)
	require.NoError(t, s.add(s.child(1, "exit")))
	for range 3 {
		require.True(t, s.next().started)
		e := s.next()
		require.True(t, e.again)
		require.Equal(t, "exit status 3", e.reason)
		require.True(t, e.failed())
	}
	s.stop(20 * time.Second)
}

func TestAProcessThatEndsWithAnErrorIsQuoted(t *testing.T) {
	s := supervise(t, false)
	require.NoError(t, s.add(s.child(1, "refuse")))
	require.True(t, s.next().started)
	e := s.next()
	require.Equal(t, `exit status 1: time=x level=ERROR msg="no room"`, e.told())
	require.False(t, e.beyondRestart())
	s.stop(20 * time.Second)
}

func TestLastWords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for _, row := range []struct{ name, before, text, want string }{
		{"the command's own", "", "level=ERROR msg=a\nbraid rlm: the reason\n  key value\nlevel=ERROR msg=b\n", "the reason"},
		{"of this life only", "braid rlm: old\n", "level=INFO msg=new\n", "level=INFO msg=new"},
		{"a crash", "", "level=ERROR msg=a\npanic: boom\n\ngoroutine 1 [running]:\n", "panic: boom"},
		{"an error over a later warning", "", "level=ERROR msg=a\nlevel=WARN msg=b\nlevel=INFO msg=c\n", "level=ERROR msg=a"},
		{"the last warning", "", "level=WARN msg=a\nlevel=WARN msg=b\nlevel=INFO msg=c\n\n", "level=WARN msg=b"},
		{"far behind much else", "", strings.Repeat("level=INFO msg=x\n", 20_000) + "braid rlm: why\n", "why"},
		{"nothing", "level=ERROR msg=a\n", "", ""},
	} {
		require.NoError(t, os.WriteFile(path, []byte(row.before+row.text), 0o600))
		require.Equal(t, row.want, lastWords(path, "rlm", int64(len(row.before))), row.name)
	}
	require.Contains(t, lastWords(path+"x", "rlm", 0), "no such file")
}

func TestEndsInARowStopTheCluster(t *testing.T) {
	d := &devCluster{lastEnd: map[string]string{}, failures: map[string]int{}}
	failed := &processEvent{spec: &spec{role: "rlm", id: 2, logPath: "rlm-2.log"}, code: 1, reason: "exit status 1", words: "no bucket", again: true}
	killed := &processEvent{spec: failed.spec, code: -1, reason: "signal: killed", again: true}
	require.NoError(t, d.judge(failed))
	require.NoError(t, d.judge(killed))
	require.NoError(t, d.judge(failed))
	require.EqualError(t, d.judge(failed), "rlm 2 ended 3 times in a row, last with exit status 1: no bucket; see rlm-2.log")
	d.ready = true
	steady := *failed
	steady.lived = steadyRun
	require.NoError(t, d.judge(&steady))
	foreign := *failed
	foreign.words = "broker.json belongs to another owner"
	require.ErrorContains(t, d.judge(&foreign), "does not help")
	foreign.again = false
	require.NoError(t, d.judge(&foreign), "nothing is started again anyway")
}

func TestWithoutRestartAProcessStaysDown(t *testing.T) {
	s := supervise(t, false)
	require.NoError(t, s.add(s.child(1, "wait")))
	require.NoError(t, s.add(s.child(2, "wait")))
	require.True(t, s.next().started)
	require.True(t, s.next().started)
	_, err := s.kill("broker", 1)
	require.NoError(t, err)
	e := s.next()
	require.False(t, e.again)
	require.Equal(t, 1, e.spec.id)
	_, err = s.kill("broker", 1)
	require.ErrorContains(t, err, "does not run")
	_, err = s.kill("broker", 9)
	require.ErrorContains(t, err, "there is no broker 9")
	require.Empty(t, s.stop(20*time.Second))
}

func TestAStopIsAskedForFirst(t *testing.T) {
	s := supervise(t, true)
	require.NoError(t, s.add(s.child(1, "wait")))
	s.await("wait", "ready", 1)
	require.Empty(t, s.stop(20*time.Second))
	require.Contains(t, s.log("wait"), "stopped")
}

func TestAProcessThatDoesNotStopIsKilled(t *testing.T) {
	s := supervise(t, true)
	require.NoError(t, s.add(s.child(1, "stubborn")))
	s.await("stubborn", "ready", 1)
	require.Equal(t, []string{"broker 1"}, s.stop(50*time.Millisecond))
}

func TestAProcessSeesTheEndOfItsParentsPipe(t *testing.T) {
	s := supervise(t, false)
	u := &unit{spec: s.child(1, "wait"), stop: make(chan struct{}), gone: make(chan struct{})}
	cmd, stdin, err := s.launch(u)
	require.NoError(t, err)
	s.await("wait", "ready", 1)
	require.NoError(t, stdin.Close())
	require.NoError(t, cmd.Wait())
	require.Contains(t, s.log("wait"), "orphaned")
	s.close()
}

func TestAStartThatFailsIsTold(t *testing.T) {
	s := supervise(t, true)
	sp := s.child(1, "wait")
	sp.binary = filepath.Join(s.dir, "absent")
	require.ErrorContains(t, s.add(sp), "start broker 1")
	s.close()
}

func TestTheLockKeepsASecondOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
		require.NoError(t, err)
		return f
	}
	a, b := open(), open()
	defer b.Close()
	ok, err := tryLock(a)
	require.NoError(t, err)
	require.True(t, ok)
	ok, err = tryLock(b)
	require.NoError(t, err)
	require.False(t, ok)
	require.NoError(t, a.Close())
	ok, err = tryLock(b)
	require.NoError(t, err)
	require.True(t, ok)
}
