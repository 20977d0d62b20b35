package partition

import "fmt"

// verdict is what a leader concludes from the verdict on a range that it sent.
func (m *Machine) verdict(v Verdict) []Effect {
	if m.state != Active || v.Run != m.run && v.Outcome != Accepted {
		// What an older run was refused for is history: the present run began at the object end.
		return nil
	}
	switch v.Outcome {
	case Accepted:
		if v.Fence != m.view.Fence {
			return nil
		}
		// The pair is the partition's state after the whole command, which may hold later ranges of ours too.
		return m.adopt(v.ObjectEnd, v.ObjectHash, false)
	case Gap, NotJudged:
		if v.Fence != m.view.Fence {
			return m.feed(nil)
		}
		return m.adopt(v.ObjectEnd, v.ObjectHash, true)
	case AlreadyCommitted:
		if v.Fence != m.view.Fence || !v.Opened {
			return m.deposedBy(v)
		}
		return m.adopt(v.ObjectEnd, v.ObjectHash, true)
	case Fenced:
		if v.Fence == m.view.Fence {
			// Our own fence, not open: our opening is not applied there any more. Only a rolled-back log says that.
			return m.resign("the metadata service does not hold this leader's opening")
		}
		return m.deposedBy(v)
	case ChainMismatch:
		return m.resign("the committed chain differs from this leader's log")
	case UnknownPartition:
		return m.resign("the metadata service does not know the partition")
	case Malformed:
		return m.resign("a range failed its checks at the remote-log manager")
	default:
		panic(fmt.Sprintf("partition: unknown outcome %d", v.Outcome))
	}
}

// deposedBy ends the leadership on a refusal by a newer fence. What lies below the object end and below the next
// epoch's start is committed, for it is on this leader's own branch.
func (m *Machine) deposedBy(v Verdict) []Effect {
	kept := min(v.ObjectEnd, m.log.End)
	if v.NextEpochStart >= 0 {
		kept = min(kept, v.NextEpochStart)
	}
	var fx []Effect
	if kept > m.committed {
		fx = append(fx, Advance{ObjectEnd: kept})
	}
	d := Deposed{Reason: "a newer fence", Kept: max(kept, m.committed)}
	m.leave(Idle, "")
	return append(fx, d)
}
