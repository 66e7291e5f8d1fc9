// SPDX-License-Identifier: Apache-2.0

// Package summary publishes what the benchmarks measured: it keeps the common part of their JSON files beside the page of all
// benchmarks, and writes that page, and the figures in the pages of the single benchmarks, from these files. So a run of one
// benchmark replaces its own figures, and leaves those of the others.
package summary

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sockeye/bench/harness"
)

const (
	page = "benchmarks.md"
	kept = "benchmarks" // directory of the published results
)

// Benchmark is the command "bench summary", which measures nothing.
var Benchmark = harness.Benchmark{Name: "summary", Run: run}

func run(args []string) error {
	fs := flag.NewFlagSet("bench summary", flag.ContinueOnError)
	docs := fs.String("docs", "docs", "`directory` of the pages that are written")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	out := cmp.Or(os.Getenv("OUT"), ".")
	measured, err := read(out)
	if err != nil {
		return err
	}
	if len(measured) == 0 {
		return fmt.Errorf("no file bench-NAME.json in %s; run make bench-all or a single benchmark, and set OUT to the directory of its files", out)
	}
	store := filepath.Join(*docs, kept)
	if err := keep(store, measured); err != nil {
		return err
	}
	results, err := read(store)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(*docs, page), []byte(summary(results)), 0o644); err != nil {
		return fmt.Errorf("write summary: %w", err)
	}
	return writeFigures(*docs, results)
}

// result is the content of a JSON file that all benchmarks have.
type result struct {
	name    string
	content []byte // of the file, with the fields of the benchmark
	harness.Common
}

// figures returns the text of a block.
func (r *result) figures() string { return strings.TrimLeft(r.Text, "\n") }

// read reads the files bench-NAME.json of a directory, in the order of the names.
func read(dir string) (all []result, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, "bench-*.json"))
	if err != nil {
		return nil, fmt.Errorf("find figures: %w", err)
	}
	slices.Sort(paths)
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read figures: %w", err)
		}
		r := result{name: strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), "bench-"), ".json"), content: content}
		if err := json.Unmarshal(content, &r.Common); err != nil {
			return nil, fmt.Errorf("read figures of %s: %w", path, err)
		}
		if r.Text == "" {
			return nil, fmt.Errorf("%s was written by another version of the benchmark: run it again, or remove the file", path)
		}
		all = append(all, r)
	}
	return all, nil
}

// keep writes results.
func keep(dir string, results []result) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("keep figures: %w", err)
	}
	for _, r := range results {
		content, err := withoutSeries(r.content)
		if err != nil {
			return fmt.Errorf("keep figures of %s: %w", r.name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, "bench-"+r.name+".json"), content, 0o644); err != nil {
			return fmt.Errorf("keep figures: %w", err)
		}
	}
	return nil
}

// withoutSeries returns a file without detail.series, the samples by second: more than a megabyte, which a picture draws.
func withoutSeries(content []byte) ([]byte, error) {
	var all, detail map[string]json.RawMessage
	if err := json.Unmarshal(content, &all); err != nil {
		return nil, err
	}
	if json.Unmarshal(all["detail"], &detail) != nil || detail["series"] == nil {
		return content, nil
	}
	delete(detail, "series")
	rest, err := json.Marshal(detail)
	if err != nil {
		return nil, err
	}
	all["detail"] = rest
	return json.MarshalIndent(all, "", "  ")
}

const introduction = `# All benchmarks

` + "`make bench-all`" + ` runs every benchmark and writes this page, and the figures in the pages of the single benchmarks, from the
JSON files in ` + "`$OUT`" + `. Nothing on this page is typed. The pages explain the arms, the method and the figures. ` + "`bin/bench summary`" + ` publishes
the files of single benchmarks: each benchmark has its date and its commit below.
`

func summary(results []result) string {
	var b strings.Builder
	b.WriteString(introduction)
	b.WriteString("\n## Targets\n\n| benchmark | figure | target | measured | |\n|---|---|---|---|---|\n")
	for _, r := range results {
		for _, t := range r.Targets {
			fmt.Fprintf(&b, "| [%s](#%s) | %s | %s | %s | %s |\n", r.name, r.name, t.Claim, t.Goal, t.Measured, t.Verdict)
		}
	}
	b.WriteString("\n## Runs\n\n| benchmark | begun | duration | commit | kernel | CPUs | compared programs |\n|---|---|---|---|---|---|---|\n")
	for _, r := range results {
		var versions []string
		for _, program := range slices.Sorted(maps.Keys(r.About.Versions)) {
			versions = append(versions, program+" "+r.About.Versions[program])
		}
		fmt.Fprintf(&b, "| [%s](#%s) | %s | %s | %s | %s | %d | %s |\n", r.name, r.name, r.About.Started.Format("2006-01-02 15:04"), r.About.Took,
			cmp.Or(r.About.Commit, "unknown"), r.About.Kernel, r.About.CPUs, strings.Join(versions, ", "))
	}
	for _, r := range results {
		fmt.Fprintf(&b, "\n## %s\n\n```\n%s```\n", r.name, r.figures())
	}
	return b.String()
}

// block is a block of figures in a page: a comment that names the benchmark, and the code block that follows it.
var block = regexp.MustCompile("(?s)(<!-- bench ([a-z-]+) -->\n\n?```\n).*?(```\n)")

// writeFigures replaces the figures in all pages of a directory. Pages keep the figures of benchmarks that did not run.
func writeFigures(docs string, results []result) error {
	pages, err := filepath.Glob(filepath.Join(docs, "bench*.md"))
	if err != nil {
		return fmt.Errorf("find pages: %w", err)
	}
	var errs []error
	for _, path := range pages {
		before, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read page: %w", err)
		}
		after := block.ReplaceAllFunc(before, func(whole []byte) []byte {
			parts := block.FindSubmatch(whole)
			i := slices.IndexFunc(results, func(r result) bool { return r.name == string(parts[2]) })
			if i < 0 {
				return whole
			}
			return slices.Concat(parts[1], []byte(results[i].figures()), parts[3])
		})
		if string(after) != string(before) {
			errs = append(errs, os.WriteFile(path, after, 0o644))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("write figures: %w", err)
	}
	return nil
}
