package main

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
)

// versionInfo is what `braid version --json` writes.
type versionInfo struct {
	Version  string `json:"version"`            // of the module, "(devel)" for a local build
	Revision string `json:"revision,omitempty"` // commit, "+" at its end for a changed tree
	Time     string `json:"time,omitempty"`     // of the commit
	Go       string `json:"go"`
}

// buildVersion is what Go recorded about this binary.
func buildVersion() versionInfo {
	v := versionInfo{Version: "(devel)", Go: runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if info.Main.Version != "" {
		v.Version = info.Main.Version
	}
	modified := ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.time":
			v.Time = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				modified = "+"
			}
		}
	}
	if v.Revision != "" {
		v.Revision += modified
	}
	return v
}

func versionCommand() *command {
	return &command{
		name: "version", args: "[--json]", summary: "say which build this is",
		help: "Prints the version, the commit it was built from, and the Go release.",
		run: func(_ context.Context, c *console, cmd *command, args []string) error {
			fs := flag.NewFlagSet("version", flag.ContinueOnError)
			asJSON := fs.Bool("json", false, "write {version, revision, time, go}")
			rest, err := cmd.parse(c, fs, args)
			if err != nil {
				return err
			}
			if err := noArgs(rest); err != nil {
				return err
			}
			v := buildVersion()
			if *asJSON {
				return c.printJSON(v)
			}
			fmt.Fprintf(c.stdout, "braid %s %s %s\n", v.Version, v.Revision, v.Go)
			return nil
		},
	}
}
