package config_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/config"
)

type grpcSection struct {
	ListenAddress string
	MaxMessage    config.Size
	DrainDelay    config.Duration
}

func (c *grpcSection) RegisterFlags(prefix string, fs *flag.FlagSet) {
	fs.StringVar(&c.ListenAddress, config.Key(prefix, "listen-address"), "127.0.0.1:0", "`address` to serve on")
	config.SizeVar(fs, &c.MaxMessage, config.Key(prefix, "max-message"), 16*config.MiB, "largest message")
	config.DurationVar(fs, &c.DrainDelay, config.Key(prefix, "drain-delay"), 5*time.Second, "wait before the drain")
}

func (c *grpcSection) Validate() error {
	return errors.Join(
		config.CheckAddress("listen-address", c.ListenAddress),
		config.Check(c.MaxMessage >= config.MiB, "max-message", c.MaxMessage, "at least 1MiB"),
	)
}

type sample struct {
	GRPC     grpcSection
	Metadata config.Strings
	Token    config.Secret
	Mode     string
	Workers  int
	Verbose  bool
}

func (c *sample) RegisterFlags(prefix string, fs *flag.FlagSet) {
	c.GRPC.RegisterFlags(config.Key(prefix, "grpc"), fs)
	config.StringsVar(fs, &c.Metadata, config.Key(prefix, "metadata.addresses"), nil, "metadata service addresses")
	config.SecretVar(fs, &c.Token, config.Key(prefix, "auth.token"), "token shown to peers")
	config.EnumVar(fs, &c.Mode, config.Key(prefix, "mode"), "auto", []string{"auto", "inline"}, "replication mode")
	fs.IntVar(&c.Workers, config.Key(prefix, "workers"), 4, "number of workers")
	fs.BoolVar(&c.Verbose, config.Key(prefix, "verbose"), false, "say more")
}

func (c *sample) Validate() error {
	return errors.Join(
		config.Prefix("grpc", c.GRPC.Validate()),
		config.Check(c.Workers > 0, "workers", c.Workers, "at least 1"),
	)
}

type world struct {
	file string
	env  map[string]string
	args []string
}

func (w world) load(t *testing.T) (*sample, *config.Loaded, string, error) {
	t.Helper()
	var out bytes.Buffer
	cfg := new(sample)
	args := w.args
	if w.file != "" {
		args = append([]string{"--config.file=c.yaml"}, args...)
	}
	loaded, err := config.Load("broker", cfg, args, config.Options{
		LookupEnv: func(k string) (string, bool) { v, ok := w.env[k]; return v, ok },
		ReadFile: func(name string) ([]byte, error) {
			if name != "c.yaml" {
				return nil, fs.ErrNotExist
			}
			return []byte(w.file), nil
		},
		Output: &out,
	})
	return cfg, loaded, out.String(), err
}

func TestPrecedenceIsDefaultFileEnvFlag(t *testing.T) {
	const file, env, arg = "grpc: {listen-address: 'file:1'}", "env:2", "--grpc.listen-address=flag:3"
	for bits := range 8 {
		w, want, source := world{}, "127.0.0.1:0", ""
		if bits&1 != 0 {
			w.file, want, source = file, "file:1", "file c.yaml, line 1"
		}
		if bits&2 != 0 {
			w.env, want, source = map[string]string{"BROKER_GRPC_LISTEN_ADDRESS": env}, env, "environment BROKER_GRPC_LISTEN_ADDRESS"
		}
		if bits&4 != 0 {
			w.args, want, source = []string{arg}, "flag:3", "flag --grpc.listen-address"
		}
		t.Run(fmt.Sprintf("file=%t,env=%t,flag=%t", bits&1 != 0, bits&2 != 0, bits&4 != 0), func(t *testing.T) {
			cfg, loaded, _, err := w.load(t)
			require.NoError(t, err)
			assert.Equal(t, want, cfg.GRPC.ListenAddress)
			assert.Equal(t, source, loaded.Sources["grpc.listen-address"])
		})
	}
}

func TestFileShapes(t *testing.T) {
	cfg, _, _, err := world{file: `
grpc.max-message: 2MiB
grpc:
  drain-delay: 1m
metadata:
  addresses: [a:1, b:2]
auth:
workers: 9
verbose: true
`}.load(t)
	require.NoError(t, err)
	assert.Equal(t, 2*config.MiB, cfg.GRPC.MaxMessage)
	assert.Equal(t, time.Minute, cfg.GRPC.DrainDelay.Std())
	assert.Equal(t, config.Strings{"a:1", "b:2"}, cfg.Metadata)
	assert.Equal(t, 9, cfg.Workers)
	assert.True(t, cfg.Verbose)
}

