package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// endpointsFile is the name of the file in a data directory that says where
// everything of a `braid dev` is.
const endpointsFile = "endpoints.json"

// endpoint is a running role instance.
type endpoint struct {
	ID      int    `json:"id"`
	Address string `json:"address"` // host:port of its gRPC server
	PID     int    `json:"pid"`     // of the process it runs in
	Zone    string `json:"zone"`
}

// endpoints is the content of endpoints.json. Lists are in order of id and never
// null.
type endpoints struct {
	Broker      []endpoint `json:"broker"`
	RLM         []endpoint `json:"rlm"`
	Metadata    []endpoint `json:"metadata"`
	Mirror      []endpoint `json:"mirror"`
	Etcd        string     `json:"etcd"`         // URL of the embedded etcd
	ObjectStore string     `json:"object_store"` // URL of the embedded object store
}

func newEndpoints() *endpoints {
	return &endpoints{Broker: []endpoint{}, RLM: []endpoint{}, Metadata: []endpoint{}, Mirror: []endpoint{}}
}

func (e *endpoints) list(role string) *[]endpoint {
	switch role {
	case "broker":
		return &e.Broker
	case "rlm":
		return &e.RLM
	case "metadata":
		return &e.Metadata
	default:
		return &e.Mirror
	}
}

// put adds an instance or replaces the one with its id.
func (e *endpoints) put(role string, x endpoint) {
	l := e.list(role)
	i, found := slices.BinarySearchFunc(*l, x.ID, func(have endpoint, id int) int { return have.ID - id })
	if found {
		(*l)[i] = x
		return
	}
	*l = slices.Insert(*l, i, x)
}

func (e *endpoints) remove(role string, id int) {
	l := e.list(role)
	*l = slices.DeleteFunc(*l, func(x endpoint) bool { return x.ID == id })
}

func (e *endpoints) find(role string, id int) (endpoint, bool) {
	for _, x := range *e.list(role) {
		if x.ID == id {
			return x, true
		}
	}
	return endpoint{}, false
}

func (e *endpoints) addresses(role string) []string {
	var out []string
	for _, x := range *e.list(role) {
		out = append(out, x.Address)
	}
	return out
}

func (e *endpoints) clone() endpoints {
	out := *e
	out.Broker, out.RLM = slices.Clone(e.Broker), slices.Clone(e.RLM)
	out.Metadata, out.Mirror = slices.Clone(e.Metadata), slices.Clone(e.Mirror)
	return out
}

// write replaces the file at path as a whole: whoever reads it sees the old
// content or the new one.
func (e *endpoints) write(path string) (err error) {
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name()) // the first error counts
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if _, err = f.Write(append(data, '\n')); err == nil {
		err = f.Chmod(0o644)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func readEndpoints(path string) (*endpoints, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	e := newEndpoints()
	if err := json.Unmarshal(data, e); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return e, nil
}
