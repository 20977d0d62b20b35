package fetcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/semaphore"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/walobject"
)

var (
	// ErrNotFound: there is no such object, or it has no such range.
	ErrNotFound = errors.New("fetcher: not found")
	// ErrUnavailable: the store could not be read now.
	ErrUnavailable = errors.New("fetcher: object store unavailable")
	// ErrDamaged: the object's bytes are not what they must be.
	ErrDamaged = errors.New("fetcher: object damaged")
	// ErrClosed: the fetcher was closed.
	ErrClosed = errors.New("fetcher: closed")
)

// LimitError says that readers hold on to too much.
type LimitError struct {
	// Scope is "peer" or "all peers".
	Scope string
	// Limit and Actual are in bytes.
	Limit, Actual int64
}

// Error implements error.
func (e *LimitError) Error() string {
	return fmt.Sprintf("fetcher: %d bytes pinned by %s, the limit is %d", e.Actual, e.Scope, e.Limit)
}

// NotFoundError names the object that is not there. It matches [ErrNotFound].
type NotFoundError struct {
	Object string
	// Err is the store's error.
	Err error
}

// Error implements error.
func (e *NotFoundError) Error() string {
	return fmt.Sprintf("fetcher: object %s not found: %v", e.Object, e.Err)
}

// Unwrap returns the kind and the cause.
func (e *NotFoundError) Unwrap() []error { return []error{ErrNotFound, e.Err} }

// DamageError says where an object is damaged. It matches [ErrDamaged].
type DamageError struct {
	// Object is its name.
	Object string
	// Position and Length are the damaged bytes, as far as is known.
	Position, Length int64
	// Offset is the first record offset there, -1 when unknown.
	Offset int64
	// Err is the cause.
	Err error
}

// Error implements error.
func (e *DamageError) Error() string {
	return fmt.Sprintf("fetcher: object %s damaged in bytes [%d, %d): %v", e.Object, e.Position, e.Position+e.Length, e.Err)
}

// Unwrap returns the kind and the cause.
func (e *DamageError) Unwrap() []error { return []error{ErrDamaged, e.Err} }

// Config are the fetcher's limits, all above 0.
type Config struct {
	// BlockBytes is the size of a block: that of the largest usual object.
	BlockBytes int64
	// CacheBytes bounds the blocks kept.
	CacheBytes int64
	// FooterBytes bounds the footers kept, FooterWorkBytes the memory that
	// fetching and decoding footers takes at once.
	FooterBytes, FooterWorkBytes int64
	// PeerPinnedBytes bounds what the reads of one peer hold on to; PinnedBytes
	// those of all.
	PeerPinnedBytes, PinnedBytes int64
	// ReadTimeout bounds one GET, its retries included.
	ReadTimeout time.Duration
	// MaxFetches bounds the GETs running at once.
	MaxFetches int
}

func (c Config) validate() error {
	if c.BlockBytes < 1 || c.CacheBytes < 1 || c.FooterBytes < 1 || c.FooterWorkBytes < 1 || c.PeerPinnedBytes < 1 || c.PinnedBytes < 1 || c.ReadTimeout <= 0 || c.MaxFetches < 1 {
		return fmt.Errorf("fetcher: a limit is not above 0: %+v", c)
	}
	return nil
}

// Fetcher reads objects. See the package comment.
type Fetcher struct {
	cfg     Config
	store   objstore.Reader
	log     *slog.Logger
	metrics *metrics
	slots   chan struct{}       // one token per running GET
	work    *semaphore.Weighted // bytes of footers being fetched and decoded

	ctx     context.Context //nolint:containedctx // of the GETs, which outlive their callers
	cancel  context.CancelCauseFunc
	running sync.WaitGroup

	mu      sync.Mutex // guards all below
	closed  bool
	cache   lru // blocks
	footers lru
	flights map[key]*flight
	peers   map[string]int64 // pinned bytes
	pinned  int64
}

// key names a block, or the footer of an object of a size.
type key struct {
	object string
	index  int64
	footer bool
	size   int64
}

// block is a part of an object, or its footer. It is immutable.
type block struct {
	data   []byte
	footer *Footer
	// bad are ranges of a whole object that failed their checksum, at the time
	// it was fetched.
	bad []DamageError
	at  time.Time
}

// damageKept is how long a damaged block answers from the cache: damage may have
// come from the way, and an object can be mended, but not every reader of the
// damage shall cost GETs.
const damageKept = 2 * time.Second

// bytes is what it takes in memory.
func (b *block) bytes() int64 {
	if b.footer != nil {
		return b.footer.bytes()
	}
	return int64(cap(b.data))
}

// stale says that a block is to be fetched again.
func (b *block) stale() bool { return len(b.bad) > 0 && time.Since(b.at) >= damageKept }

