package replica

import (
	"slices"

	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/partition"
)

// movedFrom says that a broker neither holds a partition nor leads it: one that
// leads is fenced first.
func movedFrom(p cluster.Partition, broker int32) bool {
	return !slices.Contains(p.Replicas, broker) && p.LeaderID != broker
}

// release lets go of a partition that others hold now. What is on disk stays, and
// is of use should it come back. In the writer's role with mu held.
func (p *Partition) release() {
	t, ok := p.mgr.Cluster().TopicByCreation(p.key.CreationOffset)
	if p.gone || !ok || int(p.partition) >= len(t.Partitions) || !movedFrom(t.Partitions[p.partition], p.mgr.cfg.BrokerID) {
		return // deleted, or back on the list
	}
	p.away = true
	if p.loading {
		return // again once the log is there and can be closed
	}
	p.logger().Info("the partition is held by others now, its directory is kept", "replicas", t.Partitions[p.partition].Replicas)
	p.step(partition.Removed{Reason: "this broker is not among the replicas any more"}, false)
}

// goneErr is why a partition that is gone answers nothing; mu is held.
func (p *Partition) goneErr() error {
	if !p.away {
		return &UnknownPartitionError{Topic: p.topic, Partition: p.partition}
	}
	v := p.mgr.Cluster()
	t, ok := v.TopicByCreation(p.key.CreationOffset)
	if !ok {
		return &UnknownPartitionError{Topic: p.topic, Partition: p.partition}
	}
	b, epoch, ok := v.Leader(t, p.partition)
	if !ok || b.ID == p.mgr.cfg.BrokerID {
		return &NotLeaderError{Epoch: epoch}
	}
	return &NotLeaderError{LeaderID: b.ID, Address: b.Address, Epoch: epoch}
}

// forget ends the partition's life on this broker.
func (p *Partition) forget(remove bool) {
	p.mu.Lock()
	log, away := p.log, p.away
	p.log, p.gone = nil, true
	p.own = nil
	if p.copyTimer != nil {
		p.copyTimer.Stop()
	}
	p.endTasks()
	p.failWaits(p.goneErr())
	p.unpark()
	p.account()
	p.mu.Unlock()
	p.mgr.feed.Remove(p)
	p.ranges.Replace(nil)
	if log != nil {
		if err := log.Close(); err != nil {
			p.logger().Warn("closing the log of a removed partition", "err", err)
		}
	}
	// Only now may another take its place, and open the log.
	p.mgr.removed(p, away)
	if !remove {
		return
	}
	if err := p.mgr.dir.RemovePartition(p.logID.TopicID, p.partition); err != nil {
		p.logger().Error("the directory of a deleted partition stays", "err", err)
		return
	}
	p.logger().Info("partition deleted")
}
