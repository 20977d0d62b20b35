package combiner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/rpcerr"
	"github.com/braidlog/braid/pkg/walobject"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/rlm/planner"
)

// object is a planned object from its first attempt to its verdict.
type object struct {
	identity   Identity
	items      []*item
	partitions int

	// Guarded by the combiner's mutex.
	cancels  map[int32]context.CancelFunc // of running attempts
	running  int
	uploaded bool
	built    map[int32]*walobject.Object // what attempts uploaded

	// building makes two attempts' builds, which set positions in the shared
	// descriptors, follow one another.
	building sync.Mutex
}

// upload starts an attempt. c.mu is held.
func (c *Combiner) upload(u planner.Upload) {
	if c.stopped {
		return
	}
	o := c.objects[u.Object]
	if o == nil {
		o = &object{
			identity: c.identities[u.Epoch], items: make([]*item, len(u.Ranges)),
			cancels: make(map[int32]context.CancelFunc), built: make(map[int32]*walobject.Object),
		}
		var last planner.Key
		for i, r := range u.Ranges {
			o.items[i] = r.Item.(*item)
			o.items[i].object = o
			if i == 0 || r.Partition != last {
				o.partitions++
			}
			last = r.Partition
		}
		c.objects[u.Object] = o
	}
	a := planner.Attempt{Object: u.Object, Attempt: u.Attempt}
	o.running++
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.PutTimeout)
	o.cancels[a.Attempt] = cancel
	c.work.Add(1)
	go func() {
		defer c.work.Done()
		defer cancel()
		built, err := c.put(ctx, a, o)
		c.ended(ctx, a, o, built, err)
	}()
}

// put builds and uploads one attempt.
func (c *Combiner) put(ctx context.Context, a planner.Attempt, o *object) (*walobject.Object, error) {
	ranges := make([]walobject.Range, len(o.items))
	for i, it := range o.items {
		ranges[i] = walobject.Range{Footer: it.footer, Data: it.data}
	}
	o.building.Lock()
	built, err := walobject.Build(walobject.Header{
		ClusterID: o.identity.ClusterID, Object: c.ref(a, o), RLMID: c.cfg.RLMID,
		AppliedMetadataOffset: c.deps.MetadataEnd(), CreateTime: time.Now(),
	}, ranges)
	o.building.Unlock()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	stored, err := c.deps.Store.Create(ctx, built.Name, objstore.NewPartsCRC(built.CRC32C, built.Parts...))
	if err == nil && (stored.Size != built.Size || stored.CRC32C != built.CRC32C) {
		// Field report B183: an upload that arrived empty and was acknowledged.
		err = fmt.Errorf("%w: the store holds %d bytes with CRC32C %08x, sent were %d with %08x",
			objstore.ErrCorrupt, stored.Size, stored.CRC32C, built.Size, built.CRC32C)
	}
	c.metrics.put(ctx, time.Since(begin), err)
	return built, err
}

// ended takes an attempt's result.
func (c *Combiner) ended(ctx context.Context, a planner.Attempt, o *object, built *walobject.Object, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(o.cancels, a.Attempt)
	o.running--
	switch {
	case err == nil:
		if !o.uploaded {
			c.metrics.object(built.Size, len(o.items), o.partitions)
		}
		o.uploaded = true
		o.built[a.Attempt] = built
		c.apply(c.plan.Uploaded(c.now(), a))
	case errors.Is(err, walobject.ErrInvalid):
		// Every range was verified; this is a defect of ours, and repeating it
		// would be one more.
		c.log.ErrorContext(ctx, "an object can't be built", "epoch", a.Epoch, "sequence", a.Sequence, "err", err)
		c.apply(c.plan.Abandoned(c.now(), a.Object))
	default:
		if !o.uploaded && !c.stopped && c.plan.Holds(a.Object) {
			c.log.WarnContext(ctx, "upload failed, another attempt follows", "epoch", a.Epoch, "sequence", a.Sequence, "attempt", a.Attempt, "err", err)
		}
		c.apply(c.plan.UploadFailed(c.now(), a))
	}
	if o.running == 0 {
		for _, it := range o.items {
			if o.uploaded || it.answered || it.stream.closed {
				c.release(it)
			}
		}
	}
	c.drop(a.Object, o)
}

