package gcsemu

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"

	"github.com/braidlog/braid/pkg/objstore"
)

// maxUpload bounds an upload that has to be held in memory to be cut short or
// delayed.
const maxUpload = 1 << 30

// lockStripes is the number of locks that object names share.
const lockStripes = 64

// handler stands before the emulator.
type handler struct {
	fake      *fakestorage.Server
	emulator  http.Handler
	faults    *faults
	stats     *counters
	anywhere  bool // admin paths are open to all peers
	stopping  context.Context
	stop      context.CancelFunc
	late      sync.WaitGroup // delayed effects
	seed      maphash.Seed
	names     [lockStripes]sync.Mutex // held over a check and the delete or overwrite it guards
	sessions  sessions
	mu        sync.Mutex
	buckets   map[string]bool           // guarded by mu; buckets seen to exist
	resources map[string]map[string]any // guarded by mu; see SetBucketFields
}

func newHandler(fake *fakestorage.Server, f *faults, anywhere bool) *handler {
	h := &handler{
		fake:      fake,
		emulator:  fake.HTTPHandler(),
		faults:    f,
		stats:     newCounters(),
		anywhere:  anywhere,
		seed:      maphash.MakeSeed(),
		sessions:  sessions{have: make(map[string]string)},
		buckets:   make(map[string]bool),
		resources: make(map[string]map[string]any),
	}
	h.stopping, h.stop = context.WithCancel(context.Background())
	return h
}

func (h *handler) setBucketFields(bucket string, fields map[string]any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resources[bucket] = maps.Clone(fields)
}

// call is what a request asks for.
type call struct {
	op             Op
	bucket, object string
	// refuse is not 0 if the request can't be answered rightly.
	refuse  int
	message string
	// createsOnly is true for an upload that can't replace an object.
	createsOnly bool
	// resumable is true for all requests of a resumable upload.
	resumable bool
}

// parse finds out what r asks for.
func parse(r *http.Request) call {
	path := r.URL.EscapedPath()
	query := r.URL.Query()
	refuse := func(c call, status int, format string, args ...any) call {
		c.refuse, c.message = status, fmt.Sprintf(format, args...)
		return c
	}
	if rest, ok := strings.CutPrefix(path, "/_internal/"); ok {
		if rest == "healthcheck" {
			return call{op: OpOther}
		}
		return refuse(call{op: OpOther}, http.StatusNotFound, "not served here")
	}
	if strings.HasPrefix(path, "/batch/") {
		return refuse(call{op: OpOther}, http.StatusNotImplemented, "batch requests are not served: their preconditions would be ignored")
	}
	if rest, ok := strings.CutPrefix(path, "/upload/storage/v1/b/"); ok {
		bucket, _, _ := strings.Cut(rest, "/")
		c := call{op: OpCreate, bucket: unescape(bucket), object: query.Get("name")}
		c.createsOnly = query.Get("ifGenerationMatch") == "0"
		c.resumable = query.Get("uploadType") == "resumable" || query.Has("upload_id")
		if query.Has("ifMetagenerationMatch") || query.Has("ifMetagenerationNotMatch") {
			return refuse(c, http.StatusNotImplemented, "metageneration preconditions of uploads are not served: they would be ignored")
		}
		return c
	}
	if strings.HasPrefix(path, "/upload/") {
		return call{op: OpCreate, createsOnly: true, resumable: true} // a chunk
	}
	rest, download := strings.CutPrefix(path, "/download/storage/v1/b/")
	if !download {
		var api bool
		if rest, api = strings.CutPrefix(path, "/storage/v1/b"); !api {
			return parseXML(r, path)
		}
		rest = strings.TrimPrefix(rest, "/")
	}
	bucket, rest, below := strings.Cut(rest, "/")
	c := call{op: OpBucket, bucket: unescape(bucket)}
	if !below || rest != "o" && !strings.HasPrefix(rest, "o/") {
		return c
	}
	c.object = unescape(strings.TrimPrefix(strings.TrimPrefix(rest, "o"), "/"))
	switch {
	case r.Method == http.MethodGet && c.object == "":
		c.op = OpList
	case r.Method == http.MethodGet && (download || query.Get("alt") == "media"):
		c.op = OpRead
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		c.op = OpAttrs
	case r.Method == http.MethodDelete:
		c.op = OpDelete
	default:
		c.op = OpOther
		return refuse(c, http.StatusNotImplemented, "%s of an object is not served: its preconditions would be ignored", r.Method)
	}
	return c
}

