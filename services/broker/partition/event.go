package partition

import (
	"github.com/braidlog/braid/pkg/chainhash"
	"github.com/braidlog/braid/pkg/lineage"
)

// Fence says who may commit, see braid.log.v1.Fence.
type Fence struct {
	Incarnation    uint32
	LeaderEpoch    int32
	BrokerEpoch    int64
	LinkGeneration int64
}

// Leadership is the leadership that a leader with this fence writes under.
func (f Fence) Leadership() lineage.Leadership {
	return lineage.Leadership{Incarnation: f.Incarnation, LeaderEpoch: f.LeaderEpoch}
}

// View is what the metadata service says of the partition.
type View struct {
	Fence  Fence
	Leader int32 // broker id, 0 for none
	Opened bool
	// Exact says that the next epoch must start at the object end.
	Exact      bool
	EpochStart int64
	Lineage    lineage.Lineage
	LogStart   int64
	ObjectEnd  int64
	ObjectHash chainhash.Hash
}

// LogFacts describes the local log.
type LogFacts struct {
	Start   int64 // first offset on this disk
	End     int64 // end offset, exclusive
	Lineage lineage.Lineage
}

// Event is something that happened to the partition.
type Event interface{ event() }

type (
	// ViewReset replaces whatever the machine knew of the metadata.
	ViewReset struct{ View View }
	// FenceRaised is an election.
	FenceRaised struct {
		Fence  Fence
		Leader int32
		Exact  bool
	}
	// EpochOpened ends an election.
	EpochOpened struct {
		Fence   Fence
		Start   int64
		Lineage lineage.Lineage
	}
	// RangeCommitted extends the committed prefix. Base is the object end before it.
	RangeCommitted struct {
		Base, End int64
		EndHash   chainhash.Hash
	}
	// Removed ends the partition's life, on this broker at least. Reason is for
	// people; empty says that the topic was deleted.
	Removed struct{ Reason string }
	// Registered gives the broker a new epoch: whatever it led is fenced.
	Registered struct{ BrokerEpoch int64 }
	// Reconciled answers Reconcile: the log now is as Log says, Hash is its chain hash at the object end, and TailBytes
	// lie above it.
	Reconciled struct {
		Attempt   int64
		Log       LogFacts
		Hash      chainhash.Hash
		TailBytes int64
	}
	// Hashed answers CheckHash: TailBytes lie above the border.
	Hashed struct {
		Attempt   int64
		Hash      chainhash.Hash
		TailBytes int64
	}
	// Cut answers Truncate: the log now is as Log says.
	Cut struct {
		Attempt int64
		Log     LogFacts
	}
	// Diverged says that a fetch found other committed bytes below this replica's end.
	Diverged struct{ Attempt int64 }
	// LogFailed says that the local log can't be used for writing any more, or is damaged.
	LogFailed struct{ Err error }
	// OpenAnswered answers Open. Outcome unknown is no answer: the caller repeats the same call.
	OpenAnswered struct {
		Fence    Fence
		Accepted bool
		Reason   string // why it was refused
	}
	// ProducersRecovered says that the producer state covers the log to its end.
	ProducersRecovered struct{ Fence Fence }
	// VerdictGiven answers a range sent.
	VerdictGiven struct{ Verdict Verdict }
	// FeedLost says that the stream to the remote-log manager broke: ranges without a verdict are unknown.
	FeedLost struct{}
)

func (ViewReset) event()          {}
func (FenceRaised) event()        {}
func (EpochOpened) event()        {}
func (RangeCommitted) event()     {}
func (Removed) event()            {}
func (Registered) event()         {}
func (Reconciled) event()         {}
func (Hashed) event()             {}
func (Cut) event()                {}
func (Diverged) event()           {}
func (LogFailed) event()          {}
func (OpenAnswered) event()       {}
func (ProducersRecovered) event() {}
func (VerdictGiven) event()       {}
func (FeedLost) event()           {}

// Outcome is the verdict on one range, see braid.metadata.v1.RangeOutcome.
type Outcome uint8

