package metalog_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
)

// written has entries [0, end) in the log.
func (w *world) written(t *testing.T, g metalog.Guard, end int64) {
	t.Helper()
	for o := int64(0); o < end; o += metalog.MaxGroupEntries {
		w.append(t, w.log(), g, o, min(o+metalog.MaxGroupEntries, end))
	}
}

// keys are the offsets of the entries in etcd, whatever the start says.
func (w *world) keys(t *testing.T) (offsets []int64) {
	t.Helper()
	resp, err := w.client.Get(w.ctx, w.opts.Prefix+"log/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	require.NoError(t, err)
	for _, kv := range resp.Kvs {
		var o int64
		_, err := fmt.Sscanf(string(kv.Key[len(w.opts.Prefix+"log/"):]), "%d", &o)
		require.NoError(t, err)
		offsets = append(offsets, o)
	}
	return offsets
}

func nothing(*metadatav1.Entry) error { return nil }

func TestTrimDeletesBelowTheStartInSteps(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.written(t, g, 2_500)
	revision, deleted, err := w.log().Trim(w.ctx, g, metalog.Start{Offset: 2_300, ControllerEpoch: 5})
	require.NoError(t, err)
	assert.EqualValues(t, 2_300, deleted)
	assert.Equal(t, span(2_300, 2_500), w.keys(t))
	require.NoError(t, w.log().Compact(w.ctx, revision))
	require.NoError(t, w.log().Compact(w.ctx, revision), "again")
	got, tail := w.read(t, 2_300)
	assert.Equal(t, span(2_300, 2_500), got)
	assert.Equal(t, metalog.Start{Offset: 2_300, ControllerEpoch: 5}, tail.Start)

	var trimmed *metalog.TrimmedError
	for _, from := range []int64{0, 1, 2_299} {
		_, err = w.log().Load(w.ctx, from, nothing)
		require.ErrorAs(t, err, &trimmed)
		assert.EqualValues(t, 2_300, trimmed.Start.Offset)
		assert.False(t, metalog.Fatal(err))
	}
	// A start never goes back, and the same again deletes nothing.
	for _, to := range []int64{2_300, 100, 0} {
		_, deleted, err = w.log().Trim(w.ctx, g, metalog.Start{Offset: to, ControllerEpoch: 0})
		require.NoError(t, err)
		assert.Zero(t, deleted)
	}
	_, tail = w.read(t, 2_300)
	assert.EqualValues(t, 2_300, tail.Start.Offset)
	_, _, err = w.log().Trim(w.ctx, g, metalog.Start{Offset: 2_501, ControllerEpoch: 5})
	require.Error(t, err, "above the end")
	_, _, err = w.log().Trim(w.ctx, g, metalog.Start{Offset: 2_500, ControllerEpoch: 2_400})
	require.NoError(t, err)
	assert.Empty(t, w.keys(t), "all of it")
	w.append(t, w.log(), g, 2_500, 2_502)
	got, _ = w.read(t, 2_500)
	assert.Equal(t, span(2_500, 2_502), got)
}

// However a trim is cut short, at whatever step and by whatever end of it, the
// log from its start on is whole, and the next controller finishes the job.
func TestATrimCutShortAnywhereIsCompletedByTheNext(t *testing.T) {
	for _, fault := range []struct {
		name string
		step func(commitFunc) (*clientv3.TxnResponse, error)
	}{{"before", requestLost}, {"behind", answerLost}} {
		done := false
		for n := 0; !done; n++ {
			t.Run(fmt.Sprintf("%s step %d", fault.name, n), func(t *testing.T) {
				w := newWorld(t)
				g, resign := w.lead(t)
				w.written(t, g, 2_200)
				script := make([]func(commitFunc) (*clientv3.TxnResponse, error), n+1)
				for i := range n {
					script[i] = func(commit commitFunc) (*clientv3.TxnResponse, error) { return commit() }
				}
				script[n] = fault.step
				_, _, err := w.faulty(script...).Trim(w.ctx, g, metalog.Start{Offset: 2_100, ControllerEpoch: 0})
				done = err == nil

				tail, err := w.log().Tail(w.ctx)
				require.NoError(t, err)
				got, _ := w.read(t, tail.Start.Offset)
				assert.Equal(t, span(tail.Start.Offset, 2_200), got)
				w.append(t, w.log(), g, 2_200, 2_201)
				resign()
				late := g
				g, _ = w.lead(t)
				_, _, err = w.log().Trim(w.ctx, late, metalog.Start{Offset: 2_150, ControllerEpoch: 0})
				require.ErrorIs(t, err, metalog.ErrDeposed)
				_, _, err = w.log().Trim(w.ctx, g, metalog.Start{Offset: 2_100, ControllerEpoch: 0})
				require.NoError(t, err)
				assert.Equal(t, span(2_100, 2_201), w.keys(t))
			})
		}
	}
}

// A follower that was away while the log was trimmed and compacted is told where
// the log begins; one that was not goes on.
func TestFollowOfATrimmedLog(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.written(t, g, 40)
	_, tail := w.read(t, 0)
	w.append(t, w.log(), g, 40, 60)
	revision, _, err := w.log().Trim(w.ctx, g, metalog.Start{Offset: 50, ControllerEpoch: 3})
	require.NoError(t, err)
	require.NoError(t, w.log().Compact(w.ctx, revision))
	err = w.log().Follow(w.ctx, tail, func([]*metadatav1.Entry) error { return nil })
	var trimmed *metalog.TrimmedError
	require.ErrorAs(t, err, &trimmed)
	assert.Equal(t, metalog.Start{Offset: 50, ControllerEpoch: 3}, trimmed.Start)

	_, tail = w.read(t, 55)
	w.append(t, w.log(), g, 60, 61)
	assert.Equal(t, [][]int64{{60}}, w.follow(t, w.log(), tail, 61))
}

func TestEpochBefore(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	for o, epoch := range []int64{0, 0, 2, 2, 4} {
		e := entry(int64(o))
		e.ControllerEpoch = epoch
		_, err := w.log().Append(w.ctx, g, []*metadatav1.Entry{e})
		require.NoError(t, err)
	}
	for offset, want := range map[int64]int64{0: 0, 1: 0, 2: 0, 3: 2, 4: 2, 5: 4} {
		got, err := w.log().EpochBefore(w.ctx, offset)
		require.NoError(t, err)
		assert.Equal(t, want, got, "%d", offset)
	}
	_, err := w.log().EpochBefore(w.ctx, 6)
	require.ErrorIs(t, err, metalog.ErrRolledBack)
	_, _, err = w.log().Trim(w.ctx, g, metalog.Start{Offset: 3, ControllerEpoch: 2})
	require.NoError(t, err)
	got, err := w.log().EpochBefore(w.ctx, 3)
	require.NoError(t, err)
	assert.EqualValues(t, 2, got, "the start tells it")
	_, err = w.log().EpochBefore(w.ctx, 2)
	require.ErrorAs(t, err, new(*metalog.TrimmedError))
}

// A trim that runs while others load the log never shows them a hole.
func TestLoadsDuringATrim(t *testing.T) {
	w := newWorld(t)
	g, _ := w.lead(t)
	w.written(t, g, 3_000)
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() {
		defer cancel()
		for to := int64(100); to <= 2_900; to += 100 {
			revision, _, err := w.log().Trim(w.ctx, g, metalog.Start{Offset: to, ControllerEpoch: 0})
			if err == nil {
				err = w.log().Compact(w.ctx, revision)
			}
			if err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	loads := 0
	for ctx.Err() == nil {
		tail, err := w.log().Tail(w.ctx)
		require.NoError(t, err)
		next := tail.Start.Offset
		_, err = w.log().Load(w.ctx, next, func(e *metadatav1.Entry) error {
			require.Equal(t, next, e.GetOffset())
			next++
			return nil
		})
		if err == nil {
			require.EqualValues(t, 3_000, next)
			loads++
			continue
		}
		require.ErrorAs(t, err, new(*metalog.TrimmedError))
	}
	require.NoError(t, <-done)
	t.Log(loads)
}
