package metadata_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/metadata/metadatatest"
)

// awayStore can't be reached for its first reads.
type awayStore struct {
	objstore.Store
	away atomic.Int64
}

func (s *awayStore) ReadSuffix(ctx context.Context, name string, dst []byte) (int, int64, error) {
	if s.away.Add(-1) >= 0 {
		return 0, 0, &objstore.Error{Op: objstore.OpRead, Name: name, Kind: objstore.ErrUnavailable}
	}
	return s.Store.ReadSuffix(ctx, name, dst)
}

// The object store is waited for as long as the configuration says, however soon
// each attempt fails. Without it no cluster begins, and one that has begun goes
// on (design review X2).
func TestAStartWaitsForTheObjectStoreUpToItsBound(t *testing.T) {
	cluster := metadatatest.Start(t, metadatatest.Options{Store: memstore.New(memstore.Options{})})
	store := &awayStore{Store: cluster.Store}
	cluster.Store = store
	cfg := cluster.Config(2)
	store.away.Store(7)
	cfg.Store.StartTimeout = config.Duration(20 * time.Second)
	s, err := cluster.Build(bounded(t), cfg, nil)
	require.NoError(t, err)
	require.NoError(t, s.Close())

	store.away.Store(1 << 40)
	cfg.Store.StartTimeout = config.Duration(200 * time.Millisecond)
	s, err = cluster.Build(bounded(t), cfg, nil)
	require.NoError(t, err)
	require.NoError(t, s.Close())

	cfg.Etcd.Prefix = "/fresh/"
	_, err = cluster.Build(bounded(t), cfg, nil)
	require.ErrorIs(t, err, metadata.ErrStoreUnreachable)
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.ErrorContains(t, err, "200ms")
}
