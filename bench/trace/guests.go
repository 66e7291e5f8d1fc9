// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

// Many hosts forbid fentry programs and kprobes, and a comparison of two hosts needs two: both run in virtual machines.

const guestsCommand = "trace-vm"

// GuestBenchmark is the command bench trace-vm.
var GuestBenchmark = harness.Benchmark{Name: guestsCommand, Run: runGuests}

// guestHosts are the compared machines. The CPU of the slow one has 10^9 / 2^3 instructions a second.
var guestHosts = []struct {
	name      string
	arguments []string
}{
	{"fast", []string{"-virtual-time"}},
	{"slow", []string{"-virtual-time", "-slower=3"}},
}

// guestsReport is the comparison of two machines.
type guestsReport struct {
	harness.Run
	compared string          // by sockeye trace compare
	figures  json.RawMessage // the same, as JSON
}

func runGuests(args []string) error {
	fs := flag.NewFlagSet("bench "+guestsCommand, flag.ContinueOnError)
	binary := fs.String("sockeye", "", "binary that compares (default: build ./cmd/sockeye)")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "sockeye-guests-")
	if err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	defer os.RemoveAll(dir)
	if *binary == "" {
		if *binary, err = harness.BuildSockeye(ctx, dir); err != nil {
			return err
		}
	}
	if err := compareGuests(ctx, *binary, dir); err != nil {
		return err
	}
	return measureProbes(ctx)
}

// measureProbes measures the arms that many hosts forbid, and publishes the figures of the machine.
func measureProbes(ctx context.Context) error {
	figures, err := harness.InGuest(ctx, "-kernels=newest", "-virtual-time", "-timeout=20m", "-run=^TestOtherProbes$", "./bench/trace")
	if err != nil {
		return err
	}
	var common harness.Common
	var indented bytes.Buffer
	if err := errors.Join(json.Unmarshal(figures, &common), json.Indent(&indented, figures, "", "  ")); err != nil {
		return fmt.Errorf("read the figures of the virtual machine: %w", err)
	}
	fmt.Print(common.Text)
	// The test was built in no clone that it knows.
	content := bytes.Replace(indented.Bytes(), []byte("\"about\": {"), fmt.Appendf(nil, "\"about\": {\n    \"commit\": %q,", harness.Begin().Commit), 1)
	if err := os.WriteFile(filepath.Join(os.Getenv("OUT"), "bench-"+guestsCommand+".json"), append(content, '\n'), 0o644); err != nil {
		return fmt.Errorf("write figures: %w", err)
	}
	return nil
}

// compareGuests traces the same messages in each machine, and publishes the comparison.
func compareGuests(ctx context.Context, binary, dir string) error {
	r := &guestsReport{Run: harness.Begin()}
	files, errs := make([]string, len(guestHosts)), make([]error, len(guestHosts))
	var all sync.WaitGroup
	for i, g := range guestHosts {
		files[i] = filepath.Join(dir, g.name+".json")
		all.Go(func() { errs[i] = saveGuest(ctx, g.name, g.arguments, files[i]) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	picture, err := filepath.Abs(filepath.Join(os.Getenv("OUT"), "bench-trace-guests.svg"))
	if err != nil {
		return fmt.Errorf("find the directory of the figures: %w", err)
	}
	compare := func(more ...string) ([]byte, error) {
		cmd := exec.CommandContext(ctx, binary, append([]string{"trace", "compare", filepath.Base(files[0]), filepath.Base(files[1])}, more...)...)
		cmd.Dir = dir
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("compare the machines: %w\n%s", err, stderr.String())
		}
		return out, nil
	}
	text, err := compare("--svg", picture, "--force")
	if err != nil {
		return err
	}
	r.compared, _, _ = strings.Cut(string(text), "wrote ") // the picture
	if r.figures, err = compare("-o", "json"); err != nil {
		return err
	}
	r.End()
	return harness.Publish("trace-guests", r)
}

// saveGuest traces messages in a machine with a name, and writes what trace save has written there.
func saveGuest(ctx context.Context, name string, arguments []string, file string) error {
	shared, err := os.MkdirTemp(filepath.Dir(file), name)
	if err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	if err := os.WriteFile(filepath.Join(shared, "name"), []byte(name), 0o644); err != nil {
		return fmt.Errorf("name a machine: %w", err)
	}
	saved, err := harness.InGuest(ctx, append(arguments, "-kernels=newest", "-timeout=20m", "-files="+shared, "-run=^TestTracedGuest$", "./lab/e2e")...)
	if err != nil {
		return err
	}
	return os.WriteFile(file, saved, 0o644)
}

// Print writes the comparison.
func (r *guestsReport) Print(p harness.Printf) {
	p("Requests of 1 KB over a link with a delay of 1 ms, in two virtual machines whose clocks count instructions.\n")
	p("The CPU of the slow machine has an eighth of the instructions a second of that of the fast one.\n\n")
	for line := range strings.Lines(r.compared) {
		p("%s", line)
	}
}

// Figures returns the comparison.
func (r *guestsReport) Figures() any { return map[string]any{"compared": r.figures} }

// Charts returns none: trace compare has written the picture.
func (r *guestsReport) Charts() map[string]chart.Chart { return nil }
