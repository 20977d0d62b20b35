package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/client"
	"github.com/braidlog/braid/pkg/embetcd"
	"github.com/braidlog/braid/pkg/gcsemu"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// devBucket is the bucket in the embedded object store.
const devBucket = "braid"

// devShape is how many of what a cluster has. It is kept in the data directory.
type devShape struct {
	Brokers  int `json:"brokers"`
	RLMs     int `json:"rlms"`
	Metadata int `json:"metadata"`
	Zones    int `json:"zones"`
}

func (s *devShape) String() string {
	return fmt.Sprintf("%s, %s, %s in %s", count(s.Brokers, "broker"), count(s.RLMs, "remote-log manager"),
		count(s.Metadata, "metadata replica"), count(s.Zones, "zone"))
}

func (s *devShape) validate() error {
	for _, f := range []struct {
		name       string
		value, top int
	}{{"brokers", s.Brokers, 100}, {"rlms", s.RLMs, 100}, {"metadata", s.Metadata, 9}, {"zones", s.Zones, 26}} {
		if f.value < 1 || f.value > f.top {
			return usagef("--%s is %d: must be 1 to %d", f.name, f.value, f.top)
		}
	}
	return nil
}

// devOptions say how to run a cluster.
type devOptions struct {
	shape devShape
	// dir is the data directory; empty makes one that is removed at the end.
	dir string
	// processes runs each role instance as an OS process, of this binary.
	processes bool
	// restart starts a process that ended again.
	restart bool
	// cloudLatency makes the object store answer as slowly as a bucket does.
	cloudLatency bool
	// replaceAfter is how long a partition may have no live replica before another broker gets it; 0 is the default.
	replaceAfter time.Duration
	// notify is told ends of processes and their new starts, also before the
	// cluster is ready; may be nil.
	notify func(e processEvent, ready bool)
}

// devCluster is a running cluster with its etcd and its object store.
type devCluster struct {
	opts      devOptions
	dir       string
	temporary bool
	lock      *os.File
	etcd      *embetcd.Server
	store     *gcsemu.Server
	super     *supervisor
	rooms     *rooms
	failed    chan error // capacity 1: the first thing that can't be mended

	mu        sync.Mutex // guards all below
	endpoints *endpoints
	ready     bool
	stopping  bool
	lastEnd   map[string]string // how processes ended
	failures  map[string]int    // how often in a row processes ended with an error
}

// A process that ends with an error failuresInARow times is not started again:
// the cluster stops. A process that ran for steadyRun begins anew.
const (
	failuresInARow = 3
	steadyRun      = 30 * time.Second
)

// startDev starts a cluster and returns when every member is registered and live.
func startDev(ctx context.Context, opts devOptions) (_ *devCluster, err error) {
	d := &devCluster{opts: opts, failed: make(chan error, 1), endpoints: newEndpoints(), lastEnd: map[string]string{}, failures: map[string]int{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.stop(context.WithoutCancel(ctx)))
		}
	}()
	if err := d.openDir(); err != nil {
		return nil, err
	}
	previous, err := readEndpoints(d.path(endpointsFile))
	if errors.Is(err, fs.ErrNotExist) {
		previous, err = newEndpoints(), nil
	}
	if err != nil {
		return nil, err
	}
	var free ports
	if err := d.startStores(ctx, previous, &free); err != nil {
		return nil, err
	}
	specs, err := d.specs(previous, &free)
	if err != nil {
		return nil, err
	}
	if opts.processes {
		d.super = newSupervisor(opts.restart, d.onProcess)
	} else {
		d.rooms = newRooms(d.fail)
	}
	for _, sp := range specs {
		if err := d.startInstance(sp); err != nil {
			return nil, err
		}
	}
	if err := d.writeEndpoints(); err != nil {
		return nil, err
	}
	if err := d.awaitMembers(ctx); err != nil {
		return nil, err
	}
	if err := d.keepShape(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	d.ready = true
	d.mu.Unlock()
	return d, d.writeEndpoints() // with what changed meanwhile
}

func (d *devCluster) path(parts ...string) string {
	return filepath.Join(append([]string{d.dir}, parts...)...)
}

