package embetcd_test

import (
	"bytes"
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/braidlog/braid/pkg/embetcd"
)

func client(t *testing.T, s *embetcd.Server) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: s.Endpoints(), DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestRestartOnTheSameDirectoryContinues(t *testing.T) {
	ctx, dir := bounded(t), t.TempDir()
	began := time.Now()
	s, err := embetcd.Start(ctx, embetcd.Options{Dir: dir, Fast: true})
	require.NoError(t, err)
	t.Logf("ready after %v", time.Since(began))
	put, err := client(t, s).Put(ctx, "k", "v")
	require.NoError(t, err)
	s.Close()
	s.Close() // harmless

	began = time.Now()
	s, err = embetcd.Start(ctx, embetcd.Options{Dir: dir, Fast: true})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	t.Logf("ready again after %v", time.Since(began))
	got, err := client(t, s).Get(ctx, "k")
	require.NoError(t, err)
	require.Len(t, got.Kvs, 1)
	assert.Equal(t, "v", string(got.Kvs[0].Value))
	assert.Equal(t, put.Header.ClusterId, got.Header.ClusterId)
}

func TestTwoServersInOneProcessAndAUnixSocket(t *testing.T) {
	ctx := bounded(t)
	a, err := embetcd.Start(ctx, embetcd.Options{Dir: t.TempDir(), Fast: true, NoSync: true})
	require.NoError(t, err)
	t.Cleanup(a.Close)
	dir := t.TempDir()
	b, err := embetcd.Start(ctx, embetcd.Options{
		Dir: filepath.Join(dir, "d"), ClientURL: "unix://" + filepath.Join(dir, "s"), Fast: true, NoSync: true,
	})
	require.NoError(t, err)
	t.Cleanup(b.Close)
	put, err := client(t, a).Put(ctx, "k", "a")
	require.NoError(t, err)
	got, err := client(t, b).Get(ctx, "k")
	require.NoError(t, err)
	assert.Empty(t, got.Kvs)
	assert.NotEqual(t, put.Header.ClusterId, got.Header.ClusterId)
}

func TestStartSaysWhatIsWrong(t *testing.T) {
	ctx := bounded(t)
	_, err := embetcd.Start(ctx, embetcd.Options{})
	require.ErrorContains(t, err, "data directory")
	_, err = embetcd.Start(ctx, embetcd.Options{Dir: t.TempDir(), ClientURL: "http://192.0.2.1:1"})
	require.Error(t, err)
}

func TestQuotaIsEnforced(t *testing.T) {
	ctx := bounded(t)
	var log bytes.Buffer
	s, err := embetcd.Start(ctx, embetcd.Options{
		Dir: t.TempDir(), Fast: true, NoSync: true, QuotaBytes: 1 << 20,
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	require.NoError(t, err)
	c := client(t, s)
	value := string(make([]byte, 256<<10)) // the size is judged as of etcd's last batch, so go on until it shows
	for ctx.Err() == nil {
		if _, err = c.Put(ctx, "k", value); err != nil {
			break
		}
	}
	require.ErrorContains(t, err, "space exceeded")
	s.Close()
	assert.Contains(t, log.String(), "component=etcd")
}
