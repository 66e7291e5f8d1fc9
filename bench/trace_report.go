// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"sockeye/internal/stats"
	"sockeye/lab/plot"
)

type traceReport struct {
	Options traceOptions `json:"options"`
	Kernel  string       `json:"kernel"`
	CPUs    int          `json:"cpus"`
	Started time.Time    `json:"started"`
	Took    string       `json:"took"`

	rounds []traceRound
	// Of one run of each load before the rounds.
	programs []traceProgram
	rules    []tracedRule
}

// A traceMeasure is a figure of a load by which arms are compared.
type traceMeasure struct {
	name, load  string
	title, unit string
	verb        string
	aims        bool // those of the arms are of this measure
	figure      func(traceSample) float64
}

func sampleRate(s traceSample) float64 { return s.Rate }
func sampleCPU(s traceSample) float64  { return s.CPU }

// sampleGbit is of messages of 64 KB.
func sampleGbit(s traceSample) float64 { return s.Rate * (64 << 10) * 8 / 1e9 }

var traceMeasures = []traceMeasure{
	{name: "throughput", load: loadStream, title: "A stream of 64 KB messages", unit: "Gbit/s", verb: "%.1f", aims: true, figure: sampleGbit},
	{name: "rr", load: loadRR, title: "Request and response of 1 KB each", unit: "a second", verb: "%.0f", figure: sampleRate},
	{name: "cpu", load: loadStream, title: "CPU of the stream, both ends", unit: "µs a message", verb: "%.2f", figure: sampleCPU},
	{name: "rr_cpu", load: loadRR, title: "CPU of request and response, both ends", unit: "µs for both", verb: "%.2f", figure: sampleCPU},
}

// figures are those of an arm, round by round.
func (r *traceReport) figures(arm string, m traceMeasure) (v []float64) {
	for _, round := range r.rounds {
		if s, ok := round[arm][m.load]; ok {
			v = append(v, m.figure(s))
		}
	}
	return v
}

// ratios are of an arm to both arms without a program, round by round; the second
// of these is compared with the first.
func (r *traceReport) ratios(arm string, m traceMeasure) (v []float64) {
	off, again := r.figures(armOff, m), r.figures(armOffAgain, m)
	for i, f := range r.figures(arm, m) {
		if arm == armOffAgain {
			v = append(v, f/off[i])
		} else {
			v = append(v, 2*f/(off[i]+again[i]))
		}
	}
	return v
}

// A distribution is of the rounds' ratios. The median of ever more rounds would
// lie between Low and High, with a confidence of 95 %.
type distribution struct {
	Median figure `json:"median"`
	P25    figure `json:"p25"`
	P75    figure `json:"p75"`
	Low    figure `json:"low"`
	High   figure `json:"high"`
}

func distributionOf(v []float64) distribution {
	low, high := stats.MedianInterval(v)
	return distribution{figure(stats.Median(v)), quantile(v, 0.25), quantile(v, 0.75), figure(low), figure(high)}
}

func (d distribution) String() string {
	return fmt.Sprintf("%.3f [%.3f .. %.3f]", d.Median, d.P25, d.P75)
}

// verdict holds a distribution against an aim, which is a least value.
func (d distribution) verdict(aim float64) string {
	switch a := figure(aim); {
	case d.Low >= a:
		return "met"
	case d.High < a:
		return "missed"
	case d.Median >= a:
		return "met, within the noise"
	default:
		return "missed, within the noise"
	}
}

// arms are those that were run.
func (r *traceReport) arms() []traceArm {
	return slices.DeleteFunc(slices.Clone(traceArms), func(a traceArm) bool { return !r.Options.includes(a) })
}

// measures are those of the loads that were run.
func (r *traceReport) measures() []traceMeasure {
	return slices.DeleteFunc(slices.Clone(traceMeasures), func(m traceMeasure) bool { return len(r.figures(armOff, m)) == 0 })
}

