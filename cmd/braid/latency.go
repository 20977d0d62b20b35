package main

import (
	"math/rand/v2"
	"slices"
	"time"
)

// maxSamples bounds the latencies kept; past it they are a random sample.
const maxSamples = 1 << 20

// latencies are measured times. It belongs to one goroutine.
type latencies struct {
	samples []time.Duration
	seen    int
	sorted  bool
}

func (l *latencies) add(d time.Duration) {
	l.seen++
	l.sorted = false
	if len(l.samples) < maxSamples {
		l.samples = append(l.samples, d)
	} else if i := rand.IntN(l.seen); i < maxSamples {
		l.samples[i] = d
	}
}

// ms is a quantile, 0 to 1, in milliseconds: the smallest sample that at least
// that share lies at or below. 0 without samples.
func (l *latencies) ms(q float64) float64 {
	if len(l.samples) == 0 {
		return 0
	}
	if !l.sorted {
		slices.Sort(l.samples)
		l.sorted = true
	}
	i := int(q * float64(len(l.samples)))
	if float64(i) == q*float64(len(l.samples)) && i > 0 {
		i--
	}
	return millis(l.samples[min(i, len(l.samples)-1)])
}

// millis is a duration in milliseconds, to a hundredth.
func millis(d time.Duration) float64 {
	return float64(d.Round(10*time.Microsecond)) / float64(time.Millisecond)
}
