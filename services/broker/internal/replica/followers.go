package replica

import (
	"context"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/partition"
)

// Followers tell their leaders how far they are. Nothing rests on it but what
// people are told, and who is asked to lead next when a broker stops.

const (
	// reportPace is how often a follower looks for news to tell, and reportSoon how
	// soon after the last time it does so when it has caught up.
	reportPace = 250 * time.Millisecond
	reportSoon = 50 * time.Millisecond
	// reportAgain is when it repeats what is no news.
	reportAgain = 5 * time.Second
	// reportTimeout bounds one report.
	reportTimeout = 3 * time.Second
	// maxReported bounds the partitions of one report.
	maxReported = 1000
)

// followerReport is what a follower last told the leader of a partition.
type followerReport struct {
	epoch     int64 // of its registration
	state     partition.State
	end       int64
	objectEnd int64 // known to it
	reason    string
	at        time.Time
}

// leaderReport is what passed between a follower and the leader of a partition.
type leaderReport struct {
	// What this follower told, and when.
	sent   time.Time
	fence  partition.Fence
	end    int64
	state  partition.State
	failed string
	// What the leader answered, when at is not zero.
	at     time.Time
	reason errorsv1.ErrorReason
	logEnd int64
	object int64
}

// PeerService answers the followers of a manager's partitions.
type PeerService struct {
	brokerv1.UnimplementedReplicaServiceServer
	m *Manager
}

// NewPeerService makes the service; it starts nothing.
func NewPeerService(m *Manager) *PeerService { return &PeerService{m: m} }

// FetchReplica implements brokerv1.ReplicaServiceServer.
func (s *PeerService) FetchReplica(_ context.Context, req *brokerv1.FetchReplicaRequest) (*brokerv1.FetchReplicaResponse, error) {
	v := s.m.Cluster()
	switch {
	case v.ClusterID == "":
		return nil, rpcerr.Unavailable(errorsv1.ErrorReason_ERROR_REASON_NOT_READY, 200*time.Millisecond, "the broker does not know the cluster yet")
	case req.GetClusterId() != v.ClusterID:
		return nil, rpcerr.Mismatch(errorsv1.ErrorReason_ERROR_REASON_CLUSTER_MISMATCH, "cluster_id", v.ClusterID, req.GetClusterId())
	case req.GetBrokerId() < 1:
		return nil, rpcerr.InvalidField("broker_id", "is missing: ids run from 1")
	case len(req.GetPartitions()) > maxReported:
		return nil, rpcerr.InvalidField("partitions", "are more than 1000: send several reports")
	}
	if b, ok := v.Broker(req.GetBrokerId()); ok && b.Epoch > req.GetBrokerEpoch() {
		return nil, rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_STALE_BROKER_EPOCH, "broker_epoch", "broker %d has registered again with epoch %d", b.ID, b.Epoch)
	}
	resp := &brokerv1.FetchReplicaResponse{Partitions: make([]*brokerv1.LeaderPosition, 0, len(req.GetPartitions()))}
	for _, pos := range req.GetPartitions() {
		resp.Partitions = append(resp.Partitions, s.m.answerTo(v, req, pos))
	}
	return resp, nil
}

// answerTo answers one position.
func (m *Manager) answerTo(v *cluster.View, req *brokerv1.FetchReplicaRequest, pos *brokerv1.ReplicaPosition) *brokerv1.LeaderPosition {
	key := cluster.Key{CreationOffset: pos.GetPartition().GetTopicCreationOffset(), Partition: pos.GetPartition().GetPartition()}
	var p *Partition
	if parts := m.index.Load(); parts != nil {
		p = (*parts)[key]
	}
	if p == nil || p.topicID != pos.GetPartition().GetTopicId() {
		return &brokerv1.LeaderPosition{Reason: errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION}
	}
	assigned := false
	if t, ok := v.TopicByCreation(key.CreationOffset); ok && int(key.Partition) < len(t.Partitions) {
		assigned = holds(t.Partitions[key.Partition].Replicas, req.GetBrokerId())
	}
	return p.hear(req.GetBrokerId(), assigned, followerReport{
		epoch: req.GetBrokerEpoch(), state: stateFromProto(pos.GetState()), end: pos.GetLogEndOffset(),
		objectEnd: pos.GetObjectEndOffset(), reason: pos.GetReason(), at: time.Now(),
	}, fenceFromProto(pos.GetFence()))
}

