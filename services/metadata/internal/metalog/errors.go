package metalog

import (
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// What can be wrong. Match with errors.Is.
var (
	// ErrDeposed: the leader key is not ours any more and the group is not in
	// the log and never will be.
	ErrDeposed = errors.New("not the leader of the metadata log any more")
	// ErrConflict: the leader key is ours, yet somebody else moved the log's end.
	// The group is not in the log and never will be.
	ErrConflict = errors.New("metadata log moved under its leader")
	// ErrOutcomeUnknown: the group may be in the log, or may still come into it,
	// until the writer's leader key is gone.
	ErrOutcomeUnknown = errors.New("outcome of the append unknown")
	// ErrRefused: etcd refuses the transaction; the group is not in the log. The
	// cause says why, for instance that etcd's space is exceeded.
	ErrRefused = errors.New("etcd refused the append")
	// ErrTooLarge: the group or an entry exceeds its limit; nothing was sent.
	ErrTooLarge = errors.New("metadata entry too large")
	// ErrUnreachable: etcd gave no answer in time.
	ErrUnreachable = errors.New("etcd unreachable")
	// ErrOtherCluster: the endpoints lead to another etcd cluster than before.
	ErrOtherCluster = errors.New("another etcd cluster answers")
	// ErrRolledBack: the log ends below an offset that was read from it.
	ErrRolledBack = errors.New("metadata log was rolled back")
	// ErrDamaged: the log has a hole, or an entry that contradicts its place.
	ErrDamaged = errors.New("metadata log damaged")
	// ErrForeign: an entry belongs to another incarnation of the log.
	ErrForeign = errors.New("entry of another incarnation")
)

// Fatal reports whether err says that this replica must not go on from its
// state: reading again would not help.
func Fatal(err error) bool {
	for _, target := range []error{ErrOtherCluster, ErrRolledBack, ErrDamaged, ErrForeign} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// refused are the answers after which it is certain that the transaction had no
// effect and that repeating it is useless.
var refused = []error{
	rpctypes.ErrNoSpace, rpctypes.ErrTooManyOps, rpctypes.ErrRequestTooLarge, rpctypes.ErrDuplicateKey,
	rpctypes.ErrPermissionDenied, rpctypes.ErrUserEmpty, rpctypes.ErrInvalidAuthToken, rpctypes.ErrEmptyKey,
}

func isRefusal(err error) bool {
	for _, r := range refused {
		if errors.Is(err, r) {
			return true
		}
	}
	return false
}

func isCompacted(err error) bool { return errors.Is(err, rpctypes.ErrCompacted) }

// unreachable names the act and tells apart the end of the caller's context.
func unreachable(ctx context.Context, act string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", act, context.Cause(ctx))
	}
	return fmt.Errorf("%s: %w: %w", act, ErrUnreachable, err)
}
