// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"slices"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

type report struct {
	Options options `json:"options"`
	harness.Run

	rounds []traceRound
	// Results of one run of each load before the rounds.
	programs []program
	rules    []tracedRule
	left     map[string]string // arms whose programs this kernel does not run, with the reason
}

// traceMeasure is a figure of a load by which arms are compared.
type traceMeasure struct {
	name, load  string
	title, unit string
	verb        string
	aim         func(traceArm) float64 // minimum ratio; nil: none
	figure      func(sample) float64
}

func sampleRate(s sample) float64 { return s.Rate }
func sampleCPU(s sample) float64  { return s.CPU }

// sampleGbit returns the throughput in Gbit/s of a load with messages of 64 KB.
func sampleGbit(s sample) float64 { return s.Rate * (64 << 10) * 8 / 1e9 }

// arms returns the arms that were run.
func (r *report) arms() []traceArm {
	return slices.DeleteFunc(slices.Clone(traceArms), func(a traceArm) bool { return !r.Options.includes(a) || r.left[a.name] != "" })
}

var measures = []traceMeasure{
	{name: "throughput", load: loadStream, title: "A stream of 64 KB messages", unit: "Gbit/s", verb: "%.1f", aim: func(a traceArm) float64 { return a.aim }, figure: sampleGbit},
	{name: "rr", load: loadRR, title: "Request and response of 1 KB each", unit: "per second", verb: "%.0f", aim: func(a traceArm) float64 { return a.rrAim }, figure: sampleRate},
	{name: "cpu", load: loadStream, title: "CPU time of the stream, both ends", unit: "µs per message", verb: "%.2f", figure: sampleCPU},
	{name: "rr_cpu", load: loadRR, title: "CPU time of request and response, both ends", unit: "µs per pair", verb: "%.2f", figure: sampleCPU},
}

// measures returns the measures of the loads that were run.
func (r *report) measures() []traceMeasure {
	return slices.DeleteFunc(slices.Clone(measures), func(m traceMeasure) bool { return len(r.figures(armOff, m)) == 0 })
}

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	p("\nBoth ends on one CPU; %d rounds, arms in random order, %v per load on a new connection; Linux %s, %d CPUs.\n",
		len(r.rounds), r.Options.Slice, r.Kernel, r.CPUs)
	p("Medians. Ratios to off are computed within each round: median [p25 .. p75], and the 95 %% confidence interval of the median.\n")
	for _, m := range r.measures() {
		p("\n%s\n", m.title)
		p("\t%s\tratio to off\t95 %% interval\taim\n", m.unit)
		for _, a := range r.arms() {
			p("%s\t"+m.verb, a.title, harness.SpreadOf(r.figures(a.name, m)).Median)
			if a.name == armOff {
				p("\t\t\t\n")
				continue
			}
			d := harness.DistributionOf(r.ratios(a.name, m))
			p("\t%v\t%.3f .. %.3f\t", d, d.Low, d.High)
			if aim := m.aimOf(a); aim > 0 {
				p("%.2f: %s", aim, d.Verdict(aim))
			}
			p("\n")
		}
	}
	p("\nOff, again: a second run without programs; its ratio shows the noise of the machine. On for others: every message of another cgroup\n")
	p("is traced. SO_TIMESTAMPING: no programs; the application requests timestamps for each message and reads them.\n")
	p("Empty program: the kernel calls it for each message, or it also marks each message: the kernel's own part of the cost.\n")
	p("fentry, kprobes: programs at tcp_sendmsg for the whole host.\n")
	for _, a := range traceArms {
		if why := r.left[a.name]; why != "" {
			p("Not run: %s: %s.\n", a.title, why)
		}
	}
	if len(r.programs) > 0 {
		r.printPrograms(p)
	}
	p("\nDuration %s. The ends used %.0f %% of their CPU (median); below 95 %%, the throughput is uncertain, but not the CPU time.", r.Took, 100*r.share())
	if len(r.rules) > 0 {
		p(" The agent used %.2f %% of another CPU.", 100*r.agentShare())
	}
	p("\n")
}

