package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/braidlog/braid/pkg/telemetry"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/rlm"
)

// Role is what a member is.
type Role string

// The roles.
const (
	RoleMetadata Role = "metadata"
	RoleRLM      Role = "rlm"
	RoleBroker   Role = "broker"
)

// Member is one member of the cluster over all of its lives. See the package
// comment.
type Member struct {
	c     *Cluster
	role  Role
	id    int
	front *front
	dir   string
	life  *life   // the present or last one, nil before the first
	past  []*life // that were killed and may not have ended yet
}

// life is one process of a member.
type life struct {
	nic    *nic
	disk   *disk
	tel    *telemetry.Telemetry
	server server
	cancel context.CancelFunc
	done   chan struct{}
	err    error // of Run; read after done
	killed bool
}

// server is what the services have in common.
type server interface {
	Run(ctx context.Context) error
	Close() error
}

// ID is the member's id within its role, from 1.
func (m *Member) ID() int { return m.id }

// Address is where the member is reached, in all of its lives.
func (m *Member) Address() string { return m.front.address() }

// Dir is the member's data directory.
func (m *Member) Dir() string { return m.dir }

// Zone is the member's zone.
func (m *Member) Zone() string { return m.c.zone(m.id) }

// String names the member.
func (m *Member) String() string { return fmt.Sprintf("%s-%d", m.role, m.id) }

// Start begins a life. The member must not run.
func (m *Member) Start() {
	m.c.tb.Helper()
	m.c.must(m.TryStart(context.Background()), "start "+m.String())
}

// TryStart is Start with the error of Build. ctx bounds Build.
func (m *Member) TryStart(ctx context.Context) error {
	m.c.tb.Helper()
	if m.Running() {
		m.c.tb.Fatalf("%s runs already", m)
	}
	if m.life != nil {
		m.past = append(m.past, m.life)
	}
	l := &life{nic: newNIC(), disk: newDisk(), done: make(chan struct{})}
	m.life = l
	tel, err := telemetry.New(ctx, m.telemetry(), telemetry.Identity{Service: string(m.role), Instance: m.String(), Version: "test"},
		telemetry.Options{LogOutput: m.c.tb.Output()})
	m.c.must(err, "build the telemetry")
	l.tel = tel
	if l.server, err = m.build(ctx, l); err != nil {
		m.front.down()
		l.nic.close()
		l.disk.kill()
		close(l.done)
		return err
	}
	run, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	go func() {
		defer close(l.done)
		l.err = l.server.Run(run)
	}()
	return nil
}

func (m *Member) build(ctx context.Context, l *life) (server, error) {
	switch m.role {
	case RoleMetadata:
		return m.buildMetadata(ctx, l)
	case RoleRLM:
		return m.buildRLM(ctx, l)
	default:
		return m.buildBroker(ctx, l)
	}
}

// Running says whether the member runs.
func (m *Member) Running() bool {
	if m.life == nil || m.life.killed {
		return false
	}
	select {
	case <-m.life.done:
		return false
	default:
		return true
	}
}

// Stop ends the member as a signal would, and returns Run's error.
func (m *Member) Stop() error {
	m.c.tb.Helper()
	if m.life == nil || m.life.killed {
		return nil
	}
	m.life.cancel()
	return m.Wait()
}

// Wait waits until the member has ended by itself, and returns Run's error.
func (m *Member) Wait() error {
	m.c.tb.Helper()
	l := m.life
	select {
	case <-l.done:
		m.front.down()
		l.nic.close()
		return l.err
	case <-time.After(Patience):
		m.c.tb.Fatalf("%s does not end within %s", m, Patience)
		return nil
	}
}

// Kill ends the member as SIGKILL would.
func (m *Member) Kill() {
	l := m.life
	if l == nil || l.killed {
		return
	}
	l.killed = true
	m.front.down()
	// The network goes first: a process whose disk fails may still ask for an election, a killed one may not.
	l.nic.setCut(true)
	l.disk.kill()
	l.cancel()
}

// Restart kills the member and begins its next life.
func (m *Member) Restart() {
	m.c.tb.Helper()
	m.Kill()
	m.Start()
}

// Isolate cuts the member off from everybody; it goes on running.
func (m *Member) Isolate() { m.life.nic.setCut(true) }

// Reconnect ends an isolation.
func (m *Member) Reconnect() { m.life.nic.setCut(false) }

// end begins the end of all lives; join waits for it.
func (m *Member) end() {
	if m.life != nil && m.life.cancel != nil {
		m.Kill()
	}
}

func (m *Member) join() {
	lives := m.past
	if m.life != nil {
		lives = append(lives, m.life)
	}
	for _, l := range lives {
		select {
		case <-l.done:
		case <-time.After(Patience):
			m.c.tb.Errorf("%s has not ended within %s of its death", m, Patience)
			continue
		}
		l.nic.close()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		_ = l.tel.Shutdown(ctx)
		cancel()
	}
	m.front.close()
}

// MetadataServer is the running service of a metadata replica.
func (m *Member) MetadataServer() *metadata.Server {
	s, _ := m.life.server.(*metadata.Server)
	return s
}

// RLMServer is the running service of a remote-log manager.
func (m *Member) RLMServer() *rlm.Server {
	s, _ := m.life.server.(*rlm.Server)
	return s
}

// BrokerServer is the running service of a broker.
func (m *Member) BrokerServer() *broker.Server {
	s, _ := m.life.server.(*broker.Server)
	return s
}

// errNoRelay is the end of a start whose relay could not listen.
var errNoRelay = errors.New("cluster: no relay")

func (m *Member) relay(l *life, target func() string) (string, error) {
	address, err := l.nic.relay(target)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNoRelay, err)
	}
	return address, nil
}
