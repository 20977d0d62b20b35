package main

import (
	"bytes"
	"flag"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/topicconfig"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/rlm"
)

func TestTheReferenceHasEverySetting(t *testing.T) {
	var out bytes.Buffer
	require.Equal(t, exitOK, run(t.Context(), &console{stdout: &out, stderr: t.Output()}, []string{"reference"}))
	text := out.String()
	require.Equal(t, reference(), text, "the same each time")
	for name, s := range map[string]config.Section{"BROKER": new(broker.Config), "RLM": new(rlm.Config), "METADATA": new(metadata.Config)} {
		fs := flag.NewFlagSet(name, flag.ContinueOnError)
		s.RegisterFlags("", fs)
		fs.VisitAll(func(f *flag.Flag) {
			require.Contains(t, text, "| `"+f.Name+"` | `"+config.EnvName(name, f.Name)+"` |")
			require.NotEmpty(t, strings.TrimSpace(f.Usage), "%s %s says nothing", name, f.Name)
		})
	}
	for _, d := range topicconfig.Describe() {
		require.Contains(t, text, "| `"+d.Name+"` |")
	}
	require.Equal(t, exitUsage, run(t.Context(), &console{stdout: &out, stderr: t.Output()}, []string{"reference", "x"}))
	require.NotContains(t, overview(), "reference")
}