func TestTheFilesNameMayComeFromTheEnvironment(t *testing.T) {
	cfg := new(sample)
	_, err := config.Load("broker", cfg, nil, config.Options{
		LookupEnv: func(k string) (string, bool) { return "/etc/c.yaml", k == "BROKER_CONFIG_FILE" },
		ReadFile: func(name string) ([]byte, error) {
			assert.Equal(t, "/etc/c.yaml", name)
			return []byte("workers: 11"), nil
		},
	})
	require.NoError(t, err)
	assert.Equal(t, 11, cfg.Workers)
}

func TestListsReplaceEachOther(t *testing.T) {
	cfg, _, _, err := world{file: "metadata: {addresses: [a:1]}", env: map[string]string{"BROKER_METADATA_ADDRESSES": "b:2, c:3"}}.load(t)
	require.NoError(t, err)
	assert.Equal(t, config.Strings{"b:2", "c:3"}, cfg.Metadata)
}

func TestEmptyFileSetsNothing(t *testing.T) {
	for _, file := range []string{"\n", "# only a comment\n", "---\n"} {
		cfg, _, _, err := world{file: file}.load(t)
		require.NoError(t, err, "%q", file)
		assert.Equal(t, 4, cfg.Workers)
	}
}

func TestBadInputIsNamed(t *testing.T) {
	tests := map[string]struct {
		world
		want []string
	}{
		"unknown key in file":      {world{file: "workers: 1\ngrpc: {listen-adress: 'a:1'}"}, []string{"c.yaml, line 2", "grpc.listen-adress is unknown", "did you mean grpc.listen-address?"}},
		"key without its section":  {world{file: "drain-delay: 1s"}, []string{"did you mean grpc.drain-delay?"}},
		"unknown section":          {world{file: "zzzzzzzzzz: {a: 1}"}, []string{"key zzzzzzzzzz is unknown"}},
		"several unknown keys":     {world{file: "wrkers: 1\nmod: auto"}, []string{"wrkers is unknown: did you mean workers?", "mod is unknown: did you mean mode?"}},
		"unknown flag":             {world{args: []string{"--wokers=2"}}, []string{"flag --wokers is unknown: did you mean workers?"}},
		"repeated key":             {world{file: "grpc: {max-message: 1MiB}\ngrpc.max-message: 2MiB"}, []string{"line 2", "already set in line 1"}},
		"null value":               {world{file: "workers:"}, []string{"workers has no value"}},
		"list for a single value":  {world{file: "workers: [1, 2]"}, []string{"workers", "not a list"}},
		"section for a value":      {world{file: "workers: {a: 1}"}, []string{"workers takes a value"}},
		"value for a section":      {world{file: "grpc: 5"}, []string{"grpc is unknown"}},
		"top level list":           {world{file: "[1]"}, []string{"the file must hold keys"}},
		"two documents":            {world{file: "workers: 1\n---\nworkers: 2"}, []string{"more than one document"}},
		"not YAML":                 {world{file: "a: [1"}, []string{"c.yaml"}},
		"anchor":                   {world{file: "workers: &a 1"}, []string{"anchors"}},
		"file key in file":         {world{file: "config: {file: x}"}, []string{"config.file is only allowed"}},
		"bad number in file":       {world{file: "workers: many"}, []string{"workers (file c.yaml, line 1)", `"many"`}},
		"bad size in environment":  {world{env: map[string]string{"BROKER_GRPC_MAX_MESSAGE": "1 MiBB"}}, []string{"grpc.max-message (environment BROKER_GRPC_MAX_MESSAGE)", "1 MiBB"}},
		"bad name":                 {world{args: []string{"--mode=never"}}, []string{`"never" is not one of auto, inline`}},
		"printed secret":           {world{file: "auth: {token: '********'}"}, []string{"auth.token", "not a secret"}},
		"missing file":             {world{args: []string{"--config.file=other.yaml"}}, []string{"config.file", "file does not exist"}},
		"argument":                 {world{args: []string{"run"}}, []string{`unexpected argument "run"`}},
		"invalid value, all named": {world{file: "grpc: {listen-address: nope}", args: []string{"--workers=-1"}}, []string{`grpc.listen-address: "nope" (file c.yaml, line 1): must be host:port`, `workers: "-1" (flag --workers): must be at least 1`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, _, err := tt.load(t)
			require.ErrorIs(t, err, config.ErrInvalid)
			for _, want := range tt.want {
				assert.ErrorContains(t, err, want)
			}
		})
	}
}

