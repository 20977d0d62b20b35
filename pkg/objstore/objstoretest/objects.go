package objstoretest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/objstore"
)

func names(attrs []objstore.Attrs) []string {
	out := make([]string, 0, len(attrs))
	for _, a := range attrs {
		out = append(out, a.Name)
	}
	return out
}

// list walks all names.
func list(ctx context.Context, t *testing.T, s objstore.Lister, prefix, startAfter string) []string {
	t.Helper()
	out := []string{}
	for a, err := range objstore.List(ctx, s, prefix, startAfter) {
		require.NoError(t, err)
		out = append(out, a.Name)
	}
	return out
}

func attrsAgree(ctx context.Context, t *testing.T, s objstore.Store) {
	created := put(ctx, t, s, "a/b", content(11, 5000))
	got, err := s.Attrs(ctx, "a/b")
	require.NoError(t, err)
	page, more, err := s.ListPage(ctx, "", "", 0)
	require.NoError(t, err)
	require.False(t, more)
	require.Len(t, page, 1)
	for _, a := range []objstore.Attrs{got, page[0]} {
		assert.True(t, created.Created.Equal(a.Created), "%v and %v", created.Created, a.Created)
		a.Created = created.Created
		assert.Equal(t, created, a)
	}
}

func listOrder(ctx context.Context, t *testing.T, s objstore.Store) {
	// Byte order of whole names, not of path segments: '-' < '.' < '/' < '0'.
	want := []string{"a-b", "a.b", "a/a", "a/b/c", "a/ba", "a0", "b", "é"}
	for _, i := range []int{3, 7, 0, 5, 1, 6, 2, 4} {
		put(ctx, t, s, want[i], []byte(want[i]))
	}
	require.Equal(t, want, list(ctx, t, s, "", ""))
	require.Equal(t, want[:6], list(ctx, t, s, "a", ""))
	require.Equal(t, []string{"a/a", "a/b/c", "a/ba"}, list(ctx, t, s, "a/", ""))
	require.Equal(t, []string{"a/b/c", "a/ba"}, list(ctx, t, s, "a/b", ""))
	require.Equal(t, []string{"é"}, list(ctx, t, s, "é", ""))
	require.Empty(t, list(ctx, t, s, "c", ""))
}

func listStartAfter(ctx context.Context, t *testing.T, s objstore.Store) {
	for _, name := range []string{"p/1", "p/2", "p/3", "q/1"} {
		put(ctx, t, s, name, []byte("x"))
	}
	for _, c := range []struct {
		prefix, after string
		want          []string
	}{
		{"p/", "p/1", []string{"p/2", "p/3"}},
		{"p/", "p/15", []string{"p/2", "p/3"}},
		{"p/", "p/3", []string{}},
		{"p/", "a", []string{"p/1", "p/2", "p/3"}},
		{"p/", "q", []string{}},
		{"", "p/3", []string{"q/1"}},
		{"", "q/1", []string{}},
		{"p/2", "p/2", []string{}},
	} {
		require.Equal(t, c.want, list(ctx, t, s, c.prefix, c.after), "prefix %q after %q", c.prefix, c.after)
	}
}

func listPages(ctx context.Context, t *testing.T, s objstore.Store) {
	var want []string
	for i := range 10 {
		want = append(want, fmt.Sprintf("n/%02d", i))
		put(ctx, t, s, want[i], []byte("x"))
	}
	put(ctx, t, s, "o", []byte("x"))
	for limit := 1; limit <= 12; limit++ {
		var got []string
		after := ""
		for calls := 0; ; calls++ {
			require.Less(t, calls, 12, "no end with limit %d", limit)
			page, more, err := s.ListPage(ctx, "n/", after, limit)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page), limit)
			got = append(got, names(page)...)
			if !more {
				break
			}
			require.Len(t, page, limit, "a page before the last is full")
			after = page[len(page)-1].Name
		}
		require.Equal(t, want, got, "limit %d", limit)
	}
}

func listNothing(ctx context.Context, t *testing.T, s objstore.Store) {
	page, more, err := s.ListPage(ctx, "", "", 0)
	require.NoError(t, err)
	require.Empty(t, page)
	require.False(t, more)
	_, _, err = s.ListPage(ctx, "some/where", "some/where/else", 5)
	require.NoError(t, err)
}

