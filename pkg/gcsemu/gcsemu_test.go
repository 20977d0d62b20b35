package gcsemu_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/braidlog/braid/pkg/gcsemu"
	"github.com/braidlog/braid/pkg/objstore"
	"github.com/braidlog/braid/pkg/objstore/gcs"
)

// childRoot, in the environment, makes this test binary an emulator on that
// directory, which TestKilledServer kills.
const childRoot = "GCSEMU_TEST_ROOT"

func TestMain(m *testing.M) {
	if root := os.Getenv(childRoot); root != "" {
		s, err := gcsemu.Start(gcsemu.Options{StorageRoot: root, Buckets: []string{"bucket"}})
		if err != nil {
			panic(err)
		}
		fmt.Println(s.Endpoint()) //nolint:forbidigo // to the parent
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func start(t *testing.T, opts gcsemu.Options) *gcsemu.Server {
	t.Helper()
	if opts.Buckets == nil {
		opts.Buckets = []string{"bucket"}
	}
	s, err := gcsemu.Start(opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func client(t *testing.T, endpoint string) *gcs.Store {
	t.Helper()
	cfg := gcs.DefaultConfig("bucket")
	cfg.Endpoint = endpoint
	s, err := gcs.Open(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

var httpClient = &http.Client{Transport: new(http.Transport), Timeout: time.Minute}

// do makes a raw request.
func do(t *testing.T, method, target, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
	require.NoError(t, err)
	resp, err := httpClient.Do(req)
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.StatusCode, string(b)
}

func TestObjectsSurviveARestart(t *testing.T) {
	root := t.TempDir()
	var created []objstore.Attrs
	for round := range 3 {
		s, err := gcsemu.Start(gcsemu.Options{StorageRoot: root, Buckets: []string{"bucket"}})
		require.NoError(t, err)
		c := client(t, s.Endpoint())
		for i := range 3 {
			a, err := c.Create(t.Context(), fmt.Sprintf("round/%d/%d", round, i), objstore.NewParts(make([]byte, round*100+i)))
			require.NoError(t, err)
			created = append(created, a)
		}
		i := 0
		for a, err := range objstore.List(t.Context(), c, "", "") {
			require.NoError(t, err)
			require.True(t, created[i].Created.Equal(a.Created))
			a.Created = created[i].Created
			require.Equal(t, created[i], a, "attributes and generation are the old ones")
			i++
		}
		require.Len(t, created, i)
		_, err = c.Create(t.Context(), "round/0/0", objstore.NewParts(nil))
		require.ErrorIs(t, err, objstore.ErrExists)
		require.NoError(t, s.Close())
		require.NoError(t, s.Close(), "closing twice is allowed")
	}
}

// A server that is killed in the middle of uploads loses no object that it
// answered for, and its successor lists and serves them all.
func TestKilledServer(t *testing.T) {
	root := t.TempDir()
	exe, err := os.Executable()
	require.NoError(t, err)
	acked := make(map[string]objstore.Attrs)
	for round := range 3 {
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), childRoot+"="+root)
		_, err := cmd.StdinPipe() // the child ends with us, too
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		endpoint, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		c := client(t, strings.TrimSpace(endpoint))

		var mu sync.Mutex
		enough := make(chan struct{})
		var once sync.Once
		var wg sync.WaitGroup
		for w := range 4 {
			wg.Go(func() {
				for i := 0; ; i++ {
					name := fmt.Sprintf("%d/%d/%d", round, w, i)
					a, err := c.Create(t.Context(), name, objstore.NewParts(make([]byte, 20_000+i)))
					if err != nil {
						return // killed
					}
					mu.Lock()
					acked[name] = a
					if len(acked) >= (round+1)*40 {
						once.Do(func() { close(enough) })
					}
					mu.Unlock()
				}
			})
		}
		<-enough
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait()
		wg.Wait()
	}
	s := start(t, gcsemu.Options{StorageRoot: root})
	t.Logf("%d torn files were removed", s.Stats().Swept)
	found := make(map[string]objstore.Attrs)
	for a, err := range objstore.List(t.Context(), client(t, s.Endpoint()), "", "") {
		require.NoError(t, err)
		found[a.Name] = a
	}
	for name, want := range acked {
		got, ok := found[name]
		require.True(t, ok, "acked object %s is lost", name)
		require.Equal(t, want.Generation, got.Generation)
		require.Equal(t, want.CRC32C, got.CRC32C)
		require.Equal(t, want.Size, got.Size)
	}
}

// What a killed server leaves of an unanswered upload would break every listing.
func TestTornFilesAreSwept(t *testing.T) {
	root := t.TempDir()
	s, err := gcsemu.Start(gcsemu.Options{StorageRoot: root, Buckets: []string{"bucket"}})
	require.NoError(t, err)
	_, err = client(t, s.Endpoint()).Create(t.Context(), "dir/whole", objstore.NewParts([]byte("x")))
	require.NoError(t, err)
	require.NoError(t, s.Close())
	for _, name := range []string{"dir/torn", "dir/.torn123456", "dir/gone.metadata"} {
		require.NoError(t, os.WriteFile(filepath.Join(root, "bucket", name), []byte("half"), 0o600))
	}
	s = start(t, gcsemu.Options{StorageRoot: root})
	require.EqualValues(t, 3, s.Stats().Swept)
	c := client(t, s.Endpoint())
	page, _, err := c.ListPage(t.Context(), "", "", 0)
	require.NoError(t, err)
	require.Len(t, page, 1)
	_, err = c.Create(t.Context(), "dir/torn", objstore.NewParts([]byte("again")))
	require.NoError(t, err)
}

func TestStorageDirectoryIsGuarded(t *testing.T) {
	root := t.TempDir()
	start(t, gcsemu.Options{StorageRoot: root})
	_, err := gcsemu.Start(gcsemu.Options{StorageRoot: root})
	require.ErrorContains(t, err, "in use by another server")

	foreign := t.TempDir()
	precious := filepath.Join(foreign, "precious")
	require.NoError(t, os.WriteFile(precious, []byte("x"), 0o600))
	_, err = gcsemu.Start(gcsemu.Options{StorageRoot: foreign})
	require.ErrorContains(t, err, "belongs to something else")
	require.FileExists(t, precious)

	_, err = gcsemu.Start(gcsemu.Options{Listen: "no such address"})
	require.Error(t, err)
	_, err = gcsemu.Start(gcsemu.Options{Rules: []gcsemu.Rule{{Op: "bake"}}})
	require.ErrorContains(t, err, `unknown op "bake"`)

	tmp := start(t, gcsemu.Options{})
	require.DirExists(t, tmp.StorageRoot())
	require.NoError(t, tmp.Close())
	require.NoDirExists(t, tmp.StorageRoot())
}

func TestPreconditionsOfReadsAndDeletes(t *testing.T) {
	s := start(t, gcsemu.Options{})
	a, err := client(t, s.Endpoint()).Create(t.Context(), "dir/a", objstore.NewParts([]byte("content")))
	require.NoError(t, err)
	object := s.Endpoint() + "/storage/v1/b/bucket/o/dir%2Fa"
	for _, c := range []struct {
		method, query string
		want          int
	}{
		{"GET", "ifGenerationMatch=%d", 200},
		{"GET", "alt=media&ifGenerationMatch=%d", 200},
		{"GET", "ifGenerationMatch=1%d", 412},
		{"GET", "alt=media&ifGenerationMatch=1%d", 412},
		{"GET", "ifGenerationNotMatch=%d", 304},
		{"GET", "ifGenerationNotMatch=1%d", 200},
		{"GET", "ifMetagenerationMatch=1&x=%d", 200},
		{"GET", "ifMetagenerationMatch=2&x=%d", 412},
		{"GET", "ifGenerationMatch=x%d", 400},
		{"DELETE", "ifGenerationMatch=1%d", 412},
		{"DELETE", "ifGenerationNotMatch=%d", 412},
		{"DELETE", "ifMetagenerationMatch=2&x=%d", 412},
		{"GET", "ifGenerationMatch=%d", 200}, // still there
		{"DELETE", "ifGenerationMatch=%d", 200},
		{"DELETE", "ifGenerationMatch=%d", 404},
		{"GET", "ifGenerationMatch=%d", 404},
	} {
		status, body := do(t, c.method, object+"?"+fmt.Sprintf(c.query, a.Generation), "")
		require.Equal(t, c.want, status, "%s %s: %s", c.method, c.query, body)
	}
}

func TestWhatWouldBeAnsweredWronglyIsRefused(t *testing.T) {
	s := start(t, gcsemu.Options{})
	_, err := client(t, s.Endpoint()).Create(t.Context(), "a", objstore.NewParts([]byte("content")))
	require.NoError(t, err)
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"PATCH", "/storage/v1/b/bucket/o/a", 501},
		{"PUT", "/storage/v1/b/bucket/o/a", 501},
		{"POST", "/storage/v1/b/bucket/o/a/rewriteTo/b/bucket/o/c", 501},
		{"POST", "/storage/v1/b/bucket/o/a/compose", 501},
		{"POST", "/batch/storage/v1", 501},
		{"PUT", "/bucket/a", 501},
		{"POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=b&ifMetagenerationMatch=1", 501},
		{"POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=..%2F..%2Fetc", 400},
		{"POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=a.metadata", 400},
		{"POST", "/upload/storage/v1/b/nowhere/o?uploadType=media&name=b", 404},
		{"POST", "/_internal/delete_all", 404},
		{"GET", "/_internal/healthcheck", 200},
		{"GET", "/bucket/a", 200}, // the XML API's read
		{"HEAD", "/storage/v1/b/bucket/o/a", 200},
		{"GET", "/download/storage/v1/b/bucket/o/a?alt=media", 200},
	} {
		status, body := do(t, c.method, s.Endpoint()+c.path, "{}")
		require.Equal(t, c.want, status, "%s %s: %s", c.method, c.path, body)
	}
	_, body := do(t, "GET", s.Endpoint()+"/storage/v1/b/nowhere/o/a", "")
	require.Contains(t, body, "The specified bucket does not exist.")
}

// B185, B187: the probe passes this emulator and finds one that forgets the
// preconditions of chunked uploads, loses bytes of them or ignores those of
// deletes.
func TestConformanceProbe(t *testing.T) {
	s := start(t, gcsemu.Options{})
	require.NoError(t, gcsemu.CheckConformance(t.Context(), s.Endpoint(), "bucket", "probe/"))
	page, _, err := client(t, s.Endpoint()).ListPage(t.Context(), "", "", 0)
	require.NoError(t, err)
	require.Empty(t, page, "the probe cleans up")

	target, err := url.Parse(s.Endpoint())
	require.NoError(t, err)
	for name, spoil := range map[string]func(q url.Values, r *http.Request){
		"small create-only upload": func(q url.Values, r *http.Request) {
			if q.Get("uploadType") == "media" {
				q.Del("ifGenerationMatch")
			}
		},
		"chunked create-only upload: object store is unfit for tests: the second": func(q url.Values, r *http.Request) {
			if q.Get("uploadType") == "resumable" {
				q.Del("ifGenerationMatch")
			}
		},
		"conditional delete": func(q url.Values, r *http.Request) {
			if r.Method == http.MethodDelete {
				q.Del("ifGenerationMatch")
			}
		},
		"chunked create-only upload: object store is unfit for tests: the object has": func(q url.Values, r *http.Request) {
			if q.Get("alt") == "media" {
				r.Header.Set("Range", "bytes=0-999") // as if bytes had been lost
			}
		},
		"chunked create-only upload: object store is unfit for tests: a status query": func(q url.Values, r *http.Request) {
			if r.Header.Get("Content-Range") == "bytes */*" {
				r.URL.Path = "/_internal/healthcheck"
				r.Method = http.MethodGet
			}
		},
	} {
		forward := httputil.NewSingleHostReverseProxy(target)
		proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			spoil(q, r)
			r.URL.RawQuery = q.Encode()
			forward.ServeHTTP(w, r)
		}))
		err := gcsemu.CheckConformance(t.Context(), proxy.URL, "bucket", "spoilt/")
		require.ErrorIs(t, err, gcsemu.ErrUnfit, name)
		require.ErrorContains(t, err, name)
		proxy.Close()
	}
}

