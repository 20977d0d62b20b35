package gcsemu

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"
)

// maxSessions bounds the resumable uploads whose state is remembered. A status
// query of a forgotten one is refused.
const maxSessions = 4096

// sessions remembers how far resumable uploads are, because the emulator takes
// a query of the state for the end of the upload. Braid itself makes no
// resumable uploads; other clients of the emulator may.
type sessions struct {
	mu   sync.Mutex
	have map[string]string // guarded by mu; upload id to the Range header of its state
}

// serveResumable answers the requests of resumable uploads: the start of a
// session, its chunks and queries of its state.
func (h *handler) serveResumable(w http.ResponseWriter, r *http.Request) {
	id := uploadID(r.URL)
	contentRange := r.Header.Get("Content-Range")
	if id != "" && contentRange == "bytes */*" {
		h.sessions.mu.Lock()
		have, known := h.sessions.have[id]
		h.sessions.mu.Unlock()
		if !known {
			writeError(w, http.StatusNotFound, "no such upload session, or it has ended")
			return
		}
		if have != "" {
			w.Header().Set("Range", have)
		}
		w.Header().Set("Content-Length", "0")
		w.WriteHeader(http.StatusPermanentRedirect)
		return
	}
	var first, last int64
	if n, _ := fmt.Sscanf(contentRange, "bytes %d-%d/", &first, &last); n == 2 && r.ContentLength >= 0 && r.ContentLength != last-first+1 {
		// The emulator would credit the range that is claimed.
		writeError(w, http.StatusBadRequest, fmt.Sprintf("%d bytes sent as range %q", r.ContentLength, contentRange))
		return
	}
	h.emulator.ServeHTTP(&sessionWriter{ResponseWriter: w, sessions: &h.sessions, id: id}, r)
}

// uploadID is the session that a URL names, or "".
func uploadID(u *url.URL) string {
	if id := u.Query().Get("upload_id"); id != "" {
		return id
	}
	if strings.HasPrefix(u.Path, "/upload/resumable/") {
		return path.Base(u.Path)
	}
	return ""
}

// sessionWriter learns from an answer how far its session is.
type sessionWriter struct {
	http.ResponseWriter
	sessions *sessions
	id       string
	seen     bool
}

func (w *sessionWriter) WriteHeader(status int) {
	if !w.seen {
		w.seen = true
		w.learn(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *sessionWriter) Write(p []byte) (int, error) {
	if !w.seen {
		w.WriteHeader(http.StatusOK)
	}
	return w.ResponseWriter.Write(p)
}

func (w *sessionWriter) learn(status int) {
	s := w.sessions
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case w.id != "" && status == http.StatusPermanentRedirect:
		if _, known := s.have[w.id]; known {
			s.have[w.id] = w.Header().Get("Range")
		}
	case w.id != "":
		delete(s.have, w.id)
	case status == http.StatusOK && len(s.have) < maxSessions:
		if location, err := url.Parse(w.Header().Get("Location")); err == nil {
			if id := uploadID(location); id != "" {
				s.have[id] = ""
			}
		}
	}
}
