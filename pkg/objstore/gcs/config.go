package gcs

import (
	"errors"
	"fmt"
	"net/url"
	"time"
)

// Config says which bucket to use and how patient to be with it.
type Config struct {
	// Bucket is the bucket's name; required. It must exist.
	Bucket string
	// Endpoint is the base URL of a server that speaks the JSON API in place of
	// Google's, such as an emulator at "http://127.0.0.1:4443". No credentials
	// are looked up or sent then. Empty means Google's service with the
	// application default credentials.
	Endpoint string
	// AttemptTimeout bounds a call that moves no content, and is the fixed part
	// of the bound of one that does; > 0.
	AttemptTimeout time.Duration
	// MinThroughput, in bytes per second, is the slowest transfer that counts
	// as progress: n bytes may take AttemptTimeout + n/MinThroughput; > 0.
	MinThroughput int64
	// StallTimeout is how long a read may wait for its next byte; > 0.
	StallTimeout time.Duration
	// MaxIdleConns is how many connections are kept open between calls; > 0.
	// It does not limit the calls in flight, package decorate does.
	MaxIdleConns int
}

// DefaultConfig returns the configuration for a bucket with the service's usual
// latencies: tens of milliseconds, rarely a second.
func DefaultConfig(bucket string) Config {
	return Config{
		Bucket:         bucket,
		AttemptTimeout: 10 * time.Second,
		MinThroughput:  1 << 20,
		StallTimeout:   5 * time.Second,
		MaxIdleConns:   64,
	}
}

// Validate reports all problems of the configuration, joined.
func (c Config) Validate() error {
	var errs []error
	if c.Bucket == "" {
		errs = append(errs, errors.New("bucket is empty"))
	}
	if c.Endpoint != "" {
		u, err := url.Parse(c.Endpoint)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("endpoint: %w", err))
		case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
			errs = append(errs, fmt.Errorf("endpoint %q is no http or https URL", c.Endpoint))
		}
	}
	if c.AttemptTimeout <= 0 {
		errs = append(errs, fmt.Errorf("attempt timeout %v is not above 0", c.AttemptTimeout))
	}
	if c.MinThroughput <= 0 {
		errs = append(errs, fmt.Errorf("least throughput %d is not above 0", c.MinThroughput))
	}
	if c.StallTimeout <= 0 {
		errs = append(errs, fmt.Errorf("stall timeout %v is not above 0", c.StallTimeout))
	}
	if c.MaxIdleConns <= 0 {
		errs = append(errs, fmt.Errorf("idle connections %d are not above 0", c.MaxIdleConns))
	}
	return errors.Join(errs...)
}

// attemptTimeout bounds an attempt that moves size bytes.
func (c Config) attemptTimeout(size int64) time.Duration {
	const longest = time.Hour // also keeps the product below from overflowing
	seconds := size / c.MinThroughput
	if seconds >= int64(longest/time.Second) {
		return c.AttemptTimeout + longest
	}
	rest := size % c.MinThroughput
	return c.AttemptTimeout + time.Duration(seconds)*time.Second +
		time.Duration(float64(rest)/float64(c.MinThroughput)*float64(time.Second))
}
