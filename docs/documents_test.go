// SPDX-License-Identifier: Apache-2.0

// Package docs_test compares the documents with the code.
package docs_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = ".."

var (
	code       = regexp.MustCompile("`[^`]+`")
	word       = regexp.MustCompile(`[A-Za-z_][A-Za-z0-9_]*`)
	identifier = regexp.MustCompile(`[a-z][A-Z]`)                              // of Go, as in openSlot
	qualified  = regexp.MustCompile(`\b([a-z][a-z0-9]*)\.([A-Z][A-Za-z0-9]*)`) // of a package, as in fault.Join
	declared   = regexp.MustCompile(`(?m)^(?:func (?:\([^)]*\) )?|type |var |const |\t)([A-Z][A-Za-z0-9]*)\b`)
	path       = regexp.MustCompile(`^(?:internal|bpf|bench|lab|tools|dist|room|cmd)/[A-Za-z0-9_./-]*$`)
	fenced     = regexp.MustCompile("(?s)```.*?```")
	link       = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
)

// external has words of code that are not Go identifiers of this repository.
var external = map[string]bool{
	"DefaultTimeoutStopSec": true, // systemd
	"TimeoutStopSec":        true,
	"ExecStartPost":         true,
	"NetworkManager":        true,
	"uXXXX":                 true, // of JSON
}

// documents returns the texts of all Markdown files by their path below the root.
func documents(t *testing.T) map[string]string {
	t.Helper()
	texts := make(map[string]string)
	walk(t, func(path string, text []byte) {
		if strings.HasSuffix(path, ".md") {
			texts[path] = string(text)
		}
	})
	return texts
}

func walk(t *testing.T, visit func(path string, text []byte)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "out" || d.Name() == "bin"):
			return filepath.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		text, err := os.ReadFile(path)
		if err == nil {
			visit(strings.TrimPrefix(path, root+"/"), text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestIdentifiers finds identifiers and files of the code that the documents name and that do not exist.
func TestIdentifiers(t *testing.T) {
	known := make(map[string]bool)
	inPackage := make(map[string]map[string]bool) // declarations, by the name of the directory
	walk(t, func(path string, text []byte) {
		if filepath.Ext(path) == ".go" && !strings.HasSuffix(path, "_test.go") {
			name := filepath.Base(filepath.Dir(path))
			if inPackage[name] == nil {
				inPackage[name] = make(map[string]bool)
			}
			for _, d := range declared.FindAllSubmatch(text, -1) {
				inPackage[name][string(d[1])] = true
			}
		}
		switch ext := filepath.Ext(path); {
		case ext == ".go", ext == ".c", ext == ".h", ext == ".service", filepath.Base(path) == "Makefile", strings.HasPrefix(path, "deploy/"):
			for _, w := range word.FindAll(text, -1) {
				known[string(w)] = true
			}
		}
	})
	for name, text := range documents(t) {
		if name == "CHANGELOG.md" || strings.HasPrefix(name, "docs/bench") {
			continue // of earlier versions, and of the programs compared
		}
		for _, quoted := range code.FindAllString(text, -1) {
			quoted = strings.Trim(quoted, "`")
			if path.MatchString(quoted) {
				if _, err := os.Stat(filepath.Join(root, quoted)); errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: there is no %s", name, quoted)
				}
				continue
			}
			for _, w := range word.FindAllString(quoted, -1) {
				if identifier.MatchString(w) && !known[w] && !external[w] {
					t.Errorf("%s: there is no %s, in `%s`", name, w, quoted)
				}
			}
			for _, q := range qualified.FindAllStringSubmatch(quoted, -1) {
				if words := inPackage[q[1]]; words != nil && !words[q[2]] {
					t.Errorf("%s: package %s has no %s, in `%s`", name, q[1], q[2], quoted)
				}
			}
		}
	}
}

// TestLinks finds links between documents whose file does not exist.
func TestLinks(t *testing.T) {
	links := 0
	for name, text := range documents(t) {
		for _, match := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			links++
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(name), match[1])); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if links < 100 {
		t.Errorf("%d links", links)
	}
}

// TestPackageSizes checks that a package can be read in a day: the agent knows the domains by their interface, and what a domain
// consists of is in packages below it.
func TestPackageSizes(t *testing.T) {
	lines := make(map[string]int)
	walk(t, func(path string, text []byte) {
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, "_bpfel.go") {
			lines[filepath.Dir(path)] += strings.Count(string(text), "\n")
		}
	})
	if lines["internal/agent"] == 0 {
		t.Fatalf("no lines of internal/agent: %v", lines)
	}
	for dir, n := range lines {
		limit := 5000
		if dir == "internal/agent" {
			limit = 2500
		}
		if n > limit {
			t.Errorf("%s has %d lines without tests and generated code, at most %d are allowed", dir, n, limit)
		}
	}
}
