package commitlog_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
)

var (
	crashSeed      = flag.Uint64("crash.seed", 1, "first seed of the crash histories")
	crashHistories = flag.Int("crash.histories", 3000, "number of crash histories")
)

// model is what a log must hold: the plain list that the log is an
// implementation of.
type model struct {
	base      int64 // where the oldest batch begins
	baseChain chainhash.Hash
	batches   []record.Batch
	durable   int // number of batches that no crash may take
	start     int64
	lineage   lineage.Lineage
}

func (m *model) clone() *model {
	c := *m
	c.batches = slices.Clone(m.batches)
	return &c
}

func (m *model) end() int64 {
	if len(m.batches) == 0 {
		return m.base
	}
	return m.batches[len(m.batches)-1].EndOffset()
}

// borderAt is the chain hash after n batches.
func (m *model) chainAfter(n int) chainhash.Hash {
	h := m.baseChain
	for _, b := range m.batches[:n] {
		h = chainhash.Next(h, b)
	}
	return h
}

// check says whether a recovered log is this model, possibly without batches
// that were not durable, and if so which part of the model it holds.
func (m *model) check(l *commitlog.Log, report commitlog.RecoveryReport) (*model, error) {
	if report.Damage != nil {
		return nil, fmt.Errorf("damage reported: %+v", report.Damage)
	}
	if !slices.Equal(l.Lineage(), m.lineage) {
		return nil, fmt.Errorf("lineage %v, want %v", l.Lineage(), m.lineage)
	}
	if l.Start() != m.start {
		return nil, fmt.Errorf("start %d, want %d", l.Start(), m.start)
	}
	n := 0
	for n < len(m.batches) && m.batches[n].EndOffset() <= l.End() {
		n++
	}
	got := m.clone()
	got.batches = got.batches[:n]
	if got.end() != l.End() || n < m.durable {
		return nil, fmt.Errorf("end %d, want a border in [%d batches, %d]", l.End(), m.durable, m.end())
	}
	got.durable = n // recovery syncs what it keeps
	for from := l.Start(); from < l.End(); {
		c, err := l.Read(nil, commitlog.ReadRequest{Offset: from, MaxBytes: 300})
		if err != nil {
			return nil, err
		}
		for b, err := range record.Batches(c.Bytes) {
			if err != nil {
				return nil, err
			}
			i := slices.IndexFunc(m.batches, func(w record.Batch) bool { return w.BaseOffset() == b.BaseOffset() })
			if i < 0 || !bytes.Equal(m.batches[i], b) {
				return nil, fmt.Errorf("other batch at %d", b.BaseOffset())
			}
		}
		from = c.End
	}
	if _, chain := l.Tail(); chain != got.chainAfter(n) {
		return nil, fmt.Errorf("other chain hash at the end")
	}
	if i := n / 2; i < n && got.batches[i].BaseOffset() >= l.Start() {
		if h, err := l.ChainAt(got.batches[i].BaseOffset()); err != nil || h != got.chainAfter(i) {
			return nil, fmt.Errorf("chain hash at %d: %v, %w", got.batches[i].BaseOffset(), h, err)
		}
	}
	return got, nil
}

// checkAny says whether a recovered log is the model after an operation that a
// crash may have met, the one before it, or, where the operation was a group of
// appends, one in between.
func checkAny(l *commitlog.Log, report commitlog.RecoveryReport, pre, post *model) (*model, error) {
	matched, err := post.check(l, report)
	if err == nil {
		return matched, nil
	}
	matched, preErr := pre.check(l, report)
	if preErr == nil {
		return matched, nil
	}
	if len(post.batches) > len(pre.batches) {
		between := post.clone()
		between.durable = pre.durable
		if matched, err := between.check(l, report); err == nil {
			return matched, nil
		}
	}
	return nil, fmt.Errorf("neither before (%w) nor after (%w)", preErr, err)
}

