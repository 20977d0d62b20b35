//go:build !race

package torture_test

// raceEnabled says that the test runs with the race detector.
const raceEnabled = false
