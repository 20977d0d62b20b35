package watch

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

const clusterID = "11111111-1111-4111-8111-111111111111"

// log makes a valid log: a cluster, then controllers that register brokers.
type log struct {
	st      *state.State
	entries []*metadatav1.Entry
	epoch   int64
}

func (l *log) add(t *testing.T, events []*metadatav1.Event, err error) {
	t.Helper()
	require.NoError(t, err)
	if events[0].GetControllerElected() != nil {
		l.epoch = l.st.EndOffset()
	}
	e := &metadatav1.Entry{
		Offset: l.st.EndOffset(), Incarnation: 5, ControllerEpoch: l.epoch, FeatureLevel: state.FeatureLevel, Events: events,
	}
	require.NoError(t, l.st.Apply(e))
	l.entries = append(l.entries, e)
}

func newLog(t *testing.T, perController, controllers int) *log {
	t.Helper()
	l := &log{st: state.New()}
	boot, err := l.st.DecideBootstrap(clusterID, 5)
	require.NoError(t, err)
	for c := range controllers {
		elected, err := l.st.DecideControllerElected(int32(c+1), "h:1")
		if c == 0 {
			elected = append(boot, elected...)
		}
		l.add(t, elected, err)
		for b := range perController {
			events, err := l.st.DecideRegisterBroker(&metadatav1.RegisterBrokerRequest{
				BrokerId: int32(b + 1), Address: "h:1", DirectoryId: fmt.Sprintf("%08d-0000-4000-8000-000000000000", b),
			})
			l.add(t, events, err)
		}
	}
	return l
}

func TestPublishIsIdempotentAndDense(t *testing.T) {
	l := newLog(t, 4, 2)
	h := NewHub(Options{})
	require.NoError(t, h.Publish(l.entries[:3]))
	require.ErrorIs(t, h.Publish(l.entries[4:5]), ErrGap)
	require.NoError(t, h.Publish(l.entries[:6]))
	require.NoError(t, h.Publish(l.entries))
	require.NoError(t, h.Publish(l.entries))
	assert.EqualValues(t, len(l.entries), h.End())
	h.Read(func(st *state.State) { assert.Equal(t, l.st.Digest(), st.Digest()) })
}

func TestAnEntryThatCannotBeAppliedEndsTheReplica(t *testing.T) {
	l := newLog(t, 4, 1)
	h := NewHub(Options{})
	bad := &metadatav1.Entry{Offset: 0, Incarnation: 5, FeatureLevel: 99, Events: l.entries[0].GetEvents()}
	var unknown *state.UnknownEventError
	require.ErrorAs(t, h.Publish([]*metadatav1.Entry{bad}), &unknown)
	require.ErrorAs(t, h.Publish(l.entries), &unknown)
	assert.Zero(t, h.End())
}

func TestTheRingIsBounded(t *testing.T) {
	l := newLog(t, 100, 3)
	h := NewHub(Options{MaxEntries: 10})
	for _, e := range l.entries {
		require.NoError(t, h.Publish([]*metadatav1.Entry{e}))
	}
	start, end, _ := h.Ring()
	assert.EqualValues(t, 10, end-start)
	_, _, err := h.tail(start-1, 5)
	require.ErrorIs(t, err, ErrSlow)
	records, more, err := h.tail(start+7, 5)
	require.NoError(t, err)
	assert.Len(t, records, 3)
	assert.NotNil(t, more)

	small := NewHub(Options{MaxBytes: 500})
	require.NoError(t, small.Publish(l.entries))
	_, _, size := small.Ring()
	assert.LessOrEqual(t, size, 500)
}

func TestPositionsTellLogsApart(t *testing.T) {
	l := newLog(t, 9, 3) // controllers at 0, 10 and 20
	h := NewHub(Options{MaxEntries: 4})
	require.NoError(t, h.Publish(l.entries))
	for offset, epoch := range map[int64]int64{0: 0, 1: 0, 10: 0, 11: 10, 20: 10, 21: 20, 30: 20} {
		p := h.position(offset)
		assert.Equal(t, epoch, p.GetControllerEpoch(), "before %d", offset)
		assert.True(t, h.holds(p))
		p.ControllerEpoch++
		assert.False(t, h.holds(p))
	}
	p := h.position(30)
	p.Offset++
	assert.False(t, h.holds(p), "beyond the end")
	p = h.position(5)
	p.Incarnation++
	assert.False(t, h.holds(p))
}

func TestWait(t *testing.T) {
	l := newLog(t, 4, 1)
	h := NewHub(Options{})
	go func() {
		for _, e := range l.entries {
			if err := h.Publish([]*metadatav1.Entry{e}); err != nil {
				t.Error(err)
			}
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, h.Wait(ctx, 5))
	enough, stop := context.WithCancelCause(ctx)
	stop(errors.New("enough"))
	require.ErrorContains(t, h.Wait(enough, 6), "enough")
}

func TestMembershipLeavesOutRanges(t *testing.T) {
	created := &metadatav1.Event{Kind: &metadatav1.Event_TopicDeleted{TopicDeleted: &metadatav1.TopicDeleted{}}}
	object := &metadatav1.Event{Kind: &metadatav1.Event_CombinedSegmentCommitted{CombinedSegmentCommitted: &metadatav1.CombinedSegmentCommitted{}}}
	committed := &metadatav1.Event{Kind: &metadatav1.Event_RangeCommitted{RangeCommitted: &metadatav1.RangeCommitted{}}}
	assert.Nil(t, membership(&metadatav1.Entry{Events: []*metadatav1.Event{object, committed}}))
	whole := &metadatav1.Entry{Events: []*metadatav1.Event{created}}
	assert.Same(t, whole, membership(whole))
	mixed := &metadatav1.Entry{Offset: 7, Events: []*metadatav1.Event{created, object, committed}}
	assert.Equal(t, []*metadatav1.Event{created}, membership(mixed).GetEvents())
	assert.Len(t, mixed.GetEvents(), 3, "the shared entry stays as it is")
}

// The followers of a log that is read again see every entry once, across the
// seam between the log and memory.
func TestMetadataCrossesTheSeam(t *testing.T) {
	l := newLog(t, 50, 2)
	h := NewHub(Options{MaxEntries: 10})
	require.NoError(t, h.Publish(l.entries[:60]))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	next := int64(0)
	done := errors.New("done")
	err := h.Metadata(ctx, time.Hour, reader(l.entries), &metadatav1.MetadataPosition{}, true, func(r *metadatav1.WatchMetadataResponse) error {
		require.Equal(t, next, r.GetEntry().GetOffset())
		if next == 30 { // while the old is read, the memory moves on
			require.NoError(t, h.Publish(l.entries[:80]))
		}
		if next++; next == 80 {
			return done
		}
		return nil
	})
	require.ErrorIs(t, err, done)
}

type reader []*metadatav1.Entry

func (r reader) EpochBefore(_ context.Context, offset int64) (int64, error) {
	if offset == 0 {
		return 0, nil
	}
	return r[offset-1].GetControllerEpoch(), nil
}

func (r reader) Entries(_ context.Context, from int64, fn func(*metadatav1.Entry) error) error {
	for _, e := range r[from:] {
		if err := fn(e); err != nil {
			return err
		}
	}
	return nil
}
