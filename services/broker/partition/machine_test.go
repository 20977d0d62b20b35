package partition_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/partition"
)

const (
	self  = int32(1)
	epoch = int64(50) // of this broker's registration
	inc   = uint32(7)
)

func h(n byte) chainhash.Hash { return chainhash.Hash{n, 1} }

func lead(e int32) lineage.Leadership { return lineage.Leadership{Incarnation: inc, LeaderEpoch: e} }

func entry(e int32, start int64) lineage.Entry {
	return lineage.Entry{Leadership: lead(e), StartOffset: start}
}

func fence(e int32) partition.Fence {
	return partition.Fence{Incarnation: inc, LeaderEpoch: e, BrokerEpoch: epoch}
}

// foreign is the fence of another broker.
func foreign(e int32) partition.Fence {
	return partition.Fence{Incarnation: inc, LeaderEpoch: e, BrokerEpoch: 999}
}

// view is an election of this broker under epoch 2 over a log that epoch 1
// wrote, committed to 100.
func view() partition.View {
	return partition.View{
		Fence: fence(2), Leader: self, Lineage: lineage.Lineage{entry(1, 0)}, ObjectEnd: 100, ObjectHash: h(100),
	}
}

// tail is a log of epoch 1 that ends at 120.
func tail() partition.LogFacts {
	return partition.LogFacts{Start: 0, End: 120, Lineage: lineage.Lineage{entry(1, 0)}}
}

// active is a machine that leads from 120 on, with 20 records of 10 bytes each
// above the object end.
func active(t *testing.T) *partition.Machine {
	t.Helper()
	m := partition.New(self, epoch, tail())
	fx := m.Step(partition.ViewReset{View: view()})
	r := one[partition.Reconcile](t, fx)
	require.False(t, r.Reset)
	require.EqualValues(t, 120, r.At, "the tail continues the lineage")
	fx = m.Step(partition.Reconciled{Attempt: r.Attempt, Log: tail(), Hash: h(100), TailBytes: 200})
	open := one[partition.Open](t, fx)
	require.EqualValues(t, 120, open.Start)
	fx = m.Step(partition.OpenAnswered{Fence: fence(2), Accepted: true})
	a := one[partition.Activate](t, fx)
	require.Equal(t, entry(2, 120), a.Entry)
	require.EqualValues(t, 100, one[partition.Advance](t, fx).ObjectEnd)
	require.EqualValues(t, 120, one[partition.RecoverProducers](t, fx).End)
	require.Equal(t, partition.Feed{From: 100, Run: 1}, one[partition.Feed](t, fx))
	return m
}

// one is the only effect of its kind.
func one[T partition.Effect](t *testing.T, fx []partition.Effect) T {
	t.Helper()
	var out []T
	for _, e := range fx {
		if v, ok := e.(T); ok {
			out = append(out, v)
		}
	}
	require.Len(t, out, 1, "%T in %v", *new(T), fx)
	return out[0]
}

func none[T partition.Effect](t *testing.T, fx []partition.Effect) {
	t.Helper()
	for _, e := range fx {
		_, ok := e.(T)
		require.False(t, ok, "%T in %v", *new(T), fx)
	}
}

func state(t *testing.T, m *partition.Machine, want partition.State) {
	t.Helper()
	got, reason := m.State()
	require.Equal(t, want, got, reason)
}

