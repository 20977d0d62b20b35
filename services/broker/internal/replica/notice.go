package replica

import "sync"

// notice tells any number of goroutines that something changed. The zero notice
// is ready; it is safe for concurrent use and costs nothing while nobody waits.
type notice struct {
	mu sync.Mutex    // guards ch; a leaf
	ch chan struct{} // nil while nobody has asked
}

// next is closed by the next tell.
func (n *notice) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *notice) tell() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}
