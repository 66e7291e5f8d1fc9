// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	domainMethod   = regexp.MustCompile("(?m)^\\| `([A-Z]\\w*\\([^)]*\\))` \\|")
	optionalDomain = regexp.MustCompile("(?m)^\\| `domain\\.(\\w+)` \\|([^|]*)\\|")
	method         = regexp.MustCompile(`(\w+)\(([^)]*)\)`)
)

// interfaces returns the methods of the interfaces of a package with the number of their parameters, as in "Applied 3".
func interfaces(t *testing.T, dir string) map[string][]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string][]string)
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if i, ok := spec.Type.(*ast.InterfaceType); ok {
				for _, m := range i.Methods.List {
					for _, name := range m.Names {
						found[spec.Name.Name] = append(found[spec.Name.Name], fmt.Sprint(name.Name, " ", m.Type.(*ast.FuncType).Params.NumFields()))
					}
				}
			}
			return false
		})
	}
	return found
}

// documented returns the methods that a text names, in the form of interfaces.
func documented(text string) []string {
	var found []string
	for _, m := range method.FindAllStringSubmatch(text, -1) {
		found = append(found, fmt.Sprint(m[1], " ", len(strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' }))))
	}
	return found
}

// TestDomainInterfaces compares the tables of "Add a domain" with the interfaces of package domain.
func TestDomainInterfaces(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "CONTRIBUTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Add a domain\n")
	section, _, _ = strings.Cut(section, "\n## ")
	want := interfaces(t, filepath.Join(root, "internal/domain"))
	got := map[string][]string{"Domain": nil}
	for _, m := range domainMethod.FindAllStringSubmatch(section, -1) {
		got["Domain"] = append(got["Domain"], documented(m[1])...)
	}
	for _, m := range optionalDomain.FindAllStringSubmatch(section, -1) {
		got[m[1]] = documented(m[2])
	}
	for name, methods := range want {
		if !slices.Equal(got[name], methods) {
			t.Errorf("CONTRIBUTING.md has for domain.%s %q, the code %q", name, got[name], methods)
		}
	}
	for name := range got {
		if want[name] == nil {
			t.Errorf("CONTRIBUTING.md has domain.%s, which does not exist", name)
		}
	}
	if len(want["Domain"]) < 5 {
		t.Errorf("methods of domain.Domain: %q", want["Domain"])
	}
}