func TestReconcileComparesLineages(t *testing.T) {
	tests := map[string]struct {
		log    partition.LogFacts
		change func(*partition.View)
		reset  bool
		at     int64
	}{
		"an empty log starts at the object end":         {log: partition.LogFacts{}, reset: true, at: 100},
		"a new partition needs nothing":                 {change: func(v *partition.View) { v.ObjectEnd, v.ObjectHash, v.Lineage = 0, chainhash.Hash{}, nil }},
		"a log short of the object end is of no use":    {log: partition.LogFacts{End: 99, Lineage: lineage.Lineage{entry(1, 0)}}, reset: true, at: 100},
		"a log that ends there is whole":                {log: partition.LogFacts{End: 100, Lineage: lineage.Lineage{entry(1, 0)}}, at: 100},
		"a tail that continues the lineage stays":       {log: tail(), at: 120},
		"under an exact start the tail is cut":          {log: tail(), change: func(v *partition.View) { v.Exact = true }, at: 100},
		"a tail of another branch is cut at the fork":   {log: partition.LogFacts{End: 120, Lineage: lineage.Lineage{entry(1, 0), entry(2, 110)}}, change: func(v *partition.View) { v.Fence = fence(4); v.Lineage = lineage.Lineage{entry(1, 0), entry(3, 105)} }, at: 105},
		"a fork below the object end leaves nothing":    {log: partition.LogFacts{End: 120, Lineage: lineage.Lineage{entry(1, 0)}}, change: func(v *partition.View) { v.Fence = fence(4); v.Lineage = lineage.Lineage{entry(1, 0), entry(3, 90)} }, reset: true, at: 100},
		"a log that begins above the object end is off": {log: partition.LogFacts{Start: 110, End: 120, Lineage: lineage.Lineage{entry(1, 0)}}, reset: true, at: 100},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			v := view()
			if tt.change != nil {
				tt.change(&v)
			}
			m := partition.New(self, epoch, tt.log)
			r := one[partition.Reconcile](t, m.Step(partition.ViewReset{View: v}))
			require.Equal(t, tt.reset, r.Reset)
			require.Equal(t, tt.at, r.At)
			require.Equal(t, v.ObjectHash, r.Hash)
			state(t, m, partition.Recovering)
			_, _, err := m.Admit()
			require.Error(t, err, "nothing is appended before the verdict (H3)")
		})
	}
}

func TestRightLineageOverOtherBytesStartsAgain(t *testing.T) {
	m := partition.New(self, epoch, tail())
	r := one[partition.Reconcile](t, m.Step(partition.ViewReset{View: view()}))
	again := one[partition.Reconcile](t, m.Step(partition.Reconciled{Attempt: r.Attempt, Log: tail(), Hash: h(1), TailBytes: 200}))
	require.True(t, again.Reset)
	require.EqualValues(t, 100, again.At)
	require.Greater(t, again.Attempt, r.Attempt)
	none[partition.Open](t, m.Step(partition.Reconciled{Attempt: r.Attempt, Log: tail(), Hash: h(100)})) // late
	open := one[partition.Open](t, m.Step(partition.Reconciled{
		Attempt: again.Attempt, Hash: h(100), Log: partition.LogFacts{Start: 100, End: 100, Lineage: lineage.Lineage{entry(1, 0)}},
	}))
	require.EqualValues(t, 100, open.Start)
	require.Zero(t, m.Unuploaded())

	// A log that can't even begin there is out of service.
	m = partition.New(self, epoch, partition.LogFacts{})
	r = one[partition.Reconcile](t, m.Step(partition.ViewReset{View: view()}))
	require.Empty(t, m.Step(partition.Reconciled{Attempt: r.Attempt, Hash: h(1), Log: partition.LogFacts{Start: 100, End: 100}}))
	state(t, m, partition.Offline)
}

