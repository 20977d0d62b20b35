package metadata

import (
	"errors"
	"flag"
	"net"
	"net/url"
	"time"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/telemetry"
)

// EtcdConfig says where the metadata log is.
type EtcdConfig struct {
	// Endpoints of etcd: URLs or host:port.
	Endpoints config.Strings
	// Prefix of every key; it ends in a slash.
	Prefix string
	// StartTimeout bounds the wait for etcd at start.
	StartTimeout config.Duration
	// RequestTimeout bounds one request.
	RequestTimeout config.Duration
	// ProbeInterval is how often the log's end is compared with what was applied.
	ProbeInterval config.Duration
	// Quota says which commands stop as etcd fills.
	Quota QuotaConfig
}

// QuotaConfig says at how many percent of etcd's quota commands stop: so much of
// it has to be in use by what can't be reused. 100 leaves it to etcd.
type QuotaConfig struct {
	// Bytes is etcd's quota; 0 is what etcd says.
	Bytes config.Size
	// Interval is how often the controller asks etcd how full it is.
	Interval config.Duration
	// DataPercent stops commits of ranges, TopicPercent changes of topics and
	// blocks of producer ids, VitalPercent elections, registrations and what frees
	// space.
	DataPercent, TopicPercent, VitalPercent int
}

// RegisterFlags implements config.Section.
func (c *QuotaConfig) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	config.SizeVar(fs, &c.Bytes, key("bytes"), 0, "etcd's space quota; 0 is what etcd says it is")
	config.DurationVar(fs, &c.Interval, key("interval"), 5*time.Second, "how often the controller asks etcd how full it is")
	fs.IntVar(&c.DataPercent, key("data-percent"), 60, "`percent` of etcd's quota in use at which commits of ranges are refused; 100 = when etcd refuses")
	fs.IntVar(&c.TopicPercent, key("topic-percent"), 75, "`percent` of etcd's quota in use at which changes of topics and blocks of producer ids are refused; 100 = when etcd refuses")
	fs.IntVar(&c.VitalPercent, key("vital-percent"), 90, "`percent` of etcd's quota in use at which elections, registrations and deletions are refused; 100 = when etcd refuses")
}

// Validate implements config.Section.
func (c *QuotaConfig) Validate() error {
	return errors.Join(
		config.Check(c.Bytes >= 0, "bytes", c.Bytes, "0 or more"),
		config.Check(c.Interval.Std() >= 10*time.Millisecond, "interval", c.Interval, "at least 10ms"),
		config.Check(c.DataPercent >= 1 && c.DataPercent <= c.TopicPercent, "data-percent", c.DataPercent, "from 1 to topic-percent"),
		config.Check(c.TopicPercent >= 1 && c.TopicPercent <= c.VitalPercent, "topic-percent", c.TopicPercent, "from 1 to vital-percent"),
		config.Check(c.VitalPercent >= 1 && c.VitalPercent <= 100, "vital-percent", c.VitalPercent, "from 1 to 100"),
	)
}

// SnapshotConfig says when snapshots of the metadata state are taken.
type SnapshotConfig struct {
	// TailBytes: one is due once the entries since the last one have more bytes
	// than this and than the last one.
	TailBytes config.Size
	// Interval: one is due when the last one is this old and there are entries since.
	Interval config.Duration
	// CheckInterval is how often a replica looks whether one is due, and the
	// controller whether the log is to be trimmed.
	CheckInterval config.Duration
}

// RegisterFlags implements config.Section.
func (c *SnapshotConfig) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	config.SizeVar(fs, &c.TailBytes, key("tail-bytes"), 64*config.MiB, "a snapshot is taken once the metadata entries since the last one have more bytes than this, and than the last one")
	config.DurationVar(fs, &c.Interval, key("interval"), 10*time.Minute, "a snapshot is taken when the last one is this old and there are entries since")
	config.DurationVar(fs, &c.CheckInterval, key("check-interval"), time.Second, "how often a replica looks whether a snapshot is due or the log is to be trimmed")
}

// Validate implements config.Section.
func (c *SnapshotConfig) Validate() error {
	return errors.Join(
		config.Check(c.TailBytes >= 0, "tail-bytes", c.TailBytes, "0 or more"),
		config.Check(c.Interval.Std() >= 10*time.Millisecond, "interval", c.Interval, "at least 10ms"),
		config.Check(c.CheckInterval.Std() >= 10*time.Millisecond, "check-interval", c.CheckInterval, "at least 10ms"),
	)
}

