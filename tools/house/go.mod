module github.com/braidlog/braid/tools/house

go 1.26.0

tool github.com/braidlog/braid/tools/house
