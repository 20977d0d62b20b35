package metalog_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/braidlog/braid/pkg/embetcd"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
)

const incarnation = 77

// etcd is one server for all tests of the package; each test has its prefix.
var etcd = sync.OnceValues(func() (*clientv3.Client, error) {
	s, err := embetcd.Start(context.Background(), embetcd.Options{Dir: testDir, Fast: true, NoSync: true})
	if err != nil {
		return nil, err
	}
	stop = s.Close
	return clientv3.New(clientv3.Config{Endpoints: s.Endpoints(), Logger: zap.NewNop()})
})

type world struct {
	ctx    context.Context
	client *clientv3.Client
	opts   metalog.Options
}

func newWorld(t *testing.T) *world {
	t.Helper()
	c, err := etcd()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return &world{ctx: ctx, client: c, opts: metalog.Options{
		Prefix: "/" + t.Name() + "/", AttemptTimeout: 2 * time.Second,
	}}
}

func (w *world) log() *metalog.Log { return metalog.New(w.client, w.client, w.opts) }

// lead wins the election of the prefix and returns the guard and a resignation.
func (w *world) lead(t *testing.T) (metalog.Guard, func()) {
	t.Helper()
	s, err := concurrency.NewSession(w.client, concurrency.WithTTL(60), concurrency.WithContext(w.ctx))
	require.NoError(t, err)
	e := concurrency.NewElection(s, w.log().LeaderPrefix())
	require.NoError(t, e.Campaign(w.ctx, "x"))
	return metalog.Guard{Key: e.Key(), CreateRevision: e.Rev()}, func() { require.NoError(t, e.Resign(w.ctx)) }
}

func entry(offset int64) *metadatav1.Entry {
	return &metadatav1.Entry{
		Offset: offset, Incarnation: incarnation, WriteId: fmt.Appendf(nil, "%016d", offset),
		Events: []*metadatav1.Event{{Kind: &metadatav1.Event_TopicDeleted{TopicDeleted: &metadatav1.TopicDeleted{TopicCreationOffset: offset}}}},
	}
}

func entries(from, to int64) []*metadatav1.Entry {
	var out []*metadatav1.Entry
	for o := from; o < to; o++ {
		out = append(out, entry(o))
	}
	return out
}

func (w *world) append(t *testing.T, l *metalog.Log, g metalog.Guard, from, to int64) {
	t.Helper()
	got, err := l.Append(w.ctx, g, entries(from, to))
	require.NoError(t, err)
	require.Equal(t, to, got.End)
}

// read returns the offsets in the log.
func (w *world) read(t *testing.T, from int64) ([]int64, metalog.Tail) {
	t.Helper()
	var got []int64
	tail, err := w.log().Load(w.ctx, from, func(e *metadatav1.Entry) error {
		got = append(got, e.GetOffset())
		return nil
	})
	require.NoError(t, err)
	return got, tail
}

func span(from, to int64) []int64 {
	var out []int64
	for o := from; o < to; o++ {
		out = append(out, o)
	}
	return out
}

// follow runs Follow until it has delivered everything below end, and returns
// the groups.
func (w *world) follow(t *testing.T, l *metalog.Log, from metalog.Tail, end int64) [][]int64 {
	t.Helper()
	var groups [][]int64
	done := errors.New("enough")
	next := from.End
	err := l.Follow(w.ctx, from, func(es []*metadatav1.Entry) error {
		var g []int64
		for _, e := range es {
			g = append(g, e.GetOffset())
		}
		groups = append(groups, g)
		if next += int64(len(es)); next >= end {
			return done
		}
		return nil
	})
	require.ErrorIs(t, err, done)
	return groups
}

func TestAppendLoadFollow(t *testing.T) {
	w := newWorld(t)
	l := w.log()
	got, tail := w.read(t, 0)
	assert.Empty(t, got)
	assert.Zero(t, tail.End)
	g, _ := w.lead(t)
	w.append(t, l, g, 0, 1)
	w.append(t, l, g, 1, 4)
	for o := int64(4); o < 200; o += 49 {
		w.append(t, l, g, o, o+49)
	}
	got, _ = w.read(t, 0)
	assert.Equal(t, span(0, 200), got)
	got, _ = w.read(t, 150)
	assert.Equal(t, span(150, 200), got)
	groups := w.follow(t, l, tail, 200)
	assert.Equal(t, [][]int64{{0}, {1, 2, 3}}, groups[:2], "what one transaction wrote comes in one call")
	assert.Equal(t, span(0, 200), slices.Concat(groups...))
}

