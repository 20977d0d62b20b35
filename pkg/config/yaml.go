package config

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxFileBytes bounds a configuration file.
const maxFileBytes = 1 << 20

// parseYAML turns a file into settings. It walks the document itself instead
// of decoding with KnownFields, because keys are flags rather than struct
// fields, and so that an error can name the full key, its line and the nearest
// known key.
func parseYAML(fs *flag.FlagSet, file string, data []byte) ([]setting, error) {
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("%w: %s has %d bytes: must be at most %d", ErrInvalid, file, len(data), maxFileBytes)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := decoder.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, nil // an empty file sets nothing
		}
		return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, file, err)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: %s holds more than one document", ErrInvalid, file)
	}
	w := &walker{fs: fs, file: file, lines: map[string]int{}}
	w.mapping("", doc.Content[0])
	return w.out, errors.Join(w.errs...)
}

type walker struct {
	fs    *flag.FlagSet
	file  string
	lines map[string]int // line of each key seen
	out   []setting
	errs  []error
}

func (w *walker) fail(n *yaml.Node, format string, args ...any) {
	w.errs = append(w.errs, fmt.Errorf("%w: %s, line %d: %s", ErrInvalid, w.file, n.Line, fmt.Sprintf(format, args...)))
}

func (w *walker) mapping(prefix string, n *yaml.Node) {
	switch {
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		return // a section without keys sets nothing
	case n.Kind != yaml.MappingNode:
		where := "the file"
		if prefix != "" {
			where = prefix
		}
		w.fail(n, "%s must hold keys and values", where)
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		if name.Kind != yaml.ScalarNode || name.Tag == "!!merge" {
			w.fail(name, "keys must be plain names")
			continue
		}
		w.entry(Key(prefix, name.Value), name, value)
	}
}

func (w *walker) entry(key string, name, value *yaml.Node) {
	if value.Kind == yaml.AliasNode || value.Anchor != "" {
		w.fail(value, "%s: anchors and aliases are not supported", key)
		return
	}
	leaf := w.fs.Lookup(key) != nil
	section := value.Kind == yaml.MappingNode || (!leaf && value.Tag == "!!null")
	if section && w.isPrefix(key) {
		w.mapping(key, value)
		return
	}
	if !leaf {
		w.errs = append(w.errs, unknownKey(fmt.Sprintf("%s, line %d: key %s", w.file, name.Line, key), key, w.fs))
		return
	}
	if key == FileKey || key == VerifyKey || key == PrintKey {
		w.fail(name, "%s is only allowed as a flag or in the environment", key)
		return
	}
	if first, again := w.lines[key]; again {
		w.fail(name, "%s is already set in line %d", key, first)
		return
	}
	w.lines[key] = name.Line
	s := setting{key: key, source: fmt.Sprintf("file %s, line %d", w.file, name.Line)}
	switch {
	case value.Tag == "!!null":
		w.fail(value, "%s has no value: leave the key out to use its default", key)
		return
	case value.Kind == yaml.ScalarNode:
		s.value = value.Value
	case value.Kind == yaml.SequenceNode:
		s.list = []string{}
		for _, element := range value.Content {
			if element.Kind != yaml.ScalarNode || element.Tag == "!!null" {
				w.fail(element, "%s: the list must hold plain values", key)
				return
			}
			s.list = append(s.list, element.Value)
		}
	default:
		w.fail(value, "%s takes a value, not a section", key)
		return
	}
	w.out = append(w.out, s)
}

func (w *walker) isPrefix(key string) bool {
	found := false
	w.fs.VisitAll(func(f *flag.Flag) {
		found = found || strings.HasPrefix(f.Name, key+".")
	})
	return found
}

// unknownKey names a key that doesn't exist and, if there is one that looks
// like it, the nearest known one.
func unknownKey(where, key string, fs *flag.FlagSet) error {
	best, bestDistance := "", len(key)/3+2
	fs.VisitAll(func(f *flag.Flag) {
		d := distance(key, f.Name)
		// A key given without its section is a common slip, too.
		if strings.HasSuffix(f.Name, "."+key) {
			d = 1
		}
		if d < bestDistance {
			best, bestDistance = f.Name, d
		}
	})
	if best == "" {
		return fmt.Errorf("%w: %s is unknown", ErrInvalid, where)
	}
	return fmt.Errorf("%w: %s is unknown: did you mean %s?", ErrInvalid, where, best)
}

// distance is the Levenshtein distance in bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(row[j]+1, row[j-1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
