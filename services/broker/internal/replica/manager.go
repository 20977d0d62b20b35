package replica

import (
	"context"

	"github.com/braidlog/braid/services/broker/internal/cluster"
)

// Manager owns the partitions of one broker.
type Manager struct {
	cfg  Config
	deps Deps
}

// NewManager checks its input and starts nothing.
func NewManager(cfg Config, deps Deps) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := deps.validate(); err != nil {
		return nil, err
	}
	return &Manager{cfg: cfg, deps: deps}, nil
}

// Run keeps the broker a member of the cluster and its partitions going. It
// returns when ctx ends, after [Manager.Drain] was called or not, with every
// goroutine ended and every log closed; or with an error that makes going on
// pointless: a data directory of another cluster, an id in use. Call it once.
func (m *Manager) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Ready is closed once the broker is registered and knows the cluster.
func (m *Manager) Ready() <-chan struct{} { return nil }

// Drain is the first half of a stop: from now on appends are refused with
// ErrStopped; it waits, as long as ctx allows, until what was appended is in
// the bucket, and then ends the session so that others are elected at once.
func (m *Manager) Drain(ctx context.Context) error { return ctx.Err() }

// Registration is the broker's current epoch and the incarnation it is of; ok
// is false while it has none.
func (m *Manager) Registration() (brokerEpoch int64, incarnation uint32, ok bool) {
	return 0, 0, false
}

// Cluster is the newest picture of the cluster, never nil.
func (m *Manager) Cluster() *cluster.View { return &cluster.View{} }

// Lookup finds a partition that this broker may hold. An unknown topic or
// partition is an UnknownPartitionError; one that is held elsewhere a
// NotLeaderError that names its leader; before [Manager.Ready] it is an
// UnavailableError.
func (m *Manager) Lookup(topic string, partition int32) (*Partition, error) {
	return nil, &UnknownPartitionError{Topic: topic, Partition: partition}
}
