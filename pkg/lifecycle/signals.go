package lifecycle

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// exitSecondSignal is the exit code after a second signal: 128 + SIGINT.
const exitSecondSignal = 130

// Signals returns a context that the first SIGINT or SIGTERM ends, with a
// cause that names the signal. The second calls exit, which a main sets to
// os.Exit. The returned function gives the signals back and must be called.
func Signals(parent context.Context, exit func(code int)) (context.Context, func()) {
	received := make(chan os.Signal, 2) // both signals, even if they come together
	signal.Notify(received, os.Interrupt, syscall.SIGTERM)
	ctx, release := watch(parent, received, exit)
	return ctx, func() {
		signal.Stop(received)
		release()
	}
}

func watch(parent context.Context, received <-chan os.Signal, exit func(int)) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	quit := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case s := <-received:
			cancel(fmt.Errorf("received %s: %w", s, context.Canceled))
		case <-quit:
			return
		}
		select {
		case <-received:
			exit(exitSecondSignal)
		case <-quit:
		}
	}()
	return ctx, sync.OnceFunc(func() {
		close(quit)
		<-ended
		cancel(nil)
	})
}
