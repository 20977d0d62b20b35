package metaclient

import (
	"context"

	"google.golang.org/grpc"

	metadatav1 "github.com/braidlog/braid/proto/gen/go/braid/metadata/v1"
)

// RemoteLogManagerRole is the role of a remote-log manager. request is asked
// for the registration's content each time; it may be called from any goroutine.
func RemoteLogManagerRole(request func() *metadatav1.RegisterRemoteLogManagerRequest) Role {
	return rlmRole{request}
}

type rlmRole struct {
	request func() *metadatav1.RegisterRemoteLogManagerRequest
}

func (r rlmRole) Register(ctx context.Context, conn grpc.ClientConnInterface) (Registration, error) {
	resp, err := metadatav1.NewClusterServiceClient(conn).RegisterRemoteLogManager(ctx, r.request())
	if err != nil {
		return Registration{}, err
	}
	return Registration{
		Epoch: resp.GetRlmEpoch(), ClusterID: resp.GetClusterId(), Incarnation: resp.GetIncarnation(),
		SessionTimeout:  resp.GetSessionTimeout().AsDuration(),
		ControllerEpoch: resp.GetControllerEpoch(), MetadataEnd: resp.GetMetadataEndOffset(),
	}, nil
}

func (r rlmRole) Connect(ctx context.Context, conn grpc.ClientConnInterface, epoch int64) (Heartbeats, error) {
	stream, err := metadatav1.NewClusterServiceClient(conn).RemoteLogManagerSession(ctx)
	if err != nil {
		return nil, err
	}
	return &rlmHeartbeats{stream: stream, id: r.request().GetRlmId(), epoch: epoch}, nil
}

type rlmHeartbeats struct {
	stream grpc.BidiStreamingClient[metadatav1.RemoteLogManagerSessionRequest, metadatav1.RemoteLogManagerSessionResponse]
	id     int32
	epoch  int64
}

func (h *rlmHeartbeats) Send(n int64, stopping bool) error {
	return h.stream.Send(&metadatav1.RemoteLogManagerSessionRequest{
		RlmId: h.id, RlmEpoch: h.epoch, Heartbeat: n, Stopping: stopping,
	})
}

func (h *rlmHeartbeats) Receive() (int64, Confirmation, error) {
	m, err := h.stream.Recv()
	if err != nil {
		return 0, Confirmation{}, err
	}
	return m.GetHeartbeat(), Confirmation{ControllerEpoch: m.GetControllerEpoch(), MetadataEnd: m.GetMetadataEndOffset()}, nil
}

// BrokerRole is the role of a broker. request is asked for the registration's
// content each time, applied for the metadata offset (exclusive) that the
// broker has applied, with each heartbeat; both may be called from any goroutine.
func BrokerRole(request func() *metadatav1.RegisterBrokerRequest, applied func() int64) Role {
	return brokerRole{request, applied}
}

type brokerRole struct {
	request func() *metadatav1.RegisterBrokerRequest
	applied func() int64
}

func (r brokerRole) Register(ctx context.Context, conn grpc.ClientConnInterface) (Registration, error) {
	resp, err := metadatav1.NewClusterServiceClient(conn).RegisterBroker(ctx, r.request())
	if err != nil {
		return Registration{}, err
	}
	return Registration{
		Epoch: resp.GetBrokerEpoch(), ClusterID: resp.GetClusterId(), Incarnation: resp.GetIncarnation(),
		SessionTimeout:  resp.GetSessionTimeout().AsDuration(),
		ControllerEpoch: resp.GetControllerEpoch(),
	}, nil
}

func (r brokerRole) Connect(ctx context.Context, conn grpc.ClientConnInterface, epoch int64) (Heartbeats, error) {
	stream, err := metadatav1.NewClusterServiceClient(conn).BrokerSession(ctx)
	if err != nil {
		return nil, err
	}
	return &brokerHeartbeats{stream: stream, id: r.request().GetBrokerId(), epoch: epoch, applied: r.applied}, nil
}

type brokerHeartbeats struct {
	stream  grpc.BidiStreamingClient[metadatav1.BrokerSessionRequest, metadatav1.BrokerSessionResponse]
	id      int32
	epoch   int64
	applied func() int64
}

func (h *brokerHeartbeats) Send(n int64, stopping bool) error {
	return h.stream.Send(&metadatav1.BrokerSessionRequest{
		BrokerId: h.id, BrokerEpoch: h.epoch, Heartbeat: n, AppliedMetadataOffset: h.applied(), Stopping: stopping,
	})
}

func (h *brokerHeartbeats) Receive() (int64, Confirmation, error) {
	m, err := h.stream.Recv()
	if err != nil {
		return 0, Confirmation{}, err
	}
	return m.GetHeartbeat(), Confirmation{
		ControllerEpoch: m.GetControllerEpoch(), MetadataEnd: m.GetMetadataEndOffset(), Handovers: m.GetHandovers(),
	}, nil
}
