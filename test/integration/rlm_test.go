package integration_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/walobject"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/rlm"
	"github.com/braidlog/braid/test/cluster"
)

// gate holds the commits of one remote-log manager, before they are sent or after
// their verdict is there.
type gate struct {
	mu     sync.Mutex // guards all below
	before bool
	after  bool
	open   chan struct{}

	reached  chan *metadatav1.CommitCombinedSegmentRequest  // of commits that stopped
	verdicts chan *metadatav1.CommitCombinedSegmentResponse // of commits that had stopped
}

func newGate() *gate {
	return &gate{
		open:     make(chan struct{}),
		reached:  make(chan *metadatav1.CommitCombinedSegmentRequest, 64),
		verdicts: make(chan *metadatav1.CommitCombinedSegmentResponse, 64),
	}
}

// arm makes the next commits stop.
func (g *gate) arm(before, after bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.before, g.after = before, after
}

// release lets all go on, and those to come.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.before, g.after = false, false
	close(g.open)
	g.open = make(chan struct{})
}

func (g *gate) hold(ctx context.Context, armed bool, open chan struct{}, r *metadatav1.CommitCombinedSegmentRequest) {
	if !armed {
		return
	}
	select {
	case g.reached <- r:
	default:
	}
	select {
	case <-open:
	case <-ctx.Done():
	}
}

func (g *gate) wrap(next rlm.Committer) rlm.Committer { return &gated{g, next} }

type gated struct {
	g    *gate
	next rlm.Committer
}

func (c *gated) Commit(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	c.g.mu.Lock()
	before, after, open := c.g.before, c.g.after, c.g.open
	c.g.mu.Unlock()
	c.g.hold(ctx, before, open, r)
	resp, err := c.next.Commit(ctx, r)
	if before && err == nil {
		select {
		case c.g.verdicts <- resp:
		default:
		}
	}
	c.g.hold(ctx, after, open, r)
	return resp, err
}

// held waits until a commit stops at the gate.
func (g *gate) held(t *testing.T) *metadatav1.CommitCombinedSegmentRequest {
	t.Helper()
	select {
	case r := <-g.reached:
		return r
	case <-time.After(cluster.Patience):
		t.Fatal("no commit came to the gate")
		return nil
	}
}

func TestAnRLMKilledAroundItsCommitLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name      string
		after     bool // the commit was accepted before the death
		successor string
	}{
		{"after the PUT and before the commit, replaced by another", false, "other"},
		{"after the PUT and before the commit, started again", false, "same"},
		{"after the commit and before the ack, replaced by another", true, "other"},
		{"after the commit and before the ack, started again", true, "same"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := newGate()
			c := cluster.Start(t, cluster.Options{WrapCommitter: func(id int, next rlm.Committer) rlm.Committer {
				if id == 1 {
					return g.wrap(next)
				}
				return next
			}})
			c.CreateTopic("resend", 2)
			b := c.Broker(1)
			p := newProducer(t, c, b)
			mustAppend(t, c, b, "resend", 0, levelObject, p.batch(t, "first"))
			mustAppend(t, c, b, "resend", 1, levelObject, plain(t, "first"))

			g.arm(!tc.after, tc.after)
			batch := p.batch(t, "second-0", "second-1")
			calls := []*call{
				goAppend(c, b, "resend", 0, levelObject, 40*time.Second, batch),
				goAppend(c, b, "resend", 1, levelObject, 40*time.Second, plain(t, "second")),
			}
			commit := g.held(t)
			if tc.after {
				c.Eventually("the commit is in the log", func() bool {
					return len(c.Segments("resend", int(commit.GetRanges()[0].GetPartition().GetPartition()))) == 2
				})
			}
			c.RLM(1).Kill()
			g.release()
			if tc.successor == "other" {
				c.Add(cluster.RoleRLM)
			} else {
				c.RLM(1).Start()
			}
			first, err := calls[0].wait(t)
			require.NoError(t, err)
			assert.EqualValues(t, 1, first.GetBaseOffset())
			second, err := calls[1].wait(t)
			require.NoError(t, err)
			assert.EqualValues(t, 1, second.GetBaseOffset())

			names := referenced(t, c, "resend", 0, 3)
			for n := range referenced(t, c, "resend", 1, 2) {
				names[n] = true
			}
			object := objectName(commit)
			require.Contains(t, bucketObjects(t, c), object, "it was not uploaded before its commit")
			assert.Equal(t, tc.after, names[object], "referenced")
			repeat(t, c, b, "resend", first, batch)
			require.Equal(t, []string{"first", "second-0", "second-1"}, values(readAll(t, c, b, "resend", 0, 0)))
			require.Equal(t, []string{"first", "second"}, values(readAll(t, c, b, "resend", 1, 0)))
			// An empty broker reads the same from the bucket.
			empty := c.Add(cluster.RoleBroker)
			c.WaitReady(empty)
			require.Equal(t, []string{"first", "second"}, values(readAll(t, c, empty, "resend", 1, 0)))
			mustAppend(t, c, b, "resend", 0, levelObject, p.batch(t, "third"))
			referenced(t, c, "resend", 0, 4)
		})
	}
}

// The commit of a remote-log manager that the leader has given up comes late: its
// ranges are committed already, and it is told so.
func TestACommitThatComesLateChangesNothing(t *testing.T) {
	t.Parallel()
	gates := map[int]*gate{1: newGate(), 2: newGate()}
	c := cluster.Start(t, cluster.Options{
		RLMs:          2,
		WrapCommitter: func(id int, next rlm.Committer) rlm.Committer { return gates[id].wrap(next) },
		ChangeBroker:  func(cfg *broker.Config) { cfg.Partitions.VerdictTimeout = config.Duration(time.Second) },
	})
	c.CreateTopic("late", 1)
	b := c.Broker(1)
	mustAppend(t, c, b, "late", 0, levelObject, plain(t, "first"))
	used := int(explain(t, c, b, "late", 0).GetRlmId())
	require.Contains(t, gates, used)
	g := gates[used]
	g.arm(true, false)
	waiting := goAppend(c, b, "late", 0, levelObject, cluster.Patience, plain(t, "second"))
	commit := g.held(t)
	resp, err := waiting.wait(t)
	require.NoError(t, err, "the leader did not turn to the other remote-log manager")
	require.EqualValues(t, 1, resp.GetBaseOffset())
	mustAppend(t, c, b, "late", 0, levelObject, plain(t, "third"))
	require.NotEqual(t, used, int(explain(t, c, b, "late", 0).GetRlmId()))
	require.False(t, referenced(t, c, "late", 0, 3)[objectName(commit)])

	g.release()
	select {
	case v := <-g.verdicts:
		require.Len(t, v.GetVerdicts(), 1)
		assert.Equal(t, metadatav1.RangeOutcome_RANGE_OUTCOME_ALREADY_COMMITTED, v.GetVerdicts()[0].GetOutcome())
	case <-time.After(cluster.Patience):
		t.Fatal("the late commit got no verdict")
	}
	mustAppend(t, c, b, "late", 0, levelObject, plain(t, "fourth"))
	require.False(t, referenced(t, c, "late", 0, 4)[objectName(commit)])
	require.Equal(t, []string{"first", "second", "third", "fourth"}, values(readAll(t, c, b, "late", 0, 0)))
}

func objectName(r *metadatav1.CommitCombinedSegmentRequest) string {
	return walobject.Name(r.GetClusterId(), r.GetObject())
}
