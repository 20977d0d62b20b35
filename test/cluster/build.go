package cluster

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/grpcclient"
	"github.com/braidlog/braid/pkg/grpcserver"
	"github.com/braidlog/braid/pkg/telemetry"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/metadata"
	"github.com/braidlog/braid/services/rlm"
)

// fastReconnect finds a member that came back soon.
var fastReconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 200 * time.Millisecond},
	MinConnectTimeout: 2 * time.Second,
}

func (m *Member) telemetry() telemetry.Config {
	cfg := telemetry.DefaultConfig()
	cfg.LogLevel = m.c.opts.LogLevel
	cfg.LogFormat = telemetry.Text
	cfg.HTTPAddress = ""
	return cfg
}

func shortStop(g *grpcserver.Config) {
	g.DrainDelay = 0
	g.StreamGrace = config.Duration(500 * time.Millisecond)
	g.StopTimeout = config.Duration(2 * time.Second)
}

func shortBackoff(g *grpcclient.Config) { g.MaxBackoff = config.Duration(300 * time.Millisecond) }

// metadataConfig is the configuration of a metadata replica's life, with its own
// relays to etcd and to the bucket.
func (m *Member) metadataConfig(l *life) (metadata.Config, error) {
	cfg := metadata.DefaultConfig()
	cfg.ID = m.id
	cfg.Telemetry = m.telemetry()
	shortStop(&cfg.GRPC)
	etcd, err := m.relay(l, m.c.etcdAddress)
	if err != nil {
		return cfg, err
	}
	bucket, err := m.relay(l, m.c.bucketAddress)
	if err != nil {
		return cfg, err
	}
	cfg.Etcd.Endpoints = config.Strings{"http://" + etcd}
	cfg.Etcd.ProbeInterval = config.Duration(time.Second)
	cfg.Store.Bucket = BucketName
	cfg.Store.Endpoint = "http://" + bucket
	cfg.SessionTimeout = config.Duration(m.c.opts.Session)
	cfg.LeaseTTL = config.Duration(2 * time.Second)
	cfg.OpenTimeout = config.Duration(5 * time.Second)
	cfg.Progress = config.Duration(100 * time.Millisecond)
	cfg.RebalanceDelay = 0 // tests say themselves who leads
	if m.c.opts.ChangeMetadata != nil {
		m.c.opts.ChangeMetadata(&cfg)
	}
	return cfg, nil
}

func (m *Member) buildMetadata(ctx context.Context, l *life) (server, error) {
	cfg, err := m.metadataConfig(l)
	if err != nil {
		return nil, err
	}
	s, err := metadata.Build(ctx, cfg, metadata.Deps{Telemetry: l.tel, Listener: m.front.open(l.nic)})
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (m *Member) buildRLM(ctx context.Context, l *life) (server, error) {
	cfg := rlm.DefaultConfig()
	cfg.ID = m.id
	cfg.Zone = m.Zone()
	cfg.Telemetry = m.telemetry()
	shortStop(&cfg.GRPC)
	shortBackoff(&cfg.Client)
	cfg.MetadataAddresses = m.c.Addresses(RoleMetadata)
	bucket, err := m.relay(l, m.c.bucketAddress)
	if err != nil {
		return nil, err
	}
	cfg.Store.Bucket = BucketName
	cfg.Store.Endpoint = "http://" + bucket
	cfg.WAL.FlushTimeout = config.Duration(3 * time.Second)
	if m.c.opts.ChangeRLM != nil {
		m.c.opts.ChangeRLM(&cfg)
	}
	deps := rlm.Deps{Telemetry: l.tel, Listener: m.front.open(l.nic), DialMetadata: l.nic.dial}
	if wrap := m.c.opts.WrapCommitter; wrap != nil {
		deps.WrapCommitter = func(c rlm.Committer) rlm.Committer { return wrap(m.id, c) }
	}
	s, err := rlm.Build(ctx, cfg, deps)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (m *Member) buildBroker(ctx context.Context, l *life) (server, error) {
	cfg := broker.DefaultConfig()
	cfg.ID = m.id
	cfg.Zone = m.Zone()
	cfg.DataDir = m.dir
	cfg.Telemetry = m.telemetry()
	shortStop(&cfg.GRPC)
	shortBackoff(&cfg.Client)
	cfg.MetadataAddresses = m.c.Addresses(RoleMetadata)
	cfg.HandoverTimeout = config.Duration(5 * time.Second)
	if m.c.opts.ChangeBroker != nil {
		m.c.opts.ChangeBroker(&cfg)
	}
	s, err := broker.Build(ctx, cfg, broker.Deps{
		Telemetry: l.tel, Listener: m.front.open(l.nic), FS: l.disk, Dialer: l.nic.dial,
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}
