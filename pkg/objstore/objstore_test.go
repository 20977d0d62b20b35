package objstore_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/objstore"
)

func TestPartsReadAsOneContentAgainAndAgain(t *testing.T) {
	want := []byte("hello, parted world")
	body := objstore.NewParts([]byte("hello"), nil, []byte(", part"), []byte("ed world"), nil)
	require.EqualValues(t, len(want), body.Size())
	require.Equal(t, objstore.CRC32C(want), body.CRC32C())
	for range 2 {
		r, err := body.Open()
		require.NoError(t, err)
		require.NoError(t, iotest.TestReader(r, want))
		require.NoError(t, r.Close())

		r, err = body.Open()
		require.NoError(t, err)
		_, err = io.ReadFull(r, make([]byte, 7)) // WriteTo continues in the middle of a part
		require.NoError(t, err)
		var rest bytes.Buffer
		n, err := r.(io.WriterTo).WriteTo(&rest)
		require.NoError(t, err)
		require.EqualValues(t, len(want)-7, n)
		require.Equal(t, want[7:], rest.Bytes())
	}
}

func TestPartsSurviveAWriterThatFails(t *testing.T) {
	body := objstore.NewParts([]byte("abc"), []byte("def"))
	r, err := body.Open()
	require.NoError(t, err)
	broken := errors.New("broken")
	_, err = io.Copy(failingWriter{broken}, r)
	require.ErrorIs(t, err, broken)
	again, err := body.Open()
	require.NoError(t, err)
	b, err := io.ReadAll(again)
	require.NoError(t, err)
	require.Equal(t, "abcdef", string(b))
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

func TestSumSectionRefusesAShortSource(t *testing.T) {
	_, err := objstore.SumSection(strings.NewReader("abc"), 1, 3)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	s, err := objstore.SumSection(strings.NewReader("abcd"), 1, 2)
	require.NoError(t, err)
	require.Equal(t, objstore.CRC32C([]byte("bc")), s.CRC32C())
	require.True(t, objstore.Same(objstore.Attrs{Size: 2, CRC32C: s.CRC32C()}, s))
	require.False(t, objstore.Same(objstore.Attrs{Size: 3, CRC32C: s.CRC32C()}, s))
}

func TestErrorMatchesKindMarkAndCause(t *testing.T) {
	cause := errors.New("cause")
	err := error(&objstore.Error{Op: objstore.OpCreate, Name: "n", Kind: objstore.ErrUnavailable, Ambiguous: true, Err: cause})
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.ErrorIs(t, err, objstore.ErrAmbiguous)
	require.ErrorIs(t, err, cause)
	require.NotErrorIs(t, err, objstore.ErrNotFound)
	require.Equal(t, `object store: create "n": object store unavailable (outcome unknown): cause`, err.Error())
	require.NotErrorIs(t, objstore.ErrBucketNotFound, objstore.ErrNotFound)

	ctx, cancel := context.WithTimeoutCause(t.Context(), 0, cause)
	defer cancel()
	<-ctx.Done()
	err = objstore.ContextError(ctx, objstore.OpList, "")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, cause)
	require.False(t, objstore.Retryable(err))
}

func TestListStopsAtTheFirstError(t *testing.T) {
	broken := errors.New("broken")
	l := listerFunc(func(_, startAfter string) ([]objstore.Attrs, bool, error) {
		if startAfter == "" {
			return []objstore.Attrs{{Name: "a"}, {Name: "b"}}, true, nil
		}
		return nil, false, broken
	})
	var names []string
	var errs []error
	for a, err := range objstore.List(t.Context(), l, "", "") {
		names = append(names, a.Name)
		errs = append(errs, err)
	}
	require.Equal(t, []string{"a", "b", ""}, names)
	require.Equal(t, []error{nil, nil, broken}, errs)
	for _, err := range objstore.List(t.Context(), l, "", "") {
		require.NoError(t, err)
		break // an early end asks for no second page
	}
}

type listerFunc func(prefix, startAfter string) ([]objstore.Attrs, bool, error)

func (f listerFunc) ListPage(_ context.Context, prefix, startAfter string, _ int) ([]objstore.Attrs, bool, error) {
	return f(prefix, startAfter)
}

func TestBucketCheck(t *testing.T) {
	type key struct {
		severity objstore.Severity
		setting  string
	}
	del := func(r objstore.LifecycleRule) objstore.BucketSettings {
		r.Action = "Delete"
		return objstore.BucketSettings{Lifecycle: []objstore.LifecycleRule{r}}
	}
	for name, c := range map[string]struct {
		b    objstore.BucketSettings
		want []key
	}{
		"plain":                 {objstore.BucketSettings{StorageClass: "STANDARD"}, nil},
		"deletes all":           {del(objstore.LifecycleRule{}), []key{{objstore.Refuse, "lifecycle"}}},
		"deletes our prefix":    {del(objstore.LifecycleRule{Prefixes: []string{"x", "braid/c1/"}}), []key{{objstore.Refuse, "lifecycle"}}},
		"deletes above us":      {del(objstore.LifecycleRule{Prefixes: []string{"braid/"}}), []key{{objstore.Refuse, "lifecycle"}}},
		"deletes below us":      {del(objstore.LifecycleRule{Prefixes: []string{"braid/c1/wal/"}}), []key{{objstore.Refuse, "lifecycle"}}},
		"deletes elsewhere":     {del(objstore.LifecycleRule{Prefixes: []string{"braid/c2/"}}), nil},
		"deletes a suffix":      {del(objstore.LifecycleRule{Suffixes: []string{".tmp"}}), []key{{objstore.Refuse, "lifecycle"}}},
		"deletes only old ones": {del(objstore.LifecycleRule{NoncurrentOnly: true}), nil},
		"retention":             {objstore.BucketSettings{Retention: time.Hour, RetentionLocked: true}, []key{{objstore.Refuse, "retention"}}},
		"hold":                  {objstore.BucketSettings{DefaultEventBasedHold: true}, []key{{objstore.Refuse, "hold"}}},
		"priced": {
			objstore.BucketSettings{SoftDelete: 7 * 24 * time.Hour, Versioning: true, StorageClass: "NEARLINE", Retention: time.Hour},
			[]key{{objstore.Refuse, "retention"}, {objstore.Warn, "soft_delete"}, {objstore.Warn, "versioning"}, {objstore.Warn, "storage_class"}},
		},
		"moves": {
			objstore.BucketSettings{Lifecycle: []objstore.LifecycleRule{{Action: "SetStorageClass", StorageClass: "COLDLINE"}}},
			[]key{{objstore.Warn, "storage_class"}},
		},
	} {
		var got []key
		for _, f := range c.b.Check("braid/c1/") {
			got = append(got, key{f.Severity, f.Setting})
			require.NotEmpty(t, f.Message)
		}
		require.True(t, slices.Equal(c.want, got), "%s: %v, want %v", name, got, c.want)
	}
	require.Equal(t, "refuse", objstore.Refuse.String())
	require.Equal(t, "warn", objstore.Warn.String())
}
