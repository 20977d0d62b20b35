package config_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/braidlog/braid/pkg/config"
)

func TestDurations(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"250ms": 250 * time.Millisecond, "7d": 168 * time.Hour, "1d12h": 36 * time.Hour,
		"-2d1h": -49 * time.Hour, "1h30m": 90 * time.Minute, "0s": 0, "1m30s": 90 * time.Second,
	} {
		d, err := config.ParseDuration(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, d.Std(), text)
		again, err := config.ParseDuration(d.String())
		require.NoError(t, err)
		assert.Equal(t, d, again)
	}
	for _, text := range []string{"", "d", "5", "1x", "1d-1h", "99999999999d", "1d1d", "+1d+1h", "106751d24h"} {
		_, err := config.ParseDuration(text)
		assert.Error(t, err, text)
	}
	assert.Equal(t, "1h30m", config.Duration(90*time.Minute).String())
	assert.Equal(t, "2h", config.Duration(2*time.Hour).String())
	assert.Equal(t, "1d5m", config.Duration(24*time.Hour+5*time.Minute).String())
	assert.Equal(t, "0s", config.Duration(0).String())
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]config.Size{
		"4096": 4 * config.KiB, "64MiB": 64 * config.MiB, "1.5GiB": 1536 * config.MiB, "10 MB": 10e6,
		"0": 0, "7B": 7, "1kB": 1000, "64mib": 64 * config.MiB, "2TiB": 2 * config.TiB, "9223372036854775807": math.MaxInt64,
	} {
		s, err := config.ParseSize(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, s, text)
		again, err := config.ParseSize(s.String())
		require.NoError(t, err, s.String())
		assert.Equal(t, s, again)
	}
	for _, text := range []string{"", "-1", "MiB", "1e3", "0x10", "inf", "NaN", "1.3B", "9999999TiB", "1MiBB", "9223372036854775808"} {
		_, err := config.ParseSize(text)
		assert.Error(t, err, text)
	}
	assert.Equal(t, "1536MiB", (1536 * config.MiB).String())
	assert.Equal(t, "0B", config.Size(0).String())
}

func FuzzValuesRoundTrip(f *testing.F) {
	f.Add("1d2h3m")
	f.Add("12.5GiB")
	f.Add("-106751d")
	f.Fuzz(func(t *testing.T, text string) {
		if d, err := config.ParseDuration(text); err == nil {
			again, err := config.ParseDuration(d.String())
			if err != nil || again != d {
				t.Fatalf("%q: %v printed as %s, read back as %v, %v", text, time.Duration(d), d, again, err)
			}
		}
		if s, err := config.ParseSize(text); err == nil {
			again, err := config.ParseSize(s.String())
			if err != nil || again != s || s < 0 {
				t.Fatalf("%q: %d printed as %s, read back as %v, %v", text, int64(s), s, again, err)
			}
		}
	})
}

func TestSecretNeverShows(t *testing.T) {
	s := config.NewSecret("hunter2")
	type holder struct{ Token config.Secret }
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "token", s, "holder", holder{s})
	asJSON, err := json.Marshal(holder{s})
	require.NoError(t, err)
	asYAML, err := yaml.Marshal(holder{s})
	require.NoError(t, err)
	for _, text := range []string{
		log.String(), string(asJSON), string(asYAML), s.String(),
		fmt.Sprintf("%v %+v %#v %s %q %x", s, s, s, s, s, s), fmt.Sprintf("%v %+v %#v", holder{s}, holder{s}, holder{s}),
	} {
		assert.NotContains(t, text, "hunter2")
		assert.NotContains(t, text, fmt.Sprintf("%x", "hunter2"))
		assert.Contains(t, text, "********")
	}
	assert.Equal(t, "hunter2", s.Reveal())
	assert.Empty(t, config.Secret{}.String())
}
