package metaclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	_ "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1" // its methods' options say what may be repeated
)

// Options configure a [Client]. Addresses and Dial are needed, everything else
// has a default.
type Options struct {
	// Addresses are the metadata replicas to begin with, host:port each. They
	// are kept for ever; replicas learnt from hints come and go.
	Addresses []string
	// Dial makes a connection to an address without waiting for it. The client
	// closes what it returns.
	Dial func(address string) (*grpc.ClientConn, error)
	// Logger gets a line for each change of controller. nil = slog.Default().
	Logger *slog.Logger
	// ConnectTimeout bounds the wait for one replica's connection. 0 = 1 s.
	ConnectTimeout time.Duration
	// AttemptTimeout bounds one attempt of a unary call. 0 = 5 s.
	AttemptTimeout time.Duration
	// CallTimeout bounds a unary call, all attempts together, whose context has
	// no deadline. 0 = 30 s.
	CallTimeout time.Duration
	// Retry gives the delay after each round over the replicas. Zero = 25 ms
	// growing to 1 s, half of it random.
	Retry backoff.Policy
}

// maxLearnt bounds the connections to replicas that are not in Addresses.
const maxLearnt = 8

// Client reaches the metadata service. See the package comment.
type Client struct {
	opts Options

	mu         sync.Mutex // guards all below
	closed     bool
	conns      map[string]*grpc.ClientConn
	learnt     []string // addresses in conns that are not seeds, oldest first
	controller string   // where the controller was last seen or hinted, "" unknown
	replica    int      // index into Addresses of the replica that Any uses
	silent     string   // a replica that took a call and did not answer
	silentTill time.Time
}

// New makes a client. It connects on first use, so it also works while no
// replica is up. The caller closes it.
func New(opts Options) (*Client, error) {
	if len(opts.Addresses) == 0 {
		return nil, errors.New("metadata client: no addresses given")
	}
	for _, a := range opts.Addresses {
		if _, _, err := net.SplitHostPort(a); err != nil {
			return nil, fmt.Errorf("metadata client: address %q: %w", a, err)
		}
	}
	if opts.Dial == nil {
		return nil, errors.New("metadata client: no dialer given")
	}
	opts.Addresses = slices.Clone(opts.Addresses)
	opts.Logger = cmp.Or(opts.Logger, slog.Default()).With("component", "metaclient")
	opts.ConnectTimeout = cmp.Or(opts.ConnectTimeout, time.Second)
	opts.AttemptTimeout = cmp.Or(opts.AttemptTimeout, 5*time.Second)
	opts.CallTimeout = cmp.Or(opts.CallTimeout, 30*time.Second)
	if opts.Retry == (backoff.Policy{}) {
		opts.Retry = backoff.Policy{Initial: 25 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: 0.5}
	}
	return &Client{opts: opts, conns: make(map[string]*grpc.ClientConn)}, nil
}

// Close ends all calls and connections. Closing twice is harmless.
func (c *Client) Close() error {
	c.mu.Lock()
	conns := c.conns
	c.conns, c.closed = nil, true
	c.mu.Unlock()
	var err error
	for _, conn := range conns {
		err = errors.Join(err, conn.Close())
	}
	return err
}

// Controller is a connection whose calls and streams go to the controller.
func (c *Client) Controller() grpc.ClientConnInterface { return &router{c: c, controller: true} }

// Any is a connection whose calls and streams go to any replica: for what
// every replica answers. It stays with one replica while that one works.
func (c *Client) Any() grpc.ClientConnInterface { return &router{c: c} }

// Observe tells the client about the error of a stream that was read elsewhere.
func (c *Client) Observe(err error) {
	if address := hint(err); address != "" {
		c.setController(address)
	}
}

// ControllerAddress is where the client believes the controller to be, "" when
// it does not know.
func (c *Client) ControllerAddress() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.controller
}

func (c *Client) setController(address string) {
	c.mu.Lock()
	changed := c.controller != address && !c.isSilent(address)
	if changed {
		c.controller = address
	}
	c.mu.Unlock()
	if changed && address != "" {
		c.opts.Logger.Debug("controller learnt", "address", address)
	}
}

// answered notes that the controller is at address: it said so itself.
func (c *Client) answered(address string) {
	c.mu.Lock()
	if c.silent == address {
		c.silent = ""
	}
	c.mu.Unlock()
	c.setController(address)
}

// passOver reports whether a hint leads to a replica that is silent while
// there are others to ask.
func (c *Client) passOver(address string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isSilent(address) && len(c.opts.Addresses) > 1
}

