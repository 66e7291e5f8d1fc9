// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
	"sockeye/internal/netns"
)

// The long run: 512 BMP sessions and as many exporters, four nfacctd, and a constant load, with a sample every second. All
// sessions of all arms stay open. The load goes from arm to arm in slices, so that a change of the host affects all arms.

const (
	seriesRouters = 512
	quickRouters  = 128 // in a quick long run: nfacctd has some 9 MB for each session
	seriesSlice   = 10 * time.Second
	seriesStep    = time.Second
	// seriesSpacing is the interval between the starts of sessions: nfacctd accepts more slowly the more sessions it has.
	seriesSpacing = 25 * time.Millisecond
)

// A sample describes a second of the load of an arm.
type sample struct {
	Second  float64                  `json:"second"` // end, in seconds of the load of this arm
	Length  time.Duration            `json:"length_ns"`
	Usage   map[string]harness.Usage `json:"usage"`     // by role
	Memory  map[string]float64       `json:"memory_mb"` // by role, at the end
	Dropped uint64                   `json:"dropped"`   // datagrams dropped at a full receive buffer
}

// cores returns the CPU seconds per second of a role.
func (s *sample) cores(role string, part func(harness.Usage) time.Duration) float64 {
	return part(s.Usage[role]).Seconds() / s.Length.Seconds()
}

// A seriesRun is the long run of an arm.
type seriesRun struct {
	Arm     string   `json:"arm"`
	Sent    []sent   `json:"sent"` // by slice
	Samples []sample `json:"samples"`
}

// A seriesSet contains the long runs of all arms.
type seriesSet []seriesRun

// seriesReport is the report of the flag -long-only.
type seriesReport struct {
	Options options `json:"options"`
	harness.Run

	arms   []armTitle
	series seriesSet
}

// Print implements harness.Report.
func (r *seriesReport) Print(p harness.Printf) {
	p("\nLinux %s, %d CPUs for routers, balancing and members together.\n", r.Kernel, r.CPUs)
	r.series.print(p, r.arms, &r.Options)
	p("\nDuration %s.\n", r.Took)
}

func (s seriesSet) print(p harness.Printf, arms []armTitle, o *options) {
	if len(s) == 0 {
		return
	}
	p("\nLong run: %d BMP sessions and as many exporters, four nfacctd, %s of load for each arm in slices of up to %s.\n", o.seriesRouters(), o.Long, seriesSlice)
	p("CPU seconds per second, mean; memory in MB, highest\n\t")
	for _, role := range roles {
		p("%s user\tsystem\t", role.title)
	}
	p("members MB\tbalancing MB\tBPF MB\tdatagrams sent\tdropped\n")
	for _, a := range arms {
		for i := range s {
			r := &s[i]
			if r.Arm != a.name {
				continue
			}
			p("%s", a.title)
			for _, role := range roles {
				p("\t%.3f\t%.3f", r.mean(role.group, user), r.mean(role.group, system))
			}
			for _, role := range []string{membersGroup, balanceGroup, bpfMemory} {
				p("\t%.1f", harness.SpreadOf(r.values(func(x *sample) float64 { return x.Memory[role] })).Max)
			}
			var datagrams, dropped uint64
			for _, x := range r.Sent {
				datagrams += x.Datagrams
			}
			for _, x := range r.Samples {
				dropped += x.Dropped
			}
			p("\t%d\t%d\n", datagrams, dropped)
		}
	}
}

// mean returns the CPU seconds per second of a role over the whole run.
func (r *seriesRun) mean(role string, part func(harness.Usage) time.Duration) float64 {
	var used, all time.Duration
	for i := range r.Samples {
		used += part(r.Samples[i].Usage[role])
		all += r.Samples[i].Length
	}
	return used.Seconds() / all.Seconds()
}

// Figures implements harness.Report.
func (r *seriesReport) Figures() any { return map[string]any{"run": r, "series": r.series} }

// Charts implements harness.Report.
func (r *seriesReport) Charts() map[string]chart.Chart {
	return map[string]chart.Chart{"": r.series.chart(r.arms, &r.Options)}
}