// RegisterFlags implements config.Section.
func (c *EtcdConfig) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	config.StringsVar(fs, &c.Endpoints, key("endpoints"), []string{"http://127.0.0.1:2379"}, "endpoints of etcd")
	fs.StringVar(&c.Prefix, key("prefix"), "/braid/", "prefix of every key in etcd, with a slash at its end; one cluster each")
	config.DurationVar(fs, &c.StartTimeout, key("start-timeout"), 15*time.Second, "wait for etcd at start, past which the process ends")
	config.DurationVar(fs, &c.RequestTimeout, key("request-timeout"), 2*time.Second, "bound of one request to etcd")
	config.DurationVar(fs, &c.ProbeInterval, key("probe-interval"), 5*time.Second, "how often the log's end in etcd is compared with what was applied")
	c.Quota.RegisterFlags(key("quota"), fs)
}

// Validate implements config.Section.
func (c *EtcdConfig) Validate() error {
	errs := []error{
		config.Check(len(c.Endpoints) > 0, "endpoints", c.Endpoints, "at least one endpoint"),
		config.Check(len(c.Prefix) > 1 && c.Prefix[len(c.Prefix)-1] == '/', "prefix", c.Prefix, "a key prefix with a slash at its end"),
		config.Check(c.StartTimeout > 0, "start-timeout", c.StartTimeout, "more than 0s"),
		config.Check(c.RequestTimeout > 0, "request-timeout", c.RequestTimeout, "more than 0s"),
		config.Check(c.ProbeInterval.Std() >= 100*time.Millisecond, "probe-interval", c.ProbeInterval, "at least 100ms"),
		config.Prefix("quota", c.Quota.Validate()),
	}
	return errors.Join(errs...)
}

// StoreConfig says where the cluster's objects are.
type StoreConfig struct {
	// Bucket's name.
	Bucket string
	// Prefix of every object's name, without slashes at its ends; may be empty.
	Prefix string
	// Endpoint of an emulator; empty means Google Cloud Storage.
	Endpoint string
	// StartTimeout bounds the wait for the store at start.
	StartTimeout config.Duration
}

// RegisterFlags implements config.Section.
func (c *StoreConfig) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	fs.StringVar(&c.Bucket, key("bucket"), "", "`name` of the bucket; required")
	fs.StringVar(&c.Prefix, key("prefix"), "", "prefix of every object's name; one cluster each")
	fs.StringVar(&c.Endpoint, key("endpoint"), "", "`URL` of a storage emulator; empty means Google Cloud Storage")
	config.DurationVar(fs, &c.StartTimeout, key("start-timeout"), 15*time.Second, "wait for the object store at start, past which the process ends")
}

// Validate implements config.Section.
func (c *StoreConfig) Validate() error {
	var endpoint error
	if c.Endpoint != "" {
		u, err := url.Parse(c.Endpoint)
		endpoint = config.Check(err == nil && u.Host != "", "endpoint", c.Endpoint, "a URL such as http://127.0.0.1:4443")
	}
	return errors.Join(endpoint, config.Check(c.StartTimeout > 0, "start-timeout", c.StartTimeout, "more than 0s"))
}

// Config is the service's data.
type Config struct {
	// ID of this replica, from 1; no two replicas share one.
	ID int
	// Zone this replica runs in; may be empty.
	Zone string
	// AdvertiseAddress is where others reach this replica, host:port; empty means
	// the address that it listens on.
	AdvertiseAddress string
	GRPC             grpcserver.Config
	Telemetry        telemetry.Config
	Etcd             EtcdConfig
	Store            StoreConfig
	// DataDir is where this replica keeps its snapshots; empty means a temporary
	// directory that goes with the process, so that a restart asks a peer or the
	// bucket.
	DataDir  string
	Snapshot SnapshotConfig

	// SessionTimeout of brokers and remote-log managers.
	SessionTimeout config.Duration
	// LeaseTTL is the time to live of the controller's leadership; whole seconds.
	LeaseTTL config.Duration
	// OpenTimeout is how long an elected leader may take to open its epoch.
	OpenTimeout config.Duration
	// ReplaceTimeout is how long a partition is left without a live replica before
	// a live broker is made one.
	ReplaceTimeout config.Duration
	// RebalanceDelay is how long a live replica stands before the leader in the
	// order of preference before the leader is asked to hand over; 0 never asks.
	RebalanceDelay config.Duration

	// Progress is how often an idle watch gets a progress mark.
	Progress config.Duration
	// Stall is how long a watcher may leave a message untaken.
	Stall config.Duration
	// RingEntries and RingBytes bound the newest entries kept in memory for
	// watchers.
	RingEntries int
	RingBytes   config.Size
}

