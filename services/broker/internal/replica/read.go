package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/lineage"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/services/broker/internal/commitlog"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

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

// readable is what a read needs to know, taken at one moment.
type readable struct {
	log      *commitlog.Log // nil unless local bytes may be served
	view     partition.View
	logEnd   int64
	highMark int64
	follows  bool // of a replica that may be behind
}

// readable says from where this broker may serve, design review H8: its own
// bytes only while it leads; as a leader that is not ready, or whose log is of
// no use, what is committed, from the bucket.
func (p *Partition) readable() (readable, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, known := p.machine.View()
	if p.gone {
		return readable{}, p.goneErr()
	}
	if !known {
		return readable{}, &RecoveringError{Reason: "the partition's metadata is not known yet", Retry: 200 * time.Millisecond}
	}
	if v.Leader != p.mgr.cfg.BrokerID {
		return readable{}, p.notLeader()
	}
	out := readable{view: v, logEnd: v.ObjectEnd, highMark: v.ObjectEnd}
	if s, _ := p.machine.State(); s == partition.Active {
		out.log, out.logEnd = p.log, p.machine.Log().End
	}
	return out, nil
}

// Read returns committed batches, the first being the one that holds from. At
// most maxBytes are returned, except that the first batch always is. At the high
// watermark the result is empty. It never returns a record at or above the high
// watermark. Errors: OffsetOutOfRangeError, ExpiredError, NotLeaderError,
// RecoveringError, UnavailableError, DamagedError.
func (p *Partition) Read(ctx context.Context, from int64, maxBytes int, dst []byte) (Fetched, error) {
	r, err := p.readable()
	if err != nil {
		return Fetched{}, err
	}
	return p.read(ctx, r, from, maxBytes, dst)
}

func (p *Partition) read(ctx context.Context, r readable, from int64, maxBytes int, dst []byte) (Fetched, error) {
	out := Fetched{Base: from, Next: from, HighWatermark: r.highMark, LogStart: r.view.LogStart, Lineage: r.view.Lineage}
	switch {
	case from < r.view.LogStart:
		return Fetched{}, &ExpiredError{Offset: from, LogStart: r.view.LogStart}
	case from > r.logEnd && r.follows:
		return Fetched{}, &UnavailableError{Reason: NotReady, Message: fmt.Sprintf("offset %d is above the end of this replica, %d", from, r.logEnd), Retry: 200 * time.Millisecond}
	case from > r.logEnd && r.log == nil:
		// The log may reach further than what is known before it was opened.
		return Fetched{}, &RecoveringError{Reason: fmt.Sprintf("offset %d is above what is known", from), Retry: 200 * time.Millisecond}
	case from > r.logEnd:
		return Fetched{}, &OffsetOutOfRangeError{Offset: from, LogStart: r.view.LogStart, HighWatermark: r.highMark, LogEnd: r.logEnd}
	case from >= r.highMark:
		out.Batches = dst[:0]
		return out, nil
	}
	if r.log != nil && from >= r.log.Start() {
		chunk, err := r.log.Read(dst, commitlog.ReadRequest{Offset: from, Limit: r.highMark, MaxBytes: maxBytes})
		if err == nil && chunk.End > from {
			out.Batches, out.Base, out.Next = chunk.Bytes, chunk.Base, chunk.End
			p.mgr.metrics.read(len(chunk.Bytes), false)
			return out, nil
		}
		if err != nil {
			// Damaged, truncated or closed meanwhile: what is committed is in the
			// bucket whatever happened here (I14).
			p.logger().WarnContext(ctx, "local read failed, reading from the bucket", "offset", from, "err", err)
		}
	}
	data, rg, err := p.fetchRange(ctx, from, r.view.Lineage)
	if err != nil {
		return Fetched{}, err
	}
	base, next, cut, err := sliceBatches(data, from, maxBytes)
	if err != nil {
		return Fetched{}, &DamagedError{Where: "object " + p.mgr.remote.ObjectName(&rg.Range), Offset: from, Position: rg.Position, Length: rg.Length, Err: err}
	}
	out.Batches, out.Base, out.Next = append(dst[:0], cut...), base, next
	p.mgr.metrics.read(len(cut), true)
	return out, nil
}

