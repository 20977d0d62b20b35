package controller

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
)

var (
	ours   = Identity{"11111111-1111-4111-8111-111111111111", 5}
	theirs = Identity{"22222222-2222-4222-8222-222222222222", 6}
)

func put(t *testing.T, s *memstore.Store, name string) {
	t.Helper()
	_, err := s.Create(t.Context(), name, objstore.NewParts([]byte("x")))
	require.NoError(t, err)
}

func TestClaim(t *testing.T) {
	now := time.Unix(1, 0)
	t.Run("an empty prefix", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		got, err := Claim(t.Context(), s, ours, now)
		require.NoError(t, err)
		assert.Equal(t, ours, got)
		require.NoError(t, CheckMarker(t.Context(), s, ours.ClusterID))
		require.ErrorIs(t, CheckMarker(t.Context(), s, theirs.ClusterID), ErrForeignPrefix)
	})
	t.Run("a marker alone is of a bootstrap that did not finish", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		_, err := Claim(t.Context(), s, theirs, now)
		require.NoError(t, err)
		got, err := Claim(t.Context(), s, ours, now)
		require.NoError(t, err)
		assert.Equal(t, theirs, got)
	})
	t.Run("another cluster's data", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		_, err := Claim(t.Context(), s, theirs, now)
		require.NoError(t, err)
		put(t, s, theirs.ClusterID+"/wal/o")
		_, err = Claim(t.Context(), s, ours, now)
		require.ErrorIs(t, err, ErrForeignPrefix)
		require.ErrorContains(t, err, theirs.ClusterID)
	})
	for _, name := range []string{"a", "zzz"} {
		t.Run("objects of nobody known: "+name, func(t *testing.T) {
			s := memstore.New(memstore.Options{})
			put(t, s, name)
			_, err := Claim(t.Context(), s, ours, now)
			require.ErrorIs(t, err, ErrForeignPrefix)
			require.ErrorContains(t, err, name)
			assert.Equal(t, 1, count(s), "nothing was written")
		})
	}
	t.Run("something else under the marker's name", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		put(t, s, MarkerName)
		_, err := Claim(t.Context(), s, ours, now)
		require.ErrorIs(t, err, ErrForeignPrefix)
	})
	t.Run("no marker where the log says there is a cluster", func(t *testing.T) {
		require.ErrorIs(t, CheckMarker(t.Context(), memstore.New(memstore.Options{}), ours.ClusterID), ErrForeignPrefix)
	})
	t.Run("our own lost success", func(t *testing.T) {
		s := &lostAnswer{Store: memstore.New(memstore.Options{})}
		got, err := Claim(t.Context(), s, ours, now)
		require.NoError(t, err)
		assert.Equal(t, ours, got)
	})
	t.Run("another was faster", func(t *testing.T) {
		s := &faster{Store: memstore.New(memstore.Options{})}
		_, err := Claim(t.Context(), s, ours, now)
		require.ErrorIs(t, err, ErrForeignPrefix)
	})
}

func count(s *memstore.Store) int { n, _ := s.Len(); return n }

// lostAnswer stores and loses the answer.
type lostAnswer struct{ *memstore.Store }

func (s *lostAnswer) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	if _, err := s.Store.Create(ctx, name, body); err != nil {
		return objstore.Attrs{}, err
	}
	return objstore.Attrs{}, &objstore.Error{Name: name, Kind: objstore.ErrUnavailable, Ambiguous: true}
}

// faster lets another cluster's marker appear just before ours.
type faster struct{ *memstore.Store }

func (s *faster) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	if _, err := Claim(ctx, s.Store, theirs, time.Unix(2, 0)); err != nil {
		return objstore.Attrs{}, err
	}
	return s.Store.Create(ctx, name, body)
}
