package grpcclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
)

// baseBackoff is the delay after the first failed connection attempt.
const baseBackoff = 100 * time.Millisecond

// listScheme is the scheme of a target that lists its addresses.
const listScheme = "braid-list"

// Deps are the live things a connection needs.
type Deps struct {
	// Logger takes warnings about doubtful settings; required.
	Logger *slog.Logger
	// TracerProvider and MeterProvider are required.
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
	// Credentials secure the connection; nil is plaintext, for private
	// networks and tests.
	Credentials credentials.TransportCredentials
	// Dialer replaces the TCP dialer, for tests; nil is the standard one.
	Dialer func(ctx context.Context, address string) (net.Conn, error)
}

// Dial makes a connection to target. It does no I/O: the connection is made by
// the first call or by [WaitReady]. opts come after the package's own options.
func Dial(target string, cfg Config, deps Deps, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if deps.Logger == nil || deps.TracerProvider == nil || deps.MeterProvider == nil {
		return nil, errors.New("grpcclient: Logger, TracerProvider and MeterProvider are required")
	}
	for _, warning := range cfg.Warnings() {
		deps.Logger.Warn("doubtful gRPC setting", "component", "grpcclient", "warning", warning)
	}
	all := []grpc.DialOption{
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(
			otelgrpc.WithTracerProvider(deps.TracerProvider),
			otelgrpc.WithMeterProvider(deps.MeterProvider),
			otelgrpc.WithPropagators(propagation.TraceContext{}),
			otelgrpc.WithFilter(filters.Not(filters.HealthCheck())),
		)),
		grpc.WithChainUnaryInterceptor(deadline(cfg.CallTimeout.Std())),
		grpc.WithDefaultServiceConfig(serviceConfig(cfg)),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(int(cfg.MaxRecvMessage)),
			grpc.MaxCallSendMsgSize(int(cfg.MaxSendMessage)),
			grpc.WaitForReady(cfg.WaitForReady),
		),
		grpc.WithInitialWindowSize(int32(cfg.StreamWindow)),
		grpc.WithInitialConnWindowSize(int32(cfg.ConnWindow)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay:  baseBackoff,
				Multiplier: 1.6,
				Jitter:     0.2,
				MaxDelay:   cfg.MaxBackoff.Std(),
			},
			MinConnectTimeout: cfg.ConnectTimeout.Std(),
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time:                cfg.KeepaliveTime.Std(),
			Timeout:             cfg.KeepaliveTimeout.Std(),
			PermitWithoutStream: true,
		}),
	}
	creds := deps.Credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	all = append(all, grpc.WithTransportCredentials(creds))
	if deps.Dialer != nil {
		all = append(all, grpc.WithContextDialer(deps.Dialer))
	}
	if addresses := strings.Split(target, ","); len(addresses) > 1 {
		list, err := newListResolver(addresses)
		if err != nil {
			return nil, fmt.Errorf("dial %q: %w", target, err)
		}
		all = append(all, grpc.WithResolvers(list))
		target = listScheme + ":///addresses"
	} else if !strings.Contains(target, "://") && deps.Dialer != nil {
		target = "passthrough:///" + target // the dialer resolves
	}
	conn, err := grpc.NewClient(target, append(all, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("dial %q: %w", target, err)
	}
	return conn, nil
}

func serviceConfig(cfg Config) string {
	policy := `{"round_robin": {}}`
	if cfg.Balancer == PickFirst {
		policy = `{"pick_first": {"shuffleAddressList": true}}`
	}
	return `{"loadBalancingConfig": [` + policy + `]}`
}

// deadline gives a deadline to calls that have none.
func deadline(timeout time.Duration) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		return invoker(ctx, method, req, reply, cc, opts...)
	}
}

// WaitReady connects and waits until the connection is ready. It returns the
// cause of ctx's end otherwise.
func WaitReady(ctx context.Context, conn *grpc.ClientConn) error {
	for {
		conn.Connect()
		state := conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Shutdown:
			return errors.New("wait for the connection: it is closed")
		}
		if !conn.WaitForStateChange(ctx, state) {
			return fmt.Errorf("wait for the connection to %s (%s): %w", conn.Target(), state, context.Cause(ctx))
		}
	}
}

// listResolver serves a fixed list of addresses.
type listResolver struct{ state resolver.State }

func newListResolver(addresses []string) (*listResolver, error) {
	r := new(listResolver)
	for _, address := range addresses {
		address = strings.TrimSpace(address)
		if address == "" {
			return nil, errors.New("the list has an empty address")
		}
		r.state.Endpoints = append(r.state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: address, ServerName: address}}})
	}
	return r, nil
}

func (r *listResolver) Scheme() string { return listScheme }

func (r *listResolver) Build(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) (resolver.Resolver, error) {
	if err := cc.UpdateState(r.state); err != nil {
		return nil, fmt.Errorf("use the address list: %w", err)
	}
	return r, nil
}

// ResolveNow does nothing: the list never changes.
func (r *listResolver) ResolveNow(resolver.ResolveNowOptions) {}

// Close does nothing.
func (r *listResolver) Close() {}
