package gcs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/backoff"
	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/decorate"
	"github.com/braidlog/braid/pkg/objstore/gcs"
)

// fixture is a bare store and one with retries, on an emulator of its own.
type fixture struct {
	emu      *gcsemu.Server
	bare     *gcs.Store
	retrying objstore.Store
}

func newFixture(t *testing.T, change func(*gcs.Config)) fixture {
	t.Helper()
	emu, err := gcsemu.Start(gcsemu.Options{Buckets: []string{"bucket"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, emu.Close()) })
	cfg := emulated(emu.Endpoint())
	if change != nil {
		change(&cfg)
	}
	bare := open(t, cfg)
	return fixture{emu: emu, bare: bare, retrying: decorate.Wrap(bare, decorate.Retry(decorate.RetryOptions{
		Policy: backoff.Policy{Initial: time.Millisecond, Max: 10 * time.Millisecond, Multiplier: 2},
	}))}
}

func (f fixture) fail(t *testing.T, rules ...gcsemu.Rule) {
	t.Helper()
	require.NoError(t, f.emu.SetRules(rules...))
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// B169: an upload that is refused twice succeeds by itself, and each of its
// requests carries the create-only precondition. The client library alone
// does not repeat a one-request upload.
func TestRefusedUploadIsRepeatedByUsAlone(t *testing.T) {
	f := newFixture(t, nil)
	f.fail(t, gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActStatus, Count: 3})
	_, err := f.bare.Create(t.Context(), "a", objstore.NewParts(pattern(1000)))
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.ErrorIs(t, err, objstore.ErrAmbiguous)
	require.EqualValues(t, 1, f.emu.Requests(gcsemu.OpCreate, "a"))

	target, err := url.Parse(f.emu.Endpoint())
	require.NoError(t, err)
	var mu sync.Mutex
	var uploads []url.Values
	forward := httputil.NewSingleHostReverseProxy(target)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			mu.Lock()
			uploads = append(uploads, r.URL.Query())
			mu.Unlock()
		}
		forward.ServeHTTP(w, r)
	}))
	defer proxy.Close()
	s := decorate.Wrap(open(t, emulated(proxy.URL)), decorate.Retry(decorate.RetryOptions{Policy: backoff.Policy{Initial: time.Millisecond}}))
	_, err = s.Create(t.Context(), "a", objstore.NewParts(pattern(1000)))
	require.NoError(t, err)
	require.Len(t, uploads, 3)
	for _, q := range uploads {
		require.Equal(t, "0", q.Get("ifGenerationMatch"))
		require.Equal(t, "multipart", q.Get("uploadType"))
	}
}

// B170: the upload succeeded, the answer was lost, the repetition meets 412.
func TestLostAnswerOfAnUpload(t *testing.T) {
	for name, rule := range map[string]gcsemu.Rule{
		"connection cut after the effect": {Op: gcsemu.OpCreate, Action: gcsemu.ActCutAfter, Count: 1},
		"503 after the effect":            {Op: gcsemu.OpCreate, Action: gcsemu.ActStatusAfter, Count: 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, nil)
			f.fail(t, rule)
			mine := objstore.NewParts(pattern(5000))
			a, err := f.retrying.Create(t.Context(), "a", mine)
			require.NoError(t, err)
			require.True(t, objstore.Same(a, mine))
			require.EqualValues(t, 2, f.emu.Requests(gcsemu.OpCreate, "a"))
			require.EqualValues(t, 1, f.emu.Requests(gcsemu.OpAttrs, "a"))
		})
	}
	t.Run("another's object", func(t *testing.T) {
		f := newFixture(t, nil)
		_, err := f.bare.Create(t.Context(), "a", objstore.NewParts([]byte("theirs")))
		require.NoError(t, err)
		f.fail(t, gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActCutBefore, Count: 1})
		_, err = f.retrying.Create(t.Context(), "a", objstore.NewParts([]byte("mine")))
		require.ErrorIs(t, err, objstore.ErrExists)
		require.ErrorIs(t, err, objstore.ErrCorrupt)
	})
}