func TestBadSecretIsNotPrinted(t *testing.T) {
	_, _, _, err := world{env: map[string]string{"BROKER_AUTH_TOKEN": "********"}}.load(t)
	require.Error(t, err)
	cfg, loaded, _, err := world{env: map[string]string{"BROKER_AUTH_TOKEN": "hunter2"}}.load(t)
	require.NoError(t, err)
	assert.Equal(t, "hunter2", cfg.Token.Reveal())
	text, err := config.Redacted(loaded.Flags)
	require.NoError(t, err)
	assert.NotContains(t, string(text), "hunter2")
}

func TestVerifyExitsEarly(t *testing.T) {
	_, loaded, out, err := world{args: []string{"--config.verify"}}.load(t)
	require.NoError(t, err)
	assert.True(t, loaded.Done)
	assert.Empty(t, out)
	_, _, _, err = world{args: []string{"--config.verify", "--workers=0"}}.load(t)
	assert.ErrorIs(t, err, config.ErrInvalid)
}

func TestHelpExitsEarly(t *testing.T) {
	_, loaded, out, err := world{args: []string{"-h"}}.load(t)
	require.NoError(t, err)
	assert.True(t, loaded.Done)
	assert.Contains(t, out, "-grpc.listen-address address")
}

func TestPrintedConfigurationLoadsBack(t *testing.T) {
	first := world{args: []string{"--config.print", "--workers=7", "--metadata.addresses=a:1,b:2", "--grpc.drain-delay=90s", "--verbose", "--mode=inline"}}
	cfg, loaded, out, err := first.load(t)
	require.NoError(t, err)
	assert.True(t, loaded.Done)
	again, _, _, err := world{file: out}.load(t)
	require.NoError(t, err)
	assert.Equal(t, cfg, again)
	assert.True(t, strings.HasPrefix(out, "auth:\n  token: \"\"\n"), out)
	assert.Contains(t, out, "  drain-delay: 1m30s\n")
	assert.Contains(t, out, "workers: 7\n")
}

type dotted struct{ a, b string }

func (d *dotted) RegisterFlags(_ string, fs *flag.FlagSet) {
	fs.StringVar(&d.a, "wal.max", "1", "")
	fs.StringVar(&d.b, "wal.max.bytes", "2", "")
}
func (d *dotted) Validate() error { return nil }

func TestKeyThatIsValueAndSectionPrintsAndLoads(t *testing.T) {
	var out bytes.Buffer
	_, err := config.Load("x", new(dotted), []string{"--config.print"}, config.Options{Output: &out, LookupEnv: func(string) (string, bool) { return "", false }})
	require.NoError(t, err)
	assert.Equal(t, "wal:\n  max: \"1\"\n  max.bytes: \"2\"\n", out.String())
	var d dotted
	_, err = config.Load("x", &d, []string{"--config.file=f"}, config.Options{
		LookupEnv: func(string) (string, bool) { return "", false },
		ReadFile:  func(string) ([]byte, error) { return []byte("wal: {max: 5, max.bytes: 6}"), nil },
	})
	require.NoError(t, err)
	assert.Equal(t, dotted{"5", "6"}, d)
}

type clash struct{}

func (clash) RegisterFlags(_ string, fs *flag.FlagSet) {
	fs.String("a.b-c", "", "")
	fs.String("a.b.c", "", "")
}
func (clash) Validate() error { return nil }

func TestTwoKeysWithOneVariableAreRefused(t *testing.T) {
	_, err := config.Load("x", clash{}, nil, config.Options{})
	assert.ErrorContains(t, err, "keys a.b-c and a.b.c share the variable X_A_B_C")
}

func TestMarkdownListsEveryKey(t *testing.T) {
	text := config.Markdown("broker", new(sample))
	assert.Contains(t, text, "| `grpc.max-message` | `BROKER_GRPC_MAX_MESSAGE` | size | `16MiB` | largest message |\n")
	assert.Contains(t, text, "| `grpc.listen-address` | `BROKER_GRPC_LISTEN_ADDRESS` | address | `127.0.0.1:0` | address to serve on |\n")
	assert.Contains(t, text, "| `auth.token` | `BROKER_AUTH_TOKEN` | secret | (empty) | token shown to peers |\n")
	assert.Equal(t, 8+2, strings.Count(text, "\n"))
}