// readPatience is how long a read waits for the bucket to be reachable, and
// readPause the time between attempts.
const (
	readPatience = 3 * time.Second
	readPause    = 100 * time.Millisecond
)

// fetchRange gets the committed range that holds an offset from the bucket. It
// waits a little for what may be a moment's trouble, or a list that is a moment
// behind.
func (p *Partition) fetchRange(ctx context.Context, offset int64, l lineage.Lineage) ([]byte, remote.Located, error) {
	began := time.Now()
	for {
		data, rg, err := p.tryRange(ctx, offset, l)
		var unavailable *UnavailableError
		if !errors.As(err, &unavailable) || time.Since(began)+readPause > readPatience {
			return data, rg, err
		}
		if backoff.Sleep(ctx, readPause) != nil {
			return nil, rg, err
		}
	}
}

func (p *Partition) tryRange(ctx context.Context, offset int64, l lineage.Lineage) ([]byte, remote.Located, error) {
	for attempt := 0; ; attempt++ {
		rg, ok := p.ranges.At(offset)
		if !ok {
			return nil, rg, &UnavailableError{Reason: NotReady, Message: fmt.Sprintf("the range that holds offset %d is not known here yet", offset), Retry: 100 * time.Millisecond}
		}
		data, err := p.mgr.remote.Fetch(ctx, rg, l)
		if err == nil {
			return data, rg, nil
		}
		var damage *remote.DamageError
		switch {
		case errors.Is(err, remote.ErrNotFound):
			// Every place is advisory: another object may hold the range by now
			// (design review F17).
			if now, ok := p.ranges.At(offset); ok && attempt == 0 && now != rg {
				continue
			}
			return nil, rg, &DamagedError{Where: "object " + p.mgr.remote.ObjectName(&rg.Range), Offset: offset, Err: err}
		case errors.As(err, &damage):
			return nil, rg, &DamagedError{Where: "object " + p.mgr.remote.ObjectName(&rg.Range), Offset: offset, Position: rg.Position, Length: rg.Length, Err: err}
		case ctx.Err() != nil:
			return nil, rg, context.Cause(ctx)
		case errors.Is(err, remote.ErrNoManager):
			return nil, rg, &UnavailableError{Reason: NoRemoteLogManager, Message: "no remote-log manager can read from the bucket", Retry: time.Second, Err: err}
		default:
			return nil, rg, &UnavailableError{Reason: ObjectStoreUnreachable, Message: "the bucket can't be read now", Retry: time.Second, Err: err}
		}
	}
}

// sliceBatches cuts whole batches out of checked ones, beginning with the one
// that holds from.
func sliceBatches(data []byte, from int64, maxBytes int) (base, next int64, out []byte, err error) {
	start, pos := -1, 0
	for pos < len(data) {
		size, err := record.Peek(data[pos:])
		if err != nil {
			return 0, 0, nil, err
		}
		b := record.Batch(data[pos : pos+size])
		switch {
		case start < 0 && b.EndOffset() <= from:
		case start < 0:
			start, base = pos, b.BaseOffset()
			next = b.EndOffset()
		case pos+size-start > maxBytes:
			return base, next, data[start:pos], nil
		default:
			next = b.EndOffset()
		}
		pos += size
	}
	if start < 0 {
		return 0, 0, nil, fmt.Errorf("offset %d is not in the range: %w", from, record.ErrCorrupt)
	}
	return base, next, data[start:pos], nil
}

// WaitVisible waits until the record at offset is below the high watermark. It
// fails with NotLeaderError or UnavailableError when this broker stops leading.
func (p *Partition) WaitVisible(ctx context.Context, offset int64) error {
	p.mu.Lock()
	v, known := p.machine.View()
	switch {
	case p.gone:
		p.mu.Unlock()
		return p.goneErr()
	case known && v.Leader == p.mgr.cfg.BrokerID && offset < v.ObjectEnd:
		p.mu.Unlock()
		return nil
	}
	if s, _ := p.machine.State(); s != partition.Active {
		err := p.unsettled()
		p.mu.Unlock()
		return err
	}
	w := &waiter{end: offset + 1, level: partition.Object}
	err := p.waitFor(ctx, w)
	if err == nil {
		return nil
	}
	return waitError(ctx, err)
}

