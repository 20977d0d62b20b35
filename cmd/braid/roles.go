package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/telemetry"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/rlm"
)

// roleServer is a role that was built and not run yet.
type roleServer interface {
	// Run serves until ctx ends, then stops in order.
	Run(ctx context.Context) error
}

// roleOptions are the surroundings of a role.
type roleOptions struct {
	// log takes the log; nil is stderr.
	log io.Writer
	// listener is used instead of the configured address; may be nil.
	listener net.Listener
	// output takes the text of -h and --config.print.
	output io.Writer
	// ownProcess installs the telemetry as the process's.
	ownProcess bool
}

// buildRole makes a role from its own flags. Without an error a nil server says
// that the flags asked for nothing more (help, --config.verify). close flushes
// the telemetry after the run.
func buildRole(ctx context.Context, role string, args []string, opts roleOptions) (_ roleServer, closeRole func(), err error) {
	var (
		metadataConfig metadata.Config
		rlmConfig      rlm.Config
		brokerConfig   broker.Config
	)
	sections := map[string]config.Section{"metadata": &metadataConfig, "rlm": &rlmConfig, "broker": &brokerConfig}
	section, ok := sections[role]
	if !ok {
		return nil, nil, fmt.Errorf("there is no role %q", role)
	}
	loaded, err := config.Load(role, section, args, config.Options{Output: opts.output})
	if err != nil {
		return nil, nil, &usageError{err}
	}
	if loaded.Done {
		return nil, func() {}, nil
	}
	redacted := func() ([]byte, error) { return config.Redacted(loaded.Flags) }

	var (
		id   int
		zone string
		tc   telemetry.Config
	)
	switch role {
	case "metadata":
		id, zone, tc = metadataConfig.ID, metadataConfig.Zone, metadataConfig.Telemetry
	case "rlm":
		id, zone, tc = rlmConfig.ID, rlmConfig.Zone, rlmConfig.Telemetry
	case "broker":
		id, zone, tc = brokerConfig.ID, brokerConfig.Zone, brokerConfig.Telemetry
	}
	v := buildVersion()
	tel, err := telemetry.New(ctx, tc, telemetry.Identity{
		Service: role, Instance: fmt.Sprintf("%s-%d", role, id), Version: v.Version + v.Revision, Zone: zone,
	}, telemetry.Options{LogOutput: opts.log})
	if err != nil {
		return nil, nil, err
	}
	if opts.ownProcess {
		tel.InstallGlobals()
	}
	closeRole = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		_ = tel.Shutdown(ctx) // what is left to tell has nowhere to go
	}
	var server roleServer
	switch role {
	case "metadata":
		server, err = metadata.Build(ctx, metadataConfig, metadata.Deps{Telemetry: tel, Redacted: redacted, Listener: opts.listener})
	case "rlm":
		server, err = rlm.Build(ctx, rlmConfig, rlm.Deps{Telemetry: tel, Redacted: redacted, Listener: opts.listener, Version: v.Version})
	case "broker":
		server, err = broker.Build(ctx, brokerConfig, broker.Deps{Telemetry: tel, Redacted: redacted, Listener: opts.listener})
	}
	if err != nil {
		tel.Logger.ErrorContext(ctx, "the role did not start", "err", err)
		closeRole()
		return nil, nil, err
	}
	return server, closeRole, nil
}

// watchParentEnv is set for children of braid dev: their stdin is a pipe whose
// end says that the parent is gone.
const watchParentEnv = "BRAID_WATCH_STDIN"

// errParentGone ends a child whose parent is gone.
var errParentGone = errors.New("the parent process is gone")

func roleCommand(role string) *command {
	return &command{
		name: role, args: "[flags]", hidden: true, summary: "run the " + role + " role in this process",
		run: func(ctx context.Context, c *console, _ *command, args []string) error {
			ctx, cancel := context.WithCancelCause(ctx)
			defer cancel(nil)
			if os.Getenv(watchParentEnv) != "" {
				go watchParent(c.stdin, cancel) // ends with the process at the latest
			}
			server, closeRole, err := buildRole(ctx, role, args, roleOptions{log: c.stderr, output: c.stdout, ownProcess: true})
			if err != nil || server == nil {
				return err
			}
			defer closeRole()
			return server.Run(ctx)
		},
	}
}

// watchParent waits for the end of the pipe that the parent holds.
func watchParent(stdin io.Reader, cancel context.CancelCauseFunc) {
	_, _ = io.Copy(io.Discard, stdin) // any end is the end
	cancel(errParentGone)
}
