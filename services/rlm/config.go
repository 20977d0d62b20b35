package rlm

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
	"github.com/braidlog/braid/services/rlm/internal/combiner"
	"github.com/braidlog/braid/services/rlm/internal/fetcher"
	"github.com/braidlog/braid/services/rlm/planner"
)

// Config is the service's data; see docs/configuration.md for every key.
type Config struct {
	// ID is the remote-log manager's id, from 1, unique in the cluster.
	ID int
	// Zone is its availability zone; may be empty.
	Zone string
	// AdvertiseAddress is host:port under which brokers reach it; empty = the
	// address listened on.
	AdvertiseAddress string
	// GRPC is the server, Client the connections to the metadata service.
	GRPC   grpcserver.Config
	Client grpcclient.Config
	// Telemetry is logs, traces and metrics.
	Telemetry telemetry.Config
	// MetadataAddresses are the metadata replicas.
	MetadataAddresses config.Strings
	// Store is the bucket.
	Store StoreConfig
	// WAL is the write-ahead log's upload.
	WAL WALConfig
	// Cache is the cache for reads.
	Cache CacheConfig
}

// StoreConfig says where objects go.
type StoreConfig struct {
	// Bucket is the bucket's name.
	Bucket string
	// Prefix is what all names begin with; may be empty.
	Prefix string
	// Endpoint is the base URL of an emulator; empty = Google Cloud Storage.
	Endpoint string
	// StartTimeout bounds the wait for the bucket at start.
	StartTimeout config.Duration
	// MaxWrites and MaxReads bound requests running at once.
	MaxWrites, MaxReads int
}

// WALConfig are the limits of uploads.
type WALConfig struct {
	InFlight        int
	Linger          config.Duration
	MaxObject       config.Size
	MaxRanges       int
	HedgeMin        config.Duration
	PutTimeout      config.Duration
	FlushTimeout    config.Duration
	Buffer          config.Size
	PartitionCredit config.Size
	StreamCredit    config.Size
}

// CacheConfig are the limits of reads.
type CacheConfig struct {
	Size        config.Size
	Footers     config.Size
	FooterWork  config.Size
	PeerPinned  config.Size
	Pinned      config.Size
	ReadTimeout config.Duration
	SendTimeout config.Duration
}

// DefaultConfig returns the defaults; id, metadata addresses and bucket have none.
func DefaultConfig() Config {
	var c Config
	c.RegisterFlags("", flag.NewFlagSet("", flag.ContinueOnError))
	return c
}

// RegisterFlags implements config.Section.
func (c *Config) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	fs.IntVar(&c.ID, key("id"), 0, "id of this remote-log manager, from 1, unique in the cluster")
	fs.StringVar(&c.Zone, key("zone"), "", "availability zone; brokers prefer a remote-log manager of their own")
	fs.StringVar(&c.AdvertiseAddress, key("grpc.advertise-address"), "", "`address` (host:port) told to brokers; empty is the one listened on")
	c.GRPC.RegisterFlags(key("grpc"), fs)
	c.Client.RegisterFlags(key("client"), fs)
	c.Telemetry.RegisterFlags(prefix, fs)
	config.StringsVar(fs, &c.MetadataAddresses, key("metadata.addresses"), nil, "`addresses` (host:port, …) of the metadata replicas")
	c.Store.register(key("store"), fs)
	c.WAL.register(key("wal"), fs)
	c.Cache.register(key("cache"), fs)
}

func (c *StoreConfig) register(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	fs.StringVar(&c.Bucket, key("bucket"), "", "name of the bucket")
	fs.StringVar(&c.Prefix, key("prefix"), "", "what all object names begin with")
	fs.StringVar(&c.Endpoint, key("endpoint"), "", "base `URL` of an emulator; empty is Google Cloud Storage")
	config.DurationVar(fs, &c.StartTimeout, key("start-timeout"), 30*time.Second, "wait for the bucket and its cluster marker at start")
	fs.IntVar(&c.MaxWrites, key("max-writes"), 16, "write requests running at once")
	fs.IntVar(&c.MaxReads, key("max-reads"), 32, "read requests running at once")
}

func (c *WALConfig) register(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	fs.IntVar(&c.InFlight, key("inflight"), 2, "objects in upload at once; more is dearer and, on a store with a long tail, slower")
	config.DurationVar(fs, &c.Linger, key("linger"), 10*time.Millisecond, "wait for more ranges behind an upload; with none in flight an upload starts at once")
	config.SizeVar(fs, &c.MaxObject, key("max-object"), 8*config.MiB, "size that objects are cut at")
	fs.IntVar(&c.MaxRanges, key("max-ranges"), 4096, "ranges of an object, at most 4096")
	config.DurationVar(fs, &c.HedgeMin, key("hedge-min"), 50*time.Millisecond, "least age at which a slow upload gets a second attempt; it is the 95th percentile of the last ones when that is more; 0s never hedges")
	config.DurationVar(fs, &c.PutTimeout, key("put-timeout"), 30*time.Second, "bound of one attempt to upload an object")
	config.DurationVar(fs, &c.FlushTimeout, key("flush-timeout"), 20*time.Second, "wait at a stop for what is in upload or not judged yet")
	config.SizeVar(fs, &c.Buffer, key("buffer"), 256*config.MiB, "bytes buffered over all brokers; past it they are not read from")
	config.SizeVar(fs, &c.PartitionCredit, key("partition-credit"), 8*config.MiB, "bytes a broker may send of one partition before its verdicts")
	config.SizeVar(fs, &c.StreamCredit, key("stream-credit"), 64*config.MiB, "bytes a broker may send of all partitions before their verdicts")
}

