// SPDX-License-Identifier: Apache-2.0

// Package continuity is the benchmark of changes under load. It changes a service while devices send, and counts what
// the change separates, loses and closes.
package continuity

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/lab"
	"sockeye/lab/swarm"
)

const (
	command = "continuity"
	role    = "swarm" // worker role of members and devices
)

// Benchmark is the command bench continuity.
var Benchmark = harness.Benchmark{
	Name: command, Run: inside, Sandboxed: true,
	Workers: map[string]func([]string) error{role: func([]string) error { return swarm.Run() }},
}

type options struct {
	Quick     bool          `json:"quick"`
	Rounds    int           `json:"rounds"`
	Pause     time.Duration `json:"pause_ns"` // after each change
	Devices   int           `json:"devices"`
	Rate      float64       `json:"datagrams_per_second"` // of each device
	Exporters int           `json:"exporters_per_device"` // UDP ports
	Down      time.Duration `json:"down_ns"`              // from the end of a member to the start of the next one
	Steering  string        `json:"steering"`
	Scenarios string        `json:"scenarios,omitempty"`
	Dump      dump          `json:"dump"`
	Pacing    pacing        `json:"pacing"`
	Binary    string        `json:"-"`
	Next      string        `json:"-"`
}

// dump is the load of the comparison of memory.
type dump struct {
	Devices int     `json:"devices"`
	Routes  int     `json:"routes"`             // of a device
	Rate    float64 `json:"routes_per_second"`  // that a device sends
	Process float64 `json:"process_per_second"` // that a member processes
}

// arm is a way to run the service.
type arm struct {
	name, title string
	agent       bool
	onMove      string // key on_move of the policy
	pace        string // key pace of the policy
	lines       []string
}

var arms = []arm{
	{name: "plain", title: "plain SO_REUSEPORT"},
	{name: "keep", title: "Sockeye, on_move: keep", agent: true, onMove: "keep"},
	{name: "sockeye", title: "Sockeye, on_move: reset", agent: true, onMove: "reset"},
}

// restartArms are the arms of the scenarios that replace a member.
var restartArms = []arm{
	{name: "plain", title: "plain SO_REUSEPORT"},
	{name: "reject", title: "Sockeye, reject, no templates", agent: true, lines: []string{"when_empty: reject", "templates: off"}},
	{name: "sockeye", title: "Sockeye, wait and takeover", agent: true, lines: restartLines},
}

var restartLines = []string{"when_empty: {wait: 60s}", "takeover: true"}

// memoryArms are the arms of the comparison of memory.
var memoryArms = []arm{
	{name: "unpaced", title: "without pacing", agent: true, onMove: "reset"},
	{name: "paced", title: "pace: {devices: 4}", agent: true, onMove: "reset", pace: "{devices: 4, timeout: 2m}"},
}

type bench struct {
	options
	harness.LabBench

	devices *lab.Namespace
	match   string // command lines of members
	onlyBMP bool   // the service has no UDP listener
	// keys are the optional keys of the policy, and commands the commands that the binary knows.
	keys, commands map[string]bool
}

