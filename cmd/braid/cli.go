package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/term"
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // the thing asked for is not true
	exitUsage  = 2 // the question was not understood
)

// console is where a command reads and writes.
type console struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	// terminal says that stderr is one: progress is shown only then.
	terminal bool
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// printJSON writes v as one line on stdout.
func (c *console) printJSON(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = c.stdout.Write(append(line, '\n'))
	return err
}

// command is one word after braid.
type command struct {
	name string
	// args is what follows the name in the usage line.
	args string
	// summary is one line for the list of commands.
	summary string
	// help is what `braid name -h` says between usage and flags.
	help   string
	hidden bool
	run    func(ctx context.Context, c *console, cmd *command, args []string) error
}

func commands() []*command {
	return []*command{
		devCommand(), demoCommand(), topicCommand(), produceCommand(), consumeCommand(),
		segmentsCommand(), explainCommand(), versionCommand(), referenceCommand(),
		roleCommand("broker"), roleCommand("rlm"), roleCommand("metadata"),
	}
}

// usageError says that the question was not understood.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// errSilent is a failure that the command has told of already.
var errSilent = errors.New("failed")

// run is main without the process around it; it returns the exit code.
func run(ctx context.Context, c *console, args []string) int {
	if len(args) == 0 {
		fmt.Fprint(c.stderr, overview())
		return exitUsage
	}
	name, rest := args[0], args[1:]
	switch name {
	case "help", "-h", "-help", "--help":
		if len(rest) == 0 {
			fmt.Fprint(c.stdout, overview())
			return exitOK
		}
		name, rest = rest[0], append(slices.Clone(rest[1:]), "-h")
	case "-version", "--version":
		name = "version"
	}
	for _, cmd := range commands() {
		if cmd.name == name {
			return exitCode(c, "braid "+name, cmd.run(ctx, c, cmd, rest))
		}
	}
	fmt.Fprintf(c.stderr, "braid: there is no command %q; `braid help` lists them\n", name)
	return exitUsage
}

func exitCode(c *console, who string, err error) int {
	var usage *usageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return exitOK
	case errors.As(err, &usage):
		fmt.Fprintf(c.stderr, "%s: %v\n`%s -h` shows how it is used\n", who, err, who)
		return exitUsage
	case errors.Is(err, errSilent):
	default:
		fmt.Fprintf(c.stderr, "%s: %s\n", who, explainError(err))
	}
	return exitFailed
}

func overview() string {
	var b strings.Builder
	b.WriteString("Braid is a partitioned log that lives in object storage; every ack says how durable the record is.\n\nUsage: braid <command> [flags]\n\n")
	for _, cmd := range commands() {
		if !cmd.hidden {
			fmt.Fprintf(&b, "  %-9s %s\n", cmd.name, cmd.summary)
		}
	}
	b.WriteString(`
braid <command> -h shows a command's flags. With --json a command writes for programs, one JSON value a line.
Exit code 0: the thing asked for is true; 1: it is not; 2: the question was not understood.
`)
	return b.String()
}

// parse reads flags wherever they stand among the arguments and returns the
// others. Help is written to stdout and ends in flag.ErrHelp.
func (cmd *command) parse(c *console, fs *flag.FlagSet, args []string) (rest []string, err error) {
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	for {
		if err := fs.Parse(args); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				cmd.usage(c.stdout, fs)
				return nil, err
			}
			return nil, &usageError{err}
		}
		if args = fs.Args(); len(args) == 0 {
			return rest, nil
		}
		rest, args = append(rest, args[0]), args[1:]
	}
}

func (cmd *command) usage(w io.Writer, fs *flag.FlagSet) {
	fmt.Fprintf(w, "Usage: braid %s %s\n\n%s\n", cmd.name, cmd.args, strings.TrimSpace(cmd.help))
	heading := "\nFlags:\n"
	fs.VisitAll(func(f *flag.Flag) {
		fmt.Fprint(w, heading)
		heading = ""
		kind, text := flag.UnquoteUsage(f)
		name := "--" + f.Name
		if kind != "" {
			name += " " + kind
		}
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0" {
			text += " (default " + f.DefValue + ")"
		}
		fmt.Fprintf(w, "  %-26s %s\n", name, text)
	})
}

// noArgs refuses arguments that nothing reads.
func noArgs(rest []string) error {
	if len(rest) > 0 {
		return usagef("unexpected argument %q", rest[0])
	}
	return nil
}

// topicArg takes the topic from its flag or from the only argument.
func topicArg(flagged string, rest []string) (string, error) {
	switch {
	case flagged == "" && len(rest) == 1:
		return rest[0], nil
	case flagged != "" && len(rest) == 0:
		return flagged, nil
	case flagged == "" && len(rest) == 0:
		return "", usagef("name the topic with --topic")
	}
	return "", usagef("unexpected argument %q", rest[len(rest)-1])
}

// listFlag is a flag that may be given several times.
type listFlag []string

func (l *listFlag) String() string     { return strings.Join(*l, ",") }
func (l *listFlag) Set(s string) error { *l = append(*l, s); return nil }
