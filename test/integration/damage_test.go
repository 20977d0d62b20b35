package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/gcs"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/test/cluster"
)

// remoteOnly is a cluster whose topic "cold" is led by a broker that has none of
// its records on disk nor in memory.
func remoteOnly(t *testing.T, want []string) (c *cluster.Cluster, leader *cluster.Member) {
	t.Helper()
	c = cluster.Start(t, cluster.Options{
		Brokers:      2,
		ChangeBroker: func(cfg *broker.Config) { cfg.Partitions.ReadCacheBytes = 0 },
	})
	c.CreateTopic("cold", 1)
	leader = c.Broker(2)
	require.NoError(t, leader.Stop())
	c.WaitLed("cold")
	for _, v := range want {
		mustAppend(t, c, c.Broker(1), "cold", 0, levelObject, plain(t, v))
	}
	startWithoutCopies(t, c, leader, "cold", 1)
	return c, leader
}

// forget makes the remote-log manager forget what it has read.
func forget(c *cluster.Cluster) {
	c.RLM(1).Restart()
	c.WaitMembers()
}

// tryReadCold reads everything, again while the remote-log manager that was just
// started is not known yet.
func tryReadCold(c *cluster.Cluster, m *cluster.Member) (all []got, err error) {
	c.Within(20*time.Second, func() bool {
		all, err = tryRead(c, m, &brokerv1.ReadRequest{Topic: "cold"})
		return !refusedWith(err, errorsv1.ErrorReason_ERROR_REASON_NO_REMOTE_LOG_MANAGER)
	})
	return all, err
}

func TestDamageInTheBucketIsToldAndNeverServed(t *testing.T) {
	t.Parallel()
	want := numbered("v", 6)
	for _, tc := range []struct {
		name string
		rule gcsemu.Rule
	}{
		{"a flipped bit in the header that no CRC covers", gcsemu.Rule{Op: gcsemu.OpRead, ObjectContains: "/wal/", Action: gcsemu.ActFlip, Bytes: 7}},
		{"a flipped bit in the records", gcsemu.Rule{Op: gcsemu.OpRead, ObjectContains: "/wal/", Action: gcsemu.ActFlip, Bytes: 70}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, leader := remoteOnly(t, want)
			c.Faults(tc.rule)
			forget(c)
			all, err := tryReadCold(c, leader)
			assert.Empty(t, all, "damaged bytes were served")
			e := refused(t, err, codes.DataLoss, errorsv1.ErrorReason_ERROR_REASON_DATA_DAMAGED)
			assert.NotEmpty(t, e.Metadata["where"])
			assert.Equal(t, "0", e.Metadata["offset"])
			// The damage was on the way: what is stored is whole, and is served as
			// soon as it comes whole.
			c.Faults()
			c.Eventually("the records are served again", func() bool {
				all, err := tryReadCold(c, leader)
				return err == nil && assert.Equal(t, want, values(all))
			})
			mustAppend(t, c, leader, "cold", 0, levelObject, plain(t, "more"))
		})
	}
	t.Run("an object that is gone", func(t *testing.T) {
		t.Parallel()
		c, leader := remoteOnly(t, want)
		segments := c.Segments("cold", 0)
		cfg := gcs.DefaultConfig(cluster.BucketName)
		cfg.Endpoint = c.Bucket.Endpoint()
		store, err := gcs.Open(t.Context(), cfg)
		require.NoError(t, err)
		t.Cleanup(func() { _ = store.Close() })
		forget(c)
		require.NoError(t, store.Delete(t.Context(), segments[3].GetObjectName(), objstore.AnyGeneration))
		all, err := tryReadCold(c, leader)
		assert.Equal(t, want[:segments[3].GetBaseOffset()], values(all), "what lies before the loss is served")
		e := refused(t, err, codes.DataLoss, errorsv1.ErrorReason_ERROR_REASON_DATA_DAMAGED)
		assert.NotEmpty(t, e.Metadata["where"])
	})
	t.Run("a bucket that is down is no damage", func(t *testing.T) {
		t.Parallel()
		c, leader := remoteOnly(t, want)
		forget(c)
		c.BucketDown(true)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		stream, err := c.Log(leader).Read(ctx, &brokerv1.ReadRequest{Topic: "cold"})
		require.NoError(t, err)
		for err == nil {
			_, err = stream.Recv()
		}
		e := refusedCode(t, err, codes.Unavailable)
		assert.Contains(t, []errorsv1.ErrorReason{
			errorsv1.ErrorReason_ERROR_REASON_OBJECT_STORE_UNREACHABLE, errorsv1.ErrorReason_ERROR_REASON_NO_REMOTE_LOG_MANAGER,
		}, e.Reason)
		c.BucketDown(false)
		c.Eventually("the records are served again", func() bool {
			all, err := tryReadCold(c, leader)
			return err == nil && assert.Equal(t, want, values(all))
		})
	})
}
