package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/braidlog/braid/pkg/objstore"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

// MarkerName is the object that claims a bucket prefix for one cluster.
const MarkerName = "braid-cluster"

// maxMarker bounds the marker's size in bytes.
const maxMarker = 4 << 10

// MarkerStore is what the marker needs of the object store, whose names are
// relative to the configured bucket prefix.
type MarkerStore interface {
	objstore.Creator
	objstore.Reader
	objstore.Lister
}

// ErrForeignPrefix: the bucket prefix belongs to another cluster, or is not
// empty and belongs to nobody known (design review H4).
var ErrForeignPrefix = errors.New("bucket prefix is not this cluster's")

// Identity is what a cluster's log begins with.
type Identity struct {
	ClusterID   string
	Incarnation uint32
}

// ReadMarker returns the marker's content; nil without an error if there is
// none. It is also the check that the store can be reached.
func ReadMarker(ctx context.Context, store objstore.Reader) (*storagev1.ClusterMarker, error) {
	buf := make([]byte, maxMarker)
	n, size, err := store.ReadSuffix(ctx, MarkerName, buf)
	switch {
	case errors.Is(err, objstore.ErrNotFound):
		return nil, nil //nolint:nilnil // none is an answer
	case err != nil:
		return nil, fmt.Errorf("read the cluster marker: %w", err)
	case size > maxMarker:
		return nil, fmt.Errorf("%w: %s has %d bytes, it is no cluster marker", ErrForeignPrefix, MarkerName, size)
	}
	m := new(storagev1.ClusterMarker)
	if err := proto.Unmarshal(buf[:n], m); err != nil || m.GetClusterId() == "" || m.GetIncarnation() == 0 {
		return nil, fmt.Errorf("%w: %s can't be read as a cluster marker", ErrForeignPrefix, MarkerName)
	}
	if m.GetFormatVersion() != 1 {
		return nil, fmt.Errorf("%w: the cluster marker has format version %d, 1 is known", ErrForeignPrefix, m.GetFormatVersion())
	}
	return m, nil
}

// CheckMarker compares the marker with the cluster whose log is in etcd.
func CheckMarker(ctx context.Context, store objstore.Reader, clusterID string) error {
	m, err := ReadMarker(ctx, store)
	switch {
	case err != nil:
		return err
	case m == nil:
		return fmt.Errorf("%w: no marker of cluster %s in it: wrong bucket or prefix, or its objects are gone", ErrForeignPrefix, clusterID)
	case m.GetClusterId() != clusterID:
		return fmt.Errorf("%w: it holds cluster %s, the metadata log in etcd is cluster %s's", ErrForeignPrefix, m.GetClusterId(), clusterID)
	}
	return nil
}

// Claimable says whether a cluster that is to begin may use the bucket prefix:
// it is empty, or holds nothing but a marker that an earlier bootstrap left
// there before it could write to etcd, which is returned. Everything else is a
// reason to refuse.
func Claimable(ctx context.Context, store MarkerStore) (*storagev1.ClusterMarker, error) {
	m, err := ReadMarker(ctx, store)
	if err != nil {
		return nil, err
	}
	page, _, err := store.ListPage(ctx, "", "", 2)
	if err != nil {
		return nil, fmt.Errorf("list the bucket prefix: %w", err)
	}
	for _, a := range page {
		switch {
		case a.Name == MarkerName:
		case m != nil:
			return nil, fmt.Errorf("%w: it holds data of cluster %s, whose metadata log is not in this etcd", ErrForeignPrefix, m.GetClusterId())
		default:
			return nil, fmt.Errorf("%w: it is not empty, it holds %q", ErrForeignPrefix, a.Name)
		}
	}
	return m, nil
}

// Claim makes the bucket prefix this cluster's before its log begins, and
// returns the identity that the log shall begin with: the fresh one, or that of
// the marker that [Claimable] found.
func Claim(ctx context.Context, store MarkerStore, fresh Identity, now time.Time) (Identity, error) {
	m, err := Claimable(ctx, store)
	if err != nil {
		return Identity{}, err
	}
	if m != nil {
		return Identity{m.GetClusterId(), m.GetIncarnation()}, nil
	}
	content, err := proto.Marshal(&storagev1.ClusterMarker{
		FormatVersion: 1, ClusterId: fresh.ClusterID, Incarnation: fresh.Incarnation, CreateTime: timestamppb.New(now),
	})
	if err != nil {
		return Identity{}, fmt.Errorf("encode the cluster marker: %w", err)
	}
	_, err = store.Create(ctx, MarkerName, objstore.NewParts(content))
	if err == nil {
		return fresh, nil
	}
	if !errors.Is(err, objstore.ErrExists) && !errors.Is(err, objstore.ErrAmbiguous) {
		return Identity{}, fmt.Errorf("create the cluster marker: %w", err)
	}
	// Our own lost success, or another bootstrap that was faster: what stands
	// there decides, if it is that of a cluster that has nothing yet. Ours has
	// our id; another's will write to its own etcd.
	m, readErr := ReadMarker(ctx, store)
	switch {
	case readErr != nil:
		return Identity{}, errors.Join(err, readErr)
	case m == nil:
		return Identity{}, fmt.Errorf("create the cluster marker: %w", err)
	case m.GetClusterId() != fresh.ClusterID:
		return Identity{}, fmt.Errorf("%w: cluster %s claimed it at the same time", ErrForeignPrefix, m.GetClusterId())
	}
	return fresh, nil
}