// hear takes a follower's report and says where this leader stands. A leader that
// has not opened says nothing (design review H7).
func (p *Partition) hear(broker int32, assigned bool, r followerReport, fence partition.Fence) *brokerv1.LeaderPosition {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, _ := p.machine.View()
	state, _ := p.machine.State()
	out := &brokerv1.LeaderPosition{}
	switch {
	case v.Leader != p.mgr.cfg.BrokerID:
		out.Reason = errorsv1.ErrorReason_ERROR_REASON_NOT_LEADER
	case state != partition.Active:
		out.Reason = errorsv1.ErrorReason_ERROR_REASON_RECOVERING
	case fence.Incarnation != v.Fence.Incarnation || fence.LeaderEpoch < v.Fence.LeaderEpoch:
		out.Reason = errorsv1.ErrorReason_ERROR_REASON_FENCED_LEADER_EPOCH
	case fence != v.Fence:
		out.Reason = errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_LEADER_EPOCH
	default:
		out.Fence = fenceToProto(v.Fence)
		out.HighWatermark, out.ObjectEndOffset, out.LogStartOffset = v.ObjectEnd, v.ObjectEnd, v.LogStart
		out.LogEndOffset = p.machine.Log().End
		if !assigned {
			return out
		}
		// What an earlier registration said is gone with its disk, perhaps (F18).
		if old, ok := p.followers[broker]; !ok || old.epoch <= r.epoch {
			if p.followers == nil {
				p.followers = map[int32]followerReport{}
			}
			p.followers[broker] = r
		}
	}
	return out
}

