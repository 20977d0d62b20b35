package replica

import (
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/partition"
)

// Offsets is where a partition stands. All ends are exclusive.
type Offsets struct {
	LogStart      int64 // first offset of the partition
	LocalLogStart int64 // first offset on this disk; -1 when no log is open here
	ObjectEnd     int64 // end of the committed prefix
	HighWatermark int64 // end of what readers see
	LogEnd        int64 // end of this broker's log; the object end when no log is open here
	Fence         partition.Fence
	Lineage       lineage.Lineage // not to be changed
	LeaderID      int32           // 0 for none
	// Leading says that this broker leads and takes appends.
	Leading bool
}

// Finding is one reason why a partition does not move, or a thing worth knowing.
type Finding struct {
	// Code is stable: HEALTHY, NO_LEADER, LEADER_ELSEWHERE, LEADER_OFFLINE,
	// RECOVERING, RESIGNING, LOG_OFFLINE, SESSION_LOST, PRODUCERS_RECOVERING,
	// NO_REMOTE_LOG_MANAGER, UPLOADS_STALLED, BACKLOG_FULL, METADATA_UNREACHABLE,
	// LOG_LOADING.
	Code string
	// Summary is one sentence for people.
	Summary string
	// Evidence are the facts behind it, by name.
	Evidence map[string]string
	// Blocking says whether it stops the partition.
	Blocking bool
}

// Explanation describes a partition on this broker.
type Explanation struct {
	TopicID         string
	Partition       int32
	BrokerID        int32
	State           partition.State
	Offsets         Offsets
	UnuploadedBytes int64
	RLMID           int32 // remote-log manager in use, 0 for none
	ProducerCount   int
	Findings        []Finding // most pressing first, never empty
}
