//go:build unix

package torture_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// journal is events.jsonl: what happened, when. It is safe for concurrent use.
type journal struct {
	mu  sync.Mutex // guards the writes
	out *os.File
}

func newJournal(t *testing.T, dir string) *journal {
	f, err := os.Create(filepath.Join(dir, "events.jsonl"))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return &journal{out: f}
}

// add writes an event with facts, as name, value, name, value.
func (j *journal) add(event string, facts ...any) {
	line := map[string]any{"at": time.Now().UTC().Format("15:04:05.000"), "event": event}
	for i := 0; i+1 < len(facts); i += 2 {
		v := facts[i+1]
		switch x := v.(type) {
		case time.Duration:
			v = x.Round(time.Millisecond).String()
		case error:
			v = x.Error()
		}
		line[facts[i].(string)] = v
	}
	data, err := json.Marshal(line)
	if err != nil {
		data = []byte(err.Error())
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.out.Write(append(data, '\n'))
}
