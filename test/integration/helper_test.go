package integration_test

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/gcs"
	"github.com/braidlog/braid/pkg/record"
	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	"github.com/braidlog/braid/test/cluster"
)

const (
	levelLeader = logv1.Level_LEVEL_LEADER
	levelObject = logv1.Level_LEVEL_OBJECT
)

// bounded is a context for one call.
func bounded(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), d)
	t.Cleanup(cancel)
	return ctx
}

// direct keeps a call from being forwarded.
func direct(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "braid-no-forward", "1")
}

// producer builds the batches of one idempotent producer of a partition.
type producer struct {
	id    int64
	epoch int16
	next  int32
	b     *record.Builder
}

func newProducer(t testing.TB, c *cluster.Cluster, m *cluster.Member) *producer {
	t.Helper()
	resp, err := c.Log(m).InitProducer(bounded(t, 20*time.Second), &brokerv1.InitProducerRequest{})
	require.NoError(t, err)
	return &producer{id: resp.GetProducerId(), epoch: int16(resp.GetProducerEpoch()), b: record.NewBuilder(record.CodecNone)}
}

// batch is the producer's next batch, of one record for each value.
func (p *producer) batch(t testing.TB, values ...string) []byte {
	t.Helper()
	p.b.SetProducer(p.id, p.epoch, p.next)
	p.next += int32(len(values))
	return build(t, p.b, values...)
}

func build(t testing.TB, b *record.Builder, values ...string) []byte {
	t.Helper()
	b.Reset()
	for i, v := range values {
		require.NoError(t, b.Append(record.Record{Timestamp: 1_700_000_000_000 + int64(i), Key: []byte("k"), Value: []byte(v)}))
	}
	out, _, err := b.Build(nil)
	require.NoError(t, err)
	return out
}

// plain is a batch without a producer.
func plain(t testing.TB, values ...string) []byte {
	t.Helper()
	return build(t, record.NewBuilder(record.CodecNone), values...)
}

// appendBatches appends raw batches through a broker and waits for a level.
func appendBatches(t testing.TB, c *cluster.Cluster, m *cluster.Member, topic string, partition int32, level logv1.Level, batches []byte) (*brokerv1.AppendResponse, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return c.Log(m).Append(ctx, &brokerv1.AppendRequest{Topic: topic, Partition: partition, Batches: batches, Level: level})
}

// mustAppend is appendBatches that has to succeed.
func mustAppend(t testing.TB, c *cluster.Cluster, m *cluster.Member, topic string, partition int32, level logv1.Level, batches []byte) *brokerv1.AppendResponse {
	t.Helper()
	resp, err := appendBatches(t, c, m, topic, partition, level, batches)
	require.NoError(t, err)
	require.Contains(t, resp.GetLevels(), level)
	return resp
}

// got is a record as it was read.
type got struct {
	offset int64
	key    string
	value  string
	epoch  int32
}

// readAll reads a partition from an offset to its end through a broker.
func readAll(t testing.TB, c *cluster.Cluster, m *cluster.Member, topic string, partition int32, from int64) []got {
	t.Helper()
	out, err := tryRead(c, m, &brokerv1.ReadRequest{Topic: topic, Partition: partition, Start: &brokerv1.ReadRequest_Offset{Offset: from}})
	require.NoError(t, err)
	return out
}

// tryRead reads what a request asks for, in the format of records.
func tryRead(c *cluster.Cluster, m *cluster.Member, req *brokerv1.ReadRequest) ([]got, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	stream, err := c.Log(m).Read(ctx, req)
	if err != nil {
		return nil, err
	}
	var out []got
	for {
		resp, err := stream.Recv()
		if err == io.EOF { //nolint:errorlint // gRPC returns it bare
			return out, nil
		}
		if err != nil {
			return out, err
		}
		for _, r := range resp.GetRecords().GetRecords() {
			out = append(out, got{offset: r.GetOffset(), key: string(r.GetRecord().GetKey()), value: string(r.GetRecord().GetValue()), epoch: r.GetLeadership().GetLeaderEpoch()})
		}
	}
}

func values(all []got) []string {
	out := make([]string, len(all))
	for i, g := range all {
		out[i] = g.value
	}
	return out
}

// dense requires offsets from from on, without a gap.
func dense(t testing.TB, from int64, all []got) {
	t.Helper()
	for i, g := range all {
		require.Equal(t, from+int64(i), g.offset, "record %d of %v", i, g)
	}
}

func numbered(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s-%d", prefix, i)
	}
	return out
}

// refused requires a Braid error of a code and a reason, and gives it.
func refused(t testing.TB, err error, code codes.Code, reason errorsv1.ErrorReason) *rpcerr.Error {
	t.Helper()
	require.Error(t, err)
	e, ok := rpcerr.From(err)
	require.True(t, ok, "not a gRPC error: %v", err)
	require.Equal(t, code, e.Code, "%v", e)
	require.Equal(t, rpcerr.ReasonName(reason), rpcerr.ReasonName(e.Reason), "%v", e)
	return e
}

func offsets(t testing.TB, c *cluster.Cluster, m *cluster.Member, topic string, partition int32) *brokerv1.ListOffsetsResponse {
	t.Helper()
	resp, err := c.Log(m).ListOffsets(bounded(t, 20*time.Second), &brokerv1.ListOffsetsRequest{
		Topic: topic, Partition: partition, Spec: &brokerv1.ListOffsetsRequest_At{At: brokerv1.OffsetSpec_OFFSET_SPEC_LOG_END},
	})
	require.NoError(t, err)
	return resp
}

