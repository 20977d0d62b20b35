package state_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// A controller whose speculative entries did not get into the log throws its
// clone away: what it applied there must not show anywhere else.
func TestClonesGoTheirOwnWays(t *testing.T) {
	for _, ranges := range []int64{0, 1, 2, 3, 35, 36, 37, 71, 72, 100} { // around the borders of chunks
		m, ids := opened(t, 2)
		for i := range ranges {
			m.commit(m.command(1, i+1, m.descriptor(ids[0], (i+1)*10, 0)))
		}
		before := m.s.Digest()
		other := &machine{t: t, s: m.s.Clone()}
		for i := range int64(3) {
			d := other.descriptor(ids[0], (ranges+i+1)*10-5, 0)
			require.Equal(t, []outcome{accepted}, outcomes(other.commit(other.command(2, i+1, d))))
		}
		other.registerBroker(1)
		other.elect(ids[1], 2)
		other.openAt(ids[1], 0)
		other.do(other.s.DecideUpdateTopic(&metadatav1.UpdateTopicRequest{Name: "quakes", Set: map[string]string{"flush": "always"}}))
		other.createTopic("b", "00000000-0000-4000-8000-000000000002", 1)
		theirs := other.s.Digest()
		assert.Equal(t, before, m.s.Digest(), "%d ranges: the clone shows in the original", ranges)

		m.commit(m.command(1, ranges+1, m.descriptor(ids[0], ranges*10+7, 0)))
		m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "quakes"}))
		assert.Equal(t, theirs, other.s.Digest(), "%d ranges: the original shows in the clone", ranges)
		got, _ := other.s.Ranges(ids[0], ranges*10, 10)
		require.Len(t, got, 3)
		assert.Equal(t, ranges*10+5, got[0].GetEndOffset())
		assert.Equal(t, m.s.Digest(), m.replay().Digest())
	}
}
