package walobject

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/chainhash"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

// Header is what the footer says of the object as a whole.
type Header struct {
	// ClusterID is the cluster that the object belongs to.
	ClusterID string
	// Object is its identity.
	Object *logv1.ObjectRef
	// RLMID is the uploading remote-log manager.
	RLMID int32
	// AppliedMetadataOffset is what the uploader had seen of the metadata log.
	AppliedMetadataOffset int64
	// CreateTime is the uploader's wall clock.
	CreateTime time.Time
}

// Range is one range on its way into an object.
type Range struct {
	// Footer is what the object will say of it. Build sets the position in its
	// descriptor; length and checksum must be Data's, verified.
	Footer *storagev1.RangeFooter
	// Data is the range's bytes; they are kept, not copied.
	Data []byte
}

// Object is a combined object ready for upload.
type Object struct {
	// Name is its name in the bucket.
	Name string
	// Parts are its bytes, to be sent one after the other. They alias the
	// ranges' data and must not change until the upload is over.
	Parts [][]byte
	// Size is the sum of the parts' lengths in bytes.
	Size int64
	// CRC32C is the checksum of the parts together. It was computed from the
	// ranges' own checksums, not from their bytes.
	CRC32C uint32
	// Ranges are the descriptors with their positions, in the order of the bytes.
	Ranges []*logv1.RangeDescriptor
	// FooterSize is the size of the footer in bytes.
	FooterSize int64
}

// Compare orders ranges as they lie in an object: by topic creation offset,
// topic id, partition, base offset.
func Compare(a, b *logv1.RangeDescriptor) int {
	pa, pb := a.GetPartition(), b.GetPartition()
	return cmp.Or(
		cmp.Compare(pa.GetTopicCreationOffset(), pb.GetTopicCreationOffset()),
		cmp.Compare(pa.GetTopicId(), pb.GetTopicId()),
		cmp.Compare(pa.GetPartition(), pb.GetPartition()),
		cmp.Compare(a.GetBaseOffset(), b.GetBaseOffset()),
	)
}

// Build makes an object of ranges, which must be in the order of [Compare]
// without repetition, 1 to [MaxRanges] of them. It fails with [ErrInvalid], and
// allocates the list of parts and the footer, nothing per byte of data.
func Build(h Header, ranges []Range) (*Object, error) {
	if h.ClusterID == "" {
		return nil, fail(ErrInvalid, "object", "no cluster id")
	}
	if err := CheckRef(h.Object); err != nil {
		return nil, err
	}
	if len(ranges) == 0 || len(ranges) > MaxRanges {
		return nil, fail(ErrInvalid, "object", "%d ranges, allowed are 1..%d", len(ranges), MaxRanges)
	}
	footer := &storagev1.CombinedObjectFooter{
		FormatVersion: FormatVersion, ClusterId: h.ClusterID, Object: h.Object, RlmId: h.RLMID,
		AppliedMetadataOffset: h.AppliedMetadataOffset, CreateTime: timestamppb.New(h.CreateTime),
		Ranges: make([]*storagev1.RangeFooter, len(ranges)),
	}
	o := &Object{
		Name:   Name(h.ClusterID, h.Object),
		Parts:  make([][]byte, 0, len(ranges)+1),
		Ranges: make([]*logv1.RangeDescriptor, len(ranges)),
	}
	var data int64
	for i, r := range ranges {
		d := r.Footer.GetRange()
		if d == nil {
			return nil, fail(ErrInvalid, "range", "range %d has no descriptor", i)
		}
		if i > 0 && Compare(o.Ranges[i-1], d) >= 0 {
			return nil, fail(ErrInvalid, "range", "range %d does not follow the one before it", i)
		}
		if d.GetLengthBytes() != int64(len(r.Data)) {
			return nil, fail(ErrInvalid, "range", "range %d has %d bytes and says %d", i, len(r.Data), d.GetLengthBytes())
		}
		if d.GetPosition() != data {
			d.Position = data // a second build of the same ranges only reads them
		}
		if err := checkDescriptor(d); err != nil {
			return nil, &Error{Kind: ErrInvalid, Part: "range", Reason: fmt.Sprintf("range %d", i), Err: err}
		}
		data += int64(len(r.Data))
		o.CRC32C = combineCRC(o.CRC32C, d.GetCrc32C(), int64(len(r.Data)))
		o.Parts = append(o.Parts, r.Data)
		o.Ranges[i], footer.Ranges[i] = d, r.Footer
	}
	size := proto.Size(footer)
	if size > MaxFooterSize || data > MaxDataSize {
		return nil, fail(ErrInvalid, "object", "footer of %d bytes (limit %d), data of %d bytes (limit %d)", size, MaxFooterSize, data, int64(MaxDataSize))
	}
	// Footer and trailer are one part.
	end, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(make([]byte, 0, size+TrailerSize), footer)
	if err != nil {
		return nil, wrap(ErrInvalid, "footer", err, "encode")
	}
	t := Trailer{FooterSize: int64(len(end)), FooterCRC32C: crc32.Checksum(end, castagnoli), DataSize: data}
	trailer := t.encode()
	end = append(end, trailer[:]...)
	o.Parts = append(o.Parts, end)
	o.Size, o.FooterSize = t.ObjectSize(), t.FooterSize
	o.CRC32C = combineCRC(o.CRC32C, crc32.Checksum(end, castagnoli), int64(len(end)))
	return o, nil
}

// checkDescriptor checks what a descriptor can be wrong in by itself. The
// error is a plain one, for the caller to give a kind.
func checkDescriptor(d *logv1.RangeDescriptor) error {
	p := d.GetPartition()
	switch {
	case p.GetTopicId() == "":
		return fmt.Errorf("no topic id")
	case p.GetTopicCreationOffset() < 0:
		return fmt.Errorf("topic creation offset %d is negative", p.GetTopicCreationOffset())
	case p.GetPartition() < 0:
		return fmt.Errorf("partition %d is negative", p.GetPartition())
	case d.GetFence() == nil:
		return fmt.Errorf("no fence")
	case d.GetBaseOffset() < 0 || d.GetEndOffset() <= d.GetBaseOffset():
		return fmt.Errorf("offsets [%d, %d) are empty or negative", d.GetBaseOffset(), d.GetEndOffset())
	case d.GetLengthBytes() <= 0:
		return fmt.Errorf("%d bytes", d.GetLengthBytes())
	case d.GetPosition() < 0:
		return fmt.Errorf("position %d is negative", d.GetPosition())
	case d.GetBatchCount() <= 0:
		return fmt.Errorf("%d batches", d.GetBatchCount())
	case len(d.GetBaseChainHash()) != chainhash.Size || len(d.GetEndChainHash()) != chainhash.Size:
		return fmt.Errorf("chain hashes of %d and %d bytes, must be %d", len(d.GetBaseChainHash()), len(d.GetEndChainHash()), chainhash.Size)
	case len(d.GetLineage()) == 0:
		return fmt.Errorf("no lineage")
	}
	return nil
}
