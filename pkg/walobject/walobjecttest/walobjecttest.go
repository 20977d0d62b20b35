package walobjecttest

import (
	"fmt"
	"hash/crc32"
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
)

// Incarnation is the incarnation that everything here is made under.
const Incarnation uint32 = 0x1f3a9c02

// Partition is a leader's log of one partition that is written range by range.
// Not safe for concurrent use.
type Partition struct {
	// ID is the partition.
	ID *logv1.TopicIdPartition
	// Fence is what ranges are sent under.
	Fence *logv1.Fence
	// EpochStart is where the fence's epoch was opened.
	EpochStart int64
	// End is the end of the log so far, Hash the chain hash there.
	End  int64
	Hash chainhash.Hash
	// Lineage is the whole lineage so far.
	Lineage []*logv1.LineageEntry

	clock int64
}

// NewPartition begins a log at offset 0 with leader epoch 1.
func NewPartition(topicCreationOffset int64, partition int32) *Partition {
	p := &Partition{ID: &logv1.TopicIdPartition{
		TopicId:             fmt.Sprintf("5f9d3c1e-0000-4000-8000-%012x", topicCreationOffset),
		TopicCreationOffset: topicCreationOffset,
		Partition:           partition,
	}, clock: 1_700_000_000_000}
	p.Elect(1, 77)
	return p
}

// Elect opens a new epoch at the end of the log.
func (p *Partition) Elect(leaderEpoch int32, brokerEpoch int64) {
	p.Fence = &logv1.Fence{Incarnation: Incarnation, LeaderEpoch: leaderEpoch, BrokerEpoch: brokerEpoch}
	p.EpochStart = p.End
	if n := len(p.Lineage); n > 0 && p.Lineage[n-1].GetStartOffset() == p.End {
		p.Lineage = p.Lineage[: n-1 : n-1]
	}
	p.Lineage = append(p.Lineage, &logv1.LineageEntry{
		Leadership:  &logv1.Leadership{Incarnation: Incarnation, LeaderEpoch: leaderEpoch},
		StartOffset: p.End,
	})
}

// Append writes batches of records with values of the given size and returns
// them as a range.
func (p *Partition) Append(batches, recordsPerBatch, valueSize int) (*logv1.RangeDescriptor, []byte) {
	var data []byte
	value := make([]byte, valueSize)
	builder := record.NewBuilder(record.CodecNone)
	base, baseHash := p.End, p.Hash
	latest := int64(math.MinInt64)
	end, hash := p.End, p.Hash
	for range batches {
		builder.Reset()
		for i := range recordsPerBatch {
			p.clock++
			for j := range value {
				value[j] = byte(int(end) + i + j)
			}
			if err := builder.Append(record.Record{Timestamp: p.clock, Key: fmt.Appendf(nil, "k%d", i), Value: value}); err != nil {
				panic(err)
			}
		}
		out, batch, err := builder.Build(data)
		if err != nil {
			panic(err)
		}
		data = out
		batch.SetBaseOffset(end)
		batch.SetLeaderEpoch(p.Fence.GetLeaderEpoch())
		hash = chainhash.Next(hash, batch)
		latest = max(latest, batch.MaxTimestamp())
		end = batch.EndOffset()
	}
	p.End, p.Hash = end, hash
	return p.Describe(base, end, baseHash, hash, data, int32(batches), latest), data
}

// Describe makes the descriptor of bytes [base, end) of the log.
func (p *Partition) Describe(base, end int64, baseHash, endHash chainhash.Hash, data []byte, batches int32, latest int64) *logv1.RangeDescriptor {
	d := &logv1.RangeDescriptor{
		Partition: proto.CloneOf(p.ID), Fence: proto.CloneOf(p.Fence), EpochStart: p.EpochStart,
		BaseOffset: base, EndOffset: end,
		BaseChainHash: baseHash.Bytes(), EndChainHash: endHash.Bytes(),
		LengthBytes: int64(len(data)), Crc32C: crc32.Checksum(data, crc32.MakeTable(crc32.Castagnoli)),
		MaxTimestampMs: latest, BatchCount: batches,
	}
	for i, e := range p.Lineage {
		next := int64(math.MaxInt64)
		if i+1 < len(p.Lineage) {
			next = p.Lineage[i+1].GetStartOffset()
		}
		if e.GetStartOffset() < base {
			d.Predecessor = proto.CloneOf(e.GetLeadership())
		}
		if e.GetStartOffset() < end && next > base {
			d.Lineage = append(d.Lineage, proto.CloneOf(e))
		}
	}
	return d
}
