package state

import (
	"fmt"
	"strconv"
	"strings"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Reasons in BrokerOffline and RemoteLogManagerClosed.
const (
	ReasonSessionExpired = "session_expired"
	ReasonStopped        = "stopped"
	ReasonOperator       = "operator"
)

// DecideBootstrap begins a log: the first events of entry 0. The cluster id is
// a UUID, the incarnation random within 1 to 2^31-1.
func (s *State) DecideBootstrap(clusterID string, incarnation uint32) ([]*metadatav1.Event, error) {
	if s.end != 0 {
		return nil, &TransitionError{Subject: "bootstrap", Reason: fmt.Sprintf("the log holds cluster %s already", s.clusterID)}
	}
	if err := checkNewCluster(clusterID, incarnation); err != nil {
		return nil, err
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_ClusterCreated{ClusterCreated: &metadatav1.ClusterCreated{
		ClusterId: clusterID, Incarnation: incarnation,
	}}}), nil
}

// DecideControllerElected makes a metadata replica the controller. It has to be
// the first event of its entry, or stand behind ClusterCreated in entry 0; the
// entry's controller epoch is then its own offset.
func (s *State) DecideControllerElected(metadataID int32, address string) ([]*metadatav1.Event, error) {
	if metadataID < 1 {
		return nil, &FieldError{Field: "metadata_id", Problem: fmt.Sprintf("%d is not 1 or more", metadataID)}
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_ControllerElected{ControllerElected: &metadatav1.ControllerElected{
		MetadataId: metadataID, Address: address,
	}}}), nil
}

// DecideRegisterBroker gives a broker a new epoch, the offset of the entry.
// Whatever it led is fenced by that; elections follow in later entries. The
// errors are [*FieldError], [*ClusterMismatchError],
// [*IncarnationMismatchError], [*RolledBackError] and [*BrokerIDInUseError].
func (s *State) DecideRegisterBroker(r *metadatav1.RegisterBrokerRequest) ([]*metadatav1.Event, error) {
	if r.GetBrokerId() < 1 {
		return nil, &FieldError{Field: "broker_id", Problem: fmt.Sprintf("%d is not 1 or more", r.GetBrokerId())}
	}
	if err := checkMember(r.GetAddress(), r.GetZone()); err != nil {
		return nil, err
	}
	if !isUUID(r.GetDirectoryId()) {
		return nil, &FieldError{Field: "directory_id", Problem: fmt.Sprintf("%q is not a UUID", r.GetDirectoryId())}
	}
	if err := s.CheckCluster(r.GetClusterId()); err != nil {
		return nil, err
	}
	if r.GetIncarnation() != 0 {
		if err := s.CheckIncarnation(r.GetIncarnation()); err != nil {
			return nil, err
		}
		if r.GetAppliedMetadataOffset() > s.end {
			return nil, &RolledBackError{Seen: r.GetAppliedMetadataOffset(), LogEnd: s.end}
		}
	}
	if b := s.brokers[r.GetBrokerId()]; b != nil && b.online && b.directoryID != r.GetDirectoryId() {
		return nil, &BrokerIDInUseError{BrokerID: b.id, Address: b.address}
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_BrokerRegistered{BrokerRegistered: &metadatav1.BrokerRegistered{
		BrokerId: r.GetBrokerId(), Address: r.GetAddress(), Zone: r.GetZone(), DirectoryId: r.GetDirectoryId(),
		LogsIntact: r.GetLogsIntact(),
	}}}), nil
}

// DecideBrokerOffline ends a broker's session. It is true already if the epoch
// is not the current one or the session is over.
func (s *State) DecideBrokerOffline(brokerID int32, brokerEpoch int64, reason string) []*metadatav1.Event {
	b := s.brokers[brokerID]
	if b == nil || b.epoch != brokerEpoch || !b.online {
		return nil
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_BrokerOffline{BrokerOffline: &metadatav1.BrokerOffline{
		BrokerId: brokerID, BrokerEpoch: brokerEpoch, Reason: reason,
	}}})
}

// CheckBrokerEpoch says whether a broker's registration is the current one and
// its session live; the error is a [*StaleBrokerEpochError].
func (s *State) CheckBrokerEpoch(brokerID int32, brokerEpoch int64) error {
	b := s.brokers[brokerID]
	switch {
	case b == nil:
		return &StaleBrokerEpochError{BrokerID: brokerID, Named: brokerEpoch, Current: -1}
	case b.epoch != brokerEpoch || !b.online:
		return &StaleBrokerEpochError{BrokerID: brokerID, Named: brokerEpoch, Current: b.epoch}
	}
	return nil
}

