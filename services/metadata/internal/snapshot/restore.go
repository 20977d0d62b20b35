package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/objstore"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/metalog"
	"github.com/braidlog/braid/services/metadata/state"
)

// ErrNone: the log was trimmed and no source has a sound snapshot at or above
// its start (I10). The replica must not serve.
var ErrNone = errors.New("no sound snapshot for the trimmed metadata log")

// Log is what this package asks of the log in etcd.
type Log interface {
	Tail(ctx context.Context) (metalog.Tail, error)
	EpochBefore(ctx context.Context, offset int64) (int64, error)
}

// Peers finds and calls the other replicas. Both functions may fail.
type Peers struct {
	// Addresses of replicas that may be alive, this one excluded.
	Addresses func(ctx context.Context) ([]string, error)
	// Dial connects; the returned function closes the connection.
	Dial func(address string) (grpc.ClientConnInterface, func() error, error)
}

// Restorer finds the state that a replica begins with where the log alone does
// not give it: from the replica's own disk, from a peer, from the bucket, in
// this order, so that a bucket that can't be reached stops no elections (design
// review X2). What is damaged, cut short or missing is passed over for the next.
type Restorer struct {
	Log    Log
	Disk   *Disk
	Peers  Peers
	Bucket *Bucket // nil to ask none
	Logger *slog.Logger
}

// Restore returns a state whose end lies within the log; nil without an error if
// the log is whole and the disk has no snapshot. The errors are [ErrNone],
// [metalog.ErrRolledBack] for a snapshot that the log does not lead to (design
// review F12), and those of etcd.
func (r *Restorer) Restore(ctx context.Context, incarnation uint32) (*state.State, error) {
	tail, err := r.Log.Tail(ctx)
	if err != nil {
		return nil, err
	}
	var tried []error
	for _, i := range r.Disk.List(incarnation) {
		if usable, err := r.fits(ctx, i.ID, tail); err != nil {
			return nil, fmt.Errorf("the snapshot on disk: %w", err)
		} else if !usable {
			continue
		}
		s, err := r.Disk.Load(i)
		if err == nil {
			r.Logger.InfoContext(ctx, "metadata snapshot loaded from disk", "offset", i.End, "size", i.Size)
			return s, nil
		}
		r.Logger.ErrorContext(ctx, "a metadata snapshot on disk can't be used", "offset", i.End, "err", err)
		tried = append(tried, err)
	}
	if tail.Start.Offset == 0 {
		return nil, nil //nolint:nilnil // the log is whole
	}
	s, err := r.fromPeers(ctx, incarnation, tail)
	if s != nil {
		return s, nil
	}
	tried = append(tried, err)
	s, err = r.fromBucket(ctx, incarnation, tail)
	if s != nil || metalog.Fatal(err) {
		return s, err
	}
	tried = append(tried, err)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, fmt.Errorf("%w, which begins at %d: %w", ErrNone, tail.Start.Offset, errors.Join(tried...))
}

// fits says whether the log goes on where the snapshot ends. A snapshot beyond
// the log's end, or one behind an entry that another controller wrote, is of a
// log that was rolled back.
func (r *Restorer) fits(ctx context.Context, id ID, tail metalog.Tail) (bool, error) {
	if id.End < tail.Start.Offset {
		return false, nil
	}
	return true, Belongs(ctx, r.Log, id)
}

// Belongs says whether a snapshot of the log's incarnation is of this log: its
// end is not beyond the log's, and the entry before its end, if it is still
// there, is by the controller that it names. Otherwise the error is
// [metalog.ErrRolledBack].
func Belongs(ctx context.Context, log Log, id ID) error {
	epoch, err := log.EpochBefore(ctx, id.End)
	switch {
	case errors.As(err, new(*metalog.TrimmedError)):
		return nil
	case err != nil:
		return fmt.Errorf("snapshot %v: %w", id, err)
	case epoch != id.ControllerEpoch:
		return fmt.Errorf("snapshot %v: %w: entry %d is by controller %d", id, metalog.ErrRolledBack, id.End-1, epoch)
	}
	return nil
}

func (r *Restorer) fromPeers(ctx context.Context, incarnation uint32, tail metalog.Tail) (*state.State, error) {
	addresses, err := r.Peers.Addresses(ctx)
	if err != nil {
		return nil, fmt.Errorf("find peers: %w", err)
	}
	var tried []error
	for _, address := range addresses {
		s, err := r.fromPeer(ctx, address, incarnation, tail)
		if s != nil {
			return s, nil
		}
		r.Logger.WarnContext(ctx, "no metadata snapshot from a peer", "peer", address, "err", err)
		tried = append(tried, fmt.Errorf("peer %s: %w", address, err))
	}
	if len(tried) == 0 {
		return nil, errors.New("no peer is alive")
	}
	return nil, errors.Join(tried...)
}

