module github.com/braidlog/braid/cmd/braid

go 1.26.0

require (
	github.com/braidlog/braid/pkg v0.0.0
	github.com/braidlog/braid/proto v0.0.0
	github.com/braidlog/braid/services/broker v0.0.0
	github.com/braidlog/braid/services/metadata v0.0.0
	github.com/braidlog/braid/services/rlm v0.0.0
	github.com/stretchr/testify v1.12.1
	golang.org/x/term v0.47.0
	google.golang.org/grpc v1.85.0
)

replace (
	github.com/braidlog/braid/pkg => ../../pkg
	github.com/braidlog/braid/proto => ../../proto
	github.com/braidlog/braid/services/broker => ../../services/broker
	github.com/braidlog/braid/services/metadata => ../../services/metadata
	github.com/braidlog/braid/services/rlm => ../../services/rlm
)
