package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// finalBound bounds the wait for tasks that no step ended.
const finalBound = 10 * time.Second

// overtime is what a step gets to return after its context ended.
const overtime = time.Second

// ErrStopping is the cause with which a stopping group ends its tasks.
var ErrStopping = errors.New("the service is stopping")

// Group is a set of tasks and stop steps. Assemble it in one goroutine, then
// call Run once.
type Group struct {
	log     *slog.Logger
	tasks   []*task
	steps   []step
	started chan struct{}
	ran     bool
}

type task struct {
	name string
	run  func(context.Context) error
	// cancel ends the task's context; set when it starts.
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when run returned
}

type step struct {
	name  string
	bound time.Duration
	run   func(context.Context) error
}

// NewGroup returns an empty group.
func NewGroup(log *slog.Logger) *Group {
	return &Group{log: log.With("component", "lifecycle"), started: make(chan struct{})}
}

// Go adds a task. An error of run other than its context's stops the group and
// is returned by Run; nil ends the task only. Names must be unique.
func (g *Group) Go(name string, run func(context.Context) error) {
	if slices.ContainsFunc(g.tasks, func(t *task) bool { return t.name == name }) {
		panic("lifecycle: two tasks are called " + name)
	}
	g.tasks = append(g.tasks, &task{name: name, run: run, done: make(chan struct{})})
}

// OnStop adds the next step of the stop; bound must be positive.
func (g *Group) OnStop(name string, bound time.Duration, run func(context.Context) error) {
	if bound <= 0 {
		panic("lifecycle: step " + name + " has no bound")
	}
	g.steps = append(g.steps, step{name, bound, run})
}

// Wait adds a step that only waits, for instance for load balancers to notice;
// nothing is added for a delay that isn't positive.
func (g *Group) Wait(name string, delay time.Duration) {
	if delay <= 0 {
		return
	}
	g.OnStop(name, delay+overtime, func(ctx context.Context) error {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
}

// StopTasks adds a step that ends the named tasks, all at once, and waits for
// them.
func (g *Group) StopTasks(name string, bound time.Duration, tasks ...string) {
	var chosen []*task
	for _, want := range tasks {
		i := slices.IndexFunc(g.tasks, func(t *task) bool { return t.name == want })
		if i < 0 {
			panic("lifecycle: step " + name + " stops the unknown task " + want)
		}
		chosen = append(chosen, g.tasks[i])
	}
	g.OnStop(name, bound, func(ctx context.Context) error { return endTasks(ctx, chosen) })
}

func endTasks(ctx context.Context, tasks []*task) error {
	for _, t := range tasks {
		t.cancel(ErrStopping)
	}
	for i, t := range tasks {
		select {
		case <-t.done:
			continue
		case <-ctx.Done():
		}
		var stuck []string
		for _, t := range tasks[i:] {
			select {
			case <-t.done:
			default:
				stuck = append(stuck, t.name)
			}
		}
		if len(stuck) > 0 {
			return fmt.Errorf("tasks still running: %s", strings.Join(stuck, ", "))
		}
	}
	return nil
}

// Started is closed when all tasks have been started.
func (g *Group) Started() <-chan struct{} { return g.started }

// Run starts the tasks, waits until ctx ends, a task fails or all tasks are
// done, and does the stop steps. It returns nil after a clean stop: neither
// the end of ctx nor tasks that end with their own context's error count.
// Failures of tasks and steps are returned, joined.
func (g *Group) Run(ctx context.Context) error {
	if g.ran {
		return errors.New("lifecycle: Run was called before")
	}
	g.ran = true
	// Tasks outlive ctx: they end in their step.
	base := context.WithoutCancel(ctx)
	tasks, failed := errgroup.WithContext(base)
	var running sync.WaitGroup
	running.Add(len(g.tasks))
	for _, t := range g.tasks {
		taskCtx, cancel := context.WithCancelCause(base)
		t.cancel = cancel
		tasks.Go(func() error {
			defer running.Done()
			defer close(t.done)
			defer cancel(nil)
			<-g.started
			return g.runTask(taskCtx, t)
		})
	}
	close(g.started)
	allDone := make(chan struct{})
	go func() { running.Wait(); close(allDone) }()

	var why string
	select {
	case <-ctx.Done():
		why = context.Cause(ctx).Error()
	case <-failed.Done():
		why = "a task failed"
	case <-allDone:
		why = "all tasks are done"
	}
	g.log.InfoContext(base, "stopping", "reason", why)
	errs := g.stop(base)
	select {
	case <-allDone:
		errs = append([]error{tasks.Wait()}, errs...)
	default: // the last step has named those that are stuck
		if failed.Err() != nil {
			errs = append([]error{context.Cause(failed)}, errs...)
		}
	}
	return errors.Join(errs...)
}

func (g *Group) runTask(ctx context.Context, t *task) error {
	err := t.run(ctx)
	if err == nil || (ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx)))) {
		g.log.DebugContext(ctx, "task ended", "task", t.name)
		return nil
	}
	err = fmt.Errorf("task %s: %w", t.name, err)
	g.log.ErrorContext(ctx, "task failed", "task", t.name, "err", err)
	return err
}

func (g *Group) stop(base context.Context) []error {
	steps := append(slices.Clone(g.steps), step{"remaining tasks", finalBound, func(ctx context.Context) error {
		return endTasks(ctx, g.tasks)
	}})
	var errs []error
	for _, s := range steps {
		if err := g.runStep(base, s); err != nil {
			errs = append(errs, fmt.Errorf("stop step %s: %w", s.name, err))
		}
	}
	return errs
}

// runStep does one step within its bound and logs it once.
func (g *Group) runStep(base context.Context, s step) error {
	ctx, cancel := context.WithTimeoutCause(base, s.bound, fmt.Errorf("bound of %s is over: %w", s.bound, context.DeadlineExceeded))
	defer cancel()
	start := time.Now()
	result := make(chan error, 1) // a step left behind must not block
	go func() { result <- s.run(ctx) }()
	var err error
	select {
	case err = <-result:
	case <-ctx.Done():
		// It has been told; a step that listens still reports what it reached.
		timer := time.NewTimer(overtime)
		defer timer.Stop()
		select {
		case err = <-result:
		case <-timer.C:
			err = fmt.Errorf("left behind: %w", context.Cause(ctx))
		}
	}
	attrs := []any{"step", s.name, "dur", time.Since(start)}
	if err != nil {
		g.log.WarnContext(base, "stop step failed", append(attrs, "err", err)...)
	} else {
		g.log.InfoContext(base, "stop step done", attrs...)
	}
	return err
}

// StopBound is the longest time that stopping takes: the sum of the steps'
// bounds, for an orchestrator's kill timer.
func (g *Group) StopBound() time.Duration {
	total := finalBound + overtime
	for _, s := range g.steps {
		total += s.bound + overtime
	}
	return total
}
