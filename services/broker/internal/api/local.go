package api

import (
	"context"

	"github.com/braidlog/braid/services/broker/internal/replica"
)

// Local makes a manager's partitions those of a [Service].
func Local(m *replica.Manager) Replicas { return manager{m} }

type manager struct{ *replica.Manager }

func (m manager) Lookup(topic string, partition int32) (Partition, error) {
	p, err := m.Manager.Lookup(topic, partition)
	if err != nil {
		return nil, err
	}
	return local{p}, nil
}

type local struct{ *replica.Partition }

func (l local) Submit(ctx context.Context, in replica.AppendInput) (Ticket, error) {
	t, err := l.Partition.Submit(ctx, in)
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (l local) Enqueue(ctx context.Context, in replica.AppendInput) Ticket {
	return l.Partition.Enqueue(ctx, in)
}

func (l local) Nearest() (Source, bool) {
	n, ok := l.Partition.Nearest()
	if !ok {
		return nil, false
	}
	return n, true
}
