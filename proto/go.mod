module github.com/braidlog/braid/proto

go 1.26

require (
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
)
