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

// A Report is what came of the tests in one machine.
type Report struct {
	// Brief prints a line for each test that has ended, and the output of those
	// that failed, instead of all output.
	Brief bool
	// Journal gets the machine's journal, if the guest sends one.
	Journal io.Writer

	machine       string
	booted, total time.Duration
	tests         map[string]*result // by package and test
	problems      []string           // failures that no test has reported
	out           io.Writer
	lineStart     bool
}

type result struct {
	action string // pass, fail, skip; or "" while it runs
	output []string
	parent bool // has subtests
}

// NewReport returns the report of a machine of that name, which prints to the
// standard output.
func NewReport(machine string) *Report {
	return &Report{machine: machine, tests: map[string]*result{}, out: os.Stdout, lineStart: true}
}

// Problem adds a failure that no test has reported.
func (r *Report) Problem(format string, args ...any) {
	r.problems = append(r.problems, fmt.Sprintf(format, args...))
}

// read takes test2json's events.
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
		}
	}
}

// brief prints what came of a test.
func (r *Report) brief(name string, t *result, seconds float64) {
	r.echo(fmt.Sprintf("%s %s (%.1f s)\n", t.action, name, seconds))
	if t.action == "pass" {
		return
	}
	for _, text := range t.output {
		if !strings.HasPrefix(strings.TrimSpace(text), "=== ") && !strings.HasPrefix(strings.TrimSpace(text), "--- ") {
			r.echo(text)
		}
	}
}

// echo prints output with the machine's name before each line.
func (r *Report) echo(text string) {
	for line := range strings.SplitAfterSeq(text, "\n") {
		if line == "" {
			continue
		}
		prefix := ""
		if r.lineStart {
			prefix = r.machine + " | "
		}
		fmt.Fprint(r.out, prefix+line)
		r.lineStart = strings.HasSuffix(line, "\n")
	}
}

// close is called after a suite's last event.
func (r *Report) close(pkg, how string) {
	if !r.lineStart {
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

var (
	position     = regexp.MustCompile(`^\s*[^\s:]+\.go:\d+: `)
	kernelReason = regexp.MustCompile(`^(kernel: .|not supported: .|not supported \(requires >= v?\d)`)
)

// reason is what the test has said last, in one line.
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

// count counts the tests that have no subtests, failed ones whose subtests did
// not fail, and problems. A skip for a reason that is not the kernel's is a failure.
func (r *Report) count() (passed, skipped, failed int, lines []string) {
	for _, name := range slices.Sorted(maps.Keys(r.tests)) {
		t := r.tests[name]
		switch {
		case t.action == "skip" && !kernelReason.MatchString(t.reason()):
			failed++
			lines = append(lines, fmt.Sprintf("failed  %s: skipped for no reason of the kernel's: %q", name, t.reason()))
		case t.action == "skip":
			skipped++
			lines = append(lines, fmt.Sprintf("skipped %s: %s", name, t.reason()))
		case t.action == "fail" && (!t.parent || !r.childFailed(name)):
			failed++
			lines = append(lines, "failed  "+name)
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

func (r *Report) childFailed(parent string) bool {
	for name, t := range r.tests {
		if t.action == "fail" && strings.HasPrefix(name, parent+"/") {
			return true
		}
	}
	return false
}

// Broken says whether something failed that is no test: the machine, or a suite
// that did not end well.
func (r *Report) Broken() bool { return len(r.problems) > 0 }

// Failed says whether a test failed, or none ran.
func (r *Report) Failed() bool {
	_, _, failed, _ := r.count()
	return failed > 0
}

// Print prints a summary.
func (r *Report) Print(w io.Writer) {
	passed, skipped, failed, lines := r.count()
	fmt.Fprintf(w, "%s: %d passed, %d skipped, %d failed (booted in %.1f s, %.1f s in all)\n",
		r.machine, passed, skipped, failed, r.booted.Seconds(), r.total.Seconds())
	for _, line := range lines {
		fmt.Fprintf(w, "  %s\n", line)
	}
}
