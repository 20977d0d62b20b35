package decorate_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/memstore"
	"github.com/braidlog/braid/pkg/objstore/objstoretest"
)

func newMem() *memstore.Store { return memstore.New(memstore.Options{}) }

// quick retries without waiting long; the tests below run in virtual time.
func quick() decorate.RetryOptions {
	return decorate.RetryOptions{
		Policy: backoff.Policy{Initial: 10 * time.Millisecond, Max: time.Second, Multiplier: 2},
		Rand:   func() float64 { return 0.5 },
	}
}

func TestContractDecorated(t *testing.T) {
	t.Run("prefix", func(t *testing.T) {
		objstoretest.Run(t, func(t *testing.T) objstore.Store {
			m := newMem()
			// Neighbours that a wrong prefix would show.
			for _, name := range []string{"a", "p", "p-", "p/q", "p/q-", "p/q0", "z"} {
				_, err := m.Create(t.Context(), name, objstore.NewParts([]byte("neighbour")))
				require.NoError(t, err)
			}
			return decorate.Wrap(m, decorate.Prefix("p/q/"))
		})
	})
	t.Run("all", func(t *testing.T) {
		objstoretest.Run(t, func(*testing.T) objstore.Store {
			ended := func(ctx context.Context, _ decorate.Call) (context.Context, func(decorate.Result)) {
				return ctx, func(decorate.Result) {}
			}
			return decorate.Wrap(newMem(),
				decorate.Observe(ended), decorate.Retry(quick()), decorate.Observe(ended),
				decorate.Limit(decorate.Limits{Creates: 2, Reads: 2, Others: 2}),
				decorate.NewInjector().Decorate, decorate.Prefix("x"), decorate.Prefix(""))
		})
	})
	t.Run("every second call fails before its effect", func(t *testing.T) {
		objstoretest.Run(t, func(*testing.T) objstore.Store {
			return decorate.Wrap(newMem(), decorate.Retry(fast()), everyOther(decorate.Before))
		}, readsBack)
	})
	t.Run("every second call fails after its effect", func(t *testing.T) {
		// Creates of distinct contents race here too: an ErrExists is settled by
		// reading back, so there is still exactly one winner.
		objstoretest.Run(t, func(*testing.T) objstore.Store {
			return decorate.Wrap(newMem(), decorate.Retry(fast()), everyOther(decorate.After))
		}, readsBack, objstoretest.Skip{
			"Delete/RacingDeletersAndCreators": "a repeated delete may meet the next creator's object, ErrPrecondition",
		})
	})
}

// readsBack skips the cases that create an object of equal content twice: after
// a failure whose outcome is unknown that is the same as meeting one's own.
var readsBack = objstoretest.Skip{
	"Create/OnlyOnce":                  "creates equal contents, which reading back can't tell apart",
	"Create/BodyIsOpenedOnceAndClosed": "creates equal contents, and a retry opens the body again",
}

func fast() decorate.RetryOptions {
	return decorate.RetryOptions{Policy: backoff.Policy{Initial: time.Microsecond}, MaxAttempts: 40}
}

// everyOther makes calls fail in turn; a retry of the same call succeeds.
func everyOther(when decorate.When) decorate.Decorator {
	return decorate.NewInjector(decorate.Fault{Every: 2, Count: -1, When: when}).Decorate
}

func TestPrefixCannotBeLeft(t *testing.T) {
	m := newMem()
	_, err := m.Create(t.Context(), "secret", objstore.NewParts(nil))
	require.NoError(t, err)
	s := decorate.Wrap(m, decorate.Prefix("p"))
	for _, name := range []string{"../secret", "/secret", "..", ""} {
		_, err := s.Attrs(t.Context(), name)
		require.ErrorIs(t, err, objstore.ErrInvalid, name)
	}
	_, err = decorate.Wrap(m, decorate.Prefix("/bad//prefix")).Attrs(t.Context(), "a")
	require.ErrorIs(t, err, objstore.ErrInvalid)
}