// forget drops a controller address that did not prove right, unless another
// one was learnt meanwhile.
func (c *Client) forget(address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.controller == address {
		c.controller = ""
	}
}

// conn returns the connection to an address, made on first use.
func (c *Client) conn(address string) (*grpc.ClientConn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	if conn := c.conns[address]; conn != nil {
		return conn, nil
	}
	conn, err := c.opts.Dial(address)
	if err != nil {
		return nil, fmt.Errorf("%w: dial %s: %w", errNotConnected, address, err)
	}
	c.conns[address] = conn
	if !slices.Contains(c.opts.Addresses, address) {
		c.learnt = append(c.learnt, address)
		if len(c.learnt) > maxLearnt {
			// The oldest hint is of a controller long gone; closing its connection
			// ends whatever still waits there.
			old := c.learnt[0]
			c.learnt = c.learnt[1:]
			if err := c.conns[old].Close(); err != nil {
				c.opts.Logger.Debug("closing a metadata connection", "address", old, "err", err)
			}
			delete(c.conns, old)
		}
	}
	return conn, nil
}

// ready waits, bounded, until the connection can carry a call. Having it
// beforehand is what tells "never sent" from "sent, answer unknown".
func (c *Client) ready(ctx context.Context, address string) (*grpc.ClientConn, error) {
	conn, err := c.conn(address)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.opts.ConnectTimeout)
	defer cancel()
	for failures := 0; ; {
		switch state := conn.GetState(); state {
		case connectivity.Ready:
			return conn, nil
		case connectivity.Shutdown:
			return nil, fmt.Errorf("%w: %s: connection closed", errNotConnected, address)
		default:
			if state == connectivity.TransientFailure {
				// One refusal may be an old one: only a fresh one counts, but a
				// replica that is down shall not cost the whole timeout.
				if failures++; failures > 1 {
					return nil, fmt.Errorf("%w: %s: connection refused", errNotConnected, address)
				}
				conn.ResetConnectBackoff()
			}
			conn.Connect()
			if !conn.WaitForStateChange(ctx, state) {
				return nil, fmt.Errorf("%w: %s: %w", errNotConnected, address, ctx.Err())
			}
		}
	}
}

// route lists where to try a call, best first.
func (c *Client) route(controller bool) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]string, 0, len(c.opts.Addresses)+1)
	if controller && c.controller != "" && !c.isSilent(c.controller) {
		list = append(list, c.controller)
	}
	for i := range c.opts.Addresses {
		a := c.opts.Addresses[(c.replica+i)%len(c.opts.Addresses)]
		if !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	slices.SortStableFunc(list, func(a, b string) int { // silent ones last
		return cmp.Compare(bit(c.isSilent(a)), bit(c.isSilent(b)))
	})
	return list
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// isSilent reports whether a replica was found not to answer a moment ago. c.mu
// is held.
func (c *Client) isSilent(address string) bool {
	return c.silent == address && time.Now().Before(c.silentTill)
}

// noteSilent passes over the controller for a while: it took a call and did not
// answer, so neither what this client believes nor the hints of other replicas,
// which may not have noticed yet, lead back to it before that.
func (c *Client) noteSilent(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	address := c.controller
	if address == "" {
		address = c.opts.Addresses[c.replica]
	}
	c.silent, c.silentTill, c.controller = address, time.Now().Add(d), ""
	if len(c.opts.Addresses) > 1 && c.opts.Addresses[c.replica] == address {
		c.replica = (c.replica + 1) % len(c.opts.Addresses)
	}
}

// prefer makes an address the one that Any uses first.
func (c *Client) prefer(address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.opts.Addresses, address); i >= 0 {
		c.replica = i
	}
}

// router is a grpc.ClientConnInterface over all replicas.
type router struct {
	c          *Client
	controller bool
}

