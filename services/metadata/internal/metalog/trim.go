package metalog

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// TrimKeys is how many entries one transaction of a trim deletes at most: etcd
// hands all deletions of a revision to a watch at once.
const TrimKeys = 1_000

// Start is where the log begins.
type Start struct {
	// Offset of the first entry that is there; 0 while nothing was trimmed.
	Offset int64
	// ControllerEpoch of the entry before Offset, which is gone; 0 at 0.
	ControllerEpoch int64
}

// TrimmedError is an offset below the log's start: what was there is in a
// snapshot.
type TrimmedError struct {
	Offset int64 // asked for
	Start  Start
}

func (e *TrimmedError) Error() string {
	return fmt.Sprintf("metadata entry %d was trimmed, the log begins at %d", e.Offset, e.Start.Offset)
}

func (l *Log) startKey() string { return l.opts.Prefix + "start" }

func (s Start) String() string { return fmt.Sprintf("%d %d", s.Offset, s.ControllerEpoch) }

func parseStart(kvs []*mvccpb.KeyValue) (Start, error) {
	if len(kvs) == 0 {
		return Start{}, nil
	}
	offset, epoch, ok := strings.Cut(string(kvs[0].Value), " ")
	s := Start{}
	var errs [2]error
	s.Offset, errs[0] = strconv.ParseInt(offset, 10, 64)
	s.ControllerEpoch, errs[1] = strconv.ParseInt(epoch, 10, 64)
	if !ok || errs[0] != nil || errs[1] != nil || s.Offset <= 0 || s.ControllerEpoch < 0 || s.ControllerEpoch >= s.Offset {
		return Start{}, fmt.Errorf("%w: the start is %q", ErrDamaged, kvs[0].Value)
	}
	return s, nil
}

// Trim raises the log's start to the given one and deletes what lies below: the
// start first, durably, then the entries from the oldest on (I9). The caller
// has made sure of a complete snapshot at or above the start (I10). It may be
// cut short anywhere and repeated by anybody: what an earlier trim left is
// deleted too, also with a start that is not above the present one. It returns
// etcd's revision at which everything was gone, to be compacted at, and how many
// entries were deleted.
//
// Every transaction is guarded by the leadership: the error is ErrDeposed once
// it is over, and ErrDamaged for a start above the log's end. Space exceeded
// (the start is a write) is ErrRefused.
func (l *Log) Trim(ctx context.Context, g Guard, to Start) (revision, deleted int64, err error) {
	if to.Offset < 0 {
		return 0, 0, fmt.Errorf("trim to %d: a negative offset", to.Offset)
	}
	if err := l.raise(ctx, g, to); err != nil {
		return 0, 0, fmt.Errorf("trim to %d: %w", to.Offset, err)
	}
	for {
		tail, err := l.Tail(ctx)
		if err != nil {
			return 0, deleted, fmt.Errorf("trim to %d: %w", to.Offset, err)
		}
		oldest, err := l.get(ctx, "find oldest", l.entryPrefix(), clientv3.WithPrefix(), clientv3.WithLimit(1), clientv3.WithKeysOnly())
		if err != nil {
			return 0, deleted, fmt.Errorf("trim to %d: %w", to.Offset, err)
		}
		if len(oldest.Kvs) == 0 {
			return oldest.Header.GetRevision(), deleted, nil
		}
		from, err := l.entryOffset(oldest.Kvs[0].Key)
		if err != nil {
			return 0, deleted, fmt.Errorf("trim to %d: %w", to.Offset, err)
		}
		if from >= tail.Start.Offset {
			return oldest.Header.GetRevision(), deleted, nil
		}
		upTo := min(from+TrimKeys, tail.Start.Offset)
		resp, err := l.commit(ctx, "trim",
			[]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(g.Key), "=", g.CreateRevision)},
			[]clientv3.Op{clientv3.OpDelete(l.entryKey(from), clientv3.WithRange(l.entryKey(upTo)))}, nil)
		switch {
		case err != nil:
			return 0, deleted, fmt.Errorf("trim to %d: %w", to.Offset, refusedOr(ctx, err))
		case !resp.Succeeded:
			return 0, deleted, fmt.Errorf("trim to %d: %w", to.Offset, ErrDeposed)
		}
		deleted += resp.Responses[0].GetResponseDeleteRange().GetDeleted()
	}
}