// DefaultConfig returns the defaults that RegisterFlags sets.
func DefaultConfig() Config {
	var c Config
	c.RegisterFlags("", flag.NewFlagSet("", flag.ContinueOnError))
	return c
}

// RegisterFlags implements config.Section.
func (c *Config) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	fs.IntVar(&c.ID, key("id"), 1, "`id` of this replica, from 1; no two replicas share one")
	fs.StringVar(&c.Zone, key("zone"), "", "availability zone that this replica runs in")
	c.GRPC.RegisterFlags(key("grpc"), fs)
	fs.StringVar(&c.AdvertiseAddress, key("grpc.advertise-address"), "", "`address` (host:port) at which others reach this replica; empty means where it listens")
	c.Telemetry.RegisterFlags(prefix, fs)
	c.Etcd.RegisterFlags(key("etcd"), fs)
	c.Store.RegisterFlags(key("store"), fs)
	fs.StringVar(&c.DataDir, key("data.dir"), "", "`directory` for this replica's snapshots of the metadata; empty means a temporary one that goes with the process")
	c.Snapshot.RegisterFlags(key("snapshot"), fs)
	config.DurationVar(fs, &c.SessionTimeout, key("session.timeout"), 6*time.Second, "time without a heartbeat after which a broker or remote-log manager is taken for gone")
	config.DurationVar(fs, &c.LeaseTTL, key("controller.lease-ttl"), 6*time.Second, "time to live of the controller's leadership in etcd, in whole seconds")
	config.DurationVar(fs, &c.OpenTimeout, key("election.open-timeout"), 10*time.Second, "time for an elected leader to open its epoch, past which another is elected")
	config.DurationVar(fs, &c.ReplaceTimeout, key("replica.replace.timeout"), 10*time.Minute, "time that a partition may have no live replica, past which a live broker is made one and its leader")
	config.DurationVar(fs, &c.RebalanceDelay, key("leader.rebalance.delay"), 30*time.Second, "time that a live replica stands before the leader in the order of preference, past which the leader is asked to hand over; 0s = never")
	config.DurationVar(fs, &c.Progress, key("watch.progress-interval"), time.Second, "how often an idle watch gets a progress mark")
	config.DurationVar(fs, &c.Stall, key("watch.stall-timeout"), 30*time.Second, "time that a watcher may leave a message untaken, past which its stream ends")
	fs.IntVar(&c.RingEntries, key("watch.ring-entries"), 1<<16, "newest metadata entries kept in memory for watchers")
	config.SizeVar(fs, &c.RingBytes, key("watch.ring-bytes"), 64*config.MiB, "bound of the newest metadata entries in memory")
}

// Validate implements config.Section.
func (c *Config) Validate() error {
	var address error
	if c.AdvertiseAddress != "" {
		address = config.CheckAddress("grpc.advertise-address", c.AdvertiseAddress)
		if host, port, err := net.SplitHostPort(c.AdvertiseAddress); err == nil && (host == "" || port == "0") {
			address = config.Invalid("grpc.advertise-address", c.AdvertiseAddress, "an address that others can use")
		}
	}
	second := func(field string, d config.Duration, least time.Duration) error {
		return config.Check(d.Std() >= least, field, d, "at least "+config.Duration(least).String())
	}
	return errors.Join(
		config.Check(c.ID >= 1 && c.ID < 1<<31, "id", c.ID, "from 1 to 2147483647"),
		address,
		config.Prefix("grpc", c.GRPC.Validate()),
		c.Telemetry.Validate(),
		config.Prefix("etcd", c.Etcd.Validate()),
		config.Prefix("store", c.Store.Validate()),
		config.Prefix("snapshot", c.Snapshot.Validate()),
		second("session.timeout", c.SessionTimeout, 200*time.Millisecond),
		config.Check(c.LeaseTTL.Std() >= time.Second && c.LeaseTTL.Std()%time.Second == 0, "controller.lease-ttl", c.LeaseTTL, "whole seconds, at least 1s"),
		second("election.open-timeout", c.OpenTimeout, 100*time.Millisecond),
		second("replica.replace.timeout", c.ReplaceTimeout, 100*time.Millisecond),
		config.Check(c.RebalanceDelay >= 0, "leader.rebalance.delay", c.RebalanceDelay, "0s or more"),
		second("watch.progress-interval", c.Progress, 10*time.Millisecond),
		second("watch.stall-timeout", c.Stall, 100*time.Millisecond),
		config.Check(c.RingEntries >= 16, "watch.ring-entries", c.RingEntries, "at least 16"),
		config.Check(c.RingBytes >= config.MiB, "watch.ring-bytes", c.RingBytes, "at least 1MiB"),
	)
}
