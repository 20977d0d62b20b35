package topicconfig

import (
	"math"
	"strconv"
	"strings"
	"time"
)

const (
	nameSegmentBytes     = "segment.bytes"
	nameWALMaxUnuploaded = "wal.max.unuploaded.bytes"
	graceDefault         = "session"
)

// setting is one row of the table that everything else here follows from.
type setting struct {
	name    string
	def     string // canonical
	allowed []string
	meaning string
	set     func(*Config, string) bool
	get     func(Config) string
}

// Description is one setting as documentation shows it.
type Description struct {
	Name    string
	Default string
	Allowed string
	Meaning string
}

// Describe returns all settings in the order in which documentation lists them.
func Describe() []Description {
	out := make([]Description, len(settings))
	for i, s := range settings {
		out[i] = Description{Name: s.name, Default: s.def, Allowed: strings.Join(s.allowed, ", "), Meaning: s.meaning}
	}
	return out
}

var settings = []setting{
	only("remote.wal.enable", "true", "The leader streams its log to a remote-log manager. Topics without it are not built yet."),
	only("commit.rule", "object", "What lifts the high watermark: the committed object end. Other rules are not built yet."),
	only("cleanup.policy", "delete", "Compaction is not built."),
	only("retention.ms", "-1", "Nothing is deleted by age yet."),
	only("retention.bytes", "-1", "Nothing is deleted by size yet."),
	{
		name: "min.ack.level", def: "LEADER", allowed: []string{"LEADER", "OBJECT"},
		meaning: "The level that an append without one waits for; appends that ask for less are refused.",
		set: func(c *Config, v string) bool {
			return choose(&c.MinAckLevel, strings.ToUpper(strings.TrimSpace(v)), LevelLeader, LevelObject)
		},
		get: func(c Config) string { return c.MinAckLevel.String() },
	},
	{
		name: "flush", def: "os", allowed: []string{"os", "always"},
		meaning: "When the leader's log is synced: by the operating system, or before each LEADER ack.",
		set: func(c *Config, v string) bool {
			return choose(&c.Flush, strings.ToLower(strings.TrimSpace(v)), FlushOS, FlushAlways)
		},
		get: func(c Config) string { return c.Flush.String() },
	},
	size("max.batch.bytes", 1<<20, 1<<10, 8<<20, "Largest record batch, as stored.",
		func(c *Config) *int64 { return &c.MaxBatchBytes }),
	size(nameSegmentBytes, 128<<20, 1<<20, 1<<30, "Size at which a broker begins a new local segment file.",
		func(c *Config) *int64 { return &c.SegmentBytes }),
	size(nameWALMaxUnuploaded, 64<<20, 1<<20, 4<<30,
		"Limit of a partition's tail that is not in the bucket yet; past it appends of every level are refused.",
		func(c *Config) *int64 { return &c.WALMaxUnuploadedBytes }),
	{
		name: "producer.expiry", def: "24h", allowed: []string{"1m to 30d"},
		meaning: "How long the state of an idle idempotent producer is kept.",
		set: func(c *Config, v string) bool {
			return duration(&c.ProducerExpiry, v, time.Minute, 30*24*time.Hour)
		},
		get: func(c Config) string { return formatDuration(c.ProducerExpiry) },
	},
	{
		name: "leader.return.grace", def: graceDefault, allowed: []string{"0s to 10m", graceDefault},
		meaning: "How long a leader whose session ended is waited for before another is elected; \"" + graceDefault +
			"\" is the session timeout. Not waited for where min.ack.level is OBJECT.",
		set: func(c *Config, v string) bool {
			if strings.TrimSpace(v) == graceDefault {
				c.LeaderReturnGrace = -1
				return true
			}
			return duration(&c.LeaderReturnGrace, v, 0, 10*time.Minute)
		},
		get: func(c Config) string {
			if c.LeaderReturnGrace < 0 {
				return graceDefault
			}
			return formatDuration(c.LeaderReturnGrace)
		},
	},
}

var settingsByName = func() map[string]*setting {
	m := make(map[string]*setting, len(settings))
	for i := range settings {
		m[settings[i].name] = &settings[i]
	}
	return m
}()

// only is a setting that has a single value so far.
func only(name, value, meaning string) setting {
	return setting{
		name: name, def: value, allowed: []string{value}, meaning: meaning,
		set: func(_ *Config, v string) bool { return strings.TrimSpace(v) == value },
		get: func(Config) string { return value },
	}
}

func size(name string, def, low, high int64, meaning string, field func(*Config) *int64) setting {
	return setting{
		name: name, def: formatSize(def), allowed: []string{formatSize(low) + " to " + formatSize(high)}, meaning: meaning,
		set: func(c *Config, v string) bool {
			n, ok := parseSize(v)
			if ok = ok && n >= low && n <= high; ok {
				*field(c) = n
			}
			return ok
		},
		get: func(c Config) string { return formatSize(*field(&c)) },
	}
}

func choose[T interface{ String() string }](field *T, value string, among ...T) bool {
	for _, v := range among {
		if v.String() == value {
			*field = v
			return true
		}
	}
	return false
}

func duration(field *time.Duration, v string, low, high time.Duration) bool {
	d, ok := parseDuration(v)
	if ok = ok && d >= low && d <= high; ok {
		*field = d
	}
	return ok
}

var units = []struct {
	suffix string
	bytes  int64
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// parseSize reads whole bytes, plain or with KiB, MiB or GiB.
func parseSize(v string) (int64, bool) {
	v = strings.TrimSpace(v)
	scale := int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(v, u.suffix); ok {
			v, scale = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/scale {
		return 0, false
	}
	return n * scale, true
}

func formatSize(n int64) string {
	for _, u := range units {
		if n >= u.bytes && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.suffix
		}
	}
	return strconv.FormatInt(n, 10)
}

// parseDuration reads Go durations, and days in front of them: "36h", "7d",
// "1d12h".
func parseDuration(v string) (time.Duration, bool) {
	v = strings.TrimSpace(v)
	var total time.Duration
	if days, rest, ok := strings.Cut(v, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		if err != nil {
			return 0, false
		}
		total = time.Duration(n) * 24 * time.Hour
		if rest == "" {
			return total, true
		}
		v = rest
	}
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 {
		return 0, false
	}
	return total + d, true
}

// formatDuration is the shortest form that parseDuration reads: 24h, not
// 24h0m0s.
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
