package fetcher_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/walobject"
	"github.com/braidlog/braid/pkg/walobject/walobjecttest"
	logv1 "github.com/braidlog/braid/proto/gen/go/braid/log/v1"
	storagev1 "github.com/braidlog/braid/proto/gen/go/braid/storage/v1"
	"github.com/braidlog/braid/services/rlm/internal/fetcher"
)

type fixture struct {
	t      *testing.T
	store  *memstore.Store
	faults *decorate.Injector
	f      *fetcher.Fetcher
}

func start(t *testing.T, change func(*fetcher.Config)) *fixture {
	t.Helper()
	cfg := fetcher.Config{BlockBytes: 1 << 20, CacheBytes: 4 << 20, FooterBytes: 4 << 20, FooterWorkBytes: 16 << 20, PeerPinnedBytes: 2 << 20, PinnedBytes: 8 << 20, ReadTimeout: 5 * time.Second, MaxFetches: 4}
	if change != nil {
		change(&cfg)
	}
	x := &fixture{t: t, store: memstore.New(memstore.Options{}), faults: decorate.NewInjector()}
	var err error
	x.f, err = fetcher.New(cfg, x.faults.Decorate(x.store), slog.New(slog.DiscardHandler), noop.NewMeterProvider().Meter(""))
	require.NoError(t, err)
	return x
}

// raw stores bytes that are no combined object.
func (x *fixture) raw(name string, size int) []byte {
	x.t.Helper()
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(i * 7)
	}
	_, err := x.store.Create(context.Background(), name, objstore.NewParts(content))
	require.NoError(x.t, err)
	return content
}

// object stores a combined object of n partitions.
func (x *fixture) object(seq int64, n int) *walobject.Object {
	x.t.Helper()
	var ranges []walobject.Range
	for i := range int32(n) {
		d, data := walobjecttest.NewPartition(5, i).Append(2, 3, 100)
		ranges = append(ranges, walobject.Range{Footer: &storagev1.RangeFooter{Range: d}, Data: data})
	}
	o, err := walobject.Build(walobject.Header{ClusterID: "c", Object: &logv1.ObjectRef{Incarnation: 1, RlmEpoch: 2, Sequence: seq, Attempt: 1}}, ranges)
	require.NoError(x.t, err)
	_, err = x.store.Create(context.Background(), o.Name, objstore.NewParts(o.Parts...))
	require.NoError(x.t, err)
	return o
}

func (x *fixture) read(name string, pos, n int64) ([]byte, error) {
	var got []byte
	err := x.f.Read(context.Background(), "peer", name, pos, n, func(p []byte) error {
		got = append(got, p...)
		return nil
	})
	return got, err
}

func TestManyReadersCostOneGet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, nil)
		defer x.f.Close()
		o := x.object(1, 20)
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: time.Second, NoError: true, Count: -1})
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				d := o.Ranges[i%20]
				got, err := x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
				if err != nil || walobject.VerifyRange(d, got) != nil {
					t.Errorf("reader %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, 1, x.faults.Calls(objstore.OpRead), "one GET for 50 readers")
		for _, d := range o.Ranges {
			_, err := x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
			require.NoError(t, err)
		}
		footer, err := x.f.Footer(t.Context(), o.Name, o.Size)
		require.NoError(t, err)
		require.Equal(t, 20, footer.Len())
		require.Equal(t, 1, x.faults.Calls(""), "the footer came from the block as well")
		_, pinned, flights := x.f.Stats()
		require.Zero(t, pinned)
		require.Zero(t, flights)
	})
}

