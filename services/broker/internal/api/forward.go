package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// The headers of the contract.
const (
	// ForwardedHeader marks a call that was forwarded already.
	ForwardedHeader = "braid-forwarded"
	// NoForwardHeader asks for NOT_LEADER instead of being forwarded.
	NoForwardHeader = "braid-no-forward"
)

// leaderFor says whether a call that failed with err shall go on to the leader.
func (s *Service) leaderFor(ctx context.Context, err error) (leader *replica.NotLeaderError, ok bool) {
	if err == nil || happened(err) || !errors.As(err, &leader) {
		return nil, false
	}
	if leader.Address == "" || leader.LeaderID == s.self {
		return nil, false
	}
	return leader, !flagged(ctx, ForwardedHeader) && !flagged(ctx, NoForwardHeader)
}

// flagged says whether a header of the call is there and not "0".
func flagged(ctx context.Context, header string) bool {
	values := metadata.ValueFromIncomingContext(ctx, header)
	return len(values) > 0 && values[len(values)-1] != "0" && values[len(values)-1] != ""
}

// effect says what a lost answer may hide.
type effect bool

const (
	reads   effect = false
	changes effect = true
)

// forwardMargin is what the way to the leader and back may take beyond the
// leader's own bound of a call.
const forwardMargin = 5 * time.Second

// forwardUnary does a call at the leader, which answers it within bound once it
// is ready.
func forwardUnary[Resp any](ctx context.Context, s *Service, method string, leader *replica.NotLeaderError, e effect, bound time.Duration,
	call func(context.Context, brokerv1.LogServiceClient, ...grpc.CallOption) (Resp, error),
) (Resp, error) {
	var none Resp
	if err := s.forwards.enter(); err != nil {
		return none, err
	}
	defer s.forwards.leave()
	conn, err := s.peers.ready(ctx, leader, s.replicas)
	if err != nil {
		return none, err
	}
	s.metrics.forwarded.Add(ctx, 1, metric.WithAttributes(attrMethod.String(method)))
	bounded, cancel := context.WithTimeout(forwardedContext(ctx), bound+s.cfg.LeaderMaxWait.Std()+forwardMargin)
	defer cancel()
	resp, err := call(bounded, brokerv1.NewLogServiceClient(conn))
	if err != nil {
		return none, forwardedError(ctx, leader, e, err)
	}
	return resp, nil
}

// forwardedContext carries the header that ends all forwarding, and nothing else
// of the caller's headers.
func forwardedContext(ctx context.Context) context.Context {
	return metadata.NewOutgoingContext(ctx, metadata.Pairs(ForwardedHeader, "1"))
}

// forwardedError is what a caller is told of a forwarded call's error. What the
// leader itself said is passed on as it is.
func forwardedError(ctx context.Context, leader *replica.NotLeaderError, e effect, err error) error {
	answer, ok := rpcerr.From(err)
	if ok && answer.Reason != errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return answer
	}
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.Canceled, codes.DeadlineExceeded:
	default:
		return err // gRPC's own refusal, for instance of a message that is too large
	}
	if e == reads {
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soonRetry,
			"the connection to the leader, broker %d at %s, broke", leader.LeaderID, leader.Address).WithCause(err)
	}
	return rpcerr.New(codes.Unavailable, errorsv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN,
		"the connection to the leader, broker %d at %s, broke: the records may be stored or not", leader.LeaderID, leader.Address).
		With("leader_id", leader.LeaderID).With("leader_address", leader.Address).WithCause(err)
}

// forwardRead forwards a Read stream.
func (s *Service) forwardRead(req *brokerv1.ReadRequest, stream grpc.ServerStreamingServer[brokerv1.ReadResponse], leader *replica.NotLeaderError) error {
	if err := s.forwards.enter(); err != nil {
		return err
	}
	defer s.forwards.leave()
	ctx, cancel := s.drainContext(stream.Context())
	defer cancel()
	conn, err := s.peers.ready(ctx, leader, s.replicas)
	if err != nil {
		return err
	}
	s.metrics.forwarded.Add(ctx, 1, metric.WithAttributes(attrMethod.String("Read")))
	up, err := brokerv1.NewLogServiceClient(conn).Read(forwardedContext(ctx), req)
	if err == nil {
		err = relay(up.Recv, stream.Send)
	}
	return s.relayed(ctx, stream.Context(), leader, reads, err)
}