// drop forgets an object that the planner does not hold any more and that no
// attempt reads. c.mu is held.
func (c *Combiner) drop(id planner.Object, o *object) {
	if o.running > 0 || c.plan.Holds(id) {
		return
	}
	delete(c.objects, id)
	for _, it := range o.items {
		c.release(it)
	}
}

// commit sends an object's commit until it has a verdict. c.mu is held.
func (c *Combiner) commit(a planner.Attempt) {
	o := c.objects[a.Object]
	built := o.built[a.Attempt]
	if c.stopped {
		return
	}
	ctx := c.ctx
	r := &metadatav1.CommitCombinedSegmentRequest{
		ClusterId: o.identity.ClusterID, RlmId: c.cfg.RLMID, Object: c.ref(a, o),
		SizeBytes: built.Size, Crc32C: built.CRC32C, Ranges: built.Ranges,
	}
	c.work.Add(1)
	go func() {
		defer c.work.Done()
		begin := time.Now()
		resp, err := c.verdict(ctx, r)
		c.metrics.commit(ctx, time.Since(begin), err)
		c.judged(ctx, a, o, resp, err)
	}()
}

// errNoVerdict says that an answer is not one to this command.
var errNoVerdict = errors.New("the answer does not have one verdict per range")

// verdict repeats the command until there is a verdict (design review F9), ctx
// ends, or the answer is that it never will be judged.
func (c *Combiner) verdict(ctx context.Context, r *metadatav1.CommitCombinedSegmentRequest) (*metadatav1.CommitCombinedSegmentResponse, error) {
	pause := backoff.Policy{Initial: 20 * time.Millisecond, Max: c.cfg.CommitRetryMax, Multiplier: 2, Jitter: 0.5}
	for attempt := 1; ; attempt++ {
		resp, err := c.deps.Committer.Commit(ctx, r)
		if err == nil && len(resp.GetVerdicts()) != len(r.GetRanges()) {
			err = fmt.Errorf("%w: %d for %d", errNoVerdict, len(resp.GetVerdicts()), len(r.GetRanges()))
		}
		if err == nil || hopeless(err) {
			return resp, err
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		c.log.WarnContext(ctx, "no verdict on a commit, repeating it", "epoch", r.GetObject().GetRlmEpoch(),
			"sequence", r.GetObject().GetSequence(), "attempt", attempt, "err", err)
		if err := backoff.Sleep(ctx, pause.Delay(attempt, rand.Float64())); err != nil {
			return nil, err
		}
	}
}

// hopeless reports whether the metadata service will never judge the command.
func hopeless(err error) bool {
	if rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_CONFLICT) {
		return true
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition,
		codes.OutOfRange, codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented:
		return true
	}
	return false
}

// judged takes a commit's answer.
func (c *Combiner) judged(ctx context.Context, a planner.Attempt, o *object, resp *metadatav1.CommitCombinedSegmentResponse, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		c.apply(c.plan.Judged(c.now(), a, resp.GetVerdicts(), resp.GetMetadataOffset(), resp.GetRlmEpochClosed()))
		if resp.GetRlmEpochClosed() {
			c.deps.OnUnusable(a.Epoch)
		}
	case ctx.Err() != nil:
		return // stopped: without a verdict
	default:
		c.log.ErrorContext(ctx, "the metadata service refuses a commit for good: giving up the epoch", "epoch", a.Epoch, "sequence", a.Sequence, "err", err)
		c.apply(c.plan.Abandoned(c.now(), a.Object))
		c.apply(c.plan.EpochClosed(c.now(), a.Epoch))
		c.deps.OnUnusable(a.Epoch)
	}
	c.tidy()
}