func (c *CacheConfig) register(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	config.SizeVar(fs, &c.Size, key("size"), 256*config.MiB, "bytes of the block cache")
	config.SizeVar(fs, &c.Footers, key("footers"), 32*config.MiB, "bytes of the cache of footers, which brokers read to learn of producers when they take over")
	config.SizeVar(fs, &c.FooterWork, key("footer-work"), 64*config.MiB, "bytes of memory that fetching and decoding footers may take at once")
	config.SizeVar(fs, &c.PeerPinned, key("peer-pinned"), 64*config.MiB, "bytes that the reads of one peer may hold on to")
	config.SizeVar(fs, &c.Pinned, key("pinned"), 256*config.MiB, "bytes that all reads may hold on to")
	config.DurationVar(fs, &c.ReadTimeout, key("read-timeout"), 20*time.Second, "bound of one read from the bucket")
	config.DurationVar(fs, &c.SendTimeout, key("send-timeout"), 20*time.Second, "wait for a reader that does not read")
}

// Validate implements config.Section.
func (c *Config) Validate() error {
	var addresses, advertise error
	for _, a := range c.MetadataAddresses {
		addresses = errors.Join(addresses, config.CheckAddress("metadata.addresses", a))
	}
	if c.AdvertiseAddress != "" {
		advertise = config.CheckAddress("grpc.advertise-address", c.AdvertiseAddress)
	}
	size := func(field string, s config.Size, least config.Size) error {
		return config.Check(s >= least, field, s, "at least "+least.String())
	}
	positive := func(field string, d config.Duration) error {
		return config.Check(d > 0, field, d, "more than 0s")
	}
	w := &c.WAL
	return errors.Join(
		config.Check(c.ID >= 1 && c.ID <= 1<<31-1, "id", c.ID, "from 1 to 2147483647"),
		config.Check(len(c.MetadataAddresses) > 0, "metadata.addresses", c.MetadataAddresses, "one or more addresses"),
		addresses, advertise,
		config.Prefix("grpc", c.GRPC.Validate()),
		config.Prefix("client", c.Client.Validate()),
		c.Telemetry.Validate(),
		config.Check(c.Store.Bucket != "", "store.bucket", c.Store.Bucket, "the name of a bucket"),
		positive("store.start-timeout", c.Store.StartTimeout),
		config.Check(c.Store.MaxWrites >= 1, "store.max-writes", c.Store.MaxWrites, "at least 1"),
		config.Check(c.Store.MaxReads >= 1, "store.max-reads", c.Store.MaxReads, "at least 1"),
		config.Check(w.InFlight >= 1 && w.InFlight <= 64, "wal.inflight", w.InFlight, "from 1 to 64"),
		config.Check(w.Linger >= 0 && w.Linger.Std() <= 10*time.Second, "wal.linger", w.Linger, "from 0s to 10s"),
		config.Check(w.MaxObject >= 64*config.KiB && w.MaxObject <= 256*config.MiB, "wal.max-object", w.MaxObject, "from 64KiB to 256MiB"),
		config.Check(w.MaxRanges >= 1 && w.MaxRanges <= 4096, "wal.max-ranges", w.MaxRanges, "from 1 to 4096"),
		config.Check(w.HedgeMin >= 0, "wal.hedge-min", w.HedgeMin, "0s or more"),
		positive("wal.put-timeout", w.PutTimeout),
		positive("wal.flush-timeout", w.FlushTimeout),
		size("wal.buffer", w.Buffer, config.MiB),
		size("wal.partition-credit", w.PartitionCredit, config.KiB),
		config.Check(w.StreamCredit >= w.PartitionCredit, "wal.stream-credit", w.StreamCredit, "at least wal.partition-credit"),
		size("cache.size", c.Cache.Size, config.MiB),
		size("cache.footers", c.Cache.Footers, config.MiB),
		size("cache.footer-work", c.Cache.FooterWork, config.MiB),
		size("cache.peer-pinned", c.Cache.PeerPinned, config.KiB),
		size("cache.pinned", c.Cache.Pinned, c.Cache.PeerPinned),
		positive("cache.read-timeout", c.Cache.ReadTimeout),
		positive("cache.send-timeout", c.Cache.SendTimeout),
	)
}

func (c *Config) combiner() combiner.Config {
	return combiner.Config{
		RLMID: int32(c.ID),
		Plan: planner.Config{
			InFlight: c.WAL.InFlight, Linger: c.WAL.Linger.Std(),
			MaxBytes: c.WAL.MaxObject.Bytes(), MaxRanges: c.WAL.MaxRanges, HedgeMin: c.WAL.HedgeMin.Std(),
		},
		BufferBytes:          c.WAL.Buffer.Bytes(),
		PartitionCreditBytes: c.WAL.PartitionCredit.Bytes(), StreamCreditBytes: c.WAL.StreamCredit.Bytes(),
		PutTimeout: c.WAL.PutTimeout.Std(),
	}
}

func (c *Config) fetcher() fetcher.Config {
	return fetcher.Config{
		// A block is as large as an object is cut at, so that one is one GET.
		BlockBytes: max(c.WAL.MaxObject.Bytes(), 8<<20), CacheBytes: c.Cache.Size.Bytes(),
		FooterBytes: c.Cache.Footers.Bytes(), FooterWorkBytes: c.Cache.FooterWork.Bytes(),
		PeerPinnedBytes: c.Cache.PeerPinned.Bytes(), PinnedBytes: c.Cache.Pinned.Bytes(),
		ReadTimeout: c.Cache.ReadTimeout.Std(), MaxFetches: c.Store.MaxReads,
	}
}

// advertised is the address for brokers, given the one listened on.
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
