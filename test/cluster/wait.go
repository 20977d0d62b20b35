package cluster

import (
	"context"
	"slices"
	"time"

	"github.com/braidlog/braid/pkg/client"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// WaitController waits until a metadata replica is the controller and returns
// its epoch.
func (c *Cluster) WaitController() int64 {
	c.tb.Helper()
	var epoch int64
	c.Eventually("a controller", func() bool {
		for _, m := range c.Members(RoleMetadata) {
			if !m.Running() {
				continue
			}
			if e, ok := m.MetadataServer().Leading(); ok {
				epoch = e
				return true
			}
		}
		return false
	})
	return epoch
}

// WaitMembers waits until every remote-log manager and broker that runs is
// registered and knows of all the others.
func (c *Cluster) WaitMembers() {
	c.tb.Helper()
	for _, m := range c.Members(RoleRLM) {
		if m.Running() {
			c.Eventually(m.String()+" registers", func() bool { _, ok := m.RLMServer().Epoch(); return ok })
		}
	}
	for _, m := range c.Members(RoleBroker) {
		if m.Running() {
			c.WaitReady(m)
		}
	}
}

// WaitReady waits until a broker has a live session and knows the brokers that
// run.
func (c *Cluster) WaitReady(m *Member) {
	c.tb.Helper()
	c.Eventually(m.String()+" registers", func() bool {
		epoch, ok := m.BrokerServer().Epoch()
		if !ok {
			return false
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		cluster, err := c.Admin().Cluster().GetCluster(ctx, &metadatav1.GetClusterRequest{})
		if err != nil || !slices.ContainsFunc(cluster.GetBrokers(), func(b *metadatav1.Broker) bool {
			return b.GetBrokerId() == int32(m.id) && b.GetBrokerEpoch() == epoch && b.GetOnline()
		}) {
			return false
		}
		resp, err := c.Log(m).DescribeCluster(ctx, &brokerv1.DescribeClusterRequest{})
		if err != nil {
			return false
		}
		online := map[int32]bool{}
		for _, b := range resp.GetBrokers() {
			online[b.GetBrokerId()] = b.GetOnline()
		}
		for _, other := range c.Members(RoleBroker) {
			if other.Running() && !online[int32(other.id)] {
				return false
			}
		}
		return true
	})
}

// Log is the LogService of a broker.
func (c *Cluster) Log(m *Member) brokerv1.LogServiceClient {
	c.tb.Helper()
	return brokerv1.NewLogServiceClient(c.Conn(m))
}

// Admin reaches the metadata service.
func (c *Cluster) Admin() *client.Admin {
	c.tb.Helper()
	if c.admin == nil {
		a, err := client.DialAdmin(c.Addresses(RoleMetadata), client.Options{})
		c.must(err, "dial the metadata service")
		c.admin = a
	}
	return c.admin
}

// Client is a new client of all brokers, closed when the test ends.
func (c *Cluster) Client() *client.Client {
	c.tb.Helper()
	cl, err := client.Dial(client.Options{Brokers: c.Addresses(RoleBroker)})
	c.must(err, "dial the brokers")
	c.tb.Cleanup(func() { _ = cl.Close() })
	return cl
}

// CreateTopic creates a topic whose partitions every running broker may hold, with
// settings as name, value, name, value; and waits until it is led and all running
// brokers know so.
func (c *Cluster) CreateTopic(name string, partitions int, settings ...string) *metadatav1.Topic {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	configs := map[string]string{}
	for i := 0; i+1 < len(settings); i += 2 {
		configs[settings[i]] = settings[i+1]
	}
	replicas := 0
	for _, m := range c.Members(RoleBroker) {
		if m.Running() {
			replicas++
		}
	}
	resp, err := c.Admin().Topics().CreateTopic(ctx, &metadatav1.CreateTopicRequest{
		Name: name, PartitionCount: int32(partitions), ReplicationFactor: int32(replicas), Configs: configs,
	})
	c.must(err, "create topic "+name)
	c.WaitLed(name)
	return resp.GetTopic()
}

// Topic describes a topic as the controller knows it.
func (c *Cluster) Topic(name string) *metadatav1.Topic {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	resp, err := c.Admin().Topics().GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_Name{Name: name}})
	c.must(err, "describe topic "+name)
	return resp.GetTopic()
}

// WaitLed waits until every partition of a topic has an open leader that runs,
// and all running brokers know so.
func (c *Cluster) WaitLed(name string) {
	c.tb.Helper()
	c.Eventually("topic "+name+" is led", func() bool {
		for _, m := range c.Members(RoleBroker) {
			if !m.Running() {
				continue
			}
			for _, p := range c.describe(m, name) {
				if p == nil || !p.GetOpened() || p.GetLeaderId() == 0 || !c.member(RoleBroker, int(p.GetLeaderId())).Running() {
					return false
				}
			}
		}
		return true
	})
}

// describe lists the partitions of a topic as a broker knows them; a single nil
// when it does not.
func (c *Cluster) describe(m *Member, name string) []*brokerv1.PartitionLeader {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	resp, err := c.Log(m).DescribeTopic(ctx, &brokerv1.DescribeTopicRequest{Topic: name})
	if err != nil || len(resp.GetPartitions()) == 0 {
		return []*brokerv1.PartitionLeader{nil}
	}
	return resp.GetPartitions()
}

// Leader is the broker that leads a partition, and its leader epoch, once one
// does.
func (c *Cluster) Leader(name string, partition int) (*Member, int32) {
	c.tb.Helper()
	return c.LeaderAbove(name, partition, -1)
}

// LeaderAbove waits until a broker leads a partition with an epoch above the one
// given, open, and knows it itself.
func (c *Cluster) LeaderAbove(name string, partition int, epoch int32) (*Member, int32) {
	c.tb.Helper()
	var leader *Member
	var found int32
	c.Eventually("a leader of "+name, func() bool {
		for _, m := range c.Members(RoleBroker) {
			if !m.Running() {
				continue
			}
			all := c.describe(m, name)
			if partition >= len(all) || all[partition] == nil {
				continue
			}
			p := all[partition]
			if p.GetOpened() && int(p.GetLeaderId()) == m.id && p.GetLeaderEpoch() > epoch {
				leader, found = m, p.GetLeaderEpoch()
				return true
			}
		}
		return false
	})
	return leader, found
}

// Elect makes a broker the leader of a partition, and waits until it leads.
func (c *Cluster) Elect(name string, partition int, m *Member) int32 {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	resp, err := c.Admin().Cluster().ElectLeader(ctx, &metadatav1.ElectLeaderRequest{Topic: name, Partition: int32(partition), BrokerId: int32(m.id)})
	c.must(err, "elect "+m.String())
	_, epoch := c.LeaderAbove(name, partition, resp.GetPartition().GetFence().GetLeaderEpoch()-1)
	return epoch
}

// Segments lists the committed ranges of a partition.
func (c *Cluster) Segments(name string, partition int) []*metadatav1.SegmentRange {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	var out []*metadatav1.SegmentRange
	err := c.Admin().ListSegments(ctx, name, int32(partition), 0, func(r *metadatav1.SegmentRange) error {
		out = append(out, r)
		return nil
	})
	c.must(err, "list segments")
	return out
}
