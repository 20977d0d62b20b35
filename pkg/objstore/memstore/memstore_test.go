package memstore_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
)

func TestTamperKeepsGenerationAndChecksum(t *testing.T) {
	ctx := t.Context()
	s := memstore.New(memstore.Options{})
	created, err := s.Create(ctx, "a", objstore.NewParts([]byte("hello")))
	require.NoError(t, err)
	require.True(t, s.Tamper("a", func(b []byte) []byte { b[0] ^= 1; return b }))
	require.False(t, s.Tamper("b", func(b []byte) []byte { return b }))

	got, err := s.Attrs(ctx, "a")
	require.NoError(t, err)
	require.Equal(t, created, got)
	buf := make([]byte, 5)
	_, err = s.ReadRange(ctx, "a", 0, buf)
	require.NoError(t, err)
	require.NotEqual(t, created.CRC32C, objstore.CRC32C(buf))
}

func TestSettingsAreReportedAsSet(t *testing.T) {
	s := memstore.New(memstore.Options{Settings: objstore.BucketSettings{Name: "x"}})
	s.SetBucketSettings(objstore.BucketSettings{Name: "y", Versioning: true})
	got, err := s.BucketSettings(t.Context())
	require.NoError(t, err)
	require.Equal(t, objstore.BucketSettings{Name: "y", Versioning: true}, got)
}
