package main

import (
	"fmt"
	"sync"
	"time"
)

// progress shows one changing line on a terminal and nothing elsewhere.
type progress struct {
	c    *console
	stop chan struct{}
	done sync.WaitGroup
	once sync.Once
}

// showProgress writes what line returns ten times a second until close. line is
// called from another goroutine.
func showProgress(c *console, line func() string) *progress {
	p := &progress{c: c, stop: make(chan struct{})}
	if !c.terminal {
		return p
	}
	p.done.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprintf(c.stderr, "\r\x1b[K%s", line())
			case <-p.stop:
				fmt.Fprint(c.stderr, "\r\x1b[K")
				return
			}
		}
	})
	return p
}

// close takes the line away. It may be called again.
func (p *progress) close() {
	p.once.Do(func() { close(p.stop) })
	p.done.Wait()
}
