package replica

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/metaclient"
)

// Config is the part of a broker's configuration that its partitions need.
type Config struct {
	// BrokerID is from 1.
	BrokerID int32
	// AdvertiseAddress is what clients and peers are told, host:port.
	AdvertiseAddress string
	// Zone may be empty.
	Zone string
	// DataDir is the data directory.
	DataDir string

	// MaxUnuploadedBytes bounds the tails of all partitions that are not in the
	// bucket yet, together.
	MaxUnuploadedBytes config.Size
	// ZonePatience is how long the broker waits for a remote-log manager of its
	// own zone before it uses another.
	ZonePatience config.Duration
	// VerdictTimeout is how long a range sent may stay without a verdict before
	// the stream is given up.
	VerdictTimeout config.Duration
	// RecoveryPatience bounds how long an idempotent append waits for the
	// producer state.
	RecoveryPatience config.Duration
	// SyncInterval is how often logs that were written to are synced, beside the
	// appends; 0 leaves it to the operating system and to flush=always.
	SyncInterval config.Duration
	// MaxWaiting bounds the appends and waits that one partition holds at once.
	MaxWaiting int
	// MaxProducers bounds the producers that one partition remembers.
	MaxProducers int
	// ReadCacheBytes bounds the ranges read from the bucket that are kept.
	ReadCacheBytes config.Size
}

// RegisterFlags registers the flags that are this package's own; identity,
// address and data directory belong to the service.
func (c *Config) RegisterFlags(prefix string, fs *flag.FlagSet) {
	key := func(name string) string { return config.Key(prefix, name) }
	config.SizeVar(fs, &c.MaxUnuploadedBytes, key("wal.max-unuploaded-bytes"), 512*config.MiB, "bytes of all partitions together that may wait for their upload; past it appends are refused")
	config.DurationVar(fs, &c.ZonePatience, key("rlm.zone-patience"), 2*time.Second, "how long to wait for a remote-log manager of the own zone before another is used")
	config.DurationVar(fs, &c.VerdictTimeout, key("wal.verdict-timeout"), 10*time.Second, "how long a range sent may stay without a verdict before the stream is given up; at least 1s")
	config.DurationVar(fs, &c.RecoveryPatience, key("producer.recovery-patience"), 10*time.Second, "how long an idempotent append waits for the producer state after an election")
	config.DurationVar(fs, &c.SyncInterval, key("log.sync-interval"), time.Second, "how often logs that were written to are synced, beside the appends, which do not wait for it; 0s never does")
	fs.IntVar(&c.MaxWaiting, key("partition.max-waiting"), 10_000, "appends and waits that one partition holds at once")
	fs.IntVar(&c.MaxProducers, key("partition.max-producers"), 50_000, "idempotent producers that one partition remembers")
	config.SizeVar(fs, &c.ReadCacheBytes, key("read.cache-bytes"), 32*config.MiB, "ranges read from the bucket that are kept in memory")
}

// DefaultConfig returns the defaults that RegisterFlags sets.
func DefaultConfig() Config {
	var c Config
	c.RegisterFlags("", flag.NewFlagSet("", flag.ContinueOnError))
	return c
}

// Validate names everything that is wrong.
func (c *Config) Validate() error {
	return errors.Join(
		config.Check(c.MaxUnuploadedBytes >= config.MiB, "wal.max-unuploaded-bytes", c.MaxUnuploadedBytes, "at least 1MiB"),
		config.Check(c.ZonePatience >= 0, "rlm.zone-patience", c.ZonePatience, "0s or more"),
		config.Check(c.VerdictTimeout.Std() >= time.Second, "wal.verdict-timeout", c.VerdictTimeout, "at least 1s"),
		config.Check(c.RecoveryPatience >= 0, "producer.recovery-patience", c.RecoveryPatience, "0s or more"),
		config.Check(c.SyncInterval >= 0, "log.sync-interval", c.SyncInterval, "0s or more"),
		config.Check(c.MaxWaiting > 0, "partition.max-waiting", c.MaxWaiting, "more than 0"),
		config.Check(c.MaxProducers > 0, "partition.max-producers", c.MaxProducers, "more than 0"),
		config.Check(c.ReadCacheBytes >= 0, "read.cache-bytes", c.ReadCacheBytes, "0 or more"),
	)
}

// Deps are the live things a [Manager] needs. All but Meter are required.
type Deps struct {
	FS       vfs.FS
	Metadata *metaclient.Client
	// DialRemoteLog makes a connection to a remote-log manager without waiting
	// for it. The manager closes what it returns.
	DialRemoteLog func(address string) (*grpc.ClientConn, error)
	// DialBroker does the same for another broker.
	DialBroker func(address string) (*grpc.ClientConn, error)
	Logger     *slog.Logger
	// Meter records the metrics; nil records none.
	Meter metric.Meter
}

func (d *Deps) validate() error {
	if d.FS == nil || d.Metadata == nil || d.DialRemoteLog == nil || d.DialBroker == nil || d.Logger == nil {
		return fmt.Errorf("replica: FS, Metadata, DialRemoteLog, DialBroker and Logger are required")
	}
	return nil
}
