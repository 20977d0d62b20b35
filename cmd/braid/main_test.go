package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain lets the test binary play what a supervisor starts: the command
// itself, or a small process whose behaviour the environment names.
func TestMain(m *testing.M) {
	if mode := os.Getenv("BRAID_TEST_CHILD"); mode != "" {
		os.Exit(child(mode))
	}
	if os.Getenv(watchParentEnv) != "" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		code := run(ctx, &console{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}, os.Args[1:])
		stop()
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// child is a process for tests of the supervisor.
func child(mode string) int {
	fmt.Fprintf(os.Stdout, "%s %s\n", mode, strings.Join(os.Args[1:], " "))
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	gone := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); close(gone) }()
	switch mode {
	case "exit":
		return 3
	case "refuse":
		fmt.Fprintln(os.Stdout, "time=x level=WARN msg=\"not this\"\ntime=x level=ERROR msg=\"no room\"\ntime=x level=INFO msg=\"stop step done\"")
		return 1
	case "stubborn": // ignores SIGTERM
		signal.Ignore(syscall.SIGTERM)
		fmt.Fprintln(os.Stdout, "ready")
		<-gone
		<-time.After(time.Minute)
	default:
		fmt.Fprintln(os.Stdout, "ready")
		select {
		case <-terminate:
			fmt.Fprintln(os.Stdout, "stopped")
		case <-gone:
			fmt.Fprintln(os.Stdout, "orphaned")
		}
	}
	return 0
}

// output collects what a command writes; it may be read meanwhile.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// braid runs a command and returns its exit code and output.
func braid(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var out, errs output
	code = run(ctx, &console{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errs}, args)
	return code, out.String(), errs.String()
}

func TestTheDispatcher(t *testing.T) {
	code, _, stderr := braid(t, "")
	require.Equal(t, exitUsage, code)
	require.Contains(t, stderr, "Usage: braid <command>")

	code, stdout, _ := braid(t, "", "help")
	require.Equal(t, exitOK, code)
	for _, name := range []string{"dev", "demo", "topic", "produce", "consume", "segments", "explain", "version"} {
		require.Contains(t, stdout, "\n  "+name+" ")
	}
	require.NotContains(t, stdout, "\n  rlm ", "role commands are hidden")

	code, _, stderr = braid(t, "", "prodcue")
	require.Equal(t, exitUsage, code)
	require.Contains(t, stderr, `no command "prodcue"`)

	code, stdout, _ = braid(t, "", "version", "--json")
	require.Equal(t, exitOK, code)
	require.Contains(t, stdout, `"go":"go`)
}

func TestEveryCommandExplainsItself(t *testing.T) {
	for _, cmd := range commands() {
		code, stdout, stderr := braid(t, "", cmd.name, "-h")
		require.Equal(t, exitOK, code, "%s: %s", cmd.name, stderr)
		if cmd.hidden {
			continue
		}
		require.Contains(t, stdout, "Usage: braid "+cmd.name)
		require.Contains(t, stdout, "--json")
		_, again, _ := braid(t, "", "help", cmd.name)
		require.Equal(t, stdout, again)
	}
}

func TestQuestionsThatAreNotUnderstood(t *testing.T) {
	t.Setenv("BRAID_BROKERS", "")
	for _, row := range []struct {
		args string
		want string
	}{
		{"produce", "name the topic"},
		{"produce --topic t", "name the cluster"},
		{"produce --topic t --brokers nonsense", "nonsense"},
		{"produce --topic t --level SOON", "must be LEADER"},
		{"produce --topic t --format xml", "must be lines, jsonl or csv"},
		{"produce --topic t --codec rar", "rar"},
		{"produce --nope", "-nope"},
		{"consume t --offset 3", "--offset needs --partition"},
		{"consume t --from-beginning --from-time 10m", "only one of"},
		{"consume t --from-time yesterday", "must be like"},
		{"consume t --max-messages -1", "must be 0 or more"},
		{"consume t --format xml", "must be lines or jsonl"},
		{"consume a b", "unexpected argument"},
		{"topic", "say what to do"},
		{"topic make t", `there is no "make"`},
		{"topic create", "name the topic"},
		{"topic reassign t --to 1,x --brokers 127.0.0.1:1", "must be broker ids"},
		{"topic set t --data-dir " + t.TempDir(), "no cluster was started there"},
		{"dev --brokers 0", "must be 1 to 100"},
		{"dev --zones 40", "must be 1 to 26"},
		{"dev now", "unexpected argument"},
		{"demo --file /does/not/exist", "no such file"},
		{"segments", "name the topic"},
		{"explain", "name the topic"},
		{"broker --id 1 --no-such-key 2", "no-such-key"},
	} {
		code, stdout, stderr := braid(t, "x\n", strings.Fields(row.args)...)
		require.NotEqual(t, exitOK, code, row.args)
		require.Contains(t, stderr, row.want, row.args)
		require.Empty(t, stdout, row.args)
	}
}
