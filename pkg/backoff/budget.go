package backoff

import "sync"

// Budget bounds retries across many calls: each first attempt earns a
// fraction of a retry, each retry costs one. When most calls fail, retries
// then add at most that fraction to the load instead of multiplying it.
//
// Safe for concurrent use; share one per target.
type Budget struct {
	ratio float64
	limit float64

	mu     sync.Mutex // guards tokens
	tokens float64
}

// NewBudget returns a full budget. ratio is the number of retries earned per
// first attempt (0.1 = one in ten), burst the number that can be saved up;
// both are raised to 0 if negative.
func NewBudget(ratio float64, burst int) *Budget {
	limit := float64(max(burst, 0))
	return &Budget{ratio: max(ratio, 0), limit: limit, tokens: limit}
}

// Earn credits one first attempt.
func (b *Budget) Earn() {
	b.mu.Lock()
	b.tokens = min(b.tokens+b.ratio, b.limit)
	b.mu.Unlock()
}

// Spend takes one retry and reports whether there was one.
func (b *Budget) Spend() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
