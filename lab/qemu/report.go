// SPDX-License-Identifier: Apache-2.0

package qemu

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Report has the results of the tests in one machine.
type Report struct {
	// Brief prints a line for each completed test, and only the output of failed
	// tests.
	Brief bool
	// Journal receives the journal of the machine, if the guest sends it.
	Journal io.Writer

	machine       string
	booted, total time.Duration
	tests         map[string]*result // by package and test
	problems      []string           // failures outside of tests
	out           io.Writer
	line          string // without its end, which has not arrived yet
}

type result struct {
	action string // pass, fail or skip; "" while the test runs
	output []string
	parent bool // has subtests
}

// NewReport returns a report for the machine with a name. The report prints to
// standard output.
func NewReport(machine string) *Report {
	return &Report{machine: machine, tests: map[string]*result{}, out: os.Stdout}
}

// Problem adds a failure outside of a test.
func (r *Report) Problem(format string, args ...any) {
	r.problems = append(r.problems, fmt.Sprintf(format, args...))
}

// read reads the events of test2json.
func (r *Report) read(pkg string, events io.Reader) error {
	dec := json.NewDecoder(events)
	for {
		var e struct {
			Action, Test, Output string
			Elapsed              float64
		}
		if err := dec.Decode(&e); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if e.Action == "output" && !r.Brief {
			r.echo(e.Output)
		}
		if e.Test == "" {
			continue
		}
		name := pkg + "." + e.Test
		t := r.tests[name]
		if t == nil {
			t = &result{}
			r.tests[name] = t
			if parent := r.tests[name[:max(0, strings.LastIndexByte(name, '/'))]]; parent != nil && strings.Contains(e.Test, "/") {
				parent.parent = true
			}
		}
		switch e.Action {
		case "pass", "fail", "skip":
			t.action = e.Action
			if r.Brief {
				r.brief(e.Test, t, e.Elapsed)
			}
		case "output":
			t.output = append(t.output, e.Output)
			if strings.HasPrefix(e.Test, "Benchmark") && strings.Contains(e.Output, " ns/op") {
				t.action = "pass" // a benchmark has no such event, only its figures
			}
		}
	}
}

// brief prints the result of a test.
func (r *Report) brief(name string, t *result, seconds float64) {
	r.echo(fmt.Sprintf("%s %s (%.1f s)\n", t.action, name, seconds))
	if t.action == "pass" {
		return
	}
	for _, text := range t.lines() {
		r.echo(text + "\n")
	}
}

// close is called after a suite's last event.
func (r *Report) close(pkg, how string) {
	if r.line != "" {
		r.echo("\n")
	}
	failed := false
	for _, name := range slices.Sorted(maps.Keys(r.tests)) {
		if !strings.HasPrefix(name, pkg+".") {
			continue
		}
		t := r.tests[name]
		if t.action == "" {
			t.action = "fail"
		}
		failed = failed || t.action == "fail"
	}
	if how != "" && !failed {
		r.Problem("%s: %s", pkg, how)
	}
}

// echo prints output with the machine's name before each line. It prints whole lines: several machines run at the same time.
func (r *Report) echo(text string) {
	r.line += text
	for {
		line, rest, whole := strings.Cut(r.line, "\n")
		if !whole {
			return
		}
		fmt.Fprintln(r.out, r.machine+" | "+line)
		r.line = rest
	}
}

// Broken reports whether a failure occurred outside of tests: of the machine, or of a
// suite as a whole.
func (r *Report) Broken() bool { return len(r.problems) > 0 }

// Failed reports whether a test failed, or no test ran.
func (r *Report) Failed() bool {
	_, _, failed, _ := r.count()
	return failed > 0
}

// Print prints a summary.
func (r *Report) Print(w io.Writer) {
	passed, skipped, failed, lines := r.count()
	fmt.Fprintf(w, "%s: %d passed, %d skipped, %d failed (boot %.1f s, total %.1f s)\n",
		r.machine, passed, skipped, failed, r.booted.Seconds(), r.total.Seconds())
	for _, line := range lines {
		fmt.Fprintf(w, "  %s\n", line)
	}
}

var (
	position     = regexp.MustCompile(`^\s*[^\s:]+\.go:\d+: `)
	kernelReason = regexp.MustCompile(`^(kernel: .|CPU: .|clone: .|not supported \(requires >= v?\d)`)
)

// count counts the tests without subtests, the failed tests whose subtests did not
// fail, and the problems. A skip is a failure unless its reason is a missing feature
// of the kernel.
func (r *Report) count() (passed, skipped, failed int, lines []string) {
	for _, name := range slices.Sorted(maps.Keys(r.tests)) {
		t := r.tests[name]
		switch {
		case t.action == "skip" && !kernelReason.MatchString(t.reason()):
			failed++
			lines = append(lines, fmt.Sprintf("failed  %s: skipped without a permitted reason: %q", name, t.reason()))
		case t.action == "skip":
			skipped++
			lines = append(lines, fmt.Sprintf("skipped %s: %s", name, t.reason()))
		case t.action == "fail" && (!t.parent || !r.childFailed(name)):
			failed++
			lines = append(lines, "failed  "+name)
			for _, text := range t.lines() {
				lines = append(lines, "        "+text)
			}
		case t.action == "pass" && !t.parent:
			passed++
		}
	}
	problems := r.problems
	if passed+failed == 0 {
		problems = append(slices.Clone(problems), "no test ran")
	}
	for _, p := range problems {
		failed++
		lines = append(lines, "failed  "+p)
	}
	return passed, skipped, failed, lines
}

// mostLines is the largest number of lines of a failed test in the summary.
const mostLines = 40

// lines returns the end of the test's own output.
func (t *result) lines() (lines []string) {
	for text := range strings.Lines(strings.Join(t.output, "")) {
		if trimmed := strings.TrimSpace(text); trimmed != "" && !strings.HasPrefix(trimmed, "=== ") && !strings.HasPrefix(trimmed, "--- ") {
			lines = append(lines, strings.TrimRight(text, "\n"))
		}
	}
	return lines[max(0, len(lines)-mostLines):]
}

// reason returns the last output of the test as one line.
func (t *result) reason() string {
	var words []string
	for _, line := range t.output {
		switch s := strings.TrimSpace(line); {
		case strings.HasPrefix(s, "=== "), strings.HasPrefix(s, "--- "), s == "":
		case position.MatchString(line):
			words = []string{strings.TrimSpace(position.ReplaceAllString(line, ""))}
		default:
			words = append(words, s)
		}
	}
	return strings.Join(words, " ")
}

func (r *Report) childFailed(parent string) bool {
	for name, t := range r.tests {
		if t.action == "fail" && strings.HasPrefix(name, parent+"/") {
			return true
		}
	}
	return false
}