func (r *traceReport) print(to io.Writer) {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	p := func(format string, args ...any) { fmt.Fprintf(w, format, args...) }
	p("\nBoth ends on one CPU; %d rounds of all arms in random order, %v of each load on a connection of its own; Linux %s, %d CPUs.\n",
		len(r.rounds), r.Options.Slice, r.Kernel, r.CPUs)
	p("Medians; ratios to off within each round, [p25 .. p75], and between what their median lies with a confidence of 95 %%.\n")
	for _, m := range r.measures() {
		p("\n%s\n", m.title)
		p("\t%s\tof off\tmedian lies in\taim\n", m.unit)
		for _, a := range r.arms() {
			p("%s\t"+m.verb, a.title, spreadOf(r.figures(a.name, m)).Median)
			if a.name == armOff {
				p("\t\t\t\n")
				continue
			}
			d := distributionOf(r.ratios(a.name, m))
			p("\t%v\t%.3f .. %.3f\t", d, d.Low, d.High)
			if m.aims && a.aim > 0 {
				p("%.2f: %s", a.aim, d.verdict(a.aim))
			}
			p("\n")
		}
	}
	p("\nOff, again: nothing is attached either; it shows what the machine alone makes of a ratio. On for others: every message of another cgroup\n")
	p("is traced. SO_TIMESTAMPING: nothing is attached, the application has each message stamped, and reads the stamps.\n")
	if len(r.programs) > 0 {
		r.printPrograms(p)
	}
	p("\nTook %s. The ends had %.0f %% of their CPU, by the median; less than 95 %% makes throughput uncertain, not CPU.", r.Took, 100*r.share())
	if len(r.rules) > 0 {
		p(" The agent took %.2f %% of another.", 100*r.agentShare())
	}
	p("\n")
	_ = w.Flush() // a builder takes all
	for line := range strings.Lines(text.String()) {
		if _, err := fmt.Fprintln(to, strings.TrimRight(line, " \n")); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			return
		}
	}
}

// leastRuns of a program a message are shown: fewer are of connections.
const leastRuns = 0.005

// printPrograms is of one run of each load.
func (r *traceReport) printPrograms(p func(format string, args ...any)) {
	p("\nPrograms that ran, with the kernel's BPF statistics on, whose own cost is in the figures\n")
	p("\tload\tprogram\truns a message\tns each\tns a message\n")
	for _, a := range r.arms() {
		if a.state == traceOff {
			continue
		}
		for _, l := range traceLoads {
			ran := r.ran(a.name, l.name)
			if len(ran) == 0 {
				p("%s\t%s\tnone\t\t\t\n", a.title, l.name)
			}
			for _, x := range ran {
				p("%s\t%s\t%s\t%.3f\t%.0f\t%.0f\n", a.title, l.name, x.Program, x.Runs, x.NS, x.Runs*x.NS)
			}
		}
	}
	p("Of rr a message is a request and its response.\n")
	p("\nWhat the agent says of these runs\n")
	p("rule\tmessages chosen\taccounted for\tacknowledged, all stages known\treceived, chosen\n")
	for _, x := range r.rules {
		p("%s\t%d\t%d\t%d\t%d\n", x.Rule, x.Sent, x.Accounted, x.Acked, x.Received)
	}
}

func (r *traceReport) ran(arm, load string) (ran []traceProgram) {
	for _, x := range r.programs {
		if x.Arm == arm && x.Load == load && x.Runs >= leastRuns {
			ran = append(ran, x)
		}
	}
	return ran
}

// agentShare is the mean of what the agent took of a CPU.
func (r *traceReport) agentShare() float64 {
	sum, n := 0.0, 0
	for _, a := range r.arms() {
		for _, m := range r.measures() {
			if a.state == traceOff {
				continue
			}
			for _, round := range r.rounds {
				sum += round[a.name][m.load].Agent
				n++
			}
		}
	}
	return sum / float64(n)
}

