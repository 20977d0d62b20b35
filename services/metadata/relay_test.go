package metadata_test

import (
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// relay forwards TCP connections to one address, until it is cut.
type relay struct {
	to       string
	listener net.Listener
	wg       sync.WaitGroup

	mu    sync.Mutex // guards below
	off   bool
	conns map[net.Conn]bool
}

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{to: to, listener: l, conns: map[net.Conn]bool{}}
	r.wg.Add(1)
	go r.accept()
	t.Cleanup(func() {
		_ = l.Close()
		r.cut()
		r.wg.Wait()
	})
	return r
}

func (r *relay) address() string { return r.listener.Addr().String() }

// keep registers a connection; false while the relay is cut.
func (r *relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.off {
		_ = c.Close()
		return false
	}
	r.conns[c] = true
	return true
}

func (r *relay) accept() {
	defer r.wg.Done()
	for {
		in, err := r.listener.Accept()
		if err != nil {
			return
		}
		if !r.keep(in) {
			continue
		}
		out, err := net.Dial("tcp", r.to)
		if err != nil || !r.keep(out) {
			_ = in.Close()
			continue
		}
		for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
			r.wg.Add(1)
			go func() {
				defer r.wg.Done()
				_, _ = io.Copy(pair[0], pair[1])
				_ = pair[0].Close()
				_ = pair[1].Close()
			}()
		}
	}
}

// cut ends all connections and refuses new ones.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.off = true
	for c := range r.conns {
		_ = c.Close()
	}
	clear(r.conns)
}

func (r *relay) heal() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.off = false
}
