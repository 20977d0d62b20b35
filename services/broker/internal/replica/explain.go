package replica

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/braidlog/braid/pkg/lineage"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker/internal/cluster"
	"github.com/braidlog/braid/services/broker/internal/remote"
	"github.com/braidlog/braid/services/broker/partition"
)

// Offsets is where a partition stands. All ends are exclusive.
type Offsets struct {
	LogStart      int64 // first offset of the partition
	LocalLogStart int64 // first offset on this disk; -1 when no log is open here
	ObjectEnd     int64 // end of the committed prefix
	HighWatermark int64 // end of what readers see
	LogEnd        int64 // end of this broker's log; the object end when no log is open here
	EpochStart    int64 // first offset of the epoch last opened; what LATEST waits for after an election
	Fence         partition.Fence
	Lineage       lineage.Lineage // not to be changed
	LeaderID      int32           // 0 for none
	// Leading says that this broker leads and takes appends.
	Leading bool
}

// Offsets tells where the partition stands.
func (p *Partition) Offsets() Offsets {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.offsets()
}

// offsets is Offsets with mu held.
func (p *Partition) offsets() Offsets {
	v, _ := p.machine.View()
	s, _ := p.machine.State()
	out := Offsets{
		LogStart: v.LogStart, LocalLogStart: -1, ObjectEnd: v.ObjectEnd, HighWatermark: v.ObjectEnd, LogEnd: v.ObjectEnd,
		EpochStart: v.EpochStart, Fence: v.Fence, Lineage: v.Lineage, LeaderID: v.Leader, Leading: s == partition.Active,
	}
	switch {
	case p.log != nil:
		out.LocalLogStart, out.LogEnd = p.log.Start(), p.machine.Log().End
	case s == partition.Fetching:
		out.LogEnd = p.machine.Log().End // nothing yet: the log is opened with the first range
	}
	return out
}

