package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// Names of the keys that [Load] adds.
const (
	FileKey   = "config.file"
	VerifyKey = "config.verify"
	PrintKey  = "config.print"
)

// Options are the surroundings of a [Load]; the zero value is the process's.
type Options struct {
	// EnvPrefix starts every environment variable; empty means the name in
	// capitals.
	EnvPrefix string
	// LookupEnv reads the environment; nil means os.LookupEnv.
	LookupEnv func(string) (string, bool)
	// ReadFile reads the configuration file; nil means os.ReadFile.
	ReadFile func(string) ([]byte, error)
	// Output takes the usage text and --config.print; nil means os.Stdout.
	Output io.Writer
	// AllowArgs permits arguments that aren't flags.
	AllowArgs bool
}

// Loaded is the outcome of a [Load].
type Loaded struct {
	// Done is true if the process should exit with success instead of running:
	// help was asked for, or the configuration was verified or printed.
	Done bool
	// Flags hold every key with its effective value.
	Flags *flag.FlagSet
	// Sources tell where each key's value came from; keys at their default
	// are absent.
	Sources map[string]string
	// Args are the arguments that aren't flags.
	Args []string
	// EnvPrefix is the prefix that was used.
	EnvPrefix string
}

// setting is one value on its way to a flag.
type setting struct {
	key    string
	value  string
	list   []string // instead of value, if the source had a list
	source string
}

// Load fills cfg for the program called name: defaults, then the file, then
// the environment, then args (without the program name). It returns all
// problems of a stage joined, each wrapping [ErrInvalid]; cfg must not be used
// then.
func Load(name string, cfg Section, args []string, opts Options) (*Loaded, error) {
	opts = opts.withDefaults(name)
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(opts.Output)
	var file string
	var verify, show bool
	cfg.RegisterFlags("", fs)
	fs.StringVar(&file, FileKey, "", "YAML `file` to read the configuration from")
	fs.BoolVar(&verify, VerifyKey, false, "check the configuration and exit")
	fs.BoolVar(&show, PrintKey, false, "print the effective configuration as YAML, secrets starred, and exit")
	loaded := &Loaded{Flags: fs, Sources: map[string]string{}, EnvPrefix: opts.EnvPrefix}
	if err := checkEnvNames(fs, opts.EnvPrefix); err != nil {
		return nil, err
	}

	fromFlags, rest, err := parseArgs(fs, args)
	if errors.Is(err, flag.ErrHelp) {
		loaded.Done = true
		usage(fs, opts)
		return loaded, nil
	}
	if err != nil {
		return nil, err
	}
	if len(rest) > 0 && !opts.AllowArgs {
		return nil, fmt.Errorf("%w: unexpected argument %q: every option starts with --", ErrInvalid, rest[0])
	}
	loaded.Args = rest

	fromEnv := readEnv(fs, opts)
	// The file's own name comes from the environment or a flag.
	if err := apply(fs, loaded.Sources, only(FileKey, fromEnv, fromFlags)); err != nil {
		return nil, err
	}
	var fromFile []setting
	if file != "" {
		data, err := opts.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, FileKey, err)
		}
		if fromFile, err = parseYAML(fs, file, data); err != nil {
			return nil, err
		}
	}
	if err := apply(fs, loaded.Sources, fromFile, fromEnv, fromFlags); err != nil {
		return nil, err
	}
	if err := cfg.Validate(); err != nil {
		return nil, attribute(err, loaded.Sources)
	}
	switch {
	case show:
		loaded.Done = true
		text, err := Redacted(fs)
		if err != nil {
			return nil, err
		}
		if _, err := opts.Output.Write(text); err != nil {
			return nil, fmt.Errorf("print the configuration: %w", err)
		}
	case verify:
		loaded.Done = true
	}
	return loaded, nil
}

func (o Options) withDefaults(name string) Options {
	if o.EnvPrefix == "" {
		o.EnvPrefix = mangle(name)
	}
	if o.LookupEnv == nil {
		o.LookupEnv = os.LookupEnv
	}
	if o.ReadFile == nil {
		o.ReadFile = os.ReadFile
	}
	if o.Output == nil {
		o.Output = os.Stdout
	}
	return o
}

// EnvName is the environment variable of a key.
func EnvName(prefix, key string) string { return prefix + "_" + mangle(key) }

func mangle(s string) string {
	return strings.NewReplacer(".", "_", "-", "_").Replace(strings.ToUpper(s))
}