// forwardProduce forwards a Produce stream whose first request was read already.
func (s *Service) forwardProduce(first *brokerv1.ProduceRequest, stream produceStream, leader *replica.NotLeaderError) error {
	if err := s.forwards.enter(); err != nil {
		return err
	}
	defer s.forwards.leave()
	ctx, cancel := s.drainContext(stream.Context())
	defer cancel()
	conn, err := s.peers.ready(ctx, leader, s.replicas)
	if err != nil {
		return err
	}
	s.metrics.forwarded.Add(ctx, 1, metric.WithAttributes(attrMethod.String("Produce")))
	up, err := brokerv1.NewLogServiceClient(conn).Produce(forwardedContext(ctx))
	if err != nil {
		return s.relayed(ctx, stream.Context(), leader, changes, err)
	}
	// Ends when the client's side ends, which it does at the latest when this
	// handler returns.
	go func() {
		for req := first; ; {
			if up.Send(req) != nil {
				return // the reason comes out of Recv
			}
			next, err := stream.Recv()
			if err != nil {
				if errors.Is(err, io.EOF) {
					err = up.CloseSend()
				}
				if err != nil {
					cancel()
				}
				return
			}
			req = next
		}
	}()
	return s.relayed(ctx, stream.Context(), leader, changes, relay(up.Recv, stream.Send))
}

// relay passes messages on until the leader ends its stream.
func relay[M any](recv func() (*M, error), send func(*M) error) error {
	for {
		m, err := recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := send(m); err != nil {
			return err
		}
	}
}

// relayed is the error that a forwarded stream ends with.
func (s *Service) relayed(ctx, caller context.Context, leader *replica.NotLeaderError, e effect, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(context.Cause(ctx), errDraining) {
		return rpcerr.Draining()
	}
	return forwardedError(caller, leader, e, err)
}

var errDraining = errors.New("draining")

// drainContext ends with parent and, with the cause errDraining, when the server
// drains.
func (s *Service) drainContext(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-s.draining:
			cancel(errDraining)
		case <-stop:
		case <-ctx.Done():
		}
	}()
	var once sync.Once
	return ctx, func() {
		once.Do(func() { close(stop) })
		cancel(context.Canceled)
		<-done
	}
}

// peers are connections to other brokers by address.
type peers struct {
	dial    func(string) (*grpc.ClientConn, error)
	timeout time.Duration

	mu     sync.Mutex // guards all below
	conns  map[string]*grpc.ClientConn
	closed bool
}

func newPeers(dial func(string) (*grpc.ClientConn, error), timeout time.Duration) *peers {
	return &peers{dial: dial, timeout: timeout, conns: map[string]*grpc.ClientConn{}}
}

func (p *peers) close() error {
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

// spareConns is how many connections may be left from brokers that moved before
// they are looked for.
const spareConns = 8

func (p *peers) conn(address string, r Replicas) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, replica.ErrStopped
	}
	if c := p.conns[address]; c != nil {
		return c, nil
	}
	brokers := r.Cluster().Brokers()
	if len(p.conns) >= len(brokers)+spareConns {
		known := make(map[string]bool, len(brokers))
		for _, b := range brokers {
			known[b.Address] = true
		}
		for a, c := range p.conns {
			if !known[a] {
				delete(p.conns, a)
				_ = c.Close() // its calls end with it; nobody is left to tell
			}
		}
	}
	c, err := p.dial(address)
	if err != nil {
		return nil, fmt.Errorf("dial broker at %s: %w", address, err)
	}
	p.conns[address] = c
	return c, nil
}

// ready waits, bounded, for a connection to the leader. Having it before the call
// is what tells "never sent" from "sent, outcome unknown".
func (p *peers) ready(ctx context.Context, leader *replica.NotLeaderError, r Replicas) (*grpc.ClientConn, error) {
	conn, err := p.conn(leader.Address, r)
	if err != nil {
		if errors.Is(err, replica.ErrStopped) {
			return nil, rpcerr.Draining()
		}
		return nil, unreachable(leader, err)
	}
	wait, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	for failures := 0; ; {
		switch state := conn.GetState(); state {
		case connectivity.Ready:
			return conn, nil
		case connectivity.Shutdown:
			return nil, unreachable(leader, errors.New("connection closed"))
		default:
			if state == connectivity.TransientFailure {
				// The first may be an old one; a fresh one is final.
				if failures++; failures > 1 {
					return nil, unreachable(leader, errors.New("connection refused"))
				}
				conn.ResetConnectBackoff()
			}
			conn.Connect()
			if !conn.WaitForStateChange(wait, state) {
				if ctx.Err() != nil {
					return nil, status.FromContextError(ctx.Err()).Err()
				}
				return nil, unreachable(leader, wait.Err())
			}
		}
	}
}

// unreachable says that the call never left this broker.
func unreachable(leader *replica.NotLeaderError, err error) error {
	return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soonRetry,
		"the leader, broker %d at %s, can't be reached; nothing was sent", leader.LeaderID, leader.Address).
		With("leader_id", leader.LeaderID).With("leader_address", leader.Address).WithCause(err)
}
