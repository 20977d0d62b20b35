package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"unicode/utf8"
)

// quoteJSON writes text as a JSON string, without escaping what only matters
// inside HTML.
func quoteJSON(text string) ([]byte, error) {
	if !utf8.ValidString(text) {
		return nil, errors.New("is not UTF-8")
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(text); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
