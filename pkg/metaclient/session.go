package metaclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// ErrEpochClosed says that the member's epoch has ended for good.
var ErrEpochClosed = errors.New("metadata session: epoch closed")

// Registration is what a member got by registering.
type Registration struct {
	// Epoch is the member's new epoch.
	Epoch int64
	// ClusterID and Incarnation name the metadata log.
	ClusterID   string
	Incarnation uint32
	// SessionTimeout is how long the session lives without a heartbeat.
	SessionTimeout time.Duration
	// ControllerEpoch is the epoch of the controller that answered.
	ControllerEpoch int64
	// MetadataEnd is the end (exclusive) of the metadata log, 0 if not told.
	MetadataEnd int64
}

// Confirmation is an answered heartbeat.
type Confirmation struct {
	// Epoch is the member's epoch.
	Epoch int64
	// SentAt is when the heartbeat was sent, by this process's clock: the
	// session lives at least until SentAt plus the session timeout.
	SentAt time.Time
	// ControllerEpoch is the epoch of the controller that answered.
	ControllerEpoch int64
	// MetadataEnd is the end (exclusive) of the metadata log.
	MetadataEnd int64
	// Handovers are the leaderships that a broker is asked to hand over; always
	// empty for other roles. The receiver owns them.
	Handovers []*metadatav1.Handover
}

// Role is how one kind of member registers and sends heartbeats. Made by
// [BrokerRole] and [RemoteLogManagerRole].
type Role interface {
	// Register asks for a new epoch.
	Register(ctx context.Context, conn grpc.ClientConnInterface) (Registration, error)
	// Connect opens a session stream for the epoch.
	Connect(ctx context.Context, conn grpc.ClientConnInterface, epoch int64) (Heartbeats, error)
}

// Heartbeats is an open session stream. Send and Receive may run concurrently
// with each other.
type Heartbeats interface {
	// Send sends heartbeat n; stopping ends the session.
	Send(n int64, stopping bool) error
	// Receive waits for the next confirmation and returns its number.
	Receive() (n int64, c Confirmation, err error)
}

// SessionOptions configure a [Session]. The callbacks run in Run's goroutine,
// one at a time, and must not block.
type SessionOptions struct {
	// Role is who the member is.
	Role Role
	// Logger gets registrations and losses. nil = slog.Default().
	Logger *slog.Logger
	// OnRegistered is told each new epoch, before its first heartbeat.
	OnRegistered func(Registration)
	// OnConfirmed is told each confirmed heartbeat.
	OnConfirmed func(Confirmation)
	// OnLost is told that the epoch has ended; a registration follows.
	OnLost func(epoch int64, err error)
	// RegisterTimeout bounds one attempt to register. 0 = 10 s.
	RegisterTimeout time.Duration
	// Retry gives the delays between attempts to register or to connect.
	// Zero = 50 ms growing to 1 s, half of it random.
	Retry backoff.Policy
}

// Session keeps a member registered and alive, across changes of the
// controller and closed epochs. Start it with Run, end it with Stop or with
// Run's context.
type Session struct {
	client *Client
	opts   SessionOptions

	stop     chan struct{} // closed by Stop
	stopOnce sync.Once
	done     chan struct{} // closed when Run returned
	lost     chan int64    // epochs that others found closed; holds the latest

	mu        sync.Mutex // guards all below
	current   Registration
	confirmed time.Time
}

// NewSession makes a session; nothing happens before Run.
func (c *Client) NewSession(opts SessionOptions) (*Session, error) {
	if opts.Role == nil {
		return nil, errors.New("metadata session: no role given")
	}
	opts.Logger = cmp.Or(opts.Logger, slog.Default()).With("component", "session")
	opts.RegisterTimeout = cmp.Or(opts.RegisterTimeout, 10*time.Second)
	if opts.Retry == (backoff.Policy{}) {
		opts.Retry = backoff.Policy{Initial: 50 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: 0.5}
	}
	if opts.OnRegistered == nil {
		opts.OnRegistered = func(Registration) {}
	}
	if opts.OnConfirmed == nil {
		opts.OnConfirmed = func(Confirmation) {}
	}
	if opts.OnLost == nil {
		opts.OnLost = func(int64, error) {}
	}
	return &Session{
		client: c, opts: opts,
		stop: make(chan struct{}), done: make(chan struct{}),
		lost: make(chan int64, 1),
	}, nil
}

