package controller

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Class says how much a command is worth while etcd fills (design review F22).
type Class uint8

const (
	// ClassData are commits of ranges. They stop first: producers are pushed back
	// and nothing else is hurt.
	ClassData Class = iota + 1
	// ClassTopic are changes of topics and blocks of producer ids.
	ClassTopic
	// ClassVital are elections, registrations, ends of sessions and epochs, and
	// what frees space. They stop last, before etcd itself takes no write.
	ClassVital
)

// String returns "data", "topic" or "vital".
func (c Class) String() string {
	switch c {
	case ClassData:
		return "data"
	case ClassTopic:
		return "topic"
	case ClassVital:
		return "vital"
	default:
		return "unknown"
	}
}

// SpaceConfig says at how many percent of etcd's quota each class stops; 100
// leaves it to etcd. The zero value never stops anything and asks nothing.
type SpaceConfig struct {
	// QuotaBytes is etcd's quota; 0 is what etcd says it is.
	QuotaBytes int64
	// Interval is how often etcd is asked how full it is.
	Interval time.Duration
	// Percents of the quota.
	Data, Topic, Vital int
}

func (c SpaceConfig) percent(class Class) int {
	switch class {
	case ClassData:
		return c.Data
	case ClassTopic:
		return c.Topic
	default:
		return c.Vital
	}
}

// SpaceError: etcd is too full for commands of the class; nothing was changed.
type SpaceError struct {
	Class         Class
	InUse, Quota  int64 // bytes
	StopAtPercent int   // of the quota
}

func (e *SpaceError) Error() string {
	return fmt.Sprintf("etcd is too full for %s commands: %d bytes in use of a quota of %d, they stop at %d %%",
		e.Class, e.InUse, e.Quota, e.StopAtPercent)
}

// space knows how full etcd was when it was last asked. Its methods are safe for
// concurrent use.
type space struct {
	cfg     SpaceConfig
	metrics *Metrics
	used    atomic.Int64
	quota   atomic.Int64 // 0 while unknown
}

func newSpace(cfg SpaceConfig, metrics *Metrics) *space { return &space{cfg: cfg, metrics: metrics} }

func (s *space) now() (used, quota int64) { return s.used.Load(), s.quota.Load() }

// stopped says whether etcd is too full for the class.
func (s *space) stopped(class Class) bool {
	used, quota := s.now()
	percent := s.cfg.percent(class)
	return quota > 0 && percent > 0 && percent < 100 && used >= quota/100*int64(percent)
}

// admit says whether a command of the class may be written.
func (s *space) admit(class Class) error {
	if !s.stopped(class) {
		return nil
	}
	s.metrics.spaceRefused(class)
	used, quota := s.now()
	return &SpaceError{Class: class, InUse: used, Quota: quota, StopAtPercent: s.cfg.percent(class)}
}

// touchEvery is after how many polls with a class stopped etcd is written to, so
// that it notices what has been freed.
const touchEvery = 10

// watch asks all members until ctx ends. The fullest one counts: each has its own
// file and its own quota. touch writes something small.
func (s *space) watch(ctx context.Context, client *clientv3.Client, log *slog.Logger, touch func(context.Context) error) {
	if s.cfg.Interval <= 0 {
		return
	}
	ticker := time.NewTicker(s.cfg.Interval)
	defer ticker.Stop()
	for stopped := 0; ; {
		var used, quota int64
		answered := false
		for _, endpoint := range client.Endpoints() {
			bounded, cancel := context.WithTimeout(ctx, max(s.cfg.Interval, time.Second))
			resp, err := client.Status(bounded, endpoint)
			cancel()
			if err != nil {
				continue // a member that is away is told of elsewhere
			}
			answered = true
			q := s.cfg.QuotaBytes
			if q == 0 {
				q = resp.DbSizeQuota
			}
			if quota == 0 || float64(resp.DbSizeInUse)/float64(max(q, 1)) > float64(used)/float64(max(quota, 1)) {
				used, quota = resp.DbSizeInUse, q
			}
		}
		if answered {
			s.tell(ctx, log, used, quota)
		}
		if stopped++; !s.stopped(ClassData) {
			stopped = 0
		}
		if stopped%touchEvery == touchEvery-1 {
			if err := touch(ctx); err != nil && ctx.Err() == nil {
				log.WarnContext(ctx, "could not write to etcd to see what is free", "err", err)
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// tell keeps the numbers and logs when a class stops or goes on.
func (s *space) tell(ctx context.Context, log *slog.Logger, used, quota int64) {
	stops := func() (n int) {
		for _, c := range []Class{ClassData, ClassTopic, ClassVital} {
			if s.stopped(c) {
				n++
			}
		}
		return n
	}
	before := stops()
	s.used.Store(used)
	s.quota.Store(quota)
	switch after := stops(); {
	case after > before:
		log.ErrorContext(ctx, "etcd is getting full: commands are refused", "in_use", used, "quota", quota, "classes_stopped", after)
	case after < before:
		log.InfoContext(ctx, "etcd has space again", "in_use", used, "quota", quota, "classes_stopped", after)
	}
}
