package broker_test

import (
	"context"
	"flag"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/braidlog/braid/pkg/config"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/broker"
	"github.com/braidlog/braid/services/broker/brokertest"
)

func TestBadConfigurationIsNamed(t *testing.T) {
	good := func() broker.Config {
		c := broker.DefaultConfig()
		c.ID, c.DataDir, c.MetadataAddresses = 1, "/tmp/x", config.Strings{"127.0.0.1:1"}
		return c
	}
	c := good()
	require.NoError(t, c.Validate())
	for field, change := range map[string]func(*broker.Config){
		"id":                         func(c *broker.Config) { c.ID = 0 },
		"data.dir":                   func(c *broker.Config) { c.DataDir = "" },
		"metadata.addresses":         func(c *broker.Config) { c.MetadataAddresses = config.Strings{"nowhere"} },
		"grpc.advertise-address":     func(c *broker.Config) { c.AdvertiseAddress = ":0" },
		"grpc.listen-address":        func(c *broker.Config) { c.GRPC.ListenAddress = "x" },
		"client.call-timeout":        func(c *broker.Config) { c.Client.CallTimeout = 0 },
		"start.timeout":              func(c *broker.Config) { c.StartTimeout = 0 },
		"stop.handover-timeout":      func(c *broker.Config) { c.HandoverTimeout = -1 },
		"log.level":                  func(c *broker.Config) { c.Telemetry.LogLevel = "loud" },
		"append.max-decoded-bytes":   func(c *broker.Config) { c.API.MaxDecodedBytes = config.GiB },
		"append.buffer-bytes":        func(c *broker.Config) { c.API.AppendBufferBytes = 1 },
		"read.chunk-bytes":           func(c *broker.Config) { c.API.ReadChunkBytes = 1 },
		"wal.max-unuploaded-bytes":   func(c *broker.Config) { c.Partitions.MaxUnuploadedBytes = 1 },
		"producer.recovery-patience": func(c *broker.Config) { c.Partitions.RecoveryPatience = -1 },
	} {
		c := good()
		change(&c)
		err := c.Validate()
		require.ErrorIs(t, err, config.ErrInvalid, field)
		var fe *config.FieldError
		require.ErrorAs(t, err, &fe)
		require.Equal(t, field, fe.Field)
		require.NotEmpty(t, fe.Allowed)
		_, err = broker.Build(t.Context(), c, broker.Deps{})
		require.ErrorIs(t, err, config.ErrInvalid, field)
	}
}

func TestEveryKeyCanBeSetAndPrinted(t *testing.T) {
	var c broker.Config
	loaded, err := config.Load("broker", &c, []string{
		"--id=4", "--data.dir=/d", "--metadata.addresses=a:1,b:2", "--zone=z", "--grpc.advertise-address=h:9",
		"--wal.max-unuploaded-bytes=1GiB", "--rlm.zone-patience=5s", "--read.max-streams=7",
	}, config.Options{EnvPrefix: "BROKER", LookupEnv: func(key string) (string, bool) { return "3s", key == "BROKER_START_TIMEOUT" }})
	require.NoError(t, err)
	require.Equal(t, 4, c.ID)
	require.Equal(t, config.Strings{"a:1", "b:2"}, c.MetadataAddresses)
	require.Equal(t, config.GiB, c.Partitions.MaxUnuploadedBytes)
	require.Equal(t, 3*time.Second, c.StartTimeout.Std())
	loaded.Flags.VisitAll(func(f *flag.Flag) { require.NotEmpty(t, f.Usage, f.Name) })

	_, err = config.Load("broker", new(broker.Config), []string{"--id=4", "--data.dir=/d", "--metadata.addresses=a:1", "--config.file=x"}, config.Options{
		ReadFile: func(string) ([]byte, error) { return []byte("wal:\n  max-unuploaded-byte: 1GiB\n"), nil },
	})
	require.ErrorContains(t, err, "wal.max-unuploaded-byte")
}

