package api

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/broker/internal/replica"
)

type readStream = grpc.ServerStreamingServer[brokerv1.ReadResponse]

// Read implements LogService. Reading to the end means to the high watermark as it
// was when the stream began.
func (s *Service) Read(req *brokerv1.ReadRequest, stream readStream) (err error) {
	ctx := stream.Context()
	defer func() { s.metrics.failed(ctx, "Read", err) }()
	if err := checkRead(req); err != nil {
		return err
	}
	t := target{req.GetTopic(), req.GetPartition()}
	p, err := s.withLeader(ctx, t, 0, func(p Partition) error {
		r := &read{s: s, t: t, p: p, src: p, req: req, stream: stream}
		if req.GetReadPreference() == brokerv1.ReadPreference_READ_PREFERENCE_NEAREST {
			if src, ok := p.Nearest(); ok {
				r.src, r.nearest = src, true
			}
		}
		return r.here()
	})
	if started := (*startedError)(nil); errors.As(err, &started) {
		return rpcError(t, p, started.err)
	}
	if leader, ok := s.leaderFor(ctx, err); ok {
		return s.forwardRead(req, stream, leader)
	}
	return rpcError(t, p, err)
}

// startedError is an error after something was sent: such a stream can't be
// forwarded any more.
type startedError struct{ err error }

func (e *startedError) Error() string { return e.err.Error() }

func (e *startedError) Unwrap() error { return e.err }

func checkRead(req *brokerv1.ReadRequest) error {
	var v violations
	v.target(req.GetTopic(), req.GetPartition())
	switch k := req.GetStart().(type) {
	case *brokerv1.ReadRequest_Offset:
		v.check(k.Offset >= 0, "offset", fmt.Sprintf("is %d: offsets run from 0", k.Offset))
	case *brokerv1.ReadRequest_Time:
		v.time("time", k.Time)
	}
	if l := req.GetLastLeadership(); l != nil {
		_, ok := req.GetStart().(*brokerv1.ReadRequest_Offset)
		v.check(ok, "last_leadership", "is given without an offset: it is about the record before that offset")
		v.check(l.GetIncarnation() != 0 && l.GetLeaderEpoch() >= 0, "last_leadership", "is not a leadership: give the one of the record before the offset, as it was read")
	}
	v.check(req.GetMaxBytes() >= 0, "max_bytes", "is negative: give a number of bytes, or 0 for no limit")
	v.check(req.GetMaxRecords() >= 0, "max_records", "is negative: give a number of records, or 0 for no limit")
	_, known := brokerv1.ReadPreference_name[int32(req.GetReadPreference())]
	v.check(known, "read_preference", "is not one: use READ_PREFERENCE_LEADER or READ_PREFERENCE_NEAREST")
	_, known = brokerv1.ReadFormat_name[int32(req.GetFormat())]
	v.check(known, "format", "is not one: use READ_FORMAT_RECORDS or READ_FORMAT_BATCHES")
	return v.err()
}

// read is one Read stream served here.
type read struct {
	s      *Service
	t      target
	p      Partition
	src    Source // p, or its replica here
	req    *brokerv1.ReadRequest
	stream readStream
	out    output

	nearest bool // src is not bound to the leader

	next    int64 // where to go on
	end     int64 // where to stop without follow
	bytes   int64 // of batches, sent so far
	records int64 // sent so far

	patience *patience // while nobody leads, nil otherwise
	changes  [2]<-chan struct{}
}

// output sends fetched batches in one of the formats. It returns how many records
// it sent, at most limit unless the format can't cut batches, and where to go on.
type output interface {
	send(stream readStream, f replica.Fetched, from, limit int64) (records, next int64, err error)
}

func (r *read) here() error {
	s, stream := r.s, r.stream
	if err := s.reads.enter(); err != nil {
		return err
	}
	defer s.reads.leave()
	ctx, cancel := s.drainContext(stream.Context())
	defer cancel()
	s.metrics.readStreams.Add(ctx, 1)
	defer s.metrics.readStreams.Add(context.WithoutCancel(ctx), -1)

	if r.req.GetFormat() == brokerv1.ReadFormat_READ_FORMAT_BATCHES {
		r.out = &batchOutput{s: s}
	} else {
		r.out = &recordOutput{s: s, t: r.t}
	}
	err := r.run(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errDraining) && stream.Context().Err() == nil {
		return &startedError{rpcerr.Draining()}
	}
	return err
}

func (r *read) run(ctx context.Context) error {
	if err := r.seek(ctx); err != nil {
		return err
	}
	o := r.src.Offsets()
	r.end = o.HighWatermark
	if err := r.stream.Send(&brokerv1.ReadResponse{Kind: &brokerv1.ReadResponse_Start{Start: &brokerv1.ReadStart{
		TopicId: r.src.TopicID(), Offset: r.next, LogStartOffset: o.LogStart, HighWatermark: o.HighWatermark, BrokerId: r.s.self,
	}}}); err != nil {
		return err
	}
	if err := r.loop(ctx); err != nil {
		return &startedError{err}
	}
	return nil
}

