package topicconfig

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseReadsEverySettingOverTheDefaults(t *testing.T) {
	c, err := Parse(nil)
	require.NoError(t, err)
	assert.Equal(t, Default(), c)
	assert.Empty(t, c.Overrides())

	c, err = Parse(map[string]string{
		"remote.wal.enable": "true", "commit.rule": "object", "cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1",
		"min.ack.level": "object", "flush": "always", "max.batch.bytes": "8MiB", "segment.bytes": "1GiB",
		"wal.max.unuploaded.bytes": "16777216", "producer.expiry": "1d12h", "leader.return.grace": "90s",
	})
	require.NoError(t, err)
	assert.Equal(t, Config{
		MinAckLevel: LevelObject, Flush: FlushAlways, MaxBatchBytes: 8 << 20, SegmentBytes: 1 << 30,
		WALMaxUnuploadedBytes: 16 << 20, ProducerExpiry: 36 * time.Hour, LeaderReturnGrace: 90 * time.Second,
	}, c)
	assert.Equal(t, map[string]string{
		"min.ack.level": "OBJECT", "flush": "always", "max.batch.bytes": "8MiB", "segment.bytes": "1GiB",
		"wal.max.unuploaded.bytes": "16MiB", "producer.expiry": "36h", "leader.return.grace": "1m30s",
	}, c.Overrides())
	again, err := Parse(c.Overrides())
	require.NoError(t, err)
	assert.Equal(t, c, again)
	again, err = Parse(c.Values())
	require.NoError(t, err)
	assert.Equal(t, c, again)
}

func TestParseNamesSettingValueAndWhatIsAllowed(t *testing.T) {
	for _, tc := range []struct{ name, value, want string }{
		{"remote.wal.enable", "false", `topic setting remote.wal.enable = "false" is not allowed (allowed: true)`},
		{"commit.rule", "replicas", `topic setting commit.rule = "replicas" is not allowed (allowed: object)`},
		{"cleanup.policy", "compact", `topic setting cleanup.policy = "compact" is not allowed (allowed: delete)`},
		{"retention.ms", "1000", `topic setting retention.ms = "1000" is not allowed (allowed: -1)`},
		{"retention.bytes", "0", `topic setting retention.bytes = "0" is not allowed (allowed: -1)`},
		{"min.ack.level", "REPLICAS", `topic setting min.ack.level = "REPLICAS" is not allowed (allowed: LEADER, OBJECT)`},
		{"flush", "sometimes", `topic setting flush = "sometimes" is not allowed (allowed: os, always)`},
		{"max.batch.bytes", "1023", `topic setting max.batch.bytes = "1023" is not allowed (allowed: 1KiB to 8MiB)`},
		{"max.batch.bytes", "8388609", `topic setting max.batch.bytes = "8388609" is not allowed (allowed: 1KiB to 8MiB)`},
		{"max.batch.bytes", "1e6", `topic setting max.batch.bytes = "1e6" is not allowed (allowed: 1KiB to 8MiB)`},
		{"max.batch.bytes", "", `topic setting max.batch.bytes = "" is not allowed (allowed: 1KiB to 8MiB)`},
		{"segment.bytes", "9223372036854775807GiB", `topic setting segment.bytes = "9223372036854775807GiB" is not allowed (allowed: 1MiB to 1GiB)`},
		{"wal.max.unuploaded.bytes", "-1", `topic setting wal.max.unuploaded.bytes = "-1" is not allowed (allowed: 1MiB to 4GiB)`},
		{"producer.expiry", "59s", `topic setting producer.expiry = "59s" is not allowed (allowed: 1m to 30d)`},
		{"producer.expiry", "31d", `topic setting producer.expiry = "31d" is not allowed (allowed: 1m to 30d)`},
		{"producer.expiry", "65535d2562047h", `topic setting producer.expiry = "65535d2562047h" is not allowed (allowed: 1m to 30d)`},
		{"leader.return.grace", "11m", `topic setting leader.return.grace = "11m" is not allowed (allowed: 0s to 10m, session)`},
		{"leader.return.grace", "-1s", `topic setting leader.return.grace = "-1s" is not allowed (allowed: 0s to 10m, session)`},
	} {
		_, err := Parse(map[string]string{tc.name: tc.value})
		require.EqualError(t, err, tc.want)
		var e *Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, tc.name, e.Name)
		assert.Equal(t, tc.value, e.Value)
	}
	_, err := Parse(map[string]string{"segment.byte": "1"})
	require.EqualError(t, err, `unknown topic setting "segment.byte" (known: `+strings.Join(Names(), ", ")+`)`)
}