// flight is a GET that is running.
type flight struct {
	done    chan struct{} // closed when block and err are set
	block   *block
	err     error
	waiters int
	cancel  context.CancelFunc
}

// New makes a fetcher over a store that makes its own retries. The caller
// closes it.
func New(cfg Config, store objstore.Reader, log *slog.Logger, meter metric.Meter) (*Fetcher, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	f := &Fetcher{
		cfg: cfg, store: store, log: log.With("component", "fetcher"), slots: make(chan struct{}, cfg.MaxFetches),
		work: semaphore.NewWeighted(cfg.FooterWorkBytes),
		ctx:  ctx, cancel: cancel, flights: make(map[key]*flight), peers: make(map[string]int64),
	}
	f.cache.init(cfg.CacheBytes)
	f.footers.init(cfg.FooterBytes)
	var err error
	if f.metrics, err = newMetrics(meter, f); err != nil {
		cancel(err)
		return nil, err
	}
	return f, nil
}

// Close ends running GETs, whose readers get [ErrClosed], and waits for them.
func (f *Fetcher) Close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.cancel(ErrClosed)
	f.running.Wait()
}

// Read calls fn with the bytes [position, position+length) of the object, in
// order, in pieces that alias the cache: fn must not change them nor keep them.
// While fn runs its piece's block counts as pinned by the peer. The bytes of
// earlier calls of fn are good when a later one fails, so a reader can resume.
func (f *Fetcher) Read(ctx context.Context, peer, object string, position, length int64, fn func([]byte) error) error {
	if position < 0 || length < 1 || position > 1<<62-length {
		return fmt.Errorf("fetcher: bytes [%d, +%d) of an object", position, length)
	}
	for end := position + length; position < end; {
		k := key{object: object, index: position / f.cfg.BlockBytes}
		b, err := f.block(ctx, k)
		if err != nil {
			return err
		}
		start := k.index * f.cfg.BlockBytes
		stop := min(end-start, f.cfg.BlockBytes)
		if stop > int64(len(b.data)) {
			return &DamageError{Object: object, Position: start + int64(len(b.data)), Length: stop - int64(len(b.data)), Offset: -1, Err: objstore.ErrRange}
		}
		for i := range b.bad {
			if d := b.bad[i]; d.Position < end && d.Position+d.Length > position {
				return &d
			}
		}
		if err := f.serve(peer, b, b.data[position-start:stop], fn); err != nil {
			return err
		}
		position = start + stop
	}
	return nil
}

// serve runs fn with the block pinned.
func (f *Fetcher) serve(peer string, b *block, piece []byte, fn func([]byte) error) error {
	n := int64(cap(b.data))
	f.mu.Lock()
	switch {
	// Whoever pins nothing may always pin one block, or nobody could read.
	case f.peers[peer] > 0 && f.peers[peer]+n > f.cfg.PeerPinnedBytes:
		err := &LimitError{Scope: "peer", Limit: f.cfg.PeerPinnedBytes, Actual: f.peers[peer] + n}
		f.mu.Unlock()
		return err
	case f.pinned > 0 && f.pinned+n > f.cfg.PinnedBytes:
		err := &LimitError{Scope: "all peers", Limit: f.cfg.PinnedBytes, Actual: f.pinned + n}
		f.mu.Unlock()
		return err
	}
	f.peers[peer] += n
	f.pinned += n
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.pinned -= n
		if f.peers[peer] -= n; f.peers[peer] == 0 {
			delete(f.peers, peer)
		}
	}()
	return fn(piece)
}

// block returns a block from the cache, or waits for the one GET of it.
func (f *Fetcher) block(ctx context.Context, k key) (*block, error) {
	return f.share(ctx, k, f.fetch)
}

// share returns what get fetches, once for all who want it at the same time.
func (f *Fetcher) share(ctx context.Context, k key, get func(context.Context, key) (*block, error)) (*block, error) {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return nil, ErrClosed
	}
	if b := f.kept(k).get(k); b != nil && !b.stale() {
		f.mu.Unlock()
		f.metrics.asked(ctx, k, f.metrics.onHit)
		return b, nil
	}
	fl := f.flights[k]
	if fl == nil {
		fetchCtx, cancel := context.WithTimeout(f.ctx, f.cfg.ReadTimeout)
		fl = &flight{done: make(chan struct{}), cancel: cancel}
		f.flights[k] = fl
		f.metrics.asked(ctx, k, f.metrics.onMiss)
		f.running.Add(1)
		go func() {
			defer f.running.Done()
			defer cancel()
			f.run(fetchCtx, k, fl, get)
		}()
	} else {
		f.metrics.asked(ctx, k, f.metrics.onShared)
	}
	fl.waiters++
	f.mu.Unlock()

	select {
	case <-fl.done:
		return fl.block, fl.err
	case <-ctx.Done():
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl.waiters--; fl.waiters == 0 {
		// Nobody wants it any more. A later reader starts anew.
		fl.cancel()
		if f.flights[k] == fl {
			delete(f.flights, k)
		}
	}
	return nil, context.Cause(ctx)
}