// seek finds the first offset to send and makes sure that it can be read here.
func (r *read) seek(ctx context.Context) error {
	// Below the object end a leader serves also while it recovers.
	o := r.src.Offsets()
	if elsewhere := (*replica.NotLeaderError)(nil); !r.nearest && errors.As(r.s.leads(o), &elsewhere) {
		return elsewhere
	}
	switch k := r.req.GetStart().(type) {
	case *brokerv1.ReadRequest_Offset:
		r.next = k.Offset
		if l := r.req.GetLastLeadership(); l != nil {
			last := leadershipFromProto(l)
			if err := newer(o, last); err != nil {
				return err
			}
			if err := r.src.CheckPosition(k.Offset, last); err != nil {
				return r.s.certain(ctx, r.p, o.Fence, err)
			}
		}
	case *brokerv1.ReadRequest_Time:
		ctx, cancel := context.WithTimeout(ctx, queryBound)
		defer cancel()
		offset, _, found, err := r.src.OffsetForTime(ctx, milliseconds(k.Time))
		if err != nil {
			return err
		}
		if r.next = offset; !found {
			r.next = r.src.Offsets().HighWatermark
		}
	default:
		r.next = r.src.Offsets().LogStart
	}
	return r.visible(ctx)
}

// visible checks the first offset against the bounds. One above the high
// watermark may have been read elsewhere already: it waits, bounded, instead of
// being called out of range (design review H8, invariant I11).
func (r *read) visible(ctx context.Context) error {
	o := r.src.Offsets()
	if r.next < o.LogStart {
		return &replica.ExpiredError{Offset: r.next, LogStart: o.LogStart}
	}
	if r.next <= o.HighWatermark {
		return nil
	}
	if o.Leading && r.next > o.LogEnd {
		return r.s.certain(ctx, r.p, o.Fence, &replica.OffsetOutOfRangeError{
			Offset: r.next, LogStart: o.LogStart, HighWatermark: o.HighWatermark, LogEnd: o.LogEnd,
		})
	}
	wait, cancel := answerWithin(ctx, r.s.cfg.ReadVisibleWait.Std())
	defer cancel()
	err := r.src.WaitVisible(wait, r.next-1)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soonRetry,
			"offset %d of %s is above the high watermark %d", r.next, r.t, r.src.Offsets().HighWatermark).WithCause(err)
	}
	return err
}

func (r *read) loop(ctx context.Context) error {
	defer r.settled()
	var buf []byte
	for !r.full() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !r.req.GetFollow() && r.next >= r.end {
			return nil
		}
		f, err := r.fetch(ctx, buf)
		idle := err == nil && len(f.Batches) == 0
		if idle {
			err = r.idle(ctx, f)
		}
		if err != nil {
			if r.outlast(ctx, err) {
				continue
			}
			return err
		}
		r.settled()
		if idle {
			continue
		}
		buf = keep(f.Batches[:0], r.s.cfg.ReadChunkBytes.Bytes())
		limit := r.req.GetMaxRecords() - r.records
		if r.req.GetMaxRecords() == 0 {
			limit = 1<<63 - 1
		}
		records, next, err := r.out.send(r.stream, f, r.next, limit)
		if err != nil {
			return err
		}
		r.records += records
		r.bytes += int64(len(f.Batches))
		r.next = next
	}
	return nil
}

// fetch reads the next batches, bounded.
func (r *read) fetch(ctx context.Context, buf []byte) (replica.Fetched, error) {
	bounded, cancel := context.WithTimeout(ctx, queryBound)
	defer cancel()
	f, err := r.src.Read(bounded, r.next, r.chunk(), buf)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soonRetry,
			"offset %d of %s could not be read within %s", r.next, r.t, queryBound).WithCause(err)
	}
	return f, err
}

// keep lets go of a buffer that one large batch made larger than it has to be.
func keep(buf []byte, chunk int64) []byte {
	if int64(cap(buf)) > 2*chunk {
		return nil
	}
	return buf
}

// full says whether one of the caller's limits is reached.
func (r *read) full() bool {
	return r.req.GetMaxBytes() > 0 && r.bytes >= r.req.GetMaxBytes() ||
		r.req.GetMaxRecords() > 0 && r.records >= r.req.GetMaxRecords()
}

// chunk is how many bytes to fetch next.
func (r *read) chunk() int {
	n := r.s.cfg.ReadChunkBytes.Bytes()
	if r.req.GetMaxBytes() > 0 {
		n = min(n, r.req.GetMaxBytes()-r.bytes)
	}
	return int(n)
}

// idle waits at the high watermark for more, or tells the follower that there is
// none.
func (r *read) idle(ctx context.Context, f replica.Fetched) error {
	wait, cancel := context.WithTimeout(ctx, r.s.cfg.ReadProgressInterval.Std())
	defer cancel()
	err := r.src.WaitVisible(wait, r.next)
	if err == nil {
		return nil
	}
	if wait.Err() == nil || ctx.Err() != nil {
		return err
	}
	return r.stream.Send(&brokerv1.ReadResponse{Kind: &brokerv1.ReadResponse_Progress{Progress: &brokerv1.ReadProgress{
		NextOffset: r.next, HighWatermark: max(f.HighWatermark, r.src.Offsets().HighWatermark),
	}}})
}
