// SPDX-License-Identifier: Apache-2.0

// Package fleet is the benchmark of a fleet: the time of its program, the packets per second through a host that forwards them,
// and the buckets that move in a simulated year.
package fleet

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/lab"
	"sockeye/lab/swarm"
)

const command = "fleet"

// Benchmark is the command bench fleet.
var Benchmark = harness.Benchmark{
	Name: command, Run: inside, Sandboxed: true,
	Workers: map[string]func([]string) error{role: func([]string) error { return swarm.Run() }},
}

type options struct {
	Quick    bool          `json:"quick"`
	Launches int           `json:"launches"`
	Rounds   int           `json:"rounds"`
	Slice    time.Duration `json:"slice_ns"`
	Fleets   []int         `json:"fleets"`
	Days     int           `json:"days"`
	Cycles   int           `json:"cycles"` // drains and returns
	Binary   string        `json:"-"`
	Only     string        `json:"only,omitempty"`
}

// measures are the parts of the benchmark, in the order of the report.
var measures = []struct {
	name    string
	measure func(*bench, context.Context) (part, error)
}{
	{"ns", (*bench).costs},
	{"rate", (*bench).rates},
	{"changes", (*bench).changes},
	{"simulated", (*bench).simulate},
}

type bench struct {
	options
	lab *lab.Lab
}

func inside(args []string) error {
	var names []string
	for _, m := range measures {
		names = append(names, m.name)
	}
	o := options{}
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.BoolVar(&o.Quick, "quick", false, "run for a minute instead of ten, with wider confidence intervals and shorter simulations")
	fs.IntVar(&o.Launches, "launches", 0, "number of launches of all programs and networks (default 20, quick 6)")
	fs.IntVar(&o.Rounds, "rounds", 0, "number of rounds of all arms of the part rate in each launch (default 4, quick 2)")
	fs.DurationVar(&o.Slice, "slice", 50*time.Millisecond, "measured time per arm and load in a round")
	fs.IntVar(&o.Cycles, "cycles", 0, "drains and returns of a host for the part changes (default 5, quick 1)")
	fs.StringVar(&o.Binary, "sockeye", "", "path of the sockeye binary, for the part changes")
	fs.StringVar(&o.Only, "only", "", "parts to run, comma-separated: "+strings.Join(names, ", ")+" (default: all)")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	d := options{Launches: 20, Rounds: 4, Fleets: []int{3, 10, 100, 1000}, Days: 90, Cycles: 5}
	if o.Quick {
		d = options{Launches: 6, Rounds: 2, Fleets: []int{3, 10, 100}, Days: 30, Cycles: 1}
	}
	o.Fleets, o.Days = d.Fleets, d.Days
	if o.Launches == 0 {
		o.Launches = d.Launches
	}
	if o.Rounds == 0 {
		o.Rounds = d.Rounds
	}
	if o.Cycles == 0 {
		o.Cycles = d.Cycles
	}
	unknown := false
	for name := range strings.SplitSeq(o.Only, ",") {
		unknown = unknown || name != "" && !slices.Contains(names, name)
	}
	if unknown || o.Launches < 1 || o.Rounds < 1 || o.Cycles < 1 || o.includes("changes") && o.Binary == "" || o.Slice < 5*time.Millisecond || o.Slice > 10*time.Second {
		return harness.Misused(fs)
	}
	return harness.InLab(func(ctx context.Context, l *lab.Lab) error {
		b := &bench{options: o, lab: l}
		return b.run(ctx)
	})
}

// includes reports whether a part is run.
func (o *options) includes(name string) bool {
	return o.Only == "" || slices.Contains(strings.Split(o.Only, ","), name)
}

func (b *bench) run(ctx context.Context) error {
	if err := b.mountPins(); err != nil {
		return err
	}
	r := &report{Run: harness.Begin(), Options: b.options}
	r.Compare(ctx, map[string]string{"nft": "--version", "ipvsadm": "--version"})
	for _, m := range measures {
		if !b.includes(m.name) {
			continue
		}
		fmt.Fprint(os.Stderr, m.name+": ")
		p, err := m.measure(b, ctx)
		fmt.Fprintln(os.Stderr)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		r.parts = append(r.parts, p)
	}
	r.End()
	return harness.Publish(command, r)
}

func (b *bench) pins(name string) string { return filepath.Join(b.lab.Dir(), "bpf", name) }

// mountPins mounts a bpffs for the pins of the data paths.
func (b *bench) mountPins() error {
	dir := b.pins("")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("mount bpffs: %w", err)
	}
	if err := unix.Mount("bpffs", dir, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs: %w", err)
	}
	b.lab.AtClose(func() error { return unix.Unmount(dir, unix.MNT_DETACH) })
	return nil
}