// waitFor queues a waiter and waits; mu is held and given up.
func (p *Partition) waitFor(ctx context.Context, w *waiter) error {
	if p.waiting >= p.mgr.cfg.MaxWaiting {
		p.mu.Unlock()
		return &TooManyRequestsError{Limit: p.mgr.cfg.MaxWaiting}
	}
	p.waiting++
	w.done = make(chan struct{})
	p.await(w)
	p.mu.Unlock()
	select {
	case <-w.done:
	case <-ctx.Done():
		p.mu.Lock()
		if !w.finished {
			p.abandon(w, context.Cause(ctx))
		}
		p.mu.Unlock()
	}
	return w.err
}

// waitError is what the caller of a wait that ended is told.
func waitError(ctx context.Context, err error) error {
	var deposed *deposedError
	switch {
	case errors.As(err, &deposed):
		return deposed.err
	case ctx.Err() != nil:
		return &UnavailableError{Reason: NotReady, Message: "not reached in time", Retry: 100 * time.Millisecond, Err: err}
	}
	return err
}

// Await waits until everything below end, appended under leadership l, has
// reached the level, and returns the set reached. Errors: TruncatedError,
// ExpiredError, OffsetOutOfRangeError when that leadership has not written so
// far, LevelUnreachableError, UnavailableError while this broker does not lead or
// when ctx ends.
func (p *Partition) Await(ctx context.Context, end int64, l lineage.Leadership, level partition.Level) ([]partition.Level, error) {
	p.mu.Lock()
	if level != partition.Leader && level != partition.Object {
		p.mu.Unlock()
		return nil, &LevelUnreachableError{Level: level, Levels: levelsBoth}
	}
	if p.gone {
		p.mu.Unlock()
		return nil, p.goneErr()
	}
	v, _ := p.machine.View()
	standing, fork := p.machine.Judge(end, l)
	var err error
	switch standing {
	case partition.Truncated:
		err = &TruncatedError{ForkPoint: fork}
	case partition.Expired:
		err = &ExpiredError{Offset: end - 1, LogStart: v.LogStart}
	case partition.Beyond:
		err = &OffsetOutOfRangeError{Offset: end, LogStart: v.LogStart, HighWatermark: v.ObjectEnd, LogEnd: p.machine.Log().End}
	case partition.Unsettled:
		err = p.unsettled()
	}
	if err != nil {
		p.mu.Unlock()
		return nil, err
	}
	w := &waiter{end: end, level: level}
	if err := p.waitFor(ctx, w); err != nil {
		return nil, waitError(ctx, err)
	}
	return w.levels, nil
}

// unsettled says why this broker can't tell; mu is held.
func (p *Partition) unsettled() error {
	_, _, err := p.machine.Admit()
	if err == nil {
		return nil
	}
	return p.notActive(err)
}

// notActive is what a caller is told when the machine takes nothing; mu is held.
func (p *Partition) notActive(err error) error {
	var e *partition.NotActiveError
	if !errors.As(err, &e) {
		return err
	}
	switch {
	case e.Removed || p.gone:
		return p.goneErr()
	case !e.Known:
		return &RecoveringError{Reason: "the partition's metadata is not known yet", Retry: 200 * time.Millisecond}
	case e.Leader != p.mgr.cfg.BrokerID:
		return p.notLeader()
	case e.State == partition.Fencing || e.State == partition.Recovering:
		return &RecoveringError{Reason: "its log is being reconciled", Retry: 200 * time.Millisecond}
	default:
		return &RecoveringError{Reason: e.Error(), Retry: 500 * time.Millisecond}
	}
}

// notLeader points to the leader; mu is held.
func (p *Partition) notLeader() error {
	v, known := p.machine.View()
	if !known {
		return &NotLeaderError{}
	}
	e := &NotLeaderError{LeaderID: v.Leader, Epoch: v.Fence.LeaderEpoch}
	if v.Leader == p.mgr.cfg.BrokerID {
		e.LeaderID = 0 // was, and is not fit at the moment
		return e
	}
	if b, ok := p.mgr.Cluster().Broker(v.Leader); ok {
		e.Address = b.Address
	}
	return e
}

