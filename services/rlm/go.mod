module github.com/braidlog/braid/services/rlm

go 1.26.0

require (
	github.com/braidlog/braid/pkg v0.0.0
	github.com/braidlog/braid/proto v0.0.0
)

replace (
	github.com/braidlog/braid/pkg => ../../pkg
	github.com/braidlog/braid/proto => ../../proto
)
