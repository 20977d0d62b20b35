package config

import (
	"bytes"
	"flag"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Redacted writes every key with its effective value as YAML, sections nested,
// secrets starred. Without secrets the text loads back to the same
// configuration. The keys that [Load] adds are left out.
func Redacted(fs *flag.FlagSet) ([]byte, error) {
	root := &yaml.Node{Kind: yaml.MappingNode}
	var err error
	fs.VisitAll(func(f *flag.Flag) {
		if isLoadKey(f.Name) {
			return
		}
		value := new(yaml.Node)
		if e := value.Encode(plain(f)); e != nil && err == nil {
			err = fmt.Errorf("print %s: %w", f.Name, e)
		}
		put(root, f.Name, fs, value)
	})
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(root); err != nil {
		return nil, fmt.Errorf("print the configuration: %w", err)
	}
	return out.Bytes(), encoder.Close()
}

func isLoadKey(name string) bool { return name == FileKey || name == VerifyKey || name == PrintKey }

// plain is the value as YAML should show it.
func plain(f *flag.Flag) any {
	if getter, ok := f.Value.(flag.Getter); ok {
		switch v := getter.Get().(type) {
		case bool, int, int64, uint, uint64, float64:
			return v
		case []string:
			if v == nil {
				return []string{}
			}
			return v
		}
	}
	return f.Value.String()
}

// put hangs value below root at the path that the key's dots describe. A key
// that is both a value and a section ("a" and "a.b") can't be nested; the
// deeper one then keeps its dots at the level where they part.
func put(root *yaml.Node, key string, fs *flag.FlagSet, value *yaml.Node) {
	node, prefix := root, ""
	for {
		head, rest, more := strings.Cut(key, ".")
		full := Key(prefix, head)
		if !more || fs.Lookup(full) != nil {
			node.Content = append(node.Content, scalar(key), value)
			return
		}
		child := lookup(node, head)
		if child == nil {
			child = &yaml.Node{Kind: yaml.MappingNode}
			node.Content = append(node.Content, scalar(head), child)
		}
		node, prefix, key = child, full, rest
	}
}

func lookup(node *yaml.Node, name string) *yaml.Node {
	for i := 0; i+1 < len(node.Content); i += 2 {
		if node.Content[i].Value == name {
			return node.Content[i+1]
		}
	}
	return nil
}

func scalar(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Value: s} }

// Markdown writes the reference of a section's keys: a table with key,
// environment variable, type, default and meaning, sorted by key. name is the
// program's.
func Markdown(name string, cfg Section) string {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	cfg.RegisterFlags("", fs)
	prefix := Options{}.withDefaults(name).EnvPrefix
	var b strings.Builder
	b.WriteString("| Key | Environment | Type | Default | Meaning |\n| --- | --- | --- | --- | --- |\n")
	fs.VisitAll(func(f *flag.Flag) {
		kind, meaning := describe(f)
		def := f.DefValue
		if def == "" {
			def = "(empty)"
		} else {
			def = "`" + def + "`"
		}
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s | %s |\n", f.Name, EnvName(prefix, f.Name), kind, escape(def), escape(meaning))
	})
	return b.String()
}

func escape(s string) string {
	return strings.NewReplacer("|", "\\|", "\n", " ").Replace(s)
}

func describe(f *flag.Flag) (kind, meaning string) {
	kind, meaning = flag.UnquoteUsage(f)
	switch f.Value.(type) {
	case *Duration:
		kind = "duration"
	case *Size:
		kind = "size"
	case *Strings:
		kind = "list"
	case *Secret:
		kind = "secret"
	case *enum:
		kind = "name"
	default:
		if isBool(f) {
			kind = "bool"
		}
	}
	return kind, meaning
}
