package invariant

import "fmt"

// Violation is what a failed assertion panics with.
type Violation struct {
	// Message says which claim was false, with its values.
	Message string
	// Cause is the error of a failed [Check], nil for [Assert].
	Cause error
}

// Error implements error.
func (v *Violation) Error() string {
	if v.Cause != nil {
		return "invariant violated: " + v.Message + ": " + v.Cause.Error()
	}
	return "invariant violated: " + v.Message
}

// Unwrap returns the cause.
func (v *Violation) Unwrap() error { return v.Cause }

func violate(cause error, format string, args []any) {
	message := format
	if len(args) > 0 {
		message = fmt.Sprintf(format, args...)
	}
	panic(&Violation{Message: message, Cause: cause})
}