func TestAMetadataServiceThatCanNotBeReachedIsNamed(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nowhere := l.Addr().String()
	require.NoError(t, l.Close())
	start := time.Now()
	i := brokertest.Start(t, brokertest.Options{Metadata: []string{nowhere, "127.0.0.1:1"}, Change: func(c *broker.Config) {
		c.StartTimeout = config.Duration(200 * time.Millisecond)
	}})
	err = i.Err()
	var se *broker.StartError
	require.ErrorAs(t, err, &se)
	require.False(t, se.Reachable)
	require.ErrorContains(t, err, nowhere)
	require.ErrorContains(t, err, "127.0.0.1:1")
	require.ErrorContains(t, err, "200ms")
	require.Less(t, time.Since(start), 15*time.Second)
}

func TestABrokerThatIsNotRegisteredSaysSo(t *testing.T) {
	m := startMetadata(t, "c1")
	m.register = func(*metadatav1.RegisterBrokerRequest) error { return rpcerr.NotController("") }
	i := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}, Change: func(c *broker.Config) {
		c.StartTimeout = config.Duration(200 * time.Millisecond)
	}})
	var se *broker.StartError
	require.ErrorAs(t, i.Err(), &se)
	require.True(t, se.Reachable)
	require.ErrorContains(t, se, "was not registered within 200ms")
}

func TestARefusedRegistrationEndsTheProcess(t *testing.T) {
	m := startMetadata(t, "c1")
	m.register = func(req *metadatav1.RegisterBrokerRequest) error {
		return rpcerr.FailedPrecondition(errorsv1.ErrorReason_ERROR_REASON_BROKER_ID_IN_USE, "broker 1", "broker 1 is alive elsewhere").With("address", "h:1")
	}
	i := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}})
	err := i.Err()
	require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_BROKER_ID_IN_USE), "%v", err)
	require.ErrorContains(t, err, "alive elsewhere")
}

func TestHealthServesOnceRegistered(t *testing.T) {
	m := startMetadata(t, "c1")
	allowed := make(chan struct{})
	m.register = func(*metadatav1.RegisterBrokerRequest) error {
		select {
		case <-allowed:
			return nil
		default:
			return rpcerr.NotController("")
		}
	}
	i := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}, Zone: "z1"})
	health := healthv1.NewHealthClient(i.Conn())
	status := func(service string) healthv1.HealthCheckResponse_ServingStatus {
		resp, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
		require.NoError(t, err)
		return resp.GetStatus()
	}
	require.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, status(""))
	close(allowed)
	i.WaitReady()
	require.Eventually(t, func() bool { return status("") == healthv1.HealthCheckResponse_SERVING }, 10*time.Second, 5*time.Millisecond)
	require.Equal(t, healthv1.HealthCheckResponse_SERVING, status("braid.broker.v1.LogService"))
	registered, _ := m.read()
	require.Equal(t, i.Addr(), registered[0].GetAddress())
	require.Equal(t, "z1", registered[0].GetZone())
	require.NotEmpty(t, registered[0].GetDirectoryId())
	epoch, ok := i.Server.Epoch()
	require.True(t, ok)
	require.EqualValues(t, 11, epoch)

	_, err := i.Client().Append(t.Context(), &brokerv1.AppendRequest{Topic: "none", Records: []*brokerv1.Record{{}}})
	require.True(t, rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION), "%v", err)
	i.Stop()
	_, stopping := m.read()
	require.Equal(t, []int32{1}, stopping, "the session was ended, not left to time out")
}

func TestReflectionListsTheService(t *testing.T) {
	m := startMetadata(t, "c1")
	i := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}})
	stream, err := reflectionv1.NewServerReflectionClient(i.Conn()).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	require.NoError(t, stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
	resp, err := stream.Recv()
	require.NoError(t, err)
	var names []string
	for _, s := range resp.GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	require.Contains(t, names, "braid.broker.v1.LogService")
	require.Contains(t, names, "grpc.health.v1.Health")
}

func TestASecondProcessOnADirectoryIsRefused(t *testing.T) {
	m := startMetadata(t, "c1")
	first := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}}).WaitReady()
	o := first.Options
	o.Address = ""
	err := brokertest.Start(t, o).Err()
	require.ErrorContains(t, err, "in use by another process")
	require.ErrorContains(t, err, o.DataDir)

	first.Stop()
	o.Address = first.Options.Address
	brokertest.Start(t, o).WaitReady().Stop()
	registered, _ := m.read()
	require.Len(t, registered, 2, "the refused one never registered")
	require.Equal(t, registered[0].GetDirectoryId(), registered[1].GetDirectoryId())
	require.True(t, registered[1].GetLogsIntact(), "it was closed cleanly")
}