// raise writes the start, unless it is there already or beyond.
func (l *Log) raise(ctx context.Context, g Guard, to Start) error {
	for {
		tail, err := l.Tail(ctx)
		if err != nil {
			return err
		}
		switch {
		case to.Offset <= tail.Start.Offset:
			return nil
		case to.Offset > tail.End:
			return fmt.Errorf("%w: it ends at %d", ErrDamaged, tail.End)
		}
		conditions := []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(g.Key), "=", g.CreateRevision)}
		if tail.Start.Offset == 0 {
			conditions = append(conditions, clientv3.Compare(clientv3.CreateRevision(l.startKey()), "=", 0))
		} else {
			conditions = append(conditions, clientv3.Compare(clientv3.Value(l.startKey()), "=", tail.Start.String()))
		}
		resp, err := l.commit(ctx, "trim", conditions, []clientv3.Op{clientv3.OpPut(l.startKey(), to.String())},
			[]clientv3.Op{clientv3.OpGet(g.Key)})
		switch {
		case err != nil:
			return refusedOr(ctx, err)
		case resp.Succeeded:
			return nil
		}
		leader := resp.Responses[0].GetResponseRange().GetKvs()
		if len(leader) == 0 || leader[0].CreateRevision != g.CreateRevision {
			return ErrDeposed
		}
		// An attempt of ours whose answer was lost; look again.
	}
}

// refusedOr names a refusal by etcd as what it is.
func refusedOr(ctx context.Context, err error) error {
	switch {
	case isRefusal(err):
		return fmt.Errorf("%w: %w", ErrRefused, err)
	case Fatal(err):
		return err
	}
	return unreachable(ctx, "trim", err)
}

// Compact makes etcd forget all revisions before the given one: only then is
// the space of what was trimmed free to be used again. It is a matter of the
// whole etcd cluster. Compacting at or below an earlier compaction succeeds.
func (l *Log) Compact(ctx context.Context, revision int64) error {
	compacted := func() (*clientv3.CompactResponse, error) {
		attempt, cancel := context.WithTimeout(ctx, max(l.opts.AttemptTimeout, 10*time.Second))
		defer cancel()
		return l.kv.Compact(attempt, revision, clientv3.WithCompactPhysical())
	}
	_, err := compacted()
	if isCompacted(err) {
		return nil
	}
	if err != nil {
		l.opts.OnError("compact", err)
		return unreachable(ctx, fmt.Sprintf("compact etcd at revision %d", revision), err)
	}
	return nil
}

// Touch writes a key that nobody reads. etcd counts a page as free only with a
// write behind the one that freed it: where all writing has stopped for want of
// space, somebody has to.
func (l *Log) Touch(ctx context.Context, g Guard) error {
	resp, err := l.commit(ctx, "touch",
		[]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(g.Key), "=", g.CreateRevision)},
		[]clientv3.Op{clientv3.OpPut(l.opts.Prefix+"touch", "")}, nil)
	switch {
	case err != nil:
		return fmt.Errorf("touch: %w", refusedOr(ctx, err))
	case !resp.Succeeded:
		return fmt.Errorf("touch: %w", ErrDeposed)
	}
	return nil
}

// EpochBefore is the controller epoch of the entry before offset, 0 at 0. The
// error is a [*TrimmedError] if nobody can tell any more.
func (l *Log) EpochBefore(ctx context.Context, offset int64) (int64, error) {
	if offset == 0 {
		return 0, nil
	}
	tail, err := l.Tail(ctx)
	switch {
	case err != nil:
		return 0, err
	case offset == tail.Start.Offset:
		return tail.Start.ControllerEpoch, nil
	case offset < tail.Start.Offset:
		return 0, &TrimmedError{Offset: offset - 1, Start: tail.Start}
	case offset > tail.End:
		return 0, fmt.Errorf("entry %d: %w: it ends at %d", offset-1, ErrRolledBack, tail.End)
	}
	resp, err := l.get(ctx, "read entry", l.entryKey(offset-1))
	if err != nil {
		return 0, err
	}
	if len(resp.Kvs) == 0 {
		if tail, err = l.Tail(ctx); err == nil && offset <= tail.Start.Offset {
			return 0, &TrimmedError{Offset: offset - 1, Start: tail.Start}
		}
		return 0, fmt.Errorf("%w: entry %d is missing", ErrDamaged, offset-1)
	}
	e, err := l.decode(resp.Kvs[0])
	if err != nil {
		return 0, err
	}
	return e.GetControllerEpoch(), nil
}

// Candidates returns what the replicas that take part in the election have
// stored with their candidacy, the oldest first, which leads.
func (l *Log) Candidates(ctx context.Context) ([]string, error) {
	resp, err := l.get(ctx, "list candidates", l.LeaderPrefix()+"/", clientv3.WithPrefix(),
		clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	if err != nil {
		return nil, err
	}
	out := make([]string, len(resp.Kvs))
	for i, kv := range resp.Kvs {
		out[i] = string(kv.Value)
	}
	return out, nil
}
