package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are taken from below the range that systems use for outgoing
// connections, so that the address of a role that is being started again is not
// taken by one of them meanwhile.
const (
	portFrom = 18000
	portTo   = 32000
)

// ports gives out loopback addresses.
type ports struct {
	given map[string]bool
}

// take returns the preferred address when it is free, else another. Nothing is
// held: whoever is to listen there does so next.
func (p *ports) take(preferred string) (string, error) {
	if p.given == nil {
		p.given = map[string]bool{}
	}
	candidates := make([]string, 0, 101)
	if preferred != "" {
		candidates = append(candidates, preferred)
	}
	for range 100 {
		candidates = append(candidates, net.JoinHostPort("127.0.0.1", strconv.Itoa(portFrom+rand.IntN(portTo-portFrom))))
	}
	var last error
	for _, address := range candidates {
		if p.given[address] {
			continue
		}
		l, err := net.Listen("tcp", address)
		if err != nil {
			last = err
			continue
		}
		if err := l.Close(); err != nil {
			return "", err
		}
		p.given[address] = true
		return address, nil
	}
	return "", fmt.Errorf("no free port on 127.0.0.1: %w", last)
}
