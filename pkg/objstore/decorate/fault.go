package decorate

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/objstore"
)

// When says on which side of the effect a fault strikes.
type When int

const (
	// Before fails the call without making it.
	Before When = iota
	// After makes the call, drops its result and fails.
	After
)

// String returns "before" or "after".
func (w When) String() string {
	if w == After {
		return "after"
	}
	return "before"
}

// Fault is a failure to inject. It counts the calls that its Op and NamePrefix
// select, from 1, and strikes Count times: at the Nth and every Every-th after it.
type Fault struct {
	// Op selects the calls; empty selects all.
	Op objstore.Op
	// NamePrefix selects by object name.
	NamePrefix string
	// Nth is the first call struck; 0 means 1.
	Nth int
	// Every is the distance between struck calls; 0 means 1, each call.
	Every int
	// Count is how many calls are struck; 0 means 1, negative means no end.
	Count int
	// When is the side of the effect. It means nothing if NoError is set.
	When When
	// Err is returned as it is. nil means an objstore.Error of the kind
	// ErrUnavailable, whose outcome is unknown if the call is a create or delete.
	Err error
	// Latency delays the call; with NoError it is all that happens.
	Latency time.Duration
	NoError bool
}

// Injector injects faults into the stores it decorates. Create it with
// [NewInjector]. Safe for concurrent use; the count of calls is then in the
// order in which they begin.
type Injector struct {
	mu     sync.Mutex
	faults []faultState        // guarded by mu
	calls  map[objstore.Op]int // guarded by mu
	total  int                 // guarded by mu
}

type faultState struct {
	Fault
	seen int
}

// NewInjector returns an injector with these faults.
func NewInjector(faults ...Fault) *Injector {
	i := &Injector{calls: make(map[objstore.Op]int)}
	i.Set(faults...)
	return i
}

// Set replaces the faults; their counts start at zero. Calls counts on.
func (i *Injector) Set(faults ...Fault) {
	states := make([]faultState, 0, len(faults))
	for _, f := range faults {
		states = append(states, faultState{Fault: f})
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.faults = states
}

// Calls returns the number of calls of op so far, or of all calls if op is empty.
func (i *Injector) Calls(op objstore.Op) int {
	i.mu.Lock()
	defer i.mu.Unlock()
	if op == "" {
		return i.total
	}
	return i.calls[op]
}

// Decorate is the injector's [Decorator].
func (i *Injector) Decorate(s objstore.Store) objstore.Store {
	return &faulty{s: s, injector: i}
}

// strike counts a call and returns the fault that hits it, if any.
func (i *Injector) strike(op objstore.Op, name string) (Fault, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.calls[op]++
	i.total++
	var hit Fault
	found := false
	for k := range i.faults {
		f := &i.faults[k]
		if f.Op != "" && f.Op != op || !strings.HasPrefix(name, f.NamePrefix) {
			continue
		}
		f.seen++
		n := f.seen - max(f.Nth, 1) // calls since the first struck one
		every := max(f.Every, 1)
		if n < 0 || n%every != 0 || f.Count >= 0 && n/every >= max(f.Count, 1) {
			continue
		}
		if !found {
			hit, found = f.Fault, true
		}
	}
	return hit, found
}

type faulty struct {
	s        objstore.Store
	injector *Injector
}

var errInjected = errors.New("injected fault")

// run makes the call as the faults allow.
func (f *faulty) run(ctx context.Context, op objstore.Op, name string, call func() error) error {
	fault, hit := f.injector.strike(op, name)
	if !hit {
		return call()
	}
	if fault.Latency > 0 && backoff.Sleep(ctx, fault.Latency) != nil {
		return objstore.ContextError(ctx, op, name)
	}
	if fault.NoError {
		return call()
	}
	err := fault.Err
	if err == nil {
		err = &objstore.Error{
			Op: op, Name: name, Kind: objstore.ErrUnavailable, Err: errInjected,
			Ambiguous: op == objstore.OpCreate || op == objstore.OpDelete,
		}
	}
	if fault.When == After {
		_ = call() // its result is what the fault takes away
	}
	return err
}

func (f *faulty) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	var a objstore.Attrs
	err := f.run(ctx, objstore.OpCreate, name, func() (err error) {
		a, err = f.s.Create(ctx, name, body)
		return err
	})
	if err != nil && !errors.Is(err, objstore.ErrCorrupt) {
		a = objstore.Attrs{}
	}
	return a, err
}

func (f *faulty) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (n int, err error) {
	err = f.run(ctx, objstore.OpRead, name, func() (err error) {
		n, err = f.s.ReadRange(ctx, name, offset, dst)
		return err
	})
	return n, err
}

func (f *faulty) ReadSuffix(ctx context.Context, name string, dst []byte) (n int, size int64, err error) {
	err = f.run(ctx, objstore.OpRead, name, func() (err error) {
		n, size, err = f.s.ReadSuffix(ctx, name, dst)
		return err
	})
	return n, size, err
}

func (f *faulty) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	var r io.ReadCloser
	err := f.run(ctx, objstore.OpRead, name, func() (err error) {
		r, err = f.s.OpenRange(ctx, name, offset, length)
		return err
	})
	if err != nil {
		if r != nil {
			_ = r.Close()
		}
		return nil, err
	}
	return r, nil
}

func (f *faulty) Attrs(ctx context.Context, name string) (a objstore.Attrs, err error) {
	err = f.run(ctx, objstore.OpAttrs, name, func() (err error) {
		a, err = f.s.Attrs(ctx, name)
		return err
	})
	return a, err
}

func (f *faulty) ListPage(ctx context.Context, prefix, startAfter string, limit int) (page []objstore.Attrs, more bool, err error) {
	err = f.run(ctx, objstore.OpList, "", func() (err error) {
		page, more, err = f.s.ListPage(ctx, prefix, startAfter, limit)
		return err
	})
	return page, more, err
}

func (f *faulty) Delete(ctx context.Context, name string, generation int64) error {
	return f.run(ctx, objstore.OpDelete, name, func() error { return f.s.Delete(ctx, name, generation) })
}

func (f *faulty) BucketSettings(ctx context.Context) (b objstore.BucketSettings, err error) {
	err = f.run(ctx, objstore.OpBucketInfo, "", func() (err error) {
		b, err = f.s.BucketSettings(ctx)
		return err
	})
	return b, err
}
