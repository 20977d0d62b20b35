// Command house checks the rules of this repository that no ordinary linter knows.
//
//	house check   prints one line per broken rule and exits 1 when there is any
//	house fuzz    prints "directory name" of every fuzz target
//
// It looks at the files that git tracks or would track, below the current directory.
package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "house:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, check or fuzz, got %q", args)
	}
	tree, err := load()
	if err != nil {
		return err
	}
	switch args[0] {
	case "check":
		broken := check(tree)
		for _, b := range broken {
			fmt.Println(b)
		}
		if len(broken) > 0 {
			return fmt.Errorf("%d rules broken", len(broken))
		}
		return nil
	case "fuzz":
		for _, f := range fuzzTargets(tree) {
			fmt.Println(f)
		}
		return nil
	default:
		return fmt.Errorf("unknown command %q, want check or fuzz", args[0])
	}
}

// tree is what the checks look at: file contents by slash-separated path, and the absolute
// paths that must not appear in any of them.
type tree struct {
	files   map[string][]byte
	private []string
}

// load reads the working tree. A file that git knows but that is gone from disk is left out.
func load() (tree, error) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return tree{}, fmt.Errorf("list files with git: %w", err)
	}
	t := tree{files: map[string][]byte{}}
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		info, err := os.Lstat(name)
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return tree{}, err
		}
		if bytes.IndexByte(data[:min(len(data), 8000)], 0) < 0 { // text
			t.files[filepath.ToSlash(name)] = data
		}
	}
	root, err := os.Getwd()
	if err != nil {
		return tree{}, err
	}
	t.private = privatePaths(root, os.TempDir())
	return t, nil
}

// privatePaths returns the directories that belong to one person's machine: the checkout and
// the directory that holds it. A directory right below / or the one for temporary files is a
// place that many machines have and that texts may name.
func privatePaths(root, temp string) []string {
	var paths []string
	for _, p := range []string{root, filepath.Dir(root)} {
		if strings.Count(p, string(filepath.Separator)) > 1 && p != filepath.Clean(temp) {
			paths = append(paths, p)
		}
	}
	return paths
}
