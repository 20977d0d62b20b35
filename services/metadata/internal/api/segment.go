package api

import (
	"context"
	"errors"
	"io"
	"strconv"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/rpcerr"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/internal/watch"
	"github.com/braidlog/braid/services/metadata/state"
)

// CommitCombinedSegment implements the contract.
func (s *Server) CommitCombinedSegment(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (
	*metadatav1.CommitCombinedSegmentResponse, error,
) {
	if r.GetRlmId() < 1 {
		return nil, rpcerr.InvalidField("rlm_id", "is not 1 or more")
	}
	// Not a named result: the appender may write it after a caller that gave up
	// has returned.
	var resp *metadatav1.CommitCombinedSegmentResponse
	_, err := s.deps.Controller.Submit(ctx, controller.ClassData, func(st *state.State) (events []*metadatav1.Event, err error) {
		events, resp, err = st.DecideCommit(r)
		return events, err
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	return resp, nil
}

// ListSegments implements the contract. A page token is the offset at which the
// next page begins.
func (s *Server) ListSegments(_ context.Context, r *metadatav1.ListSegmentsRequest) (*metadatav1.ListSegmentsResponse, error) {
	size, err := pageSize(r.GetPageSize(), 1_000, 10_000)
	if err != nil {
		return nil, err
	}
	from := r.GetFromOffset()
	switch {
	case r.GetTopic() == "":
		return nil, rpcerr.InvalidField("topic", "is empty")
	case from < 0:
		return nil, rpcerr.InvalidField("from_offset", "is negative")
	case r.GetPageToken() != "":
		next, err := strconv.ParseInt(r.GetPageToken(), 10, 64)
		if err != nil || next < 0 {
			return nil, rpcerr.InvalidField("page_token", "is not one that this service gave")
		}
		from = max(from, next)
	}
	resp := &metadatav1.ListSegmentsResponse{}
	var clusterID string
	var missing error
	err = s.read(func(st *state.State) {
		id, err := st.FindPartition(r.GetTopic(), r.GetPartition())
		if err != nil {
			missing = err
			return
		}
		clusterID = st.ClusterID()
		var more bool
		if resp.Ranges, more = st.Ranges(id, from, size); more {
			resp.NextPageToken = strconv.FormatInt(resp.Ranges[len(resp.Ranges)-1].GetEndOffset(), 10)
		}
		p, _ := st.Partition(id)
		resp.LogStartOffset, resp.ObjectEndOffset, resp.MetadataOffset = p.GetLogStartOffset(), p.GetObjectEndOffset(), st.EndOffset()
	})
	if err := errors.Join(err, missing); err != nil {
		return nil, s.mapError(err)
	}
	watch.NameObjects(clusterID, resp.Ranges)
	return resp, nil
}

// WatchSegments implements the contract.
func (s *Server) WatchSegments(stream grpc.BidiStreamingServer[metadatav1.WatchSegmentsRequest, metadatav1.WatchSegmentsResponse]) error {
	if err := s.read(func(*state.State) {}); err != nil {
		return err
	}
	return s.stream(stream.Context(), func(ctx context.Context, sending func(func() error) error) error {
		requests := make(chan *metadatav1.WatchSegmentsRequest)
		failed := make(chan error, 1)
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		incoming := receive(ctx, stream.Recv)
		go func() { // ends with ctx or the client's side
			defer close(requests)
			for r := range incoming {
				if r.err != nil {
					if !errors.Is(r.err, io.EOF) {
						failed <- r.err
						cancel(r.err)
					}
					return
				}
				select {
				case requests <- r.message:
				case <-ctx.Done():
					return
				}
			}
		}()
		err := s.deps.Hub.Segments(ctx, s.cfg.Progress, requests, func(m *metadatav1.WatchSegmentsResponse) error {
			return sending(func() error { return stream.Send(m) })
		})
		select {
		case gone := <-failed:
			return gone
		default:
			return err
		}
	})
}

// WatchMetadata implements the contract.
func (s *Server) WatchMetadata(r *metadatav1.WatchMetadataRequest, stream grpc.ServerStreamingServer[metadatav1.WatchMetadataResponse]) error {
	if err := s.read(func(*state.State) {}); err != nil {
		return err
	}
	if f := r.GetFrom(); f != nil && f.GetOffset() < 0 {
		return rpcerr.InvalidField("from.offset", "is negative")
	}
	all := false
	switch r.GetFilter() {
	case metadatav1.MetadataFilter_METADATA_FILTER_UNSPECIFIED, metadatav1.MetadataFilter_METADATA_FILTER_MEMBERSHIP:
	case metadatav1.MetadataFilter_METADATA_FILTER_ALL:
		all = true
	default:
		return rpcerr.InvalidField("filter", "is not a filter known here")
	}
	return s.stream(stream.Context(), func(ctx context.Context, sending func(func() error) error) error {
		return s.deps.Hub.Metadata(ctx, s.cfg.Progress, s.deps.Log, r.GetFrom(), all, func(m *metadatav1.WatchMetadataResponse) error {
			return sending(func() error { return stream.Send(m) })
		})
	})
}
