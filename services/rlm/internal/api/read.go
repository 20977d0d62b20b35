package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
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
	objects, wanted, err := s.footersWanted(r)
	if err != nil {
		return nil, err
	}
	resp := &remotelogv1.ReadRangeFootersResponse{Footers: make([]*storagev1.RangeFooter, len(r.GetRanges()))}
	var size atomic.Int64
	err = s.deps.Fetcher.Footers(ctx, objects, func(o int, footer *fetcher.Footer) error {
		for _, i := range wanted[o] {
			f, err := footer.Range(r.GetPartition(), r.GetRanges()[i].GetBaseOffset())
			if err != nil {
				return err
			}
			if f == nil {
				return notFound("range", fmt.Sprintf("%s/%d at offset %d in %s", r.GetPartition().GetTopicId(), r.GetPartition().GetPartition(), r.GetRanges()[i].GetBaseOffset(), objects[o].Name), nil)
			}
			if size.Add(int64(proto.Size(f))) > int64(s.cfg.MaxResponseBytes) {
				return rpcerr.Exhausted(errorsv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, "ReadRangeFooters",
					"bytes of response; ask for fewer ranges", int64(s.cfg.MaxResponseBytes), 0)
			}
			resp.Footers[i] = f // no other object has this index
		}
		return nil
	})
	if absent := (*fetcher.NotFoundError)(nil); errors.As(err, &absent) {
		return nil, notFound("object", absent.Object, err)
	}
	if err != nil {
		return nil, mapError(err)
	}
	return resp, nil
}

// footersWanted checks the ranges asked for and sorts them by object: wanted are
// the indices of each object's.
func (s *Server) footersWanted(r *remotelogv1.ReadRangeFootersRequest) (objects []fetcher.Object, wanted [][]int, err error) {
	place := make(map[fetcher.Object]int)
	for i, loc := range r.GetRanges() {
		if err := walobject.CheckRef(loc.GetObject()); err != nil {
			return nil, nil, invalid(fmt.Sprintf("ranges[%d].object", i), "%v", err)
		}
		if loc.GetObjectSizeBytes() < 1 {
			return nil, nil, invalid(fmt.Sprintf("ranges[%d].object_size_bytes", i), "%d is not 1 or more", loc.GetObjectSizeBytes())
		}
		o := fetcher.Object{Name: walobject.Name(s.cfg.ClusterID, loc.GetObject()), Size: loc.GetObjectSizeBytes()}
		at, ok := place[o]
		if !ok {
			at = len(objects)
			place[o] = at
			objects, wanted = append(objects, o), append(wanted, nil)
		}
		wanted[at] = append(wanted[at], i)
	}
	return objects, wanted, nil
}

// peerName is who calls, as far as the connection tells.
func peerName(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		return p.Addr.String()
	}
	return ""
}