func listConsistent(ctx context.Context, t *testing.T, s objstore.Store) {
	for i := range 20 {
		name := fmt.Sprintf("c/%d", i)
		put(ctx, t, s, name, []byte("x"))
		require.Equal(t, []string{name}, list(ctx, t, s, "c/", ""))
		require.NoError(t, s.Delete(ctx, name, objstore.AnyGeneration))
		require.Empty(t, list(ctx, t, s, "c/", ""))
	}
}

func deleteAbsent(ctx context.Context, t *testing.T, s objstore.Store) {
	require.NoError(t, s.Delete(ctx, "never", objstore.AnyGeneration))
	require.NoError(t, s.Delete(ctx, "never", 12345))
	a := put(ctx, t, s, "once", []byte("x"))
	require.NoError(t, s.Delete(ctx, "once", a.Generation))
	require.NoError(t, s.Delete(ctx, "once", a.Generation))
	require.NoError(t, s.Delete(ctx, "once", objstore.AnyGeneration))
}

func deleteGeneration(ctx context.Context, t *testing.T, s objstore.Store) {
	a := put(ctx, t, s, "a", []byte("x"))
	put(ctx, t, s, "b", []byte("x"))
	require.NoError(t, s.Delete(ctx, "a", a.Generation))
	require.NoError(t, s.Delete(ctx, "b", objstore.AnyGeneration))
	requireAbsent(ctx, t, s, "a")
	requireAbsent(ctx, t, s, "b")
}

func deleteWrongGeneration(ctx context.Context, t *testing.T, s objstore.Store) {
	a := put(ctx, t, s, "a", []byte("x"))
	for _, generation := range []int64{a.Generation + 1, a.Generation - 1, 1} {
		err := s.Delete(ctx, "a", generation)
		requireKind(t, err, objstore.ErrPrecondition)
		require.NotErrorIs(t, err, objstore.ErrAmbiguous)
	}
	require.Equal(t, "x", string(read(ctx, t, s, "a")))
}

func deleteGone(ctx context.Context, t *testing.T, s objstore.Store) {
	put(ctx, t, s, "d/a", []byte("x"))
	put(ctx, t, s, "d/b", []byte("y"))
	require.NoError(t, s.Delete(ctx, "d/a", objstore.AnyGeneration))
	requireAbsent(ctx, t, s, "d/a")
	require.Equal(t, "y", string(read(ctx, t, s, "d/b")))
}

func recreate(ctx context.Context, t *testing.T, s objstore.Store) {
	last := int64(0)
	for i := range 5 {
		b := content(i, 100)
		a := put(ctx, t, s, "a", b)
		require.Greater(t, a.Generation, last)
		require.Equal(t, b, read(ctx, t, s, "a"))
		last = a.Generation
		require.NoError(t, s.Delete(ctx, "a", last))
	}
}

func deleteOldGeneration(ctx context.Context, t *testing.T, s objstore.Store) {
	old := put(ctx, t, s, "a", []byte("old"))
	require.NoError(t, s.Delete(ctx, "a", old.Generation))
	put(ctx, t, s, "a", []byte("new"))
	requireKind(t, s.Delete(ctx, "a", old.Generation), objstore.ErrPrecondition)
	require.Equal(t, "new", string(read(ctx, t, s, "a")))
}

// deleteRace checks that a delete removes no object but the one it names: each
// created generation is deleted by exactly the rounds that saw it.
func deleteRace(ctx context.Context, t *testing.T, s objstore.Store) {
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 10 {
				body := objstore.NewParts(content(w, 100+i))
				a, err := s.Create(ctx, "a", body)
				if err != nil {
					assert.ErrorIs(t, err, objstore.ErrExists)
					// A stale deleter: its generation is never the live one.
					if err := s.Delete(ctx, "a", 1); err != nil {
						assert.ErrorIs(t, err, objstore.ErrPrecondition)
					}
					continue
				}
				// Only this goroutine knows the generation, so the object is there.
				got, err := s.Attrs(ctx, "a")
				if assert.NoError(t, err) {
					assert.Equal(t, a.Generation, got.Generation)
				}
				assert.NoError(t, s.Delete(ctx, "a", a.Generation))
			}
		})
	}
	wg.Wait()
	_, err := s.Attrs(ctx, "a")
	require.ErrorIs(t, err, objstore.ErrNotFound)
}
