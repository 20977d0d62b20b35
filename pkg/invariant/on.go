//go:build invariants || race

package invariant

// Enabled tells whether assertions are compiled in.
const Enabled = true

// Assert panics with a *[Violation] if cond is false. format and args are as
// for fmt.Sprintf and say which claim failed. It does nothing when [Enabled]
// is false, but its arguments are still evaluated.
func Assert(cond bool, format string, args ...any) {
	if !cond {
		violate(nil, format, args)
	}
}

// Check calls fn and panics with a *[Violation] if it returns an error. fn is
// not called when [Enabled] is false, so it must have no side effects.
func Check(fn func() error, format string, args ...any) {
	if err := fn(); err != nil {
		violate(err, format, args)
	}
}