func TestOpening(t *testing.T) {
	recovering := func(t *testing.T) *partition.Machine {
		m := partition.New(self, epoch, tail())
		r := one[partition.Reconcile](t, m.Step(partition.ViewReset{View: view()}))
		one[partition.Open](t, m.Step(partition.Reconciled{Attempt: r.Attempt, Log: tail(), Hash: h(100), TailBytes: 200}))
		return m
	}
	t.Run("the stream may overtake the answer", func(t *testing.T) {
		m := recovering(t)
		fx := m.Step(partition.EpochOpened{Fence: fence(2), Start: 120, Lineage: lineage.Lineage{entry(1, 0), entry(2, 120)}})
		one[partition.Activate](t, fx)
		state(t, m, partition.Active)
		require.Empty(t, m.Step(partition.OpenAnswered{Fence: fence(2), Accepted: true}))
	})
	t.Run("refused: another election", func(t *testing.T) {
		m := recovering(t)
		fx := m.Step(partition.OpenAnswered{Fence: fence(2), Reason: "no"})
		require.Equal(t, fence(2), one[partition.RequestElection](t, fx).Fence)
		state(t, m, partition.Resigning)
		one[partition.Reconcile](t, m.Step(partition.FenceRaised{Fence: fence(3), Leader: self}))
	})
	t.Run("an answer to an older fence is history", func(t *testing.T) {
		m := recovering(t)
		m.Step(partition.FenceRaised{Fence: fence(3), Leader: self})
		require.Empty(t, m.Step(partition.OpenAnswered{Fence: fence(2), Accepted: true}))
		state(t, m, partition.Recovering)
	})
	t.Run("opened with another start by somebody with our fence", func(t *testing.T) {
		m := recovering(t)
		fx := m.Step(partition.EpochOpened{Fence: fence(2), Start: 100, Lineage: lineage.Lineage{entry(1, 0), entry(2, 100)}})
		one[partition.RequestElection](t, fx)
		state(t, m, partition.Resigning)
	})
	t.Run("an epoch is never resumed (I2)", func(t *testing.T) {
		v := view()
		v.Opened, v.EpochStart = true, 120
		m := partition.New(self, epoch, tail())
		one[partition.RequestElection](t, m.Step(partition.ViewReset{View: v}))
		state(t, m, partition.Resigning)
	})
	t.Run("a fence of an earlier registration is not ours (H2)", func(t *testing.T) {
		m := partition.New(self, epoch+1, tail())
		require.Empty(t, m.Step(partition.ViewReset{View: view()}))
		state(t, m, partition.Truncating)
	})
}

func TestVerdicts(t *testing.T) {
	verdict := func(o partition.Outcome, change ...func(*partition.Verdict)) partition.Verdict {
		v := partition.Verdict{
			Run: 1, Base: 100, End: 110, Outcome: o, ObjectEnd: 110, ObjectHash: h(110), Fence: fence(2), Opened: true, NextEpochStart: -1,
		}
		for _, fn := range change {
			fn(&v)
		}
		return v
	}
	at := func(end int64, hash chainhash.Hash) func(*partition.Verdict) {
		return func(v *partition.Verdict) { v.ObjectEnd, v.ObjectHash = end, hash }
	}
	fenced := func(e int32) func(*partition.Verdict) {
		return func(v *partition.Verdict) { v.Fence = foreign(e) }
	}
	tests := map[string]struct {
		verdict partition.Verdict
		want    partition.State
		advance int64 // -1 for none
		feed    int64 // -1 for none
		kept    int64 // of Deposed, -1 for none
	}{
		"accepted":                                   {verdict(partition.Accepted), partition.Active, 110, -1, -1},
		"accepted, other bytes":                      {verdict(partition.Accepted, at(110, h(9))), partition.Resigning, -1, -1, 100},
		"accepted under a newer fence":               {verdict(partition.Accepted, fenced(3)), partition.Active, -1, -1, -1},
		"accepted of an older run":                   {verdict(partition.Accepted, func(v *partition.Verdict) { v.Run = 0 }), partition.Active, 110, -1, -1},
		"accepted beyond this log":                   {verdict(partition.Accepted, at(130, h(130))), partition.Resigning, -1, -1, 100},
		"gap":                                        {verdict(partition.Gap, at(100, h(100))), partition.Active, -1, 100, -1},
		"gap of an older run":                        {verdict(partition.Gap, func(v *partition.Verdict) { v.Run = 0 }), partition.Active, -1, -1, -1},
		"not judged":                                 {verdict(partition.NotJudged, at(100, h(100))), partition.Active, -1, 100, -1},
		"committed already, by ourselves":            {verdict(partition.AlreadyCommitted), partition.Active, 110, 110, -1},
		"committed already, nothing new":             {verdict(partition.AlreadyCommitted, at(100, h(100))), partition.Active, -1, 100, -1},
		"committed already, under a newer fence":     {verdict(partition.AlreadyCommitted, fenced(3)), partition.Idle, 110, -1, 110},
		"fenced, nobody opened":                      {verdict(partition.Fenced, fenced(3), at(110, h(110))), partition.Idle, 110, -1, 110},
		"fenced, the next epoch began below the end": {verdict(partition.Fenced, fenced(3), at(140, h(140)), func(v *partition.Verdict) { v.NextEpochStart = 105 }), partition.Idle, 105, -1, 105},
		"fenced, the next epoch began at the end":    {verdict(partition.Fenced, fenced(3), at(100, h(100)), func(v *partition.Verdict) { v.NextEpochStart = 100 }), partition.Idle, -1, -1, 100},
		"fenced by our own fence":                    {verdict(partition.Fenced), partition.Resigning, -1, -1, 100},
		"another chain":                              {verdict(partition.ChainMismatch), partition.Resigning, -1, -1, 100},
		"unknown partition":                          {verdict(partition.UnknownPartition), partition.Resigning, -1, -1, 100},
		"malformed":                                  {verdict(partition.Malformed), partition.Resigning, -1, -1, 100},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m := active(t)
			m.Sent(110, h(110), 100)
			fx := m.Step(partition.VerdictGiven{Verdict: tt.verdict})
			state(t, m, tt.want)
			if tt.advance < 0 {
				none[partition.Advance](t, fx)
			} else {
				require.Equal(t, tt.advance, one[partition.Advance](t, fx).ObjectEnd)
			}
			if tt.feed < 0 {
				none[partition.Feed](t, fx)
			} else {
				require.Equal(t, partition.Feed{From: tt.feed, Run: 2}, one[partition.Feed](t, fx))
				from, to, ok := m.Unsent()
				require.True(t, ok)
				require.Equal(t, tt.feed, from)
				require.EqualValues(t, 120, to)
			}
			if tt.kept < 0 {
				none[partition.Deposed](t, fx)
			} else {
				require.Equal(t, tt.kept, one[partition.Deposed](t, fx).Kept)
			}
			if tt.want == partition.Resigning {
				require.Equal(t, fence(2), one[partition.RequestElection](t, fx).Fence)
			}
		})
	}
}

