package broker

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"time"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/telemetry"
	"github.com/braidlog/braid/services/broker/internal/api"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

// Config is the service's data; see docs/configuration.md for every key.
type Config struct {
	// ID is the broker's id, from 1, unique in the cluster.
	ID int
	// Zone is its availability zone; may be empty.
	Zone string
	// DataDir holds the logs; one process at a time.
	DataDir string
	// AdvertiseAddress is host:port under which clients and other brokers reach
	// it; empty = the address listened on.
	AdvertiseAddress string
	// MetadataAddresses are the metadata replicas.
	MetadataAddresses config.Strings
	// StartTimeout bounds the wait for the metadata service at start.
	StartTimeout config.Duration
	// HandoverTimeout bounds the wait at a stop until what was appended is in
	// the bucket.
	HandoverTimeout config.Duration
	// GRPC is the server, Client the connections to all other processes.
	GRPC   grpcserver.Config
	Client grpcclient.Config
	// Telemetry is logs, traces and metrics.
	Telemetry telemetry.Config

	// API are the limits of calls, Partitions those of the logs. Their types are
	// this module's own; use RegisterFlags or DefaultConfig to fill them.
	API        api.Config
	Partitions replica.Config
}

// DefaultConfig returns the defaults; id, data directory and metadata addresses
// have none.
func DefaultConfig() Config {
	var c Config
	c.RegisterFlags("", flag.NewFlagSet("", flag.ContinueOnError))
	return c
}

// RegisterFlags implements config.Section.
func (c *Config) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	fs.IntVar(&c.ID, key("id"), 0, "id of this broker, from 1, unique in the cluster")
	fs.StringVar(&c.Zone, key("zone"), "", "availability zone; a remote-log manager of the same zone is preferred")
	fs.StringVar(&c.DataDir, key("data.dir"), "", "`directory` of the logs; one process at a time")
	fs.StringVar(&c.AdvertiseAddress, key("grpc.advertise-address"), "", "`address` (host:port) told to clients and other brokers; empty is the one listened on")
	config.StringsVar(fs, &c.MetadataAddresses, key("metadata.addresses"), nil, "`addresses` (host:port, …) of the metadata replicas")
	config.DurationVar(fs, &c.StartTimeout, key("start.timeout"), 30*time.Second, "wait for the metadata service at start")
	config.DurationVar(fs, &c.HandoverTimeout, key("stop.handover-timeout"), 10*time.Second, "wait at a stop until what was appended is in the bucket, before the partitions are handed over")
	c.GRPC.RegisterFlags(key("grpc"), fs)
	c.Client.RegisterFlags(key("client"), fs)
	c.Telemetry.RegisterFlags(prefix, fs)
	c.API.RegisterFlags(prefix, fs)
	c.Partitions.RegisterFlags(prefix, fs)
}

// Validate implements config.Section.
func (c *Config) Validate() error {
	var addresses, advertise error
	for _, a := range c.MetadataAddresses {
		addresses = errors.Join(addresses, config.CheckAddress("metadata.addresses", a))
	}
	if c.AdvertiseAddress != "" {
		advertise = config.CheckAddress("grpc.advertise-address", c.AdvertiseAddress)
		if host, port, err := net.SplitHostPort(c.AdvertiseAddress); err == nil && (host == "" || port == "0") {
			advertise = config.Invalid("grpc.advertise-address", c.AdvertiseAddress, "an address that others can use")
		}
	}
	return errors.Join(
		config.Check(c.ID >= 1 && c.ID <= 1<<31-1, "id", c.ID, "from 1 to 2147483647"),
		config.Check(c.DataDir != "", "data.dir", c.DataDir, "a directory"),
		config.Check(len(c.MetadataAddresses) > 0, "metadata.addresses", c.MetadataAddresses, "one or more addresses"),
		addresses, advertise,
		config.Check(c.StartTimeout > 0, "start.timeout", c.StartTimeout, "more than 0s"),
		config.Check(c.HandoverTimeout > 0, "stop.handover-timeout", c.HandoverTimeout, "more than 0s"),
		config.Prefix("grpc", c.GRPC.Validate()),
		config.Prefix("client", c.Client.Validate()),
		c.Telemetry.Validate(),
		c.API.Validate(),
		c.Partitions.Validate(),
	)
}

// advertised is the address for others, given the one listened on.
func (c *Config) advertised(listening net.Addr) (string, error) {
	if c.AdvertiseAddress != "" {
		return c.AdvertiseAddress, nil
	}
	host, port, err := net.SplitHostPort(listening.String())
	if err != nil {
		return "", fmt.Errorf("advertise %s: %w", listening, err)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		return "", config.Invalid("grpc.advertise-address", "", "given when listening on every interface ("+listening.String()+")")
	}
	return net.JoinHostPort(host, port), nil
}