// parseXML is parse for the XML API's paths, /{bucket}/{object}.
func parseXML(r *http.Request, path string) call {
	bucket, object, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	c := call{op: OpOther, bucket: unescape(bucket), object: unescape(object)}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		switch {
		case c.bucket == "":
		case c.object == "":
			c.op = OpList
		default:
			c.op = OpRead
		}
		return c
	}
	c.refuse, c.message = http.StatusNotImplemented, r.Method+" of the XML API is not served"
	return c
}

func unescape(s string) string {
	if u, err := url.PathUnescape(s); err == nil {
		return u
	}
	return s
}

// ServeHTTP implements http.Handler.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, adminPrefix) {
		h.admin(w, r)
		return
	}
	c := parse(r)
	h.stats.request(c.op, c.object)
	v := h.faults.judge(c.op, c.object)
	in := &countingReader{ReadCloser: r.Body}
	r.Body = in
	out := &countingWriter{ResponseWriter: w}
	// A panic that cuts the connection passes here too.
	defer func() { h.stats.bytes(in.n, out.n, v.action != ActNone) }()
	if v.delay > 0 && !h.wait(r.Context(), v.delay) {
		panic(http.ErrAbortHandler)
	}
	h.act(out, r, c, v)
}

// act serves the request as the fault says.
func (h *handler) act(w http.ResponseWriter, r *http.Request, c call, v verdict) {
	status := v.rule.Status
	if status == 0 {
		status = http.StatusServiceUnavailable
	}
	switch v.action {
	case ActStatus:
		drain(r)
		writeError(w, status, "injected fault")
	case ActStatusAfter:
		h.serve(newDiscard(), r, c)
		writeError(w, status, "injected fault")
	case ActCutBefore:
		drain(r)
		panic(http.ErrAbortHandler)
	case ActCutAfter:
		h.serve(newDiscard(), r, c)
		panic(http.ErrAbortHandler)
	case ActHang, ActHangAfter:
		if v.action == ActHang {
			drain(r)
		} else {
			h.serve(newDiscard(), r, c)
		}
		h.hang(r.Context())
		panic(http.ErrAbortHandler)
	case ActLate:
		h.later(r, c, time.Duration(v.rule.Late))
		panic(http.ErrAbortHandler)
	case ActCutBody, ActStallBody:
		cut := func() { panic(http.ErrAbortHandler) }
		if v.action == ActStallBody {
			cut = func() {
				h.hang(r.Context())
				panic(http.ErrAbortHandler)
			}
		}
		h.serve(&cuttingWriter{ResponseWriter: w, left: v.rule.Bytes, cut: cut}, r, c)
	case ActFlip:
		h.serve(&flippingWriter{ResponseWriter: w, at: v.rule.Bytes}, r, c)
	case ActTruncate:
		short, err := truncateUpload(r, v.rule.Bytes)
		if err != nil {
			writeError(w, http.StatusBadRequest, "injected fault: "+err.Error())
			return
		}
		h.serve(w, short, c)
	default:
		h.serve(w, r, c)
	}
}

// later lets the request take effect after d, unless the server closes first.
func (h *handler) later(r *http.Request, c call, d time.Duration) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxUpload))
	if err != nil {
		return
	}
	again := r.Clone(h.stopping)
	again.Body = io.NopCloser(bytes.NewReader(body))
	h.late.Add(1)
	go func() {
		defer h.late.Done()
		if h.wait(h.stopping, d) {
			h.serve(newDiscard(), again, c)
		}
	}()
}

