// SPDX-License-Identifier: Apache-2.0

// Command testreport reads the output of go test -json and prints a summary:
// failures with their output and the seed of the random order, a line for each
// package, and each skipped test with its reason.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// event is a line of go test -json (go doc test2json).
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// reasons are the permitted prefixes of the reason of a skipped test. A test may be
// skipped only if the kernel does not support it.
var reasons = []string{"kernel: ", "not supported: "}

func main() { os.Exit(report(os.Stdin, os.Stdout)) }

type key struct{ pkg, test string }

// report prints the summary and returns the exit code: 1 if a test failed, or if no
// test passed.
func report(in io.Reader, out io.Writer) int {
	var (
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
		case e.Action == "fail":
			fmt.Fprintf(out, "--- FAIL: %s %s\n%s", e.Package, e.Test, text(output[k]))
			if !parents[k] {
				failed++
			}
		case e.Action == "skip" && e.Test != "":
			skipped = append(skipped, k)
		case e.Action == "pass" && !parents[k]:
			passed++
		}
	}
	if err := lines.Err(); err != nil {
		fmt.Fprintln(out, "testreport:", err)
		return 1
	}
	unexcused := 0
	for _, k := range skipped {
		reason := why(text(output[k]))
		fmt.Fprintf(out, "not run: %s %s: %s\n", k.pkg, k.test, reason)
		if !excused(reason) {
			fmt.Fprintln(out, "  not a permitted reason")
			unexcused++
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed+unexcused, len(skipped)-unexcused)
	if failed+unexcused+broken == 0 && passed > 0 {
		return 0
	}
	return 1
}

func text(b *strings.Builder) string {
	if b == nil {
		return ""
	}
	return b.String()
}

// why returns the reason from the output of a skipped test, which has the format
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
