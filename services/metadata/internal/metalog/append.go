package metalog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Guard names the leadership under which a writer appends: its key in the
// election and the revision that created the key. No other leadership ever has
// the same pair.
type Guard struct {
	Key            string
	CreateRevision int64
}

// Appended is a committed group.
type Appended struct {
	// End is the log's end after the group.
	End int64
	// Attempts counts the transactions sent; above 1 some outcome was unknown.
	Attempts int
	// Adopted is true if the group was found in the log after an attempt whose
	// answer was lost.
	Adopted bool
}

// Append adds the entries, which have consecutive offsets from the log's end
// and write ids of 16 bytes, as one transaction. It returns nil only when they
// are in the log; ErrDeposed, ErrConflict, ErrRefused and ErrTooLarge only when
// they are not and never will be. While neither is certain it repeats the
// transaction until ctx ends, and then returns ErrOutcomeUnknown.
func (l *Log) Append(ctx context.Context, g Guard, entries []*metadatav1.Entry) (Appended, error) {
	if len(entries) == 0 || len(entries) > MaxGroupEntries {
		return Appended{}, fmt.Errorf("%w: a group of %d entries, 1 to %d are allowed", ErrTooLarge, len(entries), MaxGroupEntries)
	}
	base := entries[0].GetOffset()
	end := base + int64(len(entries))
	then := make([]clientv3.Op, 0, len(entries)+1)
	size := 0
	for i, e := range entries {
		if e.GetOffset() != base+int64(i) {
			return Appended{}, fmt.Errorf("append at %d: entry %d has the offset %d", base, i, e.GetOffset())
		}
		value, err := proto.Marshal(e)
		if err != nil {
			return Appended{}, fmt.Errorf("encode entry %d: %w", e.GetOffset(), err)
		}
		if size += len(value); size > MaxGroupBytes {
			return Appended{}, fmt.Errorf("%w: a group of more than %d bytes", ErrTooLarge, MaxGroupBytes)
		}
		then = append(then, clientv3.OpPut(l.entryKey(e.GetOffset()), string(value)))
	}
	then = append(then, clientv3.OpPut(l.endKey(), strconv.FormatInt(end, 10)))

	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(g.Key), "=", g.CreateRevision)}
	if base == 0 {
		conditions = append(conditions, clientv3.Compare(clientv3.CreateRevision(l.endKey()), "=", 0))
	} else {
		conditions = append(conditions, clientv3.Compare(clientv3.Value(l.endKey()), "=", strconv.FormatInt(base, 10)))
	}
	otherwise := []clientv3.Op{
		clientv3.OpGet(l.endKey()), clientv3.OpGet(g.Key), clientv3.OpGet(l.entryKey(base)),
	}

	unknown := false
	wait := 10 * time.Millisecond
	for attempts := 1; ; attempts++ {
		resp, err := l.commit(ctx, "append", conditions, then, otherwise)
		switch {
		case err == nil && resp.Succeeded:
			return Appended{End: end, Attempts: attempts}, nil
		case err == nil:
			adopted, err := l.judge(g, base, entries[0].GetWriteId(), resp)
			if err != nil || !adopted {
				return Appended{}, err
			}
			return Appended{End: end, Attempts: attempts, Adopted: true}, nil
		case Fatal(err):
			return Appended{}, fmt.Errorf("append at %d: %w: %w", base, ErrOutcomeUnknown, err)
		case errors.Is(err, rpctypes.ErrNoSpace):
			// etcd says so before it executes a transaction and, the one that goes
			// over the quota, also behind it. The log itself knows.
			found, readErr := l.commit(ctx, "append", nil, otherwise, nil)
			if readErr != nil {
				unknown = true
				break
			}
			adopted, judged := l.judge(g, base, entries[0].GetWriteId(), found)
			if adopted {
				return Appended{End: end, Attempts: attempts, Adopted: true}, nil
			}
			if Fatal(judged) {
				return Appended{}, fmt.Errorf("%w: %w", ErrOutcomeUnknown, judged)
			}
			if !unknown {
				return Appended{}, fmt.Errorf("append at %d: %w: %w", base, ErrRefused, err)
			}
		case isRefusal(err) && !unknown:
			return Appended{}, fmt.Errorf("append at %d: %w: %w", base, ErrRefused, err)
		case !isRefusal(err):
			unknown = true
		}
		if ctx.Err() != nil || !sleep(ctx, wait) {
			return Appended{}, fmt.Errorf("append at %d: %w after %d attempts: %w", base, ErrOutcomeUnknown, attempts, err)
		}
		l.log.WarnContext(ctx, "metadata append without an answer, asking again", "offset", base, "err", err)
		wait = min(2*wait, time.Second)
	}
}

