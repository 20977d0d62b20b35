package cluster

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/braidlog/braid/pkg/topicconfig"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// FeatureLevel is the highest feature level of entries that this code
// understands.
const FeatureLevel = 1

// ErrFeatureLevel says that the metadata log holds something this broker does
// not know: it must not go on as if it had not been there.
var ErrFeatureLevel = errors.New("cluster: the metadata log needs a newer broker")

// Tracker makes views. The zero Tracker is not usable, see NewTracker.
type Tracker struct {
	view *View
	// image collects the messages of a reset that comes in several.
	image *View
}

// NewTracker begins with an empty view.
func NewTracker() *Tracker { return &Tracker{view: newView()} }

func newView() *View {
	return &View{
		brokers: map[int32]Broker{}, rlms: map[int32]RemoteLogManager{},
		byName: map[string]*Topic{}, byID: map[string]*Topic{}, byCreation: map[int64]*Topic{},
	}
}

// View is the newest one.
func (t *Tracker) View() *View { return t.view }

// Reset takes one message of an image. The view is replaced by the last of
// them; ready says that it was.
func (t *Tracker) Reset(img *metadatav1.MetadataImage) (ready bool, err error) {
	if t.image == nil {
		t.image = newView()
	}
	v := t.image
	if c := img.GetCluster(); c != nil {
		v.ClusterID = c.GetClusterId()
		v.ControllerID, v.ControllerAddress = c.GetControllerId(), c.GetControllerAddress()
		for _, b := range c.GetBrokers() {
			v.brokers[b.GetBrokerId()] = Broker{ID: b.GetBrokerId(), Address: b.GetAddress(), Zone: b.GetZone(), Epoch: b.GetBrokerEpoch(), Online: b.GetOnline()}
		}
		for _, r := range c.GetRemoteLogManagers() {
			v.rlms[r.GetRlmId()] = RemoteLogManager{ID: r.GetRlmId(), Address: r.GetAddress(), Zone: r.GetZone(), Epoch: r.GetRlmEpoch(), Open: r.GetOpen()}
		}
		if c.GetFeatureLevel() > FeatureLevel {
			return false, fmt.Errorf("%w: feature level %d, this broker knows %d", ErrFeatureLevel, c.GetFeatureLevel(), FeatureLevel)
		}
	}
	for _, topic := range img.GetTopics() {
		if err := v.addTopic(topic); err != nil {
			return false, err
		}
	}
	if p := img.GetPosition(); p != nil {
		v.Position = position(p)
	}
	if img.GetMore() {
		return false, nil
	}
	t.view, t.image = v, nil
	return true, nil
}

func position(p *metadatav1.MetadataPosition) Position {
	return Position{Incarnation: p.GetIncarnation(), ControllerEpoch: p.GetControllerEpoch(), Offset: p.GetOffset()}
}

func (v *View) addTopic(m *metadatav1.Topic) error {
	cfg, err := topicconfig.Parse(m.GetConfigs())
	if err != nil {
		return fmt.Errorf("%w: topic %s: %w", ErrFeatureLevel, m.GetName(), err)
	}
	t := &Topic{ID: m.GetTopicId(), Name: m.GetName(), CreationOffset: m.GetCreationOffset(), Config: cfg}
	for _, p := range m.GetPartitions() {
		t.Partitions = append(t.Partitions, Partition{
			Replicas: p.GetReplicaIds(), LeaderID: p.GetLeaderId(), LeaderEpoch: p.GetFence().GetLeaderEpoch(),
			BrokerEpoch: p.GetFence().GetBrokerEpoch(), Opened: p.GetOpened(),
		})
	}
	v.byName[t.Name], v.byID[t.ID], v.byCreation[t.CreationOffset] = t, t, t
	return nil
}

// Progress notes how far an idle stream is.
func (t *Tracker) Progress(p *metadatav1.MetadataPosition) {
	next := *t.view
	next.Position = position(p)
	t.view = &next
}

// Apply takes one entry.
func (t *Tracker) Apply(e *metadatav1.Entry) error {
	if e.GetFeatureLevel() > FeatureLevel {
		return fmt.Errorf("%w: entry %d has feature level %d, this broker knows %d", ErrFeatureLevel, e.GetOffset(), e.GetFeatureLevel(), FeatureLevel)
	}
	c := change{v: *t.view, entry: e}
	for _, ev := range e.GetEvents() {
		if err := c.apply(ev); err != nil {
			return err
		}
	}
	c.v.Position = Position{Incarnation: e.GetIncarnation(), ControllerEpoch: e.GetControllerEpoch(), Offset: e.GetOffset() + 1}
	t.view = &c.v
	return nil
}

// change builds the next view, copying what it touches, once.
type change struct {
	v       View
	entry   *metadatav1.Entry
	brokers bool // v.brokers is our copy
	rlms    bool
	topics  bool
	copied  map[*Topic]bool // topics that are our copies
}

func (c *change) ownBrokers() map[int32]Broker {
	if !c.brokers {
		c.v.brokers, c.brokers = maps.Clone(c.v.brokers), true
	}
	return c.v.brokers
}

func (c *change) ownRLMs() map[int32]RemoteLogManager {
	if !c.rlms {
		c.v.rlms, c.rlms = maps.Clone(c.v.rlms), true
	}
	return c.v.rlms
}