func TestAppendRefusesWhatIsTooLargeOrMisplaced(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	_, err := w.log().Append(w.ctx, g, entries(0, 65))
	require.ErrorIs(t, err, metalog.ErrTooLarge)
	big := entry(0)
	big.WriteId = make([]byte, metalog.MaxGroupBytes)
	_, err = w.log().Append(w.ctx, g, []*metadatav1.Entry{big})
	require.ErrorIs(t, err, metalog.ErrTooLarge)
	_, err = w.log().Append(w.ctx, g, []*metadatav1.Entry{entry(0), entry(2)})
	require.Error(t, err)
	_, err = w.log().Append(w.ctx, g, entries(5, 6))
	require.ErrorIs(t, err, metalog.ErrRolledBack, "etcd holds less than its only writer has written")
	w.append(t, w.log(), g, 0, 3)
	_, err = w.log().Append(w.ctx, g, []*metadatav1.Entry{func() *metadatav1.Entry {
		e := entry(2)
		e.WriteId = []byte("somebody else's.")
		return e
	}()})
	require.ErrorIs(t, err, metalog.ErrConflict)
}

func TestDeposedLeaderCannotAppend(t *testing.T) {
	w := newWorld(t)
	old, resign := w.lead(t)
	w.append(t, w.log(), old, 0, 2)
	resign()
	_, err := w.log().Append(w.ctx, old, entries(2, 3))
	require.ErrorIs(t, err, metalog.ErrDeposed)
	fresh, _ := w.lead(t)
	_, err = w.log().Append(w.ctx, old, entries(2, 3))
	require.ErrorIs(t, err, metalog.ErrDeposed)
	w.append(t, w.log(), fresh, 2, 4)
	got, _ := w.read(t, 0)
	assert.Equal(t, span(0, 4), got)
}

func TestFollowDeliversTransactionsWholeToASlowReader(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	_, tail := w.read(t, 0)
	first := make(chan struct{})
	go func() {
		defer close(first)
		for o := int64(0); o < 300; o += 3 {
			if _, err := w.log().Append(w.ctx, g, entries(o, o+3)); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	stop := errors.New("stop")
	next := int64(0)
	err := w.log().Follow(w.ctx, tail, func(es []*metadatav1.Entry) error {
		<-first // blocked while everything is written
		if assert.Len(t, es, 3) && assert.Equal(t, next, es[0].GetOffset()) {
			next += 3
		}
		if next == 300 {
			return stop
		}
		return nil
	})
	require.ErrorIs(t, err, stop)
}

func TestFollowReadsAgainWhatWasCompacted(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.append(t, w.log(), g, 0, 5)
	_, tail := w.read(t, 0)
	for o := int64(5); o < 105; o += 2 {
		w.append(t, w.log(), g, o, o+2)
	}
	now, err := w.log().Tail(w.ctx)
	require.NoError(t, err)
	_, err = w.client.Compact(w.ctx, now.Revision)
	require.NoError(t, err)
	groups := w.follow(t, w.log(), tail, 105)
	assert.Equal(t, span(5, 105), slices.Concat(groups...))
}

// cutting is a watcher whose watches end after every response.
type cutting struct {
	clientv3.Watcher
	opened int
}

func (c *cutting) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	c.opened++
	ctx, cancel := context.WithCancel(ctx)
	in, out := c.Watcher.Watch(ctx, key, opts...), make(chan clientv3.WatchResponse)
	go func() {
		defer close(out)
		defer cancel()
		for r := range in {
			select {
			case out <- r:
			case <-ctx.Done():
				return
			}
			if len(r.Events) > 0 {
				return
			}
		}
	}()
	return out
}

func TestFollowSurvivesAWatchThatIsCutAgainAndAgain(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	_, tail := w.read(t, 0)
	const n = 15
	w.append(t, w.log(), g, 0, 1)
	c := &cutting{Watcher: w.client}
	enough := errors.New("enough")
	next := int64(0)
	err := metalog.New(w.client, c, w.opts).Follow(w.ctx, tail, func(es []*metadatav1.Entry) error {
		require.Len(t, es, 1)
		require.Equal(t, next, es[0].GetOffset())
		if next++; next == n {
			return enough
		}
		w.append(t, w.log(), g, next, next+1) // written while the watch is being cut
		return nil
	})
	require.ErrorIs(t, err, enough)
	assert.Equal(t, n, c.opened)
}

// deaf is a watcher that delivers nothing and says nothing.
type deaf struct{ clientv3.Watcher }

func (deaf) Watch(context.Context, string, ...clientv3.OpOption) clientv3.WatchChan {
	return make(chan clientv3.WatchResponse)
}

func TestFollowNoticesAWatchThatIsStuck(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	_, tail := w.read(t, 0)
	w.append(t, w.log(), g, 0, 7)
	w.opts.ProbeInterval = 10 * time.Millisecond
	groups := w.follow(t, metalog.New(w.client, deaf{}, w.opts), tail, 7)
	assert.Equal(t, span(0, 7), slices.Concat(groups...))
}

func TestFollowStopsAtARollback(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.append(t, w.log(), g, 0, 7)
	_, tail := w.read(t, 0)
	_, err := w.client.Delete(w.ctx, w.opts.Prefix, clientv3.WithPrefix())
	require.NoError(t, err)
	w.opts.ProbeInterval = 10 * time.Millisecond
	err = w.log().Follow(w.ctx, tail, func([]*metadatav1.Entry) error { return nil })
	require.ErrorIs(t, err, metalog.ErrRolledBack)
	assert.True(t, metalog.Fatal(err))
	_, err = w.log().Load(w.ctx, 7, func(*metadatav1.Entry) error { return nil })
	require.ErrorIs(t, err, metalog.ErrRolledBack)
}

func TestDamageEndsTheReading(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, w *world, key string){
		"hole": func(t *testing.T, w *world, key string) {
			_, err := w.client.Delete(w.ctx, key)
			require.NoError(t, err)
		},
		"bytes": func(t *testing.T, w *world, key string) {
			_, err := w.client.Put(w.ctx, key, "\xff\xff")
			require.NoError(t, err)
		},
		"place": func(t *testing.T, w *world, key string) {
			other, err := w.client.Get(w.ctx, w.opts.Prefix+"log/"+fmt.Sprintf("%020d", 1))
			require.NoError(t, err)
			_, err = w.client.Put(w.ctx, key, string(other.Kvs[0].Value))
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			g, _ := w.lead(t)
			w.append(t, w.log(), g, 0, 6)
			spoil(t, w, w.opts.Prefix+"log/"+fmt.Sprintf("%020d", 3))
			_, err := w.log().Load(w.ctx, 0, func(*metadatav1.Entry) error { return nil })
			require.ErrorIs(t, err, metalog.ErrDamaged)
		})
	}
}