// ConfirmLeadership asks the controller whether this broker still leads under
// the fence it knows; nil if it does and its session is live.
func (p *Partition) ConfirmLeadership(ctx context.Context) error {
	p.mu.Lock()
	_, _, err := p.machine.Admit()
	if err != nil {
		err = p.notActive(err)
		p.mu.Unlock()
		return err
	}
	v, _ := p.machine.View()
	p.mu.Unlock()
	client := metadatav1.NewTopicServiceClient(p.mgr.deps.Metadata.Controller())
	resp, err := client.GetTopic(ctx, &metadatav1.GetTopicRequest{By: &metadatav1.GetTopicRequest_TopicId{TopicId: p.topicID}})
	if err != nil {
		return &UnavailableError{Reason: MetadataUnreachable, Message: "the controller can't be asked", Retry: time.Second, Err: err}
	}
	parts := resp.GetTopic().GetPartitions()
	if resp.GetTopic().GetCreationOffset() != p.key.CreationOffset || int(p.partition) >= len(parts) {
		return &UnknownPartitionError{Topic: p.topic, Partition: p.partition}
	}
	now := parts[p.partition]
	if fenceFromProto(now.GetFence()) != v.Fence || !now.GetOpened() {
		e := &NotLeaderError{LeaderID: now.GetLeaderId(), Epoch: now.GetFence().GetLeaderEpoch()}
		if b, ok := p.mgr.Cluster().Broker(e.LeaderID); ok {
			e.Address = b.Address
		}
		return e
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// A controller that was deposed without knowing it may still answer; heartbeats
	// are confirmed only while its own lease is.
	if !p.sessionLive() {
		return &UnavailableError{Reason: MetadataUnreachable, Message: "the broker's session is not confirmed", Retry: time.Second}
	}
	return nil
}

// Finding is one reason why a partition does not move, or a thing worth knowing.
type Finding struct {
	// Code is stable: HEALTHY, NO_LEADER, LEADER_ELSEWHERE, LEADER_OFFLINE,
	// FENCED, RECOVERING, RESIGNING, LOG_OFFLINE, SESSION_LOST,
	// PRODUCERS_RECOVERING, NO_REMOTE_LOG_MANAGER, UPLOADS_STALLED,
	// RANGES_REFUSED, BEHIND, BACKLOG_FULL, METADATA_UNREACHABLE, LOG_LOADING,
	// PRODUCER_STATE_INCOMPLETE, LOCAL_LOG_WAS_CUT, HANDING_OVER; of a follower
	// also TRUNCATING, FOLLOWING, OBJECT_MISSING, OBJECT_DAMAGED, COPY_STALLED,
	// SEGMENTS_BEHIND.
	Code string
	// Summary is one sentence for people.
	Summary string
	// Evidence are the facts behind it, by name.
	Evidence map[string]string
	// Blocking says whether it stops the partition.
	Blocking bool
}

// Explanation describes a partition on this broker.
type Explanation struct {
	TopicID         string
	Partition       int32
	BrokerID        int32
	State           partition.State
	Offsets         Offsets
	UnuploadedBytes int64
	RLMID           int32 // remote-log manager in use, 0 for none
	ProducerCount   int
	Findings        []Finding // most pressing first, never empty
	// Replicas are all of them, in order of preference, as this leader knows them;
	// nil where this broker does not lead.
	Replicas []Status
}

// Status is what a leader knows of a replica.
type Status struct {
	BrokerID int32
	Online   bool
	State    partition.State // 0 when it said nothing under the present leadership
	LogEnd   int64
	// Lag is the number of committed offsets that it lacked when it last said, seen
	// from the object end now.
	Lag int64
	// Age of what it said.
	Age    time.Duration
	Reason string // why it does not get on
}

// stalledAfter is how old an unanswered range is before it is worth a finding.
const stalledAfter = 3 * time.Second

// Explain says what state the partition is in and why it does not move.
func (p *Partition) Explain() Explanation {
	feed := p.mgr.feed.Status()
	view := p.mgr.Cluster()
	metadataErr := p.mgr.follower.Err()
	p.mu.Lock()
	defer p.mu.Unlock()
	state, reason := p.machine.State()
	v, known := p.machine.View()
	out := Explanation{
		TopicID: p.topicID, Partition: p.partition, BrokerID: p.mgr.cfg.BrokerID, State: state, Offsets: p.offsets(), RLMID: feed.RLMID,
	}
	if p.producers != nil {
		out.ProducerCount = p.producers.head.Len()
	}
	x := explainer{p: p, out: &out}
	switch {
	case !known:
		x.add(true, "LOG_LOADING", "The metadata service has not told this broker about the partition yet.")
	case state == partition.Active:
		out.UnuploadedBytes = p.machine.Unuploaded()
		x.active(feed.RLMID, feed.LastError, feed.OldestUnanswered, feed.Since)
		out.Replicas = p.statuses(view, v.ObjectEnd)
	case state == partition.Offline:
		x.add(true, "LOG_OFFLINE", "The local log can't be used until the broker is restarted.", "cause", reason)
	case state == partition.Resigning:
		x.add(true, "RESIGNING", "This broker gave up leading and has asked for an election.", "cause", reason, "leader_epoch", str(v.Fence.LeaderEpoch))
	case state == partition.Fencing || state == partition.Recovering:
		if p.loading {
			x.add(true, "LOG_LOADING", "The local log is being opened and checked.")
		}
		x.add(true, "RECOVERING", "This broker was elected and reconciles its log, or waits for its opening.", "leader_epoch", str(v.Fence.LeaderEpoch), "object_end", str(v.ObjectEnd))
	case (state == partition.Truncating || state == partition.Fetching) && v.Leader != 0 && v.Leader != p.mgr.cfg.BrokerID:
		x.follower(view, state, reason, v)
	case v.Leader == 0:
		x.add(true, "NO_LEADER", "No live broker may lead the partition.", "leader_epoch", str(v.Fence.LeaderEpoch))
	case v.Leader == p.mgr.cfg.BrokerID:
		x.add(true, "FENCED", "The fence belongs to an earlier registration of this broker.", "fence_broker_epoch", str(v.Fence.BrokerEpoch), "broker_epoch", str(p.mgr.epoch()))
	default:
		x.elsewhere(view, v)
	}
	if metadataErr != nil {
		x.add(false, "METADATA_UNREACHABLE", "The metadata stream is broken; what is known may be old.", "error", metadataErr.Error())
	}
	if len(out.Findings) == 0 {
		x.add(false, "HEALTHY", "The partition takes appends and uploads them.")
	}
	x.notes()
	return out
}

// explainer collects findings; the partition's mutex is held.
type explainer struct {
	p   *Partition
	out *Explanation
}

func (x *explainer) add(blocking bool, code, summary string, evidence ...string) {
	f := Finding{Code: code, Summary: summary, Blocking: blocking, Evidence: map[string]string{}}
	for i := 0; i+1 < len(evidence); i += 2 {
		f.Evidence[evidence[i]] = evidence[i+1]
	}
	x.out.Findings = append(x.out.Findings, f)
}

func (x *explainer) elsewhere(view *cluster.View, v partition.View) {
	b, ok := view.Broker(v.Leader)
	if ok && !b.Online {
		x.add(true, "LEADER_OFFLINE", "The leader's session is over; an election follows.", "leader_id", str(v.Leader))
		return
	}
	x.add(false, "LEADER_ELSEWHERE", "Another broker leads the partition.", "leader_id", str(v.Leader), "address", b.Address)
}

// follower says how far a replica that does not lead is, and what stops it.
func (x *explainer) follower(view *cluster.View, state partition.State, reason string, v partition.View) {
	p := x.p
	end := p.machine.Log().End
	lag := max(v.ObjectEnd-end, 0)
	facts := []string{"log_end", str(end), "object_end", str(v.ObjectEnd), "lag", str(lag)}
	if !p.told.at.IsZero() {
		facts = append(facts, "leader_object_end", str(p.told.object), "leader_log_end", str(p.told.logEnd), "leader_heard", p.told.at.UTC().Format(time.RFC3339Nano))
	}
	var damage *remote.DamageError
	switch err := p.copyErr; {
	case state == partition.Truncating && p.loading:
		x.add(true, "LOG_LOADING", "The local log is being opened and checked.", facts...)
	case state == partition.Truncating:
		if reason == "" {
			reason = "its log is being cut to the partition's branch"
		}
		x.add(true, "TRUNCATING", "This replica waits to follow and serves nothing meanwhile.", append(facts, "cause", reason)...)
	case err == nil && lag > 0:
		x.add(false, "BEHIND", "This replica copies committed ranges from the bucket.", facts...)
	case err == nil:
		if p.told.object > v.ObjectEnd {
			x.add(false, "SEGMENTS_BEHIND", "The leader knows of more committed records than this broker was told by the metadata service.", facts...)
			break
		}
		x.add(false, "FOLLOWING", "This replica has copied everything that is committed.", facts...)
	case errors.Is(err, remote.ErrNotFound):
		x.add(true, "OBJECT_MISSING", "An object that holds committed records is not in the bucket; nothing is cut, this replica keeps asking.", append(facts, "error", err.Error(), "attempts", strconv.Itoa(p.copyFailures))...)
	case errors.As(err, &damage):
		x.add(true, "OBJECT_DAMAGED", "The bytes in the bucket are not what was committed; this replica takes none of them and keeps asking.", append(facts, "error", err.Error(), "attempts", strconv.Itoa(p.copyFailures))...)
	default:
		x.add(true, "COPY_STALLED", "Committed ranges can't be had now; this replica keeps asking.", append(facts, "error", err.Error(), "attempts", strconv.Itoa(p.copyFailures))...)
	}
	x.elsewhere(view, v)
}

// statuses lists the replicas as this leader knows them; mu is held.
func (p *Partition) statuses(view *cluster.View, objectEnd int64) []Status {
	var out []Status
	for _, id := range p.replicas(view) {
		b, known := view.Broker(id)
		s := Status{BrokerID: id, Online: known && b.Online}
		if id == p.mgr.cfg.BrokerID {
			s.State, _ = p.machine.State()
			s.LogEnd = p.machine.Log().End
			out = append(out, s)
			continue
		}
		r, ok := p.followers[id]
		switch {
		case ok && r.epoch == b.Epoch:
			s.State, s.LogEnd, s.Reason = r.state, r.end, r.reason
			s.Lag, s.Age = max(objectEnd-r.end, 0), time.Since(r.at)
		case !s.Online:
			s.Reason = "its session is over"
			s.Lag = objectEnd
		default:
			s.Reason = "it has not said anything under the present leadership"
			s.Lag = objectEnd
		}
		out = append(out, s)
	}
	return out
}

func (x *explainer) active(rlm int32, feedErr error, oldest, since time.Time) {
	p, m := x.p, x.p.machine
	tail := m.Unuploaded()
	if limit := p.cfg.WALMaxUnuploadedBytes; tail >= limit {
		x.add(true, "BACKLOG_FULL", "Too much of the partition waits for its upload; appends are refused.", "unuploaded", str(tail), "limit", str(limit), "scope", "partition")
	} else if all, limit := p.mgr.unuploaded.Load(), int64(p.mgr.cfg.MaxUnuploadedBytes); all >= limit {
		x.add(true, "BACKLOG_FULL", "Too much of this broker's logs waits for its upload; appends are refused.", "unuploaded", str(all), "limit", str(limit), "scope", "broker")
	}
	if p.drained || p.mgr.draining.Load() {
		x.add(true, "HANDING_OVER", "The broker is stopping: appends are refused until another leads.")
	} else if p.passing {
		x.add(false, "HANDING_OVER", "A replica that is preferred is about to lead: appends wait.")
	}
	if !p.sessionLive() {
		x.add(false, "SESSION_LOST", "The broker's session is not confirmed: LEADER acks are not given.", "broker_epoch", str(p.mgr.epoch()))
	}
	if !m.ProducersReady() {
		cause := "in progress"
		if p.recoveryErr != nil {
			cause = p.recoveryErr.Error()
		}
		x.add(true, "PRODUCERS_RECOVERING", "The producer state is not known yet: idempotent appends wait, nothing is uploaded.", "cause", cause)
	}
	if tail == 0 {
		return
	}
	if rlm == 0 {
		cause := "none is open"
		if feedErr != nil {
			cause = feedErr.Error()
		}
		x.add(true, "NO_REMOTE_LOG_MANAGER", "No remote-log manager takes this broker's ranges.", "cause", cause, "since", since.UTC().Format(time.RFC3339), "unuploaded", str(tail))
	} else if age := time.Since(oldest); !oldest.IsZero() && age > stalledAfter {
		x.add(true, "UPLOADS_STALLED", "The remote-log manager has ranges that it does not answer: the bucket is slow or down, or commits are not accepted.",
			"oldest_age", age.Round(time.Millisecond).String(), "rlm_id", str(rlm), "unuploaded", str(tail))
	}
	if p.refused > 0 {
		x.add(p.refused > 3, "RANGES_REFUSED", "Ranges of the partition are refused one after the other.", "outcome", p.lastBad, "count", strconv.Itoa(p.refused))
	}
	if len(x.out.Findings) == 0 {
		x.add(false, "BEHIND", "Uploads are under way.", "unuploaded", str(tail))
	}
}

func str[T int32 | int64](n T) string { return fmt.Sprint(n) }
