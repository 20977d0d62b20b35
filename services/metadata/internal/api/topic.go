package api

import (
	"context"
	"encoding/base64"
	"fmt"

	"github.com/braidlog/braid/pkg/rpcerr"
	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
	"github.com/braidlog/braid/services/metadata/internal/controller"
	"github.com/braidlog/braid/services/metadata/state"
)

// CreateTopic implements the contract.
func (s *Server) CreateTopic(ctx context.Context, r *metadatav1.CreateTopicRequest) (*metadatav1.CreateTopicResponse, error) {
	id := s.deps.NewTopicID()
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassTopic, func(st *state.State) ([]*metadatav1.Event, error) {
		return st.DecideCreateTopic(r, id)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	topic, err := s.topic(id)
	if err != nil {
		return nil, err
	}
	return &metadatav1.CreateTopicResponse{Topic: topic, MetadataOffset: offset}, nil
}

// topic describes a topic right behind a change of it; it may be gone by then.
func (s *Server) topic(nameOrID string) (topic *metadatav1.Topic, err error) {
	found := false
	if err := s.read(func(st *state.State) { topic, found = st.Topic(nameOrID) }); err != nil {
		return nil, err
	}
	if !found {
		return nil, rpcerr.UnknownTopicOrPartition(nameOrID)
	}
	return topic, nil
}

// GetTopic implements the contract.
func (s *Server) GetTopic(_ context.Context, r *metadatav1.GetTopicRequest) (*metadatav1.GetTopicResponse, error) {
	key := r.GetName()
	if key == "" {
		key = r.GetTopicId()
	}
	if key == "" {
		return nil, rpcerr.InvalidField("by", "give the topic's name or its id")
	}
	resp := &metadatav1.GetTopicResponse{}
	found := false
	err := s.read(func(st *state.State) {
		resp.Topic, found = st.Topic(key)
		if found && r.GetTopicId() == "" && resp.Topic.GetName() != key {
			found = false // an id where a name was asked for
		}
		resp.MetadataOffset = st.EndOffset()
	})
	switch {
	case err != nil:
		return nil, err
	case !found:
		return nil, rpcerr.UnknownTopicOrPartition(key).With("metadata_offset", resp.MetadataOffset)
	}
	return resp, nil
}

// ListTopics implements the contract.
func (s *Server) ListTopics(_ context.Context, r *metadatav1.ListTopicsRequest) (*metadatav1.ListTopicsResponse, error) {
	size, err := pageSize(r.GetPageSize(), 100, 1_000)
	if err != nil {
		return nil, err
	}
	after, err := base64.RawURLEncoding.DecodeString(r.GetPageToken())
	if err != nil {
		return nil, rpcerr.InvalidField("page_token", "is not one that this service gave")
	}
	resp := &metadatav1.ListTopicsResponse{}
	next, more := string(after), false
	err = s.read(func(st *state.State) {
		for partitions := 0; ; {
			page := st.Topics(next, 1, false)
			if more = len(page) > 0; !more {
				return
			}
			// A page also ends where its message would become too large.
			partitions += len(page[0].GetPartitions())
			if len(resp.Topics) == size || partitions > pagePartitions && len(resp.Topics) > 0 {
				return
			}
			resp.Topics = append(resp.Topics, page[0])
			next = page[0].GetName()
		}
	})
	if err != nil {
		return nil, err
	}
	if more {
		resp.NextPageToken = base64.RawURLEncoding.EncodeToString([]byte(next))
	}
	return resp, nil
}

// pagePartitions bounds a page of topics by their partitions, about 100 bytes
// each.
const pagePartitions = 20_000

func pageSize(asked int32, def, limit int) (int, error) {
	switch {
	case asked == 0:
		return def, nil
	case asked < 0 || int(asked) > limit:
		return 0, rpcerr.InvalidField("page_size", fmt.Sprintf("%d is not within 1 to %d (0 means %d)", asked, limit, def))
	}
	return int(asked), nil
}

// UpdateTopic implements the contract.
func (s *Server) UpdateTopic(ctx context.Context, r *metadatav1.UpdateTopicRequest) (*metadatav1.UpdateTopicResponse, error) {
	if r.GetName() == "" {
		return nil, rpcerr.InvalidField("name", "is empty")
	}
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassTopic, func(st *state.State) ([]*metadatav1.Event, error) {
		return st.DecideUpdateTopic(r)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	topic, err := s.topic(r.GetName())
	if err != nil {
		return nil, err
	}
	return &metadatav1.UpdateTopicResponse{Topic: topic, MetadataOffset: s.decided(offset)}, nil
}

// DeleteTopic implements the contract.
func (s *Server) DeleteTopic(ctx context.Context, r *metadatav1.DeleteTopicRequest) (*metadatav1.DeleteTopicResponse, error) {
	if r.GetName() == "" {
		return nil, rpcerr.InvalidField("name", "is empty")
	}
	offset, err := s.deps.Controller.Submit(ctx, controller.ClassVital, func(st *state.State) ([]*metadatav1.Event, error) {
		return st.DecideDeleteTopic(r)
	})
	if err != nil {
		return nil, s.mapError(err)
	}
	return &metadatav1.DeleteTopicResponse{MetadataOffset: offset}, nil
}
