package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
)

// rooms runs role instances inside this process, each as if it were alone: its
// own telemetry, its own log file, its own listener.
type rooms struct {
	fail func(error) // told of an instance that ended by itself

	mu    sync.Mutex // guards all below
	units []*room
}

type room struct {
	role   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error // of the stop; readable when done is closed
}

func newRooms(fail func(error)) *rooms { return &rooms{fail: fail} }

// add starts an instance. It returns at once: building may wait for others.
func (r *rooms) add(x *instance) error {
	log, err := os.OpenFile(x.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	l, err := listen(x.address)
	if err != nil {
		return errors.Join(err, log.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	u := &room{role: x.role, cancel: cancel, done: make(chan struct{})}
	r.mu.Lock()
	r.units = append(r.units, u)
	r.mu.Unlock()
	go func() {
		defer close(u.done)
		defer func() { _ = log.Close() }() // nothing to be done about it
		server, closeRole, err := buildRole(ctx, x.role, x.args[1:], roleOptions{log: log, output: log, listener: l})
		if err == nil {
			defer closeRole()
			err = server.Run(ctx)
		} else {
			err = errors.Join(err, ignoreClosed(l.Close()))
		}
		if ctx.Err() == nil {
			if err == nil {
				err = errors.New("it stopped by itself")
			}
			r.fail(fmt.Errorf("%s: %w; see %s", &x.spec, err, x.logPath))
			return
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			u.err = fmt.Errorf("stop %s: %w", &x.spec, err)
		}
	}()
	return nil
}

// stopRole ends all instances of a role and waits until ctx ends.
func (r *rooms) stopRole(ctx context.Context, role string) error {
	r.mu.Lock()
	units := append([]*room(nil), r.units...)
	r.mu.Unlock()
	for _, u := range units {
		if u.role == role {
			u.cancel()
		}
	}
	var errs []error
	for _, u := range units {
		if u.role != role {
			continue
		}
		select {
		case <-u.done:
			errs = append(errs, u.err)
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("a %s did not stop in time", role))
		}
	}
	return errors.Join(errs...)
}