func codesOf(ex *brokerv1.ExplainPartitionResponse) []string {
	var out []string
	for _, f := range ex.GetFindings() {
		out = append(out, f.GetCode())
	}
	return out
}

func explain(t testing.TB, c *cluster.Cluster, m *cluster.Member, topic string, partition int32) *brokerv1.ExplainPartitionResponse {
	t.Helper()
	resp, err := c.Log(m).ExplainPartition(direct(bounded(t, 20*time.Second)), &brokerv1.ExplainPartitionRequest{Topic: topic, Partition: partition})
	require.NoError(t, err)
	return resp
}

// refusedAny is refused with any of the reasons that name a field.
func refusedAny(t testing.TB, err error, code codes.Code) *rpcerr.Error {
	t.Helper()
	e, ok := rpcerr.From(err)
	require.True(t, ok, "not a gRPC error: %v", err)
	require.Equal(t, code, e.Code, "%v", e)
	require.Contains(t, []string{"INVALID_FIELD", "UNSUPPORTED"}, rpcerr.ReasonName(e.Reason))
	return e
}

// call is an append under way.
type call struct {
	done chan struct{}
	resp *brokerv1.AppendResponse
	err  error
}

// goAppend begins an append of raw batches.
func goAppend(c *cluster.Cluster, m *cluster.Member, topic string, partition int32, level logv1.Level, bound time.Duration, batches []byte) *call {
	log, out := c.Log(m), &call{done: make(chan struct{})}
	go func() {
		defer close(out.done)
		ctx, cancel := context.WithTimeout(context.Background(), bound)
		defer cancel()
		out.resp, out.err = log.Append(ctx, &brokerv1.AppendRequest{Topic: topic, Partition: partition, Batches: batches, Level: level})
	}()
	return out
}

// wait waits for the answer.
func (c *call) wait(t testing.TB) (*brokerv1.AppendResponse, error) {
	t.Helper()
	select {
	case <-c.done:
		return c.resp, c.err
	case <-time.After(cluster.Patience):
		t.Fatal("no answer")
		return nil, nil
	}
}

// referenced requires that the committed ranges of a partition follow each other
// up to end, and that each of their objects was stored; it returns their names.
func referenced(t testing.TB, c *cluster.Cluster, topic string, partition int, end int64) map[string]bool {
	t.Helper()
	out, next := map[string]bool{}, int64(0)
	stored := bucketObjects(t, c)
	for _, s := range c.Segments(topic, partition) {
		require.Equal(t, next, s.GetBaseOffset(), "ranges of %s/%d do not follow each other", topic, partition)
		next = s.GetEndOffset()
		out[s.GetObjectName()] = true
		require.Contains(t, stored, s.GetObjectName(), "a committed range without an object")
	}
	require.Equal(t, end, next)
	return out
}

// bucketObjects lists the combined objects that are in the bucket.
func bucketObjects(t testing.TB, c *cluster.Cluster) map[string]bool {
	t.Helper()
	store, err := gcs.Open(t.Context(), func() gcs.Config {
		cfg := gcs.DefaultConfig(cluster.BucketName)
		cfg.Endpoint = c.Bucket.Endpoint()
		return cfg
	}())
	require.NoError(t, err)
	defer func() { _ = store.Close() }()
	out := map[string]bool{}
	for a, err := range objstore.List(bounded(t, 20*time.Second), store, "", "") {
		require.NoError(t, err)
		if strings.Contains(a.Name, "/wal/") {
			out[a.Name] = true
		}
	}
	return out
}

// refusedWith says whether err has the reason.
func refusedWith(err error, reason errorsv1.ErrorReason) bool { return rpcerr.Has(err, reason) }

// refusedCode requires a Braid error of a code.
func refusedCode(t testing.TB, err error, code codes.Code) *rpcerr.Error {
	t.Helper()
	e, ok := rpcerr.From(err)
	require.True(t, ok, "not a gRPC error: %v", err)
	require.Equal(t, code, e.Code, "%v", e)
	return e
}

// recovered waits until a broker leads a partition and knows its producers.
func recovered(t testing.TB, c *cluster.Cluster, m *cluster.Member, topic string, partition int32) {
	t.Helper()
	c.Eventually("the producers are known", func() bool {
		ex := explain(t, c, m, topic, partition)
		return ex.GetState() == brokerv1.ReplicaState_REPLICA_STATE_ACTIVE && !slices.Contains(codesOf(ex), "PRODUCERS_RECOVERING")
	})
}

// startWithoutCopies starts a broker that was down and makes it the leader of a
// topic before it can copy anything: what was written while it was away it has to
// read from the bucket, through the one remote-log manager.
func startWithoutCopies(t testing.TB, c *cluster.Cluster, m *cluster.Member, topic string, partitions int) {
	t.Helper()
	c.RLM(1).Kill()
	m.Start()
	c.WaitReady(m)
	for p := range partitions {
		c.Elect(topic, p, m)
	}
	c.RLM(1).Start()
	c.WaitMembers()
	for p := range partitions {
		recovered(t, c, m, topic, int32(p))
	}
}