// An object end that is no border of ours is adopted only once the log was found
// to hold the same bytes (H2).
func TestObjectEndIsAdoptedNotBelieved(t *testing.T) {
	m := active(t)
	m.Sent(110, h(110), 100)
	ask := one[partition.CheckHash](t, m.Step(partition.RangeCommitted{Base: 100, End: 105, EndHash: h(105)}))
	require.EqualValues(t, 105, ask.At)
	require.Empty(t, m.Step(partition.RangeCommitted{Base: 100, End: 105, EndHash: h(105)}), "asked already")
	hw, _ := m.HighWatermark()
	require.EqualValues(t, 100, hw)
	// A higher end that is a border of ours decides the lower one with it.
	require.EqualValues(t, 110, one[partition.Advance](t, m.Step(partition.RangeCommitted{Base: 105, End: 110, EndHash: h(110)})).ObjectEnd)
	require.Empty(t, m.Step(partition.Hashed{Attempt: ask.Attempt, Hash: h(105), TailBytes: 150}))
	require.EqualValues(t, 100, m.Unuploaded())

	ask = one[partition.CheckHash](t, m.Step(partition.RangeCommitted{Base: 110, End: 115, EndHash: h(115)}))
	fx := m.Step(partition.Hashed{Attempt: ask.Attempt, Hash: h(115), TailBytes: 50})
	require.EqualValues(t, 115, one[partition.Advance](t, fx).ObjectEnd)
	require.EqualValues(t, 50, m.Unuploaded())
	from, _, _ := m.Unsent()
	require.EqualValues(t, 115, from, "what is committed is not sent")

	ask = one[partition.CheckHash](t, m.Step(partition.RangeCommitted{Base: 115, End: 117, EndHash: h(117)}))
	fx = m.Step(partition.Hashed{Attempt: ask.Attempt, Hash: h(1), TailBytes: 30})
	one[partition.RequestElection](t, fx)
	require.EqualValues(t, 115, one[partition.Deposed](t, fx).Kept)
}