// reports tells the leaders of what this broker follows, until ctx ends. A leader
// that does not answer holds up nobody else's reports.
func (m *Manager) reports(ctx context.Context) error {
	ticker := time.NewTicker(reportPace)
	defer ticker.Stop()
	busy := map[int32]chan struct{}{} // by leader: closed when its report is through
	for {
		select {
		case <-ticker.C:
		case <-m.caughtUp:
			if err := backoff.Sleep(ctx, reportSoon); err != nil {
				return context.Cause(ctx)
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		epoch, _, ok := m.Registration()
		if !ok {
			continue
		}
		for leader, parts := range m.news() {
			if done := busy[leader]; done != nil {
				select {
				case <-done:
				default:
					continue
				}
			}
			done := make(chan struct{})
			busy[leader] = done
			if !m.spawn(func() {
				defer close(done)
				m.report(ctx, leader, epoch, parts)
			}) {
				close(done)
			}
		}
	}
}

// news lists the partitions whose leaders are to be told something, by leader.
func (m *Manager) news() map[int32][]*Partition {
	out := map[int32][]*Partition{}
	now := time.Now()
	for _, p := range m.all() {
		if leader, ok := p.hasNews(now); ok && len(out[leader]) < maxReported {
			out[leader] = append(out[leader], p)
		}
	}
	return out
}

func (p *Partition) hasNews(now time.Time) (leader int32, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, known := p.machine.View()
	state, _ := p.machine.State()
	if !known || v.Leader == 0 || v.Leader == p.mgr.cfg.BrokerID || !v.Opened || p.gone {
		return 0, false
	}
	t := &p.told
	failed := ""
	if p.copyErr != nil {
		failed = p.copyErr.Error()
	}
	if t.fence == v.Fence && t.end == p.machine.Log().End && t.state == state && t.failed == failed && now.Sub(t.sent) < reportAgain {
		return 0, false
	}
	return v.Leader, true
}

// report sends one report.
func (m *Manager) report(ctx context.Context, leader int32, epoch int64, parts []*Partition) {
	v := m.Cluster()
	b, ok := v.Broker(leader)
	if !ok || !b.Online || b.Address == "" {
		return
	}
	conn, err := m.peers.Conn(b.Address)
	if err != nil {
		m.log.DebugContext(ctx, "no connection to a leader", "leader_id", leader, "err", err)
		return
	}
	req := &brokerv1.FetchReplicaRequest{ClusterId: v.ClusterID, BrokerId: m.cfg.BrokerID, BrokerEpoch: epoch}
	sent := parts[:0]
	for _, p := range parts {
		if pos := p.tell(leader); pos != nil {
			req.Partitions = append(req.Partitions, pos)
			sent = append(sent, p)
		}
	}
	if len(sent) == 0 {
		return
	}
	callCtx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	resp, err := brokerv1.NewReplicaServiceClient(conn).FetchReplica(callCtx, req)
	if err == nil && len(resp.GetPartitions()) == len(sent) {
		for i, p := range sent {
			p.heard(resp.GetPartitions()[i])
		}
		return
	}
	m.log.DebugContext(ctx, "a leader did not take a report", "leader_id", leader, "err", err)
}

// tell is this follower's position for a leader, nil when it has another now.
func (p *Partition) tell(leader int32) *brokerv1.ReplicaPosition {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, _ := p.machine.View()
	if v.Leader != leader || p.gone {
		return nil
	}
	state, why := p.machine.State()
	log := p.machine.Log()
	failed := ""
	if p.copyErr != nil {
		failed = p.copyErr.Error()
		why = failed
	}
	p.told = leaderReport{
		sent: time.Now(), fence: v.Fence, end: log.End, state: state, failed: failed,
		at: p.told.at, reason: p.told.reason, logEnd: p.told.logEnd, object: p.told.object,
	}
	return &brokerv1.ReplicaPosition{
		Partition: p.id, Fence: fenceToProto(v.Fence), State: StateToProto(state), LogEndOffset: log.End,
		LogStartOffset: log.Start, ObjectEndOffset: v.ObjectEnd, Reason: why,
	}
}

// heard takes the leader's answer. It changes nothing but what people are told.
func (p *Partition) heard(pos *brokerv1.LeaderPosition) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told.at, p.told.reason = time.Now(), pos.GetReason()
	if pos.GetReason() == errorsv1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		p.told.logEnd, p.told.object = pos.GetLogEndOffset(), pos.GetObjectEndOffset()
		return
	}
	p.told.sent = time.Time{} // not taken: say it again
}

// StateToProto is a state as the wire has it.
func StateToProto(s partition.State) brokerv1.ReplicaState {
	switch s {
	case partition.Fencing:
		return brokerv1.ReplicaState_REPLICA_STATE_FENCING
	case partition.Recovering:
		return brokerv1.ReplicaState_REPLICA_STATE_RECOVERING
	case partition.Active:
		return brokerv1.ReplicaState_REPLICA_STATE_ACTIVE
	case partition.Resigning:
		return brokerv1.ReplicaState_REPLICA_STATE_RESIGNING
	case partition.Idle:
		return brokerv1.ReplicaState_REPLICA_STATE_IDLE
	case partition.Offline:
		return brokerv1.ReplicaState_REPLICA_STATE_OFFLINE
	case partition.Truncating:
		return brokerv1.ReplicaState_REPLICA_STATE_TRUNCATING
	case partition.Fetching:
		return brokerv1.ReplicaState_REPLICA_STATE_FETCHING
	}
	return brokerv1.ReplicaState_REPLICA_STATE_UNSPECIFIED
}

// stateFromProto reads a state; one that is not known is 0.
func stateFromProto(s brokerv1.ReplicaState) partition.State {
	for state := partition.Idle; state <= partition.Fetching; state++ {
		if StateToProto(state) == s {
			return state
		}
	}
	return 0
}
