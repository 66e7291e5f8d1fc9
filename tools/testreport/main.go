// SPDX-License-Identifier: Apache-2.0

// Command testreport runs commands like go test -json, several at a time, separated by
// "--", and prints a summary: failures with their output and the seed of the random
// order, a line for each package, and each skipped test with its reason. With TEST_EVENTS,
// the lines of go test -json, which have the time of each test, go to this file as well.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
)

// event is a line of go test -json (go doc test2json).
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// reasons are the permitted prefixes of the reason of a skipped test: the kernel or the CPU does not support what the test
// needs, or the clone has no history with the version to upgrade from.
var reasons = []string{"kernel: ", "CPU: ", "clone: "}

func main() { os.Exit(run(os.Args[1:], os.Stdout)) }

// run runs the commands and returns the exit code: that of report, or 1 if a command failed. A command that fails before
// its first test prints no event.
func run(args []string, out io.Writer) int {
	// On Ctrl-C, the terminal interrupts the tests too, and report prints what they have done.
	signal.Notify(make(chan os.Signal, 1), os.Interrupt)
	events := io.Discard
	if name := os.Getenv("TEST_EVENTS"); name != "" {
		file, err := os.Create(name)
		if err != nil {
			fmt.Fprintln(out, "testreport:", err)
			return 1
		}
		defer file.Close()
		events = file
	}
	var commands []*exec.Cmd
	var inputs []io.Reader
	for command := range strings.SplitSeq(strings.Join(args, "\x00"), "\x00--\x00") {
		args := strings.Split(command, "\x00")
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			fmt.Fprintln(out, "testreport:", err)
			for _, started := range commands {
				_ = started.Process.Kill()
				_ = started.Wait()
			}
			return 1
		}
		commands, inputs = append(commands, cmd), append(inputs, in)
	}
	code := report(inputs, out, events)
	for _, cmd := range commands {
		if err := cmd.Wait(); err != nil && code == 0 {
			fmt.Fprintf(out, "FAIL\t%s: %v\n", strings.Join(cmd.Args, " "), err)
			code = 1
		}
	}
	return code
}

// key is a test, or a package if test is "". The tests of a package may be shared by several inputs.
type key struct {
	input     int
	pkg, test string
}

// report prints the summary and returns the exit code: 1 if a test failed, if a package
// did not end, or if no test passed. It copies all lines to events.
func report(inputs []io.Reader, out, events io.Writer) int {
	var (
		output  = make(map[key]*strings.Builder)
		parents = make(map[key]bool)
		skipped []key
		passed  int
		failed  int
		broken  int
		running = make(map[key]bool)
	)
	for l := range readLines(inputs) {
		fmt.Fprintf(events, "%s\n", l.text)
		var e event
		if json.Unmarshal(l.text, &e) != nil {
			fmt.Fprintf(out, "%s\n", l.text)
			continue
		}
		k := key{l.input, e.Package, e.Test}
		switch e.Action {
		case "start", "run":
			running[k] = true
		case "pass", "fail", "skip":
			delete(running, k)
		}
		if i := strings.LastIndex(e.Test, "/"); i > 0 {
			parents[key{l.input, e.Package, e.Test[:i]}] = true
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
	for _, k := range slices.SortedFunc(maps.Keys(running), func(a, b key) int {
		return cmp.Or(strings.Compare(a.pkg, b.pkg), cmp.Compare(a.input, b.input), strings.Compare(a.test, b.test))
	}) {
		fmt.Fprintf(out, "FAIL\t%s %s did not end\n%s", k.pkg, k.test, text(output[k]))
		broken++
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

// line is a line of the output of a command.
type line struct {
	input int
	text  []byte
}

// readLines sends the lines of all inputs, and then closes the channel. Errors are sent as lines, which are not events.
func readLines(inputs []io.Reader) <-chan line {
	lines := make(chan line)
	var readers sync.WaitGroup
	for i, in := range inputs {
		readers.Go(func() {
			scanner := bufio.NewScanner(in)
			scanner.Buffer(nil, 16<<20)
			for scanner.Scan() {
				lines <- line{i, bytes.Clone(scanner.Bytes())}
			}
			if err := scanner.Err(); err != nil {
				lines <- line{i, fmt.Appendf(nil, "testreport: %v", err)}
			}
		})
	}
	go func() {
		readers.Wait()
		close(lines)
	}()
	return lines
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
