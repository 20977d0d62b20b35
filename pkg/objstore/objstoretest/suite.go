package objstoretest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/objstore"
)

// Skip maps the names of cases that a store can't pass to the reason.
type Skip map[string]string

// callTimeout bounds every case; no case waits on purpose.
const callTimeout = 60 * time.Second

type suiteCase struct {
	name string
	run  func(ctx context.Context, t *testing.T, s objstore.Store)
}

// Run tests the stores that open returns against the contract. open is called
// once per case and returns a store without objects, which the case may fill.
func Run(t *testing.T, open func(t *testing.T) objstore.Store, skips ...Skip) {
	t.Helper()
	reasons := make(map[string]string)
	for _, s := range skips {
		for name, reason := range s {
			reasons[name] = reason
		}
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if reason, skip := reasons[c.name]; skip {
				t.Skip(reason)
			}
			ctx, cancel := context.WithTimeout(t.Context(), callTimeout)
			defer cancel()
			c.run(ctx, t, open(t))
		})
		delete(reasons, c.name)
	}
	for name := range reasons {
		t.Errorf("there is no case %q to skip", name)
	}
}

var cases = []suiteCase{
	{"Create/ReturnsWhatIsStored", createReturnsWhatIsStored},
	{"Create/Empty", createEmpty},
	{"Create/OnlyOnce", createOnlyOnce},
	{"Create/ManyPartsAreOneObject", createManyParts},
	{"Create/RacingCreatorsHaveOneWinner", createRace},
	{"Create/LyingBodyStoresNothing", createLyingBody},
	{"Create/BodyIsOpenedOnceAndClosed", createOpensOnce},
	{"Create/CancelledContext", createCancelled},
	{"Names/Valid", validNames},
	{"Names/Invalid", invalidNames},
	{"Read/Ranges", readRanges},
	{"Read/OutsideTheObject", readOutside},
	{"Read/Suffixes", readSuffixes},
	{"Read/Streams", readStreams},
	{"Read/InvalidArguments", readInvalid},
	{"Read/NotFound", notFound},
	{"Read/Concurrent", readConcurrently},
	{"Read/CancelledContext", readCancelled},
	{"Attrs/SameAsCreatedAndListed", attrsAgree},
	{"List/OrderAndPrefix", listOrder},
	{"List/StartAfter", listStartAfter},
	{"List/Pages", listPages},
	{"List/NothingThere", listNothing},
	{"List/SeesChangesAtOnce", listConsistent},
	{"Delete/AbsentSucceeds", deleteAbsent},
	{"Delete/Generation", deleteGeneration},
	{"Delete/WrongGeneration", deleteWrongGeneration},
	{"Delete/GoneForAllReads", deleteGone},
	{"Delete/RecreatedHasHigherGeneration", recreate},
	{"Delete/OldGenerationSparesTheNewObject", deleteOldGeneration},
	{"Delete/RacingDeletersAndCreators", deleteRace},
	{"Bucket/Settings", bucketSettings},
}

