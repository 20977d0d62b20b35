package replica_test

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	remotelogv1 "github.com/braidlog/braid/proto/gen/go/braid/remotelog/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
)

// bucket is what all hand-played remote-log managers share.
type bucket struct {
	mu      sync.Mutex
	objects map[string]*object
	fail    error // of every read
	// failFooters is the error of every reading of footers.
	failFooters error
	reads       int // of ranges
}

type object struct {
	data   []byte
	footer *storagev1.RangeFooter
	// footerErr is what who asks for the footer is told.
	footerErr error
}

func newBucket() *bucket { return &bucket{objects: map[string]*object{}} }

func refKey(r *logv1.ObjectRef) string { return r.String() }

// rlm is a hand-played remote-log manager: one object for each range, committed
// in the order of the stream.
type rlm struct {
	remotelogv1.UnimplementedRemoteLogServiceServer
	world  *world
	bucket *bucket
	id     int32

	mu       sync.Mutex
	epoch    int64
	seq      int64
	streams  int
	received []*remotelogv1.WalRange // all ever, with their bytes
	// Orders.
	down   bool // ranges are kept and not answered
	kept   []func()
	credit int64
	// judge, when set, answers instead of the world; a nil verdict means none.
	judge func(r *remotelogv1.WalRange) *metadatav1.RangeVerdict
	// dieAfterPut ends the stream after the commit, once, before the verdict.
	dieAfterPut bool
	forgetful   bool // keeps nothing
	breakAll    chan struct{}
}

func newRLM(w *world, b *bucket, id int32) *rlm {
	return &rlm{world: w, bucket: b, id: id, credit: 8 << 20, breakAll: make(chan struct{})}
}

func (r *rlm) with(fn func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fn()
}

// up lets the bucket take what was kept.
func (r *rlm) up() {
	r.mu.Lock()
	kept := r.kept
	r.down, r.kept = false, nil
	r.mu.Unlock()
	for _, fn := range kept {
		fn()
	}
}

// cut ends every open stream.
func (r *rlm) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.breakAll)
	r.breakAll = make(chan struct{})
	r.kept = nil
}

func (r *rlm) ranges() []*remotelogv1.WalRange {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]*remotelogv1.WalRange(nil), r.received...)
}

func (r *rlm) AppendWal(s grpc.BidiStreamingServer[remotelogv1.AppendWalRequest, remotelogv1.AppendWalResponse]) error {
	if _, err := s.Recv(); err != nil {
		return err
	}
	r.mu.Lock()
	r.streams++
	credit, broken := r.credit, r.breakAll
	r.mu.Unlock()
	q := newStream[*remotelogv1.AppendWalResponse]()
	q.put(&remotelogv1.AppendWalResponse{Kind: &remotelogv1.AppendWalResponse_Ready{Ready: &remotelogv1.AppendWalReady{
		RlmId: r.id, RlmEpoch: r.epoch, PartitionCreditBytes: credit, StreamCreditBytes: 2 * credit,
	}}})
	ctx, cancel := context.WithCancel(s.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer cancel()
		for {
			m, err := s.Recv()
			if err != nil {
				return
			}
			rg := m.GetRange() // a message of its own, made by the codec
			take := func() bool { return r.take(rg, q) }
			r.mu.Lock()
			if r.forgetful {
				rg.Data = nil
			} else {
				r.received = append(r.received, rg)
			}
			if r.down {
				r.kept = append(r.kept, func() { take() })
				r.mu.Unlock()
				continue
			}
			r.mu.Unlock()
			if !take() {
				return
			}
		}
	}()
	go func() {
		select {
		case <-broken:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := q.pump(ctx, s.Send)
	if s.Context().Err() == nil {
		return status.Error(codes.Unavailable, "the stream was cut")
	}
	<-ended
	return err
}

// take stores, commits and answers; false ends the stream.
func (r *rlm) take(rg *remotelogv1.WalRange, q *stream[*remotelogv1.AppendWalResponse]) bool {
	r.mu.Lock()
	r.seq++
	ref := &logv1.ObjectRef{Incarnation: incarnation, RlmEpoch: r.epoch, Sequence: r.seq, Attempt: 1}
	judge, die := r.judge, r.dieAfterPut
	r.dieAfterPut = false
	r.mu.Unlock()
	r.bucket.mu.Lock()
	if r.forgetful {
		clear(r.bucket.objects)
	}
	r.bucket.objects[refKey(ref)] = &object{data: rg.GetData(), footer: &storagev1.RangeFooter{
		Range: rg.GetRange(), Producers: rg.GetProducers(), Expiries: rg.GetExpiries(),
	}}
	r.bucket.mu.Unlock()
	var v *metadatav1.RangeVerdict
	if judge != nil {
		if v = judge(rg); v == nil {
			return true
		}
	} else {
		v = r.world.commit(rg.GetRange(), ref, int64(len(rg.GetData())))
	}
	if die {
		return false
	}
	q.put(&remotelogv1.AppendWalResponse{Kind: &remotelogv1.AppendWalResponse_Verdict{Verdict: &remotelogv1.WalVerdict{
		Partition: rg.GetRange().GetPartition(), Run: rg.GetRun(), BaseOffset: rg.GetRange().GetBaseOffset(), EndOffset: rg.GetRange().GetEndOffset(),
		Verdict: v, Object: ref,
	}}})
	return true
}

func (r *rlm) find(ref *logv1.ObjectRef) (*object, error) {
	r.bucket.mu.Lock()
	defer r.bucket.mu.Unlock()
	if r.bucket.fail != nil {
		return nil, r.bucket.fail
	}
	o := r.bucket.objects[refKey(ref)]
	if o == nil {
		return nil, status.Error(codes.NotFound, "no such object")
	}
	return o, nil
}

func (r *rlm) ReadWal(req *remotelogv1.ReadWalRequest, s grpc.ServerStreamingServer[remotelogv1.ReadWalResponse]) error {
	r.bucket.mu.Lock()
	r.bucket.reads++
	r.bucket.mu.Unlock()
	o, err := r.find(req.GetObject())
	if err != nil {
		return err
	}
	data := o.data[req.GetPosition() : req.GetPosition()+req.GetLengthBytes()]
	for len(data) > 0 {
		n := min(len(data), 1000)
		if err := s.Send(&remotelogv1.ReadWalResponse{Data: data[:n]}); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

func (r *rlm) ReadRangeFooters(_ context.Context, req *remotelogv1.ReadRangeFootersRequest) (*remotelogv1.ReadRangeFootersResponse, error) {
	resp := &remotelogv1.ReadRangeFootersResponse{}
	r.bucket.mu.Lock()
	err := r.bucket.failFooters
	r.bucket.mu.Unlock()
	if err != nil {
		return nil, err
	}
	for _, loc := range req.GetRanges() {
		o, err := r.find(loc.GetObject())
		if err != nil {
			return nil, err
		}
		if o.footerErr != nil {
			return nil, o.footerErr
		}
		resp.Footers = append(resp.Footers, o.footer)
	}
	return resp, nil
}

func registerRLM(g *grpc.Server, r *rlm) { remotelogv1.RegisterRemoteLogServiceServer(g, r) }

type logRef = logv1.ObjectRef

func (r *rlm) seqNow() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seq
}