// kept is the cache for a key; mu is held.
func (f *Fetcher) kept(k key) *lru {
	if k.footer {
		return &f.footers
	}
	return &f.cache
}

// run fetches a block and hands it to the waiters and to the cache.
func (f *Fetcher) run(ctx context.Context, k key, fl *flight, get func(context.Context, key) (*block, error)) {
	b, err := get(ctx, k)
	f.mu.Lock()
	defer f.mu.Unlock()
	fl.block, fl.err = b, err
	if f.flights[k] == fl {
		delete(f.flights, k)
	}
	if err == nil && !f.closed {
		f.kept(k).put(k, b)
	}
	close(fl.done)
}

// fetch gets a block and verifies it, a second time if the first was damaged.
func (f *Fetcher) fetch(ctx context.Context, k key) (*block, error) {
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	case <-ctx.Done():
		return nil, f.mapError(ctx, k.object, context.Cause(ctx))
	}
	for attempt := 1; ; attempt++ {
		data, err := f.get(ctx, k)
		if err != nil {
			return nil, f.mapError(ctx, k.object, err)
		}
		b := &block{data: data, at: time.Now()}
		if k.index == 0 {
			b.bad = damage(k.object, data)
		}
		if len(b.bad) == 0 {
			return b, nil
		}
		if attempt > 1 {
			f.log.ErrorContext(ctx, "object damaged", "object", k.object, "err", &b.bad[0], "count", len(b.bad))
			f.metrics.damaged(ctx)
			return b, nil
		}
	}
}

// get reads a block in one request, to its end or the object's.
func (f *Fetcher) get(ctx context.Context, k key) (data []byte, err error) {
	begin := time.Now()
	defer func() { f.metrics.get(ctx, time.Since(begin), len(data), err) }()
	r, err := f.store.OpenRange(ctx, k.object, k.index*f.cfg.BlockBytes, f.cfg.BlockBytes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	// The object's size is not known: grow, then keep no more than it takes.
	buf := make([]byte, 0, min(f.cfg.BlockBytes, 256<<10))
	for {
		if len(buf) == cap(buf) {
			if int64(len(buf)) >= f.cfg.BlockBytes {
				return buf, nil
			}
			buf = append(make([]byte, 0, min(int64(cap(buf))*2, f.cfg.BlockBytes)), buf...)
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	if cap(buf)-len(buf) > len(buf)/8 {
		buf = append(make([]byte, 0, len(buf)), buf...)
	}
	return buf, nil
}

// damage verifies the ranges of a whole object. A block that is only a part of
// one, or whose footer can't be read, has nothing to be held against.
func damage(object string, data []byte) (bad []DamageError) {
	footer, err := walobject.ReadFooter(data, int64(len(data)))
	if err != nil {
		return nil
	}
	for _, r := range footer.GetRanges() {
		d := r.GetRange()
		if err := walobject.VerifyBytes(d, data[d.GetPosition():d.GetPosition()+d.GetLengthBytes()]); err != nil {
			bad = append(bad, DamageError{Object: object, Position: d.GetPosition(), Length: d.GetLengthBytes(), Offset: d.GetBaseOffset(), Err: err})
		}
	}
	return bad
}

// mapError gives a store's error one of this package's kinds.
func (f *Fetcher) mapError(ctx context.Context, object string, err error) error {
	switch {
	case errors.Is(err, objstore.ErrNotFound):
		return &NotFoundError{Object: object, Err: err}
	case errors.Is(context.Cause(f.ctx), ErrClosed):
		return ErrClosed
	case errors.Is(err, objstore.ErrRange), errors.Is(err, objstore.ErrCorrupt):
		return &DamageError{Object: object, Offset: -1, Err: err}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%w: no answer within %v: %w", ErrUnavailable, f.cfg.ReadTimeout, err)
	}
	// Denied, a missing bucket, and whatever is not known: not an answer about
	// the object (I11).
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// FooterStats are the bytes and the number of the footers kept.
func (f *Fetcher) FooterStats() (size int64, count int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.footers.size, len(f.footers.byKey)
}

// Stats are the bytes kept and pinned, for metrics and tests.
func (f *Fetcher) Stats() (cached, pinned int64, flights int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cache.size, f.pinned, len(f.flights)
}