// B171: an upload that was given up appears later, even after a delete. It
// stays unreferenced under its own name, the new attempt has another, and
// collection removes it.
func TestLateUpload(t *testing.T) {
	f := newFixture(t, nil)
	ctx := t.Context()
	f.fail(t, gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActLate, Late: gcsemu.Duration(100 * time.Millisecond), Count: 1})
	_, err := f.bare.Create(ctx, "attempt-1", objstore.NewParts([]byte("x")))
	require.ErrorIs(t, err, objstore.ErrAmbiguous)
	require.NoError(t, f.bare.Delete(ctx, "attempt-1", objstore.AnyGeneration))
	_, err = f.bare.Attrs(ctx, "attempt-1")
	require.ErrorIs(t, err, objstore.ErrNotFound)
	second, err := f.bare.Create(ctx, "attempt-2", objstore.NewParts([]byte("x")))
	require.NoError(t, err)

	var late objstore.Attrs
	require.Eventually(t, func() bool {
		late, err = f.bare.Attrs(ctx, "attempt-1")
		return err == nil
	}, 10*time.Second, 10*time.Millisecond)
	require.NotEqual(t, second.Generation, late.Generation)
	require.NoError(t, f.bare.Delete(ctx, "attempt-1", late.Generation))
	_, err = f.bare.Attrs(ctx, "attempt-2")
	require.NoError(t, err)
}