// Run registers and keeps the session alive until ctx ends, Stop was called,
// or the controller refuses the registration for a reason that repeating it
// cannot mend (another cluster, the id in use, etcd rolled back), which is the
// error returned. Call it once.
func (s *Session) Run(ctx context.Context) error {
	defer close(s.done)
	for {
		reg, err := s.register(ctx)
		if err != nil {
			if errors.Is(err, errStopped) {
				return nil
			}
			return err
		}
		s.mu.Lock()
		s.current, s.confirmed = reg, time.Time{}
		s.mu.Unlock()
		s.opts.Logger.InfoContext(ctx, "registered", "epoch", reg.Epoch, "cluster_id", reg.ClusterID, "session_timeout", reg.SessionTimeout)
		s.opts.OnRegistered(reg)

		err = s.keep(ctx, reg)
		if !errors.Is(err, ErrEpochClosed) {
			if errors.Is(err, errStopped) {
				return nil
			}
			return err
		}
		s.mu.Lock()
		s.current, s.confirmed = Registration{}, time.Time{}
		s.mu.Unlock()
		s.opts.Logger.WarnContext(ctx, "session lost, registering again", "epoch", reg.Epoch, "err", err)
		s.opts.OnLost(reg.Epoch, err)
	}
}

// errStopped ends Run after Stop.
var errStopped = errors.New("stopped")

// Stop ends the session in the log, so that nobody has to wait for its
// timeout, and waits until Run has returned or ctx has ended. When the
// controller does not answer the session is left to time out.
func (s *Session) Stop(ctx context.Context) error {
	s.stopOnce.Do(func() { close(s.stop) })
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop metadata session: %w", context.Cause(ctx))
	}
}

// Invalidate tells the session that an epoch was found closed by other means,
// a refused commit for instance. Another epoch than the current one is ignored.
func (s *Session) Invalidate(epoch int64) {
	select {
	case <-s.lost: // only the latest counts
	default:
	}
	select {
	case s.lost <- epoch:
	default:
	}
}

// Current is the present registration; false before the first one and between
// the loss of an epoch and the next.
func (s *Session) Current() (Registration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current, s.current.ClusterID != ""
}

// ConfirmedAt is when the last confirmed heartbeat of the current epoch was
// sent; the zero time when none was confirmed yet.
func (s *Session) ConfirmedAt() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.confirmed
}

// register tries until it has an epoch.
func (s *Session) register(ctx context.Context) (Registration, error) {
	for attempt := 1; ; attempt++ {
		select {
		case <-s.stop:
			return Registration{}, errStopped
		default:
		}
		try, cancel := context.WithTimeout(ctx, s.opts.RegisterTimeout)
		reg, err := s.opts.Role.Register(try, s.client.Controller())
		cancel()
		if err == nil {
			return reg, nil
		}
		if ctx.Err() != nil {
			return Registration{}, fmt.Errorf("register: %w", context.Cause(ctx))
		}
		if hopeless(err) {
			return Registration{}, fmt.Errorf("register: %w", err)
		}
		s.opts.Logger.WarnContext(ctx, "registration failed, trying again", "attempt", attempt, "err", err)
		if err := s.pause(ctx, attempt); err != nil {
			return Registration{}, err
		}
	}
}

// hopeless reports whether a refused registration will be refused for ever.
func hopeless(err error) bool {
	if errors.Is(err, ErrClosed) {
		return true
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented:
		return true
	}
	return false
}

// closedEpoch reports whether an error says that the epoch has ended.
func closedEpoch(err error) bool {
	switch rpcerr.Reason(err) {
	case errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH, errorsv1.ErrorReason_ERROR_REASON_RLM_EPOCH_CLOSED:
		return true
	}
	return false
}

