package gcsemu

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/textproto"
)

// writeJSON answers value.
func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // a client that is gone needs no answer
}

// writeError answers an error in the JSON API's form.
func writeError(w http.ResponseWriter, status int, message string) {
	if status == http.StatusNotModified {
		w.WriteHeader(status)
		return
	}
	type item struct {
		Message string `json:"message"`
		Domain  string `json:"domain"`
		Reason  string `json:"reason"`
	}
	type body struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
		Errors  []item `json:"errors"`
	}
	reason := map[int]string{
		http.StatusBadRequest: "invalid", http.StatusNotFound: "notFound",
		http.StatusPreconditionFailed: "conditionNotMet", http.StatusTooManyRequests: "rateLimitExceeded",
		http.StatusInternalServerError: "internalError", http.StatusServiceUnavailable: "backendError",
		http.StatusNotImplemented: "notImplemented", http.StatusForbidden: "forbidden",
	}[status]
	writeJSON(w, status, map[string]body{"error": {
		Code: status, Message: message,
		Errors: []item{{Message: message, Domain: "global", Reason: reason}},
	}})
}

type countingReader struct {
	io.ReadCloser
	n int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.n += int64(n)
	return n, err
}

type countingWriter struct {
	http.ResponseWriter
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.n += int64(n)
	return n, err
}

// Unwrap gives http.ResponseController the writer below.
func (c *countingWriter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// discard takes an answer that nobody will see.
type discard struct{ header http.Header }

func newDiscard() *discard { return &discard{header: make(http.Header)} }

func (d *discard) Header() http.Header       { return d.header }
func (*discard) Write(p []byte) (int, error) { return len(p), nil }
func (*discard) WriteHeader(int)             {}

// cuttingWriter passes left bytes of the body on and then calls cut, which
// does not return.
type cuttingWriter struct {
	http.ResponseWriter
	left int64
	cut  func()
}

func (c *cuttingWriter) Write(p []byte) (int, error) {
	if int64(len(p)) <= c.left {
		n, err := c.ResponseWriter.Write(p)
		c.left -= int64(n)
		return n, err
	}
	_, _ = c.ResponseWriter.Write(p[:c.left])
	_ = http.NewResponseController(c.ResponseWriter).Flush()
	c.cut()
	return 0, errors.New("cut")
}

// flippingWriter flips the lowest bit of the body's byte at.
type flippingWriter struct {
	http.ResponseWriter
	pos, at int64
}

func (f *flippingWriter) Write(p []byte) (int, error) {
	if i := f.at - f.pos; i >= 0 && i < int64(len(p)) {
		p = bytes.Clone(p)
		p[i] ^= 1
	}
	n, err := f.ResponseWriter.Write(p)
	f.pos += int64(n)
	return n, err
}

// truncateUpload returns the request with only the first n bytes of content
// and without a declared checksum, which would give the loss away.
func truncateUpload(r *http.Request, n int64) (*http.Request, error) {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/related" {
		return nil, fmt.Errorf("only one-request uploads can be truncated, not %q", kind)
	}
	parts := multipart.NewReader(io.LimitReader(r.Body, maxUpload), params["boundary"])
	var out bytes.Buffer
	w := multipart.NewWriter(&out)
	for i := 0; ; i++ {
		part, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		content, err := io.ReadAll(part)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			content, err = dropChecksums(content)
			if err != nil {
				return nil, err
			}
		} else {
			content = content[:min(n, int64(len(content)))]
		}
		pw, err := w.CreatePart(textproto.MIMEHeader{"Content-Type": part.Header["Content-Type"]})
		if err != nil {
			return nil, err
		}
		if _, err := pw.Write(content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	short := r.Clone(r.Context())
	short.Header.Set("Content-Type", "multipart/related; boundary="+w.Boundary())
	short.ContentLength = int64(out.Len())
	short.Body = io.NopCloser(&out)
	return short, nil
}

func dropChecksums(metadata []byte) ([]byte, error) {
	fields := make(map[string]any)
	if err := json.Unmarshal(metadata, &fields); err != nil {
		return nil, fmt.Errorf("upload metadata: %w", err)
	}
	delete(fields, "crc32c")
	delete(fields, "md5Hash")
	return json.Marshal(fields)
}