// content returns n bytes that depend on seed.
func content(seed, n int) []byte {
	r := rand.New(rand.NewPCG(uint64(seed), uint64(n)))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func put(ctx context.Context, t *testing.T, s objstore.Creator, name string, b []byte) objstore.Attrs {
	t.Helper()
	a, err := s.Create(ctx, name, objstore.NewParts(b))
	require.NoError(t, err)
	return a
}

// read returns the whole object.
func read(ctx context.Context, t *testing.T, s objstore.Reader, name string) []byte {
	t.Helper()
	r, err := s.OpenRange(ctx, name, 0, objstore.ToEnd)
	require.NoError(t, err)
	b, err := io.ReadAll(r)
	require.NoError(t, err)
	require.NoError(t, r.Close())
	return b
}

// requireKind checks the kind and the form of an error.
func requireKind(t *testing.T, err, kind error) {
	t.Helper()
	require.ErrorIs(t, err, kind)
	var e *objstore.Error
	require.ErrorAs(t, err, &e, "every error is an *objstore.Error")
}

func createReturnsWhatIsStored(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(1, 10_000)
	a := put(ctx, t, s, "dir/a", b)
	assert.Equal(t, "dir/a", a.Name)
	assert.EqualValues(t, len(b), a.Size)
	assert.Equal(t, objstore.CRC32C(b), a.CRC32C)
	assert.Positive(t, a.Generation)
	assert.EqualValues(t, 1, a.Metageneration)
	assert.False(t, a.Created.IsZero())
	assert.Equal(t, b, read(ctx, t, s, "dir/a"))
}

func createEmpty(ctx context.Context, t *testing.T, s objstore.Store) {
	a := put(ctx, t, s, "empty", nil)
	assert.Zero(t, a.Size)
	assert.Zero(t, a.CRC32C)
	assert.Empty(t, read(ctx, t, s, "empty"))
}

func createOnlyOnce(ctx context.Context, t *testing.T, s objstore.Store) {
	first := put(ctx, t, s, "a", []byte("first"))
	for _, b := range []string{"second", "first", ""} {
		_, err := s.Create(ctx, "a", objstore.NewParts([]byte(b)))
		requireKind(t, err, objstore.ErrExists)
		require.NotErrorIs(t, err, objstore.ErrAmbiguous)
	}
	after, err := s.Attrs(ctx, "a")
	require.NoError(t, err)
	assert.Equal(t, first.Generation, after.Generation)
	assert.Equal(t, "first", string(read(ctx, t, s, "a")))
}

func createManyParts(ctx context.Context, t *testing.T, s objstore.Store) {
	whole := content(2, 300_000)
	var parts [][]byte
	for rest, n := whole, 1; len(rest) > 0; n = n*3 + 1 {
		k := min(n, len(rest))
		parts = append(parts, rest[:k], nil) // empty parts are allowed
		rest = rest[k:]
	}
	a, err := s.Create(ctx, "parts", objstore.NewParts(parts...))
	require.NoError(t, err)
	assert.Equal(t, objstore.CRC32C(whole), a.CRC32C)
	assert.True(t, bytes.Equal(whole, read(ctx, t, s, "parts")))

	section, err := objstore.SumSection(bytes.NewReader(whole), 1000, 200_000)
	require.NoError(t, err)
	_, err = s.Create(ctx, "section", section)
	require.NoError(t, err)
	assert.True(t, bytes.Equal(whole[1000:201_000], read(ctx, t, s, "section")))
}

func createRace(ctx context.Context, t *testing.T, s objstore.Store) {
	const writers, rounds = 8, 10
	for round := range rounds {
		name := fmt.Sprintf("race/%d", round)
		attrs, errs := make([]objstore.Attrs, writers), make([]error, writers)
		start := make(chan struct{})
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				<-start
				attrs[w], errs[w] = s.Create(ctx, name, objstore.NewParts(content(w, 2000+w)))
			})
		}
		close(start)
		wg.Wait()
		winner := -1
		for w, err := range errs {
			if err == nil {
				require.Equal(t, -1, winner, "two winners in round %d", round)
				winner = w
				continue
			}
			requireKind(t, err, objstore.ErrExists)
		}
		require.NotEqual(t, -1, winner, "no winner in round %d", round)
		got, err := s.Attrs(ctx, name)
		require.NoError(t, err)
		require.Equal(t, attrs[winner].Generation, got.Generation)
		require.Equal(t, content(winner, 2000+winner), read(ctx, t, s, name))
	}
}

// testBody is a body that may not keep what it declares.
type testBody struct {
	declared, content []byte
	crcOff            uint32
	readErr           error
	mu                sync.Mutex
	opened, closed    int
}

