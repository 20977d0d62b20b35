package config

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"strconv"
)

// Section is a part of a configuration.
type Section interface {
	// RegisterFlags sets the defaults and registers every field under prefix,
	// composed by [Key].
	RegisterFlags(prefix string, fs *flag.FlagSet)
	// Validate reports everything that is wrong, joined, as *[FieldError]s
	// whose fields are relative to the section ([Prefix] makes them absolute).
	Validate() error
}

// Key joins a prefix and a name: Key("grpc", "listen-address") is
// "grpc.listen-address"; with an empty prefix it is the name.
func Key(prefix, name string) string {
	if prefix == "" {
		return name
	}
	return prefix + "." + name
}

// ErrInvalid is wrapped by every error about a wrong value or key.
var ErrInvalid = errors.New("invalid configuration")

// FieldError says which field has a wrong value and what would be right.
type FieldError struct {
	// Field is the key, relative to the section until [Prefix] completes it.
	Field string
	// Value is what was given, printed with %v.
	Value any
	// Allowed completes the sentence "must be …".
	Allowed string
	// Source tells where the value came from, for instance "file a.yaml, line
	// 3"; set by [Load].
	Source string
}

// Error implements error.
func (e *FieldError) Error() string {
	source := ""
	if e.Source != "" {
		source = " (" + e.Source + ")"
	}
	return fmt.Sprintf("%s: %q%s: must be %s", e.Field, fmt.Sprint(e.Value), source, e.Allowed)
}

// Unwrap returns [ErrInvalid].
func (e *FieldError) Unwrap() error { return ErrInvalid }

// Invalid makes a *[FieldError]; allowed completes "must be …".
func Invalid(field string, value any, allowed string) error {
	return &FieldError{Field: field, Value: value, Allowed: allowed}
}

// Check is nil if ok, else the error of [Invalid]: for lists of checks inside
// errors.Join.
func Check(ok bool, field string, value any, allowed string) error {
	if ok {
		return nil
	}
	return Invalid(field, value, allowed)
}

// CheckAddress reports a value that isn't host:port with a numeric port (the
// host may be empty, the port 0).
func CheckAddress(field, value string) error {
	_, port, err := net.SplitHostPort(value)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	return Check(err == nil, field, value, "host:port with a port from 0 to 65535")
}

// Prefix puts a section's prefix before the field of every [FieldError] in
// err, keeping other errors as they are. It returns nil for nil.
func Prefix(prefix string, err error) error {
	if err == nil {
		return nil
	}
	var out []error
	for _, e := range flatten(err) {
		if f, ok := e.(*FieldError); ok { //nolint:errorlint // flatten returns leaves
			moved := *f
			moved.Field = Key(prefix, f.Field)
			e = &moved
		}
		out = append(out, e)
	}
	return errors.Join(out...)
}

func flatten(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var out []error
		for _, e := range joined.Unwrap() {
			out = append(out, flatten(e)...)
		}
		return out
	}
	return []error{err}
}