// pause waits between attempts; Stop and ctx cut it short.
func (s *Session) pause(ctx context.Context, attempt int) error {
	timer := time.NewTimer(s.opts.Retry.Delay(attempt, rand.Float64()))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-s.stop:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// keep holds the session of one epoch over as many streams as it takes.
func (s *Session) keep(ctx context.Context, reg Registration) error {
	for attempt := 1; ; attempt++ {
		confirmed, err := s.stream(ctx, reg)
		switch {
		case errors.Is(err, errStopped), errors.Is(err, ErrEpochClosed):
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("metadata session: %w", context.Cause(ctx))
		case closedEpoch(err):
			return fmt.Errorf("%w: %w", ErrEpochClosed, err)
		}
		if confirmed {
			attempt = 0
		}
		s.opts.Logger.DebugContext(ctx, "session stream ended, opening another", "epoch", reg.Epoch, "err", err)
		select {
		case <-s.stop:
			// Not answered once more: the session is left to its timeout.
			if attempt > 2 {
				return errStopped
			}
		default:
		}
		if err := s.pause(ctx, max(attempt, 1)); err != nil {
			return err
		}
	}
}

// answer is one result of Heartbeats.Receive.
type answer struct {
	n   int64
	c   Confirmation
	err error
}

// stream keeps one stream until it fails. confirmed is true if a heartbeat was
// answered on it.
func (s *Session) stream(ctx context.Context, reg Registration) (confirmed bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	hb, err := s.opts.Role.Connect(ctx, s.client.Controller(), reg.Epoch)
	if err != nil {
		cancel()
		return false, err
	}
	answers := make(chan answer)
	received := make(chan struct{})
	go func() { // ends with the stream's context at the latest
		defer close(received)
		for {
			var a answer
			a.n, a.c, a.err = hb.Receive()
			select {
			case answers <- a:
			case <-ctx.Done():
				return
			}
			if a.err != nil {
				return
			}
		}
	}()
	defer func() {
		cancel()
		<-received
	}()

	period := max(reg.SessionTimeout/4, time.Millisecond)
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	var (
		sent     int64                   // number of the last heartbeat sent
		times    = map[int64]time.Time{} // when each unanswered one was sent
		stop     = s.stop
		stopping int64 // number of the heartbeat that ends the session
	)
	beat := func(last bool) error {
		sent++
		times[sent] = time.Now()
		return hb.Send(sent, last)
	}
	if err := beat(false); err != nil {
		return false, s.streamError(err, answers)
	}
	for {
		select {
		case <-ctx.Done():
			return confirmed, context.Cause(ctx)
		case epoch := <-s.lost:
			if epoch == reg.Epoch {
				return confirmed, fmt.Errorf("%w: told by a refused command", ErrEpochClosed)
			}
		case <-stop:
			stop = nil
			if err := beat(true); err != nil {
				return confirmed, s.streamError(err, answers)
			}
			stopping = sent
		case <-ticker.C:
			if stopping > 0 {
				if time.Since(times[stopping]) > reg.SessionTimeout/2 {
					return confirmed, errors.New("the stop was not answered")
				}
				continue
			}
			// A whole period without an answer: whoever is there does not give
			// one, a deposed or cut-off controller perhaps. Looking elsewhere now
			// leaves half of the session's life to find the next.
			if len(times) > 0 {
				s.client.noteSilent(reg.SessionTimeout / 2)
				return confirmed, fmt.Errorf("%d heartbeats without an answer for %v", len(times), period)
			}
			if err := beat(false); err != nil {
				return confirmed, s.streamError(err, answers)
			}
		case a := <-answers:
			if a.err != nil {
				if stopping > 0 && closedEpoch(a.err) {
					return confirmed, errStopped
				}
				return confirmed, a.err
			}
			at, ok := times[a.n]
			if !ok {
				continue
			}
			for n := range times {
				if n <= a.n {
					delete(times, n)
				}
			}
			confirmed = true
			a.c.Epoch, a.c.SentAt = reg.Epoch, at
			s.mu.Lock()
			s.confirmed = at
			s.mu.Unlock()
			s.opts.OnConfirmed(a.c)
			if stopping > 0 && a.n >= stopping {
				return confirmed, errStopped
			}
		}
	}
}

// streamError replaces the bare io.EOF that sending on an ended stream gives
// by the status that ended it.
func (s *Session) streamError(err error, answers <-chan answer) error {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	for {
		select {
		case a := <-answers:
			if a.err != nil {
				return a.err
			}
		case <-timer.C:
			return err
		}
	}
}
