package replica

import (
	"fmt"
	"hash/crc32"
	"time"

	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/record"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/partition"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// refusedPause is the longest wait between ranges that are refused one after the
// other.
const refusedPause = time.Second

// NextRange implements walfeed.Source: it cuts a range at a batch border out of
// the log.
func (p *Partition) NextRange(buf []byte, limit int, strict bool) (r *remotelogv1.WalRange, ok, held bool) {
	p.mu.Lock()
	log := p.log
	from, to, unsent := p.machine.Unsent()
	if !unsent || log == nil || p.producers == nil || !p.machine.ProducersReady() || time.Now().Before(p.pause) {
		p.mu.Unlock()
		return nil, false, false // woken when that changes
	}
	run, cursor := p.machine.Run(), p.cursor
	view, _ := p.machine.View()
	p.mu.Unlock()

	base, err := p.hashAt(log, view, cursor, run, from)
	if err != nil {
		p.feedFailed(run, from, err)
		return nil, false, false
	}
	chunk, err := log.Read(buf, commitlog.ReadRequest{Offset: from, Limit: to, MaxBytes: limit})
	if err == nil && (chunk.Base != from || chunk.End == from) {
		err = fmt.Errorf("%w: [%d, %d) came for offset %d", commitlog.ErrCorrupt, chunk.Base, chunk.End, from)
	}
	if err != nil {
		p.feedFailed(run, from, err)
		return nil, false, false
	}
	if strict && len(chunk.Bytes) > limit {
		return nil, false, true
	}
	end, count, maxTime := base, int32(0), record.NoTimestamp
	for rest := chunk.Bytes; len(rest) > 0; {
		b := record.Batch(rest)
		b = b[:b.Length()]
		end = chainhash.Next(end, b)
		maxTime = max(maxTime, b.MaxTimestamp())
		count++
		rest = rest[len(b):]
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	if now, _, ok := p.machine.Unsent(); !ok || now != from || p.machine.Run() != run || p.producers == nil {
		return nil, false, false // the run is over; the next one has been announced
	}
	size := int64(len(chunk.Bytes))
	sum, err := p.producers.cut(from, chunk.End, size)
	if err != nil {
		p.postLocked(partition.LogFailed{Err: fmt.Errorf("producer summary: %w", err)})
		return nil, false, false
	}
	p.machine.Sent(chunk.End, end, size)
	p.cursor = feedCursor{run: run, offset: chunk.End, hash: end}
	d := &logv1.RangeDescriptor{
		Partition: p.id, Fence: fenceToProto(view.Fence), EpochStart: view.EpochStart,
		BaseOffset: from, EndOffset: chunk.End, Lineage: lineageToProto(view.Lineage.Slice(from, chunk.End)),
		BaseChainHash: base.Bytes(), EndChainHash: end.Bytes(), LengthBytes: size,
		Crc32C: crc32.Checksum(chunk.Bytes, castagnoli), MaxTimestampMs: maxTime, BatchCount: count,
		ProducersComplete: sum.Complete,
	}
	if who, ok := view.Lineage.Predecessor(from); ok {
		d.Predecessor = leadershipToProto(who)
	}
	return &remotelogv1.WalRange{
		Range: d, Run: run, Producers: producersToProto(sum.Producers), Expiries: expiriesToProto(sum.Expiries), Data: chunk.Bytes,
	}, true, false
}

// hashAt is the chain hash where the next range begins.
func (p *Partition) hashAt(log *commitlog.Log, view partition.View, cursor feedCursor, run, from int64) (chainhash.Hash, error) {
	switch {
	case cursor.run == run && cursor.offset == from:
		return cursor.hash, nil
	case from == view.ObjectEnd:
		return view.ObjectHash, nil
	}
	return log.ChainAt(from)
}

// feedFailed: what can't be read can't be uploaded, and a leader never truncates
// inside its epoch (design review H2): it gives the partition up.
func (p *Partition) feedFailed(run, offset int64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// A log is closed or cut only once the machine has left this run.
	if from, _, ok := p.machine.Unsent(); !ok || from != offset || p.machine.Run() != run || p.closed || p.gone {
		return
	}
	p.logger().Error("the log can't be read for upload", "offset", offset, "err", err)
	p.postLocked(partition.LogFailed{Err: err})
}

// postLocked is post with mu held.
func (p *Partition) postLocked(ev any) {
	p.events.put(ev)
	if !p.busy {
		p.busy = true
		p.startWriter()
	}
}

// Verdict implements walfeed.Source.
func (p *Partition) Verdict(m *remotelogv1.WalVerdict) {
	v, err := verdictFromProto(m)
	if err != nil {
		p.logger().Error("a verdict makes no sense", "err", err)
		p.post(partition.FeedLost{})
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if v.Outcome == partition.Accepted {
		p.refused, p.pause, p.lastBad = 0, time.Time{}, ""
	} else if v.Run == p.machine.Run() {
		wait := min(10*time.Millisecond<<min(p.refused, 10), refusedPause)
		p.refused++
		p.lastBad = v.Outcome.String()
		p.pause = time.Now().Add(wait)
		p.logger().Info("a range was refused", "offset", v.Base, "end", v.End, "outcome", v.Outcome.String(), "object_end", v.ObjectEnd)
	}
	p.mgr.metrics.verdict(v.Outcome)
	p.postLocked(partition.VerdictGiven{Verdict: v})
}

// Lost implements walfeed.Source.
func (p *Partition) Lost() { p.post(partition.FeedLost{}) }
