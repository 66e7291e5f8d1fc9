// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"sockeye/internal/chart"
)

// Run describes the machine and the duration of a benchmark.
type Run struct {
	Kernel  string    `json:"kernel"` // release
	CPUs    int       `json:"cpus"`
	Started time.Time `json:"started"` // to the second
	Took    string    `json:"took"`    // to the second

	begun time.Time
}

// Begin returns a Run that starts now.
func Begin() Run {
	now := time.Now()
	return Run{Kernel: KernelRelease(), CPUs: runtime.NumCPU(), Started: now.UTC().Truncate(time.Second), begun: now}
}

// End sets Took.
func (r *Run) End() { r.Took = time.Since(r.begun).Round(time.Second).String() }

// Printf writes text. Consecutive lines with tabs are a table, whose cells the tabs separate.
type Printf func(format string, args ...any)

// Report is the result of a benchmark.
type Report interface {
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

// JSON returns the content of a report's JSON file.
func JSON(r Report) ([]byte, error) {
	b, err := json.MarshalIndent(r.Figures(), "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write figures: %w", err)
	}
	return append(b, '\n'), nil
}
