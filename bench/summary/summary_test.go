// SPDX-License-Identifier: Apache-2.0

package summary

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

type example struct {
	harness.Run
	Rate   int            `json:"rate"`
	Detail map[string]int `json:"detail"`
}

func (example) Print(p harness.Printf) { p("\narm\trate\nnative\t1\n") }

func (e example) Figures() any { return e }

func (example) Charts() map[string]chart.Chart { return nil }

func (example) Targets() []harness.Target {
	return []harness.Target{{Claim: "rate", Goal: "at least 1", Measured: "1", Verdict: "met"}}
}

// TestSummary publishes a report, and checks what the pages have of it.
func TestSummary(t *testing.T) {
	out, docs := t.TempDir(), t.TempDir()
	t.Setenv("OUT", out)
	if err := run([]string{"-docs", docs}); err == nil || !strings.Contains(err.Error(), "make bench-all") {
		t.Errorf("without figures: %v", err)
	}
	r := example{Detail: map[string]int{"rounds": 3, "series": 600}, Run: harness.Run{Commit: "0123456789ab", Kernel: "6.18", CPUs: 2, Versions: map[string]string{"pasta": "1.0", "haproxy": "2.6"},
		Started: time.Date(2026, 11, 27, 10, 30, 0, 0, time.UTC), Took: "1m0s"}}
	if err := harness.Publish("example", r); err != nil {
		t.Fatal(err)
	}
	const before = "# Page\n\n<!-- bench example -->\n```\nold\n```\n\n```\nkept\n```\n\n<!-- bench other -->\n\n```\nkept\n```\n"
	path := filepath.Join(docs, "bench-example.md")
	if err := os.WriteFile(path, []byte(before), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{"-docs", docs}); err != nil {
		t.Fatal(err)
	}
	const text = "arm     rate\nnative  1\n"
	got, err := os.ReadFile(path)
	if want := strings.Replace(before, "old\n", text, 1); err != nil || string(got) != want {
		t.Errorf("the page has %q, want %q; %v", got, want, err)
	}
	got, err = os.ReadFile(filepath.Join(docs, page))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| [example](#example) | rate | at least 1 | 1 | met |\n",
		"| [example](#example) | 2026-11-27 10:30 | 1m0s | 0123456789ab | 6.18 | 2 | haproxy 2.6, pasta 1.0 |\n",
		"## example\n\n```\n" + text + "```\n",
	} {
		if !strings.Contains(string(got), want) {
			t.Errorf("the summary lacks %q:\n%s", want, got)
		}
	}
	// The fields of the benchmark are published, too, without the samples by second.
	if got, err := os.ReadFile(filepath.Join(docs, "benchmarks", "bench-example.json")); err != nil || !strings.Contains(string(got), `"rate"`) ||
		!strings.Contains(string(got), `"rounds"`) || strings.Contains(string(got), `"series"`) {
		t.Errorf("published: %v\n%s", err, got)
	}
	// A later run of another benchmark leaves these figures.
	if err := os.Remove(filepath.Join(out, "bench-example.json")); err != nil {
		t.Fatal(err)
	}
	if err := harness.Publish("other", r); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{"-docs", docs}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		filepath.Join(docs, page): "| [example](#example) | rate | at least 1 | 1 | met |\n| [other](#other) | rate | at least 1 | 1 | met |\n",
		path:                      "<!-- bench other -->\n\n```\n" + text + "```\n",
	} {
		if got, err := os.ReadFile(path); err != nil || !strings.Contains(string(got), want) {
			t.Errorf("%s lacks %q: %v\n%s", path, want, err, got)
		}
	}
	// A file of an earlier version has no text.
	if err := os.WriteFile(filepath.Join(out, "bench-old.json"), []byte(`{"rate":1}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{"-docs", docs}); err == nil || !strings.Contains(err.Error(), "bench-old.json") {
		t.Errorf("with a file of an earlier version: %v", err)
	}
}
