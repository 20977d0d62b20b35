package api

import (
	"errors"
	"flag"
	"time"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/record"
)

// Config is the data of a [Service].
type Config struct {
	// AppendMaxWait bounds the wait for a level after the append.
	AppendMaxWait config.Duration
	// AppendBufferBytes bounds the batches, of all callers together, that were
	// received and are not in a log yet.
	AppendBufferBytes config.Size
	// MaxDecodedBytes bounds the records of one batch when decompressed. A
	// record decoded must fit into one message to a reader.
	MaxDecodedBytes config.Size
	// ProduceInFlight bounds the requests of one Produce stream that wait to be
	// written, and again those that wait for their level.
	ProduceInFlight int
	// ProduceMaxStreams bounds the Produce streams served here.
	ProduceMaxStreams int
	// ProducerIDBlock is how many producer ids are fetched at a time.
	ProducerIDBlock int

	// ReadMaxStreams bounds the Read streams served here.
	ReadMaxStreams int
	// ReadChunkBytes is how much of a partition is read at a time.
	ReadChunkBytes config.Size
	// ReadProgressInterval is how often a stream that follows an idle partition
	// hears from the server.
	ReadProgressInterval config.Duration
	// ReadVisibleWait bounds the wait for an offset that readers of another
	// broker may have seen already.
	ReadVisibleWait config.Duration

	// AwaitMaxWaiters bounds the AwaitDurability calls that wait here.
	AwaitMaxWaiters int
	// AwaitMaxWait bounds one of them.
	AwaitMaxWait config.Duration

	// LeaderMaxWait bounds the wait of a call for a leader that takes it.
	LeaderMaxWait config.Duration
	// LeaderMaxWaiters bounds the calls that wait so; others are refused at once.
	LeaderMaxWaiters int

	// ForwardMaxCalls bounds the calls and streams that this broker forwards at
	// once.
	ForwardMaxCalls int
	// ForwardConnectTimeout bounds the wait for a connection to the leader.
	ForwardConnectTimeout config.Duration
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
	config.DurationVar(fs, &c.AppendMaxWait, key("append.max-wait"), time.Minute, "longest wait for an append's level after it was written; then OUTCOME_UNKNOWN")
	config.SizeVar(fs, &c.AppendBufferBytes, key("append.buffer-bytes"), 256*config.MiB, "batches of all callers together that are received and not written yet")
	config.SizeVar(fs, &c.MaxDecodedBytes, key("append.max-decoded-bytes"), 12*config.MiB, "largest size of one batch's records when decompressed; at most 15MiB")
	fs.IntVar(&c.ProduceInFlight, key("produce.max-in-flight"), 128, "requests of one Produce stream that wait to be written, and again those that wait for their level")
	fs.IntVar(&c.ProduceMaxStreams, key("produce.max-streams"), 4096, "Produce streams open at once")
	fs.IntVar(&c.ProducerIDBlock, key("producer.id-block"), 1000, "producer ids fetched from the metadata service at a time, 1 to 10000")
	fs.IntVar(&c.ReadMaxStreams, key("read.max-streams"), 4096, "Read streams open at once")
	config.SizeVar(fs, &c.ReadChunkBytes, key("read.chunk-bytes"), 512*config.KiB, "bytes of a partition read at a time, 4KiB to 4MiB; one batch may be larger")
	config.DurationVar(fs, &c.ReadProgressInterval, key("read.progress-interval"), 2*time.Second, "how often a stream that follows an idle partition hears from the server")
	config.DurationVar(fs, &c.ReadVisibleWait, key("read.visible-wait"), 5*time.Second, "longest wait for an offset between the high watermark and the end of the log")
	fs.IntVar(&c.AwaitMaxWaiters, key("await.max-waiters"), 16384, "AwaitDurability calls waiting at once")
	config.DurationVar(fs, &c.AwaitMaxWait, key("await.max-wait"), time.Minute, "longest wait of an AwaitDurability call")
	config.DurationVar(fs, &c.LeaderMaxWait, key("leader.max-wait"), 5*time.Second, "longest wait of a call while the partition has no leader, or this broker was elected and is not ready")
	fs.IntVar(&c.LeaderMaxWaiters, key("leader.max-waiters"), 16384, "calls waiting for a leader at once; others are refused without a wait")
	fs.IntVar(&c.ForwardMaxCalls, key("forward.max-calls"), 4096, "calls and streams forwarded to leaders at once")
	config.DurationVar(fs, &c.ForwardConnectTimeout, key("forward.connect-timeout"), 2*time.Second, "longest wait for a connection to a leader")
}

// Validate implements config.Section.
func (c *Config) Validate() error {
	positive := func(field string, d config.Duration) error { return config.Check(d > 0, field, d, "more than 0s") }
	count := func(field string, n int) error { return config.Check(n > 0, field, n, "more than 0") }
	return errors.Join(
		positive("append.max-wait", c.AppendMaxWait),
		// One message of the largest size a server takes must fit.
		config.Check(c.AppendBufferBytes >= 16*config.MiB, "append.buffer-bytes", c.AppendBufferBytes, "at least 16MiB"),
		config.Check(c.MaxDecodedBytes >= config.MiB && c.MaxDecodedBytes <= 15*config.MiB, "append.max-decoded-bytes", c.MaxDecodedBytes, "from 1MiB to 15MiB"),
		count("produce.max-in-flight", c.ProduceInFlight),
		count("produce.max-streams", c.ProduceMaxStreams),
		config.Check(c.ProducerIDBlock >= 1 && c.ProducerIDBlock <= 10_000, "producer.id-block", c.ProducerIDBlock, "from 1 to 10000"),
		count("read.max-streams", c.ReadMaxStreams),
		config.Check(c.ReadChunkBytes >= 4*config.KiB && c.ReadChunkBytes <= 4*config.MiB, "read.chunk-bytes", c.ReadChunkBytes, "from 4KiB to 4MiB"),
		positive("read.progress-interval", c.ReadProgressInterval),
		positive("read.visible-wait", c.ReadVisibleWait),
		count("await.max-waiters", c.AwaitMaxWaiters),
		positive("await.max-wait", c.AwaitMaxWait),
		positive("leader.max-wait", c.LeaderMaxWait),
		count("leader.max-waiters", c.LeaderMaxWaiters),
		count("forward.max-calls", c.ForwardMaxCalls),
		positive("forward.connect-timeout", c.ForwardConnectTimeout),
	)
}

// decodeLimit is MaxDecodedBytes for a record.Reader.
func (c *Config) decodeLimit() int {
	return min(int(c.MaxDecodedBytes), record.DefaultDecompressLimit)
}
