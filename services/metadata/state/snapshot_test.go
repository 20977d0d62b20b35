package state_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/invariant"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/state"
)

func encode(t testing.TB, s *state.State) []byte {
	t.Helper()
	var b bytes.Buffer
	e, err := s.Encode(&b)
	require.NoError(t, err)
	require.EqualValues(t, b.Len(), e.Size)
	require.Equal(t, b.Bytes()[b.Len()-state.SnapshotSumSize:], e.Sum[:])
	require.Equal(t, sha256.Sum256(b.Bytes()[:b.Len()-state.SnapshotSumSize]), e.Sum)
	return b.Bytes()
}

func decode(t testing.TB, b []byte) *state.State {
	t.Helper()
	s, err := state.Decode(bytes.NewReader(b))
	require.NoError(t, err)
	return s
}

func applyAll(t testing.TB, s *state.State, log [][]byte) {
	t.Helper()
	for _, b := range log {
		e := &metadatav1.Entry{}
		require.NoError(t, proto.Unmarshal(b, e))
		require.NoError(t, s.Apply(e))
	}
}

// I10: the state from a snapshot and the tail behind it is the state from the
// whole log, wherever the snapshot was taken.
func TestSnapshotAndTailAreTheWholeLog(t *testing.T) {
	runs := 60
	if testing.Short() || invariant.Enabled {
		runs = 12
	}
	for seed := range uint64(runs) {
		w := &random{machine: newMachine(t, 3, 2), r: rand.New(rand.NewPCG(seed, 77)), seq: map[int32]int64{}, stats: map[string]int{},
			watched: map[state.PartitionID]*metadatav1.SegmentsReset{}}
		w.replica = w.replay()
		type taken struct {
			end   int64
			bytes []byte
		}
		var snapshots []taken
		for step := range 160 {
			w.step()
			if step%13 == int(seed%13) {
				b := encode(t, w.s)
				snapshots = append(snapshots, taken{w.s.EndOffset(), b})
				s := decode(t, b)
				require.Equal(t, w.s.Digest(), s.Digest(), "seed %d, step %d", seed, step)
				require.Equal(t, w.s.Position(), s.Position())
				require.Equal(t, b, encode(t, w.replica), "seed %d, step %d: two replicas, one state, different bytes", seed, step)
				require.Equal(t, b, encode(t, s.Clone()), "seed %d, step %d: written again it differs", seed, step)
			}
		}
		whole := encode(t, w.s)
		for _, snapshot := range snapshots {
			s := decode(t, snapshot.bytes)
			applyAll(t, s, w.log[snapshot.end:])
			require.Equal(t, w.s.Digest(), s.Digest(), "seed %d, snapshot at %d", seed, snapshot.end)
			require.Equal(t, whole, encode(t, s), "seed %d, snapshot at %d", seed, snapshot.end)
		}
	}
}

// A state from a snapshot judges as the one that it was taken from.
func TestADecodedStateDecidesAsTheOriginal(t *testing.T) {
	m, ids := opened(t, 2)
	first := m.command(1, 1, m.descriptor(ids[0], 10, 0))
	first.Crc32C = 77
	m.commit(first)
	m.commit(m.command(1, 2, m.descriptor(ids[0], 20, 0), m.descriptor(ids[1], 5, 100)))
	last := m.command(2, 1, m.descriptor(ids[1], 9, 0))
	m.commit(last)
	m.registerRLM(2)
	m.registerBroker(3)
	s := decode(t, encode(t, m.s))
	for _, cmd := range []*metadatav1.CommitCombinedSegmentRequest{first, last, m.command(1, 3, m.descriptor(ids[0], 30, 0))} {
		events, want, err := m.s.DecideCommit(cmd)
		require.NoError(t, err)
		got, response, err := s.DecideCommit(cmd)
		require.NoError(t, err)
		require.True(t, proto.Equal(want, response), "%v\n%v", want, response)
		require.Len(t, got, len(events))
	}
	wantEvents, wantIDs, err := m.s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: 1})
	require.NoError(t, err)
	gotEvents, gotIDs, err := s.DecideAllocateProducerIDs(&metadatav1.AllocateProducerIdsRequest{BrokerId: 1, BrokerEpoch: 1})
	require.NoError(t, err)
	require.Equal(t, wantIDs.String(), gotIDs.String())
	require.Equal(t, fmt.Sprint(wantEvents), fmt.Sprint(gotEvents))
	_, err = s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "fresh", PartitionCount: 1}, topicID)
	require.ErrorAs(t, err, new(*state.TopicExistsError), "an id stays taken")
}

// KAFKA-14203: a state that met an entry it can't apply must not be kept.
func TestNoSnapshotOfAStateThatFailedOrHasNotBegun(t *testing.T) {
	_, err := state.New().Encode(io.Discard)
	require.Error(t, err)
	m, _ := opened(t, 1)
	require.Error(t, m.s.Apply(&metadatav1.Entry{Offset: m.s.EndOffset(), Incarnation: incarnation, FeatureLevel: 1}))
	_, err = m.s.Encode(io.Discard)
	require.ErrorAs(t, err, new(*state.BadEntryError))
}

// many is a snapshot of several frames.
func many(t testing.TB) []byte {
	m, ids := opened(t, 3)
	for i := range int64(1200) {
		m.commit(m.command(1, i+1, m.descriptor(ids[0], (i+1)*3, 0), m.descriptor(ids[1], i+1, 100)))
	}
	m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "quakes"}))
	id := m.createTopic("quakes", "00000000-0000-4000-8000-0000000000aa", 2)
	m.openAt(id, 0)
	for i := range int64(6000) {
		m.commit(m.command(2, i+1, m.descriptor(id, i+1, 0)))
	}
	return encode(t, m.s)
}