func TestParseReportsAllProblemsAtOnce(t *testing.T) {
	_, err := Parse(map[string]string{"zzz": "1", "flush": "no", "commit.rule": "either"})
	var joined interface{ Unwrap() []error }
	require.ErrorAs(t, err, &joined)
	assert.Len(t, joined.Unwrap(), 3)
	assert.True(t, strings.HasPrefix(err.Error(), "topic setting commit.rule"), "in order of name")
}

func TestParseRefusesSettingsThatContradictEachOther(t *testing.T) {
	_, err := Parse(map[string]string{"max.batch.bytes": "4MiB", "segment.bytes": "2MiB", "wal.max.unuploaded.bytes": "1MiB"})
	require.Error(t, err)
	assert.Contains(t, err.Error(), `segment.bytes = "2MiB" is not allowed (allowed: at least max.batch.bytes = 4MiB)`)
	assert.Contains(t, err.Error(), `wal.max.unuploaded.bytes = "1MiB" is not allowed (allowed: at least max.batch.bytes = 4MiB)`)
}

func TestReturnGraceIsWaitedOnlyWhereAcksDependOnTheLeader(t *testing.T) {
	parse := func(values map[string]string) Config {
		c, err := Parse(values)
		require.NoError(t, err)
		return c
	}
	assert.Equal(t, 6*time.Second, parse(nil).ReturnGrace(6*time.Second))
	assert.Equal(t, time.Duration(0), parse(map[string]string{"leader.return.grace": "0"}).ReturnGrace(6*time.Second))
	assert.Equal(t, time.Minute, parse(map[string]string{"leader.return.grace": "1m"}).ReturnGrace(6*time.Second))
	assert.Equal(t, time.Duration(0),
		parse(map[string]string{"leader.return.grace": "1m", "min.ack.level": "OBJECT"}).ReturnGrace(6*time.Second))
}

func TestDescribeListsEverySettingWithADefaultThatParses(t *testing.T) {
	var names []string
	for _, d := range Describe() {
		names = append(names, d.Name)
		assert.NotEmpty(t, d.Allowed, d.Name)
		assert.NotEmpty(t, d.Meaning, d.Name)
		c, err := Parse(map[string]string{d.Name: d.Default})
		require.NoError(t, err, d.Name)
		assert.Empty(t, c.Overrides(), d.Name)
	}
	slices.Sort(names)
	assert.Equal(t, Names(), names)
	assert.Equal(t, names, slices.Sorted(maps.Keys(Default().Values())))
}

func TestValidateName(t *testing.T) {
	for _, name := range []string{"a", "Quakes.2026_v-1", "...", strings.Repeat("x", 249)} {
		assert.NoError(t, ValidateName(name))
	}
	for _, name := range []string{"", ".", "..", "a b", "a/b", "é", "a\x00", strings.Repeat("x", 250)} {
		err := ValidateName(name)
		var e *NameError
		require.ErrorAs(t, err, &e, "%q", name)
		assert.Contains(t, err.Error(), "1 to 249 characters of [a-zA-Z0-9._-]")
	}
}

func FuzzParse(f *testing.F) {
	for _, d := range Describe() {
		f.Add(d.Name, d.Default)
	}
	f.Add("segment.bytes", "00001GiB")
	f.Fuzz(func(t *testing.T, name, value string) {
		c, err := Parse(map[string]string{name: value})
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("untyped %v", err)
			}
			return
		}
		again, err := Parse(c.Overrides())
		if err != nil || again != c {
			t.Fatalf("%q = %q: %v does not come back: %v, %v", name, value, c, again, err)
		}
	})
}
