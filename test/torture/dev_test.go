//go:build unix

package torture_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/braidlog/braid/pkg/client"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// The cluster's shape.
const (
	brokers, rlms, replicas = 3, 2, 3
	processes               = brokers + rlms + replicas
)

// instance is a process as endpoints.json tells of it.
type instance struct {
	Role    string `json:"-"`
	ID      int    `json:"id"`
	Address string `json:"address"`
	PID     int    `json:"pid"`
}

func (i instance) String() string { return fmt.Sprintf("%s %d", i.Role, i.ID) }

// dev is a running `braid dev --processes`.
type dev struct {
	dir    string
	cmd    *exec.Cmd
	events *journal
	ended  chan struct{} // closed when it has ended; err is set before
	err    error

	mu         sync.Mutex // guards all below
	killed     map[int]bool
	unexpected []string // ends of processes that nobody killed
}

// buildBraid builds the command with its assertions on, and with the race detector when
// the test has it: that is in the build cache then, as other tests need it too.
func buildBraid(ctx context.Context, t *testing.T) string {
	binary := filepath.Join(t.TempDir(), "braid")
	how := []string{"build", "-tags", "invariants"}
	if raceEnabled {
		how = []string{"build", "-race"}
	}
	cmd := exec.CommandContext(ctx, "go", append(how, "-o", binary, "../../cmd/braid")...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "go build: %s", out)
	return binary
}

// startDev starts the cluster and waits until it is ready. It is stopped, or killed,
// when the test ends.
func startDev(ctx context.Context, t *testing.T, binary, dir string, events *journal) *dev {
	d := &dev{dir: dir, events: events, ended: make(chan struct{}), killed: map[int]bool{}}
	d.cmd = exec.Command(binary, "dev", "--processes", "--json", "--data-dir", dir,
		"--brokers", strconv.Itoa(brokers), "--rlms", strconv.Itoa(rlms), "--metadata", strconv.Itoa(replicas), "--zones", "3")
	d.cmd.SysProcAttr = childAttributes()
	var complaints bytes.Buffer // read only after the end
	d.cmd.Stderr = &complaints
	stdout, err := d.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, d.cmd.Start())
	ready := make(chan struct{})
	go func() {
		defer close(d.ended)
		d.listen(stdout, ready)
		if d.err = d.cmd.Wait(); d.err != nil {
			d.err = fmt.Errorf("braid dev: %w: %s", d.err, complaints.Bytes())
		}
	}()
	t.Cleanup(func() {
		_ = d.cmd.Process.Kill() // after a stop there is nothing left to kill
		<-d.ended
	})
	select {
	case <-ready:
	case <-d.ended:
		require.NoError(t, d.err, "braid dev ended before it was ready")
	case <-ctx.Done():
		require.NoError(t, ctx.Err(), "braid dev did not get ready")
	}
	return d
}

// listen reads what dev prints until it ends.
func (d *dev) listen(stdout io.Reader, ready chan<- struct{}) {
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			Ready  bool   `json:"ready"`
			Event  string `json:"event"`
			Role   string `json:"role"`
			ID     int    `json:"id"`
			PID    int    `json:"pid"`
			Reason string `json:"reason"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			d.events.add("dev said", "line", lines.Text())
			continue
		}
		if line.Ready {
			close(ready)
			continue
		}
		d.events.add("process "+line.Event, "process", fmt.Sprintf("%s %d", line.Role, line.ID), "pid", line.PID, "reason", line.Reason)
		d.mu.Lock()
		if line.Event == "ended" && !d.killed[line.PID] {
			d.unexpected = append(d.unexpected, fmt.Sprintf("%s %d (pid %d) ended by itself: %s", line.Role, line.ID, line.PID, line.Reason))
		}
		d.mu.Unlock()
	}
}

// instances lists all processes as they are now.
func (d *dev) instances() ([]instance, error) {
	data, err := os.ReadFile(filepath.Join(d.dir, "endpoints.json"))
	if err != nil {
		return nil, err
	}
	var file struct {
		Broker, RLM, Metadata []instance
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	var all []instance
	for _, l := range []struct {
		role string
		list []instance
	}{{"broker", file.Broker}, {"rlm", file.RLM}, {"metadata", file.Metadata}} {
		for _, i := range l.list {
			i.Role = l.role
			all = append(all, i)
		}
	}
	return all, nil
}

func (d *dev) find(role string, id int) (instance, error) {
	return d.one(func(i instance) bool { return i.Role == role && i.ID == id })
}

// at is the process with an address.
func (d *dev) at(address string) (instance, error) {
	return d.one(func(i instance) bool { return i.Address == address })
}

func (d *dev) one(is func(instance) bool) (instance, error) {
	all, err := d.instances()
	if err != nil {
		return instance{}, err
	}
	n := slices.IndexFunc(all, is)
	if n < 0 {
		return instance{}, errors.New("endpoints.json does not have the process")
	}
	return all[n], nil
}

func (d *dev) addresses(t *testing.T, role string) []string {
	all, err := d.instances()
	require.NoError(t, err)
	var out []string
	for _, i := range all {
		if i.Role == role {
			out = append(out, i.Address)
		}
	}
	return out
}

// signal sends a signal and returns the moment before it.
func (d *dev) signal(pid int, s syscall.Signal) (time.Time, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s == syscall.SIGKILL {
		d.killed[pid] = true
	}
	at := time.Now()
	return at, syscall.Kill(pid, s)
}

// whole is nil when every process serves, knows a controller, and is a live member.
func (d *dev) whole(ctx context.Context, admin *client.Admin, before instance) error {
	all, err := d.instances()
	if err != nil {
		return err
	}
	if len(all) != processes {
		return fmt.Errorf("endpoints.json has %d processes", len(all))
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for _, i := range all {
		d.mu.Lock()
		dead := d.killed[i.PID]
		d.mu.Unlock()
		if dead {
			return fmt.Errorf("%s was not started again", i)
		}
		if err := serving(ctx, i.Address); err != nil {
			return fmt.Errorf("%s (fault was on %s): %w", i, before, err)
		}
	}
	resp, err := admin.Cluster().GetCluster(ctx, &metadatav1.GetClusterRequest{})
	if err != nil {
		return err
	}
	online, open := 0, 0
	for _, b := range resp.GetBrokers() {
		if b.GetOnline() {
			online++
		}
	}
	for _, r := range resp.GetRemoteLogManagers() {
		if r.GetOpen() {
			open++
		}
	}
	if online != brokers || open != rlms {
		return fmt.Errorf("%d brokers are online, %d remote-log managers open", online, open)
	}
	return nil
}

func serving(ctx context.Context, address string) (err error) {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	resp, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err == nil && resp.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		err = errors.New(resp.GetStatus().String())
	}
	return err
}

// stop ends the cluster as an operator does.
func (d *dev) stop(ctx context.Context) error {
	if err := d.cmd.Process.Signal(syscall.SIGINT); err != nil {
		return err
	}
	select {
	case <-d.ended:
		return d.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// panics lists the lines of the processes' logs that tell of a broken program.
func (d *dev) panics() (found []string, err error) {
	files, err := filepath.Glob(filepath.Join(d.dir, "logs", "*.log"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(data) {
			for _, bad := range []string{"panic", "invariant", "fatal error:", "WARNING: DATA RACE"} {
				if bytes.Contains(line, []byte(bad)) {
					found = append(found, filepath.Base(file)+": "+string(bytes.TrimSpace(line)))
					break
				}
			}
		}
	}
	return found, nil
}
