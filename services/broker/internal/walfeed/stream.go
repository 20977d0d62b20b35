package walfeed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
)

// admissionTimeout bounds the wait for AppendWalReady.
const admissionTimeout = 5 * time.Second

type walStream interface {
	Send(*remotelogv1.AppendWalRequest) error
	Recv() (*remotelogv1.AppendWalResponse, error)
	CloseSend() error
}

// serve keeps one stream until it fails or is given up.
func (f *Feed) serve(parent context.Context, m cluster.RemoteLogManager) error {
	id, ok := f.opts.Identity()
	if !ok {
		return errNoSession
	}
	conn, err := f.opts.Pool.Conn(m.Address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	s, err := remotelogv1.NewRemoteLogServiceClient(conn).AppendWal(ctx)
	if err != nil {
		conn.ResetConnectBackoff()
		return fmt.Errorf("open the stream: %w", err)
	}
	if err := s.Send(&remotelogv1.AppendWalRequest{Kind: &remotelogv1.AppendWalRequest_Init{Init: &remotelogv1.AppendWalInit{
		ClusterId: id.ClusterID, Incarnation: id.Incarnation, BrokerId: id.BrokerID, BrokerEpoch: id.BrokerEpoch,
	}}}); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("introduce the broker: %w", err)
	}
	admission := time.AfterFunc(admissionTimeout, func() { cancel(errors.New("not admitted in time")) })
	first, err := s.Recv()
	admission.Stop()
	if err != nil {
		// The next attempt comes soon enough by itself: it shall not meet the pause
		// between connection attempts.
		conn.ResetConnectBackoff()
		return fmt.Errorf("wait for admission: %w", firstOf(context.Cause(ctx), err))
	}
	ready := first.GetReady()
	if ready == nil {
		return errors.New("the first answer is not an admission")
	}
	f.admitted(m, ready)
	f.log.InfoContext(ctx, "sending to a remote-log manager", "peer", m.Address, "rlm_id", m.ID, "zone", m.Zone)

	received := make(chan struct{})
	go func() { // ends with the stream
		defer close(received)
		cancel(f.receive(s))
	}()
	err = f.send(ctx, s, m, id)
	cancel(err)
	<-received
	return firstOf(context.Cause(ctx), err)
}

// firstOf is a, or b where there is no a.
func firstOf(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func (f *Feed) admitted(m cluster.RemoteLogManager, ready *remotelogv1.AppendWalReady) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current, f.since, f.lastErr = m, time.Now(), nil
	f.partitionCredit, f.streamCredit = max(ready.GetPartitionCreditBytes(), 1), max(ready.GetStreamCreditBytes(), 1)
	if m.Zone == f.opts.Zone {
		f.noZoneSince = time.Time{}
	}
}

// send hands ranges to the stream until the stream's context ends or there is a
// reason to leave.
func (f *Feed) send(ctx context.Context, s walStream, m cluster.RemoteLogManager, id Identity) error {
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	msg := &remotelogv1.AppendWalRequest{}
	var buf []byte
	leaving := false
	for {
		for !leaving {
			r, err := f.next(buf)
			if err != nil {
				return err
			}
			if r == nil {
				break
			}
			// SendMsg has marshalled the message when it returns, so the buffer may
			// be used again.
			msg.Kind = &remotelogv1.AppendWalRequest_Range{Range: r}
			if err := s.Send(msg); err != nil {
				return fmt.Errorf("send a range: %w", err)
			}
			if cap(r.Data) > cap(buf) {
				buf = r.Data[:0]
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-f.wake:
		case now := <-ticker.C:
			why := f.look(now, m, id)
			switch {
			case errors.Is(why, errSwitch):
				leaving = true
				if f.unanswered() == 0 {
					return why
				}
			case why != nil:
				return why
			}
		}
	}
}

func (f *Feed) unanswered() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.outstanding
}

