package gcsemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

const (
	adminPrefix = "/_braid/"
	faultsPath  = adminPrefix + "faults"
	statsPath   = adminPrefix + "stats"
)

// ruleSet is the body of the faults path.
type ruleSet struct {
	Seed  uint64 `json:"seed"`
	Rules []Rule `json:"rules"`
}

// admin serves the paths below /_braid/.
func (h *handler) admin(w http.ResponseWriter, r *http.Request) {
	if !h.anywhere && !fromLoopback(r) {
		writeError(w, http.StatusForbidden, "only for loopback peers")
		return
	}
	switch r.Method + " " + r.URL.Path {
	case "GET " + faultsPath:
		writeJSON(w, http.StatusOK, ruleSet{Seed: h.faults.seed, Rules: h.faults.snapshot()})
	case "PUT " + faultsPath:
		var set ruleSet
		if err := decodeStrict(r.Body, &set); err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		if len(set.Rules) > maxRules {
			writeError(w, http.StatusBadRequest, fmt.Sprintf("more than %d rules", maxRules))
			return
		}
		h.answer(w, h.faults.set(set.Rules))
	case "POST " + faultsPath:
		var rule Rule
		if err := decodeStrict(r.Body, &rule); err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		h.answer(w, h.faults.add(rule))
	case "DELETE " + faultsPath:
		h.answer(w, h.faults.set(nil))
	case "GET " + statsPath:
		writeJSON(w, http.StatusOK, h.stats.snapshot())
	case "DELETE " + statsPath:
		h.stats.reset()
		h.answer(w, nil)
	default:
		writeError(w, http.StatusNotFound, "no such path or method")
	}
}

func (h *handler) answer(w http.ResponseWriter, err error) {
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	writeJSON(w, http.StatusOK, ruleSet{Seed: h.faults.seed, Rules: h.faults.snapshot()})
}

func fromLoopback(r *http.Request) bool {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

func decodeStrict(r io.Reader, into any) error {
	dec := json.NewDecoder(io.LimitReader(r, 1<<20))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("more than one JSON value")
	}
	return nil
}

// Admin switches the faults of a server in another process and reads its
// counters. The zero value is not usable; see [NewAdmin]. Safe for concurrent use.
type Admin struct {
	endpoint string
	client   *http.Client
}

// NewAdmin returns a client for the server at endpoint, as [Server.Endpoint]
// gives it. It makes no request.
func NewAdmin(endpoint string) *Admin {
	return &Admin{
		endpoint: strings.TrimRight(endpoint, "/"),
		client:   &http.Client{Timeout: 10 * time.Second},
	}
}

// SetRules replaces all rules.
func (a *Admin) SetRules(ctx context.Context, rules ...Rule) error {
	return a.do(ctx, http.MethodPut, faultsPath, ruleSet{Rules: rules}, nil)
}

// AddRule appends a rule.
func (a *Admin) AddRule(ctx context.Context, rule Rule) error {
	return a.do(ctx, http.MethodPost, faultsPath, rule, nil)
}

// ClearRules removes all rules.
func (a *Admin) ClearRules(ctx context.Context) error {
	return a.do(ctx, http.MethodDelete, faultsPath, nil, nil)
}

// Rules returns the rules in force with their hits.
func (a *Admin) Rules(ctx context.Context) ([]Rule, error) {
	var set ruleSet
	err := a.do(ctx, http.MethodGet, faultsPath, nil, &set)
	return set.Rules, err
}

// Stats returns the counters.
func (a *Admin) Stats(ctx context.Context) (Stats, error) {
	var s Stats
	err := a.do(ctx, http.MethodGet, statsPath, nil, &s)
	return s, err
}

// ResetStats sets the counters to zero.
func (a *Admin) ResetStats(ctx context.Context) error {
	return a.do(ctx, http.MethodDelete, statsPath, nil, nil)
}

func (a *Admin) do(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		encoded, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("emulator admin: %w", err)
		}
		body = bytes.NewReader(encoded)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.endpoint+path, body)
	if err != nil {
		return fmt.Errorf("emulator admin: %w", err)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return fmt.Errorf("emulator admin: %w", err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("emulator admin: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("emulator admin: %s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(answer))
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("emulator admin: %w", err)
	}
	return nil
}