// B187: a chunk that is shorter than it claims is not credited.
func TestShortChunkIsRefused(t *testing.T) {
	s := start(t, gcsemu.Options{})
	resp, err := httpClient.Post(s.Endpoint()+"/upload/storage/v1/b/bucket/o?uploadType=resumable&ifGenerationMatch=0&name=a",
		"application/json", strings.NewReader("{}"))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	put := func(contentRange, body string) int {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, resp.Header.Get("Location"), strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Range", contentRange)
		resp, err := httpClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	require.Equal(t, 308, put("bytes */*", ""))
	require.Equal(t, 400, put("bytes 0-9/10", "short"))
	_, err = client(t, s.Endpoint()).Attrs(t.Context(), "a")
	require.ErrorIs(t, err, objstore.ErrNotFound)
	require.Equal(t, 200, put("bytes 0-9/10", "0123456789"))
	require.Equal(t, 404, put("bytes */*", ""), "the session has ended")
}

func TestRacingCreateOnlyUploads(t *testing.T) {
	s := start(t, gcsemu.Options{})
	for round := range 20 {
		var wg sync.WaitGroup
		statuses := make([]int, 8)
		for w := range statuses {
			wg.Go(func() {
				resp, err := httpClient.Post(fmt.Sprintf(
					"%s/upload/storage/v1/b/bucket/o?uploadType=media&ifGenerationMatch=0&name=r%d", s.Endpoint(), round),
					"text/plain", strings.NewReader(fmt.Sprint(w)))
				if err == nil {
					statuses[w] = resp.StatusCode
					_ = resp.Body.Close()
				}
			})
		}
		wg.Wait()
		winners := 0
		for _, status := range statuses {
			if status == http.StatusOK {
				winners++
				continue
			}
			require.Equal(t, http.StatusPreconditionFailed, status)
		}
		require.Equal(t, 1, winners)
	}
}

func TestFaultsOverHTTP(t *testing.T) {
	s := start(t, gcsemu.Options{Seed: 7})
	ctx := t.Context()
	admin := gcsemu.NewAdmin(s.Endpoint() + "/")
	object := s.Endpoint() + "/storage/v1/b/bucket/o/a"

	require.NoError(t, admin.SetRules(ctx, gcsemu.Rule{
		Name: "twice", Op: gcsemu.OpAttrs, Skip: 1, Count: 2, Action: gcsemu.ActStatus, Status: 500,
		Latency: gcsemu.Latency{Base: gcsemu.Duration(time.Millisecond)},
	}))
	require.NoError(t, admin.AddRule(ctx, gcsemu.Rule{Op: gcsemu.OpDelete, Every: 2, Action: gcsemu.ActStatus}))
	var got []int
	for range 5 {
		status, _ := do(t, "GET", object, "")
		got = append(got, status)
	}
	require.Equal(t, []int{404, 500, 500, 404, 404}, got)
	got = nil
	for range 4 {
		status, _ := do(t, "DELETE", object, "")
		got = append(got, status)
	}
	require.Equal(t, []int{404, 503, 404, 503}, got)
	rules, err := admin.Rules(ctx)
	require.NoError(t, err)
	require.Equal(t, s.Rules(), rules)
	require.Equal(t, []int{2, 2}, []int{rules[0].Hits, rules[1].Hits})
	require.Equal(t, gcsemu.Duration(time.Millisecond), rules[0].Latency.Base)

	stats, err := admin.Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, s.Stats(), stats)
	require.EqualValues(t, 5, stats.Objects[gcsemu.OpAttrs]["a"])
	require.EqualValues(t, 4, stats.Faults)
	require.Equal(t, []int64{0, 5, 4}, []int64{stats.ClassA, stats.ClassB, stats.Free})
	require.NoError(t, admin.ResetStats(ctx))
	require.Empty(t, s.Stats().Ops)

	require.NoError(t, admin.ClearRules(ctx))
	require.Empty(t, s.Rules())
	status, _ := do(t, "DELETE", object, "")
	require.Equal(t, 404, status)

	for body, text := range map[string]string{
		`{"rules":[{"op":"create","action":"explode"}]}`: "unknown action",
		`{"rules":[{"opp":"create"}]}`:                   "unknown field",
		`{"rules":[{"status":200}]}`:                     "is no error",
		`{"rules":[{"probability":2}]}`:                  "between 0 and 1",
		`{"rules":[{"latency":{"base":"-1s"}}]}`:         "negative",
		`{"rules":[{"latency":{"base":5}}]}`:             "",
		`{"rules":[]} x`:                                 "more than one",
	} {
		status, answer := do(t, "PUT", s.Endpoint()+"/_braid/faults", body)
		require.Equal(t, 400, status, body)
		require.Contains(t, answer, text)
		require.True(t, json.Valid([]byte(answer)))
	}
	status, _ = do(t, "GET", s.Endpoint()+"/_braid/nothing", "")
	require.Equal(t, 404, status)
	require.ErrorContains(t, admin.SetRules(ctx, gcsemu.Rule{Op: "bake"}), "unknown op")
}