// B128, B140: whatever is cut off, flipped, doubled, left out or added is found,
// and nothing of it is used.
func TestEveryDamageIsFound(t *testing.T) {
	whole := many(t)
	frames := framesOf(whole)
	require.Greater(t, len(frames), 3)
	refuse := func(what string, b []byte) {
		t.Helper()
		s, err := state.Decode(bytes.NewReader(b))
		require.ErrorAs(t, err, new(*state.SnapshotError), what)
		require.Nil(t, s)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		n := r.IntN(len(whole))
		refuse(fmt.Sprintf("cut at %d", n), whole[:n])
		b := bytes.Clone(whole)
		b[n] ^= 1 << r.IntN(8)
		refuse(fmt.Sprintf("bit of byte %d", n), b)
	}
	for i, f := range frames {
		refuse(fmt.Sprintf("cut before frame %d", i), whole[:f.from])
		refuse(fmt.Sprintf("without frame %d", i), append(bytes.Clone(whole[:f.from]), whole[f.to:]...))
		refuse(fmt.Sprintf("frame %d twice", i), append(bytes.Clone(whole[:f.to]), whole[f.from:]...))
	}
	refuse("cut behind the end frame", whole[:len(whole)-state.SnapshotSumSize])
	refuse("a byte more", append(bytes.Clone(whole), 0))
	refuse("two of them", append(bytes.Clone(whole), whole...))
	refuse("nothing", nil)
	broken := errors.New("disk gone")
	_, err := state.Decode(io.MultiReader(bytes.NewReader(whole[:5000]), iotest.ErrReader(broken)))
	require.ErrorIs(t, err, broken)
	_, err = state.Decode(iotest.OneByteReader(bytes.NewReader(whole)))
	require.NoError(t, err)
	_, err = state.Decode(io.MultiReader(bytes.NewReader(whole), iotest.ErrReader(broken)))
	require.ErrorIs(t, err, broken, "the end was not seen")
}

func TestALaterVersionIsNotGuessedAt(t *testing.T) {
	m, _ := opened(t, 1)
	b := encode(t, m.s)
	b[9]++ // of the format
	_, err := state.Decode(bytes.NewReader(seal(b)))
	require.ErrorContains(t, err, "format version 2")

	// Feature level 1 stands right behind the cluster's id and the incarnation.
	b = encode(t, m.s)
	at := bytes.Index(b, []byte(clusterID)) + len(clusterID)
	_, n := binary.Uvarint(b[at:])
	require.EqualValues(t, 1, b[at+n])
	b[at+n] = 2
	_, err = state.Decode(bytes.NewReader(seal(b)))
	require.ErrorAs(t, err, new(*state.UnknownEventError))
}

type span struct{ from, to int }

// framesOf finds the frames by their sizes.
func framesOf(b []byte) []span {
	var out []span
	for at := 16; at+12 <= len(b)-state.SnapshotSumSize; {
		size := int(binary.BigEndian.Uint32(b[at+4:]))
		if size > len(b)-state.SnapshotSumSize-at-12 {
			break
		}
		out = append(out, span{at, at + 12 + size})
		at += 12 + size
	}
	return out
}

// seal makes all checksums right again, so that what they protect can be tested.
func seal(b []byte) []byte {
	b = bytes.Clone(b)
	table := crc32.MakeTable(crc32.Castagnoli)
	for i, f := range framesOf(b) {
		sum := crc32.Update(0, table, binary.BigEndian.AppendUint64(nil, uint64(i)))
		sum = crc32.Update(sum, table, b[f.from:f.from+8])
		sum = crc32.Update(sum, table, b[f.from+12:f.to])
		binary.BigEndian.PutUint32(b[f.from+8:], sum)
	}
	if n := len(b) - state.SnapshotSumSize; n >= 0 {
		sum := sha256.Sum256(b[:n])
		copy(b[n:], sum[:])
	}
	return b
}

// FuzzDecode changes bytes below the checksums: a decoder that accepts them has
// a state that writes the very same bytes, applies entries and answers queries.
func FuzzDecode(f *testing.F) {
	m, ids := opened(f, 2)
	f.Add(encode(f, m.s))
	for i := range int64(3) {
		m.commit(m.command(1, i+1, m.descriptor(ids[0], (i+1)*3, 0), m.descriptor(ids[1], i+1, 100)))
	}
	m.registerRLM(1)
	f.Add(encode(f, m.s))
	m.createTopic("b", "00000000-0000-4000-8000-000000000002", 1)
	m.do(m.s.DecideDeleteTopic(&metadatav1.DeleteTopicRequest{Name: "quakes"}))
	f.Add(encode(f, m.s))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = seal(b)
		s, err := state.Decode(bytes.NewReader(b))
		if err != nil {
			require.ErrorAs(t, err, new(*state.SnapshotError))
			return
		}
		assert.Equal(t, b, encode(t, s))
		assert.Equal(t, s.Digest(), s.Clone().Digest())
		s.Image(10)
		s.Partitions(func(id state.PartitionID) bool {
			s.Reset(id, 0, 10)
			_, _, _ = s.ChooseLeader(id, fresh)
			return true
		})
		_, _ = s.DecideCreateTopic(&metadatav1.CreateTopicRequest{Name: "fuzz", PartitionCount: 3}, topicID)
	})
}
