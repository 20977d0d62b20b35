package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/rpcerr"
	brokerv1 "github.com/braidlog/braid/proto/gen/go/braid/broker/v1"
	errorsv1 "github.com/braidlog/braid/proto/gen/go/braid/errors/v1"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/test/cluster"
)

// Who creates a topic and appends to it at once, with one call and no retry as
// with a command line client, is kept waiting for the leader, not refused.
func TestTheFirstAppendAfterCreateTopicNeedsNoRetry(t *testing.T) {
	t.Parallel()
	c := cluster.Start(t, cluster.Options{Brokers: 3, Zones: 3})
	brokers := c.Members(cluster.RoleBroker)
	const partitions = 24
	for round := range 3 {
		name := fmt.Sprintf("fresh-%d", round)
		_, err := c.Admin().Topics().CreateTopic(bounded(t, 20*time.Second), &metadatav1.CreateTopicRequest{Name: name, PartitionCount: partitions})
		require.NoError(t, err)
		errs := make(chan error, partitions)
		for i := range int32(partitions) {
			b := brokers[int(i)%len(brokers)] // leads it or not
			log, ctx := c.Log(b), bounded(t, 20*time.Second)
			go func() {
				// The news of the topic needs its milliseconds to every broker; what
				// follows them, elections and openings, is waited for.
				for {
					_, err := log.Append(ctx, &brokerv1.AppendRequest{
						Topic: name, Partition: i, Records: []*brokerv1.Record{{Value: []byte("first")}},
					})
					if !rpcerr.Has(err, errorsv1.ErrorReason_ERROR_REASON_UNKNOWN_TOPIC_OR_PARTITION) {
						errs <- err
						return
					}
				}
			}()
		}
		for range partitions {
			assert.NoError(t, <-errs)
		}
	}
}