// printPrograms prints the programs of the run of each load before the rounds.
func (r *report) printPrograms(p harness.Printf) {
	p("\nPrograms that ran, from the kernel's BPF statistics, whose cost is included\n")
	p("\tload\tprogram\truns per message\tns per run\tns per message\n")
	for _, a := range r.arms() {
		if a.state != tX && a.state != rX {
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
	p("For rr, a message is a request with its response.\n")
	p("\nCounters of the agent for these runs\n")
	p("rule\tmessages traced\taccounted for\tacknowledged, all stages known\treceived messages traced\n")
	for _, x := range r.rules {
		p("%s\t%d\t%d\t%d\t%d\n", x.Rule, x.Sent, x.Accounted, x.Acked, x.Received)
	}
}

// leastRuns is the minimum number of runs per message of a program in the report. Programs with fewer runs run per
// connection.
const leastRuns = 0.005

func (r *report) ran(arm, load string) (ran []program) {
	for _, x := range r.programs {
		if x.Arm == arm && x.Load == load && x.Runs >= leastRuns {
			ran = append(ran, x)
		}
	}
	return ran
}

// tracedRatios contains the median ratios of the main arms.
type tracedRatios struct {
	Others  harness.Figure `json:"others"`
	Sampled harness.Figure `json:"sampled_100"`
	Every   harness.Figure `json:"every"`
	RX      harness.Figure `json:"rx"`
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	ratios := map[string]map[string]harness.Distribution{}
	medians := map[string]map[string]harness.Figure{}
	aims := map[string]map[string]string{}
	for _, m := range r.measures() {
		ratios[m.name], medians[m.name], aims[m.name] = map[string]harness.Distribution{}, map[string]harness.Figure{}, map[string]string{}
		for _, a := range r.arms() {
			medians[m.name][a.name] = harness.Figure(harness.SpreadOf(r.figures(a.name, m)).Median)
			if a.name == armOff {
				continue
			}
			d := harness.DistributionOf(r.ratios(a.name, m))
			ratios[m.name][a.name] = d
			if aim := m.aimOf(a); aim > 0 {
				aims[m.name][a.name] = fmt.Sprintf("%.2f: %s", aim, d.Verdict(aim))
			}
		}
	}
	return struct {
		Throughput tracedRatios                               `json:"throughput_ratio"`
		RR         tracedRatios                               `json:"rr_ratio"`
		CPU        tracedRatios                               `json:"cpu_ratio"`
		Aims       map[string]string                          `json:"throughput_aims"`
		RRAims     map[string]string                          `json:"rr_aims"`
		Ratios     map[string]map[string]harness.Distribution `json:"ratios"`
		Medians    map[string]map[string]harness.Figure       `json:"medians"`
		Units      map[string]string                          `json:"units"`
		Programs   []program                                  `json:"programs"`
		Rules      []tracedRule                               `json:"rules"`
		Left       map[string]string                          `json:"left_out"`
		Agent      harness.Figure                             `json:"agent_cpu_share"`
		Share      harness.Figure                             `json:"load_cpu_share"`
		Run        *report                                    `json:"run"`
		Rounds     []traceRound                               `json:"rounds"`
	}{
		r.medians("throughput"), r.medians("rr"), r.medians("cpu"), aims["throughput"], aims["rr"], ratios, medians, traceUnits(),
		r.programs, r.rules, r.left, harness.Figure(r.agentShare()), harness.Figure(r.share()), r, r.rounds,
	}
}

// aimOf returns the aim of an arm; 0 for none.
func (m traceMeasure) aimOf(a traceArm) float64 {
	if m.aim == nil {
		return 0
	}
	return m.aim(a)
}

// agentShare returns the mean CPU share of the agent.
func (r *report) agentShare() float64 {
	sum, n := 0.0, 0
	for _, a := range r.arms() {
		for _, m := range r.measures() {
			if a.state != tX && a.state != rX {
				continue
			}
			for _, round := range r.rounds {
				sum += round[a.name][m.load].Agent
				n++
			}
		}
	}
	return sum / max(float64(n), 1)
}

// share returns the median CPU share of both ends.
func (r *report) share() float64 {
	var v []float64
	for _, round := range r.rounds {
		for _, loads := range round {
			v = append(v, loads[loadStream].Share, loads[loadRR].Share)
		}
	}
	return min(1, harness.SpreadOf(v).Median) // the Go runtime also uses other CPUs
}

func (r *report) medians(measure string) tracedRatios {
	m := measures[slices.IndexFunc(measures, func(m traceMeasure) bool { return m.name == measure })]
	of := func(arm string) harness.Figure { return harness.DistributionOf(r.ratios(arm, m)).Median }
	return tracedRatios{of(armOthers), of(armSampled), of(armEvery), of(armRX)}
}

func traceUnits() map[string]string {
	units := map[string]string{}
	for _, m := range measures {
		units[m.name] = m.unit
	}
	return units
}

// Charts implements harness.Report.
func (r *report) Charts() map[string]chart.Chart { return map[string]chart.Chart{"": r.chart()} }

// chart draws the medians.
func (r *report) chart() chart.Chart {
	drawing := chart.Chart{Title: "Tracing: median ratio to off"}
	for _, m := range r.measures() {
		p := chart.Panel{Title: m.title}
		for _, a := range r.arms() {
			if a.name == armOff {
				continue
			}
			d := harness.DistributionOf(r.ratios(a.name, m))
			p.Bars = append(p.Bars, chart.Bar{Label: a.title, Note: d.String(), Parts: []float64{float64(d.Median)}})
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}

// ratios returns, by round, the ratio of an arm to the mean of the two arms without a program. For the second of these
// two, it returns the ratio to the first.
func (r *report) ratios(arm string, m traceMeasure) (v []float64) {
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

// figures returns a measure of an arm by round.
func (r *report) figures(arm string, m traceMeasure) (v []float64) {
	for _, round := range r.rounds {
		if s, ok := round[arm][m.load]; ok {
			v = append(v, m.figure(s))
		}
	}
	return v
}