func (c *change) ownTopics() {
	if !c.topics {
		c.v.byName, c.v.byID, c.topics = maps.Clone(c.v.byName), maps.Clone(c.v.byID), true
		c.v.byCreation = maps.Clone(c.v.byCreation)
		c.copied = map[*Topic]bool{}
	}
}

// ownTopic gives a copy of a topic that may be changed; nil if there is none.
func (c *change) ownTopic(creation int64) *Topic {
	t := c.v.byCreation[creation]
	if t == nil {
		return nil
	}
	c.ownTopics()
	if c.copied[t] {
		return t
	}
	next := *t
	next.Partitions = slices.Clone(t.Partitions)
	c.put(&next)
	return &next
}

// put makes a topic that nobody else has seen part of the view.
func (c *change) put(t *Topic) {
	c.v.byName[t.Name], c.v.byID[t.ID], c.v.byCreation[t.CreationOffset] = t, t, t
	c.copied[t] = true
}

func (c *change) apply(ev *metadatav1.Event) error {
	offset := c.entry.GetOffset()
	switch k := ev.GetKind().(type) {
	case *metadatav1.Event_ClusterCreated:
		c.v.ClusterID = k.ClusterCreated.GetClusterId()
	case *metadatav1.Event_ControllerElected:
		c.v.ControllerID, c.v.ControllerAddress = k.ControllerElected.GetMetadataId(), k.ControllerElected.GetAddress()
	case *metadatav1.Event_BrokerRegistered:
		b := k.BrokerRegistered
		c.ownBrokers()[b.GetBrokerId()] = Broker{ID: b.GetBrokerId(), Address: b.GetAddress(), Zone: b.GetZone(), Epoch: offset, Online: true}
	case *metadatav1.Event_BrokerOffline:
		all := c.ownBrokers()
		if b, ok := all[k.BrokerOffline.GetBrokerId()]; ok && b.Epoch == k.BrokerOffline.GetBrokerEpoch() {
			b.Online = false
			all[b.ID] = b
		}
	case *metadatav1.Event_RemoteLogManagerRegistered:
		r := k.RemoteLogManagerRegistered
		c.ownRLMs()[r.GetRlmId()] = RemoteLogManager{ID: r.GetRlmId(), Address: r.GetAddress(), Zone: r.GetZone(), Epoch: offset, Open: true}
	case *metadatav1.Event_RemoteLogManagerClosed:
		all := c.ownRLMs()
		if r, ok := all[k.RemoteLogManagerClosed.GetRlmId()]; ok && r.Epoch == k.RemoteLogManagerClosed.GetRlmEpoch() {
			r.Open = false
			all[r.ID] = r
		}
	case *metadatav1.Event_TopicCreated:
		return c.created(k.TopicCreated)
	case *metadatav1.Event_TopicUpdated:
		t := c.ownTopic(k.TopicUpdated.GetTopicCreationOffset())
		if t == nil {
			return nil
		}
		cfg, err := topicconfig.Parse(k.TopicUpdated.GetConfigs())
		if err != nil {
			return fmt.Errorf("%w: topic %s: %w", ErrFeatureLevel, t.Name, err)
		}
		t.Config = cfg
	case *metadatav1.Event_TopicDeleted:
		if t := c.ownTopic(k.TopicDeleted.GetTopicCreationOffset()); t != nil {
			delete(c.v.byName, t.Name)
			delete(c.v.byID, t.ID)
			delete(c.v.byCreation, t.CreationOffset)
		}
	case *metadatav1.Event_PartitionFenced:
		f := k.PartitionFenced
		if p := c.partition(f.GetTopicCreationOffset(), f.GetPartition()); p != nil {
			p.LeaderID, p.LeaderEpoch, p.BrokerEpoch, p.Opened = f.GetLeaderId(), f.GetLeaderEpoch(), f.GetBrokerEpoch(), false
		}
	case *metadatav1.Event_ReplicasChanged:
		r := k.ReplicasChanged
		if p := c.partition(r.GetTopicCreationOffset(), r.GetPartition()); p != nil {
			p.Replicas = slices.Clone(r.GetBrokerIds())
		}
	case *metadatav1.Event_EpochOpened:
		o := k.EpochOpened
		if p := c.partition(o.GetTopicCreationOffset(), o.GetPartition()); p != nil && p.LeaderEpoch == o.GetLeaderEpoch() {
			p.Opened = true
		}
	case *metadatav1.Event_ProducerIdsAllocated, *metadatav1.Event_CombinedSegmentCommitted, *metadatav1.Event_RangeCommitted:
		// Nothing of it is in the view.
	default:
		return fmt.Errorf("%w: entry %d holds an unknown event", ErrFeatureLevel, offset)
	}
	return nil
}

func (c *change) created(m *metadatav1.TopicCreated) error {
	cfg, err := topicconfig.Parse(m.GetConfigs())
	if err != nil {
		return fmt.Errorf("%w: topic %s: %w", ErrFeatureLevel, m.GetName(), err)
	}
	c.ownTopics()
	t := &Topic{ID: m.GetTopicId(), Name: m.GetName(), CreationOffset: c.entry.GetOffset(), Config: cfg}
	for _, a := range m.GetAssignments() {
		t.Partitions = append(t.Partitions, Partition{Replicas: a.GetBrokerIds()})
	}
	c.put(t)
	return nil
}

func (c *change) partition(creation int64, index int32) *Partition {
	t := c.ownTopic(creation)
	if t == nil || index < 0 || int(index) >= len(t.Partitions) {
		return nil
	}
	return &t.Partitions[index]
}
