// Command rlm is a remote-log manager.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/lifecycle"
	"github.com/braidlog/braid/services/rlm"
)

// version is set by the linker.
var version = "dev"

func main() {
	os.Exit(run(os.Args[1:]))
}

// run is main without the exit: 0 after a clean stop, 1 after a failure, 2 for
// a configuration that can't be used.
func run(args []string) int {
	ctx, release := lifecycle.Signals(context.Background(), os.Exit)
	defer release()
	var cfg rlm.Config
	loaded, err := config.Load("rlm", &cfg, args, config.Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, "rlm:", err)
		return 2
	}
	if loaded.Done {
		return 0
	}
	server, err := rlm.Build(ctx, cfg, rlm.Deps{
		Version:  version,
		Redacted: func() ([]byte, error) { return config.Redacted(loaded.Flags) },
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "rlm:", err)
		return 1
	}
	if err := server.Run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "rlm:", err)
		return 1
	}
	return 0
}
