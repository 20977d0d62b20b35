module github.com/braidlog/braid/pkg

go 1.26

require github.com/braidlog/braid/proto v0.0.0

replace github.com/braidlog/braid/proto => ../proto
