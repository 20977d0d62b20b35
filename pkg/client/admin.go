package client

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"

	"github.com/braidlog/braid/pkg/metaclient"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// Admin reaches the metadata service: topics, segments, the cluster's members.
type Admin struct {
	meta *metaclient.Client
}

// DialAdmin makes an Admin from the addresses of metadata replicas, host:port
// each. Of the options it uses the logger, the providers and the dialer. It
// connects on first use. The caller closes it.
func DialAdmin(addresses []string, opts Options) (*Admin, error) {
	if len(addresses) == 0 {
		return nil, errors.New("client: no metadata address was given")
	}
	opts = opts.withDefaults()
	meta, err := metaclient.New(metaclient.Options{
		Addresses: addresses,
		Logger:    opts.Logger,
		Dial:      func(address string) (*grpc.ClientConn, error) { return dial(address, opts) },
	})
	if err != nil {
		return nil, err
	}
	return &Admin{meta: meta}, nil
}

// Close ends the connections.
func (a *Admin) Close() error { return a.meta.Close() }

// Topics is the TopicService, reached at the controller: calls follow it.
func (a *Admin) Topics() metadatav1.TopicServiceClient {
	return metadatav1.NewTopicServiceClient(a.meta.Controller())
}

// Segments is the SegmentService, reached at any replica.
func (a *Admin) Segments() metadatav1.SegmentServiceClient {
	return metadatav1.NewSegmentServiceClient(a.meta.Any())
}

// Cluster is the ClusterService, reached at the controller.
func (a *Admin) Cluster() metadatav1.ClusterServiceClient {
	return metadatav1.NewClusterServiceClient(a.meta.Controller())
}

// ListTopics lists all live topics in order of name.
func (a *Admin) ListTopics(ctx context.Context) ([]*metadatav1.Topic, error) {
	var out []*metadatav1.Topic
	token := ""
	for {
		resp, err := a.Topics().ListTopics(ctx, &metadatav1.ListTopicsRequest{PageSize: 1000, PageToken: token})
		if err != nil {
			return nil, fmt.Errorf("list topics: %w", err)
		}
		out = append(out, resp.GetTopics()...)
		if token = resp.GetNextPageToken(); token == "" {
			return out, nil
		}
	}
}

// ListSegments calls fn for every committed range of a partition that ends above
// from, in order of offset, until fn fails.
func (a *Admin) ListSegments(ctx context.Context, topic string, partition int32, from int64, fn func(*metadatav1.SegmentRange) error) error {
	token := ""
	for {
		resp, err := a.Segments().ListSegments(ctx, &metadatav1.ListSegmentsRequest{
			Topic: topic, Partition: partition, FromOffset: from, PageSize: 1000, PageToken: token,
		})
		if err != nil {
			return fmt.Errorf("list segments of %s/%d: %w", topic, partition, err)
		}
		for _, r := range resp.GetRanges() {
			if err := fn(r); err != nil {
				return err
			}
		}
		if token = resp.GetNextPageToken(); token == "" {
			return nil
		}
	}
}