// B169: attempts that are refused with 503 are repeated, and the upload
// succeeds by itself.
func TestCreateIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inj := decorate.NewInjector(decorate.Fault{Op: objstore.OpCreate, Count: 2})
		opts := quick()
		var delays []time.Duration
		opts.OnRetry = func(op objstore.Op, name string, attempt int, delay time.Duration, err error) {
			require.Equal(t, objstore.OpCreate, op)
			require.Equal(t, "a", name)
			require.Equal(t, len(delays)+1, attempt)
			require.ErrorIs(t, err, objstore.ErrUnavailable)
			delays = append(delays, delay)
		}
		m := newMem()
		s := decorate.Wrap(m, decorate.Retry(opts), inj.Decorate)
		a, err := s.Create(t.Context(), "a", objstore.NewParts([]byte("x")))
		require.NoError(t, err)
		require.EqualValues(t, 1, a.Size)
		require.Equal(t, 3, inj.Calls(objstore.OpCreate))
		require.Equal(t, []time.Duration{10 * time.Millisecond, 20 * time.Millisecond}, delays)
	})
}

// B170: the first attempt succeeded and its answer was lost; the second is
// told that the object exists.
func TestRepeatedCreateReadsBack(t *testing.T) {
	lost := decorate.Fault{Op: objstore.OpCreate, When: decorate.After}
	t.Run("own success", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m, inj := newMem(), decorate.NewInjector(lost)
			s := decorate.Wrap(m, decorate.Retry(quick()), inj.Decorate)
			a, err := s.Create(t.Context(), "a", objstore.NewParts([]byte("mine")))
			require.NoError(t, err)
			require.Equal(t, 1, inj.Calls(objstore.OpAttrs))
			got, err := m.Attrs(t.Context(), "a")
			require.NoError(t, err)
			require.Equal(t, got, a)
		})
	})
	t.Run("own success, reading back fails at first", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			inj := decorate.NewInjector(lost, decorate.Fault{Op: objstore.OpAttrs, Count: 2})
			s := decorate.Wrap(newMem(), decorate.Retry(quick()), inj.Decorate)
			_, err := s.Create(t.Context(), "a", objstore.NewParts([]byte("mine")))
			require.NoError(t, err)
		})
	})
	t.Run("another's object", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newMem()
			_, err := m.Create(t.Context(), "a", objstore.NewParts([]byte("theirs")))
			require.NoError(t, err)
			inj := decorate.NewInjector(decorate.Fault{Op: objstore.OpCreate})
			s := decorate.Wrap(m, decorate.Retry(quick()), inj.Decorate)
			_, err = s.Create(t.Context(), "a", objstore.NewParts([]byte("mine")))
			require.ErrorIs(t, err, objstore.ErrExists)
			require.ErrorIs(t, err, objstore.ErrCorrupt)
			require.NotErrorIs(t, err, objstore.ErrAmbiguous)
			require.Equal(t, 2, inj.Calls(objstore.OpCreate), "fenced: no further attempt")
		})
	})
	t.Run("the first attempt's answer is final", func(t *testing.T) {
		m := newMem()
		_, err := m.Create(t.Context(), "a", objstore.NewParts([]byte("mine")))
		require.NoError(t, err)
		inj := decorate.NewInjector()
		s := decorate.Wrap(m, decorate.Retry(quick()), inj.Decorate)
		_, err = s.Create(t.Context(), "a", objstore.NewParts([]byte("mine")))
		require.ErrorIs(t, err, objstore.ErrExists)
		require.Zero(t, inj.Calls(objstore.OpAttrs))
	})
}

// A create that never gets an answer says that its outcome is unknown, even if
// the last attempts were plainly refused.
func TestExhaustedCreateIsAmbiguous(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := &objstore.Error{Op: objstore.OpCreate, Kind: objstore.ErrUnavailable}
		m := newMem()
		s := decorate.Wrap(m, decorate.Retry(quick()), decorate.NewInjector(
			decorate.Fault{Nth: 1, When: decorate.After},
			decorate.Fault{Nth: 2, Count: -1, Err: refused},
		).Decorate)
		_, err := s.Create(t.Context(), "a", objstore.NewParts([]byte("x")))
		require.ErrorIs(t, err, objstore.ErrUnavailable)
		require.ErrorIs(t, err, objstore.ErrAmbiguous)
		require.ErrorIs(t, err, backoff.ErrExhausted)
		n, _ := m.Len()
		require.Equal(t, 1, n)

		s = decorate.Wrap(m, decorate.Retry(quick()), decorate.NewInjector(decorate.Fault{Count: -1, Err: refused}).Decorate)
		_, err = s.Create(t.Context(), "b", objstore.NewParts([]byte("x")))
		require.ErrorIs(t, err, objstore.ErrUnavailable)
		require.NotErrorIs(t, err, objstore.ErrAmbiguous, "nothing was ever tried")
	})
}