func TestRangesOverSeveralBlocks(t *testing.T) {
	x := start(t, func(c *fetcher.Config) { c.BlockBytes = 1000 })
	defer x.f.Close()
	content := x.raw("a", 3500)
	for _, r := range [][2]int64{{0, 1}, {0, 3500}, {999, 2}, {1000, 1000}, {1500, 2000}, {3499, 1}} {
		got, err := x.read("a", r[0], r[1])
		require.NoError(t, err)
		require.True(t, bytes.Equal(content[r[0]:r[0]+r[1]], got), "%v", r)
	}
	for _, r := range [][2]int64{{0, 3501}, {3500, 1}, {4000, 1}, {9000, 5}} {
		_, err := x.read("a", r[0], r[1])
		require.ErrorIs(t, err, fetcher.ErrDamaged, "%v lies outside of a committed object", r)
	}
	for _, r := range [][2]int64{{-1, 1}, {0, 0}, {1 << 62, 1 << 62}} {
		_, err := x.read("a", r[0], r[1])
		require.Error(t, err)
	}
}

// Invariant I11: what can't be read now is not absent, and the other way round.
func TestAbsentAndUnavailableAreKeptApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, nil)
		defer x.f.Close()
		_, err := x.read("nothing", 0, 1)
		require.ErrorIs(t, err, fetcher.ErrNotFound)
		require.NotErrorIs(t, err, fetcher.ErrUnavailable)

		o := x.object(1, 2)
		for _, fault := range []decorate.Fault{
			{Op: objstore.OpRead},
			{Op: objstore.OpRead, Err: &objstore.Error{Op: objstore.OpRead, Kind: objstore.ErrDenied}},
			{Op: objstore.OpRead, Err: &objstore.Error{Op: objstore.OpRead, Kind: objstore.ErrBucketNotFound}},
			{Op: objstore.OpRead, Latency: time.Hour, NoError: true},
		} {
			x.faults.Set(fault)
			_, err = x.read(o.Name, 0, 1)
			require.ErrorIs(t, err, fetcher.ErrUnavailable)
			require.NotErrorIs(t, err, fetcher.ErrNotFound)
			x.faults.Set(fault)
			_, err = x.f.Footer(t.Context(), o.Name, o.Size)
			require.ErrorIs(t, err, fetcher.ErrUnavailable)
		}
		// Nothing of it was remembered.
		_, err = x.read(o.Name, 0, 1)
		require.NoError(t, err)
	})
}

func TestOneWaiterGivingUpDoesNotEndTheFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, nil)
		defer x.f.Close()
		o := x.object(1, 2)
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: 2 * time.Second, NoError: true})
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		gaveUp := make(chan error, 1)
		go func() {
			gaveUp <- x.f.Read(short, "a", o.Name, 0, 10, func([]byte) error { return nil })
		}()
		synctest.Wait()
		_, err := x.read(o.Name, 0, 10)
		require.NoError(t, err)
		require.ErrorIs(t, <-gaveUp, context.DeadlineExceeded)
		require.Equal(t, 1, x.faults.Calls(objstore.OpRead))
	})
}

func TestFetchThatNobodyWaitsForIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, nil)
		defer x.f.Close()
		o := x.object(1, 2)
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: 4 * time.Second, NoError: true})
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin := time.Now()
		require.ErrorIs(t, x.f.Read(short, "a", o.Name, 0, 10, func([]byte) error { return nil }), context.DeadlineExceeded)
		_, err := x.read(o.Name, 0, 10)
		require.NoError(t, err)
		require.Equal(t, time.Second, time.Since(begin), "a later reader starts anew")
		require.Equal(t, 2, x.faults.Calls(objstore.OpRead))
	})
}

func TestCacheIsBoundedAndKeepsWhatIsUsed(t *testing.T) {
	x := start(t, func(c *fetcher.Config) { c.BlockBytes, c.CacheBytes = 1000, 3000 })
	defer x.f.Close()
	for _, n := range []string{"a", "b", "c", "d"} {
		x.raw(n, 1000)
	}
	get := func(name string) int {
		before := x.faults.Calls(objstore.OpRead)
		_, err := x.read(name, 0, 1000)
		require.NoError(t, err)
		return x.faults.Calls(objstore.OpRead) - before
	}
	require.Equal(t, []int{1, 1, 1, 0}, []int{get("a"), get("b"), get("c"), get("a")})
	require.Equal(t, 1, get("d"), "b makes room")
	require.Equal(t, []int{0, 1}, []int{get("a"), get("b")})
	cached, _, _ := x.f.Stats()
	require.LessOrEqual(t, cached, int64(3000))
}

