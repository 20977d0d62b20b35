package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
)

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// devReady is the line that `braid dev --json` writes when the cluster is ready.
type devReady struct {
	Ready     bool      `json:"ready"`
	DataDir   string    `json:"data_dir"`
	Endpoints string    `json:"endpoints_file"`
	Processes bool      `json:"processes"`
	Cluster   endpoints `json:"endpoints"`
}

// devEvent is a line that `braid dev --processes --json` writes when a process
// ends or starts.
type devEvent struct {
	Event  string `json:"event"` // "started" or "ended"
	Role   string `json:"role"`
	ID     int    `json:"id"`
	PID    int    `json:"pid"`
	Reason string `json:"reason,omitempty"` // how it ended
}

func devCommand() *command {
	return &command{
		name: "dev", args: "[flags]", summary: "run a whole cluster on this machine, with an embedded etcd and object store",
		help: `
Runs brokers, remote-log managers and metadata replicas with an embedded etcd and an embedded object store, until it is
interrupted. It prints a ready line when every member is registered, and keeps endpoints.json in the data directory true:
{"broker":[{"id","address","pid","zone"}],"rlm":[…],"metadata":[…],"mirror":[],"etcd":"URL","object_store":"URL"}.

With --processes each role instance is an OS process of its own, to be killed at will; it is started again on the same
address a second later, unless --no-restart, and its log is in logs/ below the data directory. When it ends with an error three
times in a row, or with one that a new start can't mend, dev says why and ends with exit code 1. Started again with the same
--data-dir, the cluster continues where it was, with the same shape and, where they are free, the same ports. It may grow by
brokers, rlms and metadata replicas; with fewer it does not start.`,
		run: runDev,
	}
}

func runDev(ctx context.Context, c *console, cmd *command, args []string) error {
	fs := flag.NewFlagSet("dev", flag.ContinueOnError)
	opts := devOptions{shape: devShape{}}
	fs.IntVar(&opts.shape.Brokers, "brokers", 1, "`number` of brokers")
	fs.IntVar(&opts.shape.RLMs, "rlms", 1, "`number` of remote-log managers")
	fs.IntVar(&opts.shape.Metadata, "metadata", 1, "`number` of metadata replicas")
	fs.IntVar(&opts.shape.Zones, "zones", 1, "`number` of zones, over which the members are spread")
	fs.StringVar(&opts.dir, "data-dir", "", "`directory` to keep everything in; without it a temporary one, removed at the end")
	fs.BoolVar(&opts.processes, "processes", false, "run each role instance as its own process")
	noRestart := fs.Bool("no-restart", false, "leave a process that ended alone")
	fs.BoolVar(&opts.cloudLatency, "cloud-latency", false, "make the object store as slow as a bucket in the cloud: tens of milliseconds a request")
	asJSON := fs.Bool("json", false, "write the ready line and events as JSON")
	rest, err := cmd.parse(c, fs, args)
	if err != nil {
		return err
	}
	if err := noArgs(rest); err != nil {
		return err
	}
	if opts.dir != "" {
		if err := shapeOf(fs, &opts); err != nil {
			return err
		}
	}
	if err := opts.shape.validate(); err != nil {
		return err
	}
	opts.restart = !*noRestart
	var mu sync.Mutex // of the output
	opts.notify = func(e processEvent, ready bool) {
		mu.Lock()
		defer mu.Unlock()
		if ready {
			tellProcess(c.stdout, c, *asJSON, e)
		} else { // the first line of stdout is the ready line
			tellProcess(c.stderr, c, false, e)
		}
	}
	if c.terminal {
		fmt.Fprintln(c.stderr, "starting…")
	}
	d, err := startDev(ctx, opts)
	if err != nil {
		if interrupted(ctx) {
			return errors.Join(errors.New("interrupted before the cluster was ready"), err)
		}
		return err
	}
	mu.Lock()
	tellReady(c, *asJSON, d)
	mu.Unlock()
	select {
	case <-ctx.Done():
	case err = <-d.failed:
	}
	if c.terminal {
		fmt.Fprintln(c.stderr, "stopping…")
	}
	return errors.Join(err, d.stop(context.WithoutCancel(ctx)))
}

// shapeOf takes the shape that a data directory has for flags that were not given,
// and refuses to shrink it.
func shapeOf(fs *flag.FlagSet, opts *devOptions) error {
	old, ok, err := readShape(opts.dir)
	if err != nil || !ok {
		return err
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for name, v := range map[string]struct{ have, old *int }{
		"brokers": {&opts.shape.Brokers, &old.Brokers}, "rlms": {&opts.shape.RLMs, &old.RLMs},
		"metadata": {&opts.shape.Metadata, &old.Metadata}, "zones": {&opts.shape.Zones, &old.Zones},
	} {
		if !given[name] {
			*v.have = *v.old
		}
	}
	if n := opts.shape; n.Brokers < old.Brokers || n.RLMs < old.RLMs || n.Metadata < old.Metadata {
		return fmt.Errorf("--data-dir %s holds a cluster of %s: it can't go on with %s, which would lose members and what only they hold. "+
			"Without these flags the cluster continues as it was; it may grow, too", opts.dir, &old, &n)
	}
	return nil
}

func tellReady(c *console, asJSON bool, d *devCluster) {
	e := d.snapshot()
	if asJSON {
		_ = c.printJSON(devReady{Ready: true, DataDir: d.dir, Endpoints: d.path(endpointsFile), Processes: d.opts.processes, Cluster: e})
		return
	}
	how := "in this process"
	if d.opts.processes {
		how = "as processes"
	}
	fmt.Fprintf(c.stdout, "braid dev is ready: %s, %s\n", &d.opts.shape, how)
	fmt.Fprintf(c.stdout, "  brokers      %s\n  metadata     %s\n  rlms         %s\n  etcd         %s\n  object store %s\n  endpoints    %s\n",
		strings.Join(e.addresses("broker"), ","), strings.Join(e.addresses("metadata"), ","), strings.Join(e.addresses("rlm"), ","),
		e.Etcd, e.ObjectStore, d.path(endpointsFile))
	fmt.Fprintf(c.stdout, "try: braid topic create hello --data-dir %s\n", d.dir)
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func tellProcess(w io.Writer, c *console, asJSON bool, e processEvent) {
	if asJSON {
		ev := devEvent{Event: "ended", Role: e.spec.role, ID: e.spec.id, PID: e.pid, Reason: e.told()}
		if e.started {
			ev.Event = "started"
		}
		_ = c.printJSON(ev) // nobody reads any more: dev goes on
		return
	}
	switch {
	case e.started:
		fmt.Fprintf(w, "%s started again (pid %d)\n", e.spec, e.pid)
	case e.again:
		fmt.Fprintf(w, "%s (pid %d) ended: %s; starting it again in %s\n", e.spec, e.pid, e.told(), restartPause)
	default:
		fmt.Fprintf(w, "%s (pid %d) ended: %s\n", e.spec, e.pid, e.told())
	}
}