// B183 and B187: an upload that the store kept damaged is removed, by its
// generation, and sent again; no damaged object is left under the name.
func TestDamagedUploadIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMem()
		d := &damaging{Store: m, times: 2}
		s := decorate.Wrap(d, decorate.Retry(quick()))
		a, err := s.Create(t.Context(), "a", objstore.NewParts([]byte("whole")))
		require.NoError(t, err)
		require.EqualValues(t, 5, a.Size)
		require.Len(t, d.deleted, 2)

		d.times = 1000
		_, err = s.Create(t.Context(), "b", objstore.NewParts([]byte("whole")))
		require.ErrorIs(t, err, objstore.ErrCorrupt)
		_, err = m.Attrs(t.Context(), "b")
		require.ErrorIs(t, err, objstore.ErrNotFound, "the damaged object is never left behind")
	})
}

// damaging stores nothing of the first uploads' content and reports it.
type damaging struct {
	*memstore.Store
	times   int
	deleted []int64
}

func (d *damaging) Create(ctx context.Context, name string, body objstore.Body) (objstore.Attrs, error) {
	if d.times == 0 {
		return d.Store.Create(ctx, name, body)
	}
	d.times--
	a, err := d.Store.Create(ctx, name, objstore.NewParts(nil))
	if err != nil {
		return a, err
	}
	return a, &objstore.Error{Op: objstore.OpCreate, Name: name, Kind: objstore.ErrCorrupt}
}

func (d *damaging) Delete(ctx context.Context, name string, generation int64) error {
	d.deleted = append(d.deleted, generation)
	return d.Store.Delete(ctx, name, generation)
}

// B181: a delete that was applied but timed out meets nothing on its retry.
func TestRepeatedDeleteSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMem()
		a, err := m.Create(t.Context(), "a", objstore.NewParts(nil))
		require.NoError(t, err)
		inj := decorate.NewInjector(decorate.Fault{Op: objstore.OpDelete, When: decorate.After})
		require.NoError(t, decorate.Wrap(m, decorate.Retry(quick()), inj.Decorate).Delete(t.Context(), "a", a.Generation))
		require.Equal(t, 2, inj.Calls(objstore.OpDelete))
	})
}

// B175: a broken range is continued behind the bytes that arrived.
func TestReadsContinueWhereTheyBroke(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		content := make([]byte, 1000)
		for i := range content {
			content[i] = byte(i * 7)
		}
		m := newMem()
		_, err := m.Create(t.Context(), "a", objstore.NewParts(content))
		require.NoError(t, err)
		b := &breaking{Store: m, every: 300}
		s := decorate.Wrap(b, decorate.Retry(quick()))

		dst := make([]byte, 900)
		n, err := s.ReadRange(t.Context(), "a", 50, dst)
		require.NoError(t, err)
		require.Equal(t, 900, n)
		require.Equal(t, content[50:950], dst)
		require.Equal(t, []int64{50, 350, 650}, b.offsets)

		for _, length := range []int64{objstore.ToEnd, 900, 5000} {
			b.offsets = nil
			rc, err := s.OpenRange(t.Context(), "a", 100, length)
			require.NoError(t, err)
			got, err := io.ReadAll(rc)
			require.NoError(t, err)
			require.NoError(t, rc.Close())
			require.Equal(t, content[100:], got)
			require.Equal(t, []int64{100, 400, 700}, b.offsets[:3])
		}

		b.every = 0 // no progress at all: bounded
		b.offsets = nil
		rc, err := s.OpenRange(t.Context(), "a", 0, objstore.ToEnd)
		require.NoError(t, err)
		_, err = io.ReadAll(rc)
		require.ErrorIs(t, err, objstore.ErrUnavailable)
		require.Len(t, b.offsets, decorate.DefaultMaxAttempts)
		_, again := rc.Read(dst)
		require.Equal(t, err, again)
		require.NoError(t, rc.Close())
	})
}