// Design review F22: a slow reader must not pin the cache of its zone.
func TestPinnedBytesAreBoundedPerPeerAndInTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, func(c *fetcher.Config) {
			c.BlockBytes, c.PeerPinnedBytes, c.PinnedBytes = 1000, 2500, 4000
		})
		defer x.f.Close()
		x.raw("a", 9000)
		stuck := make(chan struct{})
		var wg sync.WaitGroup
		hold := func(peer string, block int64) {
			wg.Go(func() {
				_ = x.f.Read(t.Context(), peer, "a", block*1000, 10, func([]byte) error { <-stuck; return nil })
			})
			synctest.Wait()
		}
		hold("slow", 0)
		hold("slow", 1)
		var limit *fetcher.LimitError
		err := x.f.Read(t.Context(), "slow", "a", 2000, 10, func([]byte) error { return nil })
		require.ErrorAs(t, err, &limit)
		require.Equal(t, "peer", limit.Scope)
		require.NoError(t, x.f.Read(t.Context(), "other", "a", 2000, 10, func([]byte) error { return nil }), "others go on")
		hold("third", 3)
		hold("fourth", 4)
		err = x.f.Read(t.Context(), "other", "a", 2000, 10, func([]byte) error { return nil })
		require.ErrorAs(t, err, &limit)
		require.Equal(t, "all peers", limit.Scope)
		close(stuck)
		wg.Wait()
		_, pinned, _ := x.f.Stats()
		require.Zero(t, pinned)
	})
}

// Field report B177: a bit flipped on the way is found before a byte is served,
// read again, and costs only its own partition if it stays.
func TestDamageIsReadAgainAndCostsOnePartition(t *testing.T) {
	x := start(t, nil)
	defer x.f.Close()
	o := x.object(1, 5)
	flip := func(content []byte) []byte {
		content = bytes.Clone(content)
		content[o.Ranges[2].GetPosition()+70] ^= 4
		return content
	}
	require.True(t, x.store.Tamper(o.Name, flip))
	for i, d := range o.Ranges {
		_, err := x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
		if i != 2 {
			require.NoError(t, err)
			continue
		}
		var damage *fetcher.DamageError
		require.ErrorAs(t, err, &damage)
		require.Equal(t, d.GetPosition(), damage.Position)
		require.Equal(t, d.GetBaseOffset(), damage.Offset)
	}
	require.Equal(t, 2, x.faults.Calls(objstore.OpRead), "read again once")

	// Damage on the way only: the second read is good.
	y := start(t, nil)
	defer y.f.Close()
	p := y.object(1, 5)
	y.store.Tamper(p.Name, flip)
	first := true
	mend, err := fetcher.New(fetcher.Config{BlockBytes: 1 << 20, CacheBytes: 1 << 20, FooterBytes: 1 << 20, FooterWorkBytes: 1 << 20, PeerPinnedBytes: 1 << 20, PinnedBytes: 1 << 20, ReadTimeout: time.Second, MaxFetches: 1},
		mending{y.store, func() {
			if !first {
				y.store.Tamper(p.Name, flip)
			}
			first = false
		}}, slog.New(slog.DiscardHandler), noop.NewMeterProvider().Meter(""))
	require.NoError(t, err)
	defer mend.Close()
	d := p.Ranges[2]
	require.NoError(t, mend.Read(t.Context(), "peer", p.Name, d.GetPosition(), d.GetLengthBytes(), func(b []byte) error {
		return walobject.VerifyRange(d, b)
	}))
}