func (b *testBody) Size() int64    { return int64(len(b.declared)) }
func (b *testBody) CRC32C() uint32 { return objstore.CRC32C(b.declared) + b.crcOff }
func (b *testBody) Open() (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.opened++
	var r io.Reader = bytes.NewReader(b.content)
	if b.readErr != nil {
		r = io.MultiReader(r, errReader{b.readErr})
	}
	return &testReader{Reader: r, body: b}, nil
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

type testReader struct {
	io.Reader
	body *testBody
}

func (r *testReader) Close() error {
	r.body.mu.Lock()
	defer r.body.mu.Unlock()
	r.body.closed++
	return nil
}

func createLyingBody(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(3, 100_000)
	wrong := bytes.Clone(b)
	wrong[70_000] ^= 1
	broken := errors.New("disk broke")
	for name, body := range map[string]*testBody{
		"short": {declared: b, content: b[:len(b)-1]},
		"empty": {declared: b},
		"long":  {declared: b[:len(b)-1], content: b},
		"bits":  {declared: b, content: wrong},
		"crc":   {declared: b, content: b, crcOff: 1},
		"fails": {declared: b, content: b[:50_000], readErr: broken},
	} {
		_, err := s.Create(ctx, name, body)
		requireKind(t, err, objstore.ErrInvalid)
		if body.readErr != nil {
			require.ErrorIs(t, err, broken)
		}
		_, err = s.Attrs(ctx, name)
		requireKind(t, err, objstore.ErrNotFound)
		require.Equal(t, body.opened, body.closed, name)
	}
}

func createOpensOnce(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(4, 1000)
	body := &testBody{declared: b, content: b}
	_, err := s.Create(ctx, "a", body)
	require.NoError(t, err)
	require.Equal(t, []int{1, 1}, []int{body.opened, body.closed})
	_, err = s.Create(ctx, "a", body)
	requireKind(t, err, objstore.ErrExists)
	require.Equal(t, body.opened, body.closed)
	_, err = s.Create(ctx, "b", body)
	require.NoError(t, err, "a body can be used again")
	require.Equal(t, b, read(ctx, t, s, "b"))
}

func createCancelled(ctx context.Context, t *testing.T, s objstore.Store) {
	cause := errors.New("because")
	cancelled, cancel := context.WithCancelCause(ctx)
	cancel(cause)
	_, err := s.Create(cancelled, "a", objstore.NewParts([]byte("x")))
	requireKind(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
	require.NotErrorIs(t, err, objstore.ErrUnavailable)
	err = s.Delete(cancelled, "a", objstore.AnyGeneration)
	requireKind(t, err, context.Canceled)
	_, err = s.Attrs(ctx, "a")
	requireKind(t, err, objstore.ErrNotFound)
}

func validNames(ctx context.Context, t *testing.T, s objstore.Store) {
	names := []string{
		"a", "A b+c&d=e?f#g%h", "x/y/z", "ünï/cødé", "…", "%2F", "a:b@c!$'()*,;~", "..a", "a..", ".a/b.",
		"long/" + string(bytes.Repeat([]byte("n"), 200)),
	}
	for i, name := range names {
		b := content(i, 100+i)
		a := put(ctx, t, s, name, b)
		require.Equal(t, name, a.Name)
		require.Equal(t, b, read(ctx, t, s, name), name)
		got, err := s.Attrs(ctx, name)
		require.NoError(t, err)
		require.Equal(t, name, got.Name)
	}
	var listed []string
	for a, err := range objstore.List(ctx, s, "", "") {
		require.NoError(t, err)
		listed = append(listed, a.Name)
	}
	slices.Sort(names)
	require.Equal(t, names, listed)
	for _, name := range names {
		require.NoError(t, s.Delete(ctx, name, objstore.AnyGeneration), name)
	}
}

func invalidNames(ctx context.Context, t *testing.T, s objstore.Store) {
	for _, name := range []string{
		"", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/.", "a\nb", "a\x00", "a\x7f", "\xff",
		string(bytes.Repeat([]byte("n"), 1025)),
	} {
		_, err := s.Create(ctx, name, objstore.NewParts([]byte("x")))
		requireKind(t, err, objstore.ErrInvalid)
		_, err = s.ReadRange(ctx, name, 0, make([]byte, 1))
		requireKind(t, err, objstore.ErrInvalid)
		_, err = s.Attrs(ctx, name)
		requireKind(t, err, objstore.ErrInvalid)
		requireKind(t, s.Delete(ctx, name, objstore.AnyGeneration), objstore.ErrInvalid)
	}
}

func bucketSettings(ctx context.Context, t *testing.T, s objstore.Store) {
	_, err := s.BucketSettings(ctx)
	require.NoError(t, err)
}
