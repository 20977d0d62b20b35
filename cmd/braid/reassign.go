package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"

	"github.com/braidlog/braid/pkg/client"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// reassignFlags are those of topic reassign.
type reassignFlags struct {
	partition, expected int
	to                  string
}

func (f *reassignFlags) register(fs *flag.FlagSet) {
	fs.IntVar(&f.partition, "partition", 0, "reassign: `index` of the partition")
	fs.StringVar(&f.to, "to", "", "reassign: `ids` of the brokers that shall hold the partition, in order of preference, with commas between")
	fs.IntVar(&f.expected, "expected-leader-epoch", 0, "reassign: change it only at this leader epoch; 0 = at any")
}

func brokerIDs(list string) ([]int32, error) {
	var ids []int32
	for _, s := range strings.Split(list, ",") {
		id, err := strconv.ParseInt(strings.TrimSpace(s), 10, 32)
		if err != nil || id < 1 {
			return nil, usagef("--to %q: must be broker ids with commas between, such as 3,1,2", list)
		}
		ids = append(ids, int32(id))
	}
	return ids, nil
}

func topicReassign(ctx context.Context, c *console, admin *client.Admin, f *topicFlags) error {
	ids, err := brokerIDs(f.reassign.to)
	if err != nil {
		return err
	}
	resp, err := admin.Cluster().ReassignPartition(ctx, &metadatav1.ReassignPartitionRequest{
		Topic: f.topic, Partition: int32(f.reassign.partition), BrokerIds: ids, ExpectedLeaderEpoch: int32(f.reassign.expected),
	})
	if err != nil {
		return err
	}
	info := topicOf(&metadatav1.Topic{Partitions: []*metadatav1.Partition{resp.GetPartition()}}).Partitions[0]
	if f.json {
		return c.printJSON(info)
	}
	fmt.Fprintf(c.stdout, "partition %d of topic %s is held by brokers %v, led by %d (leader epoch %d)\n",
		info.Partition, f.topic, info.Replicas, info.Leader, info.LeaderEpoch)
	return nil
}