// breaking breaks every read after some bytes.
type breaking struct {
	*memstore.Store
	every   int
	offsets []int64
}

var errBroken = &objstore.Error{Op: objstore.OpRead, Kind: objstore.ErrUnavailable}

func (b *breaking) ReadRange(ctx context.Context, name string, offset int64, dst []byte) (int, error) {
	b.offsets = append(b.offsets, offset)
	if len(dst) <= b.every {
		return b.Store.ReadRange(ctx, name, offset, dst)
	}
	n, err := b.Store.ReadRange(ctx, name, offset, dst[:b.every])
	if err == nil {
		err = errBroken
	}
	return n, err
}

func (b *breaking) OpenRange(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	b.offsets = append(b.offsets, offset)
	rc, err := b.Store.OpenRange(ctx, name, offset, length)
	if err != nil {
		return nil, err
	}
	return &breakingStream{rc, b.every}, nil
}

type breakingStream struct {
	io.ReadCloser
	left int
}

func (s *breakingStream) Read(p []byte) (int, error) {
	if s.left == 0 {
		return 0, errBroken
	}
	n, err := s.ReadCloser.Read(p[:min(len(p), s.left)])
	s.left -= n
	return n, err
}

func TestRetryEndsWithTheCallersContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := decorate.Wrap(newMem(), decorate.Retry(decorate.RetryOptions{MaxAttempts: 1000}),
			decorate.NewInjector(decorate.Fault{Count: -1}).Decorate)
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { cancel(cause) })
		_, err := s.Create(ctx, "a", objstore.NewParts(nil))
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, cause)
		require.ErrorIs(t, err, objstore.ErrAmbiguous)
		require.NotErrorIs(t, err, objstore.ErrUnavailable, "giving up is not an outage")

		// A deadline that the next wait would pass: the store's failure is the news.
		ctx, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer stop()
		_, err = s.Attrs(ctx, "a")
		require.ErrorIs(t, err, objstore.ErrUnavailable)
		var e *objstore.Error
		require.ErrorAs(t, err, &e)
	})
}

func TestPermanentErrorsAreNotRepeated(t *testing.T) {
	for _, kind := range []error{
		objstore.ErrDenied, objstore.ErrBucketNotFound, objstore.ErrInvalid, objstore.ErrNotFound, objstore.ErrRange,
	} {
		inj := decorate.NewInjector(decorate.Fault{Count: -1, Err: &objstore.Error{Kind: kind}})
		s := decorate.Wrap(newMem(), decorate.Retry(quick()), inj.Decorate)
		_, err := s.Attrs(t.Context(), "a")
		require.ErrorIs(t, err, kind)
		_, err = s.OpenRange(t.Context(), "a", 0, 1)
		require.ErrorIs(t, err, kind)
		require.Equal(t, 2, inj.Calls(""))
	}
}

func TestLimitBoundsCallsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most atomic.Int64
		watch := decorate.Observe(func(ctx context.Context, _ decorate.Call) (context.Context, func(decorate.Result)) {
			n := now.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			return ctx, func(decorate.Result) { now.Add(-1) }
		})
		slow := decorate.NewInjector(decorate.Fault{Count: -1, NoError: true, Latency: time.Second})
		s := decorate.Wrap(newMem(), decorate.Limit(decorate.Limits{Creates: 3, Reads: 2}), watch, slow.Decorate)

		start := time.Now()
		done := make(chan error, 12)
		for i := range 12 {
			go func() {
				_, err := s.Create(t.Context(), fmt.Sprint(i), objstore.NewParts([]byte("x")))
				done <- err
			}()
		}
		for range 12 {
			require.NoError(t, <-done)
		}
		require.EqualValues(t, 3, most.Load())
		require.Equal(t, 4*time.Second, time.Since(start))

		// Open streams hold their places.
		a, err := s.OpenRange(t.Context(), "1", 0, 1)
		require.NoError(t, err)
		b, err := s.OpenRange(t.Context(), "2", 0, 1)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = s.ReadRange(ctx, "3", 0, make([]byte, 1))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, a.Close())
		require.NoError(t, a.Close(), "a second close gives no second place")
		_, err = s.ReadRange(t.Context(), "3", 0, make([]byte, 1))
		require.NoError(t, err)
		require.NoError(t, b.Close())
	})
}

func TestObserverSeesCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []decorate.Result
		type key struct{}
		watch := decorate.Observe(func(ctx context.Context, c decorate.Call) (context.Context, func(decorate.Result)) {
			return context.WithValue(ctx, key{}, c.Name), func(r decorate.Result) {
				require.Equal(t, c, r.Call)
				got = append(got, r)
			}
		})
		slow := decorate.NewInjector(decorate.Fault{Count: -1, NoError: true, Latency: time.Second})
		s := decorate.Wrap(newMem(), watch, slow.Decorate)
		_, err := s.Create(t.Context(), "a", objstore.NewParts([]byte("hello")))
		require.NoError(t, err)
		rc, err := s.OpenRange(t.Context(), "a", 1, objstore.ToEnd)
		require.NoError(t, err)
		_, err = io.ReadAll(rc)
		require.NoError(t, err)
		time.Sleep(3 * time.Second) //nolint:forbidigo // virtual time: the stream is held open
		require.NoError(t, rc.Close())
		_, _, err = s.ListPage(t.Context(), "", "", 0)
		require.NoError(t, err)
		require.NoError(t, s.Delete(t.Context(), "a", objstore.AnyGeneration))
		_, err = s.Attrs(t.Context(), "a")
		require.ErrorIs(t, err, objstore.ErrNotFound)
		require.Len(t, got, 5)
		require.ErrorIs(t, got[4].Err, objstore.ErrNotFound)
		got[4].Err = nil
		sec := time.Second
		require.Equal(t, []decorate.Result{
			{Call: decorate.Call{Op: objstore.OpCreate, Name: "a", Size: 5}, Bytes: 5, Duration: sec},
			{Call: decorate.Call{Op: objstore.OpRead, Name: "a", Size: -1}, Bytes: 4, Duration: 4 * sec},
			{Call: decorate.Call{Op: objstore.OpList, Size: -1}, Items: 1, Duration: sec},
			{Call: decorate.Call{Op: objstore.OpDelete, Name: "a", Size: -1}, Duration: sec},
			{Call: decorate.Call{Op: objstore.OpAttrs, Name: "a", Size: -1}, Duration: sec},
		}, got)
	})
}

func TestInjectorStrikesTheNthCall(t *testing.T) {
	inj := decorate.NewInjector(
		decorate.Fault{Op: objstore.OpCreate, NamePrefix: "x/", Nth: 2, Count: 2},
		decorate.Fault{Op: objstore.OpAttrs, Count: -1, Err: io.ErrNoProgress},
	)
	m := newMem()
	s := inj.Decorate(m)
	var failed []int
	for i := range 6 {
		_, err := s.Create(t.Context(), fmt.Sprintf("y/%d", i), objstore.NewParts(nil))
		require.NoError(t, err)
		if _, err := s.Create(t.Context(), fmt.Sprintf("x/%d", i), objstore.NewParts(nil)); err != nil {
			require.ErrorIs(t, err, objstore.ErrUnavailable)
			require.ErrorIs(t, err, objstore.ErrAmbiguous)
			failed = append(failed, i)
		}
		_, err = s.Attrs(t.Context(), "y/0")
		require.ErrorIs(t, err, io.ErrNoProgress)
	}
	require.Equal(t, []int{1, 2}, failed)
	n, _ := m.Len()
	require.Equal(t, 10, n, "struck before the effect: nothing stored")
	require.Equal(t, []int{12, 6, 18}, []int{inj.Calls(objstore.OpCreate), inj.Calls(objstore.OpAttrs), inj.Calls("")})
	require.Equal(t, "before after", decorate.Before.String()+" "+decorate.After.String())
}