func TestFeedLostBeginsAtTheObjectEnd(t *testing.T) {
	m := active(t)
	m.Sent(110, h(110), 100)
	m.Sent(120, h(120), 100)
	_, _, ok := m.Unsent()
	require.False(t, ok)
	require.Equal(t, partition.Feed{From: 100, Run: 2}, one[partition.Feed](t, m.Step(partition.FeedLost{})))
	// Borders stay facts across runs.
	fx := m.Step(partition.RangeCommitted{Base: 100, End: 110, EndHash: h(110)})
	require.EqualValues(t, 110, one[partition.Advance](t, fx).ObjectEnd)
	require.EqualValues(t, 100, m.Unuploaded())
	from, _, _ := m.Unsent()
	require.EqualValues(t, 110, from)
	require.Empty(t, partition.New(self, epoch, tail()).Step(partition.FeedLost{}))
}

func TestElectionsDepose(t *testing.T) {
	tests := map[string]struct {
		event     partition.Event
		want      partition.State
		reconcile bool
	}{
		"another leader":       {partition.FenceRaised{Fence: foreign(3), Leader: 2}, partition.Truncating, false},
		"the same one again":   {partition.FenceRaised{Fence: fence(3), Leader: self}, partition.Recovering, true},
		"a new registration":   {partition.Registered{BrokerEpoch: epoch + 1}, partition.Truncating, false},
		"a view with a fence":  {partition.ViewReset{View: partition.View{Fence: foreign(3), Leader: 2, ObjectEnd: 100}}, partition.Truncating, false},
		"the topic is deleted": {partition.Removed{}, partition.Idle, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m := active(t)
			fx := m.Step(tt.event)
			require.EqualValues(t, 100, one[partition.Deposed](t, fx).Kept)
			state(t, m, tt.want)
			if tt.reconcile {
				require.EqualValues(t, 120, one[partition.Reconcile](t, fx).At)
			} else {
				none[partition.Reconcile](t, fx)
			}
			_, _, err := m.Admit()
			var refused *partition.NotActiveError
			require.ErrorAs(t, err, &refused)
		})
	}
	t.Run("removed for good", func(t *testing.T) {
		m := active(t)
		one[partition.Forget](t, m.Step(partition.Removed{}))
		require.Empty(t, m.Step(partition.FenceRaised{Fence: fence(3), Leader: self}))
	})
}

func TestOldNewsChangesNothing(t *testing.T) {
	for name, ev := range map[string]partition.Event{
		"an older fence":           partition.FenceRaised{Fence: foreign(1), Leader: 2},
		"the same fence":           partition.FenceRaised{Fence: fence(2), Leader: self},
		"an older view":            partition.ViewReset{View: partition.View{Fence: foreign(1), Leader: 2}},
		"a view not opened yet":    partition.ViewReset{View: view()},
		"an opening of ours":       partition.EpochOpened{Fence: fence(2), Start: 120},
		"an opening of another":    partition.EpochOpened{Fence: foreign(1), Start: 50},
		"a range below":            partition.RangeCommitted{Base: 80, End: 100, EndHash: h(100)},
		"a late reconciliation":    partition.Reconciled{Attempt: 1, Log: partition.LogFacts{}},
		"a late hash":              partition.Hashed{Attempt: 1, Hash: h(1)},
		"producers of another one": partition.ProducersRecovered{Fence: fence(1)},
	} {
		t.Run(name, func(t *testing.T) {
			m := active(t)
			require.Empty(t, m.Step(ev))
			state(t, m, partition.Active)
			hw, known := m.HighWatermark()
			require.True(t, known)
			require.EqualValues(t, 100, hw)
			require.False(t, m.ProducersReady())
		})
	}
}

