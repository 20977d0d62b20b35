package objstoretest

import (
	"bytes"
	"context"
	"io"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/objstore"
)

func readRanges(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(5, 100_000)
	put(ctx, t, s, "a", b)
	for _, r := range []struct{ offset, length int }{
		{0, 1}, {0, len(b)}, {1, len(b) - 1}, {len(b) - 1, 1}, {4096, 8192}, {99_000, 1000},
	} {
		dst := bytes.Repeat([]byte{0xee}, r.length+1)
		n, err := s.ReadRange(ctx, "a", int64(r.offset), dst[:r.length])
		require.NoError(t, err, r)
		require.Equal(t, r.length, n, r)
		require.True(t, bytes.Equal(b[r.offset:r.offset+r.length], dst[:n]), r)
		require.EqualValues(t, 0xee, dst[r.length], "written past the buffer")
	}
}

func readOutside(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(6, 1000)
	put(ctx, t, s, "a", b)
	put(ctx, t, s, "empty", nil)
	for _, r := range []struct {
		name           string
		offset, length int
		valid          int
	}{
		{"a", 999, 2, 1}, {"a", 0, 1001, 1000}, {"a", 1000, 1, 0}, {"a", 5000, 10, 0}, {"empty", 0, 1, 0},
	} {
		dst := make([]byte, r.length)
		n, err := s.ReadRange(ctx, r.name, int64(r.offset), dst)
		requireKind(t, err, objstore.ErrRange)
		require.Equal(t, r.valid, n, r)
		if n > 0 {
			require.Equal(t, b[r.offset:], dst[:n])
		}
	}
}

func readSuffixes(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(7, 1000)
	put(ctx, t, s, "a", b)
	put(ctx, t, s, "empty", nil)
	for _, length := range []int{1, 16, 999, 1000, 1001, 5000} {
		dst := make([]byte, length)
		n, size, err := s.ReadSuffix(ctx, "a", dst)
		require.NoError(t, err, length)
		require.EqualValues(t, 1000, size)
		require.Equal(t, min(length, 1000), n)
		require.Equal(t, b[1000-n:], dst[:n])
	}
	n, size, err := s.ReadSuffix(ctx, "empty", make([]byte, 10))
	require.NoError(t, err)
	require.Zero(t, n)
	require.Zero(t, size)
}

func readStreams(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(8, 200_000)
	put(ctx, t, s, "a", b)
	for _, r := range []struct{ offset, length, want int64 }{
		{0, objstore.ToEnd, 200_000}, {0, 1, 1}, {100, 1000, 1000}, {150_000, objstore.ToEnd, 50_000},
		{199_999, 1, 1}, {199_999, 100, 1}, {0, 1_000_000, 200_000},
	} {
		rc, err := s.OpenRange(ctx, "a", r.offset, r.length)
		require.NoError(t, err, r)
		require.NoError(t, iotest.TestReader(rc, b[r.offset:r.offset+r.want]), r)
		require.NoError(t, rc.Close(), r)
	}
	for _, offset := range []int64{200_000, 300_000} {
		_, err := s.OpenRange(ctx, "a", offset, 10)
		requireKind(t, err, objstore.ErrRange)
		_, err = s.OpenRange(ctx, "a", offset, objstore.ToEnd)
		requireKind(t, err, objstore.ErrRange)
	}

	// A stream may be closed before its end.
	rc, err := s.OpenRange(ctx, "a", 0, objstore.ToEnd)
	require.NoError(t, err)
	_, err = io.ReadFull(rc, make([]byte, 10))
	require.NoError(t, err)
	require.NoError(t, rc.Close())
}

func readInvalid(ctx context.Context, t *testing.T, s objstore.Store) {
	put(ctx, t, s, "a", []byte("abc"))
	_, err := s.ReadRange(ctx, "a", -1, make([]byte, 1))
	requireKind(t, err, objstore.ErrInvalid)
	_, err = s.ReadRange(ctx, "a", 0, nil)
	requireKind(t, err, objstore.ErrInvalid)
	_, _, err = s.ReadSuffix(ctx, "a", nil)
	requireKind(t, err, objstore.ErrInvalid)
	_, err = s.OpenRange(ctx, "a", 0, 0)
	requireKind(t, err, objstore.ErrInvalid)
	_, err = s.OpenRange(ctx, "a", -1, 1)
	requireKind(t, err, objstore.ErrInvalid)
	_, err = s.OpenRange(ctx, "a", 0, -2)
	requireKind(t, err, objstore.ErrInvalid)
	_, _, err = s.ListPage(ctx, "", "", -1)
	requireKind(t, err, objstore.ErrInvalid)
}

func requireAbsent(ctx context.Context, t *testing.T, s objstore.Store, name string) {
	t.Helper()
	_, err := s.ReadRange(ctx, name, 0, make([]byte, 1))
	requireKind(t, err, objstore.ErrNotFound)
	_, _, err = s.ReadSuffix(ctx, name, make([]byte, 1))
	requireKind(t, err, objstore.ErrNotFound)
	_, err = s.OpenRange(ctx, name, 0, objstore.ToEnd)
	requireKind(t, err, objstore.ErrNotFound)
	_, err = s.Attrs(ctx, name)
	requireKind(t, err, objstore.ErrNotFound)
	for a, err := range objstore.List(ctx, s, name, "") {
		require.NoError(t, err)
		require.NotEqual(t, name, a.Name)
	}
}

func notFound(ctx context.Context, t *testing.T, s objstore.Store) {
	put(ctx, t, s, "a/b", []byte("x"))
	for _, name := range []string{"b", "a", "a/b/c", "a/bb"} {
		requireAbsent(ctx, t, s, name)
	}
}

func readConcurrently(ctx context.Context, t *testing.T, s objstore.Store) {
	b := content(9, 256<<10)
	put(ctx, t, s, "a", b)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 8 {
				offset := (w*8 + i) * 4096
				dst := make([]byte, 4096)
				_, err := s.ReadRange(ctx, "a", int64(offset), dst)
				assert.NoError(t, err)
				assert.True(t, bytes.Equal(b[offset:offset+4096], dst))
			}
		})
	}
	wg.Wait()
}

func readCancelled(ctx context.Context, t *testing.T, s objstore.Store) {
	put(ctx, t, s, "a", content(10, 1<<20))
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	_, err := s.ReadRange(cancelled, "a", 0, make([]byte, 1))
	requireKind(t, err, context.Canceled)
	require.NotErrorIs(t, err, objstore.ErrUnavailable)
	_, err = s.Attrs(cancelled, "a")
	requireKind(t, err, context.Canceled)
	_, _, err = s.ListPage(cancelled, "", "", 0)
	requireKind(t, err, context.Canceled)
	_, err = s.BucketSettings(cancelled)
	requireKind(t, err, context.Canceled)

	streaming, cancel := context.WithCancel(ctx)
	rc, err := s.OpenRange(streaming, "a", 0, objstore.ToEnd)
	require.NoError(t, err)
	cancel()
	_, err = io.Copy(io.Discard, rc)
	// What was on its way may still arrive; an unfinished stream must say why.
	if err != nil {
		requireKind(t, err, context.Canceled)
	}
	_ = rc.Close()
}
