package main

import (
	"context"
	"os"

	"github.com/braidlog/braid/pkg/lifecycle"
)

func main() {
	ctx, release := lifecycle.Signals(context.Background(), os.Exit)
	code := run(ctx, &console{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, terminal: isTerminal(os.Stderr)}, os.Args[1:])
	release()
	os.Exit(code)
}
