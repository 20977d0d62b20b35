package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
)

// ErrClosed is returned by calls on something that was closed.
var ErrClosed = errors.New("client: closed")

// noForward keeps a broker from forwarding a call to the leader.
const noForward = "braid-no-forward"

// Options configure a Client. Brokers is needed, everything else has a default.
type Options struct {
	// Brokers are addresses to begin with, host:port each. They are kept for
	// ever; others are learnt from the cluster.
	Brokers []string
	// Logger gets changes of leader and retries; nil discards them.
	Logger *slog.Logger
	// TracerProvider and MeterProvider observe the connections; nil = none.
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
	// Dialer replaces the TCP dialer; nil is the standard one.
	Dialer func(ctx context.Context, address string) (net.Conn, error)
	// AttemptTimeout bounds one attempt of a call that asks something. 0 = 3 s.
	AttemptTimeout time.Duration
	// CallTimeout bounds such a call, all attempts together. 0 = 30 s.
	CallTimeout time.Duration
	// TopicPatience is how long an unknown topic is asked for again: a broker
	// learns of a new topic a moment after its creation. 0 = 2 s, negative = not
	// at all.
	TopicPatience time.Duration
	// Retry gives the delays between attempts. Zero = 25 ms growing to 250 ms,
	// half of it random.
	Retry backoff.Policy
}

func (o Options) withDefaults() Options {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.TracerProvider == nil {
		o.TracerProvider = tracenoop.NewTracerProvider()
	}
	if o.MeterProvider == nil {
		o.MeterProvider = metricnoop.NewMeterProvider()
	}
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = 3 * time.Second
	}
	if o.CallTimeout == 0 {
		o.CallTimeout = 30 * time.Second
	}
	if o.TopicPatience == 0 {
		o.TopicPatience = 2 * time.Second
	}
	if o.Retry == (backoff.Policy{}) {
		o.Retry = backoff.Policy{Initial: 25 * time.Millisecond, Max: 250 * time.Millisecond, Multiplier: 2, Jitter: 0.5}
	}
	return o
}

// Client reaches the brokers of one cluster. See the package comment.
type Client struct {
	opts Options
	log  *slog.Logger

	mu     sync.Mutex // guards all below
	closed bool
	conns  map[string]*grpc.ClientConn
	// addresses are the brokers to ask, the ones given first; at is the index
	// of the one that answered last.
	addresses []string
	at        int
	topics    map[string]*topicState
}

// Dial makes a client. It connects on first use, so it also works while no
// broker is up. The caller closes it.
func Dial(opts Options) (*Client, error) {
	if len(opts.Brokers) == 0 {
		return nil, errors.New("client: no broker address was given")
	}
	for _, address := range opts.Brokers {
		if err := config.CheckAddress("brokers", address); err != nil {
			return nil, fmt.Errorf("client: %w", err)
		}
	}
	opts = opts.withDefaults()
	return &Client{
		opts: opts, log: opts.Logger,
		conns:     map[string]*grpc.ClientConn{},
		addresses: slices.Clone(opts.Brokers),
		topics:    map[string]*topicState{},
	}, nil
}

// Close ends all connections. Producers and readers must be closed before.
func (c *Client) Close() error {
	c.mu.Lock()
	conns := c.conns
	c.conns, c.closed = nil, true
	c.mu.Unlock()
	var errs []error
	for _, conn := range conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}

// service is the LogService at an address. Connections are kept.
func (c *Client) service(address string) (brokerv1.LogServiceClient, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	conn, ok := c.conns[address]
	if !ok {
		var err error
		if conn, err = dial(address, c.opts); err != nil {
			return nil, err
		}
		c.conns[address] = conn
	}
	return brokerv1.NewLogServiceClient(conn), nil
}