// serve answers the request rightly.
func (h *handler) serve(w http.ResponseWriter, r *http.Request, c call) {
	if c.refuse != 0 {
		writeError(w, c.refuse, c.message)
		return
	}
	if c.object != "" {
		if err := objstore.CheckName(c.object); err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		if strings.HasSuffix(c.object, objectMetadataSuffix) {
			writeError(w, http.StatusBadRequest, "names ending in "+objectMetadataSuffix+" can't be stored here")
			return
		}
	}
	switch c.op {
	case OpCreate, OpRead, OpAttrs, OpDelete, OpList:
		if c.bucket != "" && !h.bucketExists(c.bucket) {
			writeError(w, http.StatusNotFound, "The specified bucket does not exist.")
			return
		}
	case OpBucket:
		h.serveBucket(w, r, c)
		return
	}
	guarded := hasPrecondition(r.URL.Query())
	if c.op == OpDelete || c.op == OpCreate && !c.createsOnly {
		// Deletes and overwrites of a name exclude each other, so what a check
		// saw is still there when the delete runs. Create-only uploads need no
		// lock: they can't replace what the check saw.
		lock := &h.names[maphash.String(h.seed, c.bucket+"/"+c.object)%lockStripes]
		lock.Lock()
		defer lock.Unlock()
	}
	if guarded && (c.op == OpRead || c.op == OpAttrs || c.op == OpDelete) {
		// An absent object is answered here too: passed on, a delete could meet
		// one that a create-only upload has put there since.
		if status := h.judge(r.URL.Query(), c); status != 0 {
			writeError(w, status, http.StatusText(status))
			return
		}
	}
	if c.resumable {
		h.serveResumable(w, r)
		return
	}
	h.emulator.ServeHTTP(w, r)
}

// serveBucket answers requests about buckets themselves.
func (h *handler) serveBucket(w http.ResponseWriter, r *http.Request, c call) {
	h.mu.Lock()
	delete(h.buckets, c.bucket) // whatever happens, look again
	fields := h.resources[c.bucket]
	h.mu.Unlock()
	if r.Method != http.MethodGet || len(fields) == 0 {
		h.emulator.ServeHTTP(w, r)
		return
	}
	rec := httptest.NewRecorder()
	h.emulator.ServeHTTP(rec, r)
	resource := make(map[string]any)
	if rec.Code != http.StatusOK || json.Unmarshal(rec.Body.Bytes(), &resource) != nil {
		writeError(w, rec.Code, http.StatusText(rec.Code))
		return
	}
	maps.Copy(resource, fields)
	writeJSON(w, http.StatusOK, resource)
}

func (h *handler) bucketExists(bucket string) bool {
	h.mu.Lock()
	known := h.buckets[bucket]
	h.mu.Unlock()
	if known {
		return true
	}
	if _, err := h.fake.Backend().GetBucket(bucket); err != nil {
		return false
	}
	h.mu.Lock()
	h.buckets[bucket] = true
	h.mu.Unlock()
	return true
}

var preconditions = []string{
	"ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch",
}

func hasPrecondition(q url.Values) bool {
	for _, p := range preconditions {
		if q.Has(p) {
			return true
		}
	}
	return false
}

// judge returns 0 if the object is there and the preconditions hold, else the
// status to answer.
func (h *handler) judge(q url.Values, c call) int {
	o, err := h.fake.GetObjectStreaming(c.bucket, c.object)
	_ = o.Close() // allowed, and needed, whatever the error
	if err != nil {
		return http.StatusNotFound
	}
	const metageneration = 1 // no request that would raise it is served
	for _, p := range preconditions {
		if !q.Has(p) {
			continue
		}
		want, err := strconv.ParseInt(q.Get(p), 10, 64)
		if err != nil {
			return http.StatusBadRequest
		}
		have := o.Generation
		if strings.HasPrefix(p, "ifMetageneration") {
			have = metageneration
		}
		switch negated := strings.HasSuffix(p, "NotMatch"); {
		case !negated && have != want:
			return http.StatusPreconditionFailed
		case negated && have == want:
			if c.op == OpDelete {
				return http.StatusPreconditionFailed
			}
			return http.StatusNotModified
		}
	}
	return 0
}

// wait waits for d and reports false if ctx or the server ended first.
func (h *handler) wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
	case <-h.stopping.Done():
	}
	return false
}

// hang waits until ctx or the server ends.
func (h *handler) hang(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-h.stopping.Done():
	}
}

func drain(r *http.Request) { _, _ = io.Copy(io.Discard, io.LimitReader(r.Body, maxUpload)) }
