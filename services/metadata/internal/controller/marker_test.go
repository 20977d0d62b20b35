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
	t.Run("an empty prefix, then again", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		require.NoError(t, Claim(t.Context(), s, ours, now))
		require.NoError(t, Claim(t.Context(), s, ours, now), "cut short after the marker")
		require.NoError(t, CheckMarker(t.Context(), s, ours.ClusterID))
		require.ErrorIs(t, CheckMarker(t.Context(), s, theirs.ClusterID), ErrForeignPrefix)
	})
	t.Run("another cluster's marker, even alone", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		require.NoError(t, Claim(t.Context(), s, theirs, now))
		err := Claim(t.Context(), s, ours, now)
		require.ErrorIs(t, err, ErrForeignPrefix)
		require.ErrorContains(t, err, theirs.ClusterID)
		require.NoError(t, CheckMarker(t.Context(), s, theirs.ClusterID), "it stays")
	})
	t.Run("another incarnation of ours", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		require.NoError(t, Claim(t.Context(), s, Identity{ours.ClusterID, 77}, now))
		require.ErrorIs(t, Claim(t.Context(), s, ours, now), ErrForeignPrefix)
	})
	t.Run("a cluster's data", func(t *testing.T) {
		for _, id := range []Identity{ours, theirs} {
			s := memstore.New(memstore.Options{})
			require.NoError(t, Claim(t.Context(), s, id, now))
			put(t, s, id.ClusterID+"/wal/o")
			err := Claim(t.Context(), s, ours, now)
			require.ErrorIs(t, err, ErrForeignPrefix)
			require.ErrorContains(t, err, id.ClusterID)
		}
	})
	for _, name := range []string{"a", "zzz"} {
		t.Run("objects of nobody known: "+name, func(t *testing.T) {
			s := memstore.New(memstore.Options{})
			put(t, s, name)
			err := Claim(t.Context(), s, ours, now)
			require.ErrorIs(t, err, ErrForeignPrefix)
			require.ErrorContains(t, err, name)
			assert.Equal(t, 1, count(s), "nothing was written")
		})
	}
	t.Run("something else under the marker's name", func(t *testing.T) {
		s := memstore.New(memstore.Options{})
		put(t, s, MarkerName)
		require.ErrorIs(t, Claim(t.Context(), s, ours, now), ErrForeignPrefix)
	})
	t.Run("no marker where the log says there is a cluster", func(t *testing.T) {
		require.ErrorIs(t, CheckMarker(t.Context(), memstore.New(memstore.Options{}), ours.ClusterID), ErrForeignPrefix)
	})
	t.Run("our own lost success", func(t *testing.T) {
		s := &lostAnswer{Store: memstore.New(memstore.Options{})}
		require.NoError(t, Claim(t.Context(), s, ours, now))
	})
	t.Run("another was faster", func(t *testing.T) {
		s := &faster{Store: memstore.New(memstore.Options{})}
		require.ErrorIs(t, Claim(t.Context(), s, ours, now), ErrForeignPrefix)
	})
}

func TestIdentityInEtcd(t *testing.T) {
	content, err := encodeIdentity(ours, time.Unix(1, 0))
	require.NoError(t, err)
	got, err := decodeIdentity(content)
	require.NoError(t, err)
	assert.Equal(t, ours, got)
	got, err = decodeIdentity(nil)
	require.NoError(t, err)
	assert.Zero(t, got)
	_, err = decodeIdentity([]byte("x"))
	require.Error(t, err)
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
	if err := Claim(ctx, s.Store, theirs, time.Unix(2, 0)); err != nil {
		return objstore.Attrs{}, err
	}
	return s.Store.Create(ctx, name, body)
}
