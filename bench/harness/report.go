// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"sockeye/internal/chart"
	"sockeye/internal/linux"
)

// Run describes a run of a benchmark.
type Run struct {
	Commit   string            `json:"commit,omitzero"` // of the source; "+changes" follows that of a changed tree
	Kernel   string            `json:"kernel"`          // release
	CPUs     int               `json:"cpus"`
	Versions map[string]string `json:"versions,omitzero"` // of the compared programs, by name
	Started  time.Time         `json:"started"`           // to the second
	Took     string            `json:"took"`              // to the second

	begun time.Time
}

// Begin returns a Run that starts now.
func Begin() Run {
	now := time.Now()
	return Run{Commit: commit(), Kernel: linux.Release(), CPUs: runtime.NumCPU(), Started: now.UTC().Truncate(time.Second), begun: now}
}

// commit returns the commit of this program, or "" if it was not built in a clone.
func commit() (c string) {
	info, _ := debug.ReadBuildInfo()
	if info == nil {
		return ""
	}
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			c = s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			c += "+changes"
		}
	}
	return c
}

// End sets Took.
func (r *Run) End() { r.Took = time.Since(r.begun).Round(time.Second).String() }

// About returns the description of the run.
func (r Run) About() Run { return r }

// Target is a goal of a benchmark.
type Target struct {
	Claim    string `json:"claim"` // the figure, with its unit
	Goal     string `json:"goal"`
	Measured string `json:"measured"`
	Verdict  string `json:"verdict"` // see Distribution.Verdict
}

// Targets returns no goals, for benchmarks without any.
func (Run) Targets() []Target { return nil }

// versionNumber is the first number with a point in the output of a program; passt has dates.
var versionNumber = regexp.MustCompile(`[0-9]+\.[0-9][-.0-9A-Za-z_+~]*|20[0-9]{2}_[0-9]{2}_[0-9]{2}\.[0-9a-f]+`)

// Compare records the versions of programs, each of which prints its version with the given option. Programs that are not
// installed are left out.
func (r *Run) Compare(ctx context.Context, options map[string]string) {
	if r.Versions == nil {
		r.Versions = make(map[string]string)
	}
	for program, option := range options {
		out, err := exec.CommandContext(ctx, program, option).CombinedOutput()
		version := versionNumber.FindString(string(out))
		if err == nil && version != "" {
			r.Versions[program] = version
		}
	}
}

// AtLeast returns a target that a median shall reach. format is that of the figures, with the unit.
func AtLeast(claim, format string, goal float64, d Distribution) Target {
	return Target{claim, "at least " + fmt.Sprintf(format, goal), measured(format, d), d.Verdict(goal)}
}

// AtMost returns a target that a median shall not exceed.
func AtMost(claim, format string, goal float64, d Distribution) Target {
	less := Distribution{Median: -d.Median, Low: -d.High, High: -d.Low}
	return Target{claim, "at most " + fmt.Sprintf(format, goal), measured(format, d), less.Verdict(-goal)}
}

func measured(format string, d Distribution) string {
	if math.IsNaN(float64(d.Median)) {
		return "not measured"
	}
	return d.Format(format)
}

// Printf writes text. Consecutive lines with tabs are a table, whose cells the tabs separate.
type Printf func(format string, args ...any)

// Report is the result of a benchmark.
type Report interface {
	// About describes the run.
	About() Run
	// Targets returns the goals of the benchmark, met or missed.
	Targets() []Target
	// Print writes the report as text.
	Print(p Printf)
	// Figures returns the content of the JSON file.
	Figures() any
	// Charts returns the content of the SVG files, by the suffix that their names add to that of the JSON file.
	Charts() map[string]chart.Chart
}

// Publish prints the report of a benchmark, and writes the files bench-NAME.json and bench-NAMESUFFIX.svg into the
// directory $OUT, or into the current one.
func Publish(name string, r Report) error {
	if _, err := os.Stdout.WriteString(Text(r)); err != nil {
		return fmt.Errorf("print figures: %w", err)
	}
	figures, err := JSON(r)
	if err != nil {
		return err
	}
	files := map[string][]byte{".json": figures}
	for suffix, drawing := range r.Charts() {
		files[suffix+".svg"] = drawing.SVG()
	}
	if dir := os.Getenv("OUT"); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("write figures: %w", err)
		}
	}
	for suffix, content := range files {
		if err := os.WriteFile(filepath.Join(os.Getenv("OUT"), "bench-"+name+suffix), content, 0o644); err != nil {
			return fmt.Errorf("write figures: %w", err)
		}
	}
	return nil
}

// Common are the fields that the JSON files of all benchmarks have besides their own.
type Common struct {
	About   Run      `json:"about"`
	Targets []Target `json:"targets"`
	Text    string   `json:"text"` // the printed report
}

// JSON returns the content of a report's JSON file.
func JSON(r Report) ([]byte, error) {
	targets := r.Targets()
	if targets == nil {
		targets = []Target{}
	}
	var parts [2][]byte
	for i, part := range []any{r.Figures(), Common{r.About(), targets, Text(r)}} {
		b, err := json.MarshalIndent(part, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("write figures: %w", err)
		}
		parts[i] = b
	}
	// Both are objects, of which readers keep the last value of a key.
	var own, common map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal(parts[0], &own), json.Unmarshal(parts[1], &common)); err != nil {
		return nil, fmt.Errorf("write figures: %w", err)
	}
	for key := range common {
		if own[key] != nil {
			return nil, fmt.Errorf("write figures: the key %q is in the common part and in that of the benchmark", key)
		}
	}
	first := bytes.TrimRight(parts[0][:len(parts[0])-1], "\n ")
	return slices.Concat(first, []byte(","), parts[1][1:], []byte("\n")), nil
}

// Text returns a report as text. No line ends with a space.
func Text(r Report) string {
	var table, text strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	r.Print(func(format string, args ...any) { fmt.Fprintf(w, format, args...) })
	_ = w.Flush() // a strings.Builder returns no error
	for line := range strings.Lines(table.String()) {
		text.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return text.String()
}
