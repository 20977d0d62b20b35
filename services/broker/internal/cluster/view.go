package cluster

import (
	"github.com/braidlog/braid/pkg/topicconfig"
)

// Key identifies a partition over all lives of its topic's name and id.
type Key struct {
	// CreationOffset is the metadata offset of the entry that created the topic.
	CreationOffset int64
	// Partition counts from 0.
	Partition int32
}

// Broker is a registered broker.
type Broker struct {
	ID      int32
	Address string // host:port for clients and peers
	Zone    string // empty when unknown
	Epoch   int64
	Online  bool // its session is live
}

// RemoteLogManager is a registered remote-log manager.
type RemoteLogManager struct {
	ID      int32
	Address string // host:port
	Zone    string // empty when unknown
	Epoch   int64
	Open    bool // its epoch is open
}

// Topic is a live topic.
type Topic struct {
	ID             string // UUID
	Name           string
	CreationOffset int64
	Config         topicconfig.Config
	Partitions     []Partition // by index
}

// Key of one of the topic's partitions.
func (t *Topic) Key(partition int32) Key {
	return Key{CreationOffset: t.CreationOffset, Partition: partition}
}

// Partition is what the membership stream says of a partition.
type Partition struct {
	Replicas    []int32 // broker ids in order of preference; not to be changed
	LeaderID    int32   // 0 for none
	LeaderEpoch int32
	BrokerEpoch int64 // of the leader's registration that was elected
	Opened      bool
}

// Position is a place in the metadata log.
type Position struct {
	Incarnation     uint32
	ControllerEpoch int64 // of the entry below Offset
	Offset          int64 // of the next entry to apply
}

// View is the cluster at one position of the metadata log. It is immutable.
type View struct {
	ClusterID         string
	Position          Position
	ControllerID      int32
	ControllerAddress string

	brokers map[int32]Broker
	rlms    map[int32]RemoteLogManager
	byName  map[string]*Topic
	byID    map[string]*Topic

	byCreation map[int64]*Topic
}

// Broker finds a broker by id.
func (v *View) Broker(id int32) (Broker, bool) {
	b, ok := v.brokers[id]
	return b, ok
}

// Brokers lists the brokers, in no order.
func (v *View) Brokers() []Broker {
	out := make([]Broker, 0, len(v.brokers))
	for _, b := range v.brokers {
		out = append(out, b)
	}
	return out
}

// RemoteLogManagers lists the remote-log managers, in no order.
func (v *View) RemoteLogManagers() []RemoteLogManager {
	out := make([]RemoteLogManager, 0, len(v.rlms))
	for _, r := range v.rlms {
		out = append(out, r)
	}
	return out
}

// Topic finds a live topic by name.
func (v *View) Topic(name string) (*Topic, bool) {
	t, ok := v.byName[name]
	return t, ok
}

// TopicByID finds a live topic by id.
func (v *View) TopicByID(id string) (*Topic, bool) {
	t, ok := v.byID[id]
	return t, ok
}

// TopicByCreation finds a live topic by its creation offset.
func (v *View) TopicByCreation(offset int64) (*Topic, bool) {
	t, ok := v.byCreation[offset]
	return t, ok
}

// Topics calls fn for every live topic, in no order, until it returns false.
func (v *View) Topics(fn func(*Topic) bool) {
	for _, t := range v.byName {
		if !fn(t) {
			return
		}
	}
}

// TopicCount is the number of live topics.
func (v *View) TopicCount() int { return len(v.byName) }

// Leader is the elected leader of a partition and its address. ok is false when
// there is none or the partition is unknown.
func (v *View) Leader(t *Topic, partition int32) (b Broker, epoch int32, ok bool) {
	if partition < 0 || int(partition) >= len(t.Partitions) {
		return Broker{}, 0, false
	}
	p := t.Partitions[partition]
	b, ok = v.brokers[p.LeaderID]
	return b, p.LeaderEpoch, ok && p.LeaderID != 0
}
