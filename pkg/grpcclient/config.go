package grpcclient

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"time"

	"github.com/braidlog/braid/pkg/config"
)

// serverMinInterval is the shortest ping interval that package grpcserver's
// defaults tolerate. A test holds the two packages together.
const serverMinInterval = 5 * time.Second

// The load balancing policies.
const (
	// PickFirst uses one live address, chosen at random, until it fails.
	PickFirst = "pick_first"
	// RoundRobin spreads calls over all live addresses.
	RoundRobin = "round_robin"
)

// Config is a connection's data. The zero value is not usable: see
// [DefaultConfig] or RegisterFlags.
type Config struct {
	// Balancer is [PickFirst] or [RoundRobin].
	Balancer string
	// KeepaliveTime is the idle time after which the server is pinged, also
	// without calls; KeepaliveTimeout the wait for the answer before the
	// connection is given up.
	KeepaliveTime    config.Duration
	KeepaliveTimeout config.Duration
	// ConnectTimeout bounds one connection attempt; MaxBackoff the delay
	// between attempts.
	ConnectTimeout config.Duration
	MaxBackoff     config.Duration
	// CallTimeout is the deadline of unary calls that have none.
	CallTimeout config.Duration
	// WaitForReady makes calls wait for a connection, up to their deadline,
	// instead of failing while the server can't be reached.
	WaitForReady bool
	// MaxRecvMessage and MaxSendMessage bound one message.
	MaxRecvMessage config.Size
	MaxSendMessage config.Size
	// StreamWindow and ConnWindow are the HTTP/2 receive windows.
	StreamWindow config.Size
	ConnWindow   config.Size
}

// DefaultConfig returns the defaults that RegisterFlags sets.
func DefaultConfig() Config {
	var c Config
	c.RegisterFlags("", flag.NewFlagSet("", flag.ContinueOnError))
	return c
}

// RegisterFlags implements config.Section.
func (c *Config) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	config.EnumVar(fs, &c.Balancer, key("balancer"), PickFirst, []string{PickFirst, RoundRobin}, "choice among several addresses")
	config.DurationVar(fs, &c.KeepaliveTime, key("keepalive.time"), 10*time.Second, "idle time after which the server is pinged; at least 10s")
	config.DurationVar(fs, &c.KeepaliveTimeout, key("keepalive.timeout"), 5*time.Second, "wait for the answer to a ping before the connection is given up")
	config.DurationVar(fs, &c.ConnectTimeout, key("connect-timeout"), 3*time.Second, "bound of one connection attempt")
	config.DurationVar(fs, &c.MaxBackoff, key("max-backoff"), 3*time.Second, "longest delay between connection attempts")
	config.DurationVar(fs, &c.CallTimeout, key("call-timeout"), 30*time.Second, "deadline of unary calls that have none")
	fs.BoolVar(&c.WaitForReady, key("wait-for-ready"), false, "let calls wait for a connection until their deadline")
	config.SizeVar(fs, &c.MaxRecvMessage, key("max-recv-message"), 16*config.MiB, "largest message accepted")
	config.SizeVar(fs, &c.MaxSendMessage, key("max-send-message"), 16*config.MiB, "largest message sent")
	config.SizeVar(fs, &c.StreamWindow, key("stream-window"), 4*config.MiB, "HTTP/2 receive window of one stream")
	config.SizeVar(fs, &c.ConnWindow, key("conn-window"), 16*config.MiB, "HTTP/2 receive window of one connection")
}

// Validate implements config.Section.
func (c *Config) Validate() error {
	size := func(field string, s config.Size, least config.Size) error {
		return config.Check(s >= least && s <= math.MaxInt32, field, s, fmt.Sprintf("from %s to 2GiB-1", least))
	}
	positive := func(field string, d config.Duration) error {
		return config.Check(d > 0, field, d, "more than 0s")
	}
	return errors.Join(
		config.Check(c.Balancer == PickFirst || c.Balancer == RoundRobin, "balancer", c.Balancer, PickFirst+" or "+RoundRobin),
		// gRPC raises a shorter interval to 10 s without a word.
		config.Check(c.KeepaliveTime.Std() >= 10*time.Second, "keepalive.time", c.KeepaliveTime, "at least 10s"),
		positive("keepalive.timeout", c.KeepaliveTimeout),
		positive("connect-timeout", c.ConnectTimeout),
		config.Check(c.MaxBackoff.Std() >= baseBackoff, "max-backoff", c.MaxBackoff, "at least "+baseBackoff.String()),
		positive("call-timeout", c.CallTimeout),
		size("max-recv-message", c.MaxRecvMessage, config.KiB),
		size("max-send-message", c.MaxSendMessage, config.KiB),
		size("stream-window", c.StreamWindow, 64*config.KiB),
		size("conn-window", c.ConnWindow, 64*config.KiB),
	)
}

// Warnings lists settings that are allowed but will hurt: log them at start.
func (c *Config) Warnings() []string {
	var out []string
	if limit := 20 * time.Second; c.KeepaliveTime.Std()+c.KeepaliveTimeout.Std() > limit {
		out = append(out, fmt.Sprintf("keepalive.time + keepalive.timeout is %s: a peer that vanishes without a word is noticed later than %s",
			c.KeepaliveTime+c.KeepaliveTimeout, config.Duration(limit)))
	}
	if c.KeepaliveTime.Std() < serverMinInterval {
		out = append(out, fmt.Sprintf("keepalive.time %s is below the servers' default minimum %s: they will close the connection with too_many_pings",
			c.KeepaliveTime, config.Duration(serverMinInterval)))
	}
	return out
}
