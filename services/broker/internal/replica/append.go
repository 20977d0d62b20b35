package replica

import (
	"time"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/partition"
)

// AppendInput is one append.
type AppendInput struct {
	// Batches are one or more whole record batches back to back, each validated
	// (record.Batch.Validate, its records decodable, neither transactional nor
	// control). Ownership passes: base offsets and leader epochs are written in
	// place.
	Batches []byte
	// Level to wait for; 0 is the topic's min.ack.level.
	Level partition.Level
	// ExpectedLeaderEpoch, when above 0, refuses the append under any other.
	ExpectedLeaderEpoch int32
	// Pipeline, when given, keeps the append in order with the others of the
	// pipeline and refuses it once one of them was refused.
	Pipeline *Pipeline
}

// Pipeline is a sequence of appends to one partition under one leadership. The
// first refusal ends it. The zero Pipeline is ready for use; its appends must be
// handed to Submit or Enqueue one after the other.
type Pipeline struct {
	// All fields are guarded by the partition's mutex.
	bound      bool
	leadership lineage.Leadership
	broken     error
	parked     int
}

// AppendResult says where records are and how safe.
type AppendResult struct {
	// Base and End are the offsets [Base, End).
	Base, End int64
	// Leadership wrote them.
	Leadership lineage.Leadership
	// Levels is the set of levels reached when the answer was given.
	Levels []partition.Level
	// Duplicate says that the batches were stored before; the answer is the
	// first one with the levels reached since.
	Duplicate bool
	// AppendTime is the leader's wall clock at the append.
	AppendTime time.Time
}