// CheckPosition answers a reader that goes on at offset and saw the record
// before it written by last: nil, or a TruncatedError.
func (p *Partition) CheckPosition(offset int64, last lineage.Leadership) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, known := p.machine.View()
	if !known {
		return &RecoveringError{Reason: "the partition's metadata is not known yet", Retry: 200 * time.Millisecond}
	}
	if fork, cut := v.Lineage.ForkPoint(last, offset); cut {
		return &TruncatedError{ForkPoint: fork}
	}
	return nil
}

// OffsetForTime finds the first visible record with a timestamp at or after ms,
// in milliseconds since 1970.
func (p *Partition) OffsetForTime(ctx context.Context, ms int64) (offset, timestamp int64, found bool, err error) {
	r, err := p.readable()
	if err != nil {
		return 0, 0, false, err
	}
	return p.offsetForTime(ctx, r, p.Read, ms)
}

// reader is [Partition.Read].
type reader func(ctx context.Context, from int64, maxBytes int, dst []byte) (Fetched, error)

func (p *Partition) offsetForTime(ctx context.Context, r readable, read reader, ms int64) (offset, timestamp int64, found bool, err error) {
	// Everything visible is in a committed range, and ranges know their times.
	rg, ok := p.ranges.FirstSince(r.view.LogStart, ms)
	if ok && rg.Base < r.highMark {
		return p.findTime(ctx, read, max(rg.Base, r.view.LogStart), min(rg.End, r.highMark), ms)
	}
	// The list may be a moment behind the verdicts.
	if listed, _ := p.ranges.End(); listed < r.highMark && r.log != nil {
		return p.findTime(ctx, read, max(listed, r.view.LogStart), r.highMark, ms)
	}
	return 0, 0, false, nil
}

// MaxTimestamp finds the visible record with the largest timestamp, the first
// of them if there are several.
func (p *Partition) MaxTimestamp(ctx context.Context) (offset, timestamp int64, found bool, err error) {
	r, err := p.readable()
	if err != nil {
		return 0, 0, false, err
	}
	from, end, newest := int64(0), int64(0), record.NoTimestamp
	if rg, ok := p.ranges.Latest(); ok && rg.Base < r.highMark {
		from, end, newest = rg.Base, min(rg.End, r.highMark), rg.MaxTimestamp
	}
	// The list may be a moment behind the verdicts.
	listed, _ := p.ranges.End()
	for listed = max(listed, r.view.LogStart); listed < r.highMark; {
		got, err := p.Read(ctx, listed, 1<<20, nil)
		if err != nil || got.Next <= listed {
			return 0, 0, false, err
		}
		for b, err := range record.Batches(got.Batches) {
			if err != nil {
				return 0, 0, false, &DamagedError{Where: p.topic, Offset: listed, Length: int64(len(got.Batches)), Err: err}
			}
			if b.MaxTimestamp() > newest {
				from, end, newest = b.BaseOffset(), b.EndOffset(), b.MaxTimestamp()
			}
		}
		listed = got.Next
	}
	if end == from {
		return 0, 0, false, nil
	}
	return p.findTime(ctx, p.Read, from, end, newest)
}

// findTime looks through the records of [from, end).
func (p *Partition) findTime(ctx context.Context, read reader, from, end, ms int64) (offset, timestamp int64, found bool, err error) {
	var buf []byte
	for next := from; next < end; {
		got, err := read(ctx, next, 1<<20, buf)
		if err != nil {
			return 0, 0, false, err
		}
		if got.Next <= next {
			break
		}
		for b, err := range record.Batches(got.Batches) {
			if err != nil {
				return 0, 0, false, &DamagedError{Where: p.topic, Offset: next, Length: int64(len(got.Batches)), Err: err}
			}
			if b.MaxTimestamp() < ms || b.EndOffset() <= from {
				continue
			}
			var reader record.Reader
			for err = reader.Reset(b); err == nil && reader.Next(); {
				rec := reader.Record()
				at := rec.Timestamp
				if b.LogAppendTime() {
					at = b.MaxTimestamp()
				}
				if reader.Offset() >= from && at >= ms {
					return reader.Offset(), at, true, nil
				}
			}
			if err = errors.Join(err, reader.Err()); err != nil {
				return 0, 0, false, &DamagedError{Where: p.topic, Offset: b.BaseOffset(), Length: int64(len(b)), Err: err}
			}
		}
		next, buf = got.Next, got.Batches[:0]
	}
	return 0, 0, false, nil
}
