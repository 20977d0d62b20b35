// Command metadata runs one replica of the metadata service.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/lifecycle"
	"github.com/braidlog/braid/pkg/telemetry"
	"github.com/braidlog/braid/services/metadata"
)

// version is set by the linker.
var version = "dev"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "metadata:", err)
		os.Exit(1)
	}
}

func run() error {
	var cfg metadata.Config
	loaded, err := config.Load("metadata", &cfg, os.Args[1:], config.Options{EnvPrefix: "METADATA"})
	if err != nil || loaded.Done {
		return err
	}
	ctx, release := lifecycle.Signals(context.Background(), os.Exit)
	defer release()
	tel, err := telemetry.New(ctx, cfg.Telemetry, telemetry.Identity{
		Service: "metadata", Instance: fmt.Sprintf("metadata-%d", cfg.ID), Version: version, Zone: cfg.Zone,
	}, telemetry.Options{})
	if err != nil {
		return err
	}
	tel.InstallGlobals()
	defer func() {
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = tel.Shutdown(flush)
	}()
	server, err := metadata.Build(ctx, cfg, metadata.Deps{
		Telemetry: tel, Redacted: func() ([]byte, error) { return config.Redacted(loaded.Flags) },
	})
	if err != nil {
		return err
	}
	return server.Run(ctx)
}