// Damage is not kept for ever: what was mended, or damaged on the way only, is
// served again without a restart.
func TestDamageIsLookedAtAgainAfterAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, nil)
		defer x.f.Close()
		o := x.object(1, 3)
		d := o.Ranges[1]
		flip := func(content []byte) []byte {
			content = bytes.Clone(content)
			content[d.GetPosition()+70] ^= 4
			return content
		}
		require.True(t, x.store.Tamper(o.Name, flip))
		_, err := x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
		require.ErrorIs(t, err, fetcher.ErrDamaged)
		require.True(t, x.store.Tamper(o.Name, flip))
		_, err = x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
		require.ErrorIs(t, err, fetcher.ErrDamaged)
		require.Equal(t, 2, x.faults.Calls(objstore.OpRead), "asked at once, it answers from the cache")
		time.Sleep(3 * time.Second) //nolint:forbidigo // virtual time inside a bubble
		got, err := x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
		require.NoError(t, err)
		require.NoError(t, walobject.VerifyRange(d, got))
		_, err = x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
		require.NoError(t, err)
		require.Equal(t, 3, x.faults.Calls(objstore.OpRead), "the good block took the place of the bad one")
	})
}

type mending struct {
	objstore.Store
	before func()
}

func (m mending) OpenRange(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	m.before()
	return m.Store.OpenRange(ctx, name, off, n)
}

// Field report B103: an object that is empty, of zeros, or cut.
func TestZeroedAndCutObjectsAreReported(t *testing.T) {
	for name, tamper := range map[string]func([]byte) []byte{
		"empty": func([]byte) []byte { return nil },
		"zeros": func(b []byte) []byte { return make([]byte, len(b)) },
		"cut":   func(b []byte) []byte { return b[:len(b)/2] },
	} {
		t.Run(name, func(t *testing.T) {
			x := start(t, nil)
			defer x.f.Close()
			o := x.object(1, 3)
			require.True(t, x.store.Tamper(o.Name, tamper))
			_, err := x.f.Footer(t.Context(), o.Name, o.Size)
			require.ErrorIs(t, err, fetcher.ErrDamaged)
			d := o.Ranges[2]
			got, err := x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
			if err == nil {
				require.Error(t, walobject.VerifyBytes(d, got), "zeros have no footer to be held against: the reader finds them")
				return
			}
			require.ErrorIs(t, err, fetcher.ErrDamaged)
		})
	}
}

func TestFootersAreReadFromTheEnd(t *testing.T) {
	x := start(t, func(c *fetcher.Config) { c.BlockBytes = 1 << 10 })
	defer x.f.Close()
	few, many := x.object(1, 3), x.object(2, 700)
	require.Greater(t, many.FooterSize, int64(64<<10))
	footer, err := x.f.Footer(t.Context(), few.Name, few.Size)
	require.NoError(t, err)
	require.Equal(t, 3, footer.Len())
	require.Equal(t, 1, x.faults.Calls(objstore.OpRead))
	footer, err = x.f.Footer(t.Context(), many.Name, many.Size)
	require.NoError(t, err)
	require.Equal(t, 700, footer.Len())
	require.Equal(t, 3, x.faults.Calls(objstore.OpRead), "twice for a large one")
	_, err = x.f.Footer(t.Context(), few.Name, few.Size+1)
	require.ErrorIs(t, err, fetcher.ErrDamaged)
	_, err = x.f.Footer(t.Context(), few.Name, 3)
	require.ErrorIs(t, err, fetcher.ErrDamaged)
	_, err = x.f.Footer(t.Context(), "nothing", 100)
	require.ErrorIs(t, err, fetcher.ErrNotFound)
}

