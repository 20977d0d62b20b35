package record

import "math"

// NextSequence is the producer sequence n records after seq. Sequences are 31
// bits wide and wrap from 2^31-1 to 0. seq and n must not be negative.
func NextSequence(seq, n int32) int32 {
	if seq > math.MaxInt32-n {
		return n - (math.MaxInt32 - seq) - 1
	}
	return seq + n
}

// ProducerBatch is what idempotence needs to remember of a batch.
type ProducerBatch struct {
	ProducerID    int64
	ProducerEpoch int16
	BaseSequence  int32
	LastSequence  int32 // inclusive, wrapped after 2^31-1
	BaseOffset    int64
	EndOffset     int64 // exclusive
	MaxTimestamp  int64 // milliseconds since 1970
}

// Producer extracts the producer's view of the batch; ok is false where no
// idempotent producer wrote it, and for control batches, which take no
// sequence.
func (b Batch) Producer() (p ProducerBatch, ok bool) {
	if !b.HasProducer() || b.IsControl() {
		return ProducerBatch{}, false
	}
	return ProducerBatch{
		ProducerID:    b.ProducerID(),
		ProducerEpoch: b.ProducerEpoch(),
		BaseSequence:  b.BaseSequence(),
		LastSequence:  b.LastSequence(),
		BaseOffset:    b.BaseOffset(),
		EndOffset:     b.EndOffset(),
		MaxTimestamp:  b.MaxTimestamp(),
	}, true
}

// Follows says whether p is the batch that its producer sends after prev: same
// id, and either the next sequence of the same epoch or sequence 0 of a later
// epoch.
func (p ProducerBatch) Follows(prev ProducerBatch) bool {
	if p.ProducerID != prev.ProducerID {
		return false
	}
	if p.ProducerEpoch == prev.ProducerEpoch {
		return p.BaseSequence == NextSequence(prev.LastSequence, 1)
	}
	return p.ProducerEpoch > prev.ProducerEpoch && p.BaseSequence == 0
}

// Repeats says whether p is the same send as prev, stored already.
func (p ProducerBatch) Repeats(prev ProducerBatch) bool {
	return p.ProducerID == prev.ProducerID && p.ProducerEpoch == prev.ProducerEpoch &&
		p.BaseSequence == prev.BaseSequence && p.LastSequence == prev.LastSequence
}
