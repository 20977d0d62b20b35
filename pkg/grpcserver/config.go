package grpcserver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"net"
	"time"

	"github.com/braidlog/braid/pkg/config"
)

// slowestDefaultClient is the keep-alive interval of package grpcclient's
// defaults: a server that demands more time between pings would cut its own
// peers off. A test holds the two packages together.
const slowestDefaultClient = 10 * time.Second

// Config is the server's data. The zero value is not usable: see
// [DefaultConfig] or RegisterFlags.
type Config struct {
	// ListenAddress is host:port; port 0 takes a free one.
	ListenAddress string
	// MaxRecvMessage and MaxSendMessage bound one message.
	MaxRecvMessage config.Size
	MaxSendMessage config.Size
	// MaxConcurrentStreams bounds streams and calls of one connection; past it
	// the client waits inside its HTTP/2 layer, so it is higher than the
	// limits below, which answer.
	MaxConcurrentStreams uint
	// MaxCalls and MaxStreams bound running unary calls and streams of the
	// whole server; past them callers get RESOURCE_EXHAUSTED.
	MaxCalls   int
	MaxStreams int
	// StreamWindow and ConnWindow are the HTTP/2 receive windows: what a
	// sender may have under way, and so the memory one slow handler costs.
	StreamWindow config.Size
	ConnWindow   config.Size
	// KeepaliveMinInterval is the shortest ping interval tolerated of clients.
	KeepaliveMinInterval config.Duration
	// KeepaliveTime is the idle time after which the server pings a client,
	// KeepaliveTimeout the wait for its answer before the connection is closed.
	KeepaliveTime    config.Duration
	KeepaliveTimeout config.Duration
	// DrainDelay, StreamGrace and StopTimeout bound the steps of a stop.
	DrainDelay  config.Duration
	StreamGrace config.Duration
	StopTimeout config.Duration
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
	fs.StringVar(&c.ListenAddress, key("listen-address"), "127.0.0.1:0", "`address` (host:port) to serve gRPC on; port 0 takes a free one")
	config.SizeVar(fs, &c.MaxRecvMessage, key("max-recv-message"), 16*config.MiB, "largest message accepted")
	config.SizeVar(fs, &c.MaxSendMessage, key("max-send-message"), 16*config.MiB, "largest message sent")
	fs.UintVar(&c.MaxConcurrentStreams, key("max-concurrent-streams"), 65536, "streams and calls under way on one connection, past which its client waits")
	fs.IntVar(&c.MaxCalls, key("max-calls"), 16384, "unary calls running at once, past which callers get RESOURCE_EXHAUSTED")
	fs.IntVar(&c.MaxStreams, key("max-streams"), 16384, "streams open at once, past which callers get RESOURCE_EXHAUSTED")
	config.SizeVar(fs, &c.StreamWindow, key("stream-window"), 4*config.MiB, "HTTP/2 receive window of one stream")
	config.SizeVar(fs, &c.ConnWindow, key("conn-window"), 16*config.MiB, "HTTP/2 receive window of one connection")
	config.DurationVar(fs, &c.KeepaliveMinInterval, key("keepalive.min-interval"), 5*time.Second, "shortest ping interval tolerated of clients")
	config.DurationVar(fs, &c.KeepaliveTime, key("keepalive.time"), 10*time.Second, "idle time after which a client is pinged")
	config.DurationVar(fs, &c.KeepaliveTimeout, key("keepalive.timeout"), 5*time.Second, "wait for the answer to a ping before the connection is closed")
	config.DurationVar(fs, &c.DrainDelay, key("drain-delay"), 5*time.Second, "time between NOT_SERVING and the end of streams, for load balancers to notice")
	config.DurationVar(fs, &c.StreamGrace, key("stream-grace"), 2*time.Second, "time for stream handlers to end by themselves during a drain")
	config.DurationVar(fs, &c.StopTimeout, key("stop-timeout"), 15*time.Second, "time for running calls to finish before connections are cut")
}

// Validate implements config.Section.
func (c *Config) Validate() error {
	size := func(field string, s config.Size, least config.Size) error {
		return config.Check(s >= least && s <= math.MaxInt32, field, s, fmt.Sprintf("from %s to 2GiB-1", least))
	}
	positive := func(field string, d config.Duration) error {
		return config.Check(d > 0, field, d, "more than 0s")
	}
	notNegative := func(field string, d config.Duration) error {
		return config.Check(d >= 0, field, d, "0s or more")
	}
	return errors.Join(
		config.CheckAddress("listen-address", c.ListenAddress),
		size("max-recv-message", c.MaxRecvMessage, config.KiB),
		size("max-send-message", c.MaxSendMessage, config.KiB),
		config.Check(c.MaxConcurrentStreams >= 1 && c.MaxConcurrentStreams <= math.MaxInt32, "max-concurrent-streams", c.MaxConcurrentStreams, "from 1 to 2147483647"),
		config.Check(c.MaxCalls >= 1, "max-calls", c.MaxCalls, "at least 1"),
		config.Check(c.MaxStreams >= 1, "max-streams", c.MaxStreams, "at least 1"),
		size("stream-window", c.StreamWindow, 64*config.KiB),
		size("conn-window", c.ConnWindow, 64*config.KiB),
		positive("keepalive.min-interval", c.KeepaliveMinInterval),
		config.Check(c.KeepaliveTime.Std() >= time.Second, "keepalive.time", c.KeepaliveTime, "at least 1s"),
		positive("keepalive.timeout", c.KeepaliveTimeout),
		notNegative("drain-delay", c.DrainDelay),
		notNegative("stream-grace", c.StreamGrace),
		positive("stop-timeout", c.StopTimeout),
	)
}

// Warnings lists settings that are allowed but will hurt: log them at start.
func (c *Config) Warnings() []string {
	var out []string
	if c.KeepaliveMinInterval.Std() > slowestDefaultClient {
		out = append(out, fmt.Sprintf("keepalive.min-interval %s is above the clients' default interval %s: their connections will be closed with too_many_pings",
			c.KeepaliveMinInterval, config.Duration(slowestDefaultClient)))
	}
	if uint64(c.MaxConcurrentStreams) < uint64(c.MaxCalls) || uint64(c.MaxConcurrentStreams) < uint64(c.MaxStreams) {
		out = append(out, "max-concurrent-streams is below max-calls or max-streams: past it a client waits silently instead of getting RESOURCE_EXHAUSTED")
	}
	return out
}

// StopBound is the longest time [Server.Drain] takes.
func (c *Config) StopBound() time.Duration {
	return c.DrainDelay.Std() + c.StreamGrace.Std() + c.StopTimeout.Std() + handlerWait
}

// Listen opens the listener.
func (c *Config) Listen(ctx context.Context) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", c.ListenAddress)
	if err != nil {
		return nil, fmt.Errorf("listen for gRPC: %w", err)
	}
	return l, nil
}
