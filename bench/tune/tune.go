// SPDX-License-Identifier: Apache-2.0

// Package tune is the benchmark of tuning. It compares Sockeye's rules with the kernel's defaults, in the lab.
package tune

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab"
)

const (
	baseline = "baseline"
	tuned    = "tuned"
)

const command = "tune"

// Benchmark is the command bench tune.
var Benchmark = harness.Benchmark{
	Name: command, Run: insideTune, Sandboxed: true,
	Workers: map[string]func([]string) error{serverRole: tuneServer, clientRole: tuneClient, costRole: tuneCost},
}

type options struct {
	Quick     bool    `json:"quick"`
	Rounds    int     `json:"rounds"`
	Seconds   float64 `json:"seconds_per_run"`
	Rate      int64   `json:"bottleneck_bits_per_second"`
	Queue     int     `json:"bottleneck_packets"`
	Buffers   int     `json:"tuned_buffer_bytes"`
	Clamp     int     `json:"tuned_cwnd_clamp"`
	Transfers int     `json:"transfers"` // transfers on each link per arm
	Batches   int     `json:"cost_batches"`
	Only      string  `json:"only,omitempty"`
	// X are the numbers of large flows per sender.
	X    []int         `json:"incast_x"`
	Arms []string      `json:"incast_arms"`
	Mark time.Duration `json:"bottleneck_marks_after_ns"` // 0: never

	Warmup time.Duration `json:"incast_warmup_ns"`

	Binary string `json:"-"`
}

type bench struct {
	options
	harness.LabBench

	// startBPFTune is set if Arms has bpftune, as the last arm.
	startBPFTune func(context.Context) (stop func() error, err error)
}

func insideTune(args []string) (err error) {
	var o options
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.BoolVar(&o.Quick, "quick", false, "run for two minutes instead of ten, with fewer and shorter rounds")
	fs.IntVar(&o.Rounds, "rounds", 0, "number of rounds of all arms (default 3, quick 1)")
	fs.Float64Var(&o.Seconds, "seconds", 0, "measured seconds per incast run (default 3, quick 1)")
	fs.Int64Var(&o.Rate, "rate", 300e6, "rate of the incast bottleneck, in bits per second")
	fs.IntVar(&o.Queue, "queue", 600, "length of the bottleneck's queue, in full packets")
	fs.IntVar(&o.Buffers, "buffers", 150_000, "socket buffers of the tuned incast arms, in bytes")
	fs.IntVar(&o.Clamp, "clamp", 16, "maximum window of the tuned incast arms, in segments")
	fs.StringVar(&o.Only, "only", "", "parts to run, comma-separated: "+strings.Join(parts, ", "))
	fs.StringVar(&o.Binary, "sockeye", "", "binary to measure (default: build ./cmd/sockeye)")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	for part := range strings.SplitSeq(o.Only, ",") {
		if o.Only != "" && !slices.Contains(parts, part) {
			return harness.Misused(fs)
		}
	}
	o.Transfers, o.Batches = 60, 200
	rounds, seconds := 3, 3.0
	if o.Quick {
		o.Transfers, o.Batches = 15, 40
		rounds, seconds = 1, 1
	}
	if o.Rounds == 0 {
		o.Rounds = rounds
	}
	if o.Seconds == 0 {
		o.Seconds = seconds
	}
	o.Warmup, o.X = incastWarmup, append(slices.Clone(paperX), beyondX)
	o.Arms = []string{baseline, tuned, byRoute, byApp}
	return harness.InLab(func(ctx context.Context, l *lab.Lab) error {
		t := &bench{options: o, LabBench: harness.LabBench{Lab: l}}
		return t.run(ctx)
	})
}

const (
	incastPart   = "incast"
	iwPart       = "iw"
	synPart      = "syn_rto"
	learningPart = "learning"
	costPart     = "cost"
)

var parts = []string{incastPart, iwPart, synPart, learningPart, costPart}

// wants returns whether a part is run.
func (t *bench) wants(part string) bool {
	return t.Only == "" || slices.Contains(strings.Split(t.Only, ","), part)
}

func (t *bench) run(ctx context.Context) error {
	r := &report{Options: t.options, Run: harness.Begin()}
	var err error
	if t.Binary == "" {
		if t.Binary, err = harness.BuildSockeye(ctx, t.Lab.Dir()); err != nil {
			return err
		}
	}
	if err := t.startAgent(ctx); err != nil {
		return err
	}
	for _, part := range []struct {
		name string
		run  func() error
	}{
		{incastPart, func() (err error) { r.incast, err = t.incast(ctx); return err }},
		{iwPart, func() (err error) { r.iw, err = t.initialWindows(ctx); return err }},
		{synPart, func() (err error) { r.handshake, err = t.handshakes(ctx); return err }},
		{learningPart, func() (err error) { r.learned, err = t.learning(ctx); return err }},
		{costPart, func() (err error) { r.cost, err = t.cost(ctx); return err }},
	} {
		if !t.wants(part.name) {
			continue
		}
		if err := part.run(); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	if r.rules, err = t.rules(ctx); err != nil {
		return err
	}
	r.End()
	return harness.Publish(command, r)
}