// step draws an operation, gives the model after it and does it.
func (m *model) step(tb testing.TB, r *rand.Rand, flush commitlog.FlushPolicy) (post *model, do func(*commitlog.Log) error, name string) {
	post = m.clone()
	last, writable := m.lineage.Last()
	writable = writable && m.lineage.Covers(m.end())
	switch k := r.IntN(20); {
	case k < 10 && writable:
		if last.StartOffset > m.end() {
			return post, func(*commitlog.Log) error { return nil }, "nothing"
		}
		var buf []byte
		for range 1 + r.IntN(3) {
			b := batch(tb, post.end(), last.LeaderEpoch, 1+r.IntN(3), r.IntN(120), r.Int64N(1000))
			post.batches = append(post.batches, b)
			buf = append(buf, b...)
		}
		if flush == commitlog.FlushAlways {
			post.durable = len(post.batches)
		}
		at := commitlog.Position{Offset: m.end(), Chain: m.chainAfter(len(m.batches)), CheckChain: true}
		if r.IntN(3) == 0 {
			// The same as a group of appends that share a sync.
			return post, func(l *commitlog.Log) error {
				for _, b := range post.batches[len(m.batches):] {
					if _, err := l.AppendDeferred(b, commitlog.Position{Offset: b.BaseOffset()}, testNow); err != nil {
						return err
					}
				}
				return l.Flush()
			}, "append deferred"
		}
		return post, func(l *commitlog.Log) error {
			_, err := l.Append(buf, at, testNow)
			return err
		}, "append"
	case k < 13:
		post.durable = len(post.batches)
		return post, (*commitlog.Log).Sync, "sync"
	case k < 15:
		n := r.IntN(len(m.batches) + 1)
		at := post.base
		if n > 0 {
			at = post.batches[n-1].EndOffset()
		}
		if at < m.start {
			return post, func(*commitlog.Log) error { return nil }, "nothing"
		}
		post.batches = post.batches[:n]
		post.durable = min(post.durable, n)
		post.lineage = post.lineage.DropAt(at)
		return post, func(l *commitlog.Log) error { return l.TruncateTo(at) }, "truncate"
	case k < 17:
		epoch := int32(1)
		if len(m.lineage) > 0 {
			epoch = last.LeaderEpoch + 1
		}
		e := entry(epoch, m.end())
		post.lineage, _ = post.lineage.DropAt(m.end()).Append(e)
		return post, func(l *commitlog.Log) error { return l.AppendLineage(e) }, "lineage"
	case k == 17:
		return post, (*commitlog.Log).Roll, "roll"
	case k == 18:
		if m.end() == m.start {
			return post, func(*commitlog.Log) error { return nil }, "nothing"
		}
		at := m.start + 1 + r.Int64N(m.end()-m.start)
		post.start = at
		post.durable = len(post.batches)
		return post, func(l *commitlog.Log) error { return l.AdvanceStart(at) }, "advance"
	default:
		if r.IntN(2) > 0 {
			return post, func(*commitlog.Log) error { return nil }, "nothing"
		}
		at := r.Int64N(100)
		post.base, post.start, post.batches, post.durable = at, at, nil, 0
		post.baseChain[3] = byte(at)
		post.lineage = lineage.Lineage{entry(int32(r.IntN(5)), at/2)}
		return post, func(l *commitlog.Log) error { return l.Reset(at, post.baseChain, post.lineage) }, "reset"
	}
}

// crasher takes a clone of the file system right before its n-th operation.
type crasher struct {
	fs    *vfs.MemFS
	cfg   vfs.CrashCloneCfg
	left  int
	clone *vfs.MemFS
}

func (c *crasher) MaybeError(errorfs.Op) error {
	if c.left--; c.left == 0 {
		c.clone = c.fs.CrashClone(c.cfg)
	}
	return nil
}

func (c *crasher) String() string { return "crasher" }

func TestNoCrashLosesWhatWasDurableOrBringsBackWhatWasCut(t *testing.T) {
	for i := range *crashHistories {
		seed := *crashSeed + uint64(i)
		if !t.Run("", func(t *testing.T) { crashHistory(t, seed) }) {
			t.Fatalf("failed with -crash.seed=%d -crash.histories=1", seed)
		}
	}
}

func crashHistory(t *testing.T, seed uint64) {
	r := rng(seed)
	opts := commitlog.Options{
		SegmentBytes:  int64(200 + r.IntN(2000)),
		IndexInterval: int64(1 + r.IntN(500)),
		Flush:         commitlog.FlushPolicy(r.IntN(2)),
	}
	mem := newFS(t)
	pre := &model{}
	post := pre
	var trace []string
	for range 3 {
		c := &crasher{fs: mem, left: 1 + r.IntN(300), cfg: vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 20, 50, 80, 100}[r.IntN(5)], RNG: r}}
		fs := errorfs.Wrap(mem, c)
		l, report, err := commitlog.Open(fs, testDir, testID, opts)
		require.NoError(t, err, "%v", trace)
		matched, err := checkAny(l, report, pre, post)
		require.NoError(t, err, "seed %d: %v\n%+v", seed, trace, report)
		pre, post = matched, matched
		trace = append(trace, fmt.Sprintf("open[%d,%d)", l.Start(), l.End()))
		for steps := r.IntN(30); c.clone == nil && steps < 60; steps++ {
			pre = post
			var do func(*commitlog.Log) error
			var name string
			post, do, name = pre.step(t, r, opts.Flush)
			trace = append(trace, name)
			require.NoError(t, do(l), "seed %d: %v", seed, trace)
			require.Equal(t, post.end(), l.End(), "seed %d: %v", seed, trace)
		}
		if c.clone == nil {
			pre = post
			if r.IntN(2) == 0 {
				post = post.clone()
				post.durable = len(post.batches)
				require.NoError(t, l.Close())
				trace = append(trace, "close")
				reopened, report := openLog(t, mem, commitlog.Options{SegmentBytes: opts.SegmentBytes, IndexInterval: opts.IndexInterval, Trusted: true})
				require.True(t, report.Trusted)
				_, err := post.check(reopened, report)
				require.NoError(t, err, "seed %d: %v", seed, trace)
			}
			if r.IntN(2) == 0 {
				// Only the process is killed: what it wrote stays, and what the
				// next one has recovered must then survive the machine.
				killed, report := openLog(t, mem, opts)
				matched, err := post.check(killed, report)
				require.NoError(t, err, "seed %d: %v", seed, trace)
				require.Equal(t, post.end(), matched.end())
				post = matched
				trace = append(trace, "kill")
			}
			c.clone = mem.CrashClone(c.cfg)
		}
		mem = c.clone
		trace = append(trace, "crash")
	}
	l, report := openLog(t, mem, opts)
	_, err := checkAny(l, report, pre, post)
	require.NoError(t, err, "seed %d: %v\n%+v", seed, trace, report)
	requireIndexesAsRebuilt(t, mem, l, opts)
}

