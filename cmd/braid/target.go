package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/braidlog/braid/pkg/client"
)

// target says which cluster a command talks to.
type target struct {
	brokers, metadata, dir string
}

const targetHelp = `
Which cluster: --brokers ADDR[,ADDR] names brokers (any live one is enough), --metadata ADDR[,ADDR] metadata replicas, and
--data-dir D the directory of a running ` + "`braid dev`" + `, whose endpoints.json names both. Without flags, the environment
variables BRAID_BROKERS, BRAID_METADATA and BRAID_DATA_DIR say it.`

func (t *target) register(fs *flag.FlagSet) {
	fs.StringVar(&t.brokers, "brokers", "", "`addresses` of brokers, host:port, separated by commas")
	fs.StringVar(&t.metadata, "metadata", "", "`addresses` of metadata replicas, host:port, separated by commas")
	fs.StringVar(&t.dir, "data-dir", "", "`directory` of a running braid dev")
}

// resolve fills in what the environment and endpoints.json say.
func (t *target) resolve() error {
	if t.brokers == "" && t.metadata == "" && t.dir == "" {
		t.brokers, t.metadata, t.dir = os.Getenv("BRAID_BROKERS"), os.Getenv("BRAID_METADATA"), os.Getenv("BRAID_DATA_DIR")
	}
	if t.dir == "" {
		if t.brokers == "" && t.metadata == "" {
			return usagef("name the cluster with --brokers, --metadata or --data-dir")
		}
		return nil
	}
	path := t.dir
	if filepath.Ext(path) != ".json" {
		path = filepath.Join(path, endpointsFile)
	}
	e, err := readEndpoints(path)
	if err != nil {
		return fmt.Errorf("--data-dir %s: no cluster was started there: %w", t.dir, err)
	}
	if t.brokers == "" {
		t.brokers = strings.Join(e.addresses("broker"), ",")
	}
	if t.metadata == "" {
		t.metadata = strings.Join(e.addresses("metadata"), ",")
	}
	return nil
}

func split(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}

// client connects to the brokers.
func (t *target) client() (*client.Client, error) {
	if err := t.resolve(); err != nil {
		return nil, err
	}
	if t.brokers == "" {
		return nil, usagef("name brokers with --brokers, or a data directory with --data-dir")
	}
	c, err := client.Dial(client.Options{Brokers: split(t.brokers)})
	if err != nil {
		return nil, &usageError{err}
	}
	return c, nil
}

// admin connects to the metadata service. Where only brokers are known, one of
// them says where its controller is.
func (t *target) admin(ctx context.Context) (*client.Admin, error) {
	if err := t.resolve(); err != nil {
		return nil, err
	}
	addresses := split(t.metadata)
	if len(addresses) == 0 {
		c, err := t.client()
		if err != nil {
			return nil, err
		}
		defer func() { _ = c.Close() }() // it was only asked one thing
		ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		cluster, err := c.DescribeCluster(ctx)
		if err != nil {
			return nil, err
		}
		if cluster.Controller == "" {
			return nil, fmt.Errorf("the brokers know no metadata controller now; name metadata replicas with --metadata")
		}
		addresses = []string{cluster.Controller}
	}
	return client.DialAdmin(addresses, client.Options{})
}