// openDir makes the data directory and takes its lock.
func (d *devCluster) openDir() (err error) {
	if d.opts.dir == "" {
		d.temporary = true
		if d.dir, err = os.MkdirTemp("", "braid-dev-"); err != nil {
			return err
		}
	} else if d.dir, err = filepath.Abs(d.opts.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(d.path("logs"), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(d.path("dev.lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	ok, err := tryLock(f)
	if !ok {
		holder := make([]byte, 20)
		n, _ := f.ReadAt(holder, 0) // a name for the message, when there is one
		err = errors.Join(err, f.Close())
		d.dir = "" // it is another's
		return errors.Join(fmt.Errorf("%s is in use by another braid dev (pid %s); stop that one or name another --data-dir", d.opts.dir, strings.TrimSpace(string(holder[:n]))), err)
	}
	d.lock = f
	if err := f.Truncate(0); err != nil {
		return err
	}
	if _, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return err
	}
	return nil
}

// keepShape notes the shape in the data directory: from then on it holds such a
// cluster.
func (d *devCluster) keepShape() error {
	shape, err := json.Marshal(d.opts.shape)
	if err != nil {
		return err
	}
	return os.WriteFile(d.path("dev.json"), append(shape, '\n'), 0o644)
}

// readShape is the shape of the cluster in a data directory; false when there is
// none.
func readShape(dir string) (shape devShape, ok bool, err error) {
	data, err := os.ReadFile(filepath.Join(dir, "dev.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return shape, false, nil
	}
	if err != nil {
		return shape, false, err
	}
	if err := json.Unmarshal(data, &shape); err != nil {
		return shape, false, fmt.Errorf("%s: %w", filepath.Join(dir, "dev.json"), err)
	}
	return shape, true, nil
}

// startStores starts etcd and the object store.
func (d *devCluster) startStores(ctx context.Context, previous *endpoints, free *ports) error {
	etcdAddress, err := free.take(hostOf(previous.Etcd))
	if err != nil {
		return err
	}
	storeAddress, err := free.take(hostOf(previous.ObjectStore))
	if err != nil {
		return err
	}
	log, err := os.OpenFile(d.path("logs", "dev.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	// The file stays open for the process's life: etcd logs until its very end.
	logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	d.etcd, err = embetcd.Start(ctx, embetcd.Options{Dir: d.path("etcd"), ClientURL: "http://" + etcdAddress, Fast: true, Logger: logger})
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	opts := gcsemu.Options{Listen: storeAddress, StorageRoot: d.path("objects"), Buckets: []string{devBucket}}
	if d.opts.cloudLatency {
		opts.Rules = gcsemu.CloudLatency()
	}
	if d.store, err = gcsemu.Start(opts); err != nil {
		return fmt.Errorf("start the object store: %w", err)
	}
	d.mu.Lock()
	d.endpoints.Etcd, d.endpoints.ObjectStore = d.etcd.Endpoints()[0], d.store.Endpoint()
	d.mu.Unlock()
	return nil
}

func hostOf(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	return u.Host
}

// instance is a spec with what endpoints.json says of it.
type instance struct {
	spec
	address, zone string
}

// specs lists every role instance, metadata first: the others wait for it.
func (d *devCluster) specs(previous *endpoints, free *ports) ([]*instance, error) {
	binary, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var out []*instance
	for _, r := range []struct {
		role  string
		count int
	}{{"metadata", d.opts.shape.Metadata}, {"rlm", d.opts.shape.RLMs}, {"broker", d.opts.shape.Brokers}} {
		for id := 1; id <= r.count; id++ {
			old, _ := previous.find(r.role, id)
			address, err := free.take(old.Address)
			if err != nil {
				return nil, err
			}
			zone := "zone-" + string(rune('a'+(id-1)%d.opts.shape.Zones))
			name := fmt.Sprintf("%s-%d", r.role, id)
			out = append(out, &instance{
				spec:    spec{role: r.role, id: id, binary: binary, logPath: d.path("logs", name+".log")},
				address: address, zone: zone,
			})
		}
	}
	var replicas []string
	for _, x := range out {
		if x.role == "metadata" {
			replicas = append(replicas, x.address)
		}
	}
	for _, x := range out {
		x.args = append([]string{x.role}, d.roleArgs(x, replicas)...)
	}
	return out, nil
}

// roleArgs are the flags of a role instance; they are the same whether it runs
// in this process or in its own.
func (d *devCluster) roleArgs(x *instance, replicas []string) []string {
	args := []string{
		"--id", strconv.Itoa(x.id), "--zone", x.zone, "--grpc.listen-address", x.address,
		"--grpc.drain-delay", "0s", "--grpc.stream-grace", "1s", "--grpc.stop-timeout", "3s", "--log.format", "text",
	}
	store := []string{"--store.bucket", devBucket, "--store.endpoint", d.store.Endpoint()}
	switch x.role {
	case "metadata":
		args = append(args, store...)
		args = append(args, "--data.dir", d.path(fmt.Sprintf("metadata-%d", x.id)), "--etcd.endpoints", strings.Join(d.etcd.Endpoints(), ","), "--session.timeout", "3s", "--controller.lease-ttl", "2s")
		if d.opts.replaceAfter > 0 {
			args = append(args, "--replica.replace.timeout", d.opts.replaceAfter.String())
		}
	case "rlm":
		args = append(args, store...)
		args = append(args, "--metadata.addresses", strings.Join(replicas, ","))
	case "broker":
		args = append(args, "--data.dir", d.path(fmt.Sprintf("broker-%d", x.id)), "--metadata.addresses", strings.Join(replicas, ","))
	}
	return args
}

func (d *devCluster) startInstance(x *instance) error {
	d.mu.Lock()
	d.endpoints.put(x.role, endpoint{ID: x.id, Address: x.address, PID: os.Getpid(), Zone: x.zone})
	d.mu.Unlock()
	if d.opts.processes {
		return d.super.add(&x.spec)
	}
	return d.rooms.add(x)
}

// onProcess keeps endpoints.json true.
func (d *devCluster) onProcess(e processEvent) {
	d.mu.Lock()
	old, known := d.endpoints.find(e.spec.role, e.spec.id)
	switch {
	case e.started && known:
		old.PID = e.pid
		d.endpoints.put(e.spec.role, old)
	case !e.started && !e.again:
		// It won't come back, so nothing shall point to it. An entry that will
		// come back keeps its address, and its pid until there is another.
		d.endpoints.remove(e.spec.role, e.spec.id)
	}
	_, restarted := d.lastEnd[e.spec.String()]
	var hopeless error
	if !e.started {
		d.lastEnd[e.spec.String()] = e.told()
		hopeless = d.judge(&e)
	}
	ready, stopping := d.ready, d.stopping
	d.mu.Unlock()
	if stopping {
		return
	}
	e.again = e.again && hopeless == nil
	if d.opts.notify != nil && (!e.started || restarted) {
		d.opts.notify(e, ready)
	}
	if hopeless != nil {
		d.fail(hopeless)
	}
	if !ready {
		return // written once, when all are started
	}
	if err := d.writeEndpoints(); err != nil {
		d.fail(err)
	}
}

// judge is an error when a process has ended in a way that starting it again
// doesn't mend. The caller holds the mutex.
func (d *devCluster) judge(e *processEvent) error {
	if !e.failed() || !e.again {
		return nil
	}
	name := e.spec.String()
	if d.ready && e.lived >= steadyRun {
		d.failures[name] = 0
	}
	d.failures[name]++
	switch {
	case e.beyondRestart():
		return fmt.Errorf("%s ended: %s; starting it again does not help; see %s", name, e.told(), e.spec.logPath)
	case d.failures[name] >= failuresInARow:
		return fmt.Errorf("%s ended %d times in a row, last with %s; see %s", name, d.failures[name], e.told(), e.spec.logPath)
	}
	return nil
}

func (d *devCluster) fail(err error) {
	select {
	case d.failed <- err:
	default:
	}
}

func (d *devCluster) snapshot() endpoints {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.endpoints.clone()
}

// writeEndpoints writes endpoints.json. Writers take turns, so the last state
// wins.
func (d *devCluster) writeEndpoints() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.endpoints.write(d.path(endpointsFile))
}

// admin connects to the metadata service.
func (d *devCluster) admin() (*client.Admin, error) {
	e := d.snapshot()
	return client.DialAdmin(e.addresses("metadata"), client.Options{})
}

// readyTimeout bounds the wait for the members.
const readyTimeout = 60 * time.Second

// awaitMembers waits until every broker is online and every remote-log manager's
// epoch is open.
func (d *devCluster) awaitMembers(ctx context.Context) error {
	admin, err := d.admin()
	if err != nil {
		return err
	}
	defer func() { _ = admin.Close() }() // it was only asked
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	missing := "metadata"
	for {
		call, done := context.WithTimeout(ctx, 2*time.Second)
		resp, err := admin.Cluster().GetCluster(call, &metadatav1.GetClusterRequest{})
		done()
		if err == nil {
			if missing = d.missing(resp); missing == "" {
				return nil
			}
		}
		select {
		case <-tick.C:
		case err := <-d.failed:
			return err
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the cluster did not get ready: waiting for %s%s; see %s", missing, d.lastWordsOf(missing), d.path("logs")), d.endings(), context.Cause(ctx), err)
		}
		if err := d.deadForGood(); err != nil {
			return err
		}
	}
}

func (d *devCluster) missing(resp *metadatav1.GetClusterResponse) string {
	online := map[int32]bool{}
	for _, b := range resp.GetBrokers() {
		online[b.GetBrokerId()] = b.GetOnline()
	}
	open := map[int32]bool{}
	for _, r := range resp.GetRemoteLogManagers() {
		open[r.GetRlmId()] = r.GetOpen()
	}
	for id := 1; id <= d.opts.shape.Brokers; id++ {
		if !online[int32(id)] {
			return fmt.Sprintf("broker %d", id)
		}
	}
	for id := 1; id <= d.opts.shape.RLMs; id++ {
		if !open[int32(id)] {
			return fmt.Sprintf("rlm %d", id)
		}
	}
	return ""
}

// lastWordsOf is what an instance, by name, complains of in its log.
func (d *devCluster) lastWordsOf(name string) string {
	role, id, ok := strings.Cut(name, " ")
	if !ok {
		role, id = name, "1"
	}
	words := lastWords(d.path("logs", role+"-"+id+".log"), role, 0)
	if words == "" {
		return ""
	}
	return ", which says: " + words
}

// deadForGood is an error when a process has ended and won't be started again.
func (d *devCluster) deadForGood() error {
	if d.opts.restart {
		return nil
	}
	return d.endings()
}

// endings tells which processes ended, and their last words.
func (d *devCluster) endings() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for name, reason := range d.lastEnd {
		errs = append(errs, fmt.Errorf("%s ended: %s; see %s", name, reason, d.path("logs", strings.ReplaceAll(name, " ", "-")+".log")))
	}
	return errors.Join(errs...)
}

// kill ends a role instance's process with SIGKILL.
func (d *devCluster) kill(role string, id int) (pid int, err error) {
	if d.super == nil {
		return 0, errors.New("only processes can be killed")
	}
	return d.super.kill(role, id)
}

// stopBound bounds the stop of one role's instances.
const stopBound = 20 * time.Second

// stop ends everything: brokers, then what they need.
func (d *devCluster) stop(ctx context.Context) error {
	var errs []error
	d.mu.Lock()
	d.stopping = true // the ends that follow are wanted
	d.mu.Unlock()
	for _, role := range []string{"broker", "rlm", "metadata"} {
		ctx, cancel := context.WithTimeout(ctx, stopBound)
		if d.super != nil {
			for _, name := range d.super.stopRole(ctx, role) {
				errs = append(errs, fmt.Errorf("%s did not stop in time and was killed", name))
			}
		}
		if d.rooms != nil {
			errs = append(errs, d.rooms.stopRole(ctx, role))
		}
		cancel()
	}
	if d.super != nil {
		d.super.close()
	}
	if d.store != nil {
		errs = append(errs, d.store.Close())
	}
	if d.etcd != nil {
		d.etcd.Close()
	}
	if d.lock != nil {
		errs = append(errs, d.lock.Close())
	}
	if d.temporary && d.dir != "" {
		errs = append(errs, os.RemoveAll(d.dir))
	}
	return errors.Join(errs...)
}

// listen opens the listener of a role instance in this process.
func listen(address string) (net.Listener, error) { return net.Listen("tcp", address) }