// look says whether to leave the stream.
func (f *Feed) look(now time.Time, m cluster.RemoteLogManager, id Identity) error {
	if cur, ok := f.opts.Identity(); ok && cur.BrokerEpoch != id.BrokerEpoch {
		return errOtherEpoch
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if at := f.oldest(); !at.IsZero() && now.Sub(at) > f.opts.VerdictTimeout {
		return fmt.Errorf("%w: a range is %v old", errVerdict, now.Sub(at).Round(time.Millisecond))
	}
	open, local := false, false
	for _, r := range f.opts.View().RemoteLogManagers() {
		if r.ID == m.ID && r.Epoch >= m.Epoch && (r.Open || r.Epoch > m.Epoch) {
			open = true
		}
		if r.Open && r.Zone == f.opts.Zone {
			if fail, bad := f.failed[r.ID]; !bad || now.Sub(fail.at) >= penalty(fail.count) {
				local = true
			}
		}
	}
	if !open && len(f.opts.View().RemoteLogManagers()) > 0 {
		return errClosed
	}
	if m.Zone != f.opts.Zone && local {
		return errSwitch
	}
	return nil
}

// next cuts the next range that the credits allow; nil when there is none.
func (f *Feed) next(buf []byte) (*remotelogv1.WalRange, error) {
	for {
		f.mu.Lock()
		left := f.streamCredit - f.outstanding
		if f.outstanding > 0 && left <= 0 {
			f.mu.Unlock()
			return nil, nil // a verdict will nudge
		}
		fl := f.dequeue()
		if fl == nil {
			f.mu.Unlock()
			return nil, nil
		}
		if fl.outstanding > 0 {
			left = min(left, f.partitionCredit-fl.outstanding)
			if left <= 0 {
				fl.blocked = true
				f.mu.Unlock()
				continue
			}
		}
		strict := f.outstanding > 0
		limit := int(min(left, MaxRangeBytes))
		if !strict {
			limit = MaxRangeBytes
		}
		f.mu.Unlock()

		r, ok, held := fl.src.NextRange(buf[:0], limit, strict)
		f.mu.Lock()
		switch {
		case held && fl.outstanding == 0:
			// It waits for the stream's credit, not for its own: it keeps its turn.
			f.enqueue(fl)
			f.mu.Unlock()
			return nil, nil
		case held:
			fl.blocked = true
			f.mu.Unlock()
			continue
		case !ok:
			if !fl.queued && len(fl.pending) == 0 {
				delete(f.flows, fl.src.FeedKey())
			}
			f.mu.Unlock()
			continue
		}
		// The source may have been removed and announced anew meanwhile.
		if now := f.flows[fl.src.FeedKey()]; now != nil {
			fl = now
		} else {
			f.flows[fl.src.FeedKey()] = fl
		}
		size := int64(len(r.GetData()))
		fl.pending = append(fl.pending, sentRange{run: r.GetRun(), base: r.GetRange().GetBaseOffset(), size: size, at: time.Now()})
		fl.outstanding += size
		f.outstanding += size
		f.enqueue(fl) // there may be more
		f.mu.Unlock()
		return r, nil
	}
}

// receive hands verdicts to their sources until the stream ends.
func (f *Feed) receive(s walStream) error {
	for {
		m, err := s.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the remote-log manager ended the stream")
			}
			return fmt.Errorf("receive a verdict: %w", err)
		}
		v := m.GetVerdict()
		if v == nil {
			return errors.New("an answer is not a verdict")
		}
		if src := f.answered(v); src != nil {
			src.Verdict(v)
		}
		f.nudge()
	}
}

// answered frees the credit of a range and returns whose it was.
func (f *Feed) answered(v *remotelogv1.WalVerdict) Source {
	key := cluster.Key{CreationOffset: v.GetPartition().GetTopicCreationOffset(), Partition: v.GetPartition().GetPartition()}
	f.mu.Lock()
	defer f.mu.Unlock()
	fl := f.flows[key]
	if fl == nil {
		return nil
	}
	for i := range fl.pending {
		if p := &fl.pending[i]; p.run == v.GetRun() && p.base == v.GetBaseOffset() {
			fl.outstanding -= p.size
			f.outstanding -= p.size
			fl.pending = append(fl.pending[:i], fl.pending[i+1:]...)
			break
		}
	}
	if fl.blocked {
		f.enqueue(fl)
	}
	delete(f.failed, f.current.ID)
	return fl.src
}
