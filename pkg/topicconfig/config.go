package topicconfig

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Level is the least durability that a topic's appends wait for.
type Level uint8

const (
	// LevelLeader is satisfied once the record is in the leader's log.
	LevelLeader Level = iota
	// LevelObject is satisfied once the record is in the bucket and committed.
	LevelObject
)

// String is the name used in settings: LEADER or OBJECT.
func (l Level) String() string {
	if l == LevelObject {
		return "OBJECT"
	}
	return "LEADER"
}

// Flush says when the leader's log reaches the disk.
type Flush uint8

const (
	// FlushOS leaves it to the operating system: a LEADER ack survives the end
	// of the process, not of the machine.
	FlushOS Flush = iota
	// FlushAlways syncs before a LEADER ack is given.
	FlushAlways
)

// String is the name used in settings: os or always.
func (f Flush) String() string {
	if f == FlushAlways {
		return "always"
	}
	return "os"
}

// Config is the settings of one topic, complete with defaults. The settings
// that allow a single value so far have no field.
type Config struct {
	// MinAckLevel is the level an append without one waits for; appends that
	// ask for less are refused.
	MinAckLevel Level
	// Flush is when the leader syncs.
	Flush Flush
	// MaxBatchBytes bounds one record batch as stored, in bytes.
	MaxBatchBytes int64
	// SegmentBytes is the size at which a broker rolls a local log segment, in
	// bytes.
	SegmentBytes int64
	// WALMaxUnuploadedBytes bounds the part of a partition's log that is not in
	// the bucket yet, in bytes: past it appends are refused.
	WALMaxUnuploadedBytes int64
	// ProducerExpiry is how long an idle producer's state is kept.
	ProducerExpiry time.Duration
	// LeaderReturnGrace is how long a leader that went away is waited for,
	// negative for the broker session timeout. Use [Config.ReturnGrace].
	LeaderReturnGrace time.Duration
}

// Default returns the settings of a topic for which nothing was set.
func Default() Config {
	return Config{
		MinAckLevel:           LevelLeader,
		Flush:                 FlushOS,
		MaxBatchBytes:         1 << 20,
		SegmentBytes:          128 << 20,
		WALMaxUnuploadedBytes: 64 << 20,
		ProducerExpiry:        24 * time.Hour,
		LeaderReturnGrace:     -1,
	}
}

// ReturnGrace is how long the controller waits for a leader whose session ended
// before it elects another (design review F3): nobody's acks depend on its
// return where every ack is OBJECT, so there it is 0.
func (c Config) ReturnGrace(sessionTimeout time.Duration) time.Duration {
	switch {
	case c.MinAckLevel == LevelObject:
		return 0
	case c.LeaderReturnGrace < 0:
		return sessionTimeout
	}
	return c.LeaderReturnGrace
}

// Parse reads settings by name over the defaults. Every problem found is in the
// error, joined, each a [*Error].
func Parse(values map[string]string) (Config, error) {
	c := Default()
	var problems []error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		value := values[name]
		s, ok := settingsByName[name]
		if !ok {
			problems = append(problems, &Error{Name: name, Value: value, Unknown: true, Allowed: Names()})
			continue
		}
		if !s.set(&c, value) {
			problems = append(problems, &Error{Name: name, Value: value, Allowed: s.allowed})
		}
	}
	if len(problems) == 0 {
		problems = c.contradictions()
	}
	if err := errors.Join(problems...); err != nil {
		return Config{}, err
	}
	return c, nil
}

// contradictions are settings that are fine alone and not together.
func (c Config) contradictions() []error {
	var problems []error
	atLeastBatch := func(name string, have int64) {
		if have < c.MaxBatchBytes {
			problems = append(problems, &Error{Name: name, Value: formatSize(have),
				Allowed: []string{"at least max.batch.bytes = " + formatSize(c.MaxBatchBytes)}})
		}
	}
	atLeastBatch(nameSegmentBytes, c.SegmentBytes)
	atLeastBatch(nameWALMaxUnuploaded, c.WALMaxUnuploadedBytes)
	return problems
}

// Overrides returns what differs from the defaults, by name and in the
// canonical spelling: what the metadata log stores.
func (c Config) Overrides() map[string]string {
	out := map[string]string{}
	for i := range settings {
		s := &settings[i]
		if v := s.get(c); v != s.def {
			out[s.name] = v
		}
	}
	return out
}

// Values returns every setting by name, defaults included.
func (c Config) Values() map[string]string {
	out := make(map[string]string, len(settings))
	for i := range settings {
		out[settings[i].name] = settings[i].get(c)
	}
	return out
}

// Names returns the names of all settings, sorted.
func Names() []string { return slices.Sorted(maps.Keys(settingsByName)) }

// Error is one setting that can't be used.
type Error struct {
	Name    string   // of the setting
	Value   string   // as given
	Allowed []string // values or ranges; the known names where the name is unknown
	Unknown bool     // the name is unknown
}

// Error names the setting, the value and what is allowed.
func (e *Error) Error() string {
	if e.Unknown {
		return fmt.Sprintf("unknown topic setting %q (known: %s)", e.Name, strings.Join(e.Allowed, ", "))
	}
	return fmt.Sprintf("topic setting %s = %q is not allowed (allowed: %s)", e.Name, e.Value, strings.Join(e.Allowed, ", "))
}
