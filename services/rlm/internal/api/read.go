package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/walobject"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/rlm/internal/fetcher"
)

const (
	// maxChunk bounds a message of ReadWal.
	maxChunk = 1 << 20
	// maxFooterRanges bounds a request of ReadRangeFooters.
	maxFooterRanges = 256
)

// ReadWal implements the contract.
func (s *Server) ReadWal(r *remotelogv1.ReadWalRequest, stream grpc.ServerStreamingServer[remotelogv1.ReadWalResponse]) error {
	if err := s.checkCluster(r.GetClusterId()); err != nil {
		return err
	}
	if err := walobject.CheckRef(r.GetObject()); err != nil {
		return invalid("object", "%v", err)
	}
	if r.GetPosition() < 0 || r.GetPosition() > walobject.MaxDataSize+walobject.MaxFooterSize {
		return invalid("position", "%d is not within an object", r.GetPosition())
	}
	if r.GetLengthBytes() < 1 || r.GetLengthBytes() > walobject.MaxDataSize+walobject.MaxFooterSize {
		return invalid("length_bytes", "%d is not 1 or more, within an object", r.GetLengthBytes())
	}
	name := walobject.Name(s.cfg.ClusterID, r.GetObject())
	ctx := stream.Context()
	err := s.deps.Fetcher.Read(ctx, peerName(ctx), name, r.GetPosition(), r.GetLengthBytes(), func(piece []byte) error {
		for chunk := range slices.Chunk(piece, maxChunk) {
			if err := s.send(stream, chunk); err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, fetcher.ErrNotFound) {
		return notFound("object", name, err)
	}
	return mapError(err)
}

// send sends a chunk to a reader that must take it in time.
func (s *Server) send(stream grpc.ServerStreamingServer[remotelogv1.ReadWalResponse], chunk []byte) error {
	sent := make(chan error, 1)
	go func() { sent <- stream.Send(&remotelogv1.ReadWalResponse{Data: chunk}) }() // ends with the stream at the latest
	timer := time.NewTimer(s.cfg.SendTimeout)
	defer timer.Stop()
	select {
	case err := <-sent:
		return err
	case <-timer.C:
		return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "ReadWal",
			"seconds without the reader taking a byte; resume where the stream ended", int64(s.cfg.SendTimeout.Seconds()), retryAfter)
	case <-s.deps.Draining:
		return rpcerr.Draining()
	case <-stream.Context().Done():
		return context.Cause(stream.Context())
	}
}

// ReadRangeFooters implements the contract.
func (s *Server) ReadRangeFooters(ctx context.Context, r *remotelogv1.ReadRangeFootersRequest) (*remotelogv1.ReadRangeFootersResponse, error) {
	if err := s.checkCluster(r.GetClusterId()); err != nil {
		return nil, err
	}
	if n := len(r.GetRanges()); n < 1 || n > maxFooterRanges {
		return nil, invalid("ranges", "%d, allowed are 1..%d", n, maxFooterRanges)
	}
	if r.GetPartition().GetTopicId() == "" {
		return nil, invalid("partition", "is missing")
	}
	resp := &remotelogv1.ReadRangeFootersResponse{Footers: make([]*storagev1.RangeFooter, len(r.GetRanges()))}
	known := make(map[string]*storagev1.CombinedObjectFooter)
	size := 0
	for i, loc := range r.GetRanges() {
		if err := walobject.CheckRef(loc.GetObject()); err != nil {
			return nil, invalid(fmt.Sprintf("ranges[%d].object", i), "%v", err)
		}
		if loc.GetObjectSizeBytes() < 1 {
			return nil, invalid(fmt.Sprintf("ranges[%d].object_size_bytes", i), "%d is not 1 or more", loc.GetObjectSizeBytes())
		}
		name := walobject.Name(s.cfg.ClusterID, loc.GetObject())
		footer := known[name]
		if footer == nil {
			var err error
			if footer, err = s.deps.Fetcher.Footer(ctx, name, loc.GetObjectSizeBytes()); err != nil {
				if errors.Is(err, fetcher.ErrNotFound) {
					return nil, notFound("object", name, err)
				}
				return nil, mapError(err)
			}
			known[name] = footer
		}
		for _, f := range footer.GetRanges() {
			if f.GetRange().GetBaseOffset() == loc.GetBaseOffset() && proto.Equal(f.GetRange().GetPartition(), r.GetPartition()) {
				resp.Footers[i] = f
				break
			}
		}
		if resp.Footers[i] == nil {
			return nil, notFound("range", fmt.Sprintf("%s/%d at offset %d in %s", r.GetPartition().GetTopicId(), r.GetPartition().GetPartition(), loc.GetBaseOffset(), name), nil)
		}
		if size += proto.Size(resp.Footers[i]); size > s.cfg.MaxResponseBytes {
			return nil, rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "ReadRangeFooters",
				"bytes of response; ask for fewer ranges", int64(s.cfg.MaxResponseBytes), 0)
		}
	}
	return resp, nil
}

// peerName is who calls, as far as the connection tells.
func peerName(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		return p.Addr.String()
	}
	return ""
}
