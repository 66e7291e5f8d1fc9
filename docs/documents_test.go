// SPDX-License-Identifier: Apache-2.0

// Package docs_test compares the documents with the code.
package docs_test

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
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

// opens finds code that opens descriptors or starts goroutines.
var opens = regexp.MustCompile(`(?m)\bos\.(?:Open|Create|Pipe)\w*\(|\bnet\.(?:Listen|Dial)\w*\(|\.DialContext\(|\bunix\.(?:Socket|Open|Pipe2?|Epoll|Eventfd|Dup|PidfdOpen)\w*\(|` +
	`\b(?:sockdiag|netns)\.Open\(|\bebpf\.New\w*\(|\blink\.Attach\w*\(|` +
	`\bexec\.Command|\bhttptest\.New|^\s*go (?:func|\w+[.(])|\.Go\(func`)

// checksLeaks finds a TestMain that looks for leaks.
var checksLeaks = regexp.MustCompile(`(?ms)^func TestMain\(.*\btestenv\.(?:Run\(m\)|Main)`)

// TestLeakChecks checks that the tests of a package that opens descriptors or starts goroutines fail if some are left.
func TestLeakChecks(t *testing.T) {
	type contents struct{ opens, tests, checks bool }
	packages := make(map[string]*contents)
	walk(t, func(path string, text []byte) {
		if filepath.Ext(path) != ".go" {
			return
		}
		p := packages[filepath.Dir(path)]
		if p == nil {
			p = new(contents)
			packages[filepath.Dir(path)] = p
		}
		p.opens = p.opens || opens.Match(text)
		if strings.HasSuffix(path, "_test.go") {
			p.tests = true
			p.checks = p.checks || checksLeaks.Match(text)
		}
	})
	checked := 0
	for dir, p := range packages {
		switch {
		case dir == "internal/testenv": // has the check
		case dir == "lab/debian/guest": // runs in a virtual machine that ends with it
		case strings.HasPrefix(dir, "tools/helm"), strings.HasPrefix(dir, "tools/package"): // modules of their own
		case p.checks:
			checked++
		case p.opens && p.tests:
			t.Errorf("%s: no TestMain calls testenv.Run or testenv.Main", dir)
		}
	}
	if checked < 60 {
		t.Errorf("%d packages with a check", checked)
	}
}

// TestOrderOfFunctions checks that a file can be read from top to bottom: a function stands above those that it calls. Functions of up to
// three lines may stand anywhere, for example below their type, and functions that call each other in a cycle are in any order.
func TestOrderOfFunctions(t *testing.T) {
	files := 0
	walk(t, func(path string, text []byte) {
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "_bpfel.go") {
			return
		}
		positions := token.NewFileSet()
		file, err := parser.ParseFile(positions, path, text, 0)
		if err != nil {
			t.Error(err)
			return
		}
		files++
		calls := callsWithin(file)
		line := func(f *ast.FuncDecl) int { return positions.Position(f.Pos()).Line }
		for caller, callees := range calls {
			for callee := range callees {
				long := positions.Position(callee.End()).Line-line(callee) > 2
				if long && line(callee) < line(caller) && !reaches(calls, callee, caller, make(map[*ast.FuncDecl]bool)) {
					t.Errorf("%s:%d: %s calls %s, which stands above it, in line %d", path, line(caller), caller.Name.Name, callee.Name.Name, line(callee))
				}
			}
		}
	})
	if files < 300 {
		t.Errorf("%d files", files)
	}
}

// callsWithin returns the functions of a file with the functions of the file that they call, or pass on: functions by their name, and
// methods of the type of the calling method by its receiver.
func callsWithin(file *ast.File) map[*ast.FuncDecl]map[*ast.FuncDecl]bool {
	functions := make(map[string]*ast.FuncDecl) // by TYPE.NAME, or .NAME
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			functions[receiver(f)+"."+f.Name.Name] = f
		}
	}
	calls := make(map[*ast.FuncDecl]map[*ast.FuncDecl]bool)
	for _, f := range functions {
		if f.Body == nil {
			continue
		}
		callees := make(map[*ast.FuncDecl]bool)
		keys := make(map[*ast.Ident]bool) // of composite literals: names of fields
		add := func(name string) {
			if callee := functions[name]; callee != nil && callee != f {
				callees[callee] = true
			}
		}
		ast.Inspect(f.Body, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.KeyValueExpr:
				if key, ok := n.Key.(*ast.Ident); ok {
					keys[key] = true
				}
			case *ast.Ident:
				if !keys[n] && n.Obj != nil && n.Obj.Kind == ast.Fun {
					add("." + n.Name)
				}
			case *ast.SelectorExpr:
				x, ok := n.X.(*ast.Ident)
				if ok && f.Recv != nil && len(f.Recv.List[0].Names) == 1 && x.Obj != nil && x.Obj == f.Recv.List[0].Names[0].Obj {
					add(receiver(f) + "." + n.Sel.Name)
				}
			}
			return true
		})
		calls[f] = callees
	}
	return calls
}

// receiver returns the name of the type of a method, and "" for a function.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	name := ""
	ast.Inspect(f.Recv.List[0].Type, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && name == "" {
			name = id.Name
		}
		return name == ""
	})
	return name
}

func reaches(calls map[*ast.FuncDecl]map[*ast.FuncDecl]bool, from, to *ast.FuncDecl, seen map[*ast.FuncDecl]bool) bool {
	if from == to {
		return true
	}
	if seen[from] {
		return false
	}
	seen[from] = true
	for next := range calls[from] {
		if reaches(calls, next, to, seen) {
			return true
		}
	}
	return false
}
