// Command broker runs one broker.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/lifecycle"
	"github.com/braidlog/braid/services/broker"
)

// version is set by the linker.
var version = "dev"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "broker:", err)
		if errors.Is(err, config.ErrInvalid) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

func run() error {
	var cfg broker.Config
	loaded, err := config.Load("broker", &cfg, os.Args[1:], config.Options{EnvPrefix: "BROKER"})
	if err != nil || loaded.Done {
		return err
	}
	ctx, release := lifecycle.Signals(context.Background(), os.Exit)
	defer release()
	server, err := broker.Build(ctx, cfg, broker.Deps{
		Version: version, Redacted: func() ([]byte, error) { return config.Redacted(loaded.Flags) },
	})
	if err != nil {
		return err
	}
	return server.Run(ctx)
}