// The same seed and order of requests gives the same faults.
func TestFaultsAreRepeatable(t *testing.T) {
	run := func(seed uint64) (statuses []int) {
		s := start(t, gcsemu.Options{Seed: seed, Rules: []gcsemu.Rule{{Action: gcsemu.ActStatus, Probability: 0.5}}})
		for range 40 {
			status, _ := do(t, "GET", s.Endpoint()+"/storage/v1/b/bucket/o/a", "")
			statuses = append(statuses, status)
		}
		return statuses
	}
	first := run(1)
	require.Equal(t, first, run(1))
	require.NotEqual(t, first, run(2))
}

func TestLatencyDelaysAndAddsUp(t *testing.T) {
	ms := func(n int) gcsemu.Duration { return gcsemu.Duration(time.Duration(n) * time.Millisecond) }
	s := start(t, gcsemu.Options{Rules: []gcsemu.Rule{
		{Latency: gcsemu.Latency{Base: ms(20), Jitter: ms(5)}},
		{Latency: gcsemu.Latency{Tail: ms(30), TailProbability: 1}},
	}})
	begin := time.Now()
	status, _ := do(t, "GET", s.Endpoint()+"/storage/v1/b/bucket/o/a", "")
	require.Equal(t, 404, status)
	require.GreaterOrEqual(t, time.Since(begin), 50*time.Millisecond)
	require.NoError(t, s.SetRules(gcsemu.CloudLatency()...))
}