func inside(args []string) error {
	o := options{Dump: dump{Rate: 20_000, Process: 100_000}}
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.BoolVar(&o.Quick, "quick", false, "run for one minute instead of ten, with fewer rounds and shorter pauses")
	fs.IntVar(&o.Rounds, "rounds", 0, "number of rounds of all arms (default 2, quick 1)")
	fs.DurationVar(&o.Pause, "pause", 0, "time after each change (default 2.5s, quick 600ms)")
	fs.IntVar(&o.Devices, "devices", 60, "number of devices, 4 to 4096")
	fs.Float64Var(&o.Rate, "rate", 50, "datagrams per second of each device")
	fs.IntVar(&o.Exporters, "exporters", 2, "UDP ports of each device")
	fs.DurationVar(&o.Down, "down", 0, "time for which a restarted member is down (default 5s, quick 1s)")
	fs.IntVar(&o.Dump.Routes, "routes", 0, "routes of a device, for the comparison of memory (default 50000, quick 15000)")
	fs.IntVar(&o.Pacing.Routers, "pace-routers", 0, "number of routers, for the comparison of pacing (default 12, quick 4)")
	fs.IntVar(&o.Pacing.Routes, "pace-routes", 0, "routes of a router, for the comparison of pacing (default 200000, quick 2000)")
	fs.IntVar(&o.Pacing.Rounds, "pace-rounds", 1, "number of rounds of the comparison of pacing")
	fs.StringVar(&o.Steering, "steering", "reuseport", "steering of the policy, reuseport or lookup")
	fs.StringVar(&o.Scenarios, "scenarios", "", "scenarios to run, comma-separated: "+strings.Join(scenarioNames(), ", ")+", "+memoryPart+", "+pacingPart+", "+templatesPart+" (default: all)")
	fs.StringVar(&o.Binary, "sockeye", "", "binary to measure (default: build ./cmd/sockeye)")
	fs.StringVar(&o.Next, "next", "", "binary to which the scenario upgrade changes (default: the same)")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	d := options{Rounds: 2, Pause: 2500 * time.Millisecond, Down: 5 * time.Second, Dump: dump{Devices: 60, Routes: 50_000}, Pacing: pacing{Routers: 12, Routes: 200_000}}
	if o.Quick {
		d = options{Rounds: 1, Pause: 600 * time.Millisecond, Down: time.Second, Dump: dump{Devices: 24, Routes: 15_000}, Pacing: pacing{Routers: 4, Routes: 2000}}
	}
	if o.Rounds == 0 {
		o.Rounds = d.Rounds
	}
	if o.Pause == 0 {
		o.Pause = d.Pause
	}
	if o.Down == 0 {
		o.Down = d.Down
	}
	if o.Dump.Routes == 0 {
		o.Dump.Routes = d.Dump.Routes
	}
	o.Dump.Devices = min(o.Devices, d.Dump.Devices)
	if o.Pacing.Routers == 0 {
		o.Pacing.Routers = d.Pacing.Routers
	}
	if o.Pacing.Routes == 0 {
		o.Pacing.Routes = d.Pacing.Routes
	}
	unknown := false
	for name := range strings.SplitSeq(o.Scenarios, ",") {
		unknown = unknown || name != "" && name != memoryPart && name != pacingPart && name != templatesPart && !slices.Contains(scenarioNames(), name)
	}
	if unknown || o.Rounds < 1 || o.Pause < 100*time.Millisecond || o.Down < 0 || o.Down > 30*time.Second || o.Devices < 4 || o.Devices > 4096 || o.Rate <= 0 || o.Exporters < 1 || o.Exporters > 16 ||
		o.Dump.Routes < 1 || o.Pacing.Routers < 1 || o.Pacing.Routers > 100 || o.Pacing.Routes < 1 || o.Pacing.Routes > maxTable || o.Pacing.Rounds < 1 || o.Steering != "reuseport" && o.Steering != "lookup" {
		return harness.Misused(fs)
	}
	b := &bench{options: o, match: `^receiver-(\d+) `}
	return harness.InLab(func(ctx context.Context, l *lab.Lab) error {
		b.Lab = l
		return b.run(ctx)
	})
}

// includes reports whether a scenario is run.
func (o *options) includes(name string) bool {
	return o.Scenarios == "" || slices.Contains(strings.Split(o.Scenarios, ","), name)
}

func (b *bench) run(ctx context.Context) (err error) {
	r := &report{Options: b.options, Run: harness.Begin()}
	r.Compare(ctx, map[string]string{"nfacctd": "-V"})
	if b.Binary == "" {
		if b.Binary, err = harness.BuildSockeye(ctx, b.Lab.Dir()); err != nil {
			return err
		}
	}
	if b.Next == "" {
		b.Next = b.Binary
	}
	if b.devices, err = swarm.Attach(b.Lab); err != nil {
		return err
	}
	b.unmountAtClose()
	if err := b.probe(ctx); err != nil {
		return err
	}
	for round := range b.Rounds {
		for _, s := range scenarios {
			if !b.includes(s.name) {
				continue
			}
			if s.needs != "" && !b.commands[s.needs] {
				r.skip(s.name, "the binary has no sockeye "+s.needs)
				continue
			}
			if s.restarts && !b.keys["takeover"] {
				r.skip(s.name, "the binary has no takeover")
				continue
			}
			for _, a := range harness.Turn(s.arms(), round) {
				m, err := b.measure(ctx, s, a)
				if err != nil {
					return fmt.Errorf("%s, %s, round %d: %w", s.name, a.name, round+1, err)
				}
				m.Round = round
				r.runs = append(r.runs, m)
				fmt.Fprint(os.Stderr, ".")
			}
		}
	}
	if b.includes(memoryPart) {
		for _, a := range memoryArms {
			if a.pace != "" && !b.keys["pace"] {
				r.skip(memoryPart, "the binary has no pace")
				continue
			}
			m, err := b.measureMemory(ctx, a)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", memoryPart, a.name, err)
			}
			r.memory = append(r.memory, m)
			fmt.Fprint(os.Stderr, ".")
		}
	}
	if b.includes(pacingPart) {
		switch missing := lab.CheckPrograms(); {
		case missing != nil:
			r.skip(pacingPart, missing.Error())
		case !b.keys["pace"]:
			r.skip(pacingPart, "the binary has no pace")
		default:
			if r.paced, err = b.comparePacing(ctx); err != nil {
				return fmt.Errorf("%s: %w", pacingPart, err)
			}
		}
	}
	if b.includes(templatesPart) {
		if r.templates, err = b.measureTemplates(); err != nil {
			return fmt.Errorf("%s: %w", templatesPart, err)
		}
	}
	fmt.Fprintln(os.Stderr)
	r.End()
	return harness.Publish(command, r)
}

// unmountAtClose unmounts the bpffs of the agents when the lab closes.
func (b *bench) unmountAtClose() {
	b.Lab.AtClose(func() error {
		_ = unix.Unmount(b.bpffs(), unix.MNT_DETACH) // the error of a bpffs that was never mounted
		return nil
	})
}
