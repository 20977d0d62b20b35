package main

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// sound is a small repository in which every rule holds.
func sound() map[string]string {
	return map[string]string{
		"go.work":                    "go 1.26.0\n\nuse (\n\t./pkg\n\t./services/a\n)\n",
		"pkg/go.mod":                 "module github.com/braidlog/braid/pkg\n\ngo 1.26.0\n",
		"pkg/record/doc.go":          "// Package record is.\npackage record\n",
		"pkg/record/fuzz_test.go":    "package record\n\nfunc FuzzRead(f *testing.F) {}\n",
		"services/a/go.mod":          "go 1.26.0\nrequire github.com/braidlog/braid/pkg v0.0.0\nreplace github.com/braidlog/braid/pkg => ../../pkg\n",
		"services/a/cmd/a/main.go":   "package main\n",
		"README.md":                  "[record](pkg/record) [out](https://example.com) [here](#top) serves /metrics under /srv\n",
		"docs/development.md":        "[up](../README.md#x)\n",
		"pkg/record/testdata/x.json": "/srv/checkout\n",
	}
}

func treeOf(files map[string]string) tree {
	t := tree{files: map[string][]byte{}, private: []string{"/srv/checkout"}}
	for name, text := range files {
		t.files[name] = []byte(text)
	}
	return t
}

func TestCheckAcceptsSoundTree(t *testing.T) {
	if broken := check(treeOf(sound())); len(broken) > 0 {
		t.Fatalf("reported %q", broken)
	}
}

func TestCheckFindsEachBrokenRule(t *testing.T) {
	for name, c := range map[string]struct{ file, text, want string }{
		"go line":          {"pkg/go.mod", "go 1.25\n", "pkg/go.mod: go 1.25, but go.work says go 1.26.0"},
		"missing module":   {"go.work", "go 1.26.0\nuse ./pkg\nuse ./gone\n", "go.work: uses ./gone"},
		"absolute replace": {"pkg/go.mod", "go 1.26.0\nreplace example.com/x v1.0.0 => /opt/x\n", "by an absolute path"},
		"no replace":       {"services/a/go.mod", "go 1.26.0\nrequire github.com/braidlog/braid/pkg v0.0.0\n", "without a relative replace"},
		"sibling version":  {"services/a/go.mod", "go 1.26.0\nrequire github.com/braidlog/braid/pkg v0.1.0\n", "want v0.0.0"},
		"service law":      {"services/a/go.mod", "go 1.26.0\nrequire github.com/braidlog/braid/services/b v0.0.0\n", "another service: services/b"},
		"vague name":       {"pkg/util/doc.go", "package util\n", "says nothing"},
		"no doc.go":        {"pkg/x/x.go", "package x\n", "pkg/x: package without doc.go"},
		"long file":        {"pkg/record/r.go", "package record\n" + strings.Repeat("\n", maxLines), "split it"},
		"private path":     {"docs/a.md", "see /srv/checkout/notes", "docs/a.md:1: mentions /srv/checkout"},
		"home path":        {"docs/a.md", "\nsee `/home/" + "ann/x`", "docs/a.md:2: mentions /home" + "/ann"},
		"unfinished":       {"pkg/record/r.go", "package record // TO" + "DO\n", "finish it"},
		"dead link":        {"docs/a.md", "[a](b.md)", "dead link b.md"},
	} {
		t.Run(name, func(t *testing.T) {
			files := sound()
			files[c.file] = c.text
			broken := check(treeOf(files))
			if !slices.ContainsFunc(broken, func(b string) bool { return strings.Contains(b, c.want) }) {
				t.Fatalf("want %q, reported %q", c.want, broken)
			}
		})
	}
}

func TestContainsPathMatchesWholeNames(t *testing.T) {
	for line, want := range map[string]bool{
		"/srv/a": true, "x /srv/a/b": true, "(/srv/a)": true, "/srv/ab": false, "x/srv/a": false, "/srv/ab /srv/a\n": true, "${D}/srv/a": false,
	} {
		if got := containsPath([]byte(line), "/srv/a"); got != want {
			t.Errorf("containsPath(%q) = %v", line, got)
		}
	}
}

func TestPrivatePathsLeaveOutWhatEveryMachineHas(t *testing.T) {
	for root, want := range map[string][]string{
		"/srv/me/braid": {"/srv/me/braid", "/srv/me"},
		"/tmp/braid":    {"/tmp/braid"},
		"/srv/braid":    {"/srv/braid"},
		"/braid":        nil,
	} {
		if got := privatePaths(root, "/tmp/"); !slices.Equal(got, want) {
			t.Errorf("privatePaths(%q) = %q, want %q", root, got, want)
		}
	}
}

func TestFuzzTargets(t *testing.T) {
	files := maps.Clone(sound())
	if got := fuzzTargets(treeOf(files)); !slices.Equal(got, []string{"pkg/record FuzzRead"}) {
		t.Fatalf("got %q", got)
	}
}
