package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain lets the test binary be the command.
func TestMain(m *testing.M) {
	if os.Getenv("BRAID_TEST_BROKER") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// start runs the command and returns its exit code and what it wrote to standard
// error.
func start(t *testing.T, args ...string) (code int, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), "BRAID_TEST_BROKER=1")
	cmd.Stderr = &out
	err := cmd.Run()
	require.NoError(t, ctx.Err())
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode(), out.String()
	}
	require.NoError(t, err)
	return 0, out.String()
}

func TestExitCodes(t *testing.T) {
	code, text := start(t, "--id=0", "--no-such-key=1")
	require.Equal(t, 2, code)
	require.Contains(t, text, "no-such-key")

	code, text = start(t)
	require.Equal(t, 2, code)
	for _, field := range []string{"id", "data.dir", "metadata.addresses"} {
		require.Contains(t, text, field)
	}

	code, _ = start(t, "--config.verify", "--id=1", "--data.dir=/d", "--metadata.addresses=a:1")
	require.Zero(t, code)

	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nowhere := l.Addr().String()
	require.NoError(t, l.Close())
	code, text = start(t, "--id=1", "--data.dir="+t.TempDir(), "--metadata.addresses="+nowhere, "--start.timeout=200ms", "--log.level=error")
	require.Equal(t, 1, code)
	require.Contains(t, text, "the metadata service can't be reached within 200ms at "+nowhere)
}
