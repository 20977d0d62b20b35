package metadata_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

// witness knows every entry that was ever written.
type witness struct {
	mu      sync.Mutex
	entries []*metadatav1.Entry
}

// state is that of the whole log below end, however much of it is trimmed.
func (w *witness) state(t *testing.T, end int64) *state.State {
	t.Helper()
	var entries []*metadatav1.Entry
	require.Eventually(t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		if int64(len(w.entries)) < end {
			return false
		}
		entries = w.entries[:end]
		return true
	}, 20*time.Second, 5*time.Millisecond)
	st := state.New()
	for _, e := range entries {
		require.NoError(t, st.Apply(e))
	}
	return st
}

// recordedKV tells a witness of every entry that was written through it.
type recordedKV struct {
	clientv3.KV
	w *witness
}

func (r *recordedKV) Txn(ctx context.Context) clientv3.Txn {
	return &recordedTxn{Txn: r.KV.Txn(ctx), w: r.w}
}

type recordedTxn struct {
	clientv3.Txn
	w    *witness
	then []clientv3.Op
}

func (t *recordedTxn) If(cs ...clientv3.Cmp) clientv3.Txn { t.Txn = t.Txn.If(cs...); return t }
func (t *recordedTxn) Then(ops ...clientv3.Op) clientv3.Txn {
	t.Txn, t.then = t.Txn.Then(ops...), ops
	return t
}
func (t *recordedTxn) Else(ops ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(ops...); return t }
func (t *recordedTxn) Commit() (*clientv3.TxnResponse, error) {
	resp, err := t.Txn.Commit()
	if err != nil || !resp.Succeeded {
		return resp, err
	}
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	for _, op := range t.then {
		if !op.IsPut() || !strings.HasPrefix(string(op.KeyBytes()), "/braid/log/") {
			continue
		}
		e := &metadatav1.Entry{}
		if err := proto.Unmarshal(op.ValueBytes(), e); err != nil || e.GetOffset() != int64(len(t.w.entries)) {
			return nil, fmt.Errorf("entry %d is written at %d: %w", e.GetOffset(), len(t.w.entries), err)
		}
		t.w.entries = append(t.w.entries, e)
	}
	return resp, nil
}
