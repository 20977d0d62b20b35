package integration_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/test/cluster"
)

func TestSmoke(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Brokers: 2})
	c.CreateTopic("quakes", 2)
	leader, _ := c.Leader("quakes", 0)
	resp := mustAppend(t, c, leader, "quakes", 0, levelObject, plain(t, "a", "b"))
	require.EqualValues(t, 2, resp.GetEndOffset())
	require.Equal(t, []string{"a", "b"}, values(readAll(t, c, leader, "quakes", 0, 0)))
	leader.Kill()
	next, _ := c.LeaderAbove("quakes", 0, resp.GetLeadership().GetLeaderEpoch())
	require.NotEqual(t, leader, next)
	require.Equal(t, []string{"a", "b"}, values(readAll(t, c, next, "quakes", 0, 0)))
	leader.Start()
	c.WaitReady(leader)
}