func TestFailedLogIsOutOfService(t *testing.T) {
	m := active(t)
	fx := m.Step(partition.LogFailed{Err: errors.New("disk")})
	require.EqualValues(t, 100, one[partition.Deposed](t, fx).Kept)
	one[partition.RequestElection](t, fx)
	state(t, m, partition.Offline)
	for _, ev := range []partition.Event{
		partition.FenceRaised{Fence: fence(3), Leader: self}, partition.Registered{BrokerEpoch: 60},
		partition.ViewReset{View: partition.View{Fence: foreign(4), Leader: 2, ObjectEnd: 140, ObjectHash: h(140)}},
	} {
		require.Empty(t, m.Step(ev))
		state(t, m, partition.Offline)
	}
	// An idle one says nothing to anybody.
	m = partition.New(self, epoch, tail())
	require.Empty(t, m.Step(partition.LogFailed{Err: errors.New("disk")}))
	state(t, m, partition.Offline)
}

func TestBytesAreCounted(t *testing.T) {
	m := active(t)
	require.EqualValues(t, 200, m.Unuploaded(), "the kept tail")
	base, who, err := m.Admit()
	require.NoError(t, err)
	require.EqualValues(t, 120, base)
	require.Equal(t, lead(2), who)
	m.Appended(130, 70)
	require.EqualValues(t, 270, m.Unuploaded())
	m.Sent(120, h(120), 200)
	m.Sent(130, h(130), 70)
	m.Step(partition.RangeCommitted{Base: 100, End: 120, EndHash: h(120)})
	require.EqualValues(t, 70, m.Unuploaded())
	m.Step(partition.RangeCommitted{Base: 120, End: 130, EndHash: h(130)})
	require.Zero(t, m.Unuploaded())
	require.True(t, func() bool { m.Step(partition.ProducersRecovered{Fence: fence(2)}); return m.ProducersReady() }())
}

func TestJudgeAndLevels(t *testing.T) {
	m := active(t)
	now := 10 * time.Second
	m.ConfirmSession(9*time.Second, 4*time.Second)
	m.ConfirmSession(2*time.Second, 4*time.Second) // an older one takes nothing back
	tests := []struct {
		end  int64
		l    lineage.Leadership
		want partition.Standing
		fork int64
	}{
		{100, lead(1), partition.Held, 0},
		{120, lead(1), partition.Held, 0},
		{121, lead(1), partition.Truncated, 120},
		{120, lead(2), partition.Held, 0},
		{121, lead(2), partition.Beyond, 0},
		{50, lead(0), partition.Truncated, 0},
		{130, lineage.Leadership{Incarnation: inc + 1, LeaderEpoch: 1}, partition.Truncated, 100},
		{0, lead(1), partition.Expired, 0},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%d of %v", tt.end, tt.l), func(t *testing.T) {
			got, fork := m.Judge(tt.end, tt.l)
			require.Equal(t, tt.want, got)
			require.Equal(t, tt.fork, fork)
		})
	}
	require.Equal(t, []partition.Level{partition.Leader, partition.Object}, m.Levels(nil, 100, now))
	require.Equal(t, []partition.Level{partition.Leader}, m.Levels(nil, 101, now))
	require.Equal(t, []partition.Level{partition.Object}, m.Levels(nil, 100, 13*time.Second), "LEADER ends with the session (H14)")
	require.Empty(t, m.Levels(nil, 121, 13*time.Second))
	m.Step(partition.FenceRaised{Fence: foreign(3), Leader: 2})
	got, _ := m.Judge(100, lead(1))
	require.Equal(t, partition.Unsettled, got)
	require.Empty(t, m.Levels(nil, 100, now))
}

// What the metadata says of the object end is kept through a deposition, although this leader had not yet found its own
// bytes there: the next reconciliation must not go by old news.
func TestAnObjectEndThatWasNotAdoptedIsNotForgotten(t *testing.T) {
	m := active(t)
	one[partition.CheckHash](t, m.Step(partition.RangeCommitted{Base: 100, End: 110, EndHash: h(110)}))
	v, _ := m.View()
	require.EqualValues(t, 100, v.ObjectEnd, "a leader shows what it has checked")
	require.Equal(t, h(100), v.ObjectHash)
	r := one[partition.Reconcile](t, m.Step(partition.FenceRaised{Fence: fence(3), Leader: self}))
	require.EqualValues(t, 110, r.ObjectEnd)
	require.Equal(t, h(110), r.Hash)
}
