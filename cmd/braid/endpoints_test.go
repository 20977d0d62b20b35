package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEndpointsHaveTheirShape(t *testing.T) {
	e := newEndpoints()
	e.put("broker", endpoint{ID: 2, Address: "127.0.0.1:2", PID: 12, Zone: "zone-b"})
	e.put("broker", endpoint{ID: 1, Address: "127.0.0.1:1", PID: 11, Zone: "zone-a"})
	e.put("metadata", endpoint{ID: 1, Address: "127.0.0.1:3", PID: 13, Zone: "zone-a"})
	e.Etcd, e.ObjectStore = "http://127.0.0.1:4", "http://127.0.0.1:5"
	path := filepath.Join(t.TempDir(), endpointsFile)
	require.NoError(t, e.write(path))
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.JSONEq(t, `{"broker":[{"id":1,"address":"127.0.0.1:1","pid":11,"zone":"zone-a"},{"id":2,"address":"127.0.0.1:2","pid":12,"zone":"zone-b"}],
		"rlm":[],"metadata":[{"id":1,"address":"127.0.0.1:3","pid":13,"zone":"zone-a"}],"mirror":[],"etcd":"http://127.0.0.1:4","object_store":"http://127.0.0.1:5"}`, string(data))

	e.put("broker", endpoint{ID: 1, Address: "127.0.0.1:1", PID: 99})
	e.remove("broker", 2)
	require.Equal(t, []endpoint{{ID: 1, Address: "127.0.0.1:1", PID: 99}}, e.Broker)
}

func TestAReaderOfEndpointsNeverSeesHalf(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, endpointsFile)
	var writers sync.WaitGroup
	done := make(chan struct{})
	for w := range 2 {
		writers.Go(func() {
			for i := range 200 {
				e := newEndpoints()
				for id := 1; id <= 1+(w*31+i)%40; id++ {
					e.put("broker", endpoint{ID: id, Address: "127.0.0.1:1", PID: i})
				}
				if err := e.write(path); err != nil {
					t.Error(err)
				}
			}
		})
	}
	go func() { writers.Wait(); close(done) }()
	for reads := 0; ; reads++ {
		data, err := os.ReadFile(path)
		if !errors.Is(err, fs.ErrNotExist) {
			require.NoError(t, err)
			require.True(t, json.Valid(data), "%s", data)
		}
		select {
		case <-done:
			entries, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Len(t, entries, 1, "no temporary file is left")
			return
		default:
		}
	}
}

func TestPortsKeepWhatIsFree(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	taken := l.Addr().String()
	var p ports
	first, err := p.take("")
	require.NoError(t, err)
	got, err := p.take(taken)
	require.NoError(t, err)
	require.NotEqual(t, taken, got)
	require.NoError(t, l.Close())
	got, err = p.take(taken)
	require.NoError(t, err)
	require.Equal(t, taken, got)
	again, err := p.take(first)
	require.NoError(t, err)
	require.NotEqual(t, first, again, "nothing is given out twice")
}
