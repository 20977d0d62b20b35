package gcsemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/braidlog/braid/pkg/objstore"
)

// ErrUnfit is wrapped by the error of [CheckConformance] when a server breaks a
// rule that Braid relies on.
var ErrUnfit = errors.New("object store is unfit for tests")

// CheckConformance probes the server at endpoint, this package's or another that
// speaks the JSON API, for what emulators have been seen to get wrong and tests
// would silently depend on: create-only uploads, small and in several chunks,
// are refused the second time; a chunked upload arrives whole although its
// session was asked for its state in between; deletes obey their generation.
// Run it before tests that are to mean something for a real bucket. It creates
// and removes objects whose names start with prefix; ctx bounds it.
func CheckConformance(ctx context.Context, endpoint, bucket, prefix string) error {
	p := probe{
		client:   &http.Client{Timeout: 30 * time.Second},
		endpoint: strings.TrimRight(endpoint, "/"),
		bucket:   bucket,
	}
	var errs []error
	for _, step := range []struct {
		name string
		run  func(ctx context.Context, object string) error
	}{
		{"small create-only upload", p.small},
		{"chunked create-only upload", p.chunked},
		{"conditional delete", p.conditionalDelete},
	} {
		object := prefix + strings.ReplaceAll(step.name, " ", "-")
		if err := step.run(ctx, object); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", step.name, err))
		}
		if err := p.remove(ctx, object); err != nil {
			errs = append(errs, fmt.Errorf("%s: clean up: %w", step.name, err))
		}
	}
	return errors.Join(errs...)
}

type probe struct {
	client           *http.Client
	endpoint, bucket string
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

func (p *probe) do(ctx context.Context, method, target string, header http.Header, body []byte) (answer, error) {
	if !strings.Contains(target, "://") {
		target = p.endpoint + target
	}
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	return answer{resp.StatusCode, resp.Header, b}, err
}

func (p *probe) object(object string) string {
	return "/storage/v1/b/" + url.PathEscape(p.bucket) + "/o/" + url.PathEscape(object)
}

func (p *probe) upload(object, kind string) string {
	return "/upload/storage/v1/b/" + url.PathEscape(p.bucket) + "/o?uploadType=" + kind +
		"&ifGenerationMatch=0&name=" + url.QueryEscape(object)
}

func (p *probe) remove(ctx context.Context, object string) error {
	a, err := p.do(ctx, http.MethodDelete, p.object(object), nil, nil)
	if err == nil && a.status >= 300 && a.status != http.StatusNotFound {
		err = fmt.Errorf("status %d", a.status)
	}
	return err
}

func unfit(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrUnfit}, args...)...)
}

// small creates an object twice in one request each.
func (p *probe) small(ctx context.Context, object string) error {
	for i, want := range []int{http.StatusOK, http.StatusPreconditionFailed} {
		a, err := p.do(ctx, http.MethodPost, p.upload(object, "media"), nil, []byte("content"))
		if err != nil {
			return err
		}
		if a.status != want {
			return unfit("upload %d got status %d, want %d", i+1, a.status, want)
		}
	}
	return nil
}

// chunkSize is the smallest chunk of a resumable upload.
const chunkSize = 256 << 10

// chunked creates an object of three chunks twice.
func (p *probe) chunked(ctx context.Context, object string) error {
	content := make([]byte, 2*chunkSize+100)
	for i := range content {
		content[i] = byte(i*31 + i>>8)
	}
	status, err := p.session(ctx, object, content)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return unfit("the first upload got status %d", status)
	}
	a, err := p.do(ctx, http.MethodGet, p.object(object)+"?alt=media", nil, nil)
	if err != nil {
		return err
	}
	if !bytes.Equal(a.body, content) {
		return unfit("the object has %d bytes with CRC32C %08x, sent were %d with %08x",
			len(a.body), objstore.CRC32C(a.body), len(content), objstore.CRC32C(content))
	}
	status, err = p.session(ctx, object, content)
	if err != nil {
		return err
	}
	if status != http.StatusPreconditionFailed {
		return unfit("the second upload got status %d, want 412", status)
	}
	return nil
}

// session sends content in chunks and returns the status of its end: the final
// chunk's, or the session's if it was not even opened.
func (p *probe) session(ctx context.Context, object string, content []byte) (int, error) {
	a, err := p.do(ctx, http.MethodPost, p.upload(object, "resumable"),
		http.Header{"Content-Type": {"application/json"}, "X-Upload-Content-Type": {"application/octet-stream"}}, []byte("{}"))
	if err != nil || a.status != http.StatusOK {
		return a.status, err
	}
	target := a.header.Get("Location")
	for offset := 0; offset < len(content); offset += chunkSize {
		end := min(offset+chunkSize, len(content))
		total := "*"
		if end == len(content) {
			total = fmt.Sprint(end)
		}
		a, err = p.do(ctx, http.MethodPut, target,
			http.Header{"Content-Range": {fmt.Sprintf("bytes %d-%d/%s", offset, end-1, total)}}, content[offset:end])
		if err != nil || end == len(content) {
			break
		}
		if a.status != http.StatusPermanentRedirect {
			return 0, unfit("chunk at %d got status %d, want 308", offset, a.status)
		}
		want := fmt.Sprintf("bytes=0-%d", end-1)
		if a.header.Get("Range") != want {
			return 0, unfit("after a chunk the session has %q, want %q", a.header.Get("Range"), want)
		}
		// Asking for the state must change nothing.
		a, err = p.do(ctx, http.MethodPut, target, http.Header{"Content-Range": {"bytes */*"}}, nil)
		if err != nil {
			return 0, err
		}
		if a.status != http.StatusPermanentRedirect || a.header.Get("Range") != want {
			return 0, unfit("a status query got %d with %q, want 308 with %q", a.status, a.header.Get("Range"), want)
		}
	}
	return a.status, err
}

// conditionalDelete deletes an object by a wrong and by its right generation.
func (p *probe) conditionalDelete(ctx context.Context, object string) error {
	a, err := p.do(ctx, http.MethodPost, p.upload(object, "media"), nil, []byte("content"))
	if err != nil {
		return err
	}
	var created struct {
		Generation int64 `json:"generation,string"`
	}
	if err := json.Unmarshal(a.body, &created); err != nil || created.Generation == 0 {
		return unfit("the answer to an upload names no generation")
	}
	for _, c := range []struct {
		generation int64
		deleted    bool
	}{{created.Generation + 1, false}, {created.Generation, true}} {
		a, err := p.do(ctx, http.MethodDelete, fmt.Sprintf("%s?ifGenerationMatch=%d", p.object(object), c.generation), nil, nil)
		if err != nil {
			return err
		}
		if c.deleted != (a.status < 300) {
			return unfit("delete of generation %d got status %d, the object's is %d", c.generation, a.status, created.Generation)
		}
	}
	return nil
}
