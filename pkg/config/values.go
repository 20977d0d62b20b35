package config

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration that a person writes: "250ms", "1h30m", and
// also "7d" (a day is 24 hours) or "1d12h".
type Duration time.Duration

// Std returns the standard type.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// ParseDuration reads what [Duration.String] writes and everything that
// time.ParseDuration reads.
func ParseDuration(s string) (Duration, error) {
	text := strings.TrimSpace(s)
	negative := strings.HasPrefix(text, "-")
	days, rest, found := strings.Cut(strings.TrimPrefix(text, "-"), "d")
	if !found {
		std, err := time.ParseDuration(text)
		if err != nil {
			return 0, errDuration(s)
		}
		return Duration(std), nil
	}
	n, err := strconv.ParseUint(days, 10, 32)
	if err != nil || n > math.MaxInt64/uint64(24*time.Hour)-1 {
		return 0, errDuration(s)
	}
	total := time.Duration(n) * 24 * time.Hour
	if rest != "" {
		std, err := time.ParseDuration(rest)
		if err != nil || std < 0 || strings.HasPrefix(rest, "+") || total > math.MaxInt64-std {
			return 0, errDuration(s)
		}
		total += std
	}
	if negative {
		total = -total
	}
	return Duration(total), nil
}

func errDuration(s string) error {
	return fmt.Errorf("%q is not a duration such as 250ms, 30s, 1h30m or 7d", s)
}

// String is the shortest form that [ParseDuration] reads back: 1h30m, not
// 1h30m0s.
func (d Duration) String() string {
	std := time.Duration(d)
	if std == 0 {
		return "0s"
	}
	if std == math.MinInt64 {
		return std.String() // has no positive counterpart
	}
	sign := ""
	if std < 0 {
		sign, std = "-", -std
	}
	days := std / (24 * time.Hour)
	std -= days * 24 * time.Hour
	text := ""
	if days > 0 {
		text = strconv.FormatInt(int64(days), 10) + "d"
	}
	if std > 0 {
		rest := std.String()
		if std >= time.Minute && strings.HasSuffix(rest, "m0s") {
			rest = strings.TrimSuffix(rest, "0s")
		}
		if std >= time.Hour && strings.HasSuffix(rest, "h0m") {
			rest = strings.TrimSuffix(rest, "0m")
		}
		text += rest
	}
	return sign + text
}

// Set implements flag.Value.
func (d *Duration) Set(s string) error {
	v, err := ParseDuration(s)
	if err != nil {
		return err
	}
	*d = v
	return nil
}

// Get implements flag.Getter.
func (d *Duration) Get() any { return *d }

// MarshalText implements encoding.TextMarshaler, for JSON and YAML.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error { return d.Set(string(text)) }

// Size is a number of bytes that a person writes: "64MiB", "1.5GiB", "10MB",
// "4096". KiB, MiB, GiB, TiB are powers of 1024; kB, MB, GB, TB of 1000.
type Size int64

// The binary units.
const (
	KiB Size = 1 << (10 * (iota + 1))
	MiB
	GiB
	TiB
)

var sizeUnits = []struct {
	name string
	size Size
}{
	{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB},
	{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"B", 1},
}

// Bytes returns the number of bytes.
func (s Size) Bytes() int64 { return int64(s) }

// ParseSize reads what [Size.String] writes. Sizes are never negative.
func ParseSize(text string) (Size, error) {
	number, unit := strings.TrimSpace(text), Size(1)
	for _, u := range sizeUnits {
		if rest, ok := cutSuffixFold(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.size
			break
		}
	}
	if n, err := strconv.ParseUint(number, 10, 63); err == nil {
		if n > uint64(math.MaxInt64/unit) {
			return 0, errSize(text)
		}
		return Size(n) * unit, nil
	}
	if number == "" || strings.Trim(number, "0123456789.") != "" {
		return 0, errSize(text) // no signs, exponents, hex or infinities
	}
	f, err := strconv.ParseFloat(number, 64)
	f *= float64(unit)
	if err != nil || f != math.Trunc(f) || f >= math.MaxInt64 {
		return 0, errSize(text)
	}
	return Size(f), nil
}

func cutSuffixFold(s, suffix string) (string, bool) {
	cut := len(s) - len(suffix)
	if cut < 0 || !strings.EqualFold(s[cut:], suffix) {
		return s, false
	}
	return s[:cut], true
}

func errSize(s string) error {
	return fmt.Errorf("%q is not a size such as 4096, 512KiB, 64MiB or 1GiB", s)
}

