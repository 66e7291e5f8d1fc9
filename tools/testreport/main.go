// SPDX-License-Identifier: Apache-2.0

// Command testreport reads the output of go test -json and prints what a
// person wants to know of it: failures with their output, a line a package,
// and every test that was not run, with its reason. With a file as argument it
// writes there which tests failed, if they are so few that they may have had bad
// luck: a line a package, and its tests as a pattern for go test -run.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// event is a line of go test -json (go doc test2json).
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// reasons with which a skip may begin: only the kernel may keep a test from
// running.
var reasons = []string{"kernel: ", "not supported: "}

func main() {
	code, unlucky := report(os.Stdin, os.Stdout)
	if len(os.Args) > 1 {
		if err := os.WriteFile(os.Args[1], []byte(unlucky), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "testreport:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// mostUnlucky bounds the failed tests that bad luck may explain.
const mostUnlucky = 5

type key struct{ pkg, test string }

// report returns the exit code, and which tests to run again.
func report(in io.Reader, out io.Writer) (code int, unlucky string) {
	var (
		again   = make(map[string][]string) // by package
		others  bool                        // something failed that is no test
		output  = make(map[key]*strings.Builder)
		parents = make(map[key]bool)
		skipped []key
		passed  int
		failed  int
		broken  int
		lines   = bufio.NewScanner(in)
	)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Fprintln(out, lines.Text())
			continue
		}
		k := key{e.Package, e.Test}
		if i := strings.LastIndex(e.Test, "/"); i > 0 {
			parents[key{e.Package, e.Test[:i]}] = true
		}
		switch {
		case e.Action == "output" || e.Action == "build-output":
			if output[k] == nil {
				output[k] = new(strings.Builder)
			}
			output[k].WriteString(e.Output)
		case e.Test == "" && e.Action == "pass":
			fmt.Fprintf(out, "ok  \t%s\t%.3fs\n", e.Package, e.Elapsed)
		case e.Test == "" && (e.Action == "fail" || e.Action == "build-fail"):
			fmt.Fprintf(out, "FAIL\t%s\t%.3fs\n%s", e.Package, e.Elapsed, text(output[k]))
			broken++
			others = others || len(again[e.Package]) == 0
		case e.Action == "fail":
			fmt.Fprintf(out, "--- FAIL: %s %s\n%s", e.Package, e.Test, text(output[k]))
			if !parents[k] {
				failed++
			}
			if !strings.Contains(e.Test, "/") {
				again[e.Package] = append(again[e.Package], e.Test)
			}
			others = others || strings.Contains(text(output[k]), "panic: ")
		case e.Action == "skip" && e.Test != "":
			skipped = append(skipped, k)
		case e.Action == "pass" && !parents[k]:
			passed++
		}
	}
	if err := lines.Err(); err != nil {
		fmt.Fprintln(out, "testreport:", err)
		return 1, ""
	}
	unexcused := 0
	for _, k := range skipped {
		reason := why(text(output[k]))
		fmt.Fprintf(out, "not run: %s %s: %s\n", k.pkg, k.test, reason)
		if !excused(reason) {
			fmt.Fprintln(out, "  this is no reason of the kernel's")
			unexcused++
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed+unexcused, len(skipped)-unexcused)
	if failed+unexcused+broken == 0 && passed > 0 {
		return 0, ""
	}
	n := 0
	for _, pkg := range slices.Sorted(maps.Keys(again)) {
		n += len(again[pkg])
		unlucky += fmt.Sprintf("%s\t^(%s)$\n", pkg, strings.Join(again[pkg], "|"))
	}
	if others || unexcused > 0 || n > mostUnlucky {
		return 1, ""
	}
	return 1, unlucky
}

func text(b *strings.Builder) string {
	if b == nil {
		return ""
	}
	return b.String()
}

// why finds the reason in the output of a skipped test, which gives it as
// "    file_test.go:12: reason".
func why(output string) string {
	for line := range strings.Lines(output) {
		if _, reason, ok := strings.Cut(strings.TrimSpace(line), "_test.go:"); ok {
			if _, reason, ok := strings.Cut(reason, ": "); ok {
				return reason
			}
		}
	}
	return "no reason given"
}

func excused(reason string) bool {
	for _, r := range reasons {
		if strings.HasPrefix(reason, r) {
			return true
		}
	}
	return false
}
