package rlmpool

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/services/broker/internal/cluster"
)

// ErrClosed is returned by a closed pool.
var ErrClosed = errors.New("rlmpool: closed")

// Pool is a set of connections.
type Pool struct {
	dial func(address string) (*grpc.ClientConn, error)

	mu     sync.Mutex // guards all below
	conns  map[string]*grpc.ClientConn
	closed bool
}

// New makes an empty pool; dial makes a connection without waiting for it.
func New(dial func(address string) (*grpc.ClientConn, error)) *Pool {
	return &Pool{dial: dial, conns: map[string]*grpc.ClientConn{}}
}

// Conn returns the connection to an address, made on first use.
func (p *Pool) Conn(address string) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	if c := p.conns[address]; c != nil {
		return c, nil
	}
	c, err := p.dial(address)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	p.conns[address] = c
	return c, nil
}

// Keep closes the connections to addresses that no longer belong to anybody.
func (p *Pool) Keep(known []cluster.RemoteLogManager) error {
	return p.KeepIf(func(address string) bool {
		return slices.ContainsFunc(known, func(r cluster.RemoteLogManager) bool { return r.Address == address })
	})
}

// KeepIf closes the connections to addresses that are not known any more.
func (p *Pool) KeepIf(known func(address string) bool) error {
	p.mu.Lock()
	var gone []*grpc.ClientConn
	for address, c := range p.conns {
		if !known(address) {
			gone = append(gone, c)
			delete(p.conns, address)
		}
	}
	p.mu.Unlock()
	var err error
	for _, c := range gone {
		err = errors.Join(err, c.Close())
	}
	return err
}

// Close closes every connection. Closing twice is harmless.
func (p *Pool) Close() error {
	p.mu.Lock()
	conns := p.conns
	p.conns, p.closed = nil, true
	p.mu.Unlock()
	var err error
	for _, c := range conns {
		err = errors.Join(err, c.Close())
	}
	return err
}

// Rank orders the open ones: those of the zone first, each group by rendezvous
// hash of the key, so that callers with the same key agree without talking.
func Rank(all []cluster.RemoteLogManager, zone string, key string) []cluster.RemoteLogManager {
	type ranked struct {
		r     cluster.RemoteLogManager
		local bool
		score uint64
	}
	list := make([]ranked, 0, len(all))
	for _, r := range all {
		if !r.Open || r.Address == "" {
			continue
		}
		h := fnv.New64a()
		_, _ = fmt.Fprintf(h, "%s/%d", key, r.ID)
		list = append(list, ranked{r: r, local: r.Zone == zone, score: mix(h.Sum64())})
	}
	slices.SortFunc(list, func(a, b ranked) int {
		if a.local != b.local {
			if a.local {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.r.ID, b.r.ID))
	})
	out := make([]cluster.RemoteLogManager, len(list))
	for i := range list {
		out[i] = list[i].r
	}
	return out
}

// mix spreads the bits of a hash whose inputs differ in their last byte only.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