// Close ends requests that a fault holds, and delayed effects.
func TestCloseEndsWhatHangs(t *testing.T) {
	s := start(t, gcsemu.Options{Rules: []gcsemu.Rule{
		{Op: gcsemu.OpAttrs, Action: gcsemu.ActHang},
		{Op: gcsemu.OpList, Latency: gcsemu.Latency{Base: gcsemu.Duration(time.Hour)}},
		{Op: gcsemu.OpDelete, Action: gcsemu.ActLate, Late: gcsemu.Duration(time.Hour)},
	}})
	done := make(chan error, 3)
	for _, c := range [][2]string{{"GET", "/o/a"}, {"GET", "/o"}, {"DELETE", "/o/c"}} {
		go func() {
			req, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), c[0], s.Endpoint()+"/storage/v1/b/bucket"+c[1], nil)
			if err == nil {
				_, err = httpClient.Transport.RoundTrip(req) // it never answers
			}
			done <- err
		}()
	}
	require.Eventually(t, func() bool {
		ops := s.Stats().Ops
		return ops[gcsemu.OpAttrs] > 0 && ops[gcsemu.OpList] > 0 && ops[gcsemu.OpDelete] > 0
	}, 10*time.Second, time.Millisecond)
	begin := time.Now()
	require.NoError(t, s.Close())
	require.Less(t, time.Since(begin), 5*time.Second)
	for range 3 {
		require.Error(t, <-done)
	}
}