// chart draws the samples: a panel for each figure, a line for each arm.
func (s seriesSet) chart(arms []armTitle, o *options) chart.Chart {
	drawing := chart.Chart{Title: fmt.Sprintf("%d BMP sessions and exporters, four nfacctd: each second of load", o.seriesRouters())}
	for _, panel := range []struct {
		title  string
		figure func(*sample) float64
	}{
		{"members, CPU seconds per second", func(x *sample) float64 { return x.cores(membersGroup, harness.Usage.Total) }},
		{"processes between routers and members, CPU seconds per second", func(x *sample) float64 { return x.cores(balanceGroup, harness.Usage.Total) }},
		{"senders, with the kernel's delivery, CPU seconds per second", func(x *sample) float64 { return x.cores(generatorGroup, harness.Usage.Total) }},
		{"memory of members, MB", func(x *sample) float64 { return x.Memory[membersGroup] }},
		{"memory of processes between routers and members, with BPF maps, MB", func(x *sample) float64 { return x.Memory[balanceGroup] + x.Memory[bpfMemory] }},
	} {
		p := chart.Panel{Title: panel.title, Step: "s"}
		for _, a := range arms {
			for i := range s {
				if s[i].Arm == a.name {
					p.Lines = append(p.Lines, chart.Line{Label: a.title, Values: s[i].values(panel.figure)})
				}
			}
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}

// values returns a figure of each sample.
func (r *seriesRun) values(figure func(*sample) float64) (v []float64) {
	for i := range r.Samples {
		v = append(v, figure(&r.Samples[i]))
	}
	return v
}

func (b *bench) longRunOnly(ctx context.Context, arms []arm, l load) error {
	r := &seriesReport{Options: b.options, Run: begin(ctx), arms: titles(arms)}
	var err error
	if r.series, err = b.longRun(ctx, arms, b.Long, l); err != nil {
		return err
	}
	r.End()
	return harness.Publish(command+"-series", r)
}

// longRun applies the load to all arms, each for a time.
func (b *bench) longRun(ctx context.Context, arms []arm, each time.Duration, l load) (runs seriesSet, err error) {
	l.Routers, l.Spacing = b.seriesRouters(), seriesSpacing
	l.Duration = min(seriesSlice, each)
	spec, err := json.Marshal(l)
	if err != nil {
		return nil, err
	}
	err = b.withFleets(ctx, "long run", arms, kindNfacctd, l.Routers, func(fleets []*fleet) error {
		generators := map[*fleet]*harness.Process{}
		byFleet := map[*fleet]*seriesRun{}
		for _, f := range fleets {
			byFleet[f] = &seriesRun{Arm: f.arm.name()}
			if err := netns.Enter(f.net); err != nil {
				return err
			}
			gen, err := b.Start(f.group(generatorGroup), "generator", "/proc/self/exe", "generator")
			if err != nil {
				return err
			}
			if err := gen.Ask(string(spec), &struct{}{}); err != nil {
				return err
			}
			generators[f] = gen
		}
		for turn := range max(1, int(each/l.Duration)) {
			for _, f := range harness.Turn(fleets, turn) {
				if err := f.b.Quiesce(ctx, f.group(membersGroup), f.group(balanceGroup)); err != nil {
					return err
				}
				if err := byFleet[f].slice(ctx, f, generators[f]); err != nil {
					return fmt.Errorf("long run of %s: %w", f.arm.name(), err)
				}
				fmt.Fprint(os.Stderr, ".")
			}
		}
		for _, f := range fleets {
			runs = append(runs, *byFleet[f])
		}
		return nil
	})
	return runs, err
}

// slice lets a generator send its load once, and takes samples meanwhile.
func (r *seriesRun) slice(ctx context.Context, f *fleet, gen *harness.Process) error {
	if err := netns.Enter(f.net); err != nil {
		return err
	}
	at := func() (map[string]harness.Usage, uint64) {
		u := map[string]harness.Usage{}
		for _, role := range roles {
			u[role.group] = f.b.Usage(f.group(role.group))
		}
		return u, harness.Drops()
	}
	var s sent
	answer := make(chan error, 1)
	usage, dropped := at()
	start := time.Now()
	go func() { answer <- gen.Ask("go", &s) }()
	ticks := time.NewTicker(seriesStep)
	defer ticks.Stop()
	second := 0.0
	if n := len(r.Samples); n > 0 {
		second = r.Samples[n-1].Second
	}
	for ended := false; !ended; {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-answer:
			if err != nil {
				return err
			}
			ended = true
			if time.Since(start) < seriesStep/2 {
				continue // the rest of the last second
			}
		case <-ticks.C:
		}
		now := time.Now()
		u, d := at()
		taken := sample{Length: now.Sub(start), Usage: map[string]harness.Usage{}, Memory: f.memory(), Dropped: d - dropped}
		second += taken.Length.Seconds()
		taken.Second = second
		for role := range u {
			taken.Usage[role] = u[role].Sub(usage[role])
		}
		r.Samples = append(r.Samples, taken)
		usage, dropped, start = u, d, now
	}
	r.Sent = append(r.Sent, s)
	return nil
}

func (o *options) seriesRouters() int {
	if o.Quick {
		return quickRouters
	}
	return seriesRouters
}