// checkEnvNames refuses two keys with one variable: a mistake of the
// programmer that would otherwise set two values at once.
func checkEnvNames(fs *flag.FlagSet, prefix string) error {
	owner := map[string]string{}
	var errs []error
	fs.VisitAll(func(f *flag.Flag) {
		env := EnvName(prefix, f.Name)
		if other, taken := owner[env]; taken {
			errs = append(errs, fmt.Errorf("keys %s and %s share the variable %s", other, f.Name, env))
		}
		owner[env] = f.Name
	})
	return errors.Join(errs...)
}

func readEnv(fs *flag.FlagSet, opts Options) []setting {
	var out []setting
	fs.VisitAll(func(f *flag.Flag) {
		env := EnvName(opts.EnvPrefix, f.Name)
		if value, ok := opts.LookupEnv(env); ok {
			out = append(out, setting{key: f.Name, value: value, source: "environment " + env})
		}
	})
	return out
}

// recorder stands in for a flag while the arguments are parsed, so that their
// values can be applied after the file's and the environment's.
type recorder struct {
	key    string
	isBool bool
	out    *[]setting
}

func (r *recorder) String() string   { return "" }
func (r *recorder) IsBoolFlag() bool { return r.isBool }
func (r *recorder) Set(value string) error {
	*r.out = append(*r.out, setting{key: r.key, value: value, source: "flag --" + r.key})
	return nil
}

func parseArgs(fs *flag.FlagSet, args []string) ([]setting, []string, error) {
	var out []setting
	shadow := flag.NewFlagSet(fs.Name(), flag.ContinueOnError)
	shadow.SetOutput(io.Discard)
	fs.VisitAll(func(f *flag.Flag) {
		shadow.Var(&recorder{f.Name, isBool(f), &out}, f.Name, f.Usage)
	})
	err := shadow.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return nil, nil, err
	case err != nil:
		text := err.Error()
		if key, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
			return nil, nil, unknownKey("flag --"+strings.TrimPrefix(key, "-"), key, fs)
		}
		return nil, nil, fmt.Errorf("%w: %s", ErrInvalid, text)
	}
	return out, shadow.Args(), nil
}

func isBool(f *flag.Flag) bool {
	b, ok := f.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

func only(key string, stages ...[]setting) []setting {
	var out []setting
	for _, stage := range stages {
		for _, s := range stage {
			if s.key == key {
				out = append(out, s)
			}
		}
	}
	return out
}

// apply sets the stages in order, so a later one wins, and joins all errors.
func apply(fs *flag.FlagSet, sources map[string]string, stages ...[]setting) error {
	var errs []error
	for _, stage := range stages {
		for _, s := range stage {
			f := fs.Lookup(s.key)
			if err := set(f, s); err != nil {
				errs = append(errs, fmt.Errorf("%w: %s (%s): %w", ErrInvalid, s.key, s.source, err))
				continue
			}
			sources[s.key] = s.source
		}
	}
	return errors.Join(errs...)
}

func set(f *flag.Flag, s setting) error {
	if s.list == nil {
		err := f.Value.Set(s.value)
		if err != nil && !strings.Contains(err.Error(), s.value) && !isSecret(f) {
			// The standard flags say only "parse error".
			return fmt.Errorf("%q: %w", s.value, err)
		}
		return err
	}
	target, ok := f.Value.(interface{ SetList([]string) error })
	if !ok {
		return errors.New("takes one value, not a list")
	}
	return target.SetList(s.list)
}

func isSecret(f *flag.Flag) bool {
	_, ok := f.Value.(*Secret)
	return ok
}

// attribute adds to each field error where the value came from.
func attribute(err error, sources map[string]string) error {
	var out []error
	for _, e := range flatten(err) {
		if f, ok := e.(*FieldError); ok { //nolint:errorlint // flatten returns leaves
			known := *f
			known.Source = sources[f.Field]
			if known.Source == "" {
				known.Source = "default"
			}
			e = &known
		}
		out = append(out, e)
	}
	return errors.Join(out...)
}

func usage(fs *flag.FlagSet, opts Options) {
	fmt.Fprintf(opts.Output, "Usage: %s [flags]\n\nEvery flag is also a key of the YAML file named by --%s and an environment variable:\n--a.b-c is a: {b-c: …} and %s.\n\n",
		fs.Name(), FileKey, EnvName(opts.EnvPrefix, "a.b-c"))
	fs.PrintDefaults()
}