// commit sends the transaction once.
func (l *Log) commit(ctx context.Context, op string, cmps []clientv3.Cmp, then, otherwise []clientv3.Op) (*clientv3.TxnResponse, error) {
	attempt, cancel := context.WithTimeout(ctx, l.opts.AttemptTimeout)
	defer cancel()
	resp, err := l.kv.Txn(attempt).If(cmps...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		l.opts.OnError(op, err)
		return nil, err
	}
	if err := l.checkCluster(resp.Header); err != nil {
		return nil, err
	}
	return resp, nil
}

// judge reads what a transaction found whose conditions didn't hold.
func (l *Log) judge(g Guard, base int64, writeID []byte, resp *clientv3.TxnResponse) (adopted bool, err error) {
	end, err := parseEnd(resp.Responses[0].GetResponseRange().GetKvs())
	if err != nil {
		return false, fmt.Errorf("append at %d: %w", base, err)
	}
	if kvs := resp.Responses[2].GetResponseRange().GetKvs(); len(kvs) == 1 {
		e, err := l.decode(kvs[0])
		if err != nil {
			return false, fmt.Errorf("append at %d: %w", base, err)
		}
		if len(writeID) > 0 && bytes.Equal(e.GetWriteId(), writeID) {
			return true, nil // a group is whole or absent: its first entry speaks for it
		}
	}
	leader := resp.Responses[1].GetResponseRange().GetKvs()
	switch {
	case len(leader) == 0 || leader[0].CreateRevision != g.CreateRevision:
		return false, fmt.Errorf("append at %d: %w", base, ErrDeposed)
	case end < base:
		return false, fmt.Errorf("append at %d: %w: it ends at %d", base, ErrRolledBack, end)
	default:
		return false, fmt.Errorf("append at %d: %w: it ends at %d", base, ErrConflict, end)
	}
}

// Claim stores value for the log that is to begin, unless something was stored
// before, and returns what is stored. An error leaves open whether value was;
// claiming again finds out.
func (l *Log) Claim(ctx context.Context, g Guard, value []byte) ([]byte, error) {
	resp, err := l.commit(ctx, "claim",
		[]clientv3.Cmp{
			clientv3.Compare(clientv3.CreateRevision(g.Key), "=", g.CreateRevision),
			clientv3.Compare(clientv3.CreateRevision(l.claimKey()), "=", 0),
		},
		[]clientv3.Op{clientv3.OpPut(l.claimKey(), string(value))},
		[]clientv3.Op{clientv3.OpGet(l.claimKey())})
	switch {
	case err != nil:
		return nil, unreachable(ctx, "claim", err)
	case resp.Succeeded:
		return value, nil
	}
	stored := resp.Responses[0].GetResponseRange().GetKvs()
	if len(stored) == 0 {
		return nil, fmt.Errorf("claim: %w", ErrDeposed)
	}
	return stored[0].Value, nil
}

// Claimed returns what [Log.Claim] has stored, nil for nothing.
func (l *Log) Claimed(ctx context.Context) ([]byte, error) {
	resp, err := l.get(ctx, "read claim", l.claimKey())
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return resp.Kvs[0].Value, nil
}