// The outcomes.
const (
	Accepted Outcome = iota + 1
	Fenced
	Gap
	AlreadyCommitted
	ChainMismatch
	UnknownPartition
	NotJudged
	Malformed
)

// String returns the outcome's stable name.
func (o Outcome) String() string {
	switch o {
	case Accepted:
		return "ACCEPTED"
	case Fenced:
		return "FENCED"
	case Gap:
		return "GAP"
	case AlreadyCommitted:
		return "ALREADY_COMMITTED"
	case ChainMismatch:
		return "CHAIN_MISMATCH"
	case UnknownPartition:
		return "UNKNOWN_PARTITION"
	case NotJudged:
		return "NOT_JUDGED"
	case Malformed:
		return "MALFORMED"
	default:
		return "UNSPECIFIED"
	}
}

// Verdict is what became of one range.
type Verdict struct {
	Run       int64
	Base, End int64
	Outcome   Outcome
	// The partition's state after the command.
	LogStart   int64
	ObjectEnd  int64
	ObjectHash chainhash.Hash
	Fence      Fence
	Opened     bool
	// NextEpochStart is the start of the first lineage entry above the range's leader epoch; < 0 when there is none.
	NextEpochStart int64
}

// Effect is something the shell has to do.
type Effect interface{ effect() }

type (
	// Reconcile asks the shell to bring the local log in order and to answer with Reconciled. When Reset is set the
	// log starts again, empty, at At with Hash and Lineage; otherwise it is truncated to At when it is longer, and Hash
	// in the answer is the chain hash at ObjectEnd.
	Reconcile struct {
		Attempt   int64
		Reset     bool
		At        int64
		ObjectEnd int64
		Hash      chainhash.Hash
		Lineage   lineage.Lineage
	}
	// CheckHash asks for the chain hash of the local log at At, a batch border, answered by Hashed.
	CheckHash struct {
		Attempt int64
		At      int64
	}
	// Open asks the metadata service to open the epoch.
	Open struct {
		Fence     Fence
		Start     int64
		Lineage   lineage.Lineage // entries below Start
		ObjectEnd int64
		Hash      chainhash.Hash
	}
	// RecoverProducers asks for the producer state up to the log end, answered by ProducersRecovered. Cut tells
	// that the log lost its end above To, so state held in memory is void above it.
	RecoverProducers struct {
		Fence     Fence
		ObjectEnd int64
		End       int64
	}
	// Activate says that the epoch is open: Entry joins the local lineage, ranges are to be sent from the object end.
	Activate struct {
		Fence   Fence
		Entry   lineage.Entry
		Lineage lineage.Lineage
	}
	// Advance says that everything below ObjectEnd is committed.
	Advance struct{ ObjectEnd int64 }
	// Feed says that ranges are to be sent again from the object end, under a new run.
	Feed struct {
		From int64
		Run  int64
	}
	// Deposed says that this broker leads no more: appends waiting above Kept have an unknown outcome.
	Deposed struct {
		Reason string
		// Kept is the offset below which everything is committed on the surviving branch as far as is known.
		Kept int64
	}
	// RequestElection asks the controller for an election, since this leader can't go on under its fence.
	RequestElection struct {
		Fence  Fence
		Reason string
	}
	// Truncate asks a follower to cut its log to At, or, where Reset is set, to begin it again, empty, at At with Hash
	// and Lineage. Answered by Cut.
	Truncate struct {
		Attempt int64
		Reset   bool
		At      int64
		Hash    chainhash.Hash
		Lineage lineage.Lineage
	}
	// Fetch says that there may be something to fetch, see Machine.Wanted.
	Fetch struct{ Attempt int64 }
	// Forget says that the partition is gone: its directory may be removed.
	Forget struct{}
)

func (Reconcile) effect()        {}
func (CheckHash) effect()        {}
func (Open) effect()             {}
func (RecoverProducers) effect() {}
func (Activate) effect()         {}
func (Advance) effect()          {}
func (Feed) effect()             {}
func (Deposed) effect()          {}
func (RequestElection) effect()  {}
func (Truncate) effect()         {}
func (Fetch) effect()            {}
func (Forget) effect()           {}
