package metadata_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/embetcd"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/metadata/metadatatest"
)

// BenchmarkCommit commits combined objects of 20 ranges from several remote-log
// managers at once, over gRPC, with an etcd that syncs its disk.
func BenchmarkCommit(b *testing.B) {
	for _, rlms := range []int{1, 4, 16} {
		b.Run(fmt.Sprintf("rlms=%d", rlms), func(b *testing.B) { benchmarkCommit(b, rlms) })
	}
}

func benchmarkCommit(b *testing.B, rlms int) {
	ctx, cancel := context.WithTimeout(b.Context(), 2*time.Minute)
	defer cancel()
	etcd, err := embetcd.Start(ctx, embetcd.Options{Dir: b.TempDir(), Fast: true})
	check(b, err)
	b.Cleanup(etcd.Close)
	cluster := metadatatest.Start(b, metadatatest.Options{Etcd: etcd, Change: func(c *metadata.Config) {
		c.SessionTimeout, c.LeaseTTL = config.Duration(time.Hour), config.Duration(time.Minute)
	}})
	c := of(cluster.Controller())
	_, err = c.RegisterBroker(ctx, &metadatav1.RegisterBrokerRequest{BrokerId: 1, Address: "h:1", DirectoryId: directory(1)})
	check(b, err)
	const partitions = 20
	commits := make([]func(), rlms)
	for i := range commits {
		commits[i] = committer(ctx, b, c, int32(i+1), partitions)
	}
	var left atomic.Int64
	left.Store(int64(b.N))
	done := make(chan struct{})
	b.ResetTimer()
	for _, commit := range commits {
		go func() {
			for left.Add(-1) >= 0 {
				commit()
			}
			done <- struct{}{}
		}()
	}
	for range commits {
		<-done
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commits/s")
	b.ReportMetric(float64(b.N*partitions)/b.Elapsed().Seconds(), "ranges/s")
}

// committer returns a function that commits one combined object with a range for
// each partition of a topic of its own.
func committer(ctx context.Context, b *testing.B, c clients, id, partitions int32) func() {
	rlm, err := c.RegisterRemoteLogManager(ctx, &metadatav1.RegisterRemoteLogManagerRequest{RlmId: id, Address: "h:1"})
	check(b, err)
	topic, err := c.CreateTopic(ctx, &metadatav1.CreateTopicRequest{Name: fmt.Sprintf("t%d", id), PartitionCount: partitions})
	check(b, err)
	fence := topic.GetTopic().GetPartitions()[0].GetFence()
	leadership := &logv1.Leadership{Incarnation: fence.GetIncarnation(), LeaderEpoch: fence.GetLeaderEpoch()}
	name := func(p int32) *logv1.TopicIdPartition {
		return &logv1.TopicIdPartition{
			TopicId: topic.GetTopic().GetTopicId(), TopicCreationOffset: topic.GetTopic().GetCreationOffset(), Partition: p,
		}
	}
	for p := range partitions {
		_, err := c.OpenEpoch(ctx, &metadatav1.OpenEpochRequest{
			Partition: name(p), Fence: fence, ObjectEndChainHash: make([]byte, chainhash.Size),
		})
		check(b, err)
	}
	end, sequence := int64(0), int64(0)
	hash := make([]chainhash.Hash, partitions)
	return func() {
		sequence++
		r := &metadatav1.CommitCombinedSegmentRequest{
			ClusterId: rlm.GetClusterId(), RlmId: id, SizeBytes: 1 << 20, Crc32C: 1,
			Object: &logv1.ObjectRef{Incarnation: rlm.GetIncarnation(), RlmEpoch: rlm.GetRlmEpoch(), Sequence: sequence, Attempt: 1},
		}
		for p := range partitions {
			next := chainhash.Next(hash[p], []byte{byte(p), byte(sequence)})
			d := &logv1.RangeDescriptor{
				Partition: name(p), Fence: fence, BaseOffset: end, EndOffset: end + 100,
				Lineage:       []*logv1.LineageEntry{{Leadership: leadership}},
				BaseChainHash: hash[p].Bytes(), EndChainHash: next.Bytes(), Position: int64(p) * 1000, LengthBytes: 1000, BatchCount: 1,
			}
			if end > 0 {
				d.Predecessor = leadership
			}
			r.Ranges = append(r.Ranges, d)
			hash[p] = next
		}
		end += 100
		resp, err := c.CommitCombinedSegment(ctx, r)
		check(b, err)
		if err == nil && resp.GetVerdicts()[0].GetOutcome() != metadatav1.RangeOutcome_RANGE_OUTCOME_ACCEPTED {
			b.Errorf("refused: %v", resp.GetVerdicts()[0])
		}
	}
}

func check(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Error(err)
	}
}
