package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// restartPause is how long a role that ended stays down before it is started
// again.
const restartPause = time.Second

// spec says how to start one process.
type spec struct {
	role    string
	id      int
	binary  string
	args    []string
	env     []string // added to the parent's
	logPath string
}

func (s *spec) String() string { return fmt.Sprintf("%s %d", s.role, s.id) }

// processEvent tells what became of a process.
type processEvent struct {
	spec *spec
	// pid is the process's; started says that it began, else that it ended.
	pid     int
	started bool
	// reason is how it ended; again says that it will be started again.
	reason string
	again  bool
	// words is the reason that the process gave itself, as far as its log has
	// one; for ends with an exit code other than 0.
	words string
	// code is the exit code, -1 for an end by a signal; lived is how long the
	// process ran.
	code  int
	lived time.Duration
}

// failed says that the process ended by itself, with an error.
func (e *processEvent) failed() bool { return !e.started && e.code > 0 }

// told is how the process ended, with its own words.
func (e *processEvent) told() string {
	if e.words == "" {
		return e.reason
	}
	return e.reason + ": " + e.words
}

// supervisor starts processes, starts them again when they end, and stops them.
// Its methods are safe for concurrent use.
type supervisor struct {
	restart bool
	pause   time.Duration
	// notify is told every start and end, from several goroutines; it must not
	// call the supervisor.
	notify func(processEvent)

	start chan func() // run by one goroutine on one thread
	wg    sync.WaitGroup
	end   chan struct{} // of the starting thread
	done  chan struct{}

	mu    sync.Mutex // guards all below
	units map[string]*unit
}

// unit is one supervised process, through all its lives.
type unit struct {
	spec *spec
	stop chan struct{} // closed when it shall end for good
	gone chan struct{} // closed when it has

	mu      sync.Mutex // guards all below
	process *os.Process
	stopped bool
	began   time.Time // of the process
	logFrom int64     // where its part of the log begins
}

func newSupervisor(restart bool, notify func(processEvent)) *supervisor {
	s := &supervisor{restart: restart, pause: restartPause, notify: notify, start: make(chan func()), end: make(chan struct{}), done: make(chan struct{}), units: map[string]*unit{}}
	go func() {
		defer close(s.done)
		// A child that shall die with its parent dies with the thread that
		// started it, so that has to be one that lasts.
		runtime.LockOSThread()
		for {
			select {
			case fn := <-s.start:
				fn()
			case <-s.end:
				return
			}
		}
	}()
	return s
}

// add begins to supervise a process. Only the first start's error is returned;
// later ones are tried again.
func (s *supervisor) add(sp *spec) error {
	u := &unit{spec: sp, stop: make(chan struct{}), gone: make(chan struct{})}
	cmd, stdin, err := s.launch(u)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.units[sp.String()] = u
	s.mu.Unlock()
	s.wg.Go(func() { s.supervise(u, cmd, stdin) })
	return nil
}

// launch starts the process of a unit.
func (s *supervisor) launch(u *unit) (cmd *exec.Cmd, stdin io.Closer, err error) {
	log, err := os.OpenFile(u.spec.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	info, err := log.Stat()
	if err != nil {
		return nil, nil, err
	}
	cmd = exec.Command(u.spec.binary, u.spec.args...)
	cmd.Env = append(append(os.Environ(), watchParentEnv+"=1"), u.spec.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = childAttributes()
	stdin, err = cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	started := make(chan error, 1)
	s.start <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, nil, errors.Join(fmt.Errorf("start %s: %w", u.spec, err), stdin.Close())
	}
	u.mu.Lock()
	u.process = cmd.Process
	u.began, u.logFrom = time.Now(), info.Size()
	stopped := u.stopped
	u.mu.Unlock()
	if stopped { // stop came in between and saw no process
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	s.notify(processEvent{spec: u.spec, pid: cmd.Process.Pid, started: true})
	return cmd, stdin, nil
}

func (s *supervisor) supervise(u *unit, cmd *exec.Cmd, stdin io.Closer) {
	defer close(u.gone)
	for {
		pid := cmd.Process.Pid
		_ = cmd.Wait() // the state says more than the error
		_ = stdin.Close()
		u.mu.Lock()
		u.process = nil
		stopped := u.stopped
		e := processEvent{
			spec: u.spec, pid: pid, reason: cmd.ProcessState.String(), again: s.restart && !stopped,
			code: cmd.ProcessState.ExitCode(), lived: time.Since(u.began),
		}
		from := u.logFrom
		u.mu.Unlock()
		if e.failed() {
			e.words = lastWords(u.spec.logPath, u.spec.role, from)
		}
		again := e.again
		s.notify(e)
		if !again {
			return
		}
		for started := false; !started; {
			select {
			case <-u.stop:
				return
			case <-time.After(s.pause):
			}
			next, in, err := s.launch(u)
			if err != nil {
				s.notify(processEvent{spec: u.spec, reason: err.Error(), again: true})
				continue
			}
			cmd, stdin, started = next, in, true
		}
	}
}

func (s *supervisor) unit(role string, id int) (*unit, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := (&spec{role: role, id: id}).String()
	u, ok := s.units[key]
	if !ok {
		return nil, fmt.Errorf("there is no %s", key)
	}
	return u, nil
}

// kill ends a process with SIGKILL and returns its pid.
func (s *supervisor) kill(role string, id int) (pid int, err error) {
	u, err := s.unit(role, id)
	if err != nil {
		return 0, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.process == nil {
		return 0, fmt.Errorf("%s does not run", u.spec)
	}
	return u.process.Pid, u.process.Kill()
}

// stopRole asks all processes of a role to stop and waits; those that still run
// when ctx ends are killed. It returns which had to be.
func (s *supervisor) stopRole(ctx context.Context, role string) (killed []string) {
	s.mu.Lock()
	var units []*unit
	for _, u := range s.units {
		if u.spec.role == role {
			units = append(units, u)
		}
	}
	s.mu.Unlock()
	for _, u := range units {
		u.mu.Lock()
		if !u.stopped {
			u.stopped = true
			close(u.stop)
		}
		if u.process != nil {
			_ = u.process.Signal(syscall.SIGTERM) // gone already is as good
		}
		u.mu.Unlock()
	}
	for _, u := range units {
		select {
		case <-u.gone:
			continue
		case <-ctx.Done():
		}
		u.mu.Lock()
		if u.process != nil {
			killed = append(killed, u.spec.String())
			_ = u.process.Kill()
		}
		u.mu.Unlock()
		<-u.gone // SIGKILL is certain
	}
	return killed
}

// close returns when nothing of the supervisor runs any more; all roles must
// have been stopped.
func (s *supervisor) close() {
	s.wg.Wait()
	close(s.end)
	<-s.done
}
