package lifecycle

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// record collects log lines.
type record struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.buf.Write(p)
}

func (r *record) steps(t *testing.T) (out []string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for line := range strings.Lines(r.buf.String()) {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		if s, ok := m["step"].(string); ok {
			out = append(out, s)
		}
	}
	return out
}

func newTestGroup() (*Group, *record) {
	r := new(record)
	return NewGroup(slog.New(slog.NewJSONHandler(r, nil))), r
}

func untilDone(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func TestStepsRunInOrderAndAreLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, log := newTestGroup()
		var order []string
		g.Go("server", untilDone)
		g.Go("worker", func(ctx context.Context) error {
			<-ctx.Done()
			order = append(order, "worker ended")
			assert.Equal(t, ErrStopping, context.Cause(ctx))
			return ctx.Err()
		})
		g.OnStop("not serving", time.Second, func(ctx context.Context) error {
			require.NoError(t, ctx.Err(), "steps outlive the run context")
			order = append(order, "not serving")
			return nil
		})
		g.Wait("drain delay", 5*time.Second)
		g.StopTasks("workers", time.Second, "worker")
		g.OnStop("close", time.Second, func(context.Context) error { order = append(order, "close"); return nil })

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		start := time.Now()
		require.NoError(t, g.Run(ctx))
		assert.Equal(t, 65*time.Second, time.Since(start))
		assert.Equal(t, []string{"not serving", "worker ended", "close"}, order)
		assert.Equal(t, []string{"not serving", "drain delay", "workers", "close", "remaining tasks"}, log.steps(t))
	})
}

func TestTasksStartBehindTheBarrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := newTestGroup()
		var running atomic.Bool
		for i := range 2000 { // enough for the first to run while the last is started
			g.Go(strconv.Itoa(i), func(context.Context) error {
				select {
				case <-g.Started():
				default:
					t.Error("a task runs before the barrier")
				}
				running.Store(true)
				return nil
			})
		}
		synctest.Wait()
		assert.False(t, running.Load())
		require.NoError(t, g.Run(t.Context()), "all tasks are done, so the group stops")
		assert.True(t, running.Load())
		require.Error(t, g.Run(t.Context()), "a group runs once")
	})
}

func TestFailingTaskStopsTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, log := newTestGroup()
		broken := errors.New("listener lost")
		stopped := false
		g.Go("healthy", untilDone)
		g.Go("sick", func(ctx context.Context) error {
			select {
			case <-time.After(time.Second):
				return broken
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		g.OnStop("leave", time.Second, func(context.Context) error { stopped = true; return nil })
		err := g.Run(t.Context())
		require.ErrorIs(t, err, broken)
		require.ErrorContains(t, err, "task sick")
		assert.True(t, stopped)
		assert.Equal(t, []string{"leave", "remaining tasks"}, log.steps(t))
	})
}

func TestEveryStepIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, log := newTestGroup()
		release := make(chan struct{})
		defer close(release)
		deaf := func(context.Context) error { <-release; return nil }
		g.Go("deaf task", deaf)
		g.Go("listening task", untilDone)
		listened := errors.New("gave up half way")
		g.OnStop("deaf step", 3*time.Second, deaf)
		g.OnStop("listening step", 2*time.Second, func(ctx context.Context) error { <-ctx.Done(); return listened })
		g.StopTasks("tasks", 4*time.Second, "deaf task", "listening task")
		ran := false
		g.OnStop("last", time.Second, func(context.Context) error { ran = true; return nil })

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		start := time.Now()
		err := g.Run(ctx)
		assert.LessOrEqual(t, time.Since(start), g.StopBound())
		require.ErrorContains(t, err, "stop step deaf step: left behind")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, listened)
		require.ErrorContains(t, err, "stop step tasks: tasks still running: deaf task")
		assert.NotContains(t, err.Error(), "listening task")
		assert.True(t, ran, "a stuck step doesn't stop the stop")
		assert.Equal(t, []string{"deaf step", "listening step", "tasks", "last", "remaining tasks"}, log.steps(t))
	})
}

func TestFailureDuringTheStopIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := newTestGroup()
		lost := errors.New("lost the last write")
		g.Go("flusher", func(ctx context.Context) error { <-ctx.Done(); return lost })
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, g.Run(ctx), lost)
	})
}

func TestMistakesPanic(t *testing.T) {
	g, _ := newTestGroup()
	g.Go("a", untilDone)
	assert.Panics(t, func() { g.Go("a", untilDone) })
	assert.Panics(t, func() { g.StopTasks("s", time.Second, "b") })
	assert.Panics(t, func() { g.OnStop("s", 0, untilDone) })
}

func TestSecondSignalExitsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals := make(chan os.Signal, 2)
		var code atomic.Int64
		ctx, release := watch(t.Context(), signals, func(c int) { code.Store(int64(c)) })
		defer release()
		synctest.Wait()
		require.NoError(t, ctx.Err())
		signals <- os.Interrupt
		synctest.Wait()
		require.ErrorIs(t, ctx.Err(), context.Canceled)
		require.ErrorContains(t, context.Cause(ctx), "received interrupt")
		assert.Zero(t, code.Load())
		signals <- os.Interrupt
		synctest.Wait()
		assert.Equal(t, int64(130), code.Load())
	})
}

func TestReleasedSignalsLeaveNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, release := watch(t.Context(), make(chan os.Signal), func(int) { t.Error("exit") })
		release()
		release()
		require.Error(t, ctx.Err())
	})
}
