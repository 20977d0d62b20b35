package state

import (
	"fmt"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/topicconfig"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// FeatureLevel is the highest feature level of entries that this version
// understands, and the one it writes.
const FeatureLevel = 1

// Limits of commands, by their contracts.
const (
	MaxPartitions      = 10_000 // per topic
	MaxRanges          = 4_096  // per combined object
	MaxProducerIDBlock = 10_000
	MaxElections       = 4_096   // in one entry, so that it stays well within 512 KiB
	maxProducerCounter = 1 << 32 // counters are the low half of a producer id
	maxLength          = 1<<32 - 1
	maxAttempt         = 1<<16 - 1 // four hexadecimal digits of an object's name
)

// PartitionID names a partition within one metadata log: the topic's creation
// offset tells two lives of one name, and of one topic id, apart.
type PartitionID struct {
	TopicCreationOffset int64
	Partition           int32
}

// State is the state of a metadata log up to an offset. The zero value is not
// usable; see [New].
type State struct {
	end       int64 // offset of the next entry
	lastEpoch int64 // controller epoch of the entry before end, 0 at 0
	failed    error // set once an entry could not be applied

	clusterID    string
	incarnation  uint32
	featureLevel uint32 // highest seen
	controller   controller

	producers int64 // next counter to hand out

	brokers map[int32]*broker
	rlms    map[int32]*remoteLogManager

	topics map[int64]*topic  // by creation offset, tombstones included
	byID   map[string]*topic // the newest life of each id, tombstones included
	byName map[string]*topic // live ones
	sorted []*topic          // live ones in order of name

	objects    objectTable
	rangeCount int64
}

type controller struct {
	epoch   int64 // -1 before the first
	id      int32
	address string
}

type broker struct {
	id          int32
	address     string
	zone        string
	directoryID string
	epoch       int64
	online      bool
	logsIntact  bool
}

type remoteLogManager struct {
	id      int32
	address string
	zone    string
	epoch   int64
	open    bool
	// last is the last command of the epoch with an accepted range, nil before
	// the first; a repeat of it gets the verdict that it had.
	last *commitMemory
	// previous is that of the epoch before: an rlm whose session ran out may
	// still ask what became of its last command.
	previous *commitMemory
}

// lastSequence is the last accepted sequence of the epoch, 0 for none.
func (r *remoteLogManager) lastSequence() int64 {
	if r.last == nil {
		return 0
	}
	return r.last.sequence
}

// commitMemory is what is kept of a command to answer its repeats.
type commitMemory struct {
	offset   int64 // of its entry
	epoch    int64
	sequence int64
	attempt  int32
	crc32c   uint32
	size     int64
	outcomes []byte // RangeOutcome of each range
}

type topic struct {
	id             string
	name           string
	creationOffset int64
	overrides      map[string]string
	config         topicconfig.Config
	deleted        bool
	partitions     []partition
}

// partition is the state of one partition. Of a deleted topic only the fence
// remains.
type partition struct {
	topic    *topic
	index    int32
	opened   bool // under the fence below; see State.isOpen
	exact    bool // the mark of StartRule EXACT
	replicas []int32

	// The fence: who may commit. Leader epoch 0 was never elected.
	leaderEpoch int32
	leaderID    int32
	brokerEpoch int64
	fencedAt    int64 // offset of the entry
	reason      string

	epochStart int64 // of the epoch last opened
	openedAt   int64 // offset of the entry, -1 before the first
	openedBy   int32 // the broker that opened it, 0 before the first

	logStart  int64
	objectEnd int64
	hash      chainhash.Hash // at objectEnd
	lineage   lineage.Lineage
	ranges    rangeList
	bytes     int64
}

func (p *partition) key() PartitionID {
	return PartitionID{TopicCreationOffset: p.topic.creationOffset, Partition: p.index}
}

// New returns the state of an empty log.
func New() *State {
	return &State{
		controller: controller{epoch: -1},
		producers:  1,
		brokers:    map[int32]*broker{},
		rlms:       map[int32]*remoteLogManager{},
		topics:     map[int64]*topic{},
		byID:       map[string]*topic{},
		byName:     map[string]*topic{},
	}
}

// isOpen says whether the partition's leader may commit: its epoch was opened
// and its broker has not registered again since. A registration fences what the
// broker led without an event per partition (design review H2).
func (s *State) isOpen(p *partition) bool {
	return p.opened && s.leaderCurrent(p)
}

// leaderCurrent says whether the fence names the present registration of the
// leader's broker.
func (s *State) leaderCurrent(p *partition) bool {
	b := s.brokers[p.leaderID]
	return b != nil && b.epoch == p.brokerEpoch
}

func (s *State) lookup(id PartitionID) *partition {
	t := s.topics[id.TopicCreationOffset]
	if t == nil || t.deleted || id.Partition < 0 || int(id.Partition) >= len(t.partitions) {
		return nil
	}
	return &t.partitions[id.Partition]
}

// lookupNamed also compares the topic id: ids that do not belong together name
// nothing.
func (s *State) lookupNamed(topicID string, id PartitionID) *partition {
	p := s.lookup(id)
	if p == nil || p.topic.id != topicID {
		return nil
	}
	return p
}

// findTopic finds a live topic by name, or by id.
func (s *State) findTopic(nameOrID string) *topic {
	if t := s.byName[nameOrID]; t != nil {
		return t
	}
	if t := s.byID[nameOrID]; t != nil && !t.deleted {
		return t
	}
	return nil
}

func (p *partition) String() string { return fmt.Sprintf("%s/%d", p.topic.name, p.index) }

func (p *partition) startRule() metadatav1.StartRule {
	if p.exact {
		return metadatav1.StartRule_START_RULE_EXACT
	}
	return metadatav1.StartRule_START_RULE_FREE
}
