package main

import (
	"bytes"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

const (
	rootModule = "github.com/braidlog/braid/"
	generated  = "proto/gen/"
	maxLines   = 700 // of a hand-written production file; style asks for about 600
)

var (
	vagueNames = []string{"util", "utils", "common", "shared", "types", "constants", "helper", "helpers", "misc"}
	goLine     = regexp.MustCompile(`(?m)^go (\S+)`)
	useLine    = regexp.MustCompile(`(?m)^\s*(?:use )?\./(\S+)`)
	requireOur = regexp.MustCompile(`(?m)^\s*(?:require )?` + regexp.QuoteMeta(rootModule) + `(\S+) (v\S+)`)
	replaceAny = regexp.MustCompile(`(?m)^\s*(?:replace )?(\S+)(?: v\S+)? => (\S+)`)
	fuzzFunc   = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)
	packageOf  = regexp.MustCompile(`(?m)^package (\w+)`)
	homePath   = regexp.MustCompile(`(?:^|[^\w.])(/(?:home|Users|root|work|workspace)/\w+)`)
	unfinished = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)
	mdLink     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
)

// check returns one line per broken rule, sorted.
func check(t tree) []string {
	var broken []string
	report := func(file, format string, args ...any) {
		broken = append(broken, file+": "+fmt.Sprintf(format, args...))
	}
	checkModules(t, report)
	checkPackages(t, report)
	checkTexts(t, report)
	slices.Sort(broken)
	return broken
}

type reporter func(file, format string, args ...any)

// checkModules: one go line in the workspace, siblings required at v0.0.0 through a relative
// replace, and no service that requires another service.
func checkModules(t tree, report reporter) {
	want := first(goLine, t.files["go.work"])
	for _, use := range useLine.FindAllSubmatch(t.files["go.work"], -1) {
		module := string(use[1])
		file := module + "/go.mod"
		mod, ok := t.files[file]
		if !ok {
			report("go.work", "uses ./%s, which has no go.mod", module)
			continue
		}
		if got := first(goLine, mod); got != want {
			report(file, "go %s, but go.work says go %s", got, want)
		}
		replaced := map[string]string{}
		for _, m := range replaceAny.FindAllSubmatch(mod, -1) {
			from, to := string(m[1]), string(m[2])
			if strings.HasPrefix(to, "/") {
				report(file, "replaces %s by an absolute path", from)
			}
			replaced[from] = path.Join(module, to)
		}
		for _, m := range requireOur.FindAllSubmatch(mod, -1) {
			sibling, version := string(m[1]), string(m[2])
			if version != "v0.0.0" {
				report(file, "requires %s at %s, want v0.0.0", sibling, version)
			}
			if replaced[rootModule+sibling] != sibling {
				report(file, "requires %s without a relative replace to it", sibling)
			}
			if strings.HasPrefix(module, "services/") && strings.HasPrefix(sibling, "services/") {
				report(file, "a service requires another service: %s", sibling)
			}
		}
	}
}

// checkPackages: telling names, a doc.go in every library package, files of readable length.
func checkPackages(t tree, report reporter) {
	library := map[string]bool{} // directory → has doc.go
	for file, data := range t.files {
		if path.Ext(file) != ".go" || strings.HasPrefix(file, generated) {
			continue
		}
		dir := path.Dir(file)
		if slices.Contains(vagueNames, path.Base(dir)) {
			report(file, "package directory %q says nothing about its purpose", path.Base(dir))
		}
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		if first(packageOf, data) != "main" {
			library[dir] = library[dir] || path.Base(file) == "doc.go"
		}
		if n := bytes.Count(data, []byte("\n")); n > maxLines {
			report(file, "%d lines, split it (limit %d)", n, maxLines)
		}
	}
	for dir, documented := range library {
		if !documented {
			report(dir, "package without doc.go")
		}
	}
}

// checkTexts: no path of somebody's machine, nothing left unfinished, no dead relative link.
func checkTexts(t tree, report reporter) {
	dirs := map[string]bool{".": true}
	for file := range t.files {
		for d := path.Dir(file); d != "."; d = path.Dir(d) {
			dirs[d] = true
		}
	}
	for file, data := range t.files {
		if path.Base(file) == "go.sum" || path.Base(file) == "go.work.sum" || strings.HasPrefix(file, "testdata/") ||
			strings.Contains(file, "/testdata/") {
			continue
		}
		lineNumber := 0
		for line := range bytes.Lines(data) {
			lineNumber++
			at := fmt.Sprintf("%s:%d", file, lineNumber)
			for _, p := range t.private {
				if containsPath(line, p) {
					report(at, "mentions %s, a path outside the repository", p)
				}
			}
			if m := first(homePath, line); m != "" {
				report(at, "mentions %s, a path outside the repository", m)
			}
			if m := first(unfinished, line); m != "" && (path.Ext(file) == ".go" || path.Ext(file) == ".proto") {
				report(at, "%s: finish it or file an issue", m)
			}
			if path.Ext(file) != ".md" {
				continue
			}
			for _, m := range mdLink.FindAllSubmatch(line, -1) {
				target, _, _ := strings.Cut(string(m[1]), "#")
				if target == "" || strings.Contains(target, ":") {
					continue
				}
				p := path.Join(path.Dir(file), target)
				if _, ok := t.files[p]; !ok && !dirs[p] {
					report(at, "dead link %s", target)
				}
			}
		}
	}
}

// containsPath reports whether line holds the absolute path p as a whole path or as a
// directory prefix, so that /srv/a is found in /srv/a/b but not in /srv/ab or in x/srv/a.
func containsPath(line []byte, p string) bool {
	for i := 0; ; {
		j := bytes.Index(line[i:], []byte(p))
		if j < 0 {
			return false
		}
		start, end := i+j, i+j+len(p)
		if (start == 0 || !continues(line[start-1])) && (end == len(line) || !nameByte(line[end])) {
			return true
		}
		i = end
	}
}

// continues reports whether a slash after b is inside a longer path: x/srv, $(D)/srv, ${D}/srv.
func continues(b byte) bool {
	return nameByte(b) || b == '/' || b == '}' || b == ')'
}

func nameByte(b byte) bool {
	return b == '-' || b == '_' || b == '.' || '0' <= b && b <= '9' || 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z'
}

// fuzzTargets returns "directory name" of every fuzz function, sorted.
func fuzzTargets(t tree) []string {
	var found []string
	for _, file := range slices.Sorted(maps.Keys(t.files)) {
		if !strings.HasSuffix(file, "_test.go") || strings.HasPrefix(file, "tools/") {
			continue
		}
		for _, m := range fuzzFunc.FindAllSubmatch(t.files[file], -1) {
			found = append(found, path.Dir(file)+" "+string(m[1]))
		}
	}
	slices.Sort(found)
	return found
}

// first returns the first group of re's first match in data, or "".
func first(re *regexp.Regexp, data []byte) string {
	if m := re.FindSubmatch(data); m != nil {
		return string(m[1])
	}
	return ""
}
