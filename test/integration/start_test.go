package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/rlm"
	"github.com/braidlog/braid/test/cluster"
)

const impatient = config.Duration(time.Second)

// nobody is a cluster whose members are started one by one, and do not wait long
// for what they need.
func nobody(t *testing.T) *cluster.Cluster {
	t.Helper()
	return cluster.Start(t, cluster.Options{
		Metadata: -1, RLMs: -1, Brokers: -1,
		ChangeMetadata: func(cfg *metadata.Config) { cfg.Etcd.StartTimeout, cfg.Store.StartTimeout = impatient, impatient },
		ChangeRLM:      func(cfg *rlm.Config) { cfg.Store.StartTimeout = impatient },
		ChangeBroker:   func(cfg *broker.Config) { cfg.StartTimeout = impatient },
	})
}

// endsSoon starts a member that can't come up, and requires that it says why
// within a bound.
func endsSoon(t *testing.T, m *cluster.Member, says ...string) error {
	t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	err := m.TryStart(ctx)
	if err == nil {
		err = m.Wait()
	}
	require.Error(t, err)
	t.Logf("after %s: %v", time.Since(began).Round(time.Millisecond), err)
	assert.Less(t, time.Since(began), 30*time.Second)
	require.NotErrorIs(t, err, context.Canceled)
	for _, s := range says {
		assert.Contains(t, err.Error(), s)
	}
	assert.False(t, m.Running())
	return err
}

func TestAMemberThatCanNotReachWhatItNeedsSaysSoAndEnds(t *testing.T) {
	t.Parallel()
	t.Run("metadata without etcd", func(t *testing.T) {
		t.Parallel()
		c := nobody(t)
		c.StopEtcd()
		m := c.AddDown(cluster.RoleMetadata)
		_ = endsSoon(t, m, "etcd", "unreachable")
		c.StartEtcd()
		m.Start()
		c.WaitController()
	})
	for name, down := range map[string]func(*cluster.Cluster, bool){
		"down": (*cluster.Cluster).BucketDown,
		"answering 503": func(c *cluster.Cluster, on bool) {
			if on {
				c.Faults(gcsemu.Rule{Action: gcsemu.ActStatus, Status: 503})
			} else {
				c.Faults()
			}
		},
		"silent": func(c *cluster.Cluster, on bool) {
			if on {
				c.Faults(gcsemu.Rule{Action: gcsemu.ActHang})
			} else {
				c.Faults()
			}
		},
	} {
		t.Run("metadata and rlm with the bucket "+name, func(t *testing.T) {
			t.Parallel()
			c := nobody(t)
			m, r := c.AddDown(cluster.RoleMetadata), c.AddDown(cluster.RoleRLM)
			down(c, true)
			require.ErrorIs(t, endsSoon(t, m, cluster.BucketName, "1s"), metadata.ErrStoreUnreachable)
			_ = endsSoon(t, r, cluster.BucketName, "unreachable", "1s")
			down(c, false)
			m.Start()
			c.WaitController()
			r.Start()
			c.WaitMembers()
		})
	}
	t.Run("rlm in a bucket without a cluster", func(t *testing.T) {
		t.Parallel()
		c := nobody(t)
		c.AddDown(cluster.RoleMetadata)
		_ = endsSoon(t, c.AddDown(cluster.RoleRLM), "marker")
	})
	t.Run("metadata in a bucket of another cluster", func(t *testing.T) {
		t.Parallel()
		c := cluster.Start(t, cluster.Options{RLMs: -1, Brokers: -1, ChangeMetadata: func(cfg *metadata.Config) {
			if cfg.ID == 2 {
				cfg.Etcd.Prefix = "/other/"
			}
		}})
		first := c.Metadata(1).MetadataServer().ClusterID()
		other := c.AddDown(cluster.RoleMetadata)
		err := other.TryStart(t.Context())
		if err == nil {
			err = other.Wait()
		}
		require.Error(t, err)
		assert.Contains(t, err.Error(), first, "the error names the cluster")
	})
	t.Run("broker without metadata", func(t *testing.T) {
		t.Parallel()
		c := nobody(t)
		m, b := c.AddDown(cluster.RoleMetadata), c.AddDown(cluster.RoleBroker)
		err := endsSoon(t, b, m.Address())
		var start *broker.StartError
		require.ErrorAs(t, err, &start)
		assert.False(t, start.Reachable)
		m.Start()
		c.WaitController()
		b.Start()
		c.WaitReady(b)
	})
	t.Run("an rlm waits for the metadata service and is not ready before", func(t *testing.T) {
		t.Parallel()
		c := nobody(t)
		m := c.AddDown(cluster.RoleMetadata)
		m.Start()
		c.WaitController()
		m.Kill()
		r := c.Add(cluster.RoleRLM)
		health := healthv1.NewHealthClient(c.Conn(r))
		c.Eventually("it answers", func() bool {
			resp, err := health.Check(bounded(t, 5*time.Second), &healthv1.HealthCheckRequest{})
			return err == nil && resp.GetStatus() == healthv1.HealthCheckResponse_NOT_SERVING
		})
		m.Start()
		c.Eventually("it is ready", func() bool {
			resp, err := health.Check(bounded(t, 5*time.Second), &healthv1.HealthCheckRequest{})
			return err == nil && resp.GetStatus() == healthv1.HealthCheckResponse_SERVING
		})
	})
}
