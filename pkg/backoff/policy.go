package backoff

import "time"

// Policy says how long to wait between attempts. The zero value waits not at
// all; see [Default].
type Policy struct {
	// Initial is the upper bound of the delay after the first failure.
	Initial time.Duration
	// Max caps every delay; 0 means no cap.
	Max time.Duration
	// Multiplier is the growth per attempt; values below 1 count as 1.
	Multiplier float64
	// Jitter in [0, 1] is the share of each delay that is random: 0 waits
	// exactly the computed delay, 1 waits anything from 0 to it.
	Jitter float64
}

// Default suits calls between processes of a cluster: 50 ms growing to 5 s,
// half of each delay random.
var Default = Policy{Initial: 50 * time.Millisecond, Max: 5 * time.Second, Multiplier: 2, Jitter: 0.5}

// maxDelay keeps float arithmetic inside time.Duration.
const maxDelay = time.Duration(1<<62 - 1)

// Delay is the wait after the attempt-th failure, counted from 1. r in [0, 1)
// is the random number that places the delay inside the jittered part. Pure.
func (p Policy) Delay(attempt int, r float64) time.Duration {
	if p.Initial <= 0 {
		return 0
	}
	limit := float64(maxDelay)
	if p.Max > 0 {
		limit = float64(p.Max)
	}
	base := min(float64(p.Initial), limit)
	if p.Multiplier > 1 {
		// Stops at the cap, so a large attempt number costs nothing.
		for i := 1; i < attempt && base < limit; i++ {
			base *= p.Multiplier
		}
		base = min(base, limit)
	}
	jitter := min(max(p.Jitter, 0), 1)
	r = min(max(r, 0), 1)
	return time.Duration(base * (1 - jitter*(1-r)))
}