// DecideRegisterRemoteLogManager gives a remote-log manager a new epoch, the
// offset of the entry, which closes its earlier one.
func (s *State) DecideRegisterRemoteLogManager(r *metadatav1.RegisterRemoteLogManagerRequest) ([]*metadatav1.Event, error) {
	if r.GetRlmId() < 1 {
		return nil, &FieldError{Field: "rlm_id", Problem: fmt.Sprintf("%d is not 1 or more", r.GetRlmId())}
	}
	if err := checkMember(r.GetAddress(), r.GetZone()); err != nil {
		return nil, err
	}
	if err := s.CheckCluster(r.GetClusterId()); err != nil {
		return nil, err
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_RemoteLogManagerRegistered{
		RemoteLogManagerRegistered: &metadatav1.RemoteLogManagerRegistered{
			RlmId: r.GetRlmId(), Address: r.GetAddress(), Zone: r.GetZone(),
		},
	}}), nil
}

// DecideCloseRemoteLogManager closes an epoch for good. It is true already if
// another epoch is current or the epoch is closed. An epoch that this log never
// gave is a [*FieldError]: it can't be said to be closed.
func (s *State) DecideCloseRemoteLogManager(rlmID int32, rlmEpoch int64, reason string) ([]*metadatav1.Event, error) {
	if rlmEpoch < 0 || rlmEpoch >= s.end {
		return nil, &FieldError{Field: "rlm_epoch", Problem: fmt.Sprintf("%d was never given, the log ends at %d", rlmEpoch, s.end)}
	}
	if s.CheckRemoteLogManagerEpoch(rlmID, rlmEpoch) != nil {
		return nil, nil
	}
	return one(&metadatav1.Event{Kind: &metadatav1.Event_RemoteLogManagerClosed{
		RemoteLogManagerClosed: &metadatav1.RemoteLogManagerClosed{RlmId: rlmID, RlmEpoch: rlmEpoch, Reason: reason},
	}}), nil
}

// CheckRemoteLogManagerEpoch says whether an epoch is open; the error is a
// [*RLMEpochClosedError].
func (s *State) CheckRemoteLogManagerEpoch(rlmID int32, rlmEpoch int64) error {
	if r := s.rlms[rlmID]; r == nil || r.epoch != rlmEpoch || !r.open {
		return &RLMEpochClosedError{RLMID: rlmID, RLMEpoch: rlmEpoch}
	}
	return nil
}

// DecideAllocateProducerIDs hands out a block of producer ids, never given
// before. first is the block's first id with its tag. The errors are
// [*FieldError], [*StaleBrokerEpochError] and [*ExhaustedError].
func (s *State) DecideAllocateProducerIDs(r *metadatav1.AllocateProducerIdsRequest) (
	events []*metadatav1.Event, response *metadatav1.AllocateProducerIdsResponse, err error,
) {
	count := r.GetCount()
	if count == 0 {
		count = 1_000
	}
	if count < 1 || count > MaxProducerIDBlock {
		return nil, nil, &FieldError{Field: "count", Problem: fmt.Sprintf("%d is not within 1 to %d", count, MaxProducerIDBlock)}
	}
	if err := s.CheckBrokerEpoch(r.GetBrokerId(), r.GetBrokerEpoch()); err != nil {
		return nil, nil, err
	}
	if int64(count) > maxProducerCounter-s.producers {
		return nil, nil, &ExhaustedError{What: "producer ids of this incarnation"}
	}
	events = one(&metadatav1.Event{Kind: &metadatav1.Event_ProducerIdsAllocated{ProducerIdsAllocated: &metadatav1.ProducerIdsAllocated{
		First: s.producers, Count: count, BrokerId: r.GetBrokerId(),
	}}})
	return events, &metadatav1.AllocateProducerIdsResponse{
		FirstProducerId: int64(s.incarnation)<<32 | s.producers, Count: count,
	}, nil
}

// CheckCluster compares a caller's cluster, empty when it does not know one
// yet; the error is a [*ClusterMismatchError].
func (s *State) CheckCluster(clusterID string) error {
	if clusterID != "" && clusterID != s.clusterID {
		return &ClusterMismatchError{Want: s.clusterID, Got: clusterID}
	}
	return nil
}

// CheckIncarnation compares a caller's incarnation; the error is an
// [*IncarnationMismatchError].
func (s *State) CheckIncarnation(incarnation uint32) error {
	if incarnation != s.incarnation {
		return &IncarnationMismatchError{Want: s.incarnation, Got: incarnation}
	}
	return nil
}

const maxLabel = 255 // bytes of an address or a zone

func checkMember(address, zone string) error {
	host, port, ok := cutLast(address, ":")
	n, err := strconv.ParseUint(port, 10, 16)
	if !ok || host == "" || err != nil || n == 0 || len(address) > maxLabel || strings.ContainsAny(address, " \t\n") {
		return &FieldError{Field: "address", Problem: fmt.Sprintf("%q is not host:port", address)}
	}
	if len(zone) > maxLabel {
		return &FieldError{Field: "zone", Problem: fmt.Sprintf("%d bytes, at most %d", len(zone), maxLabel)}
	}
	return nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

func one(e *metadatav1.Event) []*metadatav1.Event { return []*metadatav1.Event{e} }