func (r *Restorer) fromPeer(ctx context.Context, address string, incarnation uint32, tail metalog.Tail) (_ *state.State, err error) {
	conn, closeConn, err := r.Peers.Dial(address)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, closeConn()) }()
	client := metadatav1.NewSnapshotServiceClient(conn)
	bounded, cancel := context.WithTimeout(ctx, fetchTimeout)
	list, err := client.ListSnapshots(bounded, &metadatav1.ListSnapshotsRequest{})
	cancel()
	if err != nil {
		return nil, err
	}
	tried := []error{errors.New("it keeps none that the log goes on from")}
	for _, offered := range list.GetSnapshots() {
		id := fromProto(offered.GetSnapshotId())
		if id.Incarnation != incarnation {
			continue
		}
		if usable, err := r.fits(ctx, id, tail); err != nil || !usable {
			tried = append(tried, err)
			continue
		}
		s, info, err := r.Disk.Receive(id, func(w io.Writer) error { return Fetch(ctx, client, id, w) })
		if err == nil {
			r.Logger.InfoContext(ctx, "metadata snapshot fetched from a peer", "peer", address, "offset", info.End, "size", info.Size)
			return s, nil
		}
		tried = append(tried, err)
	}
	return nil, errors.Join(tried...)
}

func (r *Restorer) fromBucket(ctx context.Context, incarnation uint32, tail metalog.Tail) (*state.State, error) {
	if r.Bucket == nil {
		return nil, errors.New("no bucket")
	}
	listed, err := r.Bucket.List(ctx, incarnation)
	if err != nil {
		return nil, err
	}
	tried := []error{errors.New("the bucket holds none that the log goes on from")}
	for _, i := range listed {
		if usable, err := r.fits(ctx, i.ID, tail); err != nil {
			return nil, fmt.Errorf("the snapshot in the bucket: %w", err)
		} else if !usable {
			continue
		}
		s, info, err := r.Disk.Receive(i.ID, func(w io.Writer) error { return r.Bucket.fetch(ctx, i.Info, w) })
		if err == nil {
			r.Logger.InfoContext(ctx, "metadata snapshot fetched from the bucket", "offset", info.End, "size", info.Size)
			return s, nil
		}
		r.Logger.ErrorContext(ctx, "a metadata snapshot in the bucket can't be used", "offset", i.End, "err", err)
		tried = append(tried, err)
	}
	return nil, errors.Join(tried...)
}

// CheckBucket compares the newest snapshot in the bucket with the log, which is
// rolled back if it does not reach that far (design review F12). A bucket that
// can't be reached says nothing; its error matches [objstore.ErrUnavailable].
func CheckBucket(ctx context.Context, log Log, b *Bucket, incarnation uint32) error {
	listed, err := b.List(ctx, incarnation)
	if err != nil || len(listed) == 0 {
		return err
	}
	return Belongs(ctx, log, listed[0].ID)
}

// fetchTimeout bounds one call to a peer.
const fetchTimeout = 10 * time.Second

// fetchAttempts bounds the calls for one piece.
const fetchAttempts = 4

// Fetch reads a snapshot from a replica and writes its bytes to w. A call that
// fails is repeated some times; the checksum of each piece is compared, that of
// the whole is the caller's to see to.
func Fetch(ctx context.Context, client metadatav1.SnapshotServiceClient, id ID, w io.Writer) error {
	var position, size int64 = 0, -1
	for {
		piece, err := fetchPiece(ctx, client, &metadatav1.FetchSnapshotRequest{SnapshotId: id.Proto(), Position: position})
		if err != nil {
			return fmt.Errorf("fetch snapshot %v at %d: %w", id, position, err)
		}
		data := piece.GetData()
		switch {
		case fromProto(piece.GetSnapshotId()) != id || piece.GetPosition() != position || size >= 0 && size != piece.GetSizeBytes():
			return fmt.Errorf("fetch snapshot %v at %d: the answer is about %v at %d", id, position, piece.GetSnapshotId(), piece.GetPosition())
		case objstore.CRC32C(data) != piece.GetCrc32C():
			return fmt.Errorf("fetch snapshot %v at %d: %w", id, position, &state.SnapshotError{Position: position, Reason: "checksum of a piece"})
		case piece.GetContinue() != (position+int64(len(data)) < piece.GetSizeBytes()) || piece.GetContinue() && len(data) == 0:
			return fmt.Errorf("fetch snapshot %v at %d: a piece of %d bytes of %d", id, position, len(data), piece.GetSizeBytes())
		}
		size = piece.GetSizeBytes()
		if len(data) > 0 {
			if _, err := w.Write(data); err != nil {
				return fmt.Errorf("fetch snapshot %v at %d: %w", id, position, err)
			}
		}
		if position += int64(len(data)); !piece.GetContinue() {
			return nil
		}
	}
}

func fetchPiece(ctx context.Context, client metadatav1.SnapshotServiceClient, r *metadatav1.FetchSnapshotRequest) (*metadatav1.FetchSnapshotResponse, error) {
	wait := 100 * time.Millisecond
	for attempt := 1; ; attempt++ {
		bounded, cancel := context.WithTimeout(ctx, fetchTimeout)
		piece, err := client.FetchSnapshot(bounded, r)
		cancel()
		if err == nil || attempt == fetchAttempts || ctx.Err() != nil || final(err) {
			return piece, err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, context.Cause(ctx)
		}
		wait *= 2
	}
}
