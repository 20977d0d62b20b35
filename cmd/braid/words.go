package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
)

// wordsWindow is how much of the end of a log is looked at.
const wordsWindow = 64 << 10

// lastWords is the line of a role's log, from an offset on, that says best why
// the role ended: what the command said at its end, or a crash, or the last
// error, or the last warning; else just the last line. Empty when there is none.
func lastWords(path, role string, from int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err != nil {
		return err.Error()
	}
	from = max(from, info.Size()-wordsWindow)
	if from >= info.Size() {
		return ""
	}
	data := make([]byte, info.Size()-from)
	n, err := f.ReadAt(data, from)
	if err != nil && !errors.Is(err, io.EOF) {
		return err.Error()
	}
	var best string
	rank := 0
	for line := range bytes.Lines(data[:n]) {
		text := strings.TrimSpace(string(line))
		if r := rankOf(text, role); text != "" && r >= rank {
			best, rank = text, r
		}
	}
	return strings.TrimPrefix(best, "braid "+role+": ")
}

func rankOf(line, role string) int {
	switch {
	case strings.HasPrefix(line, "braid "+role+": "):
		return 4
	case strings.HasPrefix(line, "panic: "), strings.HasPrefix(line, "fatal error: "):
		return 3
	case strings.Contains(line, "level=ERROR"):
		return 2
	case strings.Contains(line, "level=WARN"):
		return 1
	}
	return 0
}

// lasting are words of errors that another start can't mend.
var lasting = []string{"belongs to another owner", "is in use by another process", "CLUSTER_MISMATCH"}

// beyondRestart says that the process would end the same way again.
func (e *processEvent) beyondRestart() bool {
	if !e.failed() {
		return false
	}
	for _, w := range lasting {
		if strings.Contains(e.words, w) {
			return true
		}
	}
	return false
}
