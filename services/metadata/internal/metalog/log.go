package metalog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Limits of one append: far below etcd's 128 operations and 1.5 MiB a request.
const (
	MaxGroupEntries = 64
	MaxGroupBytes   = 512 << 10
)

// Options configure a [Log]. Zero values take the defaults named.
type Options struct {
	// Prefix of every key; "/braid/" by default. It ends in a slash.
	Prefix string
	// AttemptTimeout bounds one request to etcd; 2 s by default.
	AttemptTimeout time.Duration
	// ProbeInterval is how often [Log.Follow] reads the log's end; 5 s by
	// default.
	ProbeInterval time.Duration
	// Logger is told of what is unusual and repaired; nil discards it.
	Logger *slog.Logger
	// OnError is called with the name of the operation for every request to
	// etcd that failed, for counting. It must not block. May be nil.
	OnError func(op string, err error)
}

// Log is the metadata log of one etcd prefix.
type Log struct {
	kv      clientv3.KV
	watcher clientv3.Watcher
	opts    Options
	log     *slog.Logger

	clusterID atomic.Uint64 // of etcd, as in the first answer
}

// New makes a Log of an etcd client, or of parts of one. It asks nothing of
// etcd yet. The caller closes the client after the last call.
func New(kv clientv3.KV, watcher clientv3.Watcher, opts Options) *Log {
	if opts.Prefix == "" {
		opts.Prefix = "/braid/"
	}
	if !strings.HasSuffix(opts.Prefix, "/") {
		opts.Prefix += "/"
	}
	if opts.AttemptTimeout <= 0 {
		opts.AttemptTimeout = 2 * time.Second
	}
	if opts.ProbeInterval <= 0 {
		opts.ProbeInterval = 5 * time.Second
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.OnError == nil {
		opts.OnError = func(string, error) {}
	}
	return &Log{kv: kv, watcher: watcher, opts: opts, log: opts.Logger}
}

// LeaderPrefix is the prefix to hold the election under, without a slash at its
// end, as etcd's concurrency package wants it.
func (l *Log) LeaderPrefix() string { return l.opts.Prefix + "leader" }

func (l *Log) endKey() string { return l.opts.Prefix + "end" }

func (l *Log) claimKey() string { return l.opts.Prefix + "claim" }

func (l *Log) entryPrefix() string { return l.opts.Prefix + "log/" }

func (l *Log) entryKey(offset int64) string { return fmt.Sprintf("%s%020d", l.entryPrefix(), offset) }

// Tail is a place from which the log can be followed.
type Tail struct {
	// End is the log's end: the offset of the next entry.
	End int64
	// Revision is etcd's revision at which End was the end.
	Revision int64
	// Start is where the log began at that revision.
	Start Start
}

// Tail reads the log's end, and its start.
func (l *Log) Tail(ctx context.Context) (Tail, error) {
	attempt, cancel := context.WithTimeout(ctx, l.opts.AttemptTimeout)
	defer cancel()
	resp, err := l.kv.Txn(attempt).Then(clientv3.OpGet(l.endKey()), clientv3.OpGet(l.startKey())).Commit()
	if err != nil {
		l.opts.OnError("read end", err)
		return Tail{}, unreachable(ctx, "read end", err)
	}
	if err := l.checkCluster(resp.Header); err != nil {
		return Tail{}, err
	}
	end, err := parseEnd(resp.Responses[0].GetResponseRange().GetKvs())
	if err != nil {
		return Tail{}, err
	}
	start, err := parseStart(resp.Responses[1].GetResponseRange().GetKvs())
	if err != nil {
		return Tail{}, err
	}
	if start.Offset > end {
		return Tail{}, fmt.Errorf("%w: it begins at %d and ends at %d", ErrRolledBack, start.Offset, end)
	}
	return Tail{End: end, Revision: resp.Header.GetRevision(), Start: start}, nil
}

// get is one linearizable read with the attempt's deadline.
func (l *Log) get(ctx context.Context, op, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	attempt, cancel := context.WithTimeout(ctx, l.opts.AttemptTimeout)
	defer cancel()
	resp, err := l.kv.Get(attempt, key, opts...)
	if err != nil {
		l.opts.OnError(op, err)
		return nil, unreachable(ctx, op, err)
	}
	return resp, l.checkCluster(resp.Header)
}

// checkCluster remembers the etcd cluster of the first answer and refuses any
// other.
func (l *Log) checkCluster(h *etcdserverpb.ResponseHeader) error {
	id := h.GetClusterId()
	if id == 0 || l.clusterID.CompareAndSwap(0, id) {
		return nil
	}
	if known := l.clusterID.Load(); known != id {
		return fmt.Errorf("%w: cluster id %x instead of %x", ErrOtherCluster, id, known)
	}
	return nil
}

func parseEnd(kvs []*mvccpb.KeyValue) (int64, error) {
	if len(kvs) == 0 {
		return 0, nil
	}
	end, err := strconv.ParseInt(string(kvs[0].Value), 10, 64)
	if err != nil || end <= 0 {
		return 0, fmt.Errorf("%w: the end is %q", ErrDamaged, kvs[0].Value)
	}
	return end, nil
}

func (l *Log) entryOffset(key []byte) (int64, error) {
	text, ok := strings.CutPrefix(string(key), l.entryPrefix())
	offset, err := strconv.ParseInt(text, 10, 64)
	if !ok || err != nil || len(text) != 20 {
		return 0, fmt.Errorf("%w: key %q", ErrDamaged, key)
	}
	return offset, nil
}

// decode reads an entry and checks that it belongs to its key.
func (l *Log) decode(kv *mvccpb.KeyValue) (*metadatav1.Entry, error) {
	offset, err := l.entryOffset(kv.Key)
	if err != nil {
		return nil, err
	}
	e := new(metadatav1.Entry)
	if err := proto.Unmarshal(kv.Value, e); err != nil {
		return nil, fmt.Errorf("%w: entry %d: %w", ErrDamaged, offset, err)
	}
	if e.GetOffset() != offset {
		return nil, fmt.Errorf("%w: entry %d lies at %d", ErrDamaged, e.GetOffset(), offset)
	}
	if len(e.GetEvents()) == 0 || e.GetIncarnation() == 0 {
		return nil, fmt.Errorf("%w: entry %d without events or incarnation", ErrDamaged, offset)
	}
	return e, nil
}

// WaitReachable asks etcd until it answers, at most for limit, and otherwise
// returns [ErrUnreachable] with the endpoints and the last error. It is for the
// start of a process: an operator shall read what is missing.
func WaitReachable(ctx context.Context, kv clientv3.KV, endpoints []string, limit time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	wait := 50 * time.Millisecond
	var last error
	for {
		attempt, stop := context.WithTimeout(bounded, min(limit, 2*time.Second))
		_, err := kv.Get(attempt, "braid-reachable", clientv3.WithCountOnly())
		stop()
		if err == nil {
			return nil
		}
		if last == nil || !errors.Is(err, context.DeadlineExceeded) {
			last = err // a bare deadline says less than what came before it
		}
		if !sleep(bounded, wait) {
			break
		}
		wait = min(2*wait, time.Second)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: no answer from %s within %v: %w", ErrUnreachable, strings.Join(endpoints, ", "), limit, last)
}

// sleep waits for d and returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
