package topicconfig

import "fmt"

// MaxNameLength is the length of the longest topic name in bytes.
const MaxNameLength = 249

// NameError says why a name can't be a topic's.
type NameError struct {
	Name   string
	Reason string
}

// Error names the name, the reason and what is allowed.
func (e *NameError) Error() string {
	return fmt.Sprintf("topic name %q %s (allowed: 1 to %d characters of [a-zA-Z0-9._-], not \".\" or \"..\")",
		e.Name, e.Reason, MaxNameLength)
}

// ValidateName checks a topic's name: 1 to 249 characters of [a-zA-Z0-9._-],
// not "." or "..". The error is a [*NameError].
func ValidateName(name string) error {
	switch {
	case name == "":
		return &NameError{Name: name, Reason: "is empty"}
	case len(name) > MaxNameLength:
		return &NameError{Name: name[:32] + "…", Reason: fmt.Sprintf("has %d bytes", len(name))}
	case name == "." || name == "..":
		return &NameError{Name: name, Reason: "is a directory's"}
	}
	for i, r := range name {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '_', r == '-':
		default:
			return &NameError{Name: name, Reason: fmt.Sprintf("has %q at position %d", r, i)}
		}
	}
	return nil
}