func TestADirectoryOfAnotherClusterIsRefused(t *testing.T) {
	m := startMetadata(t, "c1")
	first := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}}).WaitReady()
	first.Stop()
	before := files(t, first.Options.DataDir)

	other := startMetadata(t, "c2")
	o := first.Options
	o.Address, o.Metadata = "", []string{other.address}
	err := brokertest.Start(t, o).Err()
	require.ErrorContains(t, err, `cluster id is "c1", expected "c2"`)
	require.Equal(t, before, files(t, o.DataDir), "nothing was touched")
	registered, _ := other.read()
	require.Empty(t, registered)

	o.Metadata, o.ID = []string{m.address}, 2
	err = brokertest.Start(t, o).Err()
	require.ErrorContains(t, err, "broker id is 1, expected 2")
}

func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			var data []byte
			if data, err = os.ReadFile(path); err == nil {
				out[path] = string(data)
			}
		}
		return err
	}))
	return out
}

func TestAKilledBrokerLeavesNoCleanMark(t *testing.T) {
	m := startMetadata(t, "c1")
	first := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}}).WaitReady()
	first.Kill()
	_, stopping := m.read()
	require.Empty(t, stopping, "the dead say nothing")
	first.Restart().WaitReady()
	registered, _ := m.read()
	require.Len(t, registered, 2)
	require.False(t, registered[1].GetLogsIntact())
}

func TestMetricsShowTheBroker(t *testing.T) {
	m := startMetadata(t, "c1")
	i := brokertest.Start(t, brokertest.Options{Metadata: []string{m.address}, Change: func(c *broker.Config) {
		c.Telemetry.HTTPAddress = "127.0.0.1:0"
	}}).WaitReady()
	_, err := i.Client().Append(t.Context(), &brokerv1.AppendRequest{Topic: "none", Records: []*brokerv1.Record{{}}})
	require.Equal(t, codes.NotFound, mustCode(t, err))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+i.Server.PrivateAddr()+"/metrics", nil)
	require.NoError(t, err)
	client := &http.Client{Timeout: 10 * time.Second}
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	for _, want := range []string{
		"broker_session_registered", "broker_unuploaded_bytes", "broker_wal_feed_rlm", "broker_wal_feed_outstanding_bytes",
		"broker_metadata_offset", `broker_follower_lag{of="largest"`, `broker_errors_total{method="Append"`, `reason="UNKNOWN_TOPIC_OR_PARTITION"`, "rpc_server_call_duration",
	} {
		require.Contains(t, string(page), want)
	}
}

func mustCode(t *testing.T, err error) codes.Code {
	t.Helper()
	e, ok := rpcerr.From(err)
	require.True(t, ok, "%v", err)
	return e.Code
}

func TestListeningOnEveryInterfaceNeedsAnAddressToTell(t *testing.T) {
	c := brokertest.Config(brokertest.Options{DataDir: t.TempDir(), Metadata: []string{"127.0.0.1:1"}, Address: "0.0.0.0:0"})
	_, err := broker.Build(t.Context(), c, broker.Deps{})
	require.ErrorIs(t, err, config.ErrInvalid)
	require.ErrorContains(t, err, "grpc.advertise-address")
	c.AdvertiseAddress = "broker.example:9090"
	s, err := broker.Build(t.Context(), c, broker.Deps{})
	require.NoError(t, err)
	require.Equal(t, "broker.example:9090", s.AdvertisedAddr())
	require.True(t, strings.HasPrefix(s.Addr(), "[::]:") || strings.HasPrefix(s.Addr(), "0.0.0.0:"), s.Addr())
	require.NoError(t, s.Close())
}

func TestABuildThatFailsLeavesNothingOpen(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	c := brokertest.Config(brokertest.Options{DataDir: t.TempDir(), Metadata: []string{"127.0.0.1:1"}, Address: l.Addr().String()})
	_, err = broker.Build(t.Context(), c, broker.Deps{})
	require.ErrorContains(t, err, l.Addr().String())
	require.NotErrorIs(t, err, context.Canceled)
}