// share is the median of what the ends had of their CPU.
func (r *traceReport) share() float64 {
	var v []float64
	for _, round := range r.rounds {
		for _, loads := range round {
			v = append(v, loads[loadStream].Share, loads[loadRR].Share)
		}
	}
	return min(1, spreadOf(v).Median) // the runtime works a little elsewhere
}

// tracedRatios are the medians of the arms that are asked for.
type tracedRatios struct {
	Others  figure `json:"others"`
	Sampled figure `json:"sampled_100"`
	Every   figure `json:"every"`
	RX      figure `json:"rx"`
}

func (r *traceReport) medians(measure string) tracedRatios {
	m := traceMeasures[slices.IndexFunc(traceMeasures, func(m traceMeasure) bool { return m.name == measure })]
	of := func(arm string) figure { return distributionOf(r.ratios(arm, m)).Median }
	return tracedRatios{of(armOthers), of(armSampled), of(armEvery), of(armRX)}
}

func (r *traceReport) json() ([]byte, error) {
	ratios := map[string]map[string]distribution{}
	medians := map[string]map[string]figure{}
	aims := map[string]string{}
	for _, m := range r.measures() {
		ratios[m.name], medians[m.name] = map[string]distribution{}, map[string]figure{}
		for _, a := range r.arms() {
			medians[m.name][a.name] = figure(spreadOf(r.figures(a.name, m)).Median)
			if a.name == armOff {
				continue
			}
			d := distributionOf(r.ratios(a.name, m))
			ratios[m.name][a.name] = d
			if m.name == "throughput" && a.aim > 0 {
				aims[a.name] = fmt.Sprintf("%.2f: %s", a.aim, d.verdict(a.aim))
			}
		}
	}
	return json.MarshalIndent(struct {
		Throughput tracedRatios                       `json:"throughput_ratio"`
		RR         tracedRatios                       `json:"rr_ratio"`
		CPU        tracedRatios                       `json:"cpu_ratio"`
		Aims       map[string]string                  `json:"throughput_aims"`
		Ratios     map[string]map[string]distribution `json:"ratios"`
		Medians    map[string]map[string]figure       `json:"medians"`
		Units      map[string]string                  `json:"units"`
		Programs   []traceProgram                     `json:"programs"`
		Rules      []tracedRule                       `json:"rules"`
		Agent      figure                             `json:"agent_cpu_share"`
		Share      figure                             `json:"load_cpu_share"`
		Run        *traceReport                       `json:"run"`
		Rounds     []traceRound                       `json:"rounds"`
	}{
		r.medians("throughput"), r.medians("rr"), r.medians("cpu"), aims, ratios, medians, traceUnits(),
		r.programs, r.rules, figure(r.agentShare()), figure(r.share()), r, r.rounds,
	}, "", "  ")
}

func traceUnits() map[string]string {
	units := map[string]string{}
	for _, m := range traceMeasures {
		units[m.name] = m.unit
	}
	return units
}

func (r *traceReport) write(dir string) error {
	r.print(os.Stdout)
	b, err := r.json()
	if err != nil {
		return fmt.Errorf("write figures: %w", err)
	}
	for name, content := range map[string][]byte{"bench-trace.json": append(b, '\n'), "bench-trace.svg": r.svg()} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return fmt.Errorf("write figures: %w", err)
		}
	}
	return nil
}

// svg draws the medians.
func (r *traceReport) svg() []byte {
	chart := plot.Chart{Title: "Tracing on, of off: medians of the rounds' ratios"}
	for _, m := range r.measures() {
		p := plot.Panel{Title: m.title}
		for _, a := range r.arms() {
			if a.name == armOff {
				continue
			}
			d := distributionOf(r.ratios(a.name, m))
			p.Bars = append(p.Bars, plot.Bar{Label: a.title, Note: d.String(), Parts: []float64{float64(d.Median)}})
		}
		chart.Panels = append(chart.Panels, p)
	}
	return chart.SVG()
}
