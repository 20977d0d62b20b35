package replica

import (
	"context"

	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/partition"
)

// Partition is one partition on this broker.
type Partition struct {
	topic     string
	topicID   string
	partition int32
	key       cluster.Key
}

// Topic is the topic's name.
func (p *Partition) Topic() string { return p.topic }

// TopicID is the topic's id.
func (p *Partition) TopicID() string { return p.topicID }

// Index is the partition's index.
func (p *Partition) Index() int32 { return p.partition }

// Submit appends and returns once the batches are in the leader's log; or it
// returns a typed error and nothing was stored. The one exception is a failed
// local write: then the error is an OutcomeUnknownError.
func (p *Partition) Submit(ctx context.Context, in AppendInput) (*Ticket, error) {
	t := p.Enqueue(ctx, in)
	if err := t.Admitted(ctx); err != nil {
		return nil, err
	}
	return t, nil
}

// Enqueue hands an append to the partition's writer and returns at once; appends
// of one goroutine are judged and stored in the order in which they were handed
// over. ctx bounds only the wait for the producer state before the append.
func (p *Partition) Enqueue(ctx context.Context, in AppendInput) *Ticket { return &Ticket{} }

// Ticket is an append under way.
type Ticket struct{}

// Admitted waits until the batches are in the leader's log, or returns the
// refusal. When ctx ends first the append is withdrawn if it was not judged yet
// (its error is returned), otherwise Admitted waits for the local write.
func (t *Ticket) Admitted(ctx context.Context) error { return ctx.Err() }

// Wait waits until the level asked for is reached. Errors are the refusal, if
// there was one (nothing stored), or an OutcomeUnknownError.
func (t *Ticket) Wait(ctx context.Context) (AppendResult, error) { return AppendResult{}, ctx.Err() }

// Fetched is a run of committed batches.
type Fetched struct {
	// Batches are whole and checked. They alias dst where it was large enough
	// and belong to the caller.
	Batches []byte
	// Base is the base offset of the first batch, at or below the offset asked
	// for; Next is where to go on. Both are the offset asked for when there is
	// nothing to read yet.
	Base, Next    int64
	HighWatermark int64
	LogStart      int64
	Lineage       lineage.Lineage // of the whole log; not to be changed
}

// Read returns committed batches, the first being the one that holds from. At
// most maxBytes are returned, except that the first batch always is. At the high
// watermark the result is empty. It never returns a record at or above the high
// watermark. Errors: OffsetOutOfRangeError, ExpiredError, NotLeaderError,
// RecoveringError, UnavailableError, DamagedError.
func (p *Partition) Read(ctx context.Context, from int64, maxBytes int, dst []byte) (Fetched, error) {
	return Fetched{}, ctx.Err()
}

// WaitVisible waits until the record at offset is below the high watermark. It
// fails with NotLeaderError or UnavailableError when this broker stops leading.
func (p *Partition) WaitVisible(ctx context.Context, offset int64) error { return ctx.Err() }

// CheckPosition answers a reader that goes on at offset and saw the record
// before it written by last: nil, or a TruncatedError.
func (p *Partition) CheckPosition(offset int64, last lineage.Leadership) error { return nil }

// Offsets tells where the partition stands.
func (p *Partition) Offsets() Offsets { return Offsets{} }

// OffsetForTime finds the first visible record with a timestamp at or after ms,
// in milliseconds since 1970.
func (p *Partition) OffsetForTime(ctx context.Context, ms int64) (offset, timestamp int64, found bool, err error) {
	return 0, 0, false, ctx.Err()
}

// MaxTimestamp finds the visible record with the largest timestamp, the first
// of them if there are several.
func (p *Partition) MaxTimestamp(ctx context.Context) (offset, timestamp int64, found bool, err error) {
	return 0, 0, false, ctx.Err()
}

// Await waits until everything below end, appended under leadership l, has
// reached the level, and returns the set reached. Errors: TruncatedError,
// ExpiredError, OffsetOutOfRangeError when that leadership has not written so
// far, LevelUnreachableError, UnavailableError while this broker does not lead or
// when ctx ends.
func (p *Partition) Await(ctx context.Context, end int64, l lineage.Leadership, level partition.Level) ([]partition.Level, error) {
	return nil, ctx.Err()
}

// ConfirmLeadership asks the controller whether this broker still leads under
// the fence it knows; nil if it does and its session is live.
func (p *Partition) ConfirmLeadership(ctx context.Context) error { return ctx.Err() }

// Explain says what state the partition is in and why it does not move.
func (p *Partition) Explain() Explanation { return Explanation{} }
