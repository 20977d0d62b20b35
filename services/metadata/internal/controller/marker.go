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
	"github.com/braidlog/braid/services/metadata/internal/metalog"
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
// it is empty, or holds nothing but the marker of the cluster that claimed says
// this etcd is to begin (an earlier bootstrap was cut short), which is returned.
// Everything else is a reason to refuse: a marker alone does not show that
// another etcd's cluster is not about to write there. claimed is asked after the
// bucket, and returns the zero Identity if there is no claim.
func Claimable(ctx context.Context, store MarkerStore, claimed func(context.Context) (Identity, error)) (*storagev1.ClusterMarker, error) {
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
	if m == nil {
		return nil, nil //nolint:nilnil // none is an answer
	}
	id, err := claimed(ctx)
	switch {
	case err != nil:
		return nil, err
	case id != Identity{m.GetClusterId(), m.GetIncarnation()}:
		return nil, fmt.Errorf("%w: it is claimed by cluster %s, whose metadata log is not in this etcd (nothing else is in it: if that cluster is gone for good, delete %s)",
			ErrForeignPrefix, m.GetClusterId(), MarkerName)
	}
	return m, nil
}

// Claim makes the bucket prefix this cluster's before its log begins. The
// identity must be in etcd already, where the next bootstrap finds it should
// this one be cut short.
func Claim(ctx context.Context, store MarkerStore, id Identity, now time.Time) error {
	m, err := Claimable(ctx, store, func(context.Context) (Identity, error) { return id, nil })
	if err != nil || m != nil {
		return err
	}
	content, err := encodeIdentity(id, now)
	if err != nil {
		return err
	}
	_, err = store.Create(ctx, MarkerName, objstore.NewParts(content))
	if err == nil {
		return nil
	}
	if !errors.Is(err, objstore.ErrExists) && !errors.Is(err, objstore.ErrAmbiguous) {
		return fmt.Errorf("create the cluster marker: %w", err)
	}
	// Our own lost success, or another cluster that was faster: what stands there
	// decides.
	m, readErr := ReadMarker(ctx, store)
	switch {
	case readErr != nil:
		return errors.Join(err, readErr)
	case m == nil:
		return fmt.Errorf("create the cluster marker: %w", err)
	case id != Identity{m.GetClusterId(), m.GetIncarnation()}:
		return fmt.Errorf("%w: cluster %s claimed it at the same time", ErrForeignPrefix, m.GetClusterId())
	}
	return nil
}

func encodeIdentity(id Identity, now time.Time) ([]byte, error) {
	content, err := proto.Marshal(&storagev1.ClusterMarker{
		FormatVersion: 1, ClusterId: id.ClusterID, Incarnation: id.Incarnation, CreateTime: timestamppb.New(now),
	})
	if err != nil {
		return nil, fmt.Errorf("encode the cluster's identity: %w", err)
	}
	return content, nil
}

// decodeIdentity reads a claim; nothing is the zero Identity.
func decodeIdentity(content []byte) (Identity, error) {
	if len(content) == 0 {
		return Identity{}, nil
	}
	m := new(storagev1.ClusterMarker)
	if err := proto.Unmarshal(content, m); err != nil || m.GetClusterId() == "" || m.GetIncarnation() == 0 {
		return Identity{}, fmt.Errorf("%w: the claim in etcd can't be read", metalog.ErrDamaged)
	}
	return Identity{m.GetClusterId(), m.GetIncarnation()}, nil
}

// Claimed returns the identity that a bootstrap on this log has settled on; the
// zero Identity if there was none.
func Claimed(ctx context.Context, log *metalog.Log) (Identity, error) {
	content, err := log.Claimed(ctx)
	if err != nil {
		return Identity{}, err
	}
	return decodeIdentity(content)
}