func dial(address string, opts Options) (*grpc.ClientConn, error) {
	cfg := grpcclient.DefaultConfig()
	cfg.MaxBackoff = config.Duration(time.Second) // a broker started again is found soon
	return grpcclient.Dial(address, cfg, grpcclient.Deps{
		Logger: opts.Logger, TracerProvider: opts.TracerProvider, MeterProvider: opts.MeterProvider, Dialer: opts.Dialer,
	})
}

// direct marks the call so that only the leader answers it.
func direct(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, noForward, "1")
}

// ask calls fn with one broker after the other until one answers. fn must be
// harmless to repeat. An error that another broker can't mend is returned.
func (c *Client) ask(ctx context.Context, fn func(context.Context, brokerv1.LogServiceClient) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.opts.CallTimeout, fmt.Errorf("no broker answered within %s", c.opts.CallTimeout))
	defer cancel()
	for attempt := 1; ; attempt++ {
		address, count := c.candidate()
		err := c.askOne(ctx, address, fn)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil && !askAgain(err) {
			return err
		}
		if errors.Is(err, ErrClosed) {
			return err
		}
		c.skip(address)
		if ctx.Err() == nil && attempt%count != 0 {
			continue // another broker may know
		}
		if werr := backoff.Sleep(ctx, c.opts.Retry.Delay(attempt/count, rand.Float64())); werr != nil {
			return fmt.Errorf("%w; last: %w", werr, err)
		}
	}
}

func (c *Client) askOne(ctx context.Context, address string, fn func(context.Context, brokerv1.LogServiceClient) error) error {
	service, err := c.service(address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.opts.AttemptTimeout)
	defer cancel()
	if err := fn(ctx, service); err != nil {
		return fmt.Errorf("broker %s: %w", address, err)
	}
	return nil
}

func (c *Client) candidate() (address string, count int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.addresses[c.at%len(c.addresses)], len(c.addresses)
}

// skip goes on to the next broker if address is still the one in use.
func (c *Client) skip(address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.addresses[c.at%len(c.addresses)] == address {
		c.at++
	}
}

// learn replaces the addresses that were not given by the caller.
func (c *Client) learn(addresses []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	current := c.addresses[c.at%len(c.addresses)]
	all := slices.Clone(c.opts.Brokers)
	for _, a := range addresses {
		if a != "" && !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	c.addresses = all
	c.at = max(0, slices.Index(all, current))
}

// Cluster is what a broker knows of its cluster.
type Cluster struct {
	// ID is the cluster's id, a UUID.
	ID string
	// Brokers are in order of id.
	Brokers []Broker
	// Controller is the address of the metadata service's controller, empty
	// when not known.
	Controller string
}

// Broker is a member of the cluster.
type Broker struct {
	ID      int32
	Address string
	Zone    string
	Online  bool
}

// DescribeCluster asks any broker for the cluster's members, and remembers them
// as brokers to ask.
func (c *Client) DescribeCluster(ctx context.Context) (*Cluster, error) {
	var resp *brokerv1.DescribeClusterResponse
	err := c.ask(ctx, func(ctx context.Context, s brokerv1.LogServiceClient) (err error) {
		resp, err = s.DescribeCluster(ctx, &brokerv1.DescribeClusterRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("describe the cluster: %w", err)
	}
	out := &Cluster{ID: resp.GetClusterId(), Controller: resp.GetControllerAddress()}
	var online []string
	for _, b := range resp.GetBrokers() {
		out.Brokers = append(out.Brokers, Broker{ID: b.GetBrokerId(), Address: b.GetAddress(), Zone: b.GetZone(), Online: b.GetOnline()})
		if b.GetOnline() {
			online = append(online, b.GetAddress())
		}
	}
	c.learn(online)
	return out, nil
}

// retryDelay is the wait before the attempt-th repetition after err, from 1.
func (c *Client) retryDelay(attempt int, err error) time.Duration {
	d := c.opts.Retry.Delay(attempt, rand.Float64())
	if e, ok := rpcerr.From(err); ok {
		d = max(d, min(e.RetryDelay, 2*time.Second))
	}
	return d
}
