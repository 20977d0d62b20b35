package api

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	"github.com/braidlog/braid/services/rlm/internal/combiner"
)

type appendStream = grpc.BidiStreamingServer[remotelogv1.AppendWalRequest, remotelogv1.AppendWalResponse]

// AppendWal implements the contract. Ranges are taken by one goroutine, which
// ends with the stream's context, and verdicts are sent by this one.
func (s *Server) AppendWal(stream appendStream) error {
	received := make(chan receivedRequest)
	go receive(stream, received) // ends with the stream's context at the latest

	identity, init, err := s.admit(stream.Context(), received)
	if err != nil {
		return err
	}
	st, err := s.deps.Combiner.Open(init.GetIncarnation(), init.GetBrokerEpoch())
	if err != nil {
		return mapError(err)
	}
	defer st.Close()
	err = stream.Send(&remotelogv1.AppendWalResponse{Kind: &remotelogv1.AppendWalResponse_Ready{Ready: &remotelogv1.AppendWalReady{
		RlmId: s.cfg.RLMID, RlmEpoch: identity.Epoch,
		PartitionCreditBytes: s.cfg.PartitionCreditBytes, StreamCreditBytes: s.cfg.StreamCreditBytes,
	}}})
	if err != nil {
		return err
	}
	s.log.InfoContext(stream.Context(), "broker connected", "broker_id", init.GetBrokerId(), "broker_epoch", init.GetBrokerEpoch())

	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	taken := make(chan error, 1) // why no more ranges are taken; nil = the sender is done
	go func() { taken <- s.take(ctx, st, received) }()

	draining := s.deps.Draining
	var end error // what the stream ends with once everything is answered
	ending := false
	for {
		for _, v := range st.Take() {
			if err := stream.Send(&remotelogv1.AppendWalResponse{Kind: &remotelogv1.AppendWalResponse_Verdict{Verdict: v}}); err != nil {
				return err
			}
		}
		if ending && st.Outstanding() == 0 {
			return end
		}
		select {
		case <-st.Ready():
		case err := <-taken:
			taken = nil
			if err != nil && !errors.Is(err, combiner.ErrDraining) {
				return mapError(err) // a broken sender, or a broken rule
			}
			ending = true
			if err != nil {
				end = mapError(err)
			}
		case <-draining:
			draining = nil
			cancel() // nothing more is taken; what was is answered first
			ending, end = true, rpcerr.Draining()
		case <-stream.Context().Done():
			return context.Cause(stream.Context())
		}
	}
}

type receivedRequest struct {
	request *remotelogv1.AppendWalRequest
	err     error
}

// receive hands on what comes until the stream fails or ends.
func receive(stream appendStream, out chan<- receivedRequest) {
	for {
		r, err := stream.Recv()
		select {
		case out <- receivedRequest{r, err}:
		case <-stream.Context().Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// admit judges the stream's first message.
func (s *Server) admit(ctx context.Context, in <-chan receivedRequest) (combiner.Identity, *remotelogv1.AppendWalInit, error) {
	none := combiner.Identity{}
	timer := time.NewTimer(s.cfg.InitTimeout)
	defer timer.Stop()
	var r receivedRequest
	select {
	case r = <-in:
	case <-timer.C:
		return none, nil, invalid("init", "did not come within %v", s.cfg.InitTimeout)
	case <-s.deps.Draining:
		return none, nil, rpcerr.Draining()
	case <-ctx.Done():
		return none, nil, context.Cause(ctx)
	}
	if errors.Is(r.err, io.EOF) {
		return none, nil, invalid("init", "is missing")
	}
	if r.err != nil {
		return none, nil, r.err
	}
	init := r.request.GetInit()
	if init == nil {
		return none, nil, invalid("init", "must come first")
	}
	if init.GetBrokerId() < 1 {
		return none, nil, invalid("init.broker_id", "%d is not 1 or more", init.GetBrokerId())
	}
	if err := s.checkCluster(init.GetClusterId()); err != nil {
		return none, nil, err
	}
	identity, ok := s.deps.Combiner.Identity()
	if !ok {
		return none, nil, notReady()
	}
	if init.GetIncarnation() != identity.Incarnation {
		return none, nil, rpcerr.Mismatch(errorsv1.ErrorReason_ERROR_REASON_INCARNATION_MISMATCH, "incarnation", identity.Incarnation, init.GetIncarnation())
	}
	return identity, init, nil
}

// take appends ranges until the sender is done (nil), breaks a rule, or ctx ends
// ([combiner.ErrDraining] then: nobody else ends it).
func (s *Server) take(ctx context.Context, st *combiner.Stream, in <-chan receivedRequest) error {
	for {
		var r receivedRequest
		select {
		case r = <-in:
		case <-ctx.Done():
			return combiner.ErrDraining
		}
		switch {
		case errors.Is(r.err, io.EOF):
			return nil
		case r.err != nil:
			return r.err
		}
		w := r.request.GetRange()
		if w == nil {
			return invalid("kind", "only ranges follow the first message")
		}
		if err := st.Append(ctx, w); err != nil {
			if ctx.Err() != nil {
				return combiner.ErrDraining
			}
			return err
		}
	}
}
