package state

import (
	"fmt"

	"github.com/braidlog/braid/pkg/chainhash"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// What can be wrong with an entry. After any of these the state applies nothing
// more.

// OffsetError is an entry that is not the next one.
type OffsetError struct{ Want, Got int64 }

func (e *OffsetError) Error() string {
	return fmt.Sprintf("metadata entry %d where %d is next", e.Got, e.Want)
}

// UnknownEventError is an entry that this version does not understand.
type UnknownEventError struct {
	Offset       int64
	Index        int    // of the event, -1 when the whole entry asks for more
	FeatureLevel uint32 // of the entry
}

func (e *UnknownEventError) Error() string {
	return fmt.Sprintf("metadata entry %d, event %d: not known at feature level %d (the entry's is %d): upgrade this replica",
		e.Offset, e.Index, FeatureLevel, e.FeatureLevel)
}

// BadEntryError is an entry that contradicts the log before it.
type BadEntryError struct {
	Offset int64
	Index  int // of the event, -1 for the entry itself
	Reason string
}

func (e *BadEntryError) Error() string {
	return fmt.Sprintf("metadata entry %d, event %d: %s", e.Offset, e.Index, e.Reason)
}

// Why a command is refused. Nothing was changed.

// FieldError is a field of the command that is malformed.
type FieldError struct{ Field, Problem string }

func (e *FieldError) Error() string { return e.Field + ": " + e.Problem }

// UnknownTopicError is a topic that does not exist, by the name or id asked for.
type UnknownTopicError struct{ Topic string }

func (e *UnknownTopicError) Error() string { return fmt.Sprintf("no topic %q", e.Topic) }

// UnknownPartitionError is a partition that does not exist.
type UnknownPartitionError struct {
	Topic     string // name or id, as asked for
	Partition int32
}

func (e *UnknownPartitionError) Error() string {
	return fmt.Sprintf("no partition %d of topic %q", e.Partition, e.Topic)
}

// TopicExistsError is a name or an id that is taken.
type TopicExistsError struct{ Name, TopicID string }

func (e *TopicExistsError) Error() string {
	return fmt.Sprintf("topic %q exists already with id %s", e.Name, e.TopicID)
}

// ClusterMismatchError is a caller of another cluster.
type ClusterMismatchError struct{ Want, Got string }

func (e *ClusterMismatchError) Error() string {
	return fmt.Sprintf("this is cluster %s, the caller belongs to %s", e.Want, e.Got)
}

// IncarnationMismatchError is a caller that names another incarnation of the log.
type IncarnationMismatchError struct{ Want, Got uint32 }

func (e *IncarnationMismatchError) Error() string {
	return fmt.Sprintf("this is incarnation %08x of the metadata log, the caller names %08x", e.Want, e.Got)
}

// RolledBackError is a caller that has seen more of the log than there is.
type RolledBackError struct{ Seen, LogEnd int64 }

func (e *RolledBackError) Error() string {
	return fmt.Sprintf("the metadata log ends at %d but the caller has seen it up to %d: etcd was rolled back", e.LogEnd, e.Seen)
}

// BrokerIDInUseError is a broker id that is live elsewhere.
type BrokerIDInUseError struct {
	BrokerID int32
	Address  string // of the live one
}

func (e *BrokerIDInUseError) Error() string {
	return fmt.Sprintf("broker id %d is held by a live session at %s with another data directory", e.BrokerID, e.Address)
}

// StaleBrokerEpochError is a broker whose registration is not the current one,
// or that is not registered (Current is then -1).
type StaleBrokerEpochError struct {
	BrokerID       int32
	Named, Current int64
}

func (e *StaleBrokerEpochError) Error() string {
	return fmt.Sprintf("broker %d: epoch %d is not the current one (%d)", e.BrokerID, e.Named, e.Current)
}

// RLMEpochClosedError is a remote-log manager whose epoch is closed.
type RLMEpochClosedError struct {
	RLMID    int32
	RLMEpoch int64
}

func (e *RLMEpochClosedError) Error() string {
	return fmt.Sprintf("epoch %d of remote-log manager %d is closed", e.RLMEpoch, e.RLMID)
}

// FencedError is a fence that is not the partition's, or not an elected
// leader's any more. It carries the partition as it is.
type FencedError struct{ Partition *metadatav1.Partition }

func (e *FencedError) Error() string {
	f := e.Partition.GetFence()
	return fmt.Sprintf("fenced: the partition is at leader epoch %d, leader %d with broker epoch %d",
		f.GetLeaderEpoch(), e.Partition.GetLeaderId(), f.GetBrokerEpoch())
}

// ObjectEndError is a leader that reconciled with another object end: it has
// to do so again.
type ObjectEndError struct{ Named, ObjectEnd int64 }

func (e *ObjectEndError) Error() string {
	return fmt.Sprintf("the object end is %d, not %d", e.ObjectEnd, e.Named)
}

// ChainMismatchError is a leader that holds other bytes below Offset.
type ChainMismatchError struct {
	Offset    int64
	Want, Got chainhash.Hash
}

func (e *ChainMismatchError) Error() string {
	return fmt.Sprintf("chain hash at offset %d is %v, not %v: other bytes below it", e.Offset, e.Want, e.Got)
}

// TransitionError is a command that the present state does not allow.
type TransitionError struct {
	Subject string // what it is about, such as "start_offset" or "broker 3"
	Reason  string
}

func (e *TransitionError) Error() string { return e.Subject + ": " + e.Reason }

// ConflictError is a guard of the command that does not hold any more.
type ConflictError struct{ Subject, Reason string }

func (e *ConflictError) Error() string { return e.Subject + ": " + e.Reason }

// NoCandidateError is an election without a live replica.
type NoCandidateError struct{ Replicas []int32 }

func (e *NoCandidateError) Error() string {
	return fmt.Sprintf("none of the replicas %v is live", e.Replicas)
}

// ExhaustedError is a number space at its end.
type ExhaustedError struct{ What string }

func (e *ExhaustedError) Error() string { return e.What + " are used up" }
