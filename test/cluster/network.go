package cluster

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// errCut is what a member that was cut off gets for everything it does.
var errCut = errors.New("cluster: the member is cut off")

// nic is what one life of a member reaches the world through.
type nic struct {
	mu     sync.Mutex // guards all below
	cut    bool
	closed bool // for good
	conns  map[*conn]bool
	relays []net.Listener
	wg     sync.WaitGroup
}

func newNIC() *nic { return &nic{conns: map[*conn]bool{}} }

// conn is a connection that its nic can reset.
type conn struct {
	net.Conn
	nic  *nic
	once sync.Once
	err  error
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.nic.mu.Lock()
		delete(c.nic.conns, c)
		c.nic.mu.Unlock()
		c.err = c.Conn.Close()
	})
	return c.err
}

// reset drops what is under way and tells the other side so.
func (c *conn) reset() {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// adopt tracks a connection; it is reset at once when the nic is cut.
func (n *nic) adopt(raw net.Conn) (*conn, error) {
	c := &conn{Conn: raw, nic: n}
	n.mu.Lock()
	cut := n.cut
	if !cut {
		n.conns[c] = true
	}
	n.mu.Unlock()
	if cut {
		c.reset()
		return nil, errCut
	}
	return c, nil
}

// dial connects to an address on behalf of the member.
func (n *nic) dial(ctx context.Context, address string) (net.Conn, error) {
	n.mu.Lock()
	cut := n.cut
	n.mu.Unlock()
	if cut {
		return nil, errCut
	}
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	c, err := n.adopt(raw)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// setCut cuts everything off, or lets new connections through again.
func (n *nic) setCut(cut bool) {
	n.mu.Lock()
	n.cut = cut || n.closed
	var reset []*conn
	if n.cut {
		for c := range n.conns {
			reset = append(reset, c)
		}
	}
	n.mu.Unlock()
	for _, c := range reset {
		c.reset()
	}
}

// close cuts for good and ends the relays.
func (n *nic) close() {
	n.mu.Lock()
	n.closed = true
	relays := n.relays
	n.relays = nil
	n.mu.Unlock()
	n.setCut(true)
	for _, l := range relays {
		_ = l.Close()
	}
	n.wg.Wait()
}

// relay listens for this member alone and passes its connections on to wherever
// target says at that time; an empty target is nowhere.
func (n *nic) relay(target func() string) (address string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	n.mu.Lock()
	n.relays = append(n.relays, l)
	n.mu.Unlock()
	n.wg.Go(func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			n.wg.Go(func() { n.pass(raw, target()) })
		}
	})
	return l.Addr().String(), nil
}

// pass copies in both directions until one side ends.
func (n *nic) pass(raw net.Conn, target string) {
	near, err := n.adopt(raw)
	if err != nil {
		return
	}
	if target == "" {
		near.reset()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	far, err := n.dial(ctx, target)
	cancel()
	if err != nil {
		near.reset()
		return
	}
	var wg sync.WaitGroup
	half := func(dst, src net.Conn) {
		_, err := io.Copy(dst, src)
		// A reset is passed on as what it is: the near side is not to take it for
		// the end of an answer.
		if c, ok := dst.(*conn); ok && err != nil {
			c.reset()
		} else {
			_ = dst.Close()
		}
		_ = src.Close()
	}
	wg.Go(func() { half(far, near) })
	half(near, far)
	wg.Wait()
}

// front is the address of a member over all of its lives.
type front struct {
	listener net.Listener
	done     chan struct{}
	handing  sync.WaitGroup // of connections that wait to be accepted

	mu  sync.Mutex
	now *port // guarded by mu; nil while the member is down
}

func newFront() (*front, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	f := &front{listener: l, done: make(chan struct{})}
	go f.accept()
	return f, nil
}

func (f *front) address() string { return f.listener.Addr().String() }

func (f *front) accept() {
	defer close(f.done)
	for {
		raw, err := f.listener.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		p := f.now
		f.mu.Unlock()
		if p != nil {
			f.handing.Go(func() { p.deliver(raw) })
			continue
		}
		if t, ok := raw.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = raw.Close()
	}
}

// open is the listener of a new life.
func (f *front) open(n *nic) net.Listener {
	p := &port{front: f, nic: n, queue: make(chan net.Conn), closed: make(chan struct{})}
	f.mu.Lock()
	f.now = p
	f.mu.Unlock()
	return p
}

func (f *front) leave(p *port) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.now == p {
		f.now = nil
	}
}

// down refuses connections from now on.
func (f *front) down() {
	f.mu.Lock()
	p := f.now
	f.now = nil
	f.mu.Unlock()
	if p != nil {
		_ = p.Close()
	}
}

func (f *front) close() {
	_ = f.listener.Close()
	<-f.done
	f.down()
	f.handing.Wait()
}

// port is a net.Listener that one life of a member serves.
type port struct {
	front  *front
	nic    *nic
	queue  chan net.Conn // 0: a connection is handed to a waiting Accept
	once   sync.Once
	closed chan struct{}
}

// deliver waits until the life accepts the connection, as a backlog does.
func (p *port) deliver(raw net.Conn) {
	c, err := p.nic.adopt(raw)
	if err != nil {
		return
	}
	select {
	case p.queue <- c:
	case <-p.closed:
		c.reset()
	}
}

// Accept implements net.Listener.
func (p *port) Accept() (net.Conn, error) {
	select {
	case c := <-p.queue:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (p *port) Close() error {
	p.once.Do(func() {
		close(p.closed)
		p.front.leave(p)
	})
	return nil
}

// Addr implements net.Listener.
func (p *port) Addr() net.Addr { return p.front.listener.Addr() }
