package metalog_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/services/metadata/internal/metalog"
)

var (
	testDir string
	stop    = func() {}
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "metalog")
	if err != nil {
		panic(err)
	}
	testDir = dir
	code := m.Run()
	stop()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

var errLost = status.Error(codes.Unavailable, "connection lost")

// faultyKV gives a test the commit of each transaction, in the order of their
// coming: script[i] gets the i-th; later ones are sent as they are.
type faultyKV struct {
	clientv3.KV
	script []func(commit func() (*clientv3.TxnResponse, error)) (*clientv3.TxnResponse, error)
}

func (f *faultyKV) Txn(ctx context.Context) clientv3.Txn {
	return &faultyTxn{Txn: f.KV.Txn(context.WithoutCancel(ctx)), f: f}
}

type faultyTxn struct {
	clientv3.Txn
	f *faultyKV
}

func (t *faultyTxn) If(cs ...clientv3.Cmp) clientv3.Txn   { t.Txn = t.Txn.If(cs...); return t }
func (t *faultyTxn) Then(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Then(ops...); return t }
func (t *faultyTxn) Else(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(ops...); return t }
func (t *faultyTxn) Commit() (*clientv3.TxnResponse, error) {
	if len(t.f.script) == 0 {
		return t.Txn.Commit()
	}
	step := t.f.script[0]
	t.f.script = t.f.script[1:]
	return step(t.Txn.Commit)
}

type commitFunc = func() (*clientv3.TxnResponse, error)

func (w *world) faulty(steps ...func(commitFunc) (*clientv3.TxnResponse, error)) *metalog.Log {
	return metalog.New(&faultyKV{KV: w.client, script: steps}, w.client, w.opts)
}

// answerLost executes the transaction and loses the answer.
func answerLost(commit commitFunc) (*clientv3.TxnResponse, error) {
	if _, err := commit(); err != nil {
		return nil, err
	}
	return nil, errLost
}

func requestLost(commitFunc) (*clientv3.TxnResponse, error) { return nil, errLost }

func TestAppendAdoptsWhatWasWrittenBehindALostAnswer(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	got, err := w.faulty(answerLost, answerLost, answerLost).Append(w.ctx, g, entries(0, 3))
	require.NoError(t, err)
	assert.Equal(t, metalog.Appended{End: 3, Attempts: 4, Adopted: true}, got)
	w.append(t, w.log(), g, 3, 4)
	offsets, _ := w.read(t, 0)
	assert.Equal(t, span(0, 4), offsets)
}

func TestAppendWritesAgainWhatGotLost(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	got, err := w.faulty(requestLost, requestLost).Append(w.ctx, g, entries(0, 3))
	require.NoError(t, err)
	assert.Equal(t, metalog.Appended{End: 3, Attempts: 3}, got)
}

// A transaction that waited in a paused member is executed between the retry
// being sent and its answer, or after it: in both cases once in all.
func TestLateTransactionHasItsEffectOnce(t *testing.T) {
	var late commitFunc
	keep := func(commit commitFunc) (*clientv3.TxnResponse, error) { late = commit; return nil, errLost }
	release := func(commit commitFunc) (*clientv3.TxnResponse, error) {
		if resp, err := late(); err != nil || !resp.Succeeded {
			return resp, err
		}
		return commit()
	}
	t.Run("before the retry", func(t *testing.T) {
		w := newWorld(t)
		g, _ := w.lead(t)
		got, err := w.faulty(keep, release).Append(w.ctx, g, entries(0, 2))
		require.NoError(t, err)
		assert.Equal(t, metalog.Appended{End: 2, Attempts: 2, Adopted: true}, got)
	})
	t.Run("after the retry", func(t *testing.T) {
		w := newWorld(t)
		g, _ := w.lead(t)
		got, err := w.faulty(keep).Append(w.ctx, g, entries(0, 2))
		require.NoError(t, err)
		assert.False(t, got.Adopted)
		w.append(t, w.log(), g, 2, 3)
		resp, err := late()
		require.NoError(t, err)
		assert.False(t, resp.Succeeded)
		offsets, _ := w.read(t, 0)
		assert.Equal(t, span(0, 3), offsets)
	})
	t.Run("after another leader wrote", func(t *testing.T) {
		w := newWorld(t)
		g, resign := w.lead(t)
		var won metalog.Guard
		depose := func(commit commitFunc) (*clientv3.TxnResponse, error) {
			resign()
			won, _ = w.lead(t)
			w.append(t, w.log(), won, 0, 1)
			return commit()
		}
		mine := entries(0, 1)
		mine[0].WriteId = []byte("of the old leader")[:16]
		_, err := w.faulty(keep, depose).Append(w.ctx, g, mine)
		require.ErrorIs(t, err, metalog.ErrDeposed)
		resp, err := late()
		require.NoError(t, err)
		assert.False(t, resp.Succeeded)
		w.append(t, w.log(), won, 1, 2)
		offsets, _ := w.read(t, 0)
		assert.Equal(t, span(0, 2), offsets)
	})
}

