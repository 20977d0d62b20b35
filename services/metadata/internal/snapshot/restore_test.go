package snapshot

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
)

// peer serves one snapshot in pieces, as change makes them.
type peer struct {
	metadatav1.SnapshotServiceClient
	id     ID
	b      []byte
	step   int
	change func(call int, r *metadatav1.FetchSnapshotResponse) error
	calls  int
}

func (p *peer) FetchSnapshot(_ context.Context, r *metadatav1.FetchSnapshotRequest, _ ...grpc.CallOption) (*metadatav1.FetchSnapshotResponse, error) {
	data := p.b[r.GetPosition():min(r.GetPosition()+int64(p.step), int64(len(p.b)))]
	out := &metadatav1.FetchSnapshotResponse{
		SnapshotId: p.id.Proto(), SizeBytes: int64(len(p.b)), Position: r.GetPosition(), Data: data,
		Continue: r.GetPosition()+int64(len(data)) < int64(len(p.b)), Crc32C: objstore.CRC32C(data),
	}
	p.calls++
	if p.change != nil {
		if err := p.change(p.calls, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func TestFetchBelievesNoPieceThatContradictsItself(t *testing.T) {
	h := newHistory(t)
	h.grow(20)
	d := openDisk(t, vfs.NewMem())
	info, err := d.Save(h.s)
	require.NoError(t, err)
	b := contentOf(t, d, info)
	get := func(step int, change func(int, *metadatav1.FetchSnapshotResponse) error) ([]byte, error) {
		var out bytes.Buffer
		err := Fetch(t.Context(), &peer{id: info.ID, b: b, step: step, change: change}, info.ID, &out)
		return out.Bytes(), err
	}
	for _, step := range []int{1, 7, 100, len(b), 2 * len(b)} {
		got, err := get(step, nil)
		require.NoError(t, err)
		require.Equal(t, b, got)
	}
	for name, change := range map[string]func(*metadatav1.FetchSnapshotResponse){
		"a flipped bit": func(r *metadatav1.FetchSnapshotResponse) {
			r.Data = append([]byte{r.GetData()[0] ^ 1}, r.GetData()[1:]...)
		},
		"another position":   func(r *metadatav1.FetchSnapshotResponse) { r.Position++ },
		"another snapshot":   func(r *metadatav1.FetchSnapshotResponse) { r.SnapshotId.EndOffset++ },
		"another size":       func(r *metadatav1.FetchSnapshotResponse) { r.SizeBytes++ },
		"nothing, go on":     func(r *metadatav1.FetchSnapshotResponse) { r.Data, r.Crc32C = nil, 0 },
		"the end, too early": func(r *metadatav1.FetchSnapshotResponse) { r.Continue = false },
	} {
		_, err := get(100, func(call int, r *metadatav1.FetchSnapshotResponse) error {
			if call == 3 {
				change(r)
			}
			return nil
		})
		require.Error(t, err, name)
	}
	// A failure that passes is nobody's news, one that does not is.
	got, err := get(len(b)/3, func(call int, _ *metadatav1.FetchSnapshotResponse) error {
		if call%2 == 0 {
			return status.Error(codes.Unavailable, "away")
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, b, got)
	_, err = get(100, func(int, *metadatav1.FetchSnapshotResponse) error { return status.Error(codes.NotFound, "gone") })
	require.Equal(t, codes.NotFound, status.Code(errors.Unwrap(err)))
}

// The sources are asked in the order disk, peer, bucket, and one that has only
// old or damaged snapshots is passed over.
func TestRestoreAsksDiskPeerBucket(t *testing.T) {
	h := newHistory(t)
	h.leads = true
	mem := memstore.New(memstore.Options{})
	k := newKept(t, h, mem, vfs.NewMem())
	for h.start.Offset == 0 {
		h.grow(100)
		k.tick(t, 1)
	}
	asked := []string{}
	r := &Restorer{
		Log: h, Disk: k.deps.Disk, Bucket: NewBucket(mem, clusterID), Logger: quiet(),
		Peers: Peers{Addresses: func(context.Context) ([]string, error) {
			asked = append(asked, "peers")
			return nil, nil
		}},
	}
	s, err := r.Restore(t.Context(), incarnation)
	require.NoError(t, err)
	require.Equal(t, k.last.End, s.EndOffset())
	require.Empty(t, asked, "the disk had one")

	r.Disk = openDisk(t, vfs.NewMem())
	s, err = r.Restore(t.Context(), incarnation)
	require.NoError(t, err)
	require.Equal(t, k.last.End, s.EndOffset())
	require.Equal(t, []string{"peers"}, asked)
	require.Len(t, r.Disk.List(incarnation), 1, "what was fetched is kept")

	// The newest in the bucket is damaged: the older one, and the tail, do as well.
	list, err := r.Bucket.List(t.Context(), incarnation)
	require.NoError(t, err)
	name := clusterID + "/meta/" + list[0].Name()
	require.NoError(t, mem.Delete(t.Context(), name, objstore.AnyGeneration))
	_, err = mem.Create(t.Context(), name, objstore.NewParts([]byte("x")))
	require.NoError(t, err)
	r.Disk = openDisk(t, vfs.NewMem())
	s, err = r.Restore(t.Context(), incarnation)
	require.NoError(t, err)
	require.Equal(t, list[1].End, s.EndOffset())
	for _, e := range h.log[s.EndOffset():] {
		require.NoError(t, s.Apply(e))
	}
	require.Equal(t, h.s.Digest(), s.Digest())

	r.Disk, r.Bucket = openDisk(t, vfs.NewMem()), NewBucket(memstore.New(memstore.Options{}), clusterID)
	_, err = r.Restore(t.Context(), incarnation)
	require.ErrorIs(t, err, ErrNone)
	_, err = r.Restore(t.Context(), incarnation+1)
	require.ErrorIs(t, err, ErrNone)
	h.start = metalog.Start{}
	s, err = r.Restore(t.Context(), incarnation)
	require.NoError(t, err)
	require.Nil(t, s, "a whole log needs none")
}