func TestFollowRefusesEntriesOfAnotherIncarnation(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.append(t, w.log(), g, 0, 1)
	e := entry(1)
	e.Incarnation++
	_, err := w.log().Append(w.ctx, g, []*metadatav1.Entry{e})
	require.NoError(t, err)
	err = w.log().Follow(w.ctx, metalog.Tail{}, func([]*metadatav1.Entry) error { return nil })
	require.ErrorIs(t, err, metalog.ErrForeign)
}

func TestAnotherEtcdClusterIsNoticed(t *testing.T) {
	w := newWorld(t)
	s, err := embetcd.Start(w.ctx, embetcd.Options{Dir: t.TempDir(), Fast: true, NoSync: true})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	other, err := clientv3.New(clientv3.Config{Endpoints: s.Endpoints(), Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = other.Close() })
	kv := &switching{KV: w.client}
	l := metalog.New(kv, w.client, w.opts)
	_, err = l.Tail(w.ctx)
	require.NoError(t, err)
	kv.KV = other
	_, err = l.Tail(w.ctx)
	require.ErrorIs(t, err, metalog.ErrOtherCluster)
}

type switching struct{ clientv3.KV }

func TestWaitReachableNamesTheEndpoints(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, metalog.WaitReachable(w.ctx, w.client, w.client.Endpoints(), time.Second))
	nobody := "http://127.0.0.1:1"
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{nobody}, Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	began := time.Now()
	err = metalog.WaitReachable(w.ctx, c, c.Endpoints(), 300*time.Millisecond)
	require.ErrorIs(t, err, metalog.ErrUnreachable)
	require.ErrorContains(t, err, nobody)
	assert.Less(t, time.Since(began), 10*time.Second)
	_, err = metalog.New(c, c, metalog.Options{AttemptTimeout: 50 * time.Millisecond}).Tail(w.ctx)
	require.ErrorIs(t, err, metalog.ErrUnreachable)
}

func TestEndIsDecimal(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.append(t, w.log(), g, 0, 12)
	got, err := w.client.Get(w.ctx, w.opts.Prefix+"end")
	require.NoError(t, err)
	assert.Equal(t, strconv.Itoa(12), string(got.Kvs[0].Value))
}

func TestTheFirstClaimStands(t *testing.T) {
	w := newWorld(t)
	g, resign := w.lead(t)
	none, err := w.log().Claimed(w.ctx)
	require.NoError(t, err)
	assert.Nil(t, none)
	_, err = w.log().Claim(w.ctx, metalog.Guard{Key: g.Key, CreateRevision: g.CreateRevision + 1}, []byte("x"))
	require.ErrorIs(t, err, metalog.ErrDeposed)
	got, err := w.faulty(answerLost).Claim(w.ctx, g, []byte("first"))
	require.Error(t, err)
	assert.Nil(t, got)
	resign()
	g, _ = w.lead(t)
	got, err = w.log().Claim(w.ctx, g, []byte("second"))
	require.NoError(t, err)
	assert.Equal(t, "first", string(got))
}