// The group is in the log although its writer lost the election before it could
// look: its callers get their verdict.
func TestAppendAdoptsItsGroupEvenWhenDeposedSince(t *testing.T) {
	w := newWorld(t)
	g, resign := w.lead(t)
	depose := func(commit commitFunc) (*clientv3.TxnResponse, error) {
		resign()
		return commit()
	}
	got, err := w.faulty(answerLost, depose).Append(w.ctx, g, entries(0, 2))
	require.NoError(t, err)
	assert.True(t, got.Adopted)
}

func TestAppendWithoutAnyAnswerStaysUnknown(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	ctx, cancel := context.WithTimeout(w.ctx, 100*time.Millisecond)
	defer cancel()
	kv := &deadKV{KV: w.client}
	_, err := metalog.New(kv, w.client, w.opts).Append(ctx, g, entries(0, 1))
	require.ErrorIs(t, err, metalog.ErrOutcomeUnknown)
	assert.False(t, metalog.Fatal(err))
}

type deadKV struct{ clientv3.KV }

func (k *deadKV) Txn(ctx context.Context) clientv3.Txn { return &deadTxn{k.KV.Txn(ctx)} }

type deadTxn struct{ clientv3.Txn }

func (t *deadTxn) If(...clientv3.Cmp) clientv3.Txn        { return t }
func (t *deadTxn) Then(...clientv3.Op) clientv3.Txn       { return t }
func (t *deadTxn) Else(...clientv3.Op) clientv3.Txn       { return t }
func (t *deadTxn) Commit() (*clientv3.TxnResponse, error) { return nil, errLost }

// etcd answers "no space" also to the transaction that it executed and that went
// over its quota: what the log holds decides.
func TestNoSpaceIsBelievedOnlyIfTheLogSaysSo(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.append(t, w.log(), g, 0, 1)
	executed := func(commit commitFunc) (*clientv3.TxnResponse, error) {
		if _, err := commit(); err != nil {
			return nil, err
		}
		return nil, rpctypes.ErrNoSpace
	}
	refused := func(commitFunc) (*clientv3.TxnResponse, error) { return nil, rpctypes.ErrNoSpace }
	got, err := w.faulty(executed).Append(w.ctx, g, entries(1, 3))
	require.NoError(t, err)
	assert.Equal(t, metalog.Appended{End: 3, Attempts: 1, Adopted: true}, got)
	_, err = w.faulty(refused).Append(w.ctx, g, entries(3, 5))
	require.ErrorIs(t, err, metalog.ErrRefused)
	// After a lost answer a refusal says nothing about the first attempt.
	got, err = w.faulty(answerLost, refused).Append(w.ctx, g, entries(3, 5))
	require.NoError(t, err)
	assert.True(t, got.Adopted)
	got, err = w.faulty(executed, requestLost).Append(w.ctx, g, entries(5, 6)) // the look at the log fails too
	require.NoError(t, err)
	assert.True(t, got.Adopted)
	offsets, _ := w.read(t, 0)
	assert.Equal(t, span(0, 6), offsets)
}
