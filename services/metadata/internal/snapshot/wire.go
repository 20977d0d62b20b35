package snapshot

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Proto is the id as it travels.
func (id ID) Proto() *metadatav1.SnapshotId {
	return &metadatav1.SnapshotId{Incarnation: id.Incarnation, EndOffset: id.End, ControllerEpoch: id.ControllerEpoch}
}

func fromProto(p *metadatav1.SnapshotId) ID {
	return ID{Incarnation: p.GetIncarnation(), End: p.GetEndOffset(), ControllerEpoch: p.GetControllerEpoch()}
}

// Proto describes the snapshot as it travels.
func (i Info) Proto() *metadatav1.Snapshot {
	return &metadatav1.Snapshot{SnapshotId: i.ID.Proto(), SizeBytes: i.Size, Sha256: append([]byte(nil), i.Sum[:]...)}
}

// final says whether asking again is useless.
func final(err error) bool {
	switch status.Code(err) {
	case codes.NotFound, codes.InvalidArgument, codes.OutOfRange, codes.Unimplemented, codes.DataLoss:
		return true
	}
	return false
}