// B173: a store that takes the upload and never answers costs one deadline,
// and blocks nobody else.
func TestUploadThatIsNeverAnswered(t *testing.T) {
	const deadline = 300 * time.Millisecond
	f := newFixture(t, func(c *gcs.Config) { c.AttemptTimeout = deadline })
	f.fail(t,
		gcsemu.Rule{Op: gcsemu.OpCreate, ObjectPrefix: "slow", Action: gcsemu.ActHang, Count: 1},
		gcsemu.Rule{Op: gcsemu.OpCreate, ObjectPrefix: "taken", Action: gcsemu.ActHangAfter, Count: 1})
	_, err := f.bare.Create(t.Context(), "slow", objstore.NewParts([]byte("x")))
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.ErrorIs(t, err, objstore.ErrAmbiguous)
	require.NotErrorIs(t, err, context.DeadlineExceeded, "the attempt's deadline is not the caller's")

	f.fail(t, f.emu.Rules()...)
	start := time.Now()
	var wg sync.WaitGroup
	for _, name := range []string{"slow", "taken"} {
		wg.Go(func() {
			_, err := f.retrying.Create(t.Context(), name, objstore.NewParts([]byte("x")))
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	_, err = f.bare.Create(t.Context(), "other", objstore.NewParts([]byte("x")))
	require.NoError(t, err)
	require.Less(t, time.Since(start), deadline, "another upload had to wait")
	wg.Wait()
	require.Less(t, time.Since(start), 3*deadline)

	// The caller's own deadline is reported as such.
	f.fail(t, gcsemu.Rule{Action: gcsemu.ActHang})
	ctx, cancel := context.WithTimeout(t.Context(), deadline/6)
	defer cancel()
	_, err = f.retrying.Attrs(ctx, "other")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, objstore.ErrUnavailable)
}

// B175: a read that stalls is noticed, and continued from the last byte.
func TestStalledRead(t *testing.T) {
	const size, stallAt = 4 << 20, 1 << 20
	f := newFixture(t, func(c *gcs.Config) { c.StallTimeout = 200 * time.Millisecond })
	content := pattern(size)
	_, err := f.bare.Create(t.Context(), "a", objstore.NewParts(content))
	require.NoError(t, err)
	for _, action := range []gcsemu.Action{gcsemu.ActStallBody, gcsemu.ActCutBody} {
		t.Run(string(action), func(t *testing.T) {
			rule := gcsemu.Rule{Op: gcsemu.OpRead, Action: action, Bytes: stallAt, Count: 1}
			f.fail(t, rule)
			f.emu.ResetStats()
			dst := make([]byte, size)
			n, err := f.retrying.ReadRange(t.Context(), "a", 0, dst)
			require.NoError(t, err)
			require.Equal(t, size, n)
			require.True(t, bytes.Equal(content, dst))
			require.EqualValues(t, 2, f.emu.Requests(gcsemu.OpRead, "a"))
			require.EqualValues(t, size, f.emu.Stats().BytesOut, "bytes were sent twice")

			f.fail(t, rule)
			rc, err := f.retrying.OpenRange(t.Context(), "a", 0, objstore.ToEnd)
			require.NoError(t, err)
			got, err := io.ReadAll(rc)
			require.NoError(t, err)
			require.NoError(t, rc.Close())
			require.True(t, bytes.Equal(content, got))
		})
	}
	f.fail(t, gcsemu.Rule{Op: gcsemu.OpRead, Action: gcsemu.ActStallBody, Bytes: stallAt})
	n, err := f.bare.ReadRange(t.Context(), "a", 0, make([]byte, size))
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.Equal(t, stallAt, n)
}

// B177: a range is not covered by the object's checksum. A read of the whole
// object is; the readers of ranges bring their own.
func TestFlippedBit(t *testing.T) {
	f := newFixture(t, nil)
	content := pattern(1000)
	_, err := f.bare.Create(t.Context(), "a", objstore.NewParts(content))
	require.NoError(t, err)
	f.fail(t, gcsemu.Rule{Op: gcsemu.OpRead, Action: gcsemu.ActFlip, Bytes: 10})
	rc, err := f.bare.OpenRange(t.Context(), "a", 0, objstore.ToEnd)
	require.NoError(t, err)
	_, err = io.ReadAll(rc)
	require.ErrorIs(t, err, objstore.ErrCorrupt)
	require.NoError(t, rc.Close())
	dst := make([]byte, 500)
	_, err = f.bare.ReadRange(t.Context(), "a", 100, dst)
	require.NoError(t, err)
	require.Equal(t, content[110]^1, dst[10])
}

// B181: a delete that was applied but not answered.
func TestLostAnswerOfADelete(t *testing.T) {
	f := newFixture(t, nil)
	a, err := f.bare.Create(t.Context(), "a", objstore.NewParts([]byte("x")))
	require.NoError(t, err)
	f.fail(t, gcsemu.Rule{Op: gcsemu.OpDelete, Action: gcsemu.ActCutAfter, Count: 1})
	require.NoError(t, f.retrying.Delete(t.Context(), "a", a.Generation))
	require.EqualValues(t, 2, f.emu.Requests(gcsemu.OpDelete, "a"))
}

// B182: too many changes are refused for now, and surely nothing happened.
func TestThrottledUpload(t *testing.T) {
	f := newFixture(t, nil)
	f.fail(t, gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActStatus, Status: http.StatusTooManyRequests, Count: 2})
	_, err := f.bare.Create(t.Context(), "a", objstore.NewParts([]byte("x")))
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.NotErrorIs(t, err, objstore.ErrAmbiguous)
	_, err = f.retrying.Create(t.Context(), "a", objstore.NewParts([]byte("x")))
	require.NoError(t, err)
}

// B183, B187: a store that keeps less than was sent and reports success. The
// answer gives it away, and no short object stays under the name.
func TestShortUploadIsNoticed(t *testing.T) {
	for _, kept := range []int64{0, 1, 99_999} {
		t.Run(fmt.Sprintf("%d of 100000 bytes", kept), func(t *testing.T) {
			f := newFixture(t, nil)
			body := objstore.NewParts(pattern(100_000))
			f.fail(t, gcsemu.Rule{Op: gcsemu.OpCreate, Action: gcsemu.ActTruncate, Bytes: kept, Count: 2})
			a, err := f.bare.Create(t.Context(), "bare", body)
			require.ErrorIs(t, err, objstore.ErrCorrupt)
			require.Equal(t, kept, a.Size)
			require.Positive(t, a.Generation, "the caller can name what to delete")

			a, err = f.retrying.Create(t.Context(), "a", body)
			require.NoError(t, err)
			require.EqualValues(t, 2, f.emu.Requests(gcsemu.OpCreate, "a"))
			require.EqualValues(t, 1, f.emu.Requests(gcsemu.OpDelete, "a"))
			got, err := f.bare.Attrs(t.Context(), "a")
			require.NoError(t, err)
			require.True(t, objstore.Same(got, body))
			require.Equal(t, a.Generation, got.Generation)
		})
	}
}

func TestMissingBucketIsNotAMissingObject(t *testing.T) {
	f := newFixture(t, func(c *gcs.Config) { c.Bucket = "nowhere" })
	ctx := t.Context()
	_, create := f.bare.Create(ctx, "a", objstore.NewParts([]byte("x")))
	_, read := f.bare.ReadRange(ctx, "a", 0, make([]byte, 1))
	_, attrs := f.bare.Attrs(ctx, "a")
	_, _, list := f.bare.ListPage(ctx, "", "", 0)
	_, settings := f.bare.BucketSettings(ctx)
	remove := f.bare.Delete(ctx, "a", objstore.AnyGeneration)
	for name, err := range map[string]error{
		"create": create, "read": read, "attrs": attrs, "list": list, "settings": settings, "delete": remove,
	} {
		require.ErrorIs(t, err, objstore.ErrBucketNotFound, name)
		require.NotErrorIs(t, err, objstore.ErrNotFound, name)
		require.NotErrorIs(t, err, objstore.ErrAmbiguous, name)
	}
}

func TestUnreachableStore(t *testing.T) {
	emu, err := gcsemu.Start(gcsemu.Options{Buckets: []string{"bucket"}})
	require.NoError(t, err)
	s := open(t, emulated(emu.Endpoint()))
	require.NoError(t, emu.Close())
	_, err = s.Create(t.Context(), "a", objstore.NewParts([]byte("x")))
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.NotErrorIs(t, err, objstore.ErrAmbiguous, "it was never connected")
	_, err = s.Attrs(t.Context(), "a")
	require.ErrorIs(t, err, objstore.ErrUnavailable)
	require.NotErrorIs(t, err, objstore.ErrNotFound)
}

func TestSettingsOfARealLookingBucket(t *testing.T) {
	f := newFixture(t, nil)
	f.emu.SetBucketFields("bucket", map[string]any{
		"location":         "EUROPE-WEST4",
		"storageClass":     "STANDARD",
		"softDeletePolicy": map[string]any{"retentionDurationSeconds": "604800"},
		"retentionPolicy":  map[string]any{"retentionPeriod": "86400", "isLocked": true, "effectiveTime": "2026-01-01T00:00:00Z"},
		"versioning":       map[string]any{"enabled": true},
		"lifecycle": map[string]any{"rule": []any{
			map[string]any{"action": map[string]any{"type": "Delete"}, "condition": map[string]any{"age": 30, "matchesPrefix": []string{"wal/"}}},
			map[string]any{"action": map[string]any{"type": "Delete"}, "condition": map[string]any{"isLive": false}},
			map[string]any{"action": map[string]any{"type": "SetStorageClass", "storageClass": "NEARLINE"}, "condition": map[string]any{"age": 1, "matchesSuffix": []string{".seg"}}},
		}},
	})
	got, err := f.bare.BucketSettings(t.Context())
	require.NoError(t, err)
	want := objstore.BucketSettings{
		Name: "bucket", Location: "EUROPE-WEST4", StorageClass: "STANDARD",
		SoftDelete: 7 * 24 * time.Hour, Versioning: true, Retention: 24 * time.Hour, RetentionLocked: true,
		Lifecycle: []objstore.LifecycleRule{
			{Action: "Delete", Prefixes: []string{"wal/"}},
			{Action: "Delete", NoncurrentOnly: true},
			{Action: "SetStorageClass", StorageClass: "NEARLINE", Suffixes: []string{".seg"}},
		},
	}
	require.Equal(t, want, got)
	require.Equal(t, objstore.Refuse, got.Check("")[0].Severity)

	f.emu.SetBucketFields("bucket", nil)
	got, err = f.bare.BucketSettings(t.Context())
	require.NoError(t, err)
	require.Empty(t, got.Check(""))
}

// A body that breaks in the middle must not leave a short object, not even
// later.
func TestBrokenBodyCutsTheUpload(t *testing.T) {
	f := newFixture(t, nil)
	broken := errors.New("broken")
	content := pattern(1 << 20)
	_, err := f.bare.Create(t.Context(), "a", brokenBody{objstore.NewParts(content), broken})
	require.ErrorIs(t, err, broken)
	require.ErrorIs(t, err, objstore.ErrInvalid)
	_, err = f.bare.Attrs(t.Context(), "a")
	require.ErrorIs(t, err, objstore.ErrNotFound)
}

type brokenBody struct {
	objstore.Body
	err error
}

func (b brokenBody) Open() (io.ReadCloser, error) {
	r, err := b.Body.Open()
	if err != nil {
		return nil, err
	}
	return io.NopCloser(io.MultiReader(io.LimitReader(r, b.Size()/2), iotestErr{b.err})), nil
}

type iotestErr struct{ err error }

func (e iotestErr) Read([]byte) (int, error) { return 0, e.err }

// Each read is one request, whatever its size.
func TestOneRequestPerRead(t *testing.T) {
	f := newFixture(t, nil)
	_, err := f.bare.Create(t.Context(), "a", objstore.NewParts(pattern(3<<20)))
	require.NoError(t, err)
	f.emu.ResetStats()
	_, err = f.bare.ReadRange(t.Context(), "a", 1000, make([]byte, 2<<20))
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"a": 1}, f.emu.Stats().Objects[gcsemu.OpRead])
	_, _, err = f.bare.ReadSuffix(t.Context(), "a", make([]byte, 100))
	require.NoError(t, err)
	require.EqualValues(t, 2, f.emu.Stats().ClassB)
	require.Zero(t, f.emu.Stats().ClassA)
}

