package gcsemu

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAdminPathsAreForLoopbackPeers(t *testing.T) {
	f, err := newFaults(0, nil)
	require.NoError(t, err)
	for _, c := range []struct {
		peer     string
		anywhere bool
		want     int
	}{
		{"127.0.0.1:1", false, 200}, {"[::1]:1", false, 200}, {"10.0.0.7:1", false, 403},
		{"10.0.0.7:1", true, 200}, {"nonsense", false, 403},
	} {
		h := &handler{faults: f, stats: newCounters(), anywhere: c.anywhere}
		r := httptest.NewRequest(http.MethodGet, faultsPath, nil)
		r.RemoteAddr = c.peer
		w := httptest.NewRecorder()
		h.admin(w, r)
		require.Equal(t, c.want, w.Code, c.peer)
	}
}

func TestCountersAreBounded(t *testing.T) {
	c := newCounters()
	for i := range maxCountedObjects + 10 {
		c.request(OpRead, fmt.Sprint(i))
	}
	c.request(OpRead, "0")
	s := c.snapshot()
	require.Len(t, s.Objects[OpRead], maxCountedObjects+1)
	require.EqualValues(t, 10, s.Objects[OpRead][Overflow])
	require.EqualValues(t, 2, c.requests(OpRead, "0"))
	require.EqualValues(t, maxCountedObjects+11, s.ClassB)
}