// A store in the cloud takes its time: a hundred footers must not take a hundred
// times as long as one, whoever else asks for them.
func TestManyFootersAreReadAtOnce(t *testing.T) {
	const latency = 50 * time.Millisecond
	for name, block := range map[string]int64{"as whole objects": 1 << 20, "as ends of objects": 1 << 10} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x := start(t, func(c *fetcher.Config) { c.BlockBytes, c.MaxFetches = block, 32 })
				defer x.f.Close()
				var objects []fetcher.Object
				for seq := range int64(100) {
					o := x.object(1+seq, 1+int(seq)%7)
					objects = append(objects, fetcher.Object{Name: o.Name, Size: o.Size})
				}
				x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: latency, NoError: true, Count: -1})
				begin := time.Now()
				var wg sync.WaitGroup
				for range 2 {
					wg.Go(func() {
						footers := make([]*fetcher.Footer, len(objects))
						err := x.f.Footers(t.Context(), objects, func(i int, f *fetcher.Footer) error {
							footers[i] = f
							return nil
						})
						if err != nil {
							t.Error(err)
							return
						}
						for i, f := range footers {
							if f.Len() != 1+i%7 {
								t.Errorf("footer %d has %d ranges", i, f.Len())
							}
						}
					})
				}
				wg.Wait()
				took := time.Since(begin)
				t.Logf("%d footers in %v of virtual time, each takes %v", len(objects), took, latency)
				require.LessOrEqual(t, took, 7*latency, "16 at a time")
				require.Equal(t, len(objects), x.faults.Calls(objstore.OpRead), "one GET each, for both who ask")
			})
		})
	}
}

func TestTheFirstErrorEndsFooters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, nil)
		defer x.f.Close()
		good := x.object(1, 2)
		objects := []fetcher.Object{{Name: good.Name, Size: good.Size}, {Name: "nothing", Size: 100}}
		for i := range int64(50) {
			o := x.object(2+i, 1)
			objects = append(objects, fetcher.Object{Name: o.Name, Size: o.Size})
		}
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: time.Second, NoError: true, Count: -1})
		err := x.f.Footers(t.Context(), objects, func(int, *fetcher.Footer) error { return nil })
		var absent *fetcher.NotFoundError
		require.ErrorAs(t, err, &absent)
		require.ErrorIs(t, err, fetcher.ErrNotFound)
		require.Equal(t, "nothing", absent.Object)
		synctest.Wait()
		require.LessOrEqual(t, x.faults.Calls(objstore.OpRead), 4, "nothing is fetched for a lost case")

		err = x.f.Footers(t.Context(), objects[:1], func(int, *fetcher.Footer) error { return io.ErrUnexpectedEOF })
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		other := x.object(99, 1)
		err = x.f.Footers(ctx, []fetcher.Object{{Name: other.Name, Size: other.Size}}, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestCloseEndsReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := start(t, nil)
		o := x.object(1, 2)
		x.faults.Set(decorate.Fault{Op: objstore.OpRead, Latency: time.Hour, NoError: true})
		failed := make(chan error, 1)
		go func() {
			_, err := x.read(o.Name, 0, 1)
			failed <- err
		}()
		synctest.Wait()
		x.f.Close()
		require.ErrorIs(t, <-failed, fetcher.ErrClosed)
		_, err := x.read(o.Name, 0, 1)
		require.ErrorIs(t, err, fetcher.ErrClosed)
		_, err = x.f.Footer(t.Context(), o.Name, o.Size)
		require.ErrorIs(t, err, fetcher.ErrClosed)
	})
}

func TestSmallObjectIsFetchedOnceForFooterAndRecords(t *testing.T) {
	x := start(t, nil)
	defer x.f.Close()
	o := x.object(1, 5)
	_, err := x.f.Footer(t.Context(), o.Name, o.Size)
	require.NoError(t, err)
	for _, d := range o.Ranges {
		_, err := x.read(o.Name, d.GetPosition(), d.GetLengthBytes())
		require.NoError(t, err)
	}
	require.Equal(t, 1, x.faults.Calls(objstore.OpRead))
}