func BenchmarkPut(b *testing.B) {
	for _, size := range []int{256 << 10, 4 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			// A server that takes the upload and stores nothing: what remains is
			// the client's own cost, plus net/http's on both sides.
			s := open(b, emulated(sink(b)))
			parts := make([][]byte, 64)
			for i := range parts {
				parts[i] = pattern(size / len(parts))
			}
			body := objstore.NewParts(parts...)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Create(b.Context(), "a", body); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("emulator/%dKiB", size>>10), func(b *testing.B) {
			s := open(b, emulated(emulator.Endpoint()))
			body := objstore.NewParts(pattern(size))
			b.SetBytes(int64(size))
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				n++
				if _, err := s.Create(b.Context(), fmt.Sprintf("bench-%p/%d", b, n), body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// sink answers every upload as if it had stored what was declared.
func sink(b *testing.B) string {
	b.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := make([]byte, 1024)
		n, _ := io.ReadFull(r.Body, head)
		sent := int64(n)
		m, _ := io.Copy(io.Discard, r.Body)
		sent += m
		crc := between(head[:n], `"crc32c":"`, `"`)
		// The multipart framing is what the client adds to the content.
		size := int64(256 << 10)
		if sent > 4<<20 {
			size = 4 << 20
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"name":"a","generation":"1","metageneration":"1","size":"%d","crc32c":"%s"}`, size, crc)
	}))
	b.Cleanup(srv.Close)
	return srv.URL
}

func between(s []byte, from, to string) string {
	_, rest, _ := bytes.Cut(s, []byte(from))
	v, _, _ := bytes.Cut(rest, []byte(to))
	return string(v)
}