// requireIndexesAsRebuilt closes a log and compares its index files with those
// that are built from the segments alone (field reports B042, B077).
func requireIndexesAsRebuilt(t *testing.T, mem *vfs.MemFS, l *commitlog.Log, opts commitlog.Options) {
	t.Helper()
	require.NoError(t, l.Close())
	read := func() map[string][]byte {
		out := map[string][]byte{}
		names, err := mem.List(testDir)
		require.NoError(t, err)
		for _, n := range names {
			if path := mem.PathJoin(testDir, n); len(n) == 26 {
				out[path] = fileBytes(t, mem, path)
			}
		}
		return out
	}
	kept := read()
	for path := range kept {
		require.NoError(t, mem.Remove(path))
	}
	l, _ = openLog(t, mem, opts)
	require.NoError(t, l.Close())
	require.Equal(t, kept, read())
}

// failer fails the n-th operation, once.
type failer struct {
	left   int
	failed bool
}

func (f *failer) MaybeError(op errorfs.Op) error {
	if op.Kind == errorfs.OpFileClose {
		// The handle would stay open for good; closing does no work here.
		return nil
	}
	if f.left--; f.left == 0 {
		f.failed = true
		return errorfs.ErrInjected
	}
	return nil
}

func (f *failer) String() string { return "failer" }

// TestAnyFailedOperationEndsInAStateThatReopens runs one script with the n-th
// file operation failing, for every n.
func TestAnyFailedOperationEndsInAStateThatReopens(t *testing.T) {
	for _, seed := range []uint64{3, 4, 5, 6} {
		n := 1
		for ; failOperation(t, seed, n); n++ {
		}
		require.Greater(t, n, 100, "the script has become too short")
	}
}

func failOperation(t *testing.T, seed uint64, n int) bool {
	r := rng(seed)
	opts := commitlog.Options{SegmentBytes: 700, IndexInterval: 200, Flush: commitlog.FlushPolicy(seed % 2)}
	mem := newFS(t)
	f := &failer{left: n}
	pre, post := &model{}, &model{}
	l, _, err := commitlog.Open(errorfs.Wrap(mem, f), testDir, testID, opts)
	for steps := 0; err == nil && steps < 60; steps++ {
		pre = post
		var do func(*commitlog.Log) error
		post, do, _ = pre.step(t, r, opts.Flush)
		err = do(l)
	}
	if l != nil && err != nil {
		require.ErrorIs(t, err, errorfs.ErrInjected)
		var failed *commitlog.FailedError
		if errors.As(err, &failed) {
			// Nothing heals it, although every later operation would succeed.
			_, again := l.Append(batch(t, l.End(), 1, 1, 1, 0), commitlog.Position{Offset: l.End()}, testNow)
			require.ErrorAs(t, again, &failed)
			require.ErrorAs(t, l.Sync(), &failed)
			require.ErrorAs(t, l.Flush(), &failed)
			require.ErrorAs(t, l.TruncateTo(l.End()), &failed)
		}
		require.NoError(t, l.Close())
	}
	for _, fs := range []*vfs.MemFS{mem.CrashClone(vfs.CrashCloneCfg{}), mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: r}), mem} {
		for _, trusted := range []bool{true, false} {
			opts.Trusted = trusted
			l, report := openLog(t, fs, opts)
			_, err := checkAny(l, report, pre, post)
			require.NoError(t, err, "seed %d, operation %d: %+v", seed, n, report)
			require.NoError(t, l.Close())
		}
	}
	return f.failed
}
