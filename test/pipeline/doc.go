// Package pipeline tests Produce pipelines and followers over whole clusters while
// leaders die: what a client that keeps the contract gets, without the help of a
// client library.
package pipeline
