package gcs_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/gcs"
	"github.com/braidlog/braid/pkg/objstore/objstoretest"
)

// emulator is shared by the tests of this package; each uses a prefix of its own.
var emulator *gcsemu.Server

func TestMain(m *testing.M) {
	flag.Parse()
	var err error
	emulator, err = gcsemu.Start(gcsemu.Options{Buckets: []string{"bucket"}})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := gcsemu.CheckConformance(ctx, emulator.Endpoint(), "bucket", "probe/"); err != nil {
		panic(err) // results against it would mean nothing
	}
	code := m.Run()
	if err := emulator.Close(); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// prefix is a name prefix that no other test uses.
func prefix(t *testing.T) string {
	t.Helper()
	var id [8]byte
	_, err := rand.Read(id[:])
	require.NoError(t, err)
	return "test-" + strings.ReplaceAll(t.Name(), "/", "-") + "-" + hex.EncodeToString(id[:])
}

func open(t testing.TB, cfg gcs.Config) *gcs.Store {
	t.Helper()
	s, err := gcs.Open(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func emulated(endpoint string) gcs.Config {
	cfg := gcs.DefaultConfig("bucket")
	cfg.Endpoint = endpoint
	return cfg
}

// The emulator passes every case: what it gets wrong by itself, the handler
// before it mends.
func TestContractEmulator(t *testing.T) {
	objstoretest.Run(t, func(t *testing.T) objstore.Store {
		return decorate.Wrap(open(t, emulated(emulator.Endpoint())), decorate.Prefix(prefix(t)))
	})
}

// TestContractRealBucket runs against the bucket that BRAID_TEST_GCS_BUCKET
// names, with the application default credentials. It cleans
// up what it created below "test-".
func TestContractRealBucket(t *testing.T) {
	bucket := os.Getenv("BRAID_TEST_GCS_BUCKET")
	if bucket == "" {
		t.Skip("BRAID_TEST_GCS_BUCKET is not set")
	}
	objstoretest.Run(t, func(t *testing.T) objstore.Store {
		s := decorate.Wrap(open(t, gcs.DefaultConfig(bucket)), decorate.Prefix(prefix(t)))
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
			defer cancel()
			for a, err := range objstore.List(ctx, s, "", "") {
				require.NoError(t, err)
				require.NoError(t, s.Delete(ctx, a.Name, a.Generation))
			}
		})
		return s
	})
}