// String is the largest binary unit that leaves a whole number.
func (s Size) String() string {
	for _, u := range sizeUnits[:4] {
		if s != 0 && s%u.size == 0 {
			return strconv.FormatInt(int64(s/u.size), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B"
}

// Set implements flag.Value.
func (s *Size) Set(text string) error {
	v, err := ParseSize(text)
	if err != nil {
		return err
	}
	*s = v
	return nil
}

// Get implements flag.Getter.
func (s *Size) Get() any { return *s }

// MarshalText implements encoding.TextMarshaler, for JSON and YAML.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Size) UnmarshalText(text []byte) error { return s.Set(string(text)) }

// Strings is a list of strings: separated by commas in a flag and in the
// environment, a sequence in YAML. Setting it replaces the list.
type Strings []string

// String joins the list with commas.
func (s Strings) String() string { return strings.Join(s, ",") }

// Set implements flag.Value. Spaces around elements are dropped; an empty
// string is an empty list, an empty element an error.
func (s *Strings) Set(text string) error {
	if strings.TrimSpace(text) == "" {
		*s = nil
		return nil
	}
	return s.SetList(strings.Split(text, ","))
}

// SetList replaces the list.
func (s *Strings) SetList(list []string) error {
	out := make(Strings, 0, len(list))
	for _, element := range list {
		element = strings.TrimSpace(element)
		if element == "" {
			return errors.New("the list has an empty element")
		}
		if strings.Contains(element, ",") {
			return fmt.Errorf("the element %q contains a comma", element)
		}
		out = append(out, element)
	}
	*s = out
	return nil
}

// Get implements flag.Getter.
func (s *Strings) Get() any { return []string(*s) }

// stars is what a set secret prints as.
const stars = "********"

// Secret is a string that no printer shows: String, slog, JSON, YAML and fmt
// with any verb print stars. Only [Secret.Reveal] gives it away.
type Secret struct{ value string }

// NewSecret wraps a value.
func NewSecret(value string) Secret { return Secret{value} }

// Reveal returns the value.
func (s Secret) Reveal() string { return s.value }

// IsSet tells whether there is a value.
func (s Secret) IsSet() bool { return s.value != "" }

// String prints stars, or nothing for an unset secret.
func (s Secret) String() string {
	if s.value == "" {
		return ""
	}
	return stars
}

// Format implements fmt.Formatter, so that %#v shows stars too.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText implements encoding.TextMarshaler: stars.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalJSON implements json.Marshaler: stars.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// MarshalYAML implements the YAML marshaler: stars.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }

// Set implements flag.Value.
func (s *Secret) Set(text string) error {
	if text == stars {
		return errors.New("the stars of a printed configuration are not a secret")
	}
	s.value = text
	return nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Secret) UnmarshalText(text []byte) error { return s.Set(string(text)) }

// Get implements flag.Getter; it returns the Secret, not its value.
func (s *Secret) Get() any { return *s }

// DurationVar registers a [Duration] flag with its default.
func DurationVar(fs *flag.FlagSet, p *Duration, name string, def time.Duration, usage string) {
	*p = Duration(def)
	fs.Var(p, name, usage)
}

// SizeVar registers a [Size] flag with its default.
func SizeVar(fs *flag.FlagSet, p *Size, name string, def Size, usage string) {
	*p = def
	fs.Var(p, name, usage)
}

// StringsVar registers a [Strings] flag with its default.
func StringsVar(fs *flag.FlagSet, p *Strings, name string, def []string, usage string) {
	*p = append(Strings(nil), def...)
	fs.Var(p, name, usage)
}

// SecretVar registers a [Secret] flag; a secret has no default.
func SecretVar(fs *flag.FlagSet, p *Secret, name, usage string) {
	*p = Secret{}
	fs.Var(p, name, usage)
}

type enum struct {
	p       *string
	allowed []string
}

func (e *enum) String() string {
	if e.p == nil {
		return ""
	}
	return *e.p
}

func (e *enum) Set(s string) error {
	for _, a := range e.allowed {
		if s == a {
			*e.p = s
			return nil
		}
	}
	return fmt.Errorf("%q is not one of %s", s, strings.Join(e.allowed, ", "))
}

func (e *enum) Get() any { return *e.p }

// EnumVar registers a string flag that takes one of allowed.
func EnumVar(fs *flag.FlagSet, p *string, name, def string, allowed []string, usage string) {
	*p = def
	fs.Var(&enum{p, allowed}, name, usage+" (one of "+strings.Join(allowed, ", ")+")")
}
