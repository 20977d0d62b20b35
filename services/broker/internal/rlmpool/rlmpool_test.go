package rlmpool_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/rlmpool"
)

func TestRankPutsTheOwnZoneFirstAndSpreads(t *testing.T) {
	all := []cluster.RemoteLogManager{
		{ID: 1, Address: "r:1", Zone: "a", Open: true}, {ID: 2, Address: "r:2", Zone: "a", Open: true},
		{ID: 3, Address: "r:3", Zone: "b", Open: true}, {ID: 4, Address: "r:4", Zone: "a"},
	}
	first := map[int32]int{}
	for i := range 300 {
		got := rlmpool.Rank(all, "a", fmt.Sprintf("object/%d", i))
		require.Len(t, got, 3, "closed ones are left out")
		require.EqualValues(t, 3, got[2].ID)
		require.Equal(t, got, rlmpool.Rank([]cluster.RemoteLogManager{all[2], all[1], all[0]}, "a", fmt.Sprintf("object/%d", i)), "no matter in which order they are known")
		first[got[0].ID]++
	}
	require.Greater(t, first[1], 90)
	require.Greater(t, first[2], 90)
}

func TestPoolKeepsOneConnectionEach(t *testing.T) {
	dialed := 0
	p := rlmpool.New(func(a string) (*grpc.ClientConn, error) {
		dialed++
		return grpc.NewClient("passthrough:///"+a, grpc.WithTransportCredentials(insecure.NewCredentials()))
	})
	one, err := p.Conn("r:1")
	require.NoError(t, err)
	again, err := p.Conn("r:1")
	require.NoError(t, err)
	require.Same(t, one, again)
	require.NoError(t, p.Keep([]cluster.RemoteLogManager{{Address: "r:2"}}))
	_, err = p.Conn("r:1")
	require.NoError(t, err)
	require.Equal(t, 2, dialed)
	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	_, err = p.Conn("r:1")
	require.ErrorIs(t, err, rlmpool.ErrClosed)
}
