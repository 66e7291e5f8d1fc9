// SPDX-License-Identifier: Apache-2.0

// Command security checks SECURITY.md against the code and writes the result as JSON.
//
//	go run ./tools/security [-table SECURITY.md] [-dist dist] -out FILE
//
// Every row of the table of attacks must name at least one test, and each named test must exist. The
// exposure score of the unit, as computed by systemd-analyze(1), must not exceed 3.0. The command does
// not run the tests; make test runs them.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sockeye/tools/security/exposure"
)

// mostExposure is the maximum exposure score of the unit. The scale is 0 to 10.
const mostExposure = 3.0

// finding is an attack and a test that performs it.
type finding struct {
	ID   string `json:"id"`
	Test string `json:"test"` // directory of the package, and name of the test
}

type result struct {
	Findings []finding `json:"findings"`
	Score    float64   `json:"systemd_score"`
}

func main() {
	table := flag.String("table", "SECURITY.md", "Markdown `file` with the table of attacks")
	dist := flag.String("dist", "dist", "`directory` with the systemd unit")
	out := flag.String("out", "", "`file` to which the result is written")
	flag.Parse()
	if *out == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(os.Stdout, *table, *dist, *out); err != nil {
		fmt.Fprintln(os.Stderr, "security:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, table, dist, out string) error {
	text, err := os.ReadFile(table)
	if err != nil {
		return err
	}
	findings, err := readTable(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", table, err)
	}
	var missing []error
	for _, f := range findings {
		if err := testExists(f.Test); err != nil {
			missing = append(missing, fmt.Errorf("%s: finding %s: %w", table, f.ID, err))
		}
	}
	if err := errors.Join(missing...); err != nil {
		return err
	}
	score, err := score(dist)
	if err != nil {
		return err
	}
	body, err := json.MarshalIndent(result{findings, score}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(out, append(body, '\n'), 0o644); err != nil {
		return err
	}
	if score > mostExposure {
		return fmt.Errorf("%s/sockeye.service: exposure %.1f, want at most %.1f", dist, score, mostExposure)
	}
	fmt.Fprintf(w, "security: %d tests of attacks exist; exposure of the unit: %.1f (at most %.1f)\n", len(findings), score, mostExposure)
	return nil
}

// testName matches a test in the table: `internal/agent TestName`, with subtests after a slash.
var testName = regexp.MustCompile("`([a-z0-9/]+) ((?:Test|Fuzz)[A-Za-z0-9_]+(?:/[^`]+)?)`")

// readTable parses the table with the header "id", "attacker", "attack", "defence", "test".
func readTable(text string) ([]finding, error) {
	var findings []finding
	inside := false
	for n, line := range strings.Split(text, "\n") {
		if !strings.HasPrefix(line, "|") {
			inside = false
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case slices.Equal(cells, []string{"id", "attacker", "attack", "defence", "test"}):
			inside = true
		case !inside || strings.Trim(cells[0], "-: ") == "":
		case len(cells) != 5:
			return nil, fmt.Errorf("line %d: %d columns, want 5", n+1, len(cells))
		case slices.Contains(cells, ""):
			return nil, fmt.Errorf("line %d: an empty column", n+1)
		default:
			tests := testName.FindAllStringSubmatch(cells[4], -1)
			if len(tests) == 0 {
				return nil, fmt.Errorf("line %d: finding %s names no test", n+1, cells[0])
			}
			for _, t := range tests {
				findings = append(findings, finding{cells[0], t[1] + " " + t[2]})
			}
		}
	}
	if len(findings) == 0 {
		return nil, errors.New("no table of attacks")
	}
	return findings, nil
}

func testExists(name string) error {
	dir, test, _ := strings.Cut(name, " ")
	test, _, _ = strings.Cut(test, "/")
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return err
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == test {
				return nil
			}
		}
	}
	return fmt.Errorf("%s has no test %s", dir, test)
}

// score installs the unit from the directory dist below a temporary root and returns its exposure score.
func score(dist string) (float64, error) {
	root, err := os.MkdirTemp("", "sockeye-unit-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(root)
	if _, err := exposure.Install(root, dist); err != nil {
		return 0, err
	}
	score, _, err := exposure.Analyze(root, "sockeye.service")
	return score, err
}