// each tries fn on one replica after the other, following hints, until one
// succeeds or its answer is to be handed on.
func (r *router) each(ctx context.Context, repeatable bool, fn func(context.Context, *grpc.ClientConn) error) error {
	var last error
	for round := 1; ; round++ {
		targets := r.c.route(r.controller)
		hinted := make(map[string]bool)
		for i := 0; i < len(targets); i++ {
			address := targets[i]
			conn, err := r.c.ready(ctx, address)
			if err == nil {
				err = fn(ctx, conn)
			}
			if err == nil {
				if r.controller {
					r.c.answered(address)
				} else {
					r.c.prefer(address)
				}
				return nil
			}
			if errors.Is(err, ErrClosed) {
				return err
			}
			verdict := judge(ctx, err)
			if ctx.Err() != nil {
				return ended(ctx, last, err)
			}
			if verdict == final || verdict == unknown && !repeatable {
				return err
			}
			last = err
			r.c.forget(address)
			// A hint is followed at once, once per round: two replicas that
			// point at each other must not spin.
			if next := hint(err); r.controller && next != "" && next != address && !hinted[next] && !r.c.passOver(next) {
				hinted[next] = true
				r.c.setController(next)
				rest := slices.DeleteFunc(slices.Clone(targets[i+1:]), func(a string) bool { return a == next })
				targets = append(append(targets[:i+1:i+1], next), rest...)
			}
		}
		if err := backoff.Sleep(ctx, r.c.opts.Retry.Delay(round, rand.Float64())); err != nil {
			return ended(ctx, last, nil)
		}
	}
}

// ended is the error of a call whose context ended while replicas were tried.
func ended(ctx context.Context, last, now error) error {
	code := codes.DeadlineExceeded
	if errors.Is(ctx.Err(), context.Canceled) {
		code = codes.Canceled
	}
	cause := last
	if cause == nil {
		cause = now
	}
	if cause == nil {
		return &callError{code: code, err: context.Cause(ctx)}
	}
	return &callError{code: code, err: fmt.Errorf("%w: %w: last answer: %w", context.Cause(ctx), ErrNoController, cause)}
}

// callError is the end of a call's time, with a gRPC code and what the
// replicas last said.
type callError struct {
	code codes.Code
	err  error
}

func (e *callError) Error() string              { return e.err.Error() }
func (e *callError) Unwrap() error              { return e.err }
func (e *callError) GRPCStatus() *status.Status { return status.New(e.code, e.err.Error()) }

// Invoke implements grpc.ClientConnInterface.
func (r *router) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.c.opts.CallTimeout)
		defer cancel()
	}
	return r.each(ctx, repeatable(method), func(ctx context.Context, conn *grpc.ClientConn) error {
		ctx, cancel := context.WithTimeout(ctx, r.c.opts.AttemptTimeout)
		defer cancel()
		return conn.Invoke(ctx, method, args, reply, opts...)
	})
}

// NewStream implements grpc.ClientConnInterface. It goes round the replicas
// once, to the first with a connection; the stream's own errors are the
// caller's.
func (r *router) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	var last error
	for _, address := range r.c.route(r.controller) {
		conn, err := r.c.ready(ctx, address)
		if err == nil {
			var s grpc.ClientStream
			if s, err = conn.NewStream(ctx, desc, method, opts...); err == nil {
				if !r.controller {
					r.c.prefer(address)
				}
				return &stream{ClientStream: s, r: r, address: address}, nil
			}
		}
		if ctx.Err() != nil || errors.Is(err, ErrClosed) {
			return nil, err
		}
		r.c.forget(address)
		last = err
	}
	return nil, &callError{code: codes.Unavailable, err: fmt.Errorf("%w: %w", ErrNoController, last)}
}

// stream lets the client learn from the way a stream goes.
type stream struct {
	grpc.ClientStream
	r       *router
	address string
	alive   bool
}

func (s *stream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	switch {
	case err == nil:
		if !s.alive && s.r.controller {
			s.alive = true
			s.r.c.answered(s.address)
		}
	case errors.Is(err, io.EOF):
	case rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_NOT_CONTROLLER):
		if next := hint(err); next != "" && next != s.address && !s.r.c.passOver(next) {
			s.r.c.setController(next)
		} else {
			s.r.c.forget(s.address)
			s.r.c.skip(s.address)
		}
	case status.Code(err) == codes.Unavailable:
		s.r.c.forget(s.address)
		s.r.c.skip(s.address)
	}
	return err
}

// skip moves the replica to begin with past one that failed a stream, so that
// opening the next one tries another first.
func (c *Client) skip(address string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.opts.Addresses, address); i == c.replica {
		c.replica = (i + 1) % len(c.opts.Addresses)
	}
}

// repeatable reports whether the contract marks the method as safe to repeat.
func repeatable(method string) bool {
	if len(method) == 0 || method[0] != '/' {
		return false
	}
	i := 1
	for i < len(method) && method[i] != '/' {
		i++
	}
	if i == len(method) {
		return false
	}
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(method[1:i] + "." + method[i+1:]))
	if err != nil {
		return false
	}
	o, ok := d.Options().(*descriptorpb.MethodOptions)
	return ok && o.GetIdempotencyLevel() != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
}
