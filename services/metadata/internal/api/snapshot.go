package api

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/rpcerr"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/internal/snapshot"
	"github.com/braidlog/braid/services/metadata/state"
)

// maxPiece is the most data of one FetchSnapshot, and what it gives unasked.
const maxPiece = 1 << 20

// ListSnapshots implements the contract.
func (s *Server) ListSnapshots(context.Context, *metadatav1.ListSnapshotsRequest) (resp *metadatav1.ListSnapshotsResponse, err error) {
	resp = &metadatav1.ListSnapshotsResponse{LogStartOffset: s.deps.Snapshots.LogStart()}
	var incarnation uint32
	if err := s.read(func(st *state.State) { resp.LogEndOffset, incarnation = st.EndOffset(), st.Incarnation() }); err != nil {
		return nil, err
	}
	for _, i := range s.deps.Snapshots.Snapshots(incarnation) {
		resp.Snapshots = append(resp.Snapshots, i.Proto())
	}
	return resp, nil
}

// FetchSnapshot implements the contract.
func (s *Server) FetchSnapshot(_ context.Context, r *metadatav1.FetchSnapshotRequest) (*metadatav1.FetchSnapshotResponse, error) {
	id := r.GetSnapshotId()
	switch {
	case id == nil:
		return nil, rpcerr.InvalidField("snapshot_id", "is missing")
	case r.GetPosition() < 0:
		return nil, rpcerr.InvalidField("position", "is negative")
	case r.GetMaxBytes() < 0:
		return nil, rpcerr.InvalidField("max_bytes", "is negative")
	}
	incarnation := id.GetIncarnation()
	if incarnation == 0 {
		if err := s.read(func(st *state.State) { incarnation = st.Incarnation() }); err != nil {
			return nil, err
		}
	}
	kept := s.deps.Snapshots.Snapshots(incarnation)
	var found *snapshot.Info
	for i := range kept {
		if kept[i].End == id.GetEndOffset() && kept[i].ControllerEpoch == id.GetControllerEpoch() {
			found = &kept[i]
		}
	}
	if found == nil {
		return nil, snapshotNotFound(snapshot.ID{Incarnation: incarnation, End: id.GetEndOffset(), ControllerEpoch: id.GetControllerEpoch()}, kept)
	}
	if r.GetPosition() > found.Size {
		return nil, rpcerr.New(codes.OutOfRange, errorsv1.ErrorReason_ERROR_REASON_POSITION_OUT_OF_RANGE,
			"position %d is behind the end of the snapshot, which has %d bytes", r.GetPosition(), found.Size).
			With("position", r.GetPosition()).With("size", found.Size)
	}
	limit := int64(r.GetMaxBytes())
	if limit == 0 || limit > maxPiece {
		limit = maxPiece
	}
	data := make([]byte, min(limit, found.Size-r.GetPosition()))
	switch _, err := s.deps.Snapshots.ReadAt(*found, data, r.GetPosition()); {
	case errors.Is(err, snapshot.ErrUnknown): // it went meanwhile
		return nil, snapshotNotFound(found.ID, s.deps.Snapshots.Snapshots(incarnation))
	case err != nil:
		return nil, err
	}
	described := found.Proto()
	return &metadatav1.FetchSnapshotResponse{
		SnapshotId: described.GetSnapshotId(), SizeBytes: found.Size, Position: r.GetPosition(), Data: data,
		Continue: r.GetPosition()+int64(len(data)) < found.Size, Crc32C: objstore.CRC32C(data), Sha256: described.GetSha256(),
	}, nil
}

func snapshotNotFound(id snapshot.ID, kept []snapshot.Info) error {
	e := rpcerr.NotFound(errorsv1.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND, "snapshot", id.String())
	if len(kept) > 0 {
		e.With("newest_end_offset", kept[0].End).With("newest_controller_epoch", kept[0].ControllerEpoch)
	}
	return e
}

// mapTrimmed points a reader below the log's start to a snapshot of this
// replica. Without one, which lasts moments, there is nothing to point to.
func (s *Server) mapTrimmed(err *metalog.TrimmedError) *rpcerr.Error {
	_, incarnation := s.deps.Hub.Identity()
	for _, i := range s.deps.Snapshots.Snapshots(incarnation) {
		if i.End >= err.Start.Offset {
			return rpcerr.MetadataOffsetOutOfRange(err.Offset, err.Start.Offset, s.deps.Hub.End()).
				With("incarnation", i.Incarnation).With("snapshot_end_offset", i.End).With("snapshot_controller_epoch", i.ControllerEpoch)
		}
	}
	return rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, soon,
		"metadata entry %d was trimmed, and this replica is about to take a snapshot to begin with", err.Offset)
}
